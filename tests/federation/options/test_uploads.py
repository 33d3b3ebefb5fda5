"""Quantised uploads: small, right in the long run or in the mean, and exact to resume."""

from dataclasses import replace

import pytest
import torch

from firm.federation import LocalEngine, ServerState, Update
from firm.federation.aggregation import flat
from firm.federation.messages import SentParameters
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.quantized import CARRIED
from firm.federation.options.robust import RobustConfig
from firm.federation.options.uploads import UploadConfig
from firm.federation.schema import Invalid, Reading, read
from firm.federation.serialization import pack, unpack
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FedAvgConfig, FirmConfig, FsmgdaConfig
from tests.update_wire import received, sent, training

START = {"first": torch.zeros(30, 20), "second": torch.full((57,), 0.5)}
SIZE = 657
NAMES = ["a", "b", "c"]


def _adapter(seed, scale=0.01):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + scale * torch.randn(value.shape, generator=generator)
        for name, value in START.items()
    }


def _arrived(client, adapter, cfg, round=1):
    """What arrives of a client's update, θ_t + Q(θ_c - θ_t), over the wire."""
    request = replace(training(START, cfg), round=round, seed=round)
    message = sent(client, adapter, request)
    content = read(SentParameters, unpack(pack(message)), "adapter", Reading((), START))
    return received(content, request)


def _message(client, adapter, start, cfg):
    return sent(client, adapter, training(start, cfg))


def _delta(adapter):
    return flat(adapter).double() - flat(START).double()


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_an_error_is_at_most_half_a_level_of_its_run(bits, new_client):
    adapter = _adapter(0)
    arrived = _delta(_arrived(new_client(), adapter, UploadConfig(bits=bits)))
    delta = _delta(adapter)
    for run, own in zip(delta.split(128), arrived.split(128), strict=True):
        level = run.abs().max() / (2 ** (bits - 1) - 1)
        assert (run - own).abs().max() <= level / 2 + 1e-7


def test_what_arrives_in_many_rounds_is_what_was_meant_but_for_one_error(new_client):
    """Σ Q(Δ_t + e_t) = Σ Δ_t - e_T: errors do not add up, as they would without feedback."""
    cfg, client = UploadConfig(bits=3), new_client()
    meant, arrived, forgotten = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
    for round in range(1, 41):
        adapter = {name: value + 0.003 for name, value in START.items()}  # the same small step
        adapter["first"][0, 0] += 1.0  # beside a large one
        meant += _delta(adapter)
        arrived += _delta(_arrived(client, adapter, cfg, round))
        forgotten += _delta(_arrived(new_client(), adapter, cfg, round))
    assert (meant - arrived - client.carried[CARRIED]).abs().max() < 1e-4
    assert (meant - arrived).abs().max() < 0.5
    assert (meant - forgotten)[:128].abs().max() > 0.11  # of 0.12: the small steps never arrived


def test_random_rounding_is_right_in_the_mean_and_keeps_nothing(new_client):
    cfg, client, adapter = UploadConfig(bits=2, rounding="random"), new_client(), _adapter(1)
    rounds = [_delta(_arrived(client, adapter, cfg, round)) for round in range(1, 1001)]
    assert client.carried == {}
    rows, delta = torch.stack(rounds), _delta(adapter)
    error = delta.abs().max() / 2 / len(rounds) ** 0.5  # at most, with levels that far apart
    assert ((rows.mean(0) - delta).abs() < 5 * error).all()
    assert (rows.mean(0) @ delta / (delta @ delta)).item() == pytest.approx(1.0, abs=0.01)
    assert (rows[0] - delta).abs().max() > 5 * error  # each by itself is not right


def test_random_rounding_draws_by_seed_client_and_round(new_plain_client):
    """From the same θ_0 too, as of an adapter that starts at zero with any seed."""
    cfg, zero = FirmConfig(upload=UploadConfig(bits=2, rounding="random")), torch.zeros(SIZE)
    targets = [torch.linspace(-1, 1, SIZE).tolist()] * 2

    def end(seed, name, round):
        client = new_plain_client(name, targets, parameters={"first": zero})
        state = ServerState({"first": zero}, ("left", "right"), seed=seed, round=round - 1)
        return firm_round(state, [name], LocalEngine([client]), cfg)[0].adapter["first"]

    one = end(seed=0, name="a", round=1)
    assert torch.equal(one, end(seed=0, name="a", round=1))
    for other in (end(1, "a", 1), end(0, "b", 1), end(0, "a", 2)):
        is_other = (one - other).abs() > 0.1 * one.abs().max()
        assert is_other.float().mean() > 0.2  # a draw in five or more goes the other way


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.15), (2, 0.09)])
def test_an_upload_takes_its_bits_and_a_scale_for_every_128_numbers(bits, share, new_client):
    start = {"first": torch.zeros(256, 256)}
    adapter = {"first": torch.randn(256, 256)}
    whole = len(pack(Update("a", adapter, 1, {})))
    cfg = UploadConfig(bits=bits)
    small = len(pack(Update("a", _message(new_client(), adapter, start, cfg), 1, {})))
    assert share - 0.02 < small / whole < share


def _run(state, engine, cfg, num_rounds):
    rows = []
    for _ in range(num_rounds):
        state, metrics = firm_round(state, NAMES, engine, cfg)
        rows.append(metrics["round"])
    return state, rows


@pytest.fixture
def new_engine(new_client):
    """Builds an engine of three clients."""
    return lambda: LocalEngine([new_client(name) for name in NAMES])


