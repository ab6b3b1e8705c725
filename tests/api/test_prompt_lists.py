"""Several prompts in one request, and what an answer may say of a prompt: its text, its tokens, its logprobs."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pageframe.api.job import Job
from pageframe.api.prompts import check_prompt_logprobs
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.request import RequestOutput, SamplingParams, TokenLogprobs

from .conftest import RunningServer, Start
from .fakes import BOS, MAX_MODEL_LEN, WAIT_SECONDS, ByteTokenizer, FakeEngine, Script, merged, outputs_of, reply
from .test_answers import events


def shout(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    return reply(bytes(token for token in prompt if token < 256).decode().upper(), reason="length")


def streamed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The whole answer, put together from a stream's chunks."""
    options = {"include_usage": True}
    *chunks, last = events(server.complete(**fields, stream=True, stream_options=options).text)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        [piece] = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
        choice["text"] += piece.pop("text")
        logprobs = piece.pop("logprobs")
        if logprobs is not None:
            before = choice["logprobs"] or {name: [] for name in logprobs}
            choice["logprobs"] = {name: before[name] + entries for name, entries in logprobs.items()}
        choice["token_ids"] = choice.get("token_ids", []) + piece.pop("token_ids", [])
        assert choice.keys().isdisjoint({"prompt_token_ids", "prompt_logprobs"} & piece.keys()), "said twice"
        choice |= piece
    return {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"]}


def check_both(server: RunningServer, script: Script, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same streamed."""
    server.engine.script = script
    response = server.complete(**fields, return_token_ids=True)
    assert response.status_code == 200, response.text
    whole = response.json()
    assert streamed(server, **fields, return_token_ids=True) == {name: whole[name] for name in ("choices", "usage")}
    return whole


@pytest.mark.parametrize("prompts", [["ab", "cde", "f"], [[97, 98], [99, 100, 101], [102]]])
def test_each_prompts_choices_follow_those_of_the_one_before(server: RunningServer, prompts: list[Any]) -> None:
    answer = check_both(server, shout, prompt=prompts, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in answer["choices"]] == ["AB", "AB", "CDE", "CDE", "F", "F"]
    asked = [added.prompt_token_ids for added in server.engine.added[:3]]
    assert [[token for token in ids if token != BOS] for ids in asked] == [[97, 98], [99, 100, 101], [102]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids for ids in asked for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, asked))
    assert answer["usage"]["completion_tokens"] == 2 * 6
    assert len({added.request_id for added in server.engine.added}) == 6
    assert not server.engine.aborted


def test_cached_tokens_are_summed_over_prompts(server: RunningServer) -> None:
    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        outputs = shout(prompt, params)
        outputs[0].num_cached_tokens = len(prompt) - 1
        return outputs

    usage = check_both(server, script, prompt=["ab", "cde"], n=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 + 3


def test_random_lists_answer_as_their_prompts_do_alone(server: RunningServer) -> None:
    rng = random.Random(11)

    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        same = random.Random(bytes(prompt))
        chunks = [same.randbytes(same.randrange(1, 5)) for _ in range(same.randrange(1, 6))]
        return outputs_of(chunks, reason=same.choice(["stop", "length"]))

    for _ in range(20):
        prompts = [list(rng.randbytes(rng.randrange(1, 6))) for _ in range(rng.randrange(2, 6))]
        fields: dict[str, Any] = {"stop": ["a", "é", "\ufffd\ufffd"], "echo": rng.random() < 0.5, "logprobs": 1}
        if fields["echo"]:
            fields["logprobs"] = None
        together = check_both(server, script, prompt=prompts, **fields)
        alone = [check_both(server, script, prompt=prompt, **fields) for prompt in prompts]
        for index, answer in enumerate(alone):
            assert together["choices"][index] == {**answer["choices"][0], "index": index}
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)


def never_ending(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    """A token and no end; for the prompt "bad", a failure."""
    if prompt == list(b"bad"):
        return [RequestOutput("", [], finish_reason="error", error="broken")]
    return outputs_of([b"a"], reason="")


def test_a_prompt_that_fails_ends_the_others(server: RunningServer) -> None:
    server.engine.script = never_ending
    response = server.complete(prompt=[list(b"good"), list(b"bad"), list(b"fine")])
    assert response.status_code == 500
    server.wait_idle()
    request_id = server.engine.added[0].request_id.removesuffix("-0")
    assert {f"{request_id}-0", f"{request_id}-2"} <= set(server.engine.aborted)


def test_a_client_that_leaves_ends_all_prompts_choices(server: RunningServer) -> None:
    server.engine.script = never_ending
    body = {"prompt": ["ab", "cd"], "n": 2, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    server.engine.wait_for(lambda: len(server.engine.aborted) == 4)
    server.wait_idle()


def test_nothing_goes_on_behind_an_answer(server: RunningServer) -> None:
    async def names() -> set[str]:
        await asyncio.sleep(0)
        return {getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()}

    assert server.complete(prompt=["a", "b"]).status_code == 200
    server.wait_idle()
    assert "_pass_on" not in asyncio.run_coroutine_threadsafe(names(), server._loop).result(WAIT_SECONDS)


def test_an_engine_that_dies_fails_all_prompts(start: Start) -> None:
    engine = FakeEngine(never_ending)
    server = start(engine)
    body = {"prompt": ["ab", "cd"], "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert '"text":"a"' in next(lines)
        engine.die()
        assert "the engine ended" in list(lines)[-2]


def test_a_list_that_does_not_fit_into_the_queue_is_refused_whole(start: Start) -> None:
    server = start(max_queue=1)
    assert server.complete(prompt=["a"] * 9).status_code == 200
    response = server.complete(prompt=["a"] * 10)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_choices")
    assert "makes 10 choices; at most 8 run at once (max_num_requests) and 1 wait (max_queue), so 9" in response.text
    response = server.complete(prompt=["a"] * 3, n=4)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert len(server.engine.added) == 9
    # Not for ever: it fits when those that run have ended.
    server.engine.held_from = 1
    with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
        assert server.complete(prompt=["a"] * 9).status_code == 429


# ---- echo and prompt_logprobs ---------------------------------------------------------------------------------------


def told(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    """Each prompt token but the first has its own id / -100 as logprob and is second to the id below it."""
    outputs = reply("yz", reason="length")
    if params.prompt_logprobs is not None:
        num_top = params.prompt_logprobs
        outputs[0].prompt_logprobs = [
            TokenLogprobs(-token / 100, [token - 1, token, token + 1][:num_top], [-0.25, -token / 100, -9.0][:num_top])
            for token in prompt[1:]
        ]
    return outputs


@pytest.mark.parametrize(("prompt", "text"), [("aé", "aé"), ([97, 0xC3, 0xA9], "aé"), ([BOS, 97], "<bos>a")])
def test_an_echoed_prompt_comes_first(server: RunningServer, prompt: Any, text: str) -> None:
    [choice] = check_both(server, told, prompt=prompt, echo=True)["choices"]
    assert choice["text"] == text + "yz"
    assert choice["token_ids"] == list(b"yz")
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in choice
    assert {added.params.prompt_logprobs for added in server.engine.added} == {None}


def test_echoed_logprobs_begin_with_the_prompts(server: RunningServer) -> None:
    answer = check_both(server, told, prompt=["aé", "b"], echo=True, logprobs=1, n=2)
    assert {added.params.prompt_logprobs for added in server.engine.added} == {1}
    first, same, second, _ = [choice["logprobs"] for choice in answer["choices"]]
    assert first == same
    assert first["tokens"] == ["<bos>", "a", "bytes:\\xc3", "bytes:\\xa9", "y", "z"]
    assert first["token_logprobs"] == [None, -0.97, -1.95, -1.69, -1.21, -1.22]
    assert first["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert first["top_logprobs"][:2] == [None, {"`": -0.25, "a": -0.97}]
    assert first["top_logprobs"][-1] == {"z": -1.22}
    assert second["text_offset"] == [0, 0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 4 + 2


def test_a_prompts_logprobs_may_come_behind_other_choices_tokens(server: RunningServer) -> None:
    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        """As an engine that computes a prompt for all its choices gives them, the first choice last."""
        first, second, third = told(prompt, params), reply("bc", reason="length"), reply("d")
        outputs = merged(second, third, first)
        for output in outputs:
            output.request_id = str((int(output.request_id) + 1) % 3)
        return outputs

    answer = check_both(server, script, prompt=["ab", "c"], n=3, echo=True, logprobs=0, prompt_logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["abyz", "abbc", "abd", "cyz", "cbc", "cd"]
    shown = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert shown == [shown[0]] * 3 + [shown[3]] * 3
    assert list(shown[0][1]) == ["97", "96"]
    assert list(shown[3][1]) == ["99", "98"]


def test_a_prompt_of_one_token_has_no_logprob(server: RunningServer) -> None:
    [choice] = check_both(server, told, prompt=[97], echo=True, logprobs=0, prompt_logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.21, -1.22]
    assert choice["prompt_logprobs"] == [None]


def test_prompt_logprobs_have_vllms_shape(server: RunningServer) -> None:
    answer = check_both(server, told, prompt=[[97, 98], [99, 120]], prompt_logprobs=1)
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [
        [
            None,
            {
                "98": {"logprob": -0.98, "rank": None, "decoded_token": "b"},
                "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            },
        ],
        [
            None,
            {
                "120": {"logprob": -1.2, "rank": None, "decoded_token": "x"},
                "119": {"logprob": -0.25, "rank": 1, "decoded_token": "w"},
            },
        ],
    ]
    assert "prompt_logprobs" not in answer


def test_prompt_logprobs_and_echoed_ones_each_have_the_number_asked_for(server: RunningServer) -> None:
    [choice] = check_both(server, told, prompt=[97, 98], echo=True, logprobs=1, prompt_logprobs=2)["choices"]
    assert {added.params.prompt_logprobs for added in server.engine.added} == {2}
    assert choice["logprobs"]["top_logprobs"][1] == {"a": -0.25, "b": -0.98}
    assert choice["prompt_logprobs"][1]["98"]["rank"] == 2
    [choice] = check_both(server, told, prompt=[97, 98], echo=True, logprobs=2, prompt_logprobs=0)["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert choice["prompt_logprobs"][1] == {"98": {"logprob": -0.98, "rank": None, "decoded_token": "b"}}


def test_a_chats_prompt_stands_beside_its_choices(server: RunningServer) -> None:
    server.engine.script = told
    answer = server.chat(prompt_logprobs=0, return_token_ids=True, n=2).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == len("user:hi|bot:")
    assert answer["prompt_logprobs"][1] == {"115": {"logprob": -1.15, "rank": None, "decoded_token": "s"}}
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    chunks = events(server.chat(prompt_logprobs=0, stream=True, n=2).text)
    assert chunks[0]["prompt_logprobs"] == answer["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])


def test_impossible_tokens_have_a_number_that_json_has(server: RunningServer) -> None:
    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        outputs = outputs_of([b"a"])
        outputs[0].prompt_logprobs = [TokenLogprobs(-math.inf, [1], [-math.inf]) for _ in prompt[1:]]
        return outputs

    answer = check_both(server, script, prompt=[97, 98], echo=True, logprobs=1, prompt_logprobs=1)
    [choice] = answer["choices"]
    assert choice["logprobs"]["token_logprobs"][1] == -9999.0
    assert set(choice["logprobs"]["top_logprobs"][1].values()) == {-9999.0}
    assert choice["prompt_logprobs"][1]["98"]["logprob"] == -9999.0


def test_prompt_logprobs_of_long_prompts_are_bounded_in_all() -> None:
    params = SamplingParams(n=4, prompt_logprobs=15)
    check_prompt_logprobs(Job([[1] * 4096], params))
    with pytest.raises(InvalidRequestError, match=f"{4 * 16 * 4097} numbers.* at most {4 * 16 * 4096}") as raised:
        check_prompt_logprobs(Job([[1] * 4000, [1] * 97], params))
    assert raised.value.param == "prompt_logprobs"
    check_prompt_logprobs(Job([[1] * 4097], SamplingParams(n=4)))


class HeldTokenizer(ByteTokenizer):
    """Names no token until the test lets it."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def token_text(self, token_id: int) -> str:
        self.asked.set()
        assert self.let_go.wait(WAIT_SECONDS)
        return super().token_text(token_id)


@pytest.mark.parametrize("stream", [False, True])
def test_others_are_served_while_a_prompts_logprobs_are_written(start: Start, stream: bool) -> None:
    tokenizer = HeldTokenizer()
    server = start(FakeEngine(told), service={"tokenizer": tokenizer})
    body = {"prompt": "ab", "prompt_logprobs": 0, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS)
        assert tokenizer.asked.wait(WAIT_SECONDS)
        try:
            assert server.client.get("/health").status_code == 200
        finally:
            tokenizer.let_go.set()
        assert held.result(WAIT_SECONDS).status_code == 200


# ---- truncate_prompt_tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"prompt": "abcdef", "truncate_prompt_tokens": 2}, b"ef"),
        ({"prompt": list(b"abcdef"), "truncate_prompt_tokens": 6}, b"abcdef"),
        ({"prompt": list(b"abcdef"), "truncate_prompt_tokens": MAX_MODEL_LEN}, b"abcdef"),
        ({"prompt": "x" * 100 + "y", "truncate_prompt_tokens": -1}, b"x" * 62 + b"y"),
        ({"prompt": "x" * 1000 + "y", "truncate_prompt_tokens": -1, "max_tokens": 60}, b"xxxy"),
        ({"prompt": "abcdef", "truncate_prompt_tokens": None}, bytes([*b"abcdef"])),
    ],
)
def test_the_end_of_a_prompt_is_kept(server: RunningServer, fields: dict[str, Any], kept: bytes) -> None:
    response = server.complete(**fields, echo=True)
    assert response.status_code == 200, response.text
    [added] = server.engine.added
    assert bytes(token for token in added.prompt_token_ids if token != BOS) == kept
    assert response.json()["choices"][0]["text"] == kept.decode() + "hello"


