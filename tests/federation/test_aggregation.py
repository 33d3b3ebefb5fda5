from dataclasses import dataclass, replace

import pytest
import torch

from firm.federation import Update
from firm.federation.aggregation import (
    Count,
    Mean,
    Rate,
    ServerStep,
    UnitLengths,
    chain,
    flat,
    server_step,
    shares,
    update_matrix,
    weighted_mean,
)
from firm.federation.options.noise import ServerNoise
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import FedAvgConfig

PRIVACY = PrivacyConfig(clip_norm=1.0, noise_multiplier=0.0)


def _update(name, num_examples=10, **adapter):
    return Update(
        name, {key: torch.as_tensor(value) for key, value in adapter.items()}, num_examples, {}
    )


def aggregate(updates, *, by="uniform"):
    return weighted_mean([update.adapter for update in updates], shares(updates, by=by))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["uniform", "by_examples"])
@pytest.mark.parametrize("num_clients", [1, 2, 3, 4, 7])
def test_equal_adapters_come_back_bit_for_bit(num_clients, by, dtype):
    generator = torch.Generator().manual_seed(0)
    adapter = {
        name: (scale * torch.randn(500, generator=generator)).to(dtype)
        for name, scale in (("b", 1.0), ("a", 1e-4))
    }
    updates = [
        Update(f"client_{index}", {k: v.clone() for k, v in adapter.items()}, 3 + index, {})
        for index in range(num_clients)
    ]
    mean = aggregate(updates, by=by)
    assert list(mean) == ["b", "a"]
    for name, parameter in adapter.items():
        assert mean[name].dtype == dtype
        assert torch.equal(mean[name], parameter)


def test_uniform_is_the_mean_and_by_examples_weighs_by_shards():
    updates = [_update("x", 1, a=[0.0, 4.0], b=1.0), _update("y", 3, a=[8.0, 4.0], b=3.0)]
    uniform = aggregate(updates)
    assert uniform["a"].tolist() == [4.0, 4.0]
    assert uniform["b"].item() == 2.0
    by_examples = aggregate(updates, by="by_examples")
    assert by_examples["a"].tolist() == [6.0, 4.0]  # (1·0 + 3·8)/4, (1·4 + 3·4)/4
    assert by_examples["b"].item() == 2.5


def test_small_changes_survive_beside_large_parameters():
    updates = [_update(f"c{i}", a=[1e4 + delta]) for i, delta in enumerate((0.0, 2e-3, 4e-3))]
    exact = sum(update.adapter["a"].double() for update in updates) / 3
    assert torch.equal(aggregate(updates)["a"], exact.float())


def test_updates_are_not_changed_and_not_shared():
    updates = [_update("x", a=[1.0]), _update("y", a=[3.0])]
    mean = aggregate(updates)
    mean["a"].fill_(9.0)
    assert [update.adapter["a"].item() for update in updates] == [1.0, 3.0]
    alone = aggregate(updates[:1])
    alone["a"].fill_(9.0)
    assert updates[0].adapter["a"].item() == 1.0


def _point(*values):
    return {"first": torch.tensor(values[:2]), "second": torch.tensor(values[2:])}


def test_a_server_step_of_rate_one_is_the_weighted_mean_bit_for_bit():
    generator = torch.Generator().manual_seed(1)
    start, *adapters = (_point(*torch.randn(3, generator=generator).tolist()) for _ in range(4))
    stepped = server_step(start, adapters, [1, 2, 3])
    mean = weighted_mean(adapters, [1, 2, 3])
    assert all(torch.equal(stepped[name], mean[name]) for name in mean)
    same_by_rate = server_step(start, adapters, [1, 2, 3], learning_rate=1 + 1e-12)
    for name in mean:
        torch.testing.assert_close(same_by_rate[name], mean[name])


