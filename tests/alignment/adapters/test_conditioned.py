"""A conditioned policy: one adapter for all preferences, whose folds are ordinary adapters."""

import copy
from dataclasses import replace

import pytest
import torch

from firm.alignment import AlignmentClient, RolloutConfig, copy_adapter, fill_adapter_
from firm.alignment.adapter_files import save_adapter
from firm.alignment.adapters import Conditioned, Lora, LoraSettings, adapt_
from firm.alignment.adapters.conditioned import ConditioningConfig, PreferenceStream, fold
from firm.alignment.policy import adapter_parameters, load_adapter_
from firm.alignment.rewards import Judges
from firm.alignment.sequences import Sequences, forward, response_logprobs, set_preferences
from firm.alignment.stacked.trainer import stacked_trainers
from firm.federation import LocalEngine, RandomStream, ServerState
from firm.federation.engines.stacked import StackedEngine
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FedAvgConfig, FirmConfig
from firm.federation.training import LocalTraining, local_training
from firm.gradients import gram_matrix
from firm.solvers import firm_weights
from tests.cabs import PROMPTS, TOKENS
from tests.sampling import generate
from tests.tokens import queries

PREFERENCE = ConditioningConfig(kind="preference")


@pytest.fixture
def make_conditioned(make_policy):
    """A tiny policy with random matrices B_j."""

    def make(num_objectives: int = 2, *, fresh: bool = False, **options):
        policy = make_policy(**options)
        adapt_(policy, Conditioned(Lora(LoraSettings()), num_objectives))
        generator = torch.Generator().manual_seed(2)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data = torch.zeros_like(drawn) if fresh else drawn
        return policy

    return make


@pytest.fixture
def folded(make_policy):
    """An ordinary policy with the adapter of a conditioned one at a preference."""

    def make(policy, preference):
        plain = make_policy()
        load_adapter_(
            adapter_parameters(plain), fold(copy_adapter(adapter_parameters(policy)), preference)
        )
        return plain

    return make


@pytest.mark.parametrize("num_objectives", [2, 3, 4])
def test_each_row_gets_the_ordinary_adapter_that_its_preference_folds_into(
    make_conditioned, folded, num_objectives
):
    policy = make_conditioned(num_objectives)
    preferences = torch.distributions.Dirichlet(torch.ones(num_objectives)).sample((3,))
    preferences[1] = torch.eye(num_objectives)[0]
    set_preferences(policy, preferences)
    with torch.no_grad():
        logits = forward(policy, TOKENS, TOKENS != 0).logits
        for row, preference in enumerate(preferences):
            own = TOKENS[row : row + 1]
            alone = forward(folded(policy, preference.tolist()), own, own != 0).logits
            torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 0.1  # the rows' own tokens aside, they differ


def test_without_preferences_and_at_equal_shares_it_is_the_ungated_adapter(
    make_conditioned, folded
):
    policy = make_conditioned(3)
    with torch.no_grad():
        without = forward(policy, TOKENS, TOKENS != 0).logits
        set_preferences(policy, torch.full((3, 3), 1 / 3))
        torch.testing.assert_close(forward(policy, TOKENS, TOKENS != 0).logits, without)
        plain = forward(folded(policy, [1, 1, 1]), TOKENS, TOKENS != 0).logits
        torch.testing.assert_close(plain, without, rtol=1e-4, atol=1e-4)
        set_preferences(policy, torch.tensor([[1.0, 0, 0]]).repeat(3, 1))
        with policy.disable_adapter():  # the reference has no preference
            base = forward(policy, TOKENS, TOKENS != 0).logits
        assert (base - without).abs().max() > 0.1
        torch.testing.assert_close(
            base, forward(_without_adapter(policy), TOKENS, TOKENS != 0).logits
        )


def _without_adapter(policy):
    """A copy whose adapter adds nothing."""
    plain = copy.deepcopy(policy)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    return plain


