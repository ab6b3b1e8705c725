"""Everything around generation: ids, hosts, routes that are not there, models, metrics, inspection, settings."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pageframe.api.config import ServerConfig
from pageframe.runtime.errors import ConfigError

from .conftest import RunningServer, Start
from .fakes import WAIT_SECONDS, merged, outputs_of, reply


def test_importing_the_http_side_imports_no_torch() -> None:
    code = "import sys, pageframe.api.server; print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ---- request ids ----------------------------------------------------------------------------------------------------


def test_the_clients_request_id_comes_back(server: RunningServer) -> None:
    header = {"x-request-id": "from-header"}
    for response in (server.client.get("/health", headers=header), server.client.get("/nope", headers=header)):
        assert response.headers.get_list("x-request-id") == ["from-header"]
    body = {"prompt": "a", "request_id": "from-body"}
    for stream in (False, True):
        response = server.client.post("/v1/completions", json={**body, "stream": stream}, headers=header)
        assert response.headers.get_list("x-request-id") == ["from-body"]
        assert "from-body" not in server.engine.added[-1].request_id


@pytest.mark.parametrize("header", ["a b", "x" * 129, "é".encode(), ""])
def test_an_unfit_request_id_is_replaced(server: RunningServer, header: str | bytes) -> None:
    response = server.client.get("/health", headers={"x-request-id": header})
    assert response.headers["x-request-id"].isalnum()


def test_without_one_an_answers_request_id_is_its_own_id(server: RunningServer) -> None:
    response = server.chat()
    assert response.headers["x-request-id"] == response.json()["id"]
    ids = {server.client.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


# ---- hosts ----------------------------------------------------------------------------------------------------------

LOCAL = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "10.0.0.5:80", "a.localhost"]
FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[evil]", ":80"]
PRIVATE = ["gpu-box", "gpu-box:8000", "box.local", "box.internal"]


@pytest.mark.parametrize("host", LOCAL)
def test_a_local_host_is_served(server: RunningServer, host: str) -> None:
    assert server.client.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN + PRIVATE)
def test_a_host_that_a_web_page_could_have_chosen_is_refused(server: RunningServer, host: str) -> None:
    response = server.client.get("/health", headers={"host": host})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "host_not_allowed"
    assert response.headers["x-request-id"]
    response = server.client.post("/v1/completions", json={"prompt": "a"}, headers={"host": host})
    assert response.status_code == 400
    assert not server.engine.added


def test_a_server_for_the_network_also_answers_to_private_names(start: Start) -> None:
    server = start(host="0.0.0.0")
    for host in LOCAL + PRIVATE:
        assert server.client.get("/health", headers={"host": host}).status_code == 200, host
    for host in FOREIGN:
        assert server.client.get("/health", headers={"host": host}).status_code == 400, host


def test_a_request_without_a_host_is_refused(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"the Host header is missing" in answer


# ---- routes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nope", "/v1/", "/v1/models/", "/docs", "/redoc", "/v1/chat/completions/"])
def test_no_such_route_is_a_404_in_openais_shape(server: RunningServer, path: str) -> None:
    response = server.client.get(path)
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("POST", "/health", "GET"), ("DELETE", "/v1/models", "GET")],
)
def test_another_method_is_a_405_that_names_the_right_one(
    server: RunningServer, method: str, path: str, allowed: str
) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert f"{method} is not allowed" in response.json()["error"]["message"]
    assert response.headers["allow"] == allowed


def test_who_only_looks_whether_it_lives_gets_no_body(start: Start) -> None:
    server = start()
    head, get = server.client.head("/health"), server.client.get("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    server.complete()
    server.engine.die()
    assert server.client.head("/health").status_code == 503
    assert server.client.head("/v1/models").status_code == 405


def test_models(server: RunningServer) -> None:
    [model] = server.client.get("/v1/models").json()["data"]
    assert isinstance(model.pop("created"), int)
    assert model == {
        "id": "tiny",
        "object": "model",
        "owned_by": "pageframe",
        "root": "bytes-1",
        "max_model_len": 64,
    }
    assert server.client.get("/v1/models/tiny").json()["id"] == "tiny"
    response = server.client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_version_and_schema(server: RunningServer) -> None:
    answer = server.client.get("/version").json()
    assert answer.pop("version")
    assert answer == {
        "model": "bytes-1",
        "device": "cpu",
        "instruction_set": "",
        "threads": 1,
        "backend": "reference",
        "dtype": "float32",
        "compute_dtype": "float32",
        "weights": "float32",
        "kv_dtype": "float32",
        "graphs": False,
        "max_num_batched_tokens": 64,
        "mixed_token_budget": None,
        "batch_invariant": False,
        "notes": [],
    }
    assert "/v1/chat/completions" in server.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/inspect/kv", ("kv", "")),
        ("/inspect/blocks", ("blocks", "")),
        ("/inspect/requests", ("requests", "")),
        ("/inspect/steps", ("steps", "0")),
        ("/inspect/steps?since=17", ("steps", "17")),
    ],
)
def test_inspection_is_the_engines_own_answer(server: RunningServer, path: str, question: tuple[str, str]) -> None:
    response = server.client.get(path)
    assert response.json() == {"what": question[0], "argument": question[1]}
    assert server.engine.questions == [question]


def test_a_request_is_inspected_by_the_id_of_its_answer(server: RunningServer) -> None:
    request_id = server.chat().json()["id"]
    assert server.client.get(f"/inspect/requests/{request_id}").json()["argument"] == request_id
    response = server.client.get("/inspect/requests/chatcmpl-0")
    assert response.status_code == 404
    assert "chatcmpl-0" in response.json()["error"]["message"]


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "9" * 30, "", "²"])
def test_a_step_number_is_a_number(server: RunningServer, since: str) -> None:
    response = server.client.get("/inspect/steps", params={"since": since})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "since"
    assert not server.engine.questions


def test_the_prefix_cache_is_reset_by_the_engine(server: RunningServer) -> None:
    for origin, forgotten in ((None, 7), (f"http://127.0.0.1:{server.port}", 0)):
        headers = {} if origin is None else {"origin": origin}
        response = server.client.post("/reset_prefix_cache", headers=headers)
        assert response.status_code == 200
        assert response.json() == {"blocks_forgotten": forgotten}
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "http://[", ""])
def test_a_page_elsewhere_does_not_reset_the_prefix_cache(server: RunningServer, origin: str) -> None:
    response = server.client.post("/reset_prefix_cache", headers={"origin": origin})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert server.engine.blocks_cached == 7


def test_a_dead_engine_has_no_prefix_cache(start: Start) -> None:
    server = start()
    server.chat()
    server.engine.die()
    assert server.client.post("/reset_prefix_cache").status_code == 503


# ---- metrics --------------------------------------------------------------------------------------------------------


def samples(server: RunningServer) -> dict[tuple[str, str], float]:
    """Value by name and by the label beside model_name, which every sample carries."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny", sample
            others = [value for name, value in sample.labels.items() if name != "model_name"]
            found[sample.name.removeprefix("pageframe:"), ",".join(others)] = sample.value
    return found


