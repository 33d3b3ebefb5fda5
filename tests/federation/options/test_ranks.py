"""Clients that train some ranks of the adapter: what they train, send, and count for."""

import pytest
import torch

from firm.federation import LocalEngine, RoundFailed, ServerState
from firm.federation.aggregation import flat, server_step
from firm.federation.messages import SentParameters
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.ranks import PartialUpdate, Ranks, mean_where_trained, rank_mask
from firm.federation.options.robust import RobustConfig
from firm.federation.options.uploads import UploadConfig
from firm.federation.schema import Invalid, Reading, read
from firm.federation.serialization import pack, unpack
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FedAvgConfig, FedCmooConfig, FirmConfig
from tests.update_wire import received, sent, training

A, B, FURTHER = "q.lora_A.weight", "q.lora_B.weight", "q.lora_B1.weight"
START = {A: torch.full((4, 3), 0.1), B: torch.full((2, 4), 0.2), FURTHER: torch.zeros(2, 4)}


def _adapter(seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: v + 0.1 * torch.randn(v.shape, generator=generator) for n, v in START.items()}


def _split(vector):
    parts = vector.split([value.numel() for value in START.values()])
    return {n: part.view(START[n].shape) for n, part in zip(START, parts, strict=True)}


def test_a_rank_is_a_row_of_a_and_a_column_of_every_b():
    masks = _split(rank_mask(START, 1))
    assert masks[A].tolist() == [[True] * 3, *[[False] * 3] * 3]
    assert masks[B].tolist() == masks[FURTHER].tolist() == [[True, False, False, False]] * 2
    assert rank_mask(START, 4).all()


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ({"head.weight": torch.zeros(5, 5)}, "'head.weight' is not a LoRA factor"),
        ({"q.lora_A1.weight": torch.zeros(5, 5)}, "'q.lora_A1.weight' is not a LoRA factor"),
        ({A: torch.zeros(2, 9)}, "has 2 ranks; a client cannot train 3 of them"),
    ],
)
def test_what_has_no_such_rank_is_named(adapter, reason):
    with pytest.raises(ValueError, match=reason):
        rank_mask(adapter, 3)


def test_every_parameter_is_the_mean_over_those_who_train_it():
    adapters, weights = [_adapter(seed) for seed in range(3)], [1, 2, 3]
    masks = [rank_mask(START, 1), None, rank_mask(START, 2)]
    mean = mean_where_trained(START, adapters, weights, masks, learning_rate=0.5)
    for index, value in enumerate(flat(mean).tolist()):
        own = [
            (weight, (flat(adapter) - flat(START))[index].item())
            for adapter, weight, mask in zip(adapters, weights, masks, strict=True)
            if mask is None or mask[index]
        ]
        step = sum(w * delta for w, delta in own) / sum(w for w, _ in own)
        assert value == pytest.approx(flat(START)[index].item() + 0.5 * step, abs=1e-6)


def test_what_nobody_trains_stays_and_what_all_train_is_the_plain_mean(same):
    adapters = [_adapter(seed) for seed in range(3)]
    mask = rank_mask(START, 2)
    mean = mean_where_trained(START, adapters, [1, 2, 3], [mask] * 3)
    plain = server_step(START, adapters, [1, 2, 3])
    assert torch.equal(flat(mean)[~mask], flat(START)[~mask])
    assert torch.allclose(flat(mean)[mask], flat(plain)[mask], atol=1e-7)
    whole = mean_where_trained(START, adapters, [1, 2, 3], [None] * 3)
    assert torch.allclose(flat(whole), flat(plain), atol=1e-7)


@pytest.mark.parametrize("cfg", [None, UploadConfig(bits=16)], ids=["floats", "quantised"])
def test_the_ranks_that_are_trained_travel_and_no_other(cfg, new_client):
    mask, adapter = rank_mask(START, 1), _adapter(0)
    request = training(START, *([] if cfg is None else [cfg]), Ranks({"a": 1}))
    message = sent(new_client("a"), adapter, request)
    wire = read(SentParameters, unpack(pack(message)), "adapter", Reading((), START))
    arrived = flat(received(wire, request))
    assert torch.equal(arrived[~mask], flat(START)[~mask])
    assert torch.allclose(arrived[mask], flat(adapter)[mask], atol=1e-5)
    numbers = wire.partial if cfg is None else wire.quantized["shape"][1]
    assert (numbers if isinstance(numbers, int) else numbers.numel()) == mask.sum()


@pytest.mark.parametrize(
    ("content", "ranks", "reason"),
    [
        (START, {"a": 1}, "must contain only its ranks, got a whole adapter"),
        (PartialUpdate(torch.zeros(7)), {}, "must be an adapter, got a PartialUpdate"),
        (PartialUpdate(torch.zeros(6)), {"a": 1}, "must be 7 numbers, got a tensor"),
        (PartialUpdate(torch.zeros(7).double()), {"a": 1}, "must be 7 numbers"),
    ],
)
def test_an_update_of_other_ranks_is_refused(content, ranks, reason):
    with pytest.raises(Invalid, match=reason):
        received(content, training(START, Ranks(ranks)))


