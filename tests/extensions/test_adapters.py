"""Kinds of adapters and a sampler of preferences of another package: one file each."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from firm.alignment import (
    LoraSettings,
    PolicyConfig,
    fill_adapter_,
    load_adapters,
    load_policy,
    save_adapter,
    save_folded,
)
from firm.alignment.adapters import (
    Lora,
    PreferenceStream,
    register_adapter,
)
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.policy import adapter_parameters, without_needless_warnings
from firm.alignment.sequences import forward, set_preferences
from firm.cli.main import COMMANDS
from firm.federation import RandomStream
from firm.run import Run, UserError
from tests import smoke
from tests.plugins import plugins_forgotten
from tests.runs import read_adapter
from tests.smoke import POLICY

FOLDER = Path(__file__).parent
LORA = LoraSettings(r=3, alpha=6.0, dropout=0.0, target_modules=["q_proj", "v_proj"])
IDS = torch.randint(3, 50, (3, 12), generator=torch.Generator().manual_seed(0))
SHORT = (
    *("--rounds", 1, "--strategy.num_local_steps", 1, "--evaluation.num_validation_prompts", 0),
    *("--estimator.name", "critic_free"),
)


@pytest.fixture(autouse=True)
def own_plugins():
    with plugins_forgotten():
        yield


def chosen(kind: str) -> tuple[str, ...]:
    """The options that choose a kind."""
    return ("--plugins", f"[{FOLDER / kind}.py]", "--policy.adapter", kind)


def policy_of(kind: str, *, num_objectives: int = 1, fresh: bool = False) -> PeftModel:
    """A policy with a drawn adapter of a kind; conditioned if there are several objectives."""
    smoke.config(*chosen(kind))  # imports the plugin
    conditioning = ConditioningConfig(kind="preference" if num_objectives > 1 else "none")
    config = PolicyConfig(str(POLICY), adapter=kind, lora=LORA, conditioning=conditioning)
    stream = RandomStream(0, "adapter")
    policy = load_policy(config, stream=stream, num_objectives=num_objectives)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(policy).values() if not fresh else ():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return policy


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return forward(model, IDS, torch.ones_like(IDS, dtype=torch.bool)).logits


@pytest.mark.parametrize("kind", ["mos_lora", "dora"])
def test_plain_peft_reads_the_saved_adapter_and_a_start_brings_it_back(kind, tmp_path):
    policy, fresh = policy_of(kind), policy_of(kind, fresh=True)
    expected = logits_of(policy)
    with policy.disable_adapter():
        base = logits_of(policy)
    torch.testing.assert_close(logits_of(fresh), base, rtol=1e-4, atol=1e-4)
    assert (expected - base).abs().max() > 0.1
    save_adapter(policy, tmp_path)
    with without_needless_warnings():
        model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
        by_peft = PeftModel.from_pretrained(model, str(tmp_path)).eval()
    ours = load_adapters(PolicyConfig(str(POLICY), lora=LORA), [tmp_path])
    fill_adapter_(fresh, tmp_path, str(POLICY))
    for model in (by_peft, ours, fresh):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "trained"), [("mos_lora", "lora_M"), ("dora", "magnitude")])
def test_a_round_trains_every_parameter(kind, trained, tmp_path):
    run = Run(smoke.run(*SHORT, *chosen(kind), "--out", tmp_path / "run"))
    checkpoint = run.latest_checkpoint()
    assert checkpoint is not None
    after = checkpoint[1]["server"]["adapter"]
    cfg = smoke.config(*SHORT, *chosen(kind))
    policy = load_policy(cfg.policy, stream=RandomStream(cfg.seed, "adapter"))
    before = adapter_parameters(policy)
    assert after.keys() == before.keys()
    assert any(trained in name for name in after)
    for name, values in before.items():
        assert (after[name] - values).abs().max() > 1e-5, name


@pytest.mark.slow
def test_a_finished_run_is_measured_without_its_plugins(tmp_path):
    plugins = f"[{FOLDER / 'mos_lora'}.py, {FOLDER / 'shifted_engine'}.py]"
    own = ("--policy.adapter", "mos_lora", "--rollout.engine.name", "shifted")
    with plugins_forgotten():
        run = smoke.run(*SHORT, "--plugins", plugins, *own, "--out", tmp_path / "run")
    COMMANDS["evaluate"].run([str(run), "--out", str(tmp_path / "measured")])
    assert (tmp_path / "measured").is_dir()


def test_matrices_between_a_and_b_are_trained_alike_by_all_engines(tmp_path):
    ends = [
        read_adapter(
            smoke.run(*SHORT, *chosen("mos_lora"), "--engine", engine, "--out", tmp_path / engine)
        )
        for engine in ("local", "stacked")
    ]
    for name, values in ends[0].items():
        torch.testing.assert_close(values, ends[1][name], rtol=0, atol=1e-5)


def test_a_conditioned_one_folds_at_each_preference(tmp_path):
    policy = policy_of("mos_lora", num_objectives=3)
    preferences = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.4, 0.6]])
    set_preferences(policy, preferences)
    expected = logits_of(policy)
    for row, preference in enumerate(preferences.tolist()):
        save_folded(policy, tmp_path / str(row), preference)
        alone = load_adapters(PolicyConfig(str(POLICY), lora=LORA), [tmp_path / str(row)])
        torch.testing.assert_close(logits_of(alone)[row], expected[row], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("dora", ("--engine", "stacked"), "engine must be local with policy.adapter dora"),
        ("dora", smoke.FRONT, "conditioning.kind must be none with policy.adapter dora"),
        (
            "dora",
            ("--strategy.ranks", "{client_1: 2}"),
            "strategy.ranks requires policy.adapter lora, got dora",
        ),
        ("mos_lora", ("--strategy.lora_mean", "products"), "must be factors with policy.adapter"),
    ],
)
def test_an_option_that_a_kind_lacks_is_refused(kind, options, reason):
    with pytest.raises(UserError, match=reason):
        smoke.config(*chosen(kind), *options)


def test_clients_draw_preferences_by_the_sampler_of_another_package(tmp_path, monkeypatch):
    drawn, own = [], PreferenceStream.draw

    def noted(*arguments):
        drawn.append(own(*arguments))
        return drawn[-1]

    monkeypatch.setattr(PreferenceStream, "draw", noted)
    plugin = ("--plugins", f"[{FOLDER / 'lattice'}.py]", "--policy.conditioning.sampler", "lattice")
    smoke.run(*smoke.FRONT, *plugin, "--rounds", 1, "--out", tmp_path / "run")
    preferences = torch.cat(drawn)
    assert torch.equal(preferences * 4, (preferences * 4).round())
    assert len(preferences.unique(dim=0)) > 1
    with pytest.raises(UserError, match=r"conditioning\.sampler must be one of dirichlet, lattice"):
        smoke.config(*smoke.FRONT, *plugin[:2], "--policy.conditioning.sampler", "grid")


def test_a_name_is_registered_once():
    smoke.config(*chosen("dora"))

    class Other(Lora):
        name = "dora"

    with pytest.raises(ValueError, match="an adapter 'dora' is already registered"):
        register_adapter(Other)
