"""Keys: how they are read, who gets through and where, whose tenant a request is, and that no key is ever shown."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from pageframe.api.app import ADMIN_ROUTES, ROUTES
from pageframe.api.auth import ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE, Access, Caller, load_access
from pageframe.api.config import ServerConfig
from pageframe.api.launch import run_server
from pageframe.api.terminal_http import KEY_VARIABLE, ServerError, fetch_json
from pageframe.api.terminal_server import own_server
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.errors import ConfigError

from .conftest import RunningServer, Start
from .fakes import WAIT_SECONDS, FakeEngine

ALICE, BOB, NAMELESS, ADMIN = "sk-alice-0123456789", "sk-bob-0123456789==", "sk-nobody-0123456789", "adm/in+0123456789~"
ALL_KEYS = (ALICE, BOB, NAMELESS, ADMIN)
NAMELESS_TENANT = "key-3"
API_FILE = f"""\
# who may use it
alice {ALICE}
  bob\t{BOB}   # the second

{NAMELESS}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write(folder: Path, name: str, text: str | bytes) -> str:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / name)


# ---- reading them ---------------------------------------------------------------------------------------------------


def load(api_keys: str | None = None, admin_key: str | None = None, **environ: str) -> Access:
    return load_access(ServerConfig(api_keys=api_keys, admin_key=admin_key), dict(environ))


def test_keys_of_files(tmp_path: Path) -> None:
    access = load(write(tmp_path, "keys", API_FILE), write(tmp_path, "admin", f"# mine\n{ADMIN}\n"))
    assert access.needs_key
    found = {key: access.find(key.encode()) for key in ALL_KEYS}
    assert found[ALICE] == Caller("alice", is_admin=False)
    assert found[BOB] == Caller("bob", is_admin=False)
    assert found[NAMELESS] == Caller(NAMELESS_TENANT, is_admin=False)
    assert found[ADMIN] == Caller("admin", is_admin=True)
    for wrong in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), "alice", f"alice {ALICE}"):
        assert access.find(wrong.encode()) is None


def test_keys_of_the_environment_are_taken_out_of_it() -> None:
    environ = {API_KEYS_VARIABLE: f"alice {ALICE},{NAMELESS}\nbob {BOB}", ADMIN_KEY_VARIABLE: ADMIN, "HOME": "/"}
    access = load_access(ServerConfig(), environ)
    assert environ == {"HOME": "/"}, "child processes would get the keys"
    tenants = [caller and caller.tenant for caller in (access.find(key.encode()) for key in (ALICE, NAMELESS, BOB))]
    assert tenants == ["alice", "key-2", "bob"]
    assert access.find(ADMIN.encode()) == Caller("admin", is_admin=True)


def test_without_keys_none_is_needed() -> None:
    assert not load().needs_key


def test_a_tenant_may_have_several_keys(tmp_path: Path) -> None:
    access = load(write(tmp_path, "keys", f"alice {ALICE}\nalice {BOB}\n"))
    assert access.find(ALICE.encode()) == access.find(BOB.encode()) == Caller("alice", is_admin=False)
    assert str(access) == "API keys: 2, tenants: 1, admin key: no"


def test_a_key_is_looked_up_by_its_digest_and_compared_once_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = load(write(tmp_path, "keys", API_FILE), write(tmp_path, "admin", ADMIN))
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def record(known: bytes, digest: bytes) -> bool:
        compared.append((known, digest))
        return compare(known, digest)

    monkeypatch.setattr("pageframe.api.auth.hmac.compare_digest", record)
    for key in (ALICE, ADMIN, "wrong"):
        compared.clear()
        assert (access.find(key.encode()) is None) == (key == "wrong")
        [(known, digest)] = compared
        assert digest == hashlib.sha256(key.encode()).digest()
        assert known == (bytes(32) if key == "wrong" else digest)