def test_a_server_step_by_hand():
    start, adapters = _point(1.0, 0.0, 0.0), [_point(5.0, 0.0, 0.0), _point(1.0, 3.0, 0.0)]
    stepped = server_step(start, adapters, [3, 1], learning_rate=2.0)
    assert flat(stepped).tolist() == [7.0, 1.5, 0.0]  # 1 + 2 * 3/4 * 4 and 2 * 1/4 * 3
    stepped = server_step(start, adapters, [3, 1], learning_rate=2.0, lengths=[4.0, 3.0])
    assert flat(stepped).tolist() == [2.5, 0.5, 0.0]


def test_a_zero_update_has_no_direction_and_stays_zero():
    start = _point(1.0, 0.0, 0.0)
    stepped = server_step(start, [start, _point(1.0, 2.0, 0.0)], [1, 1], lengths=[0.0, 2.0])
    assert flat(stepped).tolist() == [1.0, 0.5, 0.0]


def test_updates_are_rows_in_the_adapters_order():
    rows = update_matrix(_point(1.0, 2.0, 3.0), [_point(1.0, 2.0, 4.0), _point(0.0, 2.0, 3.0)])
    assert rows.tolist() == [[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]


def _step(*values, num_examples=(1, 3)):
    updates = [
        Update(f"c{i}", {"a": torch.tensor(value)}, count, {})
        for i, (value, count) in enumerate(zip(values, num_examples, strict=False))
    ]
    return ServerStep(
        start={"a": torch.tensor([1.0, 1.0])},
        updates=updates,
        round=1,
        sampled=[update.client for update in updates],
        num_clients=2,
        num_refused=0,
        memory={"kept": 1},
    )


def test_a_step_by_hand():
    step = _step([1.0, 3.0], [5.0, 1.0])
    mean = chain(Count("by_examples"), Mean())(step)
    assert mean.adapter["a"].tolist() == [4.0, 1.5]  # (1·1 + 3·5)/4, (1·3 + 3·1)/4
    half = chain(Count("by_examples"), Mean(), Rate(0.5))(step)
    assert half.adapter["a"].tolist() == [2.5, 1.25]
    assert half.learning_rate == 0.5
    inside = chain(Count("by_examples"), Mean(learning_rate=0.5))(step)
    assert inside.adapter["a"].tolist() == [2.5, 1.25]
    unit = chain(UnitLengths(), Count("uniform"), Mean())(step)
    assert unit.adapter["a"].tolist() == [1.5, 1.5]
    assert step.adapter == {}


def test_entries_and_memory_pass_through():
    step = _step([1.0, 1.0], [5.0, 1.0])
    transforms = (UnitLengths(), Count("uniform"), Mean())
    done = chain(*transforms)(replace(step, entries={"own": 2}))
    assert done.entries == {"own": 2, "zero_updates": ["c0"]}
    assert done.memory == {"kept": 1}
    private = chain(Count("uniform"), Mean(), ServerNoise(PRIVACY, has_regulars=False))(step)
    assert private.memory.keys() == {"kept", "privacy"}
    assert private.hidden == ("drift",)


def test_no_round_with_privacy_ends_without_it(new_client, start, run_rounds):
    class BareConfig(FedAvgConfig):
        def server(self, num_rounds=0):
            return chain(Count("uniform"), Mean())

    cfg = BareConfig(privacy=PRIVACY)
    with pytest.raises(RuntimeError, match="privacy is part of the server's step"):
        run_rounds(fedavg, [new_client()], start, cfg)


@dataclass(frozen=True)
class Halved:
    """A newcomer: half of every coordinate of the mean."""

    def __call__(self, step):
        adapter = {name: value / 2 for name, value in step.adapter.items()}
        return replace(step, adapter=adapter, entries={**step.entries, "halved": True})


def test_a_newcomer_joins_a_chain(new_client, start, run_rounds):
    class HalvedConfig(FedAvgConfig):
        def steps(self, num_rounds):
            return [*super().steps(num_rounds), Halved()]

    whole, _ = run_rounds(fedavg, [new_client(), new_client("b")], start, FedAvgConfig())
    half, (rows,) = run_rounds(fedavg, [new_client(), new_client("b")], start, HalvedConfig())
    assert rows["round"]["halved"]
    for name, value in whole.adapter.items():
        torch.testing.assert_close(half.adapter[name], value / 2)