def test_gauges_and_totals_are_the_engines(start: Start) -> None:
    server = start()
    found = samples(server)
    assert found["num_requests_running", ""] == 2
    assert found["num_requests_waiting", ""] == 1
    assert found["kv_cache_usage_perc", ""] == 12 / 32
    assert [found["kv_blocks", state] for state in ("free", "cached", "used", "pinned")] == [20, 0, 12, 0]
    assert (found["kv_slots_written", ""], found["kv_slots_wasted", ""]) == (40, 8)
    assert (found["num_preemptions_total", ""], found["num_aborts_total", ""]) == (5, 0)
    assert found["cache_config_info", "4,float32,32"] == 1
    assert (found["prefix_cache_queries_total", ""], found["prefix_cache_hits_total", ""]) == (0, 0)
    assert found["num_refused_total", ""] == 0
    assert found["prompt_tokens_total", ""] == 0
    server.engine.stats.num_running = server.engine.stats.num_waiting = server.engine.stats.blocks_used = 0
    found = samples(server)
    assert (
        found["num_requests_running", ""] == found["num_requests_waiting", ""] == found["kv_cache_usage_perc", ""] == 0
    )


def test_totals_never_fall_and_a_dead_engine_has_nothing_else(start: Start) -> None:
    server = start()
    stats = server.engine.stats
    stats.num_aborts, stats.lookup_tokens, stats.hit_tokens, stats.num_waits = 3, 300, 128, {"blocks": 4}
    server.complete()
    before = samples(server)
    server.engine.die()
    after = samples(server)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if name[0].endswith("_total"):
            assert after[name] == value, name
    assert (after["num_preemptions_total", ""], after["request_waits_total", "blocks"]) == (5, 4)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_slots_written"):
        assert after[gauge, ""] == 0


