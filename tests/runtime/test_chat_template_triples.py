"""Templates in the wild: (template, what goes in, the text that must come out).

`chat_template_triples.jsonl` has four, from Hugging Face's huggingface.js (packages/jinja, MIT); their templates
are those of transformers, Qwen2.5-7B-Instruct, Mistral-7B-Instruct-v0.3 (all Apache-2.0) and zephyr-7b-beta (MIT). With
the whole collection in the folder that PAGEFRAME_DATA names, all are compared:

    PAGEFRAME_DATA=…/data pytest -m long tests/runtime/test_chat_template_triples.py
"""

from __future__ import annotations

import ast
import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pageframe.api.tools import find_style
from pageframe.runtime import template_sandbox
from pageframe.runtime.chat_template import ChatTemplate

DATA = Path(os.environ.get("PAGEFRAME_DATA", ""))
BUNDLED = Path(__file__).parent / "chat_template_triples.jsonl"
COLLECTION = DATA / "templates" / "hf-jinja" / "rendered_templates.jsonl"
FILES = DATA / "templates" / "ik_llama.cpp"
needs_data = pytest.mark.skipif(
    "PAGEFRAME_DATA" not in os.environ, reason="PAGEFRAME_DATA names no folder with templates/"
)

#: Those of the files in the collection whose calls we read.
STYLES = {
    "Bielik-11B-v3.0-Instruct": "hermes",
    "MiMo-VL": "hermes",
    "MiroThinker": "hermes",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_args",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Reka-Edge": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral_args",
}


class July(datetime.datetime):
    """The day on which the collection was rendered."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> July:
        return cls(2025, 7, 10, tzinfo=tz)


@pytest.fixture(autouse=True)
def _july(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox.datetime, "datetime", July)


def rendered(triple: dict[str, Any]) -> str:
    text, names = triple["chat_template"], dict(triple["data"])
    template = ChatTemplate(text, names.pop("bos_token", ""), names.pop("eos_token", ""))
    # Where it is not said, one of the templates takes it for true by itself.
    names.setdefault("add_generation_prompt", "add_generation_prompt is not defined" in text)
    return template.render(names.pop("messages"), **names)


def triples(path: Path) -> dict[str, dict[str, Any]]:
    return {triple["model"]: triple for triple in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


@pytest.mark.parametrize("model", triples(BUNDLED))
def test_bundled_triples(model: str) -> None:
    triple = triples(BUNDLED)[model]
    assert rendered(triple) == triple["target"]


def test_bundled_templates_show_how_calls_are_written() -> None:
    styles = {model: find_style(triple["chat_template"]) for model, triple in triples(BUNDLED).items()}
    names = {model: None if style is None else style.name for model, style in styles.items()}
    assert set(names.values()) == {None, "hermes", "mistral"}
    assert names["Qwen/Qwen2.5-7B-Instruct"] == "hermes"


@needs_data
@pytest.mark.long
def test_all_triples() -> None:
    collection = triples(COLLECTION)
    assert len(collection) == 53
    # Hammer writes its tools by `tools | string`: in Python, and so for the model, that is a list as Python shows it;
    # the collection was rendered in JavaScript, as JSON.
    hammer = collection.pop("MadeAgents/Hammer2.1")
    wrong = [model for model, triple in collection.items() if rendered(triple) != triple["target"]]
    assert wrong == []
    got, wanted = (text.split("AVAILABLE_TOOLS]\n") for text in (rendered(hammer), hammer["target"]))
    assert [got[0], *got[2:]] == [wanted[0], *wanted[2:]]
    shown = got[1].removesuffix("\n[END OF ")
    assert ast.literal_eval(shown) == hammer["data"]["tools"] == json.loads(wanted[1].removesuffix("\n[END OF "))


@needs_data
@pytest.mark.long
def test_all_files_are_templates_and_their_calls_are_recognised() -> None:
    styles = {}
    for path in sorted(FILES.glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"))
        style = find_style(template.tool_source_text)
        if style is not None:
            assert template.reads_tools
            styles[path.stem] = style.name
    assert styles == STYLES
