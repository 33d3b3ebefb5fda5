"""Patterns of layers in an adapter that came from someone else."""

import json
import shutil
from pathlib import Path

import pytest

from firm.alignment.adapter_files import _is_quick, read_settings


@pytest.fixture
def adapter(tmp_path, small_adapter) -> Path:
    return Path(shutil.copytree(small_adapter, tmp_path / "theirs"))


@pytest.fixture(scope="module")
def small_adapter(tmp_path_factory) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model

    from firm.alignment.adapter_files import save_adapter

    folder = tmp_path_factory.mktemp("adapter") / "own"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    save_adapter(get_peft_model(model, LoraConfig(r=2, target_modules=["0"])), folder)
    return folder


def change(folder: Path, **settings) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


HANGING = [
    *(r"(a*)*b", r"(.*a){20}", r"(a|a)*$", r"(.|.)(.|.)(.|.)(.|.)x", r"([a-z]+)+\d"),
    *(r".*.*.*x", "a?" * 30 + "a" * 30, r"(?=(a+))a*\1", "((a|a))" * 20, "(" * 3000),
    *("a|" * 500, "a" * 2000, "|".join(["a.*"] * 17)),
]


KEYS = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern")


@pytest.mark.parametrize("pattern", HANGING, ids=lambda pattern: pattern[:12])
def test_a_pattern_that_can_take_long_is_refused(adapter, pattern):
    file = adapter / "adapter_config.json"
    whole = file.read_text()
    for key in KEYS:
        value = {pattern: 2} if key in ("rank_pattern", "alpha_pattern") else pattern
        more = {"layers_to_transform": [0]} if key == "layers_pattern" else {}
        change(adapter, **{key: value}, **more)
        with pytest.raises(ValueError, match=rf"adapter_config.json: {key} has the pattern "):
            read_settings(adapter)
        file.write_text(whole)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "0",
            "all-linear",
            "q_proj",
            "model.layers.0.self_attn.q_proj",
            r"model\.layers\.\d+\.mlp",
        ),
        *(r".*\.(q_proj|v_proj)", r"^model\.layers\.(0|1|2)\..*(q|v)_proj$", r".*?attn/.*"),
        *(r".*\.(?:q|k|v)_proj", r"\w+", ""),
        r"model\.audio_tower\..*|model\.vision_tower\..*",  # as FIRM writes it for two towers
    ],
)
def test_names_and_simple_patterns_are_accepted(adapter, pattern):
    change(adapter, target_modules=pattern or ["0"], rank_pattern={pattern: 2})
    assert read_settings(adapter).r == 2
    assert _is_quick(pattern)


def test_names_in_a_list_may_hold_anything(adapter):
    change(adapter, target_modules=["0", "(a*)*b"], exclude_modules=["(a*)*b"])
    assert read_settings(adapter).target_modules == {"0", "(a*)*b"}


def test_there_are_not_too_many_patterns(adapter):
    change(adapter, rank_pattern={f"layer.{n}": 2 for n in range(1001)})
    with pytest.raises(ValueError, match="rank_pattern must have at most 1000 entries, got 1001"):
        read_settings(adapter)
