"""Tools over HTTP: what the model is shown, the grammar it follows, and its calls, whole and streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pageframe.api.tool_grammar import tool_grammar
from pageframe.api.tool_parsers import join_tool_calls
from pageframe.api.tools import ToolChoice, check_tools, plan_tools
from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.request import RequestOutput, SamplingParams

from .conftest import RunningServer, Start
from .fakes import EOS, ByteTokenizer, FakeEngine, merged, outputs_of, reply
from .test_answers import events
from .test_bad_input import replace_something

BODY = "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}|"
HERMES = ChatTemplate('{# <tool_call>{"name" #}' + BODY)
MISTRAL = ChatTemplate("{# [TOOL_CALLS] #}" + BODY)
MARK = 258
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALLED = {"name": "f", "arguments": '{"x": 1}'}
F = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


class MarkTokenizer(ByteTokenizer):
    """Has Mistral's mark of calls as a special token."""

    def token_to_id(self, token: str) -> int | None:
        return MARK if token == "[TOOL_CALLS]" else None

    def is_special(self, token_id: int) -> bool:
        return token_id == MARK or super().is_special(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return b"[TOOL_CALLS]" if token_id == MARK else super().token_bytes(token_id)


@pytest.fixture(scope="module")
def _shared() -> Iterator[RunningServer]:
    server = RunningServer(FakeEngine(), {"tokenizer": MarkTokenizer(), "template": HERMES}).start()
    yield server
    server.close()


def streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a whole answer, put together from a stream's chunks."""
    chunks = events(server.chat(**fields, stream=True, return_token_ids=True).text)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        [piece] = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"content": "", "deltas": [], "token_ids": [], "entries": []})
        delta = piece["delta"]
        assert delta.keys() <= {"role", "content", "tool_calls"}
        choice["content"] += delta.get("content", "")
        assert len(delta.get("tool_calls", [])) <= 1
        choice["deltas"] += delta.get("tool_calls", [])
        choice["token_ids"] += piece["token_ids"]
        choice["entries"] += (piece["logprobs"] or {"content": []})["content"]
        choice["finish_reason"] = piece["finish_reason"]
    return [
        {
            "content": choice["content"],
            "tool_calls": named(join_tool_calls(choice["deltas"])),
            "token_ids": choice["token_ids"],
            "entries": choice["entries"],
            "finish_reason": choice["finish_reason"],
        }
        for _, choice in sorted(choices.items())
    ]