def test_replies_and_their_log_probabilities_are_those_of_the_folds(
    make_conditioned, folded, tokenizer
):
    policy, config = make_conditioned(), RolloutConfig(max_new_tokens=8, stop_strings=[])
    preferences = torch.tensor([[1.0, 0.0], [0.2, 0.8], [0.5, 0.5]])
    asked = queries(TOKENS, preferences=preferences)
    torch.manual_seed(0)
    ids, logprobs = generate(policy, asked, tokenizer=tokenizer, config=config, end_ids=[])
    sequences = Sequences(asked, ids, torch.full((3,), 8))
    with torch.no_grad():
        passed = response_logprobs(policy, sequences, config.temperature)
        torch.testing.assert_close(logprobs, passed, rtol=1e-4, atol=1e-4)
        reordered = sequences.rows(torch.tensor([2, 0, 1]))  # preferences go with their rows
        again = response_logprobs(policy, reordered, config.temperature)
        torch.testing.assert_close(again, passed[[2, 0, 1]], rtol=1e-4, atol=1e-4)
        for row, preference in enumerate(preferences.tolist()):
            alone = sequences.rows(slice(row, row + 1))
            plain = folded(policy, preference)
            own = response_logprobs(plain, alone, config.temperature)
            torch.testing.assert_close(passed[row : row + 1], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draw_per", ["prompt", "step"])
def test_preferences_are_on_the_simplex_and_as_often_at_its_corners_as_asked(draw_per):
    config = ConditioningConfig(kind="preference", corner_share=0.25, draw_per=draw_per)
    stream = PreferenceStream(config, RandomStream(0), 3)
    drawn = torch.cat([stream.draw(4) for _ in range(1000)])
    torch.testing.assert_close(drawn.sum(1), torch.ones(4000))
    assert (drawn >= 0).all()
    assert (drawn.amax(1) == 1).float().mean() == pytest.approx(0.25, abs=0.05)
    torch.testing.assert_close(drawn.mean(0), torch.full((3,), 1 / 3), rtol=0, atol=0.03)
    same = (drawn.view(1000, 4, 3) == drawn.view(1000, 4, 3)[:, :1]).all(2).all(1)
    assert same.all() if draw_per == "step" else not same.any()


def test_a_larger_concentration_stays_nearer_to_equal_shares():
    configs = [ConditioningConfig(concentration=value) for value in (0.5, 1, 4)]
    streams = [PreferenceStream(config, RandomStream(0), 2) for config in configs]
    spreads = [stream.draw(2000)[:, 0].std() for stream in streams]
    # of Beta(c, c): the square root of 1 / (4 (2 c + 1))
    torch.testing.assert_close(
        torch.stack(spreads), torch.tensor([8.0, 12, 36]).rsqrt(), rtol=0.05, atol=0
    )


def test_a_client_of_its_own_preferences_draws_between_them(make_client):
    client, trainer = make_client("abc", corners=[[2, 0, 0], [1, 1, 2]])
    client.load(copy_adapter(trainer.adapter_parameters))
    drawn = torch.cat([b.whole.rollouts.queries.preferences for b in client.batches(4)])
    # between (1, 0, 0) and (1/4, 1/4, 1/2)
    torch.testing.assert_close(drawn[:, 2], 2 * drawn[:, 1])
    torch.testing.assert_close(drawn.sum(1), torch.ones(len(drawn)))
    assert (drawn[:, 0] >= 0.25).all()
    assert drawn[:, 0].std() > 0.1


def client_of(
    trainer, name="client_0", prompts=PROMPTS, *, corners=None, cfg=PREFERENCE, **options
):
    """A client whose prompts have preferences."""
    stream = RandomStream(3, name, "preferences")
    preferences = cfg.preferences(stream, len(trainer.objectives), corners)
    return AlignmentClient(name, prompts, trainer, seed=3, preferences=preferences, **options)


@pytest.fixture
def make_client(make_trainer, make_conditioned, letter_count):
    """A client whose replies count letters."""

    def make(objectives="ab", *, policy=None, dropout=0.0, corners=None, **options):
        trainer = make_trainer(
            rewards={letter: letter_count(letter) for letter in objectives},
            estimator="critic_free",
            policy=policy or make_conditioned(len(objectives), fresh=True, dropout=dropout),
            **options,
        )
        return client_of(trainer, corners=corners), trainer

    return make


def test_a_group_of_replies_has_one_preference(make_client):
    client, trainer = make_client()
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    by_prompt = batch.whole.rollouts.queries.preferences.view(-1, 4, 2)
    assert (by_prompt == by_prompt[:, :1]).all()
    assert len({tuple(row) for row in by_prompt[:, 0].tolist()}) == len(by_prompt)


@pytest.fixture
def drawn_rows(make_client, make_conditioned):
    """A client, its batch, and autograd's gradient of the replies' weighted log-probabilities."""
    client, trainer = make_client(policy=make_conditioned(2), ratio="none")
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    rows = batch.whole
    set_preferences(trainer.policy_model, rows.rollouts.queries.preferences)
    logprobs = response_logprobs(trainer.policy_model, rows.rollouts, 0.8)
    mask = rows.rollouts.mask
    per_reply = (logprobs * mask).sum(1) / mask.sum()

    def gradient(coefficients):
        parameters = list(trainer.adapter_parameters.values())
        loss = -(coefficients * per_reply).sum()
        parts = torch.autograd.grad(loss, parameters, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    return client, trainer, rows, gradient


def test_the_gradient_is_that_of_autograd_through_the_gates(drawn_rows):
    client, trainer, rows, gradient = drawn_rows
    gradients = client.gradients(rows)
    assert gradients.preferences is None
    for j, advantages in enumerate(rows.advantages):
        weighted = 2 * rows.rollouts.queries.preferences[:, j] * advantages
        torch.testing.assert_close(gradients.jacobian[j], gradient(weighted), rtol=1e-3, atol=1e-5)
    names = list(trainer.adapter_parameters)
    sizes = [trainer.adapter_parameters[name].numel() for name in names]
    parts = dict(zip(names, gradients.jacobian[0].split(sizes), strict=True))
    assert all(part.abs().max() > 0 for name, part in parts.items() if "lora_B1" in name)


def test_by_preference_there_is_a_gradient_of_each_objective_at_each(drawn_rows):
    client, _, rows, gradient = drawn_rows
    gradients = client.gradients_by_preference(rows)
    own = rows.rollouts.queries.preferences
    assert len(gradients.preferences) == len({tuple(row) for row in own.tolist()}) == 4
    assert len(gradients.jacobian) == 4 * 2
    for k, preference in enumerate(gradients.preferences):
        is_at = (own == preference).all(1)
        assert is_at.sum() == 4  # a group
        for j, advantages in enumerate(rows.advantages):
            row = gradients.jacobian[2 * k + j]
            torch.testing.assert_close(row, gradient(advantages * is_at), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(gradients.losses, client.gradients(rows).losses)


def test_firm_solves_at_each_preference_of_a_minibatch(make_client, monkeypatch):
    client, trainer = make_client("abc", minibatch_size=8)
    steps = []
    monkeypatch.setattr(client, "step", lambda *arguments: steps.append(arguments))
    state = ServerState(copy_adapter(trainer.adapter_parameters), objectives=tuple("abc"), seed=3)
    cfg = FirmConfig(preference_strength=0.1)
    request = LocalTraining(
        adapter=state.adapter, objectives=tuple("abc"), round=1, **cfg.local_training("abc")
    )
    monkeypatch.setattr(client, "metrics", dict)
    update = local_training(client, request)
    assert len(steps) > 1
    for (gradients, weights), mean in zip(steps, update.metrics["weights"], strict=True):
        blocks = weights.view(-1, 3)
        rows = gradients.jacobian.unflatten(0, (-1, 3))
        for k, preference in enumerate(gradients.preferences):
            gram = gram_matrix(rows[k])
            expected = firm_weights(gram, preference=preference.tolist(), preference_strength=0.1)
            torch.testing.assert_close(blocks[k].double(), expected.double())
        assert mean == pytest.approx(blocks.mean(0).tolist())
    norms = [gradients.jacobian.unflatten(0, (-1, 3)).sum(0).norm(dim=1) for gradients, _ in steps]
    for whole, logged in zip(norms, update.metrics["gradient_norms"], strict=True):
        assert logged == pytest.approx(whole.tolist(), rel=1e-5)
    assert any(len(gradients.preferences) > 1 for gradients, _ in steps)
    parts = torch.zeros(3)
    for gradients, weights in steps:
        rows = weights[:, None].float() * gradients.jacobian  # [K M, d]
        parts += (rows @ rows.sum(0)).view(-1, 3).sum(0)
    shares = dict(zip("abc", (parts / parts.sum()).tolist(), strict=True))
    assert update.metrics["step_share"] == pytest.approx(shares, rel=1e-4)


def test_a_preference_is_solved_for_the_objectives_that_its_replies_have_scores_of(
    make_trainer, make_conditioned, letter_count, monkeypatch
):
    def partial(prompts, completions, **kwargs):
        values = letter_count("b")(prompts, completions)
        return [
            v if p.split()[1][0] in "abc" else None for p, v in zip(prompts, values, strict=True)
        ]

    rewards = {"a": letter_count("a"), "b": partial}
    trainer = make_trainer(rewards=rewards, estimator="critic_free", policy=make_conditioned(2))
    client = client_of(trainer)
    steps = []
    monkeypatch.setattr(client, "step", lambda *arguments: steps.append(arguments))
    monkeypatch.setattr(client, "metrics", dict)
    adapter = copy_adapter(trainer.adapter_parameters)
    cfg = FirmConfig(num_local_steps=3, preference_strength=0.1)
    fields = cfg.local_training(("a", "b"))
    local_training(client, LocalTraining(adapter=adapter, objectives=("a", "b"), round=1, **fields))
    served = []
    for gradients, weights in steps:
        rows = gradients.jacobian.unflatten(0, (-1, 2))
        served += gradients.served
        for own, block, row in zip(gradients.served, weights.view(-1, 2), rows, strict=True):
            if own == [0]:
                assert block.tolist() == [1, 0]
                assert not row[1].any()
    assert {tuple(own) for own in served} == {(0,), (0, 1)}
    assert any(len({tuple(own) for own in gradients.served}) > 1 for gradients, _ in steps)
    assert any(weights.view(-1, 2)[:, 1].any() for _, weights in steps)


def test_a_client_that_serves_some_objectives_solves_for_these(
    make_trainer, make_conditioned, letter_count
):
    rewards = {letter: letter_count(letter) for letter in "abc"}
    trainer = make_trainer(
        rewards=rewards,
        estimator="critic_free",
        policy=make_conditioned(3),  # away from the base model, so that its KL counts in rewards
    )
    own = Judges({letter: rewards[letter] for letter in "ac"})
    corners = [[0, 1, 0], [1, 0, 1]]  # of which the first asks for what it does not serve
    only_corners = replace(PREFERENCE, corner_share=1)
    client = client_of(trainer, judges=own, corners=corners, cfg=only_corners)
    start = copy_adapter(trainer.adapter_parameters)
    client.load(start)
    (batch,) = client.batches(1)
    gradients = client.gradients_by_preference(batch.whole)
    assert gradients.preferences.tolist() == [[0, 1, 0], [0.5, 0, 0.5]]
    rows = gradients.jacobian.unflatten(0, (2, 3))
    assert not rows[:, 1].any()
    assert rows[:, [0, 2]].any()

    state = ServerState(start, objectives=tuple("abc"), seed=3)
    state, metrics = firm_round(state, ["client_0"], LocalEngine([client]), FirmConfig())
    (row,) = metrics["clients"]
    assert all(weights[1] == 0 for weights in row["weights"])
    assert any(0 < sum(weights) < 1 for weights in row["weights"])  # nothing at the first corner
    assert any((state.adapter[name] != start[name]).any() for name in start)


@pytest.mark.parametrize(
    ("strategy", "cfg"), [(fedavg, FedAvgConfig()), (firm_round, FirmConfig())]
)
@pytest.mark.parametrize("max_rows", [1000, 10])
def test_stacked_clients_end_as_in_turn(make_client, strategy, cfg, max_rows):
    ends = []
    for engine in ("local", "stacked"):
        _, trainer = make_client("abc", dropout=0.1, micro_batch_size=3)
        new_trainer = stacked_trainers(trainer) if engine == "stacked" else lambda own=trainer: own
        names = ["client_0", "client_1", "client_2"]
        clients = [client_of(new_trainer(), name, PROMPTS[at:]) for at, name in enumerate(names)]
        options = {"max_rows": max_rows} if engine == "stacked" else {}
        runs = {"local": LocalEngine, "stacked": StackedEngine}[engine](clients, **options)
        start = copy_adapter(trainer.adapter_parameters)
        state = ServerState(start, objectives=("a", "b", "c"), seed=3)
        for _ in range(2):
            state, _ = strategy(state, names, runs, cfg)
        ends.append(state.adapter)
        moved = {name: (state.adapter[name] - start[name]).abs().max() for name in start}
        assert all(distance > 1e-4 for distance in moved.values())
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "cfg"), [(fedavg, FedAvgConfig()), (firm_round, FirmConfig())]
)
def test_the_order_of_two_objectives_decides_nothing(make_client, monkeypatch, strategy, cfg):
    ends = []
    own = PreferenceStream.draw
    for objectives in ("ab", "ba"):
        order = [0, 1] if objectives == "ab" else [1, 0]

        def drawn(*arguments, order=order):
            return own(*arguments)[:, order]

        monkeypatch.setattr(PreferenceStream, "draw", drawn)
        client, trainer = make_client(objectives)
        start = copy_adapter(trainer.adapter_parameters)
        state = ServerState(start, objectives=tuple(objectives), seed=3)
        engine = LocalEngine([client])
        for _ in range(2):
            state, _ = strategy(state, ["client_0"], engine, cfg)
        ends.append([fold(state.adapter, shares) for shares in ([0.8, 0.2], [0.2, 0.8])])
    for first, second in zip(ends[0], reversed(ends[1]), strict=True):
        for name, value in first.items():
            torch.testing.assert_close(value, second[name], rtol=0, atol=1e-5)
    assert any((ends[0][0][name] - ends[0][1][name]).abs().max() > 1e-3 for name in ends[0][0])


def test_a_client_draws_on_where_its_state_left_off(make_client):
    drawn = []
    for is_restored in (False, True):
        client, trainer = make_client()
        adapter = copy_adapter(trainer.adapter_parameters)
        client.load(adapter)
        _ = list(client.batches(1))
        if is_restored:
            state = client.state()
            client, _ = make_client()
            client.restore(state)
        client.load(adapter, 2)
        (batch,) = client.batches(1)
        drawn.append(batch.whole.rollouts.queries.preferences)
    assert torch.equal(*drawn)


def test_a_folder_has_the_adapter_at_equal_shares_and_folds_at_any(
    make_conditioned, make_policy, folded, tmp_path
):
    policy = make_conditioned(2)
    save_adapter(policy, tmp_path)
    for preference, expected in ((None, [1, 1]), ([3, 1], [0.75, 0.25])):
        plain = make_policy()
        fill_adapter_(plain, tmp_path, "base", preference=preference)
        reference = adapter_parameters(folded(policy, expected))
        for name, value in adapter_parameters(plain).items():
            torch.testing.assert_close(value, reference[name])


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        ([1, 1, 1], "conditioned on 2 objectives, got a preference"),
        ([0, 0], "not all zero"),
        ([-1, 2], "non-negative"),
        ([float("nan"), 1], "must be finite"),
    ],
)
def test_a_preference_that_cannot_be_folded_is_refused(make_conditioned, preference, message):
    adapter = copy_adapter(adapter_parameters(make_conditioned(2)))
    with pytest.raises(ValueError, match=message):
        fold(adapter, preference)


@pytest.mark.parametrize("change", ["missing", "short"])
def test_a_conditioned_adapter_without_a_layer_s_matrix_is_refused(make_conditioned, change):
    adapter = copy_adapter(adapter_parameters(make_conditioned(2)))
    name = next(name for name in adapter if "lora_B1" in name)
    if change == "missing":
        del adapter[name]
    else:
        adapter[name] = adapter[name][:1]
    with pytest.raises(ValueError, match="has no B_1 of its shape"):
        fold(adapter, [1, 1])


def test_an_estimator_that_compares_no_replies_is_refused(make_trainer, letter_count):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    with pytest.raises(ValueError, match="compares replies at the same preference"):
        client_of(make_trainer(rewards=rewards))


def test_an_adapter_of_one_trade_off_and_a_single_objective_are_refused(make_policy, tmp_path):
    policy = make_policy()
    save_adapter(policy, tmp_path)
    with pytest.raises(
        ValueError, match=r"has no conditioned\.safetensors, hence only one trade-off"
    ):
        fill_adapter_(policy, tmp_path, "base", preference=[1, 1])
    with pytest.raises(ValueError, match="must be none with a single objective"):
        Conditioned(Lora(LoraSettings()), 1)
