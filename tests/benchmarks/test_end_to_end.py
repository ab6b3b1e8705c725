"""The whole client against a scripted OpenAI server: what it sends, counts and reports."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pageframe.benchmarks.client.arrivals import arrival_times
from pageframe.benchmarks.client.command import add_arguments, run
from pageframe.benchmarks.client.load import choose_cancelled

if TYPE_CHECKING:
    from conftest import Call, FakeOpenAI


class Client:
    """Runs the command line against a server and reads the results file."""

    def __init__(self, server: FakeOpenAI, folder: Path) -> None:
        self.server = server
        self.json_file = folder / "results.jsonl"
        self.prompts_file = folder / "prompts.txt"
        self.header: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def run(self, *flags: str, prompts: list[str] | None = None) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        if prompts is not None:
            self.prompts_file.write_text("\n".join(prompts), encoding="utf-8")
            flags = (*flags, "--prompts", str(self.prompts_file))
        own = ["--url", self.server.base_url, "--json", str(self.json_file), "--timeout", "20"]
        code = run(parser.parse_args([*own, *flags]))
        lines = [json.loads(line) for line in self.json_file.read_text(encoding="utf-8").splitlines()]
        assert [line.pop("type") for line in lines] == ["header", *["request"] * (len(lines) - 2), "summary"]
        self.header, *self.requests, self.summary = lines
        return code


@pytest.fixture
def client(server: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Client(server, tmp_path)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_closed_loop_keeps_its_concurrency(client: Client, capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    running = 0
    most = 0

    async def answer(call: Call) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await client.server.wait_for_calls(3)  # nobody is answered before three are here
        await call.start()
        for _ in range(5):
            await call.token()
        running -= 1  # before the end: the next request may come as soon as the client has read it
        await call.finish()

    client.server.default = answer
    assert client.run("--requests", "12", "--concurrency", "3", "--endpoint", endpoint, "--output-len", "5") == 0
    assert most == 3
    assert client.summary["peak_concurrency"] == 3
    assert (client.summary["completed"], client.summary["output_tokens"]) == (12, 60)
    assert [request["output_tokens"] for request in client.requests] == [5] * 12
    for request in client.requests:
        assert len(request["chunk_times_s"]) == 5  # neither the role nor the end is a token
        assert sum(request["chunk_tokens"]) == 5
        assert request["intended_s"] <= request["sent_s"] <= request["first_token_s"] <= request["end_s"]
        assert request["ttft_s"] == pytest.approx(request["first_token_s"] - request["intended_s"])
        assert request["e2e_s"] == pytest.approx(request["end_s"] - request["intended_s"])
        assert request["tpot_s"] == pytest.approx((request["e2e_s"] - request["ttft_s"]) / 4)
    out = capsys.readouterr().out
    for shown in ("(E2E - TTFT) / (tokens - 1)", "first token's content - intended send", "12 of 12", "p99"):
        assert shown in out


def test_open_loop_sends_on_time_however_slow_the_server_is(client: Client) -> None:
    async def answer(call: Call) -> None:
        await client.server.wait_for_calls(20)  # the last arrives before the first is answered
        await call.start()
        await call.token()
        await call.finish()

    client.server.default = answer
    assert client.run("--requests", "20", "--rate", "100", "--seed", "5", "--output-len", "1") == 0
    assert [request["intended_s"] for request in client.requests] == arrival_times(20, 100.0, 1.0, 5)
    assert client.summary["peak_concurrency"] == 20
    assert all(request["sent_s"] >= request["intended_s"] for request in client.requests)
    assert client.summary["tpot"] is None  # one token each


def test_every_failure_is_counted_by_its_kind_and_none_is_retried(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    async def drop(call: Call) -> None:
        await call.start()
        await call.token()
        call.drop()

    async def error_event(call: Call) -> None:
        await call.start()
        await call.token()
        await call.send({"error": {"message": "the engine died"}})
        await call.hold()  # a client that waits for the end would wait for ever

    async def unreadable(call: Call) -> None:
        await call.start()
        await call.send("{broken")

    async def cut(call: Call) -> None:
        await call.start()
        await call.token()

    async def full(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": "queue full"}}, status=429, headers={"Retry-After": "0"})

    async def moved(call: Call) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/v1/completions"})

    async def no_stream(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "all at once"}]})

    async def no_done(call: Call) -> None:
        await call.start()
        await call.token()
        await call.send({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})

    scripts = {
        "drop": drop,
        "error": error_event,
        "unreadable": unreadable,
        "cut": cut,
        "full": full,
        "moved": moved,
        "no stream": no_stream,
        "no done": no_done,
    }
    client.server.scripts = dict(scripts)
    assert client.run("--concurrency", "4", prompts=[*scripts, "good"]) == 0
    kinds = {
        call: request["error"] and request["error"]["kind"]
        for call, request in zip([*scripts, "good"], client.requests, strict=True)
    }
    assert kinds == {
        "drop": "connection lost",
        "error": "error event",
        "unreadable": "bad event",
        "cut": "incomplete answer",
        "full": "HTTP 429",
        "moved": "HTTP 307",
        "no stream": "incomplete answer",
        "no done": None,
        "good": None,
    }
    assert (client.summary["completed"], client.summary["failed"]) == (2, 7)
    assert Counter(call.prompt for call in client.server.calls) == Counter([*scripts, "good"])
    out = capsys.readouterr().out
    assert "FAILED 2 x incomplete answer" in out
    assert "the engine died" in out
    assert "queue full" in out


def test_a_request_that_takes_too_long_fails(client: Client) -> None:
    async def silent(call: Call) -> None:
        await call.start()
        await call.hold()

    client.server.default = silent
    assert client.run("--timeout", "1", prompts=["a"]) == 1  # all failed
    assert client.requests[0]["error"]["kind"] == "timeout"
    assert client.requests[0]["end_s"] >= 1.0


def test_cancelled_requests_close_their_connection_after_their_tokens(client: Client) -> None:
    cancelled = choose_cancelled(10, 0.4, 6, 0)
    prompts = [f"prompt {index}" for index in range(10)]

    async def answer(call: Call) -> None:
        tokens = cancelled.get(prompts.index(call.prompt))
        await call.start()
        for _ in range(6 if tokens is None else tokens):
            await call.token()
        if tokens is not None:
            await call.hold()
        await call.finish()

    client.server.default = answer
    assert client.run("--cancel-rate", "0.4", "--output-len", "6", prompts=prompts) == 0
    assert (client.summary["cancelled"], client.summary["completed"]) == (4, 6)
    assert sorted(client.server.wait_for_gone(4)) == sorted(prompts[index] for index in cancelled)
    for request in client.requests:
        wanted = cancelled.get(request["index"])
        assert request["outcome"] == ("ok" if wanted is None else "cancelled")
        assert len(request["chunk_times_s"]) == (6 if wanted is None else wanted)
    assert client.summary["output_tokens"] == 36  # of the completed ones


def test_ctrl_c_reports_what_was_measured(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    held = 0

    async def hold(call: Call) -> None:
        nonlocal held
        await call.start()
        await call.token()
        held += 1
        if held == 2:
            os.kill(os.getpid(), signal.SIGINT)
        await call.hold()

    prompts = [f"prompt {index}" for index in range(8)]
    client.server.scripts = dict.fromkeys(prompts[3:], hold)
    assert client.run("--concurrency", "2", prompts=prompts) == 130
    assert client.summary["partial"] is True
    outcomes = [request["outcome"] for request in client.requests]
    assert outcomes == ["ok", "ok", "ok", "interrupted", "interrupted"]
    assert (client.summary["interrupted"], client.summary["unsent"]) == (2, 3)
    assert client.summary["failed"] == 0
    assert "PARTIAL" in capsys.readouterr().out


@pytest.mark.parametrize(("shape", "endpoint", "extra"), [("vllm", "completions", 1), ("llama.cpp", "chat", 0)])
def test_random_prompts_have_the_asked_length_by_the_server_s_tokenizer(
    client: Client, shape: str, endpoint: str, extra: int
) -> None:
    """The fake tokenizer cuts words into pieces, so texts must be cut and measured again."""
    client.server.tokenizer = shape
    assert client.run("--requests", "20", "--input-len", "37", "--output-len", "2", "--endpoint", endpoint) == 0
    lengths = {len(client.server.encode(call.prompt)) + extra for call in client.server.calls}
    assert lengths == {37}
    assert len({call.prompt for call in client.server.calls}) == 20
    assert any("exactly 37 tokens" in note for note in client.header["notes"])


def test_without_a_tokenizer_a_prompt_has_that_many_words(client: Client) -> None:
    assert client.run("--requests", "4", "--input-len", "9", "--output-len", "2", "--seed", "1") == 0
    first = [call.prompt for call in client.server.calls]
    assert {len(prompt.split()) for prompt in first} == {9}
    client.server.calls.clear()
    assert client.run("--requests", "4", "--input-len", "9", "--output-len", "2", "--seed", "2") == 0
    assert not set(first) & {call.prompt for call in client.server.calls}
    assert any("no /tokenize" in note for note in client.header["notes"])


def test_optional_fields_are_sent_where_accepted_and_left_out_where_not(client: Client) -> None:
    assert client.run("--requests", "1", "--output-len", "3", "--temperature", "0.5", "--seed", "7") == 0
    body = client.server.calls[0].body
    assert (body["ignore_eos"], body["min_tokens"], body["max_tokens"]) == (True, 3, 3)
    assert (body["temperature"], body["seed"], body["model"]) == (0.5, 7, "fake-model")
    assert body["stream_options"] == {"include_usage": True}
    assert len(client.server.probes) == 1

    client.server.calls.clear()
    client.server.refused_fields = {"min_tokens", "stream_options"}
    assert client.run("--requests", "1", "--output-len", "3", "--chunk-usage") == 0
    body = client.server.calls[0].body
    assert body["ignore_eos"] is True
    assert not {"min_tokens", "stream_options", "seed"} & set(body)
    assert any("refuses it: min_tokens" in note for note in client.header["notes"])
    assert client.summary["output_tokens"] == 3  # counted in chunks
    assert client.requests[0]["prompt_tokens"] is None

    client.server.calls.clear()
    client.server.refused_fields = set()
    assert client.run("--requests", "1", "--output-len", "3", "--no-ignore-eos") == 0
    assert not {"min_tokens", "ignore_eos"} & set(client.server.calls[0].body)


def test_warm_up_is_sent_first_and_not_measured(client: Client) -> None:
    prompts = [f"prompt {index}" for index in range(6)]
    assert client.run("--requests", "4", "--warmup", "2", "--concurrency", "1", prompts=prompts) == 0
    assert [call.prompt for call in client.server.calls] == [*prompts[4:], *prompts[:4]]
    assert [request["index"] for request in client.requests] == [0, 1, 2, 3]
    assert client.summary["completed"] == 4


def test_warnings_name_what_makes_the_numbers_doubtful(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    async def short(call: Call) -> None:
        await call.start()
        await call.token()
        await call.finish("stop")

    client.server.default = short
    client.server.cached_tokens = 16
    assert client.run("--requests", "4", "--ignore-eos", "--slo", "ttft=60000", prompts=["a", "b"]) == 0
    out = capsys.readouterr().out
    assert "64 prompt tokens came from the server's prefix cache" in out
    assert "2 requests repeat another request's prompt" in out
    assert "4 answers do not have --output-len tokens" in out
    assert client.summary["good"] == 4
    assert client.summary["cached_tokens"] == 64


def test_the_api_key_is_sent_and_never_shown(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "sk-very-secret-key"
    client.server.api_key = secret
    assert client.run("--requests", "2", "--output-len", "1", "--api-key", secret) == 0

    async def change_key(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"bad key {secret}"}}, status=401)

    client.server.default = change_key
    assert client.run("--requests", "2", "--output-len", "1", "--api-key", secret) == 1
    assert client.requests[0]["error"] == {"kind": "HTTP 401", "message": "bad key ***"}
    shown = capsys.readouterr()
    assert secret not in shown.out + shown.err + client.json_file.read_text(encoding="utf-8")


def test_tokens_pooled_in_one_chunk_are_counted_by_the_final_usage(client: Client) -> None:
    async def pooled(call: Call) -> None:
        await call.start()
        for _ in range(4):
            await call.token(" two tokens")
            call.sent_tokens += 1
            await asyncio.sleep(0)
        await call.finish()

    client.server.default = pooled
    assert client.run("--requests", "1", "--output-len", "8") == 0
    request = client.requests[0]
    assert (request["output_tokens"], request["chunk_tokens"]) == (8, [2, 2, 2, 2])
    assert request["tokens_counted_by"] == "spread"
    assert request["tpot_s"] == pytest.approx((request["e2e_s"] - request["ttft_s"]) / 7)
