import pytest
import torch

from firm.alignment import take_device
from firm.base import devices
from firm.base.devices import named_device, prepare_attention


@pytest.fixture(params=["cuda", "xpu"])
def accelerator(request, monkeypatch):
    """Has torch report two accelerators of a type; gives the type."""
    for name, value in {
        "is_available": True,
        "current_accelerator": torch.device(request.param),
        "device_count": 2,
        "current_device_index": 1,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    return request.param


def test_an_accelerator_is_named_by_its_type_or_by_its_index(accelerator):
    assert named_device("auto") == named_device(accelerator) == torch.device(accelerator)
    assert named_device(f"{accelerator}:1") == torch.device(accelerator, 1)
    assert named_device("cpu") == torch.device("cpu")
    known = f"one of cpu, {accelerator}, {accelerator}:0, {accelerator}:1"
    for name in (f"{accelerator}:2", "mps", "meta", f"{accelerator}:x", "gpu", ""):
        with pytest.raises(ValueError, match=f"no device '{name}' here: .*{known}"):
            named_device(name)


def test_only_an_index_changes_the_device_of_the_process(accelerator, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    current = torch.device(accelerator, 1)
    assert take_device("cpu", num_processes=2) == torch.device("cpu")
    for name in ("auto", accelerator):
        assert take_device(name, num_processes=2) == current
    assert taken == []
    assert take_device(f"{accelerator}:1") == current
    assert taken == [1]
    with pytest.raises(ValueError, match=rf"must be auto or {accelerator} with 2 processes"):
        take_device(f"{accelerator}:1", num_processes=2)


@pytest.fixture
def cudnn_attention():
    """Has torch choose cuDNN's kernels for attention, as it does by default."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_attention_is_kept_from_cudnn_on_its_devices_only(cudnn_attention):
    prepare_attention(torch.device("cpu"))
    assert cudnn_attention()
    prepare_attention(torch.device("cuda", 1))
    assert not cudnn_attention()


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.4, True), (0.01, False)])
def test_a_dtype_that_the_cpu_multiplies_slowly_is_named_with_its_key(
    monkeypatch, seconds, is_slow
):
    times = {torch.bfloat16: seconds, torch.float32: 0.008}
    monkeypatch.setattr(devices, "product_seconds", times.__getitem__)
    cpu, key = torch.device("cpu"), "policy.dtype"
    note = devices.dtype_note(cpu, torch.bfloat16, key)
    text = (
        "products of bfloat16 matrices take 50 times as long as float32 ones on this CPU: set "
        "policy.dtype to float32."
    )
    assert note == (text if is_slow else None)
    assert devices.dtype_note(cpu, torch.float32, key) is None
    assert devices.dtype_note(torch.device("cuda"), torch.bfloat16, key) is None


def test_products_are_benchmarked_in_each_dtype(monkeypatch):
    assert all(0 < devices.product_seconds(t) < 10 for t in (torch.float32, torch.bfloat16))
    monkeypatch.setattr(devices, "product_seconds", {torch.bfloat16: 3, torch.float32: 1}.get)
    assert devices.fast_dtype("cpu") == "float32"
    assert devices.fast_dtype("cuda:1") == "bfloat16"
    monkeypatch.setattr(devices, "product_seconds", {torch.bfloat16: 1, torch.float32: 3}.get)
    assert devices.fast_dtype("cpu") == "bfloat16"
