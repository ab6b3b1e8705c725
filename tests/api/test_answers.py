"""What an answer says, whole and streamed: OpenAI's shapes, read by hand and by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pageframe.runtime.request import RequestOutput, SamplingParams

from .conftest import RunningServer, Start
from .fakes import BOS, EOS, FakeEngine, merged, outputs_of, reply

USER = [{"role": "user", "content": "hi"}]
PROMPT = b"user:hi|bot:"


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; its form is checked to the letter on the way."""
    assert text.endswith("data: [DONE]\n\n")
    lines = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: {") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_answer_has_openais_shape(server: RunningServer) -> None:
    response = server.chat(max_tokens=20)
    answer = response.json()
    created, response_id = answer.pop("created"), answer.pop("id")
    assert isinstance(created, int)
    assert response_id.startswith("chatcmpl-")
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 6,
            "total_tokens": len(PROMPT) + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    [added] = server.engine.added
    assert added.request_id == response_id
    assert bytes(added.prompt_token_ids) == PROMPT
    assert added.params == SamplingParams(max_tokens=20)
    assert not server.engine.aborted


def test_a_completion_has_openais_shape(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply("yes", reason="length")
    answer = server.complete().json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert choice == {"index": 0, "text": "yes", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["usage"]["completion_tokens"] == 3
    [added] = server.engine.added
    assert added.prompt_token_ids == [BOS, *b"hi"]
    assert added.params.max_tokens is None


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_a_prompt_may_be_text_or_ids_alone_or_as_a_list_of_one(server: RunningServer, prompt: Any) -> None:
    assert server.complete(prompt=prompt).status_code == 200
    [added] = server.engine.added
    assert [i for i in added.prompt_token_ids if i != BOS] == [104, 105]


def test_openais_client_reads_a_plain_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [*"hello", "<eos>"]
    assert content[0].bytes == [104]
    assert content[0].logprob == pytest.approx(-1.04)
    assert [top.token for top in content[0].top_logprobs] == ["h", "i"]


def test_openais_client_reads_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 6
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_openais_client_sees_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 11"):
        client.chat.completions.create(model="tiny", messages=USER, temperature=11)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=USER)


def test_a_chat_stream_to_the_letter(server: RunningServer) -> None:
    response = server.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response.text)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["id"] == server.engine.added[0].request_id
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        *({"content": character} for character in "hello"),
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["stop"]


def test_a_completion_stream_to_the_letter(server: RunningServer) -> None:
    chunks = events(server.complete(stream=True).text)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [*"hello", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


def test_usage_is_null_on_every_chunk_but_one_more_at_the_end(server: RunningServer) -> None:
    outputs = reply("hello")
    outputs[0].num_cached_tokens = 8
    server.engine.script = lambda prompt, params: outputs
    *chunks, last = events(server.chat(stream=True, stream_options={"include_usage": True}).text)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_continuous_usage_counts_up(server: RunningServer) -> None:
    chunks = events(server.complete(stream=True, stream_options={"continuous_usage_stats": True}).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert events(server.complete(stream=True, stream_options=both).text)[-1]["choices"] == []


def test_a_stop_string_ends_the_text_and_the_engine_is_told_where(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([b"ab", b"cSTO", b"Pxyz", b"more"])
    answer = server.chat(stop=["STOP", "never"], logprobs=True).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "abc"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    assert answer["usage"]["completion_tokens"] == len("abcSTOP")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [*"abcSTOP"]
    assert server.engine.finished == [(answer["id"], len("abcSTOP"))]
    assert not server.engine.aborted


def test_the_text_wins_where_the_engine_ends_in_the_same_step(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([b"ab", b"c.de"])
    answer = server.complete(stop=".", include_stop_str_in_output=True).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc.", "stop", ".")
    assert answer["usage"]["completion_tokens"] == 4


def test_text_held_for_a_stop_string_comes_out_at_the_end(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply("abST", reason="length")
    chunks = events(server.complete(stream=True, stop="STOP", stream_options={"include_usage": True}).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a", "b", "ST", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_end_with_what_broke_off_at_the_end(server: RunningServer, stream: bool) -> None:
    """It is known only with the end token, which then counts for nothing."""
    server.engine.script = lambda prompt, params: outputs_of([b"ab", [0xE2], [EOS]], reason="stop")
    response = server.complete(stop="b\ufffd", stream=stream)
    assert response.status_code == 200
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response.text)]
        assert "".join(choice["text"] for choice in choices) == "a"
    else:
        choices = response.json()["choices"]
        assert choices[0]["text"] == "a"
        assert response.json()["usage"]["completion_tokens"] == 3
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "b\ufffd")


def test_a_stop_id_is_named_but_not_shown(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([b"ab", b"c!"], reason="stop", stop_id=ord("!"))
    answer = server.complete(stop_token_ids=[ord("!")], return_token_ids=True).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", ord("!"))
    assert answer["usage"]["completion_tokens"] == 4
    assert choice["token_ids"] == list(b"abc!")
    assert choice["prompt_token_ids"] == [BOS, *b"hi"]


def test_streamed_token_ids_are_those_of_the_whole_answer(server: RunningServer) -> None:
    chunks = events(server.chat(stream=True, return_token_ids=True).text)
    assert chunks[0]["prompt_token_ids"] == list(PROMPT)
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*b"hello", EOS]


def test_a_character_of_several_tokens_comes_out_whole(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: reply("é🙂")
    chunks = events(server.complete(stream=True).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["é", "🙂", ""]
    server.engine.script = lambda prompt, params: outputs_of([[0xC0], [0xE2, 0x82]])
    assert server.complete().json()["choices"][0]["text"] == "\ufffd\ufffd"


def test_no_reader_of_a_stream_takes_a_character_for_a_lines_end(server: RunningServer) -> None:
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1ce\r\n"
    server.engine.script = lambda prompt, params: outputs_of([text.encode()])
    with server.client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == text


# ---- several choices ------------------------------------------------------------------------------------------------


def three_choices(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    """They end in the order 1, 2, 0, and 2 ends at its length."""
    choices = [reply("alpha"), reply("be"), reply("çes", reason="length")]
    for outputs in choices:
        outputs[0].num_cached_tokens = 8
    return merged(*choices)


TEXTS = ["alpha", "be", "çes"]
REASONS = ["stop", "stop", "length"]
USAGE = {
    "prompt_tokens": len(PROMPT),
    "completion_tokens": 6 + 3 + 4,
    "total_tokens": len(PROMPT) + 6 + 3 + 4,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def test_choices_come_in_order_each_with_its_own_text(server: RunningServer) -> None:
    server.engine.script = three_choices
    answer = server.chat(n=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == TEXTS
    assert [choice["finish_reason"] for choice in answer["choices"]] == REASONS
    assert answer["usage"] == USAGE
    [added] = server.engine.added
    assert added.request_id == answer["id"]
    assert added.params == SamplingParams(n=3)
    assert [choice["text"] for choice in server.complete(n=3).json()["choices"]] == TEXTS
    assert not server.engine.aborted


def test_streamed_choices_each_begin_and_end_once(server: RunningServer) -> None:
    server.engine.script = three_choices
    *chunks, last = events(server.chat(n=3, stream=True, stream_options={"include_usage": True}).text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, (text, reason) in enumerate(zip(TEXTS, REASONS, strict=True)):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"] for choice in own] == [
            {"role": "assistant", "content": ""},
            *({"content": character} for character in text),
            {},
        ]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(text) + 1) + [reason]
    assert (last["choices"], last["usage"]) == ([], USAGE)
    seen = [choice["index"] for choice in choices]
    assert seen != sorted(seen), "the choices were not streamed side by side"


def test_openais_client_streams_several_choices(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.script = three_choices
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(model="tiny", prompt="hi", n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == TEXTS
    answer = client.chat.completions.create(model="tiny", messages=USER, n=3)
    assert [choice.message.content for choice in answer.choices] == TEXTS
    assert answer.usage.prompt_tokens_details.cached_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_own_choice_and_no_other(server: RunningServer, stream: bool) -> None:
    # What the engine makes of choice 1 behind its stop string arrives all the same, and counts for nothing.
    server.engine.script = lambda prompt, params: merged(
        reply("abcdef"), outputs_of([b"xS", b"TOPy", b"zz", b"zz"]), reply("STO", reason="length")
    )
    fields: dict[str, Any] = {"n": 3, "stop": "STOP", "return_token_ids": True}
    if stream:
        *chunks, last = events(server.complete(**fields, stream=True, stream_options={"include_usage": True}).text)
        assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks) == 3
        choices = [chunk["choices"][0] for chunk in chunks]
        texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(3)]
        ids = [[i for c in choices if c["index"] == index for i in c["token_ids"]] for index in range(3)]
        reasons = {c["index"]: c["stop_reason"] for c in choices if c["finish_reason"]}
        usage = last["usage"]
    else:
        answer = server.complete(**fields).json()
        texts = [choice["text"] for choice in answer["choices"]]
        ids = [choice["token_ids"] for choice in answer["choices"]]
        reasons = {choice["index"]: choice["stop_reason"] for choice in answer["choices"]}
        usage = answer["usage"]
    assert texts == ["abcdef", "x", "STO"]
    assert ids == [[*b"abcdef", EOS], [*b"xSTOP"], [*b"STO"]]
    assert reasons == {0: None, 1: "STOP", 2: None}
    assert usage["completion_tokens"] == 7 + 5 + 3
    assert server.engine.finished == [(f"{server.engine.added[0].request_id}-1", 5)]
    assert not server.engine.aborted


def test_each_choice_has_its_own_logprobs_and_offsets(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: merged(reply("ab", reason="length"), reply("xyz", reason="length"))
    offsets = [choice["logprobs"]["text_offset"] for choice in server.complete(n=2, logprobs=0).json()["choices"]]
    assert offsets == [[0, 1], [0, 1, 2]]
    chat = server.chat(n=2, logprobs=True).json()["choices"]
    assert ["".join(e["token"] for e in choice["logprobs"]["content"]) for choice in chat] == ["ab", "xyz"]


def test_priority_and_salt_reach_the_engine(server: RunningServer) -> None:
    assert server.chat(priority=-5, cache_salt="mine").status_code == 200
    assert server.complete().status_code == 200
    assert [(a.priority, a.cache_salt, a.tenant) for a in server.engine.added] == [(-5, "mine", ""), (0, "", "")]


def test_legacy_logprobs_are_parallel_lists_with_offsets_into_the_text(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([b"a", "é".encode(), b"b", [EOS]], reason="stop")
    [choice] = server.complete(logprobs=2).json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéb"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<eos>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.97, -1.95, -1.69, -0.98, -2.56]
    assert logprobs["top_logprobs"][0] == {"a": -0.97, "b": -0.98}
    assert events(server.complete(logprobs=2, stream=True).text)[1]["choices"][0]["logprobs"]["text_offset"] == [1, 1]


def test_the_chosen_token_is_listed_beside_the_likeliest(server: RunningServer) -> None:
    [choice] = server.complete(logprobs=0).json()["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"h": -1.04}
    [entry, *_] = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert entry == {"token": "h", "logprob": -1.04, "bytes": [104], "top_logprobs": []}


def test_parameters_reach_the_engine_as_they_were_given(server: RunningServer) -> None:
    given = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    assert (
        server.chat(**given, stop=["x", "y"], stop_token_ids=[1, 2], logprobs=True, top_logprobs=4).status_code == 200
    )
    assert server.engine.added[0].params == SamplingParams(**given, stop=("x", "y"), stop_token_ids=(1, 2), logprobs=4)


def test_top_k_beyond_the_vocabulary_is_the_whole_vocabulary(server: RunningServer) -> None:
    assert server.chat(top_k=10**30).status_code == 200
    assert server.engine.added[0].params.top_k == server.engine.resolved.model.vocab_size


def test_both_names_of_the_limit_may_say_the_same(server: RunningServer) -> None:
    assert server.chat(max_tokens=4, max_completion_tokens=4).status_code == 200
    assert server.chat(max_completion_tokens=5).status_code == 200
    assert [added.params.max_tokens for added in server.engine.added] == [4, 5]


def test_the_models_own_sampling_defaults_stand_unless_overridden(start: Start) -> None:
    server = start(FakeEngine(), service={"sampling_defaults": {"temperature": 0.6, "top_p": 0.8}})
    server.chat()
    server.chat(temperature=0, top_p=None)
    assert [(a.params.temperature, a.params.top_p) for a in server.engine.added] == [(0.6, 0.8), (0, 0.8)]


def prompt_of(server: RunningServer, **fields: Any) -> str:
    response = server.chat(**fields)
    assert response.status_code == 200, response.text
    return bytes(server.engine.added[-1].prompt_token_ids).decode()


def test_messages_reach_the_template_as_plain_text(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts, "name": None}]
    assert prompt_of(server, messages=messages) == "system:be|user:a\nb|bot:"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "1", "content": "2"}
    assert prompt_of(server, messages=[*USER, said, answer]) == "user:hi|assistant:|tool:2|bot:"


def test_template_options(server: RunningServer) -> None:
    assert prompt_of(server, chat_template_kwargs={"thinking": False}) == "[thinking=False]user:hi|bot:"
    assert prompt_of(server, reasoning_effort="low") == "[reasoning_effort=low]user:hi|bot:"
    assert prompt_of(server, add_generation_prompt=False) == "user:hi|"


def test_an_unfinished_last_message_is_continued(server: RunningServer) -> None:
    messages = [*USER, {"role": "assistant", "content": "bot "}]
    assert prompt_of(server, messages=messages, continue_final_message=True) == "user:hi|assistant:bot "


def test_a_model_without_a_template_does_not_chat(start: Start) -> None:
    server = start(service={"template": None})
    response = server.chat()
    assert response.status_code == 400
    assert "no" in response.json()["error"]["message"] or "not" in response.json()["error"]["message"]
    assert server.complete().status_code == 200


def test_the_answer_is_served_under_the_served_name(start: Start) -> None:
    server = start(service={"model_name": "mine"})
    assert server.chat(model="mine").json()["model"] == "mine"
    assert server.client.get("/v1/models").json()["data"][0]["root"] == "bytes-1"


def test_tokenize_and_back(server: RunningServer) -> None:
    answer = server.client.post("/tokenize", json={"prompt": "é"}).json()
    assert answer == {"tokens": [BOS, 0xC3, 0xA9], "count": 3, "max_model_len": 64}
    assert server.client.post("/tokenize", json={"prompt": "é", "add_special_tokens": False}).json()["count"] == 2
    assert server.client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == [BOS]
    answer = server.client.post("/tokenize", json={"messages": USER}).json()
    assert answer["tokens"] == list(PROMPT)
    answer = server.client.post("/detokenize", json={"tokens": [*"é".encode(), EOS]}).json()
    assert answer == {"prompt": "é<eos>"}


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/tokenize", {}, "exactly one"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "exactly one"),
        ("/tokenize", {"prompt": ["a"]}, "prompt is a list of 1; it must be a string"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [260]}, "tokens[0] is 260"),
        ("/detokenize", {"tokens": ["a"]}, 'tokens[0] is "a"'),
        ("/detokenize", {"tokens": "a"}, 'tokens is "a"'),
    ],
)
def test_tokenize_refuses(server: RunningServer, route: str, body: dict[str, Any], said: str) -> None:
    response = server.client.post(route, json=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
