"""Checksums of the adapters that small runs end with, to be compared before and after a change.

    python benchmarks/golden.py /tmp/golden.json            # all cases
    python benchmarks/golden.py /tmp/golden.json privacy    # those whose names contain this

The first run writes the file; later ones compare, and exit with 1 where an adapter differs.
A restructuring must leave every adapter as it was, bit for bit. Each case is the smoke job with one
option, a strategy, an adapter or an engine; classic runs end with a whole model. Checksums hold on
one machine, with one set of versions.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOUR = ("--num_clients", "4")
NOISE = "clip_norm: 0.5, noise_multiplier: 0.1, noise_seed: 7"
LOCAL = "num_local_steps: 2}, local: {lr: 0.3, batch_size: 16"
CLASSIC = ("--rounds", "4", "--num_clients", "4", "--evaluate_every", "4")

SMOKE: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "ppo, network": ("--estimator.critic", "network"),
    "ppo, per batch": ("--strategy.solve_per", "batch"),
    "ppo, stacked": ("--engine", "stacked"),
    "critic-free": ("--estimator.name", "critic_free"),
    "critic-free, stacked": ("--estimator.name", "critic_free", "--engine", "stacked"),
    "preference": ("--strategy.preference", "[3, 1]"),
    "share_gram": ("--strategy.share_gram", "true"),
    "by examples": (
        *("--strategy.aggregation", "by_examples", "--partition.kind", "dirichlet"),
    ),
    "server rate": ("--strategy.server_learning_rate", "0.5"),
    "sampled clients": (*FOUR, "--strategy.clients_per_round", "2"),
    "lora, dropout": ("--policy.lora.dropout", "0.1"),
    "lora, freeze_a": ("--policy.lora.freeze_a", "true"),
    "lora_xs": ("--policy.adapter", "lora_xs"),
    "lora_xs, stacked": (
        *("--policy.adapter", "lora_xs", "--estimator.name", "critic_free"),
        *("--engine", "stacked"),
    ),
    "conditioned": (
        *("--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"),
    ),
    "conditioned, stacked": (
        *("--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"),
        *("--engine", "stacked"),
    ),
    "checkpointing": ("--policy.gradient_checkpointing", "true"),
    "bfloat16": ("--policy.dtype", "bfloat16"),
    **{
        f"robust, {rule}": (
            *(*FOUR, "--num_clients", "5"),
            *("--strategy.robust", f"{{rule: {rule}, num_attackers: {count}}}"),
        )
        for rule, count in {
            "median": 1, "trimmed_mean": 1, "krum": 1, "multi_krum": 1, "norm_clipping": 1,
            "normalization": 1,
        }.items()
    },
    **{
        f"privacy, {at}": (
            "--strategy.privacy",
            f"{{{NOISE}, at: {at}}}",
        )
        for at in ("server", "client")
    },
    "privacy, statistics": (
        "--strategy.privacy",
        f"{{{NOISE}, at: client, statistics: noisy}}",
    ),
    "upload, nearest": ("--strategy.upload", "{bits: 4}"),
    "upload, random": ("--strategy.upload", "{bits: 4, rounding: random}"),
    "upload, private": (
        *("--strategy.upload", "{bits: 8}"),
        *("--strategy.privacy", f"{{{NOISE}, at: client}}"),
    ),
    "ranks": ("--strategy.ranks", "{client_1: 2}"),
    "ranks, upload": ("--strategy.ranks", "{client_1: 2}", "--strategy.upload", "{bits: 8}"),
    "lora_mean": ("--strategy.lora_mean", "products"),
    "fedavg": ("--strategy.name", "fedavg"),
    "fedavg, proximal": ("--strategy.name", "fedavg", "--strategy.proximal", "0.1"),
    "fedcmoo": ("--strategy.name", "fedcmoo"),
    "fedcmoo, one way": ("--strategy.name", "fedcmoo", "--strategy.communication", "one_way"),
    "fedmgda": ("--strategy.name", "fedmgda"),
    "fsmgda": ("--strategy.name", "fsmgda"),
}  # fmt: skip
CLASSIC_CASES = {
    f"classic, {name}": f"{{strategy: {{name: {name}, {LOCAL}}}}}"
    for name in (
        "afl", "fedavg", "fedcmoo", "fedcmoo_pref", "fedmgda", "firm", "fsmgda", "qfedavg",
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="checksums by case, written or compared")
    parser.add_argument("part", nargs="?", default="", help="part of the names of the cases to run")
    options = parser.parse_args()
    known = json.loads(options.file.read_text()) if options.file.exists() else {}
    differ = []
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for name, checksum in checksums(Path(folder), options.part):
            is_new = name not in known
            verdict = "new" if is_new else "equal" if known[name] == checksum else "DIFFERENT"
            print(f"{name:28} {checksum} {verdict}", flush=True)
            if is_new:
                known[name] = checksum
                options.file.write_text(json.dumps(known, indent=1) + "\n")
            elif known[name] != checksum:
                differ.append(name)
    if differ:
        sys.exit(f"{len(differ)} adapters differ: {', '.join(differ)}")


def checksums(folder: Path, part: str) -> Any:
    """Yields the name of every case and the checksum of the adapter that it ends with."""
    for index, (name, arguments) in enumerate(SMOKE.items()):
        if part in name:
            out = folder / str(index)
            yield name, _run(out, "align", "--config", "smoke", *arguments, name=name)
    if part in "two processes":
        yield "two processes", _two_processes(folder / "two")
    for index, (name, settings) in enumerate(CLASSIC_CASES.items()):
        if part in name:
            algorithms = f"{{one: {settings}}}"
            out = folder / f"classic_{index}"
            yield name, _run(out, "classic", "--algorithms", algorithms, *CLASSIC, name=name)


def _run(out: Path, *command: str, name: str) -> str:
    from firm.cli.main import main as firm

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            firm([*command, "--out", str(out)])
    except BaseException:
        print(f"{name} ended with an error:\n{printed.getvalue()}")
        raise
    return checksum_of(out)


def _two_processes(out: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    arguments = ["recipes/firm_hh.py", "--config", "smoke", "--out", str(out)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *arguments], check=True, capture_output=True, env=environment)
    return checksum_of(out)


def checksum_of(run: Path) -> str:
    """Returns the first digits of the SHA-256 of a run's last weights."""
    found = sorted(run.glob("adapter/adapter_model.safetensors")) or sorted(
        run.rglob("checkpoints/*/*.safetensors")
    )
    if not found:
        raise FileNotFoundError(f"{run} has no weights")
    return hashlib.sha256(found[-1].read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
