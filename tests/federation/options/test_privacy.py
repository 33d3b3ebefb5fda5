"""Privacy of clients: what leaves them is clipped and noised, and nothing else leaves."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.federation import Failure, LocalEngine, Reply, ServerState, Update
from firm.federation.aggregation import update_length
from firm.federation.options.accounting import gaussian_epsilon
from firm.federation.options.noise import (
    add_noise,
    clip_delta,
    gaussian,
    noise_source,
    privatize,
    statistics_radius,
)
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.robust import RobustConfig
from firm.federation.serialization import pack
from firm.federation.server import accept
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy import StrategyConfig
from firm.federation.strategy_configs import (
    FedAvgConfig,
    FedCmooConfig,
    FedCmooPrefConfig,
    FirmConfig,
    FsmgdaConfig,
    QFedAvgConfig,
)
from firm.federation.training import LocalTraining

SEEDED = PrivacyConfig(clip_norm=0.05, noise_multiplier=1.0, noise_seed=3)
STRATEGIES = {"firm": (firm_round, FirmConfig), "fedavg": (fedavg, FedAvgConfig)}


# --- clipping -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    offset=st.floats(0.0, 100.0),
    spread=st.floats(1e-3, 1e3),
    clip_norm=st.floats(1e-4, 1e3),
)
def test_no_delta_is_longer_than_the_limit_and_a_shorter_one_stays_to_the_last_bit(
    seed, dtype, offset, spread, clip_norm
):
    generator = torch.Generator().manual_seed(seed)

    def adapter(scale, shift):
        shapes = {"first": (5, 3), "second": (7,)}
        return {
            name: (shift + scale * torch.randn(shape, generator=generator)).to(dtype)
            for name, shape in shapes.items()
        }

    start, end = adapter(1.0, offset), adapter(spread, offset)
    sent = clip_delta(end, start, clip_norm)
    assert update_length(start, sent) <= clip_norm
    if update_length(start, end) <= clip_norm:
        assert all(torch.equal(sent[name], end[name]) for name in end)
    for name in start:  # never against its own direction, never further than it came
        moved, wanted = (x[name].double() - start[name].double() for x in (sent, end))
        assert (moved * wanted >= 0).all()
        assert (moved.abs() <= wanted.abs()).all()


def test_a_long_delta_is_scaled_as_one_vector():
    start = {"first": torch.zeros(1), "second": torch.ones(1)}
    end = {"first": torch.tensor([3.0]), "second": torch.tensor([5.0])}  # a delta of (3, 4)
    sent = clip_delta(end, start, 0.5)
    assert sent["first"].item() == pytest.approx(0.3, rel=1e-6)
    assert sent["second"].item() == pytest.approx(1.4, rel=1e-6)


NANS = [("a", (1,)), ("b", ())]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_of_a_delta_that_is_not_finite_leaves_its_client(value, new_client, start):
    with pytest.raises(ValueError, match=r"norm is (nan|inf)"):
        clip_delta({name: v + value for name, v in start.adapter.items()}, start.adapter, 1.0)
    engine = LocalEngine([new_client(n, diverges_in=d, num_minibatches=1) for n, d in NANS])
    _, rows = firm_round(start, ["a", "b"], engine, FirmConfig(privacy=SEEDED))
    assert rows["round"]["clients"] == ["b"]
    assert "norm is nan" in rows["round"]["failures"][0]["reason"]


def test_the_server_refuses_a_delta_that_was_not_clipped(start):
    def reply(name, shift):
        adapter = {key: value + shift for key, value in start.adapter.items()}
        return Reply(name, Update(name, adapter, 1, {"num_steps": 1}), 100, 70)

    good, bad = reply("a", 0.02), reply("b", 0.2)
    cfg = FirmConfig(privacy=replace(SEEDED, clip_norm=0.1))
    request = LocalTraining(
        round=1,
        objectives=start.objectives,
        adapter=start.adapter,
        **cfg.local_training(start.objectives),
    )
    kept, failures = accept(request, [good, bad], [], cfg=cfg)
    assert kept == [good]
    reason = "its answer is refused: the update has norm 0.3464, above privacy.clip_norm 0.1"
    assert failures == [Failure("b", reason, 100, 70, is_refused=True)]
    # noise that the client added may be of any length
    assert replace(SEEDED, at="client").received(bad.content, request) is bad.content


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 5])
def test_noise_is_standard_normal(seed):
    noise = gaussian((400, 500), noise_source(seed, "test"))
    assert noise.shape == (400, 500)
    assert noise.dtype == torch.float64
    assert abs(noise.mean()) < 6 / len(noise.flatten()) ** 0.5
    assert noise.std().item() == pytest.approx(1.0, abs=0.01)  # 6 standard errors
    for bound, share in ((-1.0, 0.1587), (0.0, 0.5), (2.0, 0.9772)):
        assert (noise < bound).double().mean().item() == pytest.approx(share, abs=0.007)


def test_noise_is_finite_for_all_bits():
    assert gaussian((2,), lambda count: b"\x00" * 8 + b"\xff" * 8).isfinite().all()


def test_noise_of_the_system_never_repeats_and_that_of_a_seed_does_by_its_names():
    first, second = (gaussian((8,), noise_source(None)) for _ in range(2))
    assert not torch.equal(first, second)
    seeded = {
        names: gaussian((8,), noise_source(0, *names)) for names in [("a", 1), ("a", 2), ("b", 1)]
    }
    assert torch.equal(seeded["a", 1], gaussian((8,), noise_source(0, "a", 1)))
    assert len({tuple(noise.tolist()) for noise in seeded.values()}) == 3


def test_a_client_adds_noise_of_z_times_s_to_every_number_it_sends():
    start = {"first": torch.zeros(300, 200), "second": torch.ones(40_000)}
    cfg = PrivacyConfig(clip_norm=0.5, noise_multiplier=3.0, at="client")
    sent = privatize(Update("a", start, 10, {"num_steps": 1}), start, cfg, 1).adapter
    delta = torch.cat([(sent[name] - start[name]).flatten() for name in start])
    assert delta.std().item() == pytest.approx(1.5, rel=0.015)  # 6 standard errors
    assert abs(delta.mean().item()) < 0.03


def test_no_noise_is_no_change():
    adapter = {"first": torch.randn(3)}
    assert add_noise(adapter, 0.0, noise_source(None)) is adapter


class StandingEngine:
    """An engine whose clients train and get nowhere."""

    def map(self, request, clients):
        updates = [Update(name, request.adapter, 10, {"num_steps": 1}) for name in clients]
        privacy = request.options["privacy"]
        sent = [privatize(u, request.adapter, privacy, request.round) for u in updates]
        return [Reply(update.client, update, 0, 0) for update in sent], []


@pytest.mark.parametrize(("at", "num_noises"), [("server", 1), ("client", 3)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_mean_of_n_clients_carries_the_noise_that_epsilon_counts(at, num_noises, name, start):
    """zS/n where the server adds it to the sum, zS/√n where each client adds it."""
    strategy, kind = STRATEGIES[name]
    privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=2.0, at=at)
    cfg = kind(privacy=privacy, server_learning_rate=0.5)
    start = replace(start, adapter={"first": torch.zeros(200, 300), "second": torch.ones(40_000)})
    state, _ = strategy(start, ["a", "b", "c"], StandingEngine(), cfg)
    noise = torch.cat([(state.adapter[n] - start.adapter[n]).flatten() for n in start.adapter])
    expected = 0.5 * 2.0 * 0.1 * num_noises**0.5 / 3
    assert noise.std().item() == pytest.approx(expected, rel=0.015)  # 6 standard errors


@pytest.mark.parametrize("at", ["client", "server"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_without_noise_and_limit_a_run_is_that_without_privacy_bit_for_bit(
    at, name, new_client, start, run_rounds, same
):
    strategy, kind = STRATEGIES[name]
    privacy = PrivacyConfig(clip_norm=1e9, noise_multiplier=0.0, at=at, statistics="none")
    clients = [[new_client(each) for each in "abc"] for _ in range(2)]
    plain, _ = run_rounds(strategy, clients[0], start, kind(num_local_steps=2), num_rounds=3)
    private, rows = run_rounds(
        strategy, clients[1], start, kind(num_local_steps=2, privacy=privacy), num_rounds=3
    )
    assert same(plain.adapter, private.adapter)
    assert rows[-1]["round"]["privacy"]["epsilon"] is None


@pytest.mark.parametrize("at", ["client", "server"])
def test_with_a_noise_seed_a_run_repeats_and_resumes_bit_for_bit(
    at, new_client, start, run_rounds, same
):
    cfg = FirmConfig(privacy=replace(SEEDED, at=at, statistics="noisy"), clients_per_round=2)
    clients = [new_client(each) for each in "abc"]
    whole, rows = run_rounds(firm_round, clients, start, cfg, num_rounds=4)
    clients, names = [new_client(each) for each in "abc"], list("abc")
    engine = LocalEngine(clients)
    state = start
    for _ in range(2):
        state, _ = firm_round(state, names, engine, cfg)
    saved = state.to_state(), engine.client_states(state.accepted)
    state, engine = ServerState.from_state(saved[0]), LocalEngine([new_client(n) for n in names])
    engine.restore_client_states(saved[1])
    for row in rows[2:]:
        state, again = firm_round(state, names, engine, cfg)
        assert again["round"]["privacy"] == row["round"]["privacy"]
        assert [c.get("weights") for c in again["clients"]] == [
            c.get("weights") for c in row["clients"]
        ]
    assert same(state.adapter, whole.adapter)
    assert state.memory == whole.memory


# --- what travels ---------------------------------------------------------------------------------


class RecordingEngine(LocalEngine):
    """A local engine that keeps what came over the wire."""

    def map(self, request, clients):
        replies, failures = super().map(request, clients)
        self.wire = [pack(reply.content) for reply in replies]
        self.contents = [reply.content for reply in replies]
        return replies, failures


def _numbers(update):
    """The exact figures of a client's round, each in full."""
    figures = [
        update.metrics[key] for key in ("weights", "gradient_norms", "cosines", "step_losses")
    ]
    text = json.dumps(figures).replace("[", " ").replace("]", " ").replace(",", " ")
    return {number for number in text.split() if len(number) > 8}


