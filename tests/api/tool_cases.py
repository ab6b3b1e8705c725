"""What tests of tool calls share: texts in pieces, parsers with plain ids, and templates in their three forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pageframe.api.tool_parsers import HermesParser, Llama3Parser, MistralParser, ToolParser, join_tool_calls

#: Content, the calls as (name, arguments), and the finish reason after the engine's "stop".
Message = tuple[str, list[tuple[str, str]], str]

PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3": Llama3Parser, "mistral": MistralParser}


def ids() -> Iterator[str]:
    return (f"call-{number}" for number in itertools.count())


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    """The text in pieces; a cut beyond its end counts from the start again."""
    bounds = [0, *sorted(position % (len(text) + 1) for position in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def parse(kind: str, pieces: Sequence[str], *, names: Iterable[str] = ("f", "g"), parallel: bool = True) -> Message:
    """What a parser makes of the pieces, the last of them final; each delta has OpenAI's shape."""
    make_id = ids().__next__
    parser = PARSERS[kind](list(names), parallel=parallel, make_id=make_id)
    content, deltas = "", []
    for index, piece in enumerate(pieces):
        delta = parser.push(piece, final=index == len(pieces) - 1)
        content += delta.content
        deltas += delta.tool_calls
    check_deltas(deltas)
    calls = join_tool_calls(deltas)
    assert [call["id"] for call in calls] == [f"call-{number}" for number in range(len(calls))]
    assert all(call["type"] == "function" for call in calls)
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return content, named, parser.finish_reason("stop")


def check_deltas(deltas: list[dict[str, Any]]) -> None:
    """Indices rise by one, each call's first delta alone has id, type and name, and no other delta is empty."""
    num_calls = 0
    for delta in deltas:
        if delta["index"] == num_calls:
            num_calls += 1
            assert delta.keys() == {"index", "id", "type", "function"}
            assert delta["function"].keys() == {"name", "arguments"}
        else:
            assert delta["index"] == num_calls - 1
            assert delta.keys() == {"index", "function"}
            assert delta["function"].keys() == {"arguments"}
            assert delta["function"]["arguments"]
