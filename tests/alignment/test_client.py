"""An alignment client in a federation: alone it is local training, identical ones are one."""

from typing import get_type_hints

import pytest
import torch

from firm.alignment import (
    AlignmentClient,
    Calibration,
    Judges,
    KLConfig,
    Prompt,
    copy_adapter,
    load_adapter_,
    ratio_alarm,
)
from firm.alignment.prompts import prompt_of
from firm.federation import LocalEngine, RandomStream, ServerState
from firm.federation.objective_training import ObjectiveTraining, objective_training
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.firm import firm_round
from firm.federation.strategies.fsmgda import fsmgda
from firm.federation.strategy_configs import FedAvgConfig, FedCmooConfig, FirmConfig, FsmgdaConfig
from firm.gradients import gram_matrix
from firm.solvers import firm_weights
from tests.cabs import PROMPTS

SEED = 11
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WITHOUT_LOSSES = [
    name
    for name, strategy in STRATEGIES.items()
    if not get_type_hints(strategy)["cfg"].reads_losses
]
"""Strategies that ask for no losses on a whole shard, which prompts have none of."""


@pytest.fixture(params=["ppo", "critic_free"])
def trainer(request, make_trainer, letter_count):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    return make_trainer(rewards=rewards, dropout=0.1, estimator=request.param)


def run(trainer, num_clients, cfg, *, rounds=2, strategy=firm_round, stream_name=None):
    start = copy_adapter(trainer.adapter_parameters)
    clients = [
        AlignmentClient(
            f"client_{i}", PROMPTS, trainer, seed=SEED, stream_name=stream_name or f"client_{i}"
        )
        for i in range(num_clients)
    ]
    engine = LocalEngine(clients)
    state = ServerState(start, objectives=trainer.objectives, seed=SEED)
    rows = []
    for _ in range(rounds):
        state, metrics = strategy(state, [c.name for c in clients], engine, cfg)
        rows.append(metrics)
    load_adapter_(trainer.adapter_parameters, start)
    return state.adapter, rows


