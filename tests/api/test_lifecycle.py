"""Clients that leave, engines that die, servers that start and stop: nobody hangs, nothing is kept."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageframe.api.config import ServerConfig
from pageframe.api.launch import bind, run_server
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.errors import StartupError

from .conftest import RunningServer, Start
from .fakes import WAIT_SECONDS, FakeEngine, merged, outputs_of, reply

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def post_raw(server: RunningServer, *, num_added: int = 1, **fields: Any) -> socket.socket:
    """A chat request on a connection of its own, sent and not yet answered, the engine's `num_added`th."""
    body = json.dumps({**BODY, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    connection = socket.socket()
    connection.settimeout(WAIT_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    server.engine.wait_for(lambda: len(server.engine.added) == num_added)
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def streaming(server: RunningServer) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """A stream whose first content has arrived; the engine holds the rest."""
    server.engine.held_from = 1
    with server.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        assert "role" in next(lines)
        assert next(lines) == ""
        assert '"content":"h"' in next(lines)
        yield response, lines


def rest(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


# ---- clients that go away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_outputs", [0, 2], ids=["queued", "running"])
def test_a_client_that_goes_away_is_aborted_at_once(server: RunningServer, stream: bool, num_outputs: int) -> None:
    server.engine.held_from = num_outputs
    with post_raw(server, stream=stream) as connection:
        if stream and num_outputs:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert not server.engine.aborted
    request_id = server.engine.added[0].request_id
    server.engine.wait_for(lambda: server.engine.aborted == [request_id])
    server.engine.held_from = None
    assert server.chat().status_code == 200
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_those_of_its_choices_along_that_have_not_ended(
    server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda prompt, params: merged(reply("long"), reply("", reason="stop"), reply("long"))
    server.engine.held_from = 5
    with post_raw(server, stream=stream, n=3) as connection:
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    request_id = server.engine.added[0].request_id
    # The last one first: whoever stands behind the first would begin to compute the prompt were that one gone.
    server.engine.wait_for(lambda: server.engine.aborted == [f"{request_id}-2", f"{request_id}-0"])
    server.wait_idle()


def test_a_finished_request_is_not_aborted(server: RunningServer) -> None:
    server.chat()
    server.chat(stream=True)
    server.engine.script = lambda prompt, params: outputs_of([b"ab."])
    server.complete(stop=["."])
    assert not server.engine.aborted
    server.wait_idle()


def test_a_client_that_goes_away_while_it_sends_leaves_the_server_well(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert server.chat().status_code == 200
    assert len(server.engine.added) == 1


# ---- engines that fail ----------------------------------------------------------------------------------------------


def test_an_engine_that_dies_before_the_first_token_is_a_500(start: Start) -> None:
    server = start()
    server.engine.held_from = 0
    with post_raw(server, stream=True) as connection:
        server.engine.die()
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 500")
    assert b'"type":"server_error"' in answer


def test_an_engine_that_dies_ends_streams_with_an_error_and_turns_health_red(start: Start) -> None:
    server = start()
    with streaming(server) as (_, lines):
        server.engine.die("killed by signal 9")
        [event] = rest(lines)
    assert json.loads(event)["error"]["type"] == "server_error"
    for response in (server.chat(), server.complete(stream=True), server.client.get("/inspect/kv")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        assert "retry-after" not in response.headers
    health = server.client.get("/health")
    assert health.status_code == 503
    assert "killed by signal 9" in health.json()["reason"]
    assert server.client.get("/metrics").status_code == 200


def test_a_request_that_fails_in_the_engine_is_a_500_without_its_inside(server: RunningServer) -> None:
    outputs = outputs_of([b"a"], reason="error")
    outputs[0].error = "secret tensor shapes"
    server.engine.script = lambda prompt, params: outputs
    response = server.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert '"server_error"' in server.chat(stream=True).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_ends_the_whole_answer(server: RunningServer, stream: bool) -> None:
    server.engine.script = lambda prompt, params: merged(
        reply("abc"), outputs_of([b"x", b""], reason="error"), reply("", reason="stop")
    )
    response = server.chat(n=3, stream=stream)
    if stream:
        *_, last = rest(iter(response.text.splitlines()))
        assert "[DONE]" not in response.text
        error = json.loads(last)["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["type"] == "server_error"
    server.wait_idle()
    request_id = server.engine.added[0].request_id
    assert f"{request_id}-0" in server.engine.aborted
    assert f"{request_id}-2" not in server.engine.aborted


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_ends_a_request_of_several_choices_once(start: Start, stream: bool) -> None:
    server = start()
    server.engine.held_from = 0
    with post_raw(server, stream=stream, n=3) as connection:
        server.engine.die()
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 500")
    assert answer.count(b'"type":"server_error"') == 1
    server.wait_idle()


def test_a_failure_in_the_middle_of_a_stream_is_an_event_and_then_the_end(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([b"a", b"b"], reason="error")
    response = server.chat(stream=True)
    assert response.status_code == 200
    *_, last = rest(iter(response.text.splitlines()))
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text


def test_a_bug_of_ours_is_a_500_and_the_next_request_is_served(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: [None]  # no RequestOutput at all
    response = server.chat()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "NoneType" not in response.text
    assert response.headers["x-request-id"]
    server.engine.script = FakeEngine().script
    assert server.chat().status_code == 200
    server.wait_idle()


def test_work_that_waits_without_a_step_is_not_healthy(start: Start) -> None:
    server = start()
    server.engine.since_progress = 29.0
    assert server.client.get("/health").json() == {"status": "ok", "seconds_since_last_step": 29.0}
    server.engine.since_progress = 31.0
    health = server.client.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "stuck"
    assert health.json()["seconds_since_last_step"] == 31.0


# ---- a full queue ---------------------------------------------------------------------------------------------------


class Crowd:
    """A server whose queue has room for `max_queue`, and requests that the engine holds."""

    def __init__(self, start: Start, *, max_queue: int, held: int, running: int, waiting: int) -> None:
        self.server = start(max_queue=max_queue)
        engine = self.server.engine
        engine.held_from = 0
        self.connections = []
        for number in range(1, held + 1):
            engine.stats.num_running, engine.stats.num_waiting = 0, 0
            self.connections.append(post_raw(self.server, num_added=number))
        engine.stats.num_running, engine.stats.num_waiting = running, waiting

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.server.engine.wait_for(lambda: self.server.engine.num_outstanding == 0)


def test_a_full_queue_is_a_429_that_says_when_to_ask_again(start: Start) -> None:
    crowd = Crowd(start, max_queue=2, held=4, running=2, waiting=2)
    for body in ({}, {"stream": True}):
        response = crowd.server.chat(**body)
        assert response.status_code == 429
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "queue_full", None)
        assert "2 requests wait" in error["message"]
        assert "max_queue is 2" in error["message"]
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-request-id"]
    assert len(crowd.server.engine.added) == 4, "a refused request reached the engine"
    assert 'pageframe:num_refused_total{model_name="tiny"} 2.0' in crowd.server.client.get("/metrics").text
    crowd.close()
    crowd.server.engine.held_from = None
    crowd.server.engine.stats.num_running = crowd.server.engine.stats.num_waiting = 0
    assert crowd.server.chat().status_code == 200


@pytest.mark.parametrize(
    ("running", "waiting", "n", "status"),
    [
        (3, 1, 1, 200),  # 1 waits, 1 more may
        (3, 1, 2, 200),  # its choices do not queue: they run or follow
        (2, 2, 1, 429),
        # Nothing waited after the last step: all that came since may run, 8 of them.
        (4, 0, 4, 200),
        (0, 0, 4, 200),
        (0, 0, 6, 200),
        # More than can run and wait, whatever the last step says.
        (4, 0, 7, 429),
        (0, 0, 7, 429),
    ],
)
def test_what_counts_as_waiting(start: Start, running: int, waiting: int, n: int, status: int) -> None:
    crowd = Crowd(start, max_queue=2, held=4, running=running, waiting=waiting)
    crowd.server.engine.held_from = None
    response = crowd.server.chat(n=n)
    assert response.status_code == status
    if n == 7:
        assert f"4 requests run or wait and this one makes {n} more" in response.text
        assert "8 may run (max_num_requests) and 2 wait (max_queue)" in response.text
    crowd.close()


def test_the_queues_numbers_are_no_more_than_it_holds(start: Start) -> None:
    """More than may wait have come since the last step, which took none of them in yet."""
    crowd = Crowd(start, max_queue=2, held=7, running=2, waiting=1)
    assert "2 requests wait, and max_queue is 2" in crowd.server.chat().text
    crowd.close()


def test_a_queue_of_none_serves_who_can_run(start: Start) -> None:
    crowd = Crowd(start, max_queue=0, held=1, running=1, waiting=0)
    crowd.server.engine.held_from = None
    assert crowd.server.chat().status_code == 200
    crowd.server.engine.stats.num_waiting = 1
    assert crowd.server.chat().status_code == 429
    crowd.close()


def test_what_can_never_be_served_is_the_clients_fault_however_full_the_queue(start: Start) -> None:
    crowd = Crowd(start, max_queue=1, held=2, running=1, waiting=1)
    for fields in ({"n": 9}, {"max_tokens": 10**6}, {"temperature": 11}):
        assert crowd.server.chat(**fields).status_code == 400
    assert crowd.server.chat().status_code == 429
    crowd.close()


# ---- starting -------------------------------------------------------------------------------------------------------


def test_until_the_model_is_ready_everything_but_the_version_is_a_503(start: Start) -> None:
    server = start(hold=True, wait=False)
    for response in (server.chat(), server.client.get("/v1/models"), server.client.get("/metrics")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "starting"
        assert int(response.headers["retry-after"]) > 0
    health = server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "starting")
    assert server.client.get("/version").json().keys() == {"version"}


def test_a_server_that_is_stopped_while_it_loads_ends(start: Start) -> None:
    server = start(hold=True, wait=False)
    assert server.client.get("/health").status_code == 503
    server.stop()
    server.may_load.set()
    server.join()
    assert server.failure is None


def test_a_port_in_use_is_one_line_and_status_1_before_any_model_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with bind(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        assert run_server(EngineConfig(model="/no/such/model.gguf"), ServerConfig(port=port)) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"pageframe: port {port} of 127.0.0.1 is in use; choose another with --port\n"


def test_a_model_that_is_not_there_is_one_line_and_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_server(EngineConfig(model="/no/such/model.gguf"), ServerConfig(port=0)) == 1
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("pageframe: ")
    assert "/no/such/model.gguf" in line


def test_an_address_of_another_machine_is_one_line() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.1, port 0"):
        bind(ServerConfig(host="203.0.113.1", port=0))


def test_the_listener_says_tcp_so_that_small_writes_go_out_at_once() -> None:
    with bind(ServerConfig(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


# ---- stopping -------------------------------------------------------------------------------------------------------


def test_a_draining_server_finishes_what_runs_and_takes_nothing_new(start: Start) -> None:
    server = start()
    with streaming(server) as (_, lines):
        server.stop()
        for route in ("/v1/chat/completions", "/v1/completions"):
            response = httpx.post(server.url + route, json=BODY)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "shutting_down"
            assert int(response.headers["retry-after"]) > 0
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert not server.engine.was_shut_down
        server.engine.release(server.engine.added[0])
        assert rest(lines)[-1] == "[DONE]"
    server.join()
    assert server.engine.was_shut_down
    assert server.failure is None
    assert not server.engine.aborted


def test_after_the_drain_timeout_running_requests_end_with_an_error(start: Start) -> None:
    server = start(drain_timeout=0.05)
    with streaming(server) as (_, lines):
        server.stop()
        [event] = rest(lines)
    assert json.loads(event)["error"]["code"] == "shutting_down"
    server.join()
    assert server.engine.aborted == [server.engine.added[0].request_id]
    assert server.engine.was_shut_down


def test_a_second_stop_cuts_off_at_once_also_where_nothing_was_sent(start: Start) -> None:
    server = start(drain_timeout=3600)
    server.engine.held_from = 0
    with post_raw(server) as connection:
        server.stop()
        server.stop()
        assert read_all(connection).startswith(b"HTTP/1.1 503")
    server.join()
    assert server.engine.aborted == [server.engine.added[0].request_id]


def test_a_client_that_does_not_read_does_not_hold_the_server_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pageframe.api.server.CUT_SECONDS", 1)
    server = start(drain_timeout=0.05)
    # A few megabytes of logprobs fill the connection's buffers.
    server.engine.script = lambda prompt, params: outputs_of([b"x" * 100] * 40)
    with post_raw(server, stream=True, logprobs=True, top_logprobs=20) as connection:
        assert connection.recv(10)
        server.stop()
        server.join()
    assert len(server.engine.aborted) == 1


SCRIPT = """
import asyncio
import sys
sys.path.insert(0, sys.argv[1])
from fakes import ByteTokenizer, FakeEngine, PlainTemplate
from pageframe.api.auth import Access
from pageframe.api.launch import bind
from pageframe.api.server import serve_until_signal
from pageframe.api.config import ServerConfig
from pageframe.api.metrics import Metrics
from pageframe.api.service import Service

async def load():
    engine = FakeEngine()
    engine.held_from = 1
    metrics = Metrics("tiny", engine.resolved, lambda: engine.stats)
    return Service(engine, ByteTokenizer(), PlainTemplate(), "tiny", {}, metrics)

with bind(ServerConfig(port=0)) as listener:
    asyncio.run(serve_until_signal(listener, ServerConfig(), Access(), load))
"""


@pytest.fixture
def process() -> Iterator[Callable[[], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def run() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_signals_end_a_real_process_with_status_0(process: Callable[[], subprocess.Popen[str]]) -> None:
    server = process()
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line.startswith("Pageframe serves tiny on http://127.0.0.1:")
    url = line.split()[-1]
    assert server.stdout.readline().startswith(f"Try it: curl {url}/v1/chat/completions")
    assert server.stdout.readline() == f"Look inside: {url}/dashboard\n"
    assert server.stdout.readline() == (
        "Computes on cpu with torch's operations, threads: 1; weights: float32, K/V: float32; "
        "an answer is the same up to its last bits\n"
    )
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        assert "role" in next(lines)
        server.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").json()["status"] != "draining":
            pass
        server.send_signal(signal.SIGINT)
        assert "shutting_down" in rest(lines)[-1]
    assert server.wait(WAIT_SECONDS) == 0
