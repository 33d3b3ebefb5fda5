"""The changes of a conditioned run that are tried are what their names say."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import steering_trials
from benchmarks.steering_trials import (
    BATCH,
    NUM_REPLIES,
    Core,
    SingularValues,
    conditioned_by,
    pairs,
)
from firm.alignment import PolicyConfig, copy_adapter, load_policy
from firm.alignment.adapters import Lora, LoraSettings
from firm.alignment.adapters.conditioned import ConditioningConfig, fold
from firm.alignment.batches import ShuffledPasses
from firm.alignment.decoding import Draws
from firm.alignment.policy import adapter_parameters, load_adapter_
from firm.alignment.sequences import SINGLE_PROCESS, forward, set_preferences
from firm.federation import RandomStream

pytestmark = pytest.mark.slow
POLICY = Path(__file__).parents[2] / "firm/miniature/checkpoints/policy"


def policy(**options):
    config = PolicyConfig(path=str(POLICY), **options)
    return load_policy(config, stream=RandomStream(0, "adapter"), num_objectives=2).eval()


@pytest.mark.parametrize("kind", [Core, SingularValues])
def test_a_kinds_rows_have_the_adapters_into_which_it_folds(kind):
    with conditioned_by(kind):
        own = policy(conditioning=ConditioningConfig(kind="preference"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(own).items():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    preferences = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.0, 1.0]])
    tokens = torch.randint(5, 50, (3, 12), generator=generator)
    plain = policy()
    lora = kind(Lora(LoraSettings()), 2).as_lora(own, copy_adapter(adapter_parameters(own)))
    set_preferences(own, preferences)
    with torch.no_grad():
        logits = forward(own, tokens, tokens != 0).logits
        for row, preference in enumerate(preferences.tolist()):
            load_adapter_(adapter_parameters(plain), fold(lora, preference))
            alone = forward(plain, tokens[row : row + 1], tokens[row : row + 1] != 0).logits
            torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shares_numbers", [False, True])
def test_pairs_have_a_prompt_and_random_numbers_in_common(shares_numbers):
    queries = SimpleNamespace(num_rows=BATCH, device=torch.device("cpu"))
    request = SimpleNamespace(queries=queries, generator=None, team=SINGLE_PROCESS)
    with pairs(shares_numbers=shares_numbers):
        first, twin, second, other = ShuffledPasses("abcdefgh", RandomStream(0, "prompts")).draw(4)
        numbers = Draws(request).draw(7).unflatten(0, (-1, 2, NUM_REPLIES))
    assert (first == twin, second == other, first == second) == (True, True, False)
    assert torch.equal(numbers[:, 0], numbers[:, 1]) is shares_numbers
    assert not torch.equal(numbers[0], numbers[1])


@pytest.mark.parametrize("names", [[], ["core"]])
def test_every_trial_runs_unless_some_are_named(names, monkeypatch, capsys):
    monkeypatch.setattr(steering_trials, "tried", lambda trial, name, seed, runs: (0.5, seed))
    steering_trials.main([*names, "--seeds", "1", "2"])
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == (names or list(steering_trials.TRIALS))
    assert all(line.endswith("utility 0.500, 0.500  largest KL 1.0, 2.0") for line in told)
