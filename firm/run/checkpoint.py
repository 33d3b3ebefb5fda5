"""States on disk: tensors in a safetensors file, everything else in a JSON file beside it.

A folder is written under a temporary name, flushed to the disk and renamed, so that it is either
complete or absent, even if the process or the machine stops. Files are verified by checksums when
they are read, and nothing is ever unpickled.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from firm.base.inside import whole_folder
from firm.base.json_text import json_text
from firm.base.state import State
from firm.run.errors import UserError
from firm.run.files import as_os_errors, read_bytes

_FORMAT = 1
_TENSORS, _STATE = "tensors.safetensors", "state.json"


class OtherFormat(UserError):
    """Raised when a checkpoint has the format of another version of this program."""


def save_state(path: str | Path, state: State) -> None:
    """Writes a state to the folder `path`, completely or not at all.

    An existing folder is replaced. It is absent for a moment between two renames, so callers that
    need a state at every moment must use a new folder for each. See `encode` for the supported
    contents of a state. Tensors are loaded detached and on the CPU.

    Raises:
        ValueError: The state contains an unsupported value; the message says where.
        OSError: The state cannot be written, for lack of space or permission; an existing folder is
            kept.
    """
    from safetensors.torch import save_file  # imports torch, unlike the settings of a run

    from firm.federation.serialization import encode

    path = Path(path)
    tensors: dict[str, Any] = {}
    encoded = encode(state, "state", tensors)
    with as_os_errors(), whole_folder(path, may_exist=True) as draft:
        try:
            save_file(tensors, draft / _TENSORS)
        except KeyError as error:  # raised by safetensors for an unknown dtype
            raise ValueError(f"a tensor of the state has dtype {error}; convert it.") from None
        content = {
            "format": _FORMAT,
            "tensors_sha256": hashlib.sha256((draft / _TENSORS).read_bytes()).hexdigest(),
            "state_sha256": _digest(encoded),
            "state": encoded,
        }
        (draft / _STATE).write_text(json_text(content), encoding="utf-8")


def load_state(path: str | Path) -> State:
    """Returns the state that `save_state` wrote to the folder `path`, bit for bit.

    Raises:
        ValueError: The folder or one of its files is missing, truncated, altered or from another
            save.
        OtherFormat: The state was written by a version of this program with another format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from firm.federation.serialization import decode

    path = Path(path)
    try:
        content = json.loads(read_bytes(path / _STATE))
        if content["format"] != _FORMAT:
            raise OtherFormat(
                f"the checkpoint at {path} has format {content['format']}, but this version reads "
                f"format {_FORMAT}; resume with the version of firm-align in run.json, or start a "
                "new run."
            )
        if content["state_sha256"] != _digest(content["state"]):
            raise ValueError(f"{_STATE} was altered after it was written")
        tensors = read_bytes(path / _TENSORS)
        if content["tensors_sha256"] != hashlib.sha256(tensors).hexdigest():
            raise ValueError(f"{_TENSORS} is truncated, altered or from another save")
        return decode(content["state"], load(tensors))
    except json.JSONDecodeError as error:
        problem = f"{_STATE} is truncated or not JSON ({error})"
    except RecursionError:
        problem = f"{_STATE} is nested too deeply"
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError, SafetensorError) as error:
        problem = f"a file has an unknown layout ({error!r})"
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = f"{error.filename} is missing"
    except IsADirectoryError as error:
        problem = f"{error.filename} is a folder"
    except OtherFormat:
        raise
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"no intact checkpoint at {path}: {problem}; use an earlier one.")


def _digest(encoded: Any) -> str:
    return hashlib.sha256(json.dumps(encoded).encode()).hexdigest()
