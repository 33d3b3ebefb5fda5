"""Leaves one tensor or module on the host in each package, and runs the tests that must notice.

    python benchmarks/device_mutations.py            # minutes
    python benchmarks/device_mutations.py firm/fmoo

"survived" is a gap in the tests. Each mutation is made in a copy of the tree, on the pretend
accelerator, one after the other. The tests run once without any, and must pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALIGNMENT, CLASSIC = "tests/accelerator/test_alignment.py::", "tests/accelerator/test_classic.py::"
JACOBIAN = (
    "tests/accelerator/test_gradients.py::"
    "test_a_jacobian_is_where_its_parameters_are[PerSequenceGradients]"
)
COMPRESSORS = "tests/accelerator/test_gradients.py::test_every_compressor_works_as_on_the_cpu"
FEDAVG = f"{ALIGNMENT}test_every_strategy_runs[fedavg]"
FIRM = f"{ALIGNMENT}test_every_strategy_runs[firm]"
FRONT = f"{ALIGNMENT}test_a_front_is_trained_measured_and_picked_from_and_its_adapters_speak"
STACKED = f"{ALIGNMENT}test_a_run_ends_as_on_the_cpu[critic_free-stacked]"
LOCAL = f"{ALIGNMENT}test_a_run_ends_as_on_the_cpu[critic_free-local]"
PROCESSES = f"{ALIGNMENT}test_two_processes_have_a_device_each_and_share_clients_or_batches"
PROMPTS_ONCE = (
    f"{ALIGNMENT}test_a_policy_on_two_devices_ends_as_on_one[auto-critic_free, prompts once]"
)
LENET = f"{CLASSIC}test_every_model_is_trained_and_evaluated_there[lenet]"


@dataclass(frozen=True)
class Mutation:
    """A piece of code that occurs once in a file, and its replacement."""

    file: str
    before: str
    after: str
    test: str
    """Test that must fail."""


def _variant(name: str) -> str:
    return f"{ALIGNMENT}test_every_variant_runs[{name}]"


MUTATIONS = (
    Mutation("firm/alignment/trainer.py", "queries = queries.to(self.device)", "pass", FEDAVG),
    Mutation(
        "firm/alignment/evaluation.py",
        "queries = queries.to(model.device)",
        "pass",
        FRONT,
    ),
    Mutation(
        "firm/alignment/adapter_files.py",
        "place_(policy, config, take_device(config.device))",
        "pass",
        FRONT,
    ),
    Mutation(
        "firm/alignment/estimators/critic_free.py",
        "advantages.flatten(1).to(rewards.dtype)",
        'advantages.flatten(1).to("cpu", rewards.dtype)',
        FEDAVG,
    ),
    Mutation(
        "firm/alignment/adapters/conditioned.py",
        "own.T.to(coefficients)",
        "own.T.cpu()",
        FRONT,
    ),
    Mutation(
        "firm/alignment/adapters/lora_xs.py",
        "layer.xs_left.T.to(inner)",
        "layer.xs_left.T.cpu()",
        _variant("LoRA-XS, checkpointing"),
    ),
    Mutation(
        "firm/alignment/rollout_engines/transformers.py",
        "torch.tensor(request.end_ids, device=responses.device)",
        "torch.tensor(request.end_ids)",
        FIRM,
    ),
    Mutation(
        "firm/alignment/decoding.py",
        "torch.tensor(list(end_ids), device=device)",
        "torch.tensor(list(end_ids))",
        STACKED,
    ),
    Mutation(
        "firm/alignment/stacked/model.py",
        "device=ids.device",
        'device=torch.device("cpu")',
        STACKED,
    ),
    Mutation(
        "firm/gradients/jacobian.py",
        "parameters[0].new_empty(shape, dtype=dtype)",
        "torch.empty(shape, dtype=dtype)",
        JACOBIAN,
    ),
    Mutation(
        "firm/gradients/per_sequence.py",
        "torch.arange(len(self.index), device=self.index.device)",
        "torch.arange(len(self.index))",
        PROMPTS_ONCE,
    ),
    Mutation(
        "firm/gradients/compression.py",
        "generator=generator).to(matrix.device)",
        "generator=generator)",
        COMPRESSORS,
    ),
    Mutation(
        "firm/gradients/quantization.py",
        "generator=generator).to(runs.device)",
        "generator=generator)",
        COMPRESSORS,
    ),
    Mutation(
        "firm/gradients/sketch.py",
        "signs.mul_(2).sub_(1).to(device)",
        "signs.mul_(2).sub_(1)",
        COMPRESSORS,
    ),
    Mutation("firm/federation/training.py", "pull.to(rows)", "pull", _variant("proximal")),
    Mutation(
        "firm/federation/sharing.py",
        "gradients.jacobian[:, columns].float().cpu()",
        "gradients.jacobian[:, columns].float()",
        f"{ALIGNMENT}test_every_strategy_runs[fedcmoo]",
    ),
    Mutation(
        "firm/federation/engines/processes.py",
        "else tensor.cpu()",
        "else tensor.clone()",
        PROCESSES,
    ),
    Mutation(
        "firm/federation/options/ranks.py",
        "self._trained.to(rows)",
        "self._trained",
        _variant("ranks"),
    ),
    Mutation(
        "firm/fmoo/client.py",
        "self.of_served(weights).to(self._workspace.data.inputs.device)",
        "self.of_served(weights)",
        LENET,
    ),
    Mutation("firm/fmoo/workspace.py", "angles = angles.to(images.device)", "pass", LENET),
    Mutation(
        "firm/fmoo/task_data.py", "targets=self.targets.to(device)", "targets=self.targets", LENET
    ),
    Mutation(
        "firm/jobs/alignment_loading.py", "place_(policy, cfg.policy, device)", "pass", FEDAVG
    ),
    Mutation(
        "firm/jobs/fmoo.py",
        "load_data(cfg.data).to(device)",
        "load_data(cfg.data)",
        f"{CLASSIC}test_a_study_ends_as_on_the_cpu[mlp]",
    ),
    Mutation(
        "reward_models/sequence_classifier.py", "values.to(self.model.device)", "values", LOCAL
    ),
    Mutation(
        "reward_models/sequence_classifier.py", "return model.to(place), ", "return model, ", LOCAL
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", nargs="?", default="", help="start of the files' paths")
    prefix = parser.parse_args(arguments).prefix
    mutations = [each for each in MUTATIONS if each.file.startswith(prefix)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder) / "firm")
        failed = failures(tree, sorted({each.test for each in mutations}))
        if failed:
            print(f"{failed}\nthe tests fail without a mutation")
            return 1
        survivors = 0
        for each in mutations:
            has_survived = survives(each, tree)
            survivors += has_survived
            outcome = "survived" if has_survived else "red"
            print(f"{outcome:10}{each.file}: {each.before}  ->  {each.after}", flush=True)
    print(f"{survivors} of {len(mutations)} survived")
    return int(survivors > 0)


def copy_of_tree(folder: Path) -> Path:
    """Returns a copy of the files that git tracks or would, and of the pretend accelerator."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("build/pretend/*.so")]
    for name in [*filter(None, listed.split("\0")), *built]:
        if (ROOT / name).is_file():  # tracked files may have been deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def survives(mutation: Mutation, tree: Path) -> bool:
    """Returns whether the test passes with the mutation."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, text), encoding="utf-8")
    try:
        return not failures(tree, [mutation.test])
    finally:
        path.write_text(text, encoding="utf-8")


def mutated(mutation: Mutation, text: str) -> str:
    """Returns a file's text with the mutation.

    Raises:
        ValueError: The code does not occur exactly once.
    """
    if (count := text.count(mutation.before)) != 1:
        raise ValueError(
            f"{mutation.before!r} must occur once in {mutation.file}, got {count}; adapt the "
            "mutation to the code."
        )
    return text.replace(mutation.before, mutation.after)


def failures(tree: Path, tests: Sequence[str]) -> str:
    """Returns pytest's output if tests fail in a copy of the tree; empty if they pass.

    They run in a process whose accelerator is the pretend one.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # files change within the resolution of their times
        "OMP_NUM_THREADS": "1",
        "FIRM_PRETEND_REPORTS": os.devnull,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):  # such as a test that does not exist
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
