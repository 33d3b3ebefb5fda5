"""Every command and snippet of README and guide runs."""

import io
import json

import pytest

from tests.docs.page import blocks, run_page
from tests.nursery import forked_workers
from tests.plugins import plugins_forgotten
from tests.smoke import POLICY, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
BROKEN = [
    "sh\nfirm align --strategy.betta 1\n",
    "sh\nfirm align --plan '\n",
    "sh\nfirm fly\n",
    "sh\nfirm network fly\n",
    "sh\nmake coffee\n",
    "sh\npip install 'firm-align[wings]'\n",
    "sh\nrm nothing\n",
    "sh\npython benchmarks/fronts.py --front a\n",
    "sh\ntorchrun --nproc_per_node 2 -m firm align --round 3\n",
    "yaml\nstrategy: { betta: 1 }\n",
    "python\nfrom firm import nothing\n",
    "python later.py\nreturn return\n",
    "toml\n[a\n",
    "fortran\nstop\n",
]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*:FutureWarning"
)  # PEFT


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """The working directory, with a reader's prompts and without a person at the terminal."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"Name {number} colours."}) for number in range(80)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with plugins_forgotten(), forked_workers():
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_commands_and_trainings_of_a_page_run(page):
    run_page(page, policy=POLICY)


@pytest.mark.slow
def test_the_readmes_example_learns():
    content = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = (block.text for block in blocks(content) if block.language == "python")
    exec(example, namespace := {})
    z = namespace["result"].rewards.loc["z"]
    assert list(z.index) == ["brief", "joy"]
    assert (z > 5).all(), z


@pytest.mark.parametrize("block", BROKEN)
def test_a_broken_block_is_found(block, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```{block}```\n")
    with pytest.raises((Exception, SystemExit)):
        run_page(page)