def assert_equal_adapters(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_federation_of_one_client_equals_local_training(trainer):
    start = copy_adapter(trainer.adapter_parameters)
    federated, _ = run(trainer, 1, FirmConfig(num_local_steps=2), rounds=1)
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(start)
    num_steps = 0
    for batch in client.batches(2):
        for minibatch in batch.minibatches():
            gradients = client.gradients(minibatch)
            client.step(gradients, firm_weights(gram_matrix(gradients.jacobian)))
            num_steps += 1
    assert num_steps == 2 * 3 * 2  # local steps, epochs, minibatches
    assert_equal_adapters(federated, client.adapter())
    assert not torch.equal(
        torch.cat([t.flatten() for t in start.values()]),
        torch.cat([t.flatten() for t in federated.values()]),
    )


@pytest.mark.parametrize("num_clients", [2, 4])
def test_identical_clients_with_identical_streams_equal_one(trainer, num_clients):
    one, _ = run(trainer, 1, FirmConfig(), stream_name="twin")
    many, _ = run(trainer, num_clients, FirmConfig(), stream_name="twin")
    assert_equal_adapters(one, many)


def test_clients_with_their_own_streams_differ(trainer):
    _, rows = run(trainer, 2, FirmConfig(), rounds=1)
    assert rows[0]["round"]["drift"] > 0.1
    first, second = (row["weights"] for row in rows[0]["clients"])
    assert first != second


def test_an_infinite_beta_weighs_all_objectives_alike(trainer):
    by_beta, rows = run(trainer, 2, FirmConfig(beta=1e12))
    for row in rows[0]["clients"]:
        for weights in row["weights"]:
            assert weights == pytest.approx([0.5, 0.5], abs=1e-9)
        assert row["beta_effect"] == pytest.approx([1.0] * len(row["beta_effect"]), abs=1e-6)
    fixed, _ = run(trainer, 2, FedAvgConfig(), strategy=fedavg)
    for name in fixed:
        torch.testing.assert_close(by_beta[name], fixed[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_local_steps", [1, 2])
def test_the_learning_rates_schedule_follows_the_round(trainer, monkeypatch, num_local_steps):
    rates, step = [], trainer.step

    def recorded(learner, gradients, weights):
        optimizers = [learner.actor_optimizer]
        if trainer.config.name == "ppo":
            optimizers.append(learner.estimator.critic_optimizer)
        rates.append({optimizer.param_groups[0]["lr"] for optimizer in optimizers})
        step(learner, gradients, weights)

    monkeypatch.setattr(trainer, "step", recorded)
    cfg = FirmConfig(num_local_steps=num_local_steps, clients_per_round=1)
    _, rows = run(trainer, 3, cfg, rounds=3)
    taking_part = [row["client"] for metrics in rows for row in metrics["clients"]]
    assert len(set(taking_part)) > 1
    count = 3 * num_local_steps  # of the run; linear decay, each local step has 6 minibatches
    expected = [3e-3 * (count - done) / count for done in range(count) for _ in range(6)]
    assert [rate for each in rates for rate in each] == pytest.approx(expected)


def test_weights_per_batch_are_solved_once_per_local_step(trainer):
    _, rows = run(trainer, 1, FirmConfig(solve_per="batch", num_local_steps=2), rounds=1)
    assert len(rows[0]["clients"][0]["weights"]) == 2


def test_weights_that_are_known_take_one_backward_pass_per_minibatch(trainer, monkeypatch):
    counts, gradients = [], trainer.gradients

    def counted(*args, **options):
        counts.append(0)
        return gradients(*args, **options)

    def count_backward_pass(*_):
        counts[-1] += 1

    monkeypatch.setattr(trainer, "gradients", counted)
    head = trainer.policy_model.get_base_model().lm_head
    head.register_full_backward_pre_hook(count_backward_pass)
    run(trainer, 1, FirmConfig(solve_per="batch"), rounds=1)
    assert counts == [2] + 6 * [1]  # PPO's clip takes two for a Jacobian of critic_free, too


@pytest.mark.parametrize("aggregation", ["normalize_then_sum", "sum_then_normalize"])
def test_known_weights_weigh_the_rewards_of_an_estimator_that_sums_them(
    make_trainer, letter_count, aggregation
):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    trainer = make_trainer(rewards=rewards, estimator="critic_free", aggregation=aggregation)
    start = copy_adapter(trainer.adapter_parameters)
    federated, rows = run(trainer, 1, FedAvgConfig(weights=(0.8, 0.2)), rounds=1, strategy=fedavg)
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(start)
    for batch in client.batches(1):
        for minibatch in batch.minibatches():
            row = client.weighted_gradients(minibatch, torch.tensor([0.8, 0.2]).double())
            client.step(row, torch.ones(1))
    assert_equal_adapters(federated, client.adapter())
    assert "step_share" not in rows[0]["clients"][0]  # one gradient has no shares


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}, {"ratio": "ppo"}])
def test_the_gradient_of_a_weighted_sum_is_the_mixture_of_the_jacobians_rows(
    make_trainer, letter_count, estimator, options
):
    if estimator == "ppo" and "ratio" in options:
        options = {"critic": "network"}
    rewards = {letter: letter_count(letter) for letter in "abc"}
    trainer = make_trainer(rewards=rewards, dropout=0.1, estimator=estimator, **options)
    judges = Judges({"a": letter_count("a"), "c": letter_count("c")})
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED, judges=judges)
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    for minibatch in batch.minibatches():  # the ratio is 1 in the first one alone
        streams = client._stream_states()  # of dropout
        both = client.gradients(minibatch)
        client._restore_streams(streams)
        row = client.weighted_gradients(minibatch, torch.tensor([0.2, 0.5, 0.3]).double())
        expected = (torch.tensor([0.2, 0.0, 0.3]) @ both.jacobian)[None]
        torch.testing.assert_close(row.jacobian, expected, rtol=1e-4, atol=1e-6)
        assert expected.norm() > 1e-3
        assert torch.equal(row.losses, both.losses)
        client.step(row, torch.ones(1))


