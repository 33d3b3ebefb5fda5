import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firm.alignment import tensor_cache
from firm.alignment.tensor_cache import cached_tensors


def a_file(cache: Path) -> None:
    cache.write_text("")


def a_link_to_nowhere(cache: Path) -> None:
    cache.symlink_to("nowhere")


def a_folder_in_the_files_place(cache: Path) -> None:
    (cache / "firm/kind/abc.safetensors/full").mkdir(parents=True)


def a_file_in_the_folders_place(cache: Path) -> None:
    (cache / "firm").mkdir(parents=True)
    (cache / "firm/kind").touch()


def a_name_that_is_too_long(cache: Path) -> None:
    cache.symlink_to("x" * 250 + "/" + "y" * 250)


UNUSABLE = (
    *(a_file, a_link_to_nowhere, a_folder_in_the_files_place, a_file_in_the_folders_place),
    a_name_that_is_too_long,
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensor_cache._warn.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def compute() -> Callable[[], dict[str, torch.Tensor]]:
    """Computes a tensor that says how often it was called."""
    count = 0

    def counted() -> dict[str, torch.Tensor]:
        nonlocal count
        count += 1
        return {"count": torch.full((1,), count)}

    return counted


def count_of(compute) -> int:
    tensors = cached_tensors("kind", "abc", compute, is_sound=lambda found: "count" in found)
    return int(tensors["count"])


def test_tensors_are_computed_once(cache, compute, caplog):
    assert [count_of(compute), count_of(compute)] == [1, 1]
    assert [path.name for path in (cache / "firm/kind").iterdir()] == ["abc.safetensors"]
    assert not caplog.records


def test_damaged_or_unsound_tensors_are_computed_again(cache, compute):
    count_of(compute)
    file = cache / "firm/kind/abc.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert [count_of(compute), count_of(compute)] == [2, 2]
    other = cached_tensors("kind", "abc", lambda: {"a": torch.ones(1)}, is_sound=lambda _: False)
    assert list(other) == ["a"]
    assert count_of(compute) == 3


@pytest.mark.parametrize("break_", UNUSABLE, ids=lambda each: each.__name__)
def test_a_cache_that_cannot_be_used_is_one_warning(cache, compute, caplog, break_):
    break_(cache)
    assert [count_of(compute), count_of(compute)] == [1, 2]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the cache {cache}/firm/kind cannot be used (")
    assert line.endswith("which only costs time; XDG_CACHE_HOME chooses another")
    assert caplog.records[0].levelno == logging.WARNING


def test_no_home_folder_is_no_error(cache, compute, caplog, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert count_of(compute) == 1
    assert "Could not determine home directory" in caplog.text