@pytest.mark.parametrize("at", ["client", "server"])
@pytest.mark.parametrize("statistics", ["none", "noisy"])
def test_neither_the_raw_delta_nor_an_exact_figure_is_in_what_travels(
    at, statistics, new_client, start
):
    plain, private = (RecordingEngine([new_client("a", num_minibatches=1)]) for _ in range(2))
    firm_round(start, ["a"], plain, FirmConfig())  # one solve, so that means are exact figures too
    (raw,) = plain.contents
    privacy = replace(SEEDED, at=at, statistics=statistics)
    _, rows = firm_round(start, ["a"], private, FirmConfig(privacy=privacy))
    (sent,), (wire,) = private.contents, private.wire

    assert update_length(start.adapter, raw.adapter) > privacy.clip_norm
    for name, value in raw.adapter.items():
        assert value.numpy().tobytes() in plain.wire[0]
        for number in value:
            assert number.numpy().tobytes() not in wire
        assert not torch.equal(sent.adapter[name], value)
    told = {"none": set(), "noisy": {"weights", "cosines", "clipped"}}
    assert set(sent.metrics) == told[statistics]
    assert sent.num_examples == 1
    logged = json.dumps(rows)
    assert len(_numbers(raw)) > 5
    for number in _numbers(raw):
        assert number.encode() in plain.wire[0]
        assert number.encode() not in wire
        assert number not in logged
    assert ("drift" in rows["round"]) == (at == "client")  # the server's is of exact deltas