def test_in_a_local_epoch_a_client_replies_to_each_of_its_prompts_once(trainer):
    size = trainer.config.num_prompts
    texts = [f"\n\nHuman: {i} cab\n\nAssistant:" for i in range(2 * size)]
    prompts = [Prompt(text, "") for text in texts]
    client = AlignmentClient("client_0", prompts, trainer, seed=SEED)
    drawn, draw = [], client._source._prompts.draw

    def recorded(batch_size):
        drawn.extend(batch := draw(batch_size))
        return batch

    client._source._prompts.draw = recorded
    state = ServerState(copy_adapter(trainer.adapter_parameters), objectives=("a", "b"), seed=SEED)
    _, rows = firm_round(state, ["client_0"], LocalEngine([client]), FirmConfig(num_local_epochs=1))
    assert sorted(prompt.text for prompt in drawn) == sorted(texts)
    assert rows["clients"][0]["num_steps"] == client.batches_per_epoch == 2


def test_each_local_step_draws_fresh_prompts_and_replies_of_the_policy_as_it_is(trainer):
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(copy_adapter(trainer.adapter_parameters))
    texts = []
    for batch in client.batches(2):
        experience = batch.whole
        trainer.policy_model.eval()
        logprobs = trainer.gradients(trainer.learner, experience).losses
        assert logprobs.isfinite().all()
        texts.append(experience.rollouts.query_responses)
        for minibatch in batch.minibatches():
            client.step(client.gradients(minibatch), torch.tensor([0.5, 0.5]))
    assert texts[0].shape != texts[1].shape or not torch.equal(*texts)


def test_a_restored_client_goes_on_as_if_it_had_not_stopped(trainer):
    start = copy_adapter(trainer.adapter_parameters)

    def train_on(client):
        client.load(start)
        for batch in client.batches(1):
            for minibatch in batch.minibatches():
                client.step(client.gradients(minibatch), torch.tensor([0.5, 0.5]))
        return client.adapter()

    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    train_on(client)
    state = client.state()
    expected = train_on(client)
    other = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED + 1)
    other.restore(state)
    assert_equal_adapters(train_on(other), expected)