def whole(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    response = server.chat(**fields, return_token_ids=True)
    assert response.status_code == 200, response.text
    return [
        {
            "content": choice["message"]["content"] or "",
            "tool_calls": named(choice["message"].get("tool_calls", [])),
            "token_ids": choice["token_ids"],
            "entries": (choice["logprobs"] or {"content": []})["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in response.json()["choices"]
    ]


def named(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and arguments; ids differ from answer to answer."""
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_an_answer_that_calls_has_openais_shape(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply(F)
    [choice] = server.chat(tools=TOOLS).json()["choices"]
    [call] = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}


def test_an_answer_that_calls_nothing_is_text(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply("<tool> no")
    [choice] = server.chat(tools=TOOLS).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<tool> no", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_the_model_is_shown_the_tools_it_may_call(server: RunningServer) -> None:
    def prompt_of(**fields: Any) -> str:
        assert server.chat(**fields).status_code == 200
        return bytes(server.engine.added[-1].prompt_token_ids).decode()

    assert prompt_of(tools=TOOLS) == "f,g,hi|"
    assert prompt_of(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}) == "f,g,hi|"
    assert prompt_of(tools=TOOLS, tool_choice="none") == "hi|"
    assert prompt_of(tools=[], tool_choice="auto") == "hi|"


def test_tokenize_shows_the_tools_as_a_chat_does(server: RunningServer) -> None:
    def tokenize(**fields: Any) -> Any:
        return server.client.post("/tokenize", json=fields).json()

    told = tokenize(messages=USER, tools=TOOLS)
    assert server.chat(tools=TOOLS).status_code == 200
    assert told["tokens"] == server.engine.added[-1].prompt_token_ids == list(b"f,g,hi|")
    assert told["count"] == len(told["tokens"])
    for tools in (None, []):
        assert bytes(tokenize(messages=USER, tools=tools)["tokens"]) == b"hi|"
        assert tokenize(prompt="hi", tools=tools, add_special_tokens=False)["count"] == 2
    assert tokenize(prompt="hi", tools=TOOLS)["error"]["param"] == "tools"
    error = tokenize(messages=USER, tools=[{"type": "function"}])["error"]
    assert error["param"] == "tools[0].function"


def test_calls_are_text_where_none_may_be_made(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply(F)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = whole(server, **fields)
        assert (choice["content"], choice["tool_calls"], choice["finish_reason"]) == (F, [], "stop")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("required", "g")),
        ("auto", None),
        (None, None),
    ],
)
def test_calls_that_must_be_made_have_a_grammar(
    server: RunningServer, choice: Any, expected: ToolChoice | None
) -> None:
    assert server.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).status_code == 200
    grammar = server.engine.added[0].params.grammar
    use = plan_tools(check_tools(TOOLS), expected or ToolChoice("auto"), False, HERMES)
    assert use is not None
    assert grammar == tool_grammar(use, MarkTokenizer())
    assert (grammar is None) == (expected is None)


def test_a_form_of_the_text_and_calls_exclude_each_other(server: RunningServer) -> None:
    for field, value in (("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"})):
        error = server.chat(tools=TOOLS, **{field: value}).json()["error"]
        assert error["param"] == field
        assert 'or tool_choice "none"' in error["message"]
        assert server.chat(tools=TOOLS, tool_choice="none", **{field: value}).status_code == 200
        assert server.engine.added[-1].params.grammar is not None


def test_calls_that_must_be_made_end_where_they_end(server: RunningServer) -> None:
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for fields in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": strict}):
        for name, value in (("min_tokens", 3), ("ignore_eos", True)):
            error = server.chat(**fields, **{name: value}).json()["error"]
            assert error["param"] == name
            assert "beside tools it must be" in error["message"]
    assert server.chat(tools=TOOLS, min_tokens=3, ignore_eos=True).status_code == 200


def test_schemas_as_deep_as_a_body_may_be_are_no_failure_of_the_servers(server: RunningServer) -> None:
    seen = set()
    for depth in (100, *range(900, 1010), 3000):
        schema = '{"items":' * depth + "{}" + "}" * depth
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
        body = f'{{"messages": {json.dumps(USER)}, "tool_choice": "required", "tools": [{tool}]}}'
        response = server.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 200 or "too deep" in response.json()["error"]["message"], (depth, response.text)
        seen.add(response.status_code)
    assert seen == {200, 400}


def test_a_schema_that_the_engine_refuses_is_the_tools_fault(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: [
        RequestOutput(
            "", [], finish_reason="refused", error="grammar has a Lark grammar that cannot be used: no", param="grammar"
        )
    ]
    response = server.chat(tools=TOOLS, tool_choice="required", stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("tools has a Lark grammar")


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (F + "\n" + G, "stop", ("", [("f", '{"x": "é"}'), ("g", "{}")], "tool_calls")),
        ("Ok. " + G, "stop", ("Ok.", [("g", "{}")], "tool_calls")),
        (F[:50], "length", ("", [("f", '{"x": "é"}')], "length")),
        (F[:43], "length", ("", [("f", '{"x"')], "length")),
        ('<tool_call>{"name": "h", "arguments": {}}</tool_call>', "stop", None),
        ("So <tool_", "stop", None),
        ("So \n", "stop", None),
    ],
)
def test_streamed_calls_are_those_of_the_whole_answer(
    server: RunningServer, text: str, reason: str, expected: tuple[str, list[tuple[str, str]], str] | None
) -> None:
    rng = random.Random(text)
    for longest in (3, 30, 30, 200, 200, 200):
        data, chunks = text.encode(), []
        while data:
            size = rng.randint(1, longest)
            chunks.append(list(data[:size]))
            data = data[size:]
        if reason == "stop":
            chunks.append([EOS])
        server.engine.script = lambda prompt, params, end=chunks: outputs_of(end, reason=reason)  # type: ignore[misc]
        fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
        [choice] = whole(server, **fields)
        assert streamed(server, **fields) == [choice]
        assert (choice["content"], choice["tool_calls"], choice["finish_reason"]) == (expected or (text, [], "stop"))
        assert len(choice["entries"]) == len(choice["token_ids"]) == sum(map(len, chunks))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("length", [3, 12, 30, 43])
def test_a_call_that_must_be_made_and_is_cut_off_is_no_text(server: RunningServer, choice: Any, length: int) -> None:
    server.engine.script = lambda prompt, params: reply(F[:length], reason="length")
    fields = {"tools": TOOLS, "tool_choice": choice}
    [cut] = whole(server, **fields)
    assert streamed(server, **fields) == [cut]
    assert (cut["content"], cut["finish_reason"]) == ("", "length")
    assert cut["tool_calls"] == ([("f", '{"x"')] if length == 43 else [])
    [free] = whole(server, tools=TOOLS)
    assert free["content"] == ("" if length == 43 else F[:length])


def test_each_choice_makes_its_own_calls(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: merged(reply(F), reply("hello"), reply(G, reason="length"))
    choices = whole(server, tools=TOOLS, n=3)
    assert streamed(server, tools=TOOLS, n=3) == choices
    assert [choice["tool_calls"] for choice in choices] == [[("f", '{"x": "é"}')], [], [("g", "{}")]]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "length"]


def test_a_stop_string_may_end_an_answer_behind_its_call(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply(G + "\nso", reason="length")
    [choice] = whole(server, tools=TOOLS, stop=["\n"])
    assert (choice["tool_calls"], choice["finish_reason"]) == ([("g", "{}")], "tool_calls")


def test_one_call_where_no_others_are_wanted(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply(G + G)
    [choice] = whole(server, tools=TOOLS, parallel_tool_calls=False)
    assert choice["tool_calls"] == [("g", "{}")]


def test_openais_client_streams_calls(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply("Ok." + F + G)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, stream=True))
        answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["f", "g"]
    arguments = ["".join(call.function.arguments for call in calls if call.index == index) for index in range(2)]
    assert [json.loads(text) for text in arguments] == [{"x": "é"}, {}]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content == "Ok."
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == arguments


def test_a_mark_that_is_a_special_token_is_seen(start: Start) -> None:
    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        assert params.skip_special_tokens
        return outputs_of([[MARK], list(b'[{"name": "g", "arguments": {"y": 1}}]'), [EOS]], reason="stop")

    server = start(FakeEngine(script), service={"tokenizer": MarkTokenizer(), "template": MISTRAL})
    [choice] = whole(server, tools=TOOLS)
    assert streamed(server, tools=TOOLS) == [choice]
    assert (choice["content"], choice["tool_calls"]) == ("", [("g", '{"y": 1}')])
    [choice] = whole(server)
    assert choice["content"].startswith("[{"), "without tools it is a special token like any other"


def test_a_model_without_a_known_form_takes_no_tools(start: Start) -> None:
    server = start(service={"tokenizer": MarkTokenizer(), "template": ChatTemplate(BODY)})
    error = server.chat(tools=TOOLS).json()["error"]
    assert error["param"] == "tools"
    assert "form that is not supported" in error["message"]
    server = start(service={"template": None})
    assert "chat template" in server.chat(tools=TOOLS).json()["error"]["message"]


PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SEED = {
    "messages": [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS, "strict": False}},
    "structured_outputs": {"choice": ["a", "b"]},
    "logit_bias": {"5": 1.5, "250": -100},
    "bad_words": ["a", " b"],
    "allowed_token_ids": [1, 2],
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "truncate_prompt_tokens": 20,
    "timeout_seconds": 2.5,
}


def test_400_malformed_bodies_are_the_clients_fault(server: RunningServer) -> None:
    rng = random.Random(21)
    statuses = {200: 0, 400: 0}
    for _ in range(400):
        names = [name for name in SEED if name == "messages" or rng.random() < 0.15]
        body = json.dumps(replace_something(rng, {name: SEED[name] for name in names}))
        response = server.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code in statuses, (body, response.text)
        statuses[response.status_code] += 1
    assert min(statuses.values()) > 20