def test_the_end_of_a_conversation_is_kept(server: RunningServer) -> None:
    assert server.chat(truncate_prompt_tokens=6).status_code == 200
    assert bytes(server.engine.added[0].prompt_token_ids) == b"i|bot:"
    long = [{"role": "user", "content": "x" * 1000}]
    assert server.chat(messages=long).status_code == 400
    assert server.chat(messages=long, truncate_prompt_tokens=-1).status_code == 200
    assert len(server.engine.added[1].prompt_token_ids) == MAX_MODEL_LEN - 1


class EndTokenizer(ByteTokenizer):
    """Knows no more of a text than its last tokens, and of some texts not even those."""

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool, max_bytes: int) -> list[int] | None:
        self.max_bytes = max_bytes
        return None if "whole" in text else list(text.encode())[-num_tokens:]

    def encode(self, text: str, **options: Any) -> list[int]:
        raise AssertionError("the whole text was tokenised")


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_of_which_the_end_is_kept_is_not_tokenised_whole(start: Start, field: str) -> None:
    tokenizer = EndTokenizer()
    server = start(service={"tokenizer": tokenizer})
    ask = server.complete if field == "prompt" else server.chat

    def given(text: str) -> Any:
        return text if field == "prompt" else [{"role": "user", "content": text}]

    assert ask(**{field: given("x" * 10**6)}, truncate_prompt_tokens=7).status_code == 200
    assert len(server.engine.added[0].prompt_token_ids) == 7
    assert tokenizer.max_bytes == 2 * MAX_MODEL_LEN * tokenizer.longest_token
    error = ask(**{field: given("whole")}, truncate_prompt_tokens=7).json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"last 7 tokens, but its last {tokenizer.max_bytes} bytes have no place where" in error["message"]
