"""To serve exports by another engine takes one file."""

from importlib import reload
from pathlib import Path
from typing import Any, get_args

from firm.serving import targets
from firm.serving.targets import target

ENGINE = '''
from firm.serving.targets.peft import PeftTarget


class EchoTarget(PeftTarget):
    """Copies."""

    def command(self, folder, base_model, places, rank, *, is_front):
        """Returns a command that names the base model."""
        return ["echo", base_model]


TARGET = EchoTarget()
'''


def names(module: Any) -> set[str]:
    return set(get_args(module.TargetName))


def test_every_file_is_a_choice_and_has_a_target():
    files = {file.stem for file in Path(targets.__path__[0]).glob("*.py")} - {"__init__"}
    assert names(targets) == files >= {"peft", "gguf", "openvino", "vllm"}
    assert all(target(name).verb in ("serve", "convert") for name in files)


def test_a_new_engine_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text(ENGINE)
    before = names(targets)
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(tmp_path)])
    try:
        assert target("echo").command(tmp_path, "base", [], 1, is_front=True) == ["echo", "base"]
    finally:
        monkeypatch.undo()
    assert names(reload(targets)) == before
