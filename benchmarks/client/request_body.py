"""The body of a streaming request, and which of its optional fields the server accepts.

Plain OpenAI servers refuse fields they do not know, so the optional ones are tried before the load, in short
requests that are not part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pageframe.benchmarks.client.errors import InputError
from pageframe.benchmarks.client.prompt_file import Prompt
from pageframe.benchmarks.client.server import Answer, Server, error_message
from pageframe.benchmarks.client.settings import LoadSettings

REFUSALS = (400, 422)
PASSING = (408, 429)


@dataclass(frozen=True, slots=True)
class OptionalFields:
    """The fields beyond the plain request that are sent."""

    ignore_eos: bool = False
    min_tokens: bool = False
    usage: bool = False
    chunk_usage: bool = False

    def names(self) -> list[str]:
        named = {
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "stream_options.include_usage": self.usage,
            "stream_options.continuous_usage_stats": self.chunk_usage,
        }
        return [name for name, sent in named.items() if sent]


def endpoint_path(settings: LoadSettings) -> str:
    return "/v1/chat/completions" if settings.endpoint == "chat" else "/v1/completions"


def request_body(
    settings: LoadSettings, model: str, prompt: Prompt, optional: OptionalFields, *, index: int, output_len: int
) -> dict[str, Any]:
    """One streaming request. With a temperature above 0 its seed is the load's seed plus its index."""
    body: dict[str, Any] = {"model": model}
    if settings.endpoint == "chat":
        body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
    else:
        body["prompt"] = prompt.text
    body |= {"max_tokens": output_len, "temperature": settings.temperature, "stream": True}
    if settings.temperature > 0:
        body["seed"] = settings.seed + index
    if optional.ignore_eos:
        body["ignore_eos"] = True
    if optional.min_tokens:
        body["min_tokens"] = output_len
    if optional.usage:
        body["stream_options"] = {"include_usage": True}
        if optional.chunk_usage:
            body["stream_options"]["continuous_usage_stats"] = True
    return body


def encode_body(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


async def negotiate(server: Server, settings: LoadSettings, model: str) -> OptionalFields:
    """The optional fields that the server accepts of those the load wants.

    One request with all of them; if it is refused, one without any, then one for each alone.

    Raises:
        InputError: the server cannot be reached, or refuses even the plain request.
    """

    async def ask(optional: OptionalFields) -> Answer:
        body = request_body(settings, model, Prompt(text="Hello"), optional, index=0, output_len=1)
        return await server.call("POST", endpoint_path(settings), body)

    wanted = OptionalFields(settings.ignore_eos, settings.ignore_eos, True, settings.chunk_usage)
    answer = await ask(wanted)
    if answer.status not in REFUSALS:
        _refuse_unusable(answer, server, settings)
        return wanted
    plain = await ask(OptionalFields())
    _refuse_unusable(plain, server, settings)
    accepted = {
        "ignore_eos": wanted.ignore_eos and (await ask(OptionalFields(ignore_eos=True))).status == 200,
        "min_tokens": wanted.min_tokens and (await ask(OptionalFields(min_tokens=True))).status == 200,
        "usage": (await ask(OptionalFields(usage=True))).status == 200,
    }
    if accepted["usage"] and wanted.chunk_usage:
        accepted["chunk_usage"] = (await ask(OptionalFields(usage=True, chunk_usage=True))).status == 200
    return OptionalFields(**accepted)


def _refuse_unusable(answer: Answer, server: Server, settings: LoadSettings) -> None:
    """An answer of the 400 class to a plain request means that no request of the load could work.

    One of the 500 class or a full queue (429) may pass; the load shows it.
    """
    if 300 <= answer.status < 500 and answer.status not in PASSING:
        said = server.redact(error_message(answer.body) or answer.text or "no message")
        raise InputError(f"{server.base_url}{endpoint_path(settings)} answered {answer.status}: {said}")
