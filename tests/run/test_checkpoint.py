import math
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firm.run.checkpoint import OtherFormat, load_state, save_state

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


@st.composite
def tensors(draw) -> torch.Tensor:
    """Tensors of any bits, NaN payloads included, 0-dimensional and empty ones too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=1)))
    num_bytes = math.prod(shape) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def trees() -> st.SearchStrategy:
    leaves = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    ) | tensors()
    keys = st.text() | st.integers()
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=12,
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(ours, theirs) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert bits(ours) == bits(theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    elif isinstance(ours, float):
        assert ours.hex() == theirs.hex()  # tells -0.0 from 0.0, and compares NaN
    else:
        assert ours == theirs


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=st.dictionaries(st.text() | st.integers(), trees(), max_size=4))
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, state: dict) -> None:
    save_state(tmp_path / "state", state)
    assert_same(load_state(tmp_path / "state"), state)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**80, -(10**60)])
def test_extreme_numbers_come_back(tmp_path: Path, value: float) -> None:
    save_state(tmp_path / "state", {"value": value})
    assert_same(load_state(tmp_path / "state"), {"value": value})


def test_an_optimizer_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    def optimizer_of(parameter: torch.nn.Parameter) -> torch.optim.Adam:
        return torch.optim.Adam([parameter], lr=0.1)

    def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Adam) -> None:
        optimizer.zero_grad()
        (parameter**2).sum().backward()
        optimizer.step()

    ours, theirs = (torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizer = optimizer_of(ours)
    step(ours, optimizer)
    save_state(tmp_path / "s", {"parameter": ours, "optimizer": optimizer.state_dict()})
    state = load_state(tmp_path / "s")
    other = optimizer_of(theirs)
    other.load_state_dict(state["optimizer"])
    with torch.no_grad():
        theirs.copy_(state["parameter"])
    step(ours, optimizer)
    step(theirs, other)
    assert torch.equal(ours, theirs)


def test_views_shared_and_trained_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    state = {"a": base, "b": base, "row": base[1], "t": base.T, "e": base[:1].expand(3, 4)}
    save_state(tmp_path / "s", OrderedDict(state, parameter=parameter))
    loaded = load_state(tmp_path / "s")
    assert_same({key: loaded[key] for key in state}, state)
    assert torch.equal(loaded["parameter"], torch.ones(2))
    assert not loaded["parameter"].requires_grad
    loaded["a"].zero_()
    assert loaded["b"].sum() == 66


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [object()]}, r"state\['a'\]\[0\] is a object"),
        ({"a": {1.5: 0}}, r"state\['a'\] has the key 1.5"),
        ({"a": {True: 0}}, r"state\['a'\] has the key True"),
        ({"a": torch.ones(2).numpy()}, r"state\['a'\] is a ndarray"),
        ({"a": torch.ones(2).to_sparse()}, r"state\['a'\] is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128; convert it"),
    ],
)
def test_what_cannot_be_restored_is_not_saved(tmp_path: Path, state: dict, message: str) -> None:
    save_state(tmp_path / "s", {"a": 1})
    with pytest.raises(ValueError, match=message):
        save_state(tmp_path / "s", state)
    assert load_state(tmp_path / "s") == {"a": 1}
    assert os.listdir(tmp_path) == ["s"]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    def fresh(seed: int = 0) -> Path:
        generator = torch.Generator().manual_seed(seed)
        path = tmp_path / f"s{seed}"
        save_state(path, {"a": torch.randn(50, generator=generator), "round": seed, "b": [1.5]})
        return path

    for name in ("tensors.safetensors", "state.json"):
        whole = (fresh() / name).read_bytes()
        damages = [None, b"", whole[: len(whole) // 2], whole[:-1], b"\xff" * len(whole)]
        damages += [(fresh(seed=1) / name).read_bytes()]  # of another save
        flipped = bytearray(whole)
        flipped[-len(whole) // 3] ^= 1
        damages += [bytes(flipped)]
        for damage in damages:
            path = fresh()
            if damage is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(damage)
            with pytest.raises(ValueError, match=r"no intact checkpoint at .*; use an earlier one"):
                load_state(path)
    with pytest.raises(ValueError, match="no intact checkpoint"):
        load_state(tmp_path / "nowhere")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "s", {})
    file = tmp_path / "s" / "state.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(
        OtherFormat, match=r"/s has format 99, but this version reads format 1; resume with the ver"
    ):
        load_state(tmp_path / "s")


def test_remains_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    for remains in (".s.draft", ".s.old"):
        (tmp_path / remains).mkdir()
        (tmp_path / remains / "state.json").write_text("{")
    save_state(tmp_path / "s", {"a": 1})
    assert os.listdir(tmp_path) == ["s"]
    save_state(tmp_path / "s", {"a": 2})
    assert load_state(tmp_path / "s") == {"a": 2}
    assert os.listdir(tmp_path) == ["s"]


def test_a_kill_at_any_moment_of_a_save_leaves_only_whole_states(
    tmp_path: Path, kill_at_every_step
) -> None:
    code = """save_state(f"{argument}/new", {"a": torch.full((2_000,), 7), "b": [7] * 99})"""
    num_kills = 0
    for _ in kill_at_every_step(code, str(tmp_path)):
        num_kills += 1
        assert {path.name for path in tmp_path.glob("[!.]*")} <= {"new"}
        for path in tmp_path.glob("[!.]*"):
            state = load_state(path)
            assert state["b"] == [7] * 99
            assert torch.equal(state["a"], torch.full((2_000,), 7))
            shutil.rmtree(path)
    assert num_kills > 10, "the save was over before it could be killed: nothing was tested"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


SAVE_ON_A_FULL_DISK = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_state(argument + "/s", {STATE})
except OSError as error:
    assert "File too large" in str(error), error
else:
    raise AssertionError("the disk was not full")
"""


@pytest.mark.parametrize("state", ['{"a": torch.ones(99_999)}', '{"a": "x" * 99_999}'])
def test_a_full_disk_is_an_error_that_leaves_the_old_state_and_no_remains(
    tmp_path: Path, start_and_wait, state: str
) -> None:
    save_state(tmp_path / "s", {"a": 1})
    code = SAVE_ON_A_FULL_DISK.replace("{STATE}", state)
    assert start_and_wait(code, str(tmp_path)) == 0
    assert load_state(tmp_path / "s") == {"a": 1}
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 1}', "[]", '"text"', "9" * 5_000])
def test_a_state_of_another_making_is_no_whole_checkpoint(tmp_path: Path, text: str) -> None:
    save_state(tmp_path / "s", {"a": 1})
    (tmp_path / "s" / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"no intact checkpoint at .*; use an earlier one\."):
        load_state(tmp_path / "s")


def test_a_folder_in_place_of_a_state_is_no_whole_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "s" / "state.json").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no intact checkpoint at .* is a folder; use an earlier"):
        load_state(tmp_path / "s")