def test_metrics_name_every_objective_and_stage(trainer):
    _, rows = run(trainer, 1, FirmConfig(), rounds=1)
    row = rows[0]["clients"][0]
    is_ppo = trainer.config.name == "ppo"
    own = "value_loss" if is_ppo else "zero_variance_share"
    for key in ("scores", "scores_std", "rewards", "policy_loss", own):
        assert row[key].keys() == {"a", "b"}
    stages = {"rollout", "reward", "forward", "backward", "gram", "solve", "step"}
    assert ("critic" in row["seconds"]) == ("values" in row["seconds"]) == is_ppo
    assert ("value_loss" in row) == is_ppo
    assert stages <= row["seconds"].keys()
    assert 0 <= row["clip_fraction"] <= 1
    assert row["entropy"] > 0
    assert row["kl"] == pytest.approx(row["kl"])
    assert 1 <= row["response_length"] <= 10
    assert row["rewards"] == {
        name: pytest.approx(raw - 0.5 * (1 - row["end_share"]), abs=1e-6)
        for name, raw in row["scores"].items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_log_probabilities_is_measured_and_stays_out_of_the_kl(
    make_trainer, make_policy, letter_count, dtype
):
    policy = make_policy(dtype=dtype, fresh=True)
    trainer = make_trainer(rewards={letter: letter_count(letter) for letter in "ab"}, policy=policy)
    _, rows = run(trainer, 1, FirmConfig())
    first, second = (row["clients"][0] for row in rows)
    per_token, per_reply = first["logprob_mismatch"], first["logprob_mismatch_per_reply"]
    assert per_token < per_reply < 10 * per_token  # replies have up to 10 tokens
    if dtype == torch.float32:
        assert 0 < per_reply < 1e-5
        assert abs(first["kl"]) < 1e-5
        assert "logprob_mismatch" not in second  # it takes another forward pass
    else:
        assert per_reply > 1e-3
        assert first["kl"] == 0.0
        assert second["logprob_mismatch"] > 1e-4


def test_the_ratio_of_an_unchanged_policy_is_measured_in_the_first_round(
    make_trainer, make_policy, letter_count
):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    policy = make_policy(fresh=True)
    _, rows = run(make_trainer(rewards=rewards, policy=policy), 2, FirmConfig())
    for row in rows[0]["clients"]:
        assert row["first_log_ratio"] < 1e-5
        assert row["logprob_mismatch"] < 1e-5
    assert "first_log_ratio" not in rows[1]["clients"][0]

    def noisy(module, inputs, output):
        is_update = torch.is_grad_enabled()
        return output + 0.5 * torch.randn_like(output) if is_update else output

    policy.get_output_embeddings().register_forward_hook(noisy)
    _, rows = run(make_trainer(rewards=rewards, policy=policy), 2, FirmConfig())
    for row in rows[0]["clients"]:
        assert row["first_log_ratio"] > 0.1
        assert row["logprob_mismatch"] < 1e-5
    (row, *_) = rows[0]["clients"]
    alarm = ratio_alarm(
        [{"kind": "client", "round": 1, **row}],
        dtype="float32", temperature=1.0, key="first_log_ratio",
    )  # fmt: skip
    assert alarm is not None
    assert "The model's outputs differ between training and evaluation mode" in alarm


def test_a_reward_that_is_not_a_number_fails_its_client_and_names_the_objective(
    make_trainer, letter_count
):
    trainer = make_trainer(
        rewards={
            "a": letter_count("a"),
            "broken": lambda prompts, completions, **_: [float("nan")] * len(prompts),
        }
    )
    with pytest.raises(RuntimeError, match=r"client_0: ValueError: reward 'broken' returned nan"):
        run(trainer, 1, FirmConfig(), rounds=1)


def test_streams_of_two_purposes_do_not_share_numbers():
    with RandomStream(SEED, "client_0", "rollout"):
        first = torch.rand(3)
    with RandomStream(SEED, "client_0", "update"):
        second = torch.rand(3)
    assert not torch.equal(first, second)


class Counting:
    """A reward that cuts every fourth of its inputs, as a sequence classifier may."""

    def __call__(self, prompts, completions, **kwargs):
        self.truncated = [index % 4 == 0 for index in range(len(completions))]
        return [float(len(text)) for text in completions]


def test_reward_diagnostics_are_logged_per_round(make_trainer, letter_count):
    constant = lambda completions, **kwargs: [1.0] * len(completions)  # noqa: E731
    trainer = make_trainer(rewards={"a": Counting(), "b": letter_count("b"), "c": constant})
    start = ServerState(
        copy_adapter(trainer.adapter_parameters), objectives=("a", "b", "c"), seed=1
    )
    engine = LocalEngine([AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)])
    state, first = firm_round(start, ["client_0"], engine, FirmConfig())
    _, second = firm_round(state, ["client_0"], engine, FirmConfig())
    for metrics in (first, second):
        row = metrics["clients"][0]
        assert row["truncated_share"] == {"a": 0.25}  # of this round, not of all so far
        assert row["score_correlation"].keys() == {"a-b", "a-c", "b-c"}
        assert -1 <= row["score_correlation"]["a-b"] <= 1
        assert row["score_correlation"]["a-c"] is row["score_length_correlation"]["c"] is None
        assert row["score_length_correlation"]["a"] > 0.5  # one token is one letter


def applies_to(letter, reward):
    """A reward that applies to prompts whose first letter is the given one alone."""

    def partial(prompts, completions, **kwargs):
        values = reward(prompts, completions)
        return [
            v if p.split()[1][0] in letter else None for p, v in zip(prompts, values, strict=True)
        ]

    return partial


def test_objectives_without_a_score_in_a_minibatch_take_no_part_in_it(make_trainer, letter_count):
    rewards = {"a": letter_count("a"), "b": applies_to("ab", letter_count("b"))}
    trainer = make_trainer(rewards=rewards, estimator="critic_free")
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(copy_adapter(trainer.adapter_parameters))
    served = []
    for batch in client.batches(4):
        for minibatch in batch.minibatches():
            gradients = client.gradients(minibatch)
            has_score = not minibatch.scores[1].isnan().all()
            served.append(has_score)
            assert gradients.served == ([[0, 1]] if has_score else [[0]])
            assert bool(gradients.jacobian[1].norm() > 0) == has_score
            assert gradients.jacobian[0].norm() > 0
            row = client.weighted_gradients(minibatch, torch.tensor([0.5, 0.5]))
            torch.testing.assert_close(row.jacobian[0], gradients.jacobian.sum(0) / 2)
            client.step(gradients, torch.tensor([0.5, 0.5]))
    assert 0 < sum(served) < len(served)


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
@pytest.mark.parametrize("strategy", [firm_round, fedavg, fsmgda, fedcmoo])
def test_a_federation_trains_where_some_rewards_never_apply(
    make_trainer, letter_count, estimator, strategy
):
    rewards = {"a": applies_to("a", letter_count("a")), "b": applies_to("", letter_count("b"))}
    trainer = make_trainer(rewards=rewards, estimator=estimator, batch_size=8)
    cfg = get_type_hints(strategy)["cfg"](num_local_steps=2)
    adapter, rows = run(trainer, 2, cfg, strategy=strategy)
    assert all(values.isfinite().all() for values in adapter.values())
    for row in rows[0]["clients"]:
        for own in row.get("by_objective", {"": row}).values():
            assert own["scores"]["b"] is own["scores_std"]["b"] is own["rewards"]["b"] is None
    if strategy is firm_round:  # an objective without losses would get all the weight
        solved = [weights for row in rows[0]["clients"] for weights in row["weights"]]
        assert {(1.0, 0.0)} <= {tuple(weights) for weights in solved} <= {(0.0, 0.0), (1.0, 0.0)}


