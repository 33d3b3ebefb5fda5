"""Adapters merged by TIES and DARE are those of PEFT."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from firm.fronts.merging import merged_adapter


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.second(self.first(x))


def named(policy, adapter):
    return {
        name.replace(f".{adapter}.", "."): each.detach().clone()
        for name, each in policy.named_parameters()
        if "lora_" in name and f".{adapter}." in name
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a density of 1
def test_merged_adapters_give_the_changes_of_pefts():
    torch.manual_seed(0)
    lora = LoraConfig(
        r=2, lora_alpha=6, target_modules=["first", "second"], init_lora_weights=False
    )
    policy = get_peft_model(Model(), lora, adapter_name="one")
    policy.add_adapter("two", copy.deepcopy(lora))
    adapters, shares = [named(policy, "one"), named(policy, "two")], [1.0, 3.0]
    # DARE drops values at random, here none
    for merge, density in (("ties", 0.5), ("dare_linear", 1.0), ("dare_ties", 1.0)):
        policy.add_weighted_adapter(
            ["one", "two"], [0.25, 0.75], merge, combination_type=merge, density=density
        )
        merged = merged_adapter(adapters, shares, merge=merge, density=density)
        expected = named(policy, merge)
        assert merged.keys() == expected.keys()
        for name in (name for name in merged if "lora_A" in name):
            other = name.replace("lora_A", "lora_B")
            change = lora.lora_alpha / lora.r * merged[other] @ merged[name]
            torch.testing.assert_close(change, expected[other] @ expected[name])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a density of 1
def test_adapters_with_a_common_a_are_merged_by_their_shares():
    """Those of LoRA-XS, which trains B alone."""
    first, second = torch.randn(4, 2), torch.randn(4, 2)
    names = ("layer.lora_B.weight", "layer.lora_magnitude_vector")
    adapters = [dict.fromkeys(names, own) for own in (first, second)]
    merged = merged_adapter(adapters, [1.0, 3.0], merge="dare_linear", density=1.0)
    for name in names:
        torch.testing.assert_close(merged[name], 0.25 * first + 0.75 * second)


def test_dare_keeps_a_share_of_the_values_and_their_mean():
    values = {"a": torch.ones(100, 100)}
    merged = merged_adapter([values], [2.0], merge="dare_linear", density=0.2)["a"]
    assert merged.unique().tolist() == [0.0, 5.0]
    assert merged.mean().item() == pytest.approx(1.0, abs=0.1)