@pytest.mark.parametrize("at", ["client", "server"])
@pytest.mark.parametrize("statistics", ["none", "noisy"])
def test_shards_of_other_sizes_send_and_log_as_much(at, statistics, new_client, start):
    """Also if a client stops where its shard ends, after fewer steps than it was asked for."""

    def row(num_examples):
        client = new_client("a", num_examples=num_examples)
        draw = client.batches
        client.batches = lambda num_steps: draw(min(num_steps, num_examples))
        privacy = replace(SEEDED, at=at, statistics=statistics)
        engine = RecordingEngine([client])
        cfg = FirmConfig(num_local_steps=5, privacy=privacy)
        _, rows = firm_round(start, ["a"], engine, cfg)
        (own,), (wire,) = rows["clients"], engine.wire
        solves = {key: len(own[key]) for key in ("weights", "cosines") if key in own}
        return len(wire), set(own), own["num_examples"], own.get("num_steps"), solves

    assert row(2) == row(30)


def test_exact_statistics_are_those_without_privacy_and_help_to_choose_the_limit(new_client, start):
    (plain, private), norms = (RecordingEngine([new_client("a")]) for _ in range(2)), []
    firm_round(start, ["a"], plain, FirmConfig(share_gram=True))
    privacy = replace(SEEDED, statistics="exact")
    firm_round(start, ["a"], private, FirmConfig(share_gram=True, privacy=privacy))
    raw, sent = plain.contents[0], private.contents[0]
    for key in ("weights", "gradient_norms", "cosines", "gram", "step_losses"):
        assert sent.metrics[key] == raw.metrics[key]
    norms = sent.metrics["update_norm"], update_length(start.adapter, raw.adapter)
    assert norms[0] == norms[1] > privacy.clip_norm
    assert sent.metrics["clipped"] == 1.0
    assert sent.num_examples == 10


