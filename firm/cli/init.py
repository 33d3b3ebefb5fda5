"""Asks for model, data and reward models, and writes a configuration."""

import shlex
import sys
from functools import partial

from firm.federation.outside import legible, printable
from firm.jobs.init import InitConfig, Written, init
from firm.run import run_cli


def main(cfg: InitConfig) -> None:
    """Writes what `cfg` says, and prints how to go on."""
    written = init(cfg, input if sys.stdin.isatty() else None)
    print(legible(f"wrote {written.path}"))
    for line in in_words(written):
        print(printable(line, max_length=5_000))
    file = shlex.quote(str(written.path))
    print(legible(f"what would run  firm plan --config {file}"))
    print(legible(f"run it          firm align --config {file}"))


def in_words(written: Written) -> list[str]:
    """Returns what was found out, and what the configuration does with it."""
    config, found = written.config, written.inspection
    lines = [f"{config.policy.path} is aligned to {' and '.join(config.rewards)}"]
    if found is None:
        lines.append("model    its files cannot be read from here, so the defaults stay")
    else:
        context = f"{found.context:,} positions" if found.context else "any length"
        format = {"chat": "its chat template", "hh": "no chat template, so HH-RLHF's form"}
        lines += [
            f"model    {found.model_type}, {context}, {format.get(found.prompt_format)}",
            f"ends     {' '.join(found.ends) or 'none'}",
        ]
    lines.append(f"adapter  on {', '.join(config.policy.lora.target_modules or [])}")
    lines.append(f"dtype    {config.policy.dtype}, the faster one here")
    if written.num_rows is not None:
        lines.append(f"data     {written.num_rows:,} rows for {config.num_clients} clients")
    return lines


cli = partial(run_cli, main, InitConfig)
