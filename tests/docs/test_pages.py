"""Every command and snippet of README and guide runs."""

import os
import subprocess
import sys

import pytest

from tests.smoke import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]


def run(page, folder, *options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"WANDB_MODE": "offline", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "tests/docs/page.py", page, *options],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page, tmp_path):
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_trainings_of_a_page_run(page, tmp_path):
    done = run(page, tmp_path, "--whole")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(
    "block",
    [
        "sh\nfirm align --strategy.betta 1\n",
        "sh\nfirm fly\n",
        "sh\nmake coffee\n",
        "sh\npip install 'firm-align[wings]'\n",
        "sh\nrm nothing\n",
        "sh\ntorchrun --nproc_per_node 2 -m firm align --round 3\n",
        "yaml\nstrategy: { betta: 1 }\n",
        "python\nfrom firm import nothing\n",
    ],
)
def test_a_broken_snippet_is_found(block, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```{block}```\n")
    assert run(page, tmp_path).returncode != 0