def test_logged_means_are_those_of_replies_with_a_score(make_trainer, letter_count):
    rewards = {"a": applies_to("abcd", letter_count("a")), "b": lambda completions, **_: [1.0] * 16}
    trainer = make_trainer(rewards=rewards, missing_end_penalty=0.0)
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    own = batch.whole.scores[0]
    assert own.isnan().any()
    minibatch = next(iter(batch.minibatches()))
    client.step(client.gradients(minibatch), torch.tensor([0.5, 0.5]))
    expected = pytest.approx(own[~own.isnan()].mean().item())
    assert client.metrics()["scores"]["a"] == client.metrics()["rewards"]["a"] == expected


def test_each_training_of_an_objective_counts_what_its_own_batches_had_cut(
    make_trainer, letter_count
):
    class CutsAtFirst:
        calls = 0

        def __call__(self, prompts, completions, **kwargs):
            self.calls += 1
            self.truncated = [self.calls == 1] * len(completions)
            return [float(len(text)) for text in completions]

    others = {letter: letter_count(letter) for letter in "bc"}
    trainer = make_trainer(rewards={"a": CutsAtFirst(), **others})
    adapter = copy_adapter(trainer.adapter_parameters)
    engine = LocalEngine([AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)])
    state = ServerState(adapter, objectives=("a", "b", "c"), seed=1)
    _, row = fsmgda(state, ["client_0"], engine, FsmgdaConfig(num_local_steps=2))
    trainings = row["clients"][0]["by_objective"].values()  # all have the first batch in common
    assert [each["truncated_share"] for each in trainings] == [{"a": 0.5}] * 3


# --- Judges of a client's own ---------------------------------------------------------------------


def test_a_client_with_judges_of_its_own_learns_from_them_and_leaves_the_others_theirs(
    trainer, letter_count
):
    start = copy_adapter(trainer.adapter_parameters)
    # the second objective is judged otherwise, and both on scales of this client's own
    judges = Judges(
        {"a": letter_count("a"), "b": letter_count("e")},
        {"a": Calibration("none"), "b": Calibration("minmax", low=0.0, high=0.5)},
    )
    clients = [
        AlignmentClient(name, PROMPTS, trainer, seed=SEED, judges=own, stream_name="twin")
        for name, own in (("other", judges), ("usual", None))
    ]
    batches = []
    for client in clients:
        client.load(start)
        (batch,) = client.batches(1)
        batches.append(batch.experience)
    other, usual = batches
    assert other.rollouts.completions == usual.rollouts.completions
    assert torch.equal(other.scores[0], usual.scores[0])
    assert not torch.equal(other.scores[1], usual.scores[1])
    penalty = 0.5 * (~other.rollouts.ended)
    expected = (other.scores[1] / 0.5).clamp(0, 1) - penalty
    assert torch.allclose(other.rewards[1], expected)
    assert torch.equal(usual.rewards, usual.scores - penalty)


