"""Trains a reward model from ranked pairs of replies, and reports how it ranks held-out pairs."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers

from firm.alignment.pairs import PairsConfig, load_pairs
from firm.base.devices import dtype_name, threads_restored
from firm.base.inside import replace_text, whole_folder
from firm.base.json_text import json_text
from firm.base.sanitize import printable
from firm.jobs.fetch import fetch_policy
from firm.jobs.init import likely_format
from firm.jobs.sources import (
    REWARD_SETTINGS_NAME,
    check_data,
    check_folder,
    check_reward,
    trained_settings,
)
from firm.report.page import write_page
from firm.report.reward_page import RewardReport, report_of, reward_page
from firm.run.errors import UserError
from firm.run.files import file_errors
from firm.run.names import dated_folder
from firm.run.progress import print_table, say
from firm.run.shipped import with_shipped_paths
from reward_models import training
from reward_models.config import RewardModelConfig
from reward_models.registry import load_reward_model, reward_settings
from reward_models.training_config import RewardConfig

"""File with the settings of a trained reward model, in its folder."""


@dataclass(frozen=True)
class TrainedReward:
    """A trained reward model."""

    path: Path
    """Folder with the adapter, the tokenizer, `reward.yaml` and `report.html`."""
    settings: RewardModelConfig
    """Settings of the reward model, as in `reward.yaml`."""
    report: RewardReport


@threads_restored()
def train_reward(cfg: RewardConfig) -> TrainedReward:
    """Trains a LoRA adapter and a head on the pairs by the loss of Bradley and Terry.

    The loss is -log σ(s(chosen) - s(rejected)), the maximum likelihood of P(chosen preferred) =
    σ(s(chosen) - s(rejected)) (Bradley and Terry, 1952). TRL's trainer reads the tokens that the
    reward model will read when it scores replies.

    Raises:
        UserError: The pairs, the base or an option are unusable, or `out` exists.
    """
    out = cfg.out or dated_folder("reward")
    if out.exists():
        raise UserError(f"{out} already exists; choose another --out, or remove it.")
    for source in [cfg.pairs] if isinstance(cfg.pairs, str) else cfg.pairs:
        check_data("pairs", with_shipped_paths(source))
    fetch_policy(cfg.base)
    cfg = with_shipped_paths(replace(cfg, dtype=dtype_name(cfg.dtype, cfg.device)))
    check_folder("base", cfg.base)
    for name, text in cfg.others.items():
        check_reward(f"others.{name}", **reward_settings(text))
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    notes: list[str] = []
    try:
        source = PairsConfig(source=cfg.pairs, split=cfg.split, ranked_by=cfg.ranked_by)
        pairs = load_pairs(source, on_note=notes.append)
        training.check_texts(pairs)
        ranked, held_out = training.split_pairs(pairs, cfg)
        others = {n: _settings_of(text) for n, text in cfg.others.items()}
        reward = training.new_reward(cfg)
        # before the training, which would be lost with them
        differences = {
            name: training.score_differences(load_reward_model(own, name), held_out)
            for name, own in others.items()
        }
    except ValueError as error:
        raise UserError(str(error)) from error
    for note in notes:
        say(f"note: {printable(note)}")
    say(f"{len(ranked)} pairs to train on, {len(held_out)} held out")
    began = time.monotonic()
    losses = training.fit(reward, ranked, cfg)
    seconds = time.monotonic() - began
    differences = {cfg.name: training.score_differences(reward, held_out), **differences}
    lengths = [len(pair.chosen.split()) - len(pair.rejected.split()) for pair in held_out]
    report = report_of(
        differences,
        np.array(lengths),
        num_training=len(ranked),
        losses=losses,
        seconds=seconds,
    )
    settings = RewardModelConfig(
        path=str(out.absolute()),  # a relative one would depend on the folder of the next command
        format=reward.format,
        append_eos=reward.append_eos,
        max_length=reward.max_length,
        dtype=cfg.dtype,
    )
    with (
        file_errors(f"the reward model {out}", again="train again"),
        whole_folder(out) as folder,
    ):
        model: Any = reward.whole_model
        model.save_pretrained(folder)
        reward.tokenizer.save_pretrained(folder)
        text = training.reward_yaml(cfg.name, settings, reward)
        replace_text(folder / REWARD_SETTINGS_NAME, text)
        replace_text(folder / "report.json", json_text(asdict(report), indent=1) + "\n")
        title = f"Reward model {cfg.name!r} of {Path(cfg.base).name}"
        write_page(folder / "report.html", reward_page(report, title=title))
    return TrainedReward(out, settings, report)


def _settings_of(text: str) -> RewardModelConfig:
    options = trained_settings(text)
    if "path" in options:
        options.setdefault("format", likely_format(options["path"]))
    return RewardModelConfig(**options)


def main(cfg: RewardConfig) -> None:
    """Trains a reward model, and prints its report and the settings to use it."""
    trained = train_reward(cfg)
    for table in trained.report.tables():
        print_table(table.title, table.headings, table.rows)
    print(f"wrote {trained.path}: the adapter, report.html, and reward.yaml, which has the lines:")
    print((trained.path / REWARD_SETTINGS_NAME).read_text(encoding="utf-8"), end="")
