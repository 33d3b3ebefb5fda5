"""The notebook of the guide runs as it stands, and what is stored of it is what it prints."""

import os
import re

import pytest

from tests.smoke import POLICY, ROOT, WHOLE

NOTEBOOK = ROOT / "docs/guide/notebook.ipynb"
nbformat = pytest.importorskip("nbformat", reason="the notebook's test needs nbclient")
nbclient = pytest.importorskip("nbclient", reason="the notebook's test needs nbclient")
pytest.importorskip("ipykernel", reason="the notebook's test needs ipykernel")


def read(policy=WHOLE):
    """Returns the notebook, with another policy."""
    text = NOTEBOOK.read_text(encoding="utf-8").replace(WHOLE, str(policy))
    return nbformat.reads(text, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """Returns what a cell shows: streams by name, and other outputs by their types."""
    return [output.get("name") or sorted(output.data) for output in cell.outputs]


def text(cell):
    return "".join(o.get("text") or o.data.get("text/plain", "") for o in cell.outputs)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    notebook, beside = read(POLICY), {*NOTEBOOK.parent.iterdir()}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        nbclient.NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute(env={**os.environ, **quiet})
    assert len([*(folder / "runs").iterdir()]) == 2
    assert {*NOTEBOOK.parent.iterdir()} == beside
    return notebook


def test_it_runs_without_an_error_or_a_warning(executed):
    assert [cell.source for cell in code(executed)] == [cell.source for cell in code(read(POLICY))]
    for cell in code(executed):
        assert not [
            o for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"
        ]


def test_what_is_stored_is_of_the_kinds_that_it_shows(executed):
    *fresh, page = code(executed)
    *stored, last = code(read())
    assert [kinds(cell) for cell in stored] == [kinds(cell) for cell in fresh]
    assert [cell.execution_count for cell in (*stored, last)] == [*range(1, len(stored) + 2)]
    assert page.source == "result.report()"
    assert "<iframe" in page.outputs[0].data["text/html"]
    assert not last.outputs  # megabytes


@pytest.mark.parametrize("notebook", ["stored", "executed"])
def test_it_has_a_line_for_each_round_and_the_table_of_results(notebook, request):
    cells = code(read() if notebook == "stored" else request.getfixturevalue("executed"))
    [first, second] = [
        cell for cell in cells if "align(" in cell.source and "def" not in cell.source
    ]
    for cell in (first, second):
        assert re.findall(r"^round (\d)/4  brief ", text(cell), re.MULTILINE) == list("1234")
    [table] = [cell for cell in cells if cell.source.startswith("result.rewards")]
    header, *lines = text(table).splitlines()
    assert header.split() == ["brief", "thorough"]
    names = ["base", "base_se", "aligned", "aligned_se", "change", "change_se"]
    assert [line.split()[0] for line in lines] == [*names, "num_prompts", "z"]


def test_it_is_small_and_names_no_folder_of_a_machine():
    assert NOTEBOOK.stat().st_size < 300_000
    for cell in code(read()):
        assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users)/", text(cell))