SECRET = "hush-hush-0123456789"
#: Files of API keys and of the admin key, and what the message must say.
FAULTS: list[tuple[str | bytes | None, str | bytes | None, str]] = [
    (f"a b {SECRET}", None, "keys, line 1: it has 3 words"),
    (f"\n# x\nalice {SECRET}!", None, "keys, line 3: the key must be 1 to 512 letters"),
    (f"{SECRET}é", None, "keys, line 1: the key must be"),
    (f"{SECRET}=x", None, "keys, line 1: the key must be"),
    (SECRET * 26, None, "keys, line 1: the key must be 1 to 512"),
    (f"{'t' * 65} {SECRET}", None, "keys, line 1: the tenant must be printable text of at most 64 characters"),
    (f"a\x07b {SECRET}", None, "keys, line 1: the tenant must be printable"),
    (f"alice {SECRET}\nbob {SECRET}", None, "keys, line 2 has the key of"),
    (
        f"alice {SECRET}\nbob {SECRET[:15]}",
        None,
        "keys, line 2: the key has 15 characters, so it can be",
    ),
    (None, SECRET[:15], "admin, line 1: the key has 15 characters"),
    (f"key-2 {SECRET}\n{ALICE}", None, "keys, line 1: the tenant's name is what a key without a name is called"),
    (f"admin {SECRET}", ADMIN, "keys, line 1: the tenant's name is"),
    (f"alice {SECRET}", SECRET, "admin, line 1 has the key of"),
    ("", None, "api_keys: "),
    ("# none\n\n", None, "holds no key"),
    (b"\xff\xfe" + SECRET.encode(), None, "is no text in UTF-8"),
    (None, f"root {SECRET}", "admin, line 1: it must be one key and nothing else"),
    (None, f"{SECRET}\n{ALICE}", "admin, line 2: it must be one key and nothing else"),
    (None, "", "admin_key: "),
]


