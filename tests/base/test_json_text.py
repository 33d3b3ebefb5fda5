"""Files of JSON are strict."""

import ast
from pathlib import Path

import firm

WRITERS = ("write_text", "replace_text", "write")


def test_every_file_of_json_is_written_strictly() -> None:
    """No text of `json.dumps`, which may contain NaN, goes to a file without `json_text`."""
    for file in Path(firm.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            assert name != "dump" or getattr(call.func.value, "id", "") != "json", file
            if name in WRITERS:
                assert "json.dumps" not in ast.unparse(call), f"{file}:{call.lineno}"
