from dataclasses import dataclass, replace

import pytest
import torch

from firm.federation import Update
from firm.federation.options.privacy import PrivacyConfig, ServerNoise
from firm.federation.strategies.fedavg import FedAvgConfig, fedavg
from firm.federation.transforms import (
    Count,
    Mean,
    Rate,
    ServerStep,
    UnitLengths,
    chain,
)

PRIVACY = PrivacyConfig(clip_norm=1.0, noise_multiplier=0.0)


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