@pytest.mark.parametrize(("keys", "admin", "said"), FAULTS, ids=range(len(FAULTS)))
def test_what_is_wrong_with_a_file_is_said_without_its_content(
    tmp_path: Path, keys: str | bytes | None, admin: str | bytes | None, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(
            None if keys is None else write(tmp_path, "keys", keys),
            None if admin is None else write(tmp_path, "admin", admin),
        )
    assert said in str(raised.value)
    assert SECRET[:15] not in str(raised.value)
    assert ALICE not in str(raised.value)


def test_files_that_cannot_be_read_and_keys_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none cannot be read: No such file"):
        load(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(None, str(tmp_path))
    with pytest.raises(ConfigError, match="api_keys names a file and PAGEFRAME_API_KEYS is set as well"):
        load(write(tmp_path, "keys", ALICE), PAGEFRAME_API_KEYS=BOB)
    with pytest.raises(ConfigError, match="api_keys: PAGEFRAME_API_KEYS holds no key"):
        load(PAGEFRAME_API_KEYS=" , ")
    with pytest.raises(ConfigError, match="10001 API keys; at most 10000"):
        load(PAGEFRAME_API_KEYS=",".join(f"key-of-number-{number:05}" for number in range(10_001)))


def test_a_wrong_file_is_one_line_and_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(port=0, api_keys=write(tmp_path, "keys", f"a b {SECRET}"))
    assert run_server(EngineConfig(model="/no/such/model.gguf"), config) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pageframe: ")
    assert "it has 3 words" in err


# ---- who gets in ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _shared_locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("keys")
    files = {"api_keys": write(folder, "keys", API_FILE), "admin_key": write(folder, "admin", ADMIN)}
    server = RunningServer(FakeEngine(), **files).start()
    yield server
    server.close()


@pytest.fixture
def locked(_shared_locked: RunningServer) -> RunningServer:
    """A server with the keys above; its engine starts each test anew."""
    engine = _shared_locked.engine
    engine.added, engine.questions, engine.blocks_cached = [], [], 7
    return _shared_locked


#: Streams that end when whoever reads them leaves.
ENDLESS = ("/inspect/events", "/inspect/live")
UNKNOWN_THINGS = ("/inspect/requests/x", "/dashboard/x")


def requests(routes: tuple[tuple[str, str, Any], ...]) -> list[tuple[str, str]]:
    return [
        (method, path.replace("{model_id:path}", "tiny").replace("{request_id}", "x").replace("{name:path}", "x"))
        for method, path, _ in routes
    ]


def is_refused(response: httpx.Response, code: str) -> bool:
    """Whether it is a 401 in OpenAI's shape, as its client expects it."""
    error = response.json()["error"]
    return (
        response.status_code == 401
        and set(error) == {"message", "type", "param", "code"}
        and (error["type"], error["code"]) == ("invalid_request_error", code)
        and response.headers["www-authenticate"].startswith(('Bearer realm="pageframe"', 'Basic realm="pageframe'))
        and bool(response.headers["x-request-id"])
    )


def test_without_a_key_everything_but_health_is_a_401(locked: RunningServer) -> None:
    client = locked.client
    everything = [*requests(ROUTES), *requests(ADMIN_ROUTES), ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/nope")]
    for method, path in everything:
        response = client.request(method, path)
        assert response.status_code == 200 if path == "/health" else is_refused(response, "missing_api_key"), path
    for method in ("OPTIONS", "HEAD", "DELETE", "PUT"):
        assert client.request(method, "/v1/models").status_code == 401
    for path in ("/v1/responses", "/v1/embeddings"):
        assert is_refused(client.post(path, json={}), "missing_api_key")
    assert client.get("/health?verbose").status_code == 200
    assert not locked.engine.added
    assert not locked.engine.questions


def test_the_tables_hold_every_route_that_there_is(locked: RunningServer) -> None:
    paths = locked.client.get("/openapi.json", headers=bearer(ALICE)).json()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    tables = [(method, path.replace(":path", "")) for method, path, _ in (*ROUTES, *ADMIN_ROUTES)]
    assert served == set(tables)
    assert len(set(tables)) == len(tables)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", ALICE)],
        [("authorization", f"Basic {ALICE}")],
        [("authorization", f"Bearer{ALICE}")],
        [("x-api-key", ALICE)],
        [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {ALICE}")],
    ],
)
def test_what_is_no_bearer_key_is_none(locked: RunningServer, headers: list[tuple[str, str]]) -> None:
    assert is_refused(locked.client.get("/v1/models", headers=headers), "missing_api_key")


@pytest.mark.parametrize("key", ["x", ALICE[:-1], f"{ALICE}, {BOB}", f'"{ALICE}"', "alice", "é".encode()])
def test_a_key_of_nobody_is_a_401_that_does_not_repeat_it(locked: RunningServer, key: str | bytes) -> None:
    raw = key if isinstance(key, bytes) else key.encode()
    response = locked.client.get("/v1/models", headers={b"authorization": b"Bearer " + raw})
    assert is_refused(response, "invalid_api_key")
    assert 'error="invalid_token"' in response.headers["www-authenticate"]
    assert ALICE[:8] not in response.text


@pytest.mark.parametrize("value", [f"Bearer {ALICE}", f"bearer {ALICE}", f"BEARER   {ALICE}"])
def test_a_key_of_somebody_opens(locked: RunningServer, value: str) -> None:
    assert locked.client.get("/v1/models", headers={"authorization": value}).status_code == 200


def basic(key: str, name: str = "admin") -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{key}".encode()).decode()}


def test_a_browser_asks_for_the_key_of_the_dashboard_by_itself(locked: RunningServer) -> None:
    client = locked.client
    for headers in ({}, basic("wrong-0123456789abcdef"), basic(ALICE)):
        response = client.get("/dashboard", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith('Basic realm="pageframe')
    assert client.get("/dashboard", headers=basic(ADMIN)).status_code == 200
    assert client.get("/inspect/kv", headers=basic(ADMIN, name="")).status_code == 200
    assert client.get("/inspect/kv", headers=basic(ALICE)).status_code == 403
    for path in ("/inspect/kv", "/v1/models", "/dashboard/main.js"):
        assert client.get(path).headers["www-authenticate"].startswith("Bearer"), "only the page itself asks"


@pytest.mark.parametrize(
    ("site", "status"), [("same-origin", 200), ("none", 200), ("cross-site", 401), ("same-site", 401), ("", 401)]
)
def test_a_page_elsewhere_cannot_use_the_password_that_a_browser_keeps(
    locked: RunningServer, site: str, status: int
) -> None:
    response = locked.client.get("/inspect/kv", headers={**basic(ADMIN), "sec-fetch-site": site})
    assert response.status_code == status
    # Whoever writes the header himself needs no such check.
    assert locked.client.get("/inspect/kv", headers={**bearer(ADMIN), "sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("value", ["Basic", "Basic !!!", "Basic YQ==", "Basic YTo=", f"Basic {ADMIN}", "Basic \xff"])
def test_a_password_that_cannot_be_read_is_none(locked: RunningServer, value: str) -> None:
    response = locked.client.get("/inspect/kv", headers={b"authorization": value.encode("latin-1")})
    assert is_refused(response, "missing_api_key")


DISGUISES = [
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health%2f..%2fv1%2fmodels",
    "//health",
    "/health/",
    "/%68ealth",
    "/health;/v1/models",
    "/health%00",
    "/HEALTH",
    "/v1/models#/health",
    "/v1/models?/health",
    "/v1/../health",
    "/v1/models/../../health",
    "http://localhost/health",
    "http://localhost/v1/models",
]


@pytest.mark.parametrize("target", DISGUISES)
def test_no_other_spelling_of_a_path_passes_for_health(locked: RunningServer, target: str) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split(b" ")[1] in (b"400", b"401")
    assert b"object" not in answer


def test_a_request_without_a_key_is_refused_before_its_body_is_sent(locked: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 16000000\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


def test_the_admin_key_alone_looks_inside(locked: RunningServer) -> None:
    client = locked.client
    for method, path in requests(ADMIN_ROUTES):
        response = client.request(method, path, headers=bearer(ALICE))
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_key_needed"), path
        assert "--admin-key" in response.json()["error"]["message"]
        assert 'error="insufficient_scope"' in response.headers["www-authenticate"]
    assert not locked.engine.questions
    assert locked.engine.blocks_cached == 7
    for method, path in requests(ADMIN_ROUTES):
        # Streamed, since some have no end. The fake engine knows no request "x".
        with client.stream(method, path, headers=bearer(ADMIN)) as response:
            assert response.status_code == (404 if path in UNKNOWN_THINGS else 307 if path == "/" else 200), path
    assert client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(ADMIN)).status_code == 200


def test_without_an_admin_key_nobody_looks_inside(start: Start, tmp_path: Path) -> None:
    server = start(api_keys=write(tmp_path, "keys", API_FILE))
    assert server.client.get("/inspect/kv", headers=bearer(ALICE)).status_code == 403


def test_with_an_admin_key_alone_it_is_needed_everywhere(start: Start, tmp_path: Path) -> None:
    server = start(admin_key=write(tmp_path, "admin", ADMIN))
    for path in ("/v1/models", "/metrics"):
        assert server.client.get(path).status_code == 401
        assert server.client.get(path, headers=bearer(ADMIN)).status_code == 200


def test_hosts_and_content_types_are_checked_with_a_key_too(locked: RunningServer) -> None:
    headers = bearer(ALICE)
    assert locked.client.get("/v1/models", headers={**headers, "host": "evil.example"}).status_code == 400
    response = locked.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.json()["error"]["param"] == "content-type"


# ---- whose request it is --------------------------------------------------------------------------------------------


def test_the_tenant_of_the_key_reaches_the_engine(locked: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pageframe.api.generation")
    for key in (ALICE, BOB, NAMELESS):
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream, "user": "mallory", "cache_salt": "mine"}
            locked.client.post("/v1/completions", json=body, headers=bearer(key))
            chat = {"messages": [{"role": "user", "content": "a"}], "stream": stream}
            locked.client.post("/v1/chat/completions", json=chat, headers=bearer(key))
    locked.wait_idle()
    tenants = [added.tenant for added in locked.engine.added]
    assert tenants == ["alice"] * 4 + ["bob"] * 4 + [NAMELESS_TENANT] * 4
    assert {added.cache_salt for added in locked.engine.added} == {"mine", ""}
    assert "tenant alice, user 'mallory'" in caplog.text


def test_without_keys_the_tenant_is_nobody_whatever_is_sent(server: RunningServer) -> None:
    for headers in ({}, bearer("none"), {"authorization": "Basic x"}):
        response = server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.status_code == 200
        assert server.engine.added[-1].tenant == ""
    assert server.client.get("/inspect/kv").status_code == 200


# ---- never shown ----------------------------------------------------------------------------------------------------


def test_no_key_is_printed_logged_or_answered(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start(api_keys=write(tmp_path, "keys", API_FILE), admin_key=write(tmp_path, "admin", ADMIN))
    answers = [
        server.client.request(method, path, headers=bearer(key)).text
        for key in (*ALL_KEYS, ALICE[:-1])
        for method, path in (*requests(ROUTES), *requests(ADMIN_ROUTES), ("GET", "/nope"), ("GET", "/openapi.json"))
        if path not in ENDLESS
    ]
    server.engine.script = lambda prompt, params: [None]  # type: ignore[list-item] # the server fails on it
    server.client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(ALICE))
    server.close()
    printed = capsys.readouterr()
    assert "Opened by keys: API keys: 3, tenants: 3, admin key: yes" in printed.out
    assert '-H "authorization: Bearer $KEY"' in printed.out
    inside = repr(server.state.access) + repr(server.state.config) + repr(vars(server.state.access))
    for text in (*answers, inside, printed.out, printed.err, caplog.text):
        for key in ALL_KEYS:
            # httpx logs no headers; what the key's holder is called may be shown.
            assert key not in text
            assert key[3:9] not in text.replace(str(tmp_path), "").replace("alice", "").replace("nobody", "")


# ---- the terminal's commands ----------------------------------------------------------------------------------------


def test_the_terminal_sends_the_key_of_the_environment(locked: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="needs an API key"):
        fetch_json(locked.url, "/v1/models")
    monkeypatch.setenv(KEY_VARIABLE, ALICE)
    assert fetch_json(locked.url, "/v1/models")["data"]
    with pytest.raises(ServerError, match="needs the admin key"):
        fetch_json(locked.url, "/inspect/kv")
    monkeypatch.setenv(KEY_VARIABLE, ADMIN)
    assert fetch_json(locked.url, "/inspect/kv")["what"] == "kv"
    monkeypatch.setenv(KEY_VARIABLE, f"{ALICE}\r\nx: y")
    with pytest.raises(ServerError, match="PAGEFRAME_API_KEY holds a character") as raised:
        fetch_json(locked.url, "/v1/models")
    assert ALICE not in str(raised.value)
    assert fetch_json(locked.url, "/health")["status"] == "ok"


def test_a_server_of_the_terminals_own_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEYS_VARIABLE, ALICE)
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, ADMIN)
    monkeypatch.setenv("PAGEFRAME_OTHER", "kept")
    code = "import os, sys; sys.exit(', '.join(name for name in os.environ if name.startswith('PAGEFRAME_')))"
    with (
        pytest.raises(ServerError, match=r"has ended \(1\): PAGEFRAME_OTHER "),
        own_server(Console(file=io.StringIO()), None, [sys.executable, "-c", code]),
    ):
        pass