@pytest.mark.parametrize("options", [{}, {"robust": RobustConfig("median")}], ids=str)
def test_a_run_with_many_bits_ends_where_it_would_without(options, new_engine, start, point):
    plain, _ = _run(start, new_engine(), FirmConfig(**options), 4)
    fine, _ = _run(start, new_engine(), FirmConfig(**options, upload=UploadConfig(bits=16)), 4)
    coarse, _ = _run(start, new_engine(), FirmConfig(**options, upload=UploadConfig(bits=2)), 4)
    assert 0 < (point(fine) - point(plain)).abs().max() < 1e-3
    assert (point(coarse) - point(plain)).abs().max() > 1e-2


def test_a_run_resumes_bit_for_bit_with_the_errors_that_it_kept(new_engine, start, same):
    cfg = FirmConfig(upload=UploadConfig(bits=3), clients_per_round=2)
    whole, _ = _run(start, new_engine(), cfg, 6)
    engine = new_engine()
    half, _ = _run(start, engine, cfg, 3)
    server, clients = unpack(pack([half.to_state(), engine.client_states(half.accepted)]))
    assert any("upload_error" in each["state"]["carried"] for each in clients.values())

    def end():
        engine = new_engine()
        engine.restore_client_states(clients)
        return _run(ServerState.from_state(server), engine, cfg, 3)[0].adapter

    assert same(end(), whole.adapter)
    for each in clients.values():
        each["state"]["carried"].pop("upload_error")
    assert not same(end(), whole.adapter)


def test_random_rounding_resumes_bit_for_bit(new_engine, start, same):
    cfg = FirmConfig(upload=UploadConfig(bits=3, rounding="random"), clients_per_round=2)
    whole, _ = _run(start, new_engine(), cfg, 6)
    engine = new_engine()
    half, _ = _run(start, engine, cfg, 3)
    server, clients = unpack(pack([half.to_state(), engine.client_states(half.accepted)]))
    engine = new_engine()
    engine.restore_client_states(clients)
    assert same(_run(ServerState.from_state(server), engine, cfg, 3)[0].adapter, whole.adapter)


def test_a_refused_update_leaves_its_error_as_it_was(new_client, start):
    cfg = FedAvgConfig(upload=UploadConfig(bits=4))
    client = new_client("a", diverges_in=(2,))
    engine = LocalEngine([client, new_client("b")])
    state, _ = fedavg(start, ["a", "b"], engine, cfg)
    kept = engine.client_states(state.accepted)["a"]["state"]["carried"]["upload_error"].clone()
    state, rows = fedavg(state, ["a", "b"], engine, cfg)
    assert rows["round"]["failures"][0]["client"] == "a"
    after = engine.client_states(state.accepted)["a"]["state"]["carried"]["upload_error"]
    assert torch.equal(after, kept)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: {"quantized": 3}, "must be a quantised update, got 3"),
        (lambda content: {"quantized": {"kind": "top_k"}}, "must be a quantised update"),
        (lambda content: {"quantized": {**content, "shape": [1, 9]}}, "cannot be read"),
        (lambda content: {"quantized": {**content, "bits": 99}}, "cannot be read"),
        (lambda content: {"quantized": {**content, "bits": 8.0}}, "cannot be read"),
        (
            lambda content: {"quantized": {**content, "scales": content["scales"] * float("nan")}},
            "cannot be read",
        ),
    ],
)
def test_what_is_no_quantised_update_is_refused(change, reason, new_client):
    content = unpack(pack(_message(new_client(), _adapter(0), START, UploadConfig())))
    with pytest.raises(Invalid, match=reason):
        read(SentParameters, change(content["quantized"]), "adapter", Reading((), START))


@pytest.mark.parametrize("scale", [1e25, 3e38])
def test_an_update_beyond_all_bounds_is_refused(scale, new_client):
    content = unpack(pack(_message(new_client(), _adapter(0), START, UploadConfig())))
    content["quantized"]["scales"].fill_(scale)
    message = read(SentParameters, content, "adapter", Reading((), START))
    with pytest.raises(Invalid, match=r"entries beyond 1e\+18"):
        received(message, training(START, UploadConfig()))


def test_runs_that_are_said_to_be_very_long_take_no_memory(new_client):
    small = {"first": torch.zeros(3)}
    message = _message(new_client(), {"first": torch.ones(3)}, small, UploadConfig())
    message.quantized["bucket"] = 10**12
    arrived = received(message, training(small, UploadConfig()))
    assert torch.allclose(arrived["first"], torch.ones(3))


def test_an_update_of_another_size_is_refused(new_client):
    small = {"first": torch.zeros(3)}
    content = _message(new_client(), small, small, UploadConfig())
    with pytest.raises(Invalid, match="its update must be 657 numbers, got 3"):
        received(content, training(START, UploadConfig()))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (FsmgdaConfig, {}, "fsmgda sends one per objective"),
        (FirmConfig, {"secure": "masks"}, "with secure, upload must be null, got"),
        (
            FirmConfig,
            {"privacy": PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)},
            "with upload, set privacy.at to client",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        kind(**options, upload=UploadConfig())


@pytest.mark.parametrize("bits", [1, 17, 8.5])
def test_bits_are_whole_and_from_2_to_16(bits):
    with pytest.raises(ValueError, match="bits"):
        UploadConfig(bits=bits)


@pytest.mark.slow
def test_few_bits_are_refused_beside_a_norm_limit_as_they_lengthen_updates():
    FirmConfig(max_update_norm=1.0, upload=UploadConfig(bits=4))
    with pytest.raises(ValueError, match="bits 4 or more"):
        FirmConfig(max_update_norm=1.0, upload=UploadConfig(bits=3))
