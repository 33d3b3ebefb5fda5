"""Shipped files are found from any folder, and files of one's own come first."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from firm.run.errors import UserError
from firm.run.shipped import CONFIGS, find_config, with_shipped_paths


@pytest.mark.parametrize(
    "name", ["smoke", "smoke.yaml", "configs/smoke.yaml", "fmoo/adult_attack", "paper/beta_0.05"]
)
def test_a_shipped_configuration_is_found_by_name_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_config(name)
    assert found.is_file()
    assert found.is_relative_to(CONFIGS)
    assert found.name.removesuffix(".yaml") == Path(name).name.removesuffix(".yaml")


def test_a_file_of_ones_own_comes_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smoke.yaml").write_text("rounds: 1\n")
    assert find_config("smoke.yaml") == Path("smoke.yaml")
    assert find_config("smoke") == Path("smoke.yaml")
    Path("smoke").mkdir()  # such as a folder of runs
    assert find_config("smoke") == Path("smoke.yaml")
    Path("smoke.yaml").unlink()
    assert find_config("smoke") == CONFIGS / "smoke.yaml"


def test_a_name_that_nothing_has_is_told_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such file; did you mean miniature or"):
        find_config("minature")
    with pytest.raises(UserError, match=r"did you mean .*hh_tinyllama"):
        find_config("hh")
    with pytest.raises(UserError, match=r"the nearest that ship are (\S+, ){2}\S+; `firm configs"):
        find_config("nope")
    (tmp_path / "zebra.yml").touch()
    (tmp_path / "zebras.md").touch()
    for name in ("zebra.yaml", "zebar", "./zebrra.yaml"):
        with pytest.raises(UserError, match=r"no such file; did you mean zebra\.yml\?"):
            find_config(name)
    with pytest.raises(UserError, match=rf"did you mean {tmp_path}/zebra\.yml\?"):
        find_config(tmp_path / "zebra.yaml")


@dataclass(frozen=True)
class _Model:
    path: str = "firm/miniature/checkpoints/policy"
    sources: tuple[str, ...] = ("firm/miniature/checkpoints/prompts_test.jsonl", "firm/none.jsonl")
    project: str = "firm"


@dataclass(frozen=True)
class _Config:
    model: _Model = field(default_factory=_Model)
    models: dict[str, _Model] = field(default_factory=lambda: {"a": _Model()})


def test_paths_into_the_package_become_absolute_where_they_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = with_shipped_paths(_Config())
    for model in (found.model, found.models["a"]):
        assert Path(model.path).is_absolute()
        assert Path(model.path, "config.json").is_file()
        assert Path(model.sources[0]).is_file()
        assert model.sources[1] == "firm/none.jsonl"
        assert model.project == "firm"


def test_a_folder_of_that_name_in_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(_Model.path).mkdir(parents=True)
    assert with_shipped_paths(_Config()).model.path == _Model.path
