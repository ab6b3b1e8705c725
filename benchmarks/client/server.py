"""The server under test, seen over HTTP: its models, its tokenizer, and which optional fields it accepts.

It speaks plain OpenAI and, where they are there, the /tokenize and /detokenize of vLLM's or of llama.cpp's shape.
It sends no load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from pageframe.benchmarks.client.errors import InputError

CONNECT_TIMEOUT_S = 10.0
# uvicorn and llama.cpp drop a connection after 5 s without a request; one that we drop first cannot break under a
# request that has just been sent on it
IDLE_CONNECTION_S = 3.0
MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the server. `body` is the parsed JSON, or None where the text is none."""

    status: int
    body: Any
    text: str


class Server:
    """A server at `base_url` (no /v1). The session belongs to whoever made it."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, *, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self.session = session
        self.base_url = base_url
        self.timeout_s = timeout_s
        self._api_key = api_key

    def redact(self, text: str) -> str:
        """One line of `text`, not too long, without the API key (a server may repeat the key in its message)."""
        line = " ".join(text.split())
        if self._api_key:
            line = line.replace(self._api_key, "***")
        return line if len(line) <= MESSAGE_LENGTH else line[:MESSAGE_LENGTH] + "..."

    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        # a compressing proxy would hold tokens back
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """One exchange outside the load.

        Raises:
            InputError: the server cannot be reached or does not speak HTTP.
        """
        url = self.base_url + path
        data = None if body is None else json.dumps(body).encode()
        timeout = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self.session.request(
                method, url, data=data, headers=self.headers(), timeout=timeout, allow_redirects=False
            ) as response:
                text = (await response.read()).decode("utf-8", errors="replace")
        except TimeoutError:
            raise InputError(f"{url} did not answer in time (--timeout {self.timeout_s:g})") from None
        except (aiohttp.ClientError, OSError) as error:
            raise InputError(f"{self.base_url} cannot be reached: {self.redact(network_message(error))}") from None
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = None
        return Answer(response.status, parsed, text)

    async def find_model(self, wanted: str | None) -> str:
        """The model to ask for: `wanted`, or the first that the server lists. Also tells whether it is there at all.

        Raises:
            InputError: the server cannot be reached, or it lists no model and none was given.
        """
        answer = await self.call("GET", "/v1/models")
        if wanted is not None:
            return wanted
        if answer.status != 200:
            said = self.redact(error_message(answer.body) or answer.text)
            raise InputError(f"{self.base_url}/v1/models answered {answer.status} ({said}); name a model with --model")
        listed = answer.body.get("data") if isinstance(answer.body, dict) else None
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{self.base_url}/v1/models lists no model; name one with --model")
        return name

    async def find_tokenizer(self, model: str) -> RemoteTokenizer | None:
        """The server's tokenizer, in whichever shape it answers; None where it has none."""
        for shape in (VLLM_SHAPE, LLAMA_CPP_SHAPE):
            tokenizer = RemoteTokenizer(self, model, shape)
            ids = await tokenizer.encode("hello world", add_special_tokens=False)
            if ids and await tokenizer.decode(ids) is not None:
                return tokenizer
        return None


@dataclass(frozen=True, slots=True)
class TokenizerShape:
    """The names that a server's /tokenize and /detokenize use; `special_field` switches BOS and the like."""

    text_field: str
    special_field: str
    decoded_field: str
    names_model: bool


VLLM_SHAPE = TokenizerShape("prompt", "add_special_tokens", "prompt", names_model=True)
LLAMA_CPP_SHAPE = TokenizerShape("content", "add_special", "content", names_model=False)


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """/tokenize and /detokenize of a server; answers None where it does not understand."""

    server: Server
    model: str
    shape: TokenizerShape

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        body = {self.shape.text_field: text, self.shape.special_field: add_special_tokens}
        answer = await self.server.call("POST", "/tokenize", body | self._model_field())
        tokens = answer.body.get("tokens") if isinstance(answer.body, dict) else None
        if answer.status != 200 or not isinstance(tokens, list):
            return None
        return tokens if all(isinstance(token, int) for token in tokens) else None

    async def decode(self, ids: list[int]) -> str | None:
        answer = await self.server.call("POST", "/detokenize", {"tokens": ids} | self._model_field())
        text = answer.body.get(self.shape.decoded_field) if isinstance(answer.body, dict) else None
        return text if answer.status == 200 and isinstance(text, str) else None

    def _model_field(self) -> dict[str, Any]:
        return {"model": self.model} if self.shape.names_model else {}


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections: the load alone decides how many there are."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    return aiohttp.ClientSession(connector=connector)


def network_message(error: Exception) -> str:
    """What went wrong on the network, in the system's own words where it has some."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.strerror:
        return error.strerror
    return str(error) or repr(error)


def error_message(body: Any) -> str:
    """The message in an error of OpenAI's shape (or one of its cousins), "" where there is none."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body.get("detail", body.get("message")))
    if isinstance(error, dict):
        error = error.get("message", json.dumps(error))
    return error if isinstance(error, str) else ("" if error is None else json.dumps(error))
