"""Leaves one tensor or module on the host in each package, and runs the tests that must notice.

    python benchmarks/device_mutations.py            # minutes
    python benchmarks/device_mutations.py firm/fmoo

"survived" is a gap in the tests. Each mutation is made in a copy of the tree, on the pretend
accelerator, one after the other. Tests that fail without any notice none: run tests/accelerator
first.
"""

import argparse
import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from compileall import compile_dir
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from types import CodeType, FunctionType

ROOT = Path(__file__).parent.parent
IMPORTED = ("pytest", "datasets", "firm.jobs.alignment", "firm.jobs.fmoo", "reward_models")
"""What the processes that run tests are forked with; the package is that of the copy."""
ENDED = 100
"""Added to pytest's exit codes: a process that raises ends with 1, as after a test that fails."""
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
        "(each * factors).to(losses)",
        "(each * factors).cpu()",
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
        "torch.tensor(list(part.end_ids), device=device)",
        "torch.tensor(list(part.end_ids))",
        STACKED,
    ),
    Mutation(
        "firm/alignment/stacked/client.py",
        "generator = copy_of_generator(self.model.device)\n        request",
        "generator = torch.Generator()\n        request",
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
        "dtype=torch.float32).to(matrix)",
        "dtype=torch.float32)",
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
        "firm/federation/processes.py",
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
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
        os.environ.setdefault(name, "1")
    multiprocessing.set_forkserver_preload([*IMPORTED])
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder) / "firm")
        # by their content: files change within the resolution of their times
        for package in ("firm", "reward_models", "tests/accelerator"):
            compile_dir(tree / package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        os.environ["PYTHONPATH"] = str(tree)
        os.chdir(tree)  # from which the server that forks imports the package, before it changes
        first = multiprocessing.get_context("forkserver").Process(target=int)
        first.start()
        first.join()
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
        return not failures(tree, mutation)
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


def failures(tree: Path, mutation: Mutation) -> str:
    """Returns pytest's output if a mutation's test fails in a mutated tree; empty if it passes.

    It runs in a process whose accelerator is the pretend one, forked from one that has imported
    the tree without the mutation.
    """
    output = tree.parent / "output.txt"
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(tree, mutation, output)
    )
    process.start()
    process.join()
    text = output.read_text(encoding="utf-8")
    if process.exitcode not in (ENDED, ENDED + 1):  # such as a test that does not exist
        raise RuntimeError(f"the process ended with {process.exitcode}:\n{text}")
    return text if process.exitcode != ENDED else ""


def _run(tree: Path, mutation: Mutation, output: Path) -> None:
    """Ends this process with pytest's exit code and `ENDED`."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "FIRM_PRETEND_REPORTS": os.devnull,
    }
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    import pytest

    _mutate_imported(tree / mutation.file, mutation)
    options = ("-q", "-x", "-m", "", "-p", "no:cacheprovider", "--assert", "plain")
    sys.exit(ENDED + pytest.main([*options, mutation.test]))


def _mutate_imported(path: Path, mutation: Mutation) -> None:
    """Gives the functions that were imported from a file the mutated code."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    before, after = (compile(each, str(path), "exec") for each in (text, mutated(mutation, text)))
    pairs = zip(_codes(before), _codes(after), strict=True)
    codes = {(own.co_qualname, own.co_linetable): mutant for own, mutant in pairs}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename == str(path):
            each.__code__ = codes[each.__code__.co_qualname, each.__code__.co_linetable]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and those that are in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


if __name__ == "__main__":
    sys.exit(main())