def test_a_client_without_a_judge_serves_the_other_objectives_alone(trainer, letter_count):
    start = copy_adapter(trainer.adapter_parameters)
    judges = Judges({"b": letter_count("b")})
    client = AlignmentClient("partial", PROMPTS, trainer, seed=SEED, judges=judges)
    assert client.served == (1,)
    client.load(start)
    (batch,) = client.batches(1)
    gradients = client.gradients(batch.whole)
    assert not gradients.jacobian[0].any()
    assert gradients.jacobian[1].any()

    state = ServerState(start, objectives=("a", "b"), seed=SEED)
    _, rows = firm_round(state, ["partial"], LocalEngine([client]), FirmConfig())
    (row,) = rows["clients"]
    assert row["weights"] == [[0.0, 1.0]] * 6
    assert row["rewards"]["a"] is None
    assert row["rewards"]["b"] is not None
    with pytest.raises(ValueError, match="nobody has no reward function of a, b"):
        AlignmentClient("nobody", PROMPTS, trainer, seed=SEED, judges=Judges({}))


# --- Strategies that ask twice --------------------------------------------------------------------

FEDCMOO_A = FedCmooConfig(communication="one_way", compressor="none", solver="exact")


@pytest.mark.parametrize(("strategy", "cfg"), [(fedcmoo, FEDCMOO_A), (fsmgda, FsmgdaConfig())])
def test_a_batch_that_a_round_needs_twice_is_sampled_once_with_the_same_outcome(
    trainer, monkeypatch, strategy, cfg
):
    calls = []
    sample = trainer.sample
    monkeypatch.setattr(
        trainer, "sample", lambda ids, **options: calls.append(1) or sample(ids, **options)
    )
    kept, rows = run(trainer, 2, cfg, strategy=strategy)
    assert len(calls) == 2 * 2  # clients, rounds
    assert all(row["num_steps"] > 0 for row in rows[-1]["clients"])

    def forgetful(self, num_steps):
        self._first = None
        return batches(self, num_steps)

    batches = AlignmentClient.batches
    monkeypatch.setattr(AlignmentClient, "batches", forgetful)
    again, _ = run(trainer, 2, cfg, strategy=strategy)
    assert len(calls) == 4 + 2 * 4
    assert_equal_adapters(kept, again)


@pytest.mark.parametrize("name", WITHOUT_LOSSES)
def test_the_order_of_the_objectives_does_not_matter(
    make_trainer, letter_count, exact_config, name
):
    cfg, ends = exact_config(name, num_local_steps=2 if name == "fsmgda" else 1), []
    for objectives in ("abc", "cab"):
        rewards = {name: letter_count(name) for name in objectives}
        trainer = make_trainer(rewards=rewards, dropout=0.1, kl=KLConfig(horizon=100))
        ends.append(run(trainer, 2, cfg, strategy=STRATEGIES[name])[0])
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-5)


def test_an_objective_that_is_trained_by_itself_does_not_notice_the_others(
    make_trainer, letter_count
):
    ends = []
    for other in ("b", "c"):
        trainer = make_trainer(rewards={"a": letter_count("a"), "other": letter_count(other)})
        client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
        request = ObjectiveTraining(
            round=1,
            objectives=trainer.objectives,
            adapter=copy_adapter(trainer.adapter_parameters),
            accepted={},
            num_local_steps=2,
        )
        ends.append([objective_training(client, request).updates for _ in range(2)])
    for one, another in zip(*ends, strict=True):
        assert_equal_adapters(one["a"], another["a"])
    assert not torch.equal(
        *(torch.cat([p.flatten() for p in e[0]["other"].values()]) for e in ends)
    )


def test_a_batch_is_not_kept_for_another_adapter(trainer, monkeypatch):
    calls = []
    sample = trainer.sample
    monkeypatch.setattr(
        trainer, "sample", lambda ids, **options: calls.append(1) or sample(ids, **options)
    )
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    start, state = copy_adapter(trainer.adapter_parameters), client.state()
    moved = {name: parameter + 0.1 for name, parameter in start.items()}
    for adapter in (start, start, moved, moved, start):
        client.restore(state)
        client.load(adapter)
        client.keep_first_batch()
        list(client.batches(1))
    assert len(calls) == 3


def test_a_batch_is_not_kept_once_all_objectives_are_trained_on(trainer):
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(copy_adapter(trainer.adapter_parameters))
    client.keep_first_batch()
    (batch,) = client.batches(1)
    assert client._first.batch is batch
    client.step(client.gradients(batch.whole), torch.tensor([0.5, 0.5]))
    assert client._first is None


