"""Requests with tools through models' own templates, and the calls that these write through the parsers again.

The templates are those of tests/runtime/chat_template_triples.jsonl (test_chat_template_triples.py names their
licences), and with PAGEFRAME_DATA all of the collection there whose calls can be read.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pageframe.api.messages import check_messages
from pageframe.api.tool_parsers import join_tool_calls
from pageframe.api.tools import check_tools, find_style, plan_tools
from pageframe.runtime.chat_template import ChatTemplate

FOLDER = Path(os.environ.get("PAGEFRAME_DATA", "")) / "templates" / "ik_llama.cpp"
TRIPLES = Path(__file__).parents[1] / "runtime" / "chat_template_triples.jsonl"
TEMPLATES = {triple["model"]: triple["chat_template"] for triple in map(json.loads, TRIPLES.read_text().splitlines())}
QWEN, MISTRAL = "Qwen/Qwen2.5-7B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3 (JSON Schema)"

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Weather <now>", "parameters": PARAMETERS, **more}}
    for name, more in (("weather", {"strict": False}), ("rain", {}))
]
USER = {"role": "user", "content": "How is Oslo?"}
CALLS = [("weather", '{"city": "Oslo", "é": [1, 2.5, null, {"a": "</tool> {\\"x\\"} \\n"}]}'), ("rain", "{}")]
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<|endoftext|>", "<|end_of_text|>")


def assistant(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client sends it back."""
    return {"role": "assistant", "content": None, "tool_calls": calls}


def openai_calls(num_calls: int) -> list[dict[str, Any]]:
    return [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(CALLS[:num_calls])
    ]


def check_round_trip(template: ChatTemplate) -> None:
    """What the template writes of calls, as the model is taught to, is read as these calls; and goes in again."""
    use = plan_tools(check_tools(TOOLS), None, None, template)
    assert use is not None
    given = openai_calls(2 if use.parallel else 1)
    messages = check_messages([USER, assistant(given)])
    text = template.render(messages, add_generation_prompt=False, tools=use.definitions)
    prompt = template.render(messages[:1], tools=use.definitions)
    # The generation prompt may begin a thought, <think>, with the same characters as a call.
    num_common = next(index for index, (a, b) in enumerate(zip(text, prompt + "\0", strict=False)) if a != b)
    written = text[len(re.sub(r"<\w*$", "", text[:num_common])) :].rstrip()
    for end in ENDS:
        written = written.removesuffix(end)
    parser = use.parser()
    calls = join_tool_calls(parser.push(written, final=True).tool_calls)
    assert parser.finish_reason("stop") == "tool_calls", written
    assert [call["function"]["name"] for call in calls] == [call["function"]["name"] for call in given]
    for call, original in zip(calls, given, strict=True):
        assert json.loads(call["function"]["arguments"]) == json.loads(original["function"]["arguments"])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "wet"} for call in calls]
    again = check_messages([USER, assistant(calls), *results])
    assert "wet" in template.render(again, tools=use.definitions)


@pytest.mark.parametrize("model", [QWEN, MISTRAL])
def test_calls_that_a_template_writes_are_read(model: str) -> None:
    check_round_trip(ChatTemplate(TEMPLATES[model], "<s>", "</s>"))


@pytest.mark.parametrize("model", [QWEN, MISTRAL])
def test_tools_are_shown_as_they_were_given(model: str) -> None:
    template = ChatTemplate(TEMPLATES[model])
    use = plan_tools(check_tools(TOOLS), None, None, template)
    assert use is not None
    text = template.render([USER], tools=use.definitions)
    shown = {"name": "weather", "description": "Weather <now>", "parameters": PARAMETERS}
    assert json.dumps(shown) in text
    assert "strict" not in text
    assert "weather" not in template.render([USER])


@pytest.mark.long
@pytest.mark.skipif("PAGEFRAME_DATA" not in os.environ, reason="PAGEFRAME_DATA names no folder with templates/")
def test_calls_of_the_whole_collection_are_read() -> None:
    num_read = 0
    for path in sorted(FOLDER.glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"), "<s>", "</s>")
        # MiroThinker's is written for another renderer: in Python's Jinja no macro sees a loop's variable.
        if find_style(template.tool_source_text) is not None and path.stem != "MiroThinker":
            check_round_trip(template)
            num_read += 1
    assert num_read == 15