def test_counters_and_histograms_count_what_was_served(start: Start) -> None:
    server = start()
    server.complete()
    server.engine.script = lambda prompt, params: outputs_of([b"abc", b"de"])
    server.complete(stream=True)
    server.complete(stop="c")
    found = samples(server)
    assert found["prompt_tokens_total", ""] == 9
    assert found["generation_tokens_total", ""] == 6 + 5 + 3
    assert found["request_success_total", "stop"] == 2
    assert found["request_success_total", "length"] == 1
    assert found["request_success_total", "abort"] == found["request_success_total", "error"] == 0
    assert found["time_to_first_token_seconds_count", ""] == 3
    assert found["inter_token_latency_seconds_count", ""] == 5 + 2
    assert found["e2e_request_latency_seconds_count", ""] == found["request_decode_time_seconds_count", ""] == 3
    assert found["request_prompt_tokens_sum", ""] == 9
    assert found["request_generation_tokens_sum", ""] == 14
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert (f"{name}_bucket", "0.001") in found


def test_prefix_cache_counters_are_the_engines_tokens(start: Start) -> None:
    server = start()
    server.engine.stats.lookup_tokens, server.engine.stats.hit_tokens = 300, 128
    found = samples(server)
    assert (found["prefix_cache_queries_total", ""], found["prefix_cache_hits_total", ""]) == (300, 128)


def test_a_request_of_several_choices_counts_its_prompt_once_and_each_choice(start: Start) -> None:
    server = start()
    server.engine.script = lambda prompt, params: merged(reply("hello"), outputs_of([b"abc", b"de"]))
    server.complete(n=2)
    server.complete(n=2, stream=True)
    found = samples(server)
    assert found["prompt_tokens_total", ""] == found["request_prompt_tokens_sum", ""] == 6
    assert found["time_to_first_token_seconds_count", ""] == found["request_queue_time_seconds_count", ""] == 2
    assert found["generation_tokens_total", ""] == found["request_generation_tokens_sum", ""] == 2 * (6 + 5)
    assert found["request_success_total", "stop"] == found["request_success_total", "length"] == 2
    assert found["e2e_request_latency_seconds_count", ""] == found["request_decode_time_seconds_count", ""] == 4
    # A choice's first output is followed by gaps of its own: 5 more tokens of one, 2 of the other.
    assert found["inter_token_latency_seconds_count", ""] == 2 * (5 + 2)


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("host", "", "host is empty"),
        ("port", -1, "port is -1; it must be from 0 to 65535"),
        ("port", 65536, "port is 65536; it must be from 0 to 65535"),
        ("served_model_name", " ", "served_model_name is ' '"),
        ("max_queue", -1, "max_queue is -1; it must be from 0 to 1000000"),
        ("max_queue", 10**6 + 1, "max_queue is 1000001; it must be from 0 to 1000000"),
        ("max_body_bytes", 0, "max_body_bytes is 0; it must be from 1 to 2147483648"),
        ("drain_timeout", -1.0, "drain_timeout is -1; it must be from 0 to 3600"),
        ("drain_timeout", float("nan"), "drain_timeout is nan"),
        ("log_level", "loud", "log_level is 'loud'; it must be one of debug, info, warning, error"),
    ],
)
def test_a_setting_out_of_range(field: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**{field: value})
    assert said in str(raised.value)


def test_the_defaults_are_local() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.max_body_bytes) == ("127.0.0.1", 8000, 16 * 1024**2)
    assert config.max_queue == 1024