def test_a_batch_that_no_later_task_asks_for_is_not_kept(trainer):
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    state = client.state()
    client.load(copy_adapter(trainer.adapter_parameters))
    list(client.batches(1))
    assert client._first is None
    client.keep_first_batch()
    client.restore(state)  # the next task starts
    client.load(copy_adapter(trainer.adapter_parameters))
    list(client.batches(1))
    assert client._first is None


def test_the_servers_exact_weights_are_uniform_under_a_large_beta(trainer):
    free, rows = run(trainer, 2, FEDCMOO_A, strategy=fedcmoo, rounds=1)
    tied, tied_rows = run(
        trainer,
        2,
        FedCmooConfig(communication="one_way", compressor="none", solver="exact", beta=1e12),
        strategy=fedcmoo,
        rounds=1,
    )
    fixed, _ = run(trainer, 2, FedAvgConfig(), strategy=fedavg, rounds=1)
    assert rows[0]["round"]["weights"] != {"a": 0.5, "b": 0.5}
    assert tied_rows[0]["round"]["weights"]["a"] == pytest.approx(0.5, abs=1e-9)
    for name, parameter in tied.items():
        assert torch.allclose(parameter, fixed[name], atol=1e-6)
    assert any(not torch.equal(free[name], fixed[name]) for name in free)


@pytest.mark.parametrize("scale", ["by_objective", "shared"])
def test_advantages_of_a_batch_are_scaled_as_the_configuration_says(
    make_trainer, letter_count, scale
):
    rewards = {"a": letter_count("a"), "few": lambda **k: [v / 9 for v in letter_count("b")(**k)]}
    trainer = make_trainer(
        rewards=rewards,
        advantage_scale=scale,
        missing_end_penalty=0.0,
        kl=KLConfig(controller="fixed", coefficient=0.0),
    )
    client = AlignmentClient("client_0", PROMPTS, trainer, seed=SEED)
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    mask = batch.experience.rollouts.mask
    first, second = (row[mask].std().item() for row in batch.experience.advantages)
    if scale == "shared":
        assert first > 3 * second
        assert (first**2 + second**2) / 2 == pytest.approx(1, rel=1e-3)
    else:
        assert (first, second) == pytest.approx((1, 1), rel=1e-3)
    assert not batch.experience.advantages[:, ~mask].any()
    judges = Judges({"few": rewards["few"]})
    client = AlignmentClient("partial", PROMPTS, trainer, seed=SEED, judges=judges)
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    mask = batch.experience.rollouts.mask
    assert batch.experience.advantages[1][mask].std().item() == pytest.approx(1, rel=1e-3)
    assert batch.experience.is_judged.any(1).tolist() == [False, True]


def test_a_client_that_met_a_bad_prompt_goes_on_with_the_next_batch(trainer):
    """The reward function raises on one prompt of the second round, whatever is drawn with it."""
    prompts = [prompt_of(f"\n\nHuman: {a}{b} cab\n\nAssistant:") for a in "abcde" for b in LETTERS]
    client = AlignmentClient("client_0", prompts, trainer, seed=SEED)
    drawn, begin_scoring = [], trainer.begin_scoring

    def fussy(sampled, *judges, **options):
        drawn.append(texts := sampled.queries.prompts)
        if len(drawn) == 2 or (len(drawn) > 2 and drawn[1][0] in texts):
            raise ValueError("cannot score this prompt")
        return begin_scoring(sampled, *judges, **options)

    trainer.begin_scoring = fussy
    others = [prompt_of(prompt.text.replace("cab", "bac")) for prompt in PROMPTS]
    other = AlignmentClient("other", others, trainer, seed=SEED)
    engine, names = LocalEngine([client, other]), ["client_0"]
    state = ServerState(copy_adapter(trainer.adapter_parameters), objectives=("a", "b"), seed=SEED)
    state, _ = firm_round(state, names, engine, FirmConfig())
    state, rows = firm_round(state, [*names, "other"], engine, FirmConfig())
    assert [failure["client"] for failure in rows["round"]["failures"]] == names
    state, rows = firm_round(state, names, engine, FirmConfig())
    assert rows["round"]["failures"] == []
    batches = [texts for texts in drawn if texts is not drawn[2]]  # without the other client's
    assert len(batches) == 3
    assert not set(batches[1]) & set(batches[2])  # of one pass over the shard