def test_noisy_statistics_are_the_means_with_noise_of_z_times_their_radius():
    adapter = {"first": torch.zeros(1)}
    metrics = {"num_steps": 1, "weights": [[0.2, 0.8], [0.4, 0.6]], "cosines": [[-0.5], [0.1]]}
    cfg = PrivacyConfig(clip_norm=1.0, noise_multiplier=0.5, statistics="noisy")
    rows = []
    for _ in range(4000):
        told = privatize(Update("a", adapter, 10, metrics), adapter, cfg, 1).metrics
        rows.append([*told["weights"][0], *told["cosines"][0], told["clipped"]])
    rows = torch.tensor(rows, dtype=torch.float64)
    std = 0.5 * statistics_radius(2)
    exact = torch.tensor([0.3, 0.7, -0.2, 0.0], dtype=torch.float64)
    assert torch.allclose(rows.mean(dim=0), exact, atol=6 * std / 4000**0.5)
    assert torch.allclose(rows.std(dim=0), torch.full((4,), std).double(), rtol=0.07)


def test_the_radius_of_statistics_is_half_their_largest_distance():
    def statistics(winner, sign, is_clipped, count):
        weights = torch.eye(count)[winner]
        return torch.cat([weights, torch.full((count * (count - 1) // 2,), sign), is_clipped])

    for count in (2, 3, 5):
        one = statistics(0, 1.0, torch.ones(1), count)
        other = statistics(1, -1.0, torch.zeros(1), count)
        assert statistics_radius(count) == pytest.approx((one - other).norm().item() / 2)


def test_with_given_weights_and_one_pass_there_are_no_cosines_to_tell(new_plain_client, start):
    clients = [new_plain_client(n, [[1.0, 0, 2], [0, 3, 1]], sums=True) for n in "ab"]
    engine = RecordingEngine(clients)
    cfg = FedAvgConfig(privacy=replace(SEEDED, statistics="noisy"))
    fedavg(start, ["a", "b"], engine, cfg)
    assert set(engine.contents[0].metrics) == {"weights", "clipped"}


def test_an_error_leaves_its_client_by_its_type_alone(new_client, start):
    clients = [new_client("a", fails_in=(1,)), new_client("b")]
    for privacy, has_text in ((None, True), (SEEDED, False)):
        cfg = FirmConfig(privacy=privacy)
        _, rows = firm_round(start, ["a", "b"], LocalEngine(clients), cfg)
        clients = [new_client("a", fails_in=(1,)), new_client("b")]
        (failure,) = rows["round"]["failures"]
        assert "ArithmeticError" in failure["reason"]
        assert ("the quadratic has no bottom" in failure["reason"]) == has_text


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategys_rows_tell_the_epsilon_of_all_rounds_so_far(
    name, new_client, start, run_rounds
):
    strategy, kind = STRATEGIES[name]
    clients = [new_client(each) for each in "ab"]
    _, rows = run_rounds(strategy, clients, start, kind(privacy=SEEDED), num_rounds=3)
    told = [row["round"]["privacy"]["epsilon"] for row in rows]
    assert told == [gaussian_epsilon({0.5: count}, 1e-5) for count in (1, 2, 3)]


def test_rows_with_privacy_can_be_logged(new_client, start, run_rounds):
    for statistics in ("none", "noisy", "exact"):
        cfg = FirmConfig(privacy=replace(SEEDED, statistics=statistics), clients_per_round=2)
        clients = [new_client(each) for each in "abc"]
        _, rows = run_rounds(firm_round, clients, start, cfg, num_rounds=2)
        json.dumps(rows, allow_nan=False)
        spent = rows[-1]["round"]["privacy"]
        assert ("clipped" in spent) == (statistics != "none")
        if statistics == "exact":
            assert spent["clipped"] == 1.0


# --- the configuration ----------------------------------------------------------------------------

BAD_OPTIONS = {
    "clip_norm": ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
    "infinite": ({"clip_norm": float("inf")}, "clip_norm must be a finite number, got inf"),
    "nan": ({"clip_norm": float("nan")}, "clip_norm must be a finite number, got nan"),
    "noise": ({"noise_multiplier": -1.0}, "noise_multiplier must be non-negative"),
    "no noise": ({"noise_multiplier": float("nan")}, "noise_multiplier must be a finite number"),
    "at": ({"at": "both"}, "at must be one of server, client, sum, got 'both'"),
    "delta": ({"delta": 1.0}, "delta must be greater than 0 and less than 1, got 1.0"),
    "statistics": (
        {"statistics": "some"},
        "statistics must be one of none, noisy, exact, got 'some'",
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_refused(case):
    changes, message = BAD_OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(**{**asdict(SEEDED), **changes})


BAD_ROUNDS = {
    "fedcmoo": (FedCmooConfig, {}, "such as fedavg or firm"),
    "fedcmoo_pref": (FedCmooPrefConfig, {}, "such as fedavg or firm"),
    "fsmgda": (FsmgdaConfig, {}, "such as fedavg or firm"),
    "qfedavg": (QFedAvgConfig, {}, "such as fedavg or firm"),
    "plain": (StrategyConfig, {}, "such as fedavg or firm"),
    "examples": (FirmConfig, {"aggregation": "by_examples"}, "aggregation must be uniform"),
    "products": (FirmConfig, {"lora_mean": "products"}, "lora_mean must be factors"),
    "robust": (FirmConfig, {"robust": RobustConfig(rule="median")}, "robust.rule must be none"),
    "norm": (FirmConfig, {"max_update_norm": 1.0}, "max_update_norm must be null, got 1"),
    "gram": (FirmConfig, {"share_gram": True}, "share_gram sends exact Gram matrices"),
    "unit": (FedAvgConfig, {"normalize_updates": True}, "normalize_updates must be false"),
    "epochs": (FirmConfig, {"num_local_epochs": 2}, "num_local_epochs must be null.* got 2 and"),
}


@pytest.mark.parametrize("case", BAD_ROUNDS)
def test_privacy_is_refused_where_epsilon_would_not_hold(case):
    kind, options, message = BAD_ROUNDS[case]
    with pytest.raises(ValueError, match=message) as error:
        kind(privacy=SEEDED, **options)
    assert "\n" not in str(error.value)


def test_what_epsilon_does_not_cover_is_said():
    assert PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0).notes() == []
    (seed,) = SEEDED.notes()
    assert "noise_seed" in seed
    (exact,) = PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0, statistics="exact").notes()
    assert "adapters only" in exact
    (none,) = PrivacyConfig(clip_norm=1.0, noise_multiplier=0.0).notes()
    assert "there is no privacy" in none
