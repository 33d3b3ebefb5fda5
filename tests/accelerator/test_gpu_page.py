"""The page of costs on an accelerator."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks import gpu
from firm.base.devices import device_title
from tests.accelerator.device import NAME, accelerator
from tests.alignment.test_gpu import Here, cells


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # which inductor records
def test_the_page_of_costs_has_every_case_with_its_figures(tmp_path, monkeypatch):
    for function in ("set_verbosity_error", "disable_progress_bar"):  # of this whole process
        monkeypatch.setattr(transformers.utils.logging, function, lambda: None)
    monkeypatch.setattr(gpu, "Worker", Here)
    monkeypatch.setattr(gpu, "_tests", lambda device, budget: "2 passed")
    out = tmp_path / "page.md"
    gpu.main(["--shape", "tiny", "--clients", "2", "--out", str(out)])
    page = out.read_text()
    assert f"on {device_title(torch.device(NAME))}; torch" in page
    assert "Tests that need an accelerator: 2 passed" in page
    rows = cells(page, "Throughput and memory")
    assert [row[2] for row in rows if row[0] == "critic_free"][-2:] == [gpu.WHOLE, gpu.STATIC]
    assert len(rows) == 6 + (NAME == "cuda")  # compiled rounds
    for *_, peak, planned, _, _ in rows:
        assert float(planned) > 0
        assert float(peak) > 0
    _, peer, seconds, stacked, ratio, peak, stacked_peak = cells(page, "Beside TRL")[0]
    assert peer == "trl"
    assert float(ratio) == pytest.approx(float(stacked) / float(seconds), rel=0.05)
    assert min(float(peak), float(stacked_peak)) > 0
    assert accelerator().max_memory_allocated() > 0


def test_a_row_about_compiled_steps_says_if_they_were_not():
    decoder = SimpleNamespace(failure=None)
    policy = SimpleNamespace(compiled_decoder=decoder)
    assert gpu._not_compiled(policy) == ""
    decoder.failure = "no such instruction"
    assert gpu._not_compiled(policy) == "failed: not compiled (no such instruction)"
    assert gpu._not_compiled(SimpleNamespace()).startswith("failed: not compiled")
    assert gpu.COMPILED in [case.engine for case in gpu.cases([8], compiles=True)]
