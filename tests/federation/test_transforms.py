from dataclasses import dataclass, replace

import pytest
import torch

from firm.federation import Update
from firm.federation.privacy import PrivacyConfig
from firm.federation.robust import RobustConfig
from firm.federation.strategies.fedavg import FedAvgConfig, fedavg
from firm.federation.transforms import (
    Count,
    Mean,
    Privacy,
    Rate,
    Robust,
    ServerStep,
    UnitLengths,
    chain,
)

KRUM = Robust(RobustConfig("krum", 2))
PRIVACY = Privacy(PrivacyConfig(clip_norm=1.0, noise_multiplier=0.0), has_regulars=False)


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
    private = chain(Count("uniform"), Mean(), PRIVACY)(step)
    assert private.memory.keys() == {"kept", "privacy"}
    assert private.hidden == ("drift",)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ((KRUM, UnitLengths()), "normalize_updates must be false with a robust rule"),
        ((KRUM, Count("by_examples")), "uniform with robust.rule krum, got by_examples"),
        ((KRUM, Mean("products")), "set lora_mean to factors with robust.rule krum"),
        ((UnitLengths(), Mean("products")), "normalize_updates must be false"),
        ((Mean("products", learning_rate=0.5),), "server_learning_rate must be 1, got 0.5"),
        ((Mean("products"), Rate(0.5)), "server_learning_rate must be 1, got 0.5"),
        ((KRUM, Mean(), PRIVACY), "robust.rule must be none, got krum"),
        ((Mean("products"), PRIVACY), "lora_mean must be factors, got products"),
        ((UnitLengths(), Mean(), PRIVACY), "normalize_updates must be false with privacy"),
        ((Count("by_examples"), PRIVACY), "aggregation must be uniform, got by_examples"),
    ],
)
def test_what_cannot_follow_is_refused(transforms, message):
    with pytest.raises(ValueError, match=message):
        chain(*transforms)
    chain(Robust(RobustConfig()), Count("by_examples"), Mean("products"), Rate(1.0))


def test_no_round_with_privacy_ends_without_it(new_client, start, run_rounds):
    class BareConfig(FedAvgConfig):
        def server(self, num_rounds=0):
            return chain(Count("uniform"), Mean())

    cfg = BareConfig(privacy=PRIVACY.cfg)
    with pytest.raises(RuntimeError, match="a round ends with the server's noise"):
        run_rounds(fedavg, [new_client()], start, cfg)


@dataclass(frozen=True)
class Halved:
    """A newcomer: half of every coordinate of the mean."""

    def check(self, before):
        if not any(isinstance(each, Mean) for each in before):
            raise ValueError("there is no mean to halve.")

    def __call__(self, step):
        adapter = {name: value / 2 for name, value in step.adapter.items()}
        return replace(step, adapter=adapter, entries={**step.entries, "halved": True})


def test_a_newcomer_joins_a_chain(new_client, start, run_rounds):
    class HalvedConfig(FedAvgConfig):
        def server(self, num_rounds=0):
            return chain(Count(self.aggregation), Mean(), Halved())

    whole, _ = run_rounds(fedavg, [new_client(), new_client("b")], start, FedAvgConfig())
    half, (rows,) = run_rounds(fedavg, [new_client(), new_client("b")], start, HalvedConfig())
    assert rows["round"]["halved"]
    for name, value in whole.adapter.items():
        torch.testing.assert_close(half.adapter[name], value / 2)
    with pytest.raises(ValueError, match="no mean to halve"):
        chain(Halved(), Mean())