@pytest.mark.parametrize(
    "numbers", [3.0, torch.zeros(2, 2), torch.zeros(99), torch.tensor([float("nan")])]
)
def test_what_is_no_vector_of_numbers_is_refused(numbers):
    with pytest.raises(Invalid, match=r"adapter (must be|is not finite)"):
        read(SentParameters, {"partial": numbers}, "adapter", Reading((), START))


# --- rounds ---------------------------------------------------------------------------------------


def _state():
    return ServerState(dict(START), objectives=("left", "right"), seed=0)


@pytest.fixture
def new_engine(new_client):
    """Builds an engine of three clients with A, B and a further B: ``new_engine(order)``."""
    size = sum(value.numel() for value in START.values())

    def build(order="abc"):
        clients = []
        for name in order:
            generator = torch.Generator().manual_seed(ord(name))
            targets = torch.randn(2, size, generator=generator)
            clients.append(new_client(name, targets, parameters=START, noise=0.1))
        return LocalEngine(clients)

    return build


def _run(cfg, engine, names="abc", num_rounds=3):
    strategy = fedavg if isinstance(cfg, FedAvgConfig) else firm_round
    state, rows = _state(), []
    for _ in range(num_rounds):
        state, metrics = strategy(state, list(names), engine, cfg)
        rows.append(metrics)
    return state.adapter, rows


@pytest.mark.parametrize("kind", [FirmConfig, FedAvgConfig])
def test_a_rank_that_no_client_trains_never_moves(kind, new_engine):
    adapter, _ = _run(kind(ranks=dict.fromkeys("abc", 2)), new_engine())
    mask = rank_mask(START, 2)
    assert torch.equal(flat(adapter)[~mask], flat(START)[~mask])
    assert (flat(adapter)[mask] != flat(START)[mask]).all()


@pytest.mark.parametrize("kind", [FirmConfig, FedAvgConfig])
def test_the_ranks_of_one_client_are_left_to_the_others(kind, new_engine, same):
    mixed, rows = _run(kind(ranks={"a": 1}), new_engine(), num_rounds=1)
    others, _ = _run(kind(), new_engine("bc"), "bc", num_rounds=1)
    mask = rank_mask(START, 1)
    assert torch.allclose(flat(mixed)[~mask], flat(others)[~mask], atol=1e-6)
    assert (flat(mixed)[mask] - flat(others)[mask]).abs().min() > 1e-6
    sizes = {row["client"]: row["bytes_up"] for row in rows[0]["clients"]}
    assert sizes["a"] < min(sizes["b"], sizes["c"]) - 50


def test_a_client_solves_and_steps_with_the_gradients_of_its_ranks_alone(new_engine):
    """Norms of all ranks' gradients would be longer, and lead to other weights."""
    (plain,), (own,) = (
        _run(FirmConfig(ranks=r), new_engine(), num_rounds=1)[1] for r in ({}, {"a": 1})
    )
    for objective in range(2):
        whole = plain["clients"][0]["gradient_norms"][0][objective]
        assert own["clients"][0]["gradient_norms"][0][objective] < 0.9 * whole
    assert own["clients"][0]["weights"][0] != plain["clients"][0]["weights"][0]
    assert own["clients"][1]["weights"][0] == plain["clients"][1]["weights"][0]


def test_whole_ranks_are_a_run_without(new_engine):
    plain, _ = _run(FirmConfig(), new_engine())
    whole, _ = _run(FirmConfig(ranks=dict.fromkeys("abc", 4)), new_engine())
    assert torch.allclose(flat(plain), flat(whole), atol=1e-6)


def test_the_order_of_clients_decides_nothing(new_engine):
    cfg = FirmConfig(ranks={"a": 1, "b": 2})
    first, _ = _run(cfg, new_engine("abc"), "abc")
    second, _ = _run(cfg, new_engine("cba"), "cba")
    assert torch.allclose(flat(first), flat(second), atol=1e-6)


def test_errors_of_rounding_are_kept_for_the_ranks_that_are_trained(new_engine):
    cfg = FirmConfig(ranks={"a": 1}, upload=UploadConfig(bits=3))
    engine = new_engine()
    _run(cfg, engine)
    states = engine.client_states(dict.fromkeys("abc", 3))
    mask = rank_mask(START, 1)
    assert states["a"]["state"]["carried"]["upload_error"].shape == (int(mask.sum()),)
    assert states["b"]["state"]["carried"]["upload_error"].shape == (mask.numel(),)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (FedCmooConfig, {}, "ranks covers the mean of adapters"),
        (FirmConfig, {"robust": RobustConfig("median")}, "robust.rule must be none"),
        (FirmConfig, {"lora_mean": "products"}, "lora_mean must be factors"),
        (FirmConfig, {"secure": "masks"}, "secure must be null"),
        (FedAvgConfig, {"normalize_updates": True}, "normalize_updates must be false"),
        (
            FirmConfig,
            {"privacy": PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)},
            "privacy must be null",
        ),
    ],
)
def test_what_a_mean_by_rank_rules_out_is_refused(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        kind(**options, ranks={"a": 1})


def test_a_model_without_lora_is_told(new_client, start):
    with pytest.raises(RoundFailed, match="'first' is not a LoRA factor"):
        firm_round(start, ["a"], LocalEngine([new_client("a")]), FirmConfig(ranks={"a": 1}))
