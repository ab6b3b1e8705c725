"""POST /v1/chat/completions: messages in, an assistant's message out, whole or streamed."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.answers import Answer
from pageframe.api.generation import Job, Piece
from pageframe.api.logprobs import chat_logprobs
from pageframe.api.prompts import encode_prompt, engine_fields, render_chat, sampling_params, stream_fields
from pageframe.api.schemas import ChatBody, check_body
from pageframe.api.service import ServerState, Service
from pageframe.api.stream import GenerationResponse
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.tokenizer import Tokenizer


async def chat_completions(state: ServerState, request: Request) -> Response:
    """Answers a conversation."""
    service = state.accepting()
    job = await state.bodies.take(request, lambda content: _job(service, content), admit=state.check_queue)
    answer = ChatAnswer(job, f"chatcmpl-{uuid.uuid4().hex}", service.model_name, service.tokenizer)
    return GenerationResponse(state, job, answer)


class ChatAnswer(Answer):
    """An answer as chat.completion, or as chat.completion.chunk events."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, response_id: str, model_name: str, tokenizer: Tokenizer) -> None:
        super().__init__(job, response_id, model_name)
        self._tokenizer = tokenizer

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def closing(self) -> dict[str, Any]:
        return {"delta": {}}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(piece, self._tokenizer)


def _job(service: Service, content: dict[str, Any]) -> Job:
    body = check_body(ChatBody, content)
    service.check_model(body.model)
    max_tokens, limit_name = _max_tokens(body)
    params = sampling_params(body, service, max_tokens=max_tokens, logprobs=_num_logprobs(body))
    stream = stream_fields(body)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    text = render_chat(service, body.messages, body, **effort)
    return Job(
        prompt_token_ids=encode_prompt(service, text, add_special_tokens=False, param="messages"),
        params=params,
        user=body.user,
        request_id=body.request_id,
        field_names={"prompt": "messages", "max_tokens": limit_name},
        **engine_fields(body),
        **stream,
    )


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The limit and the name it was given under: max_completion_tokens is the newer one."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is None:
        return old, "max_tokens"
    if old is not None and old != new:
        raise InvalidRequestError(
            f"max_completion_tokens is {new} and max_tokens is {old}; give one of them, or both the same",
            param="max_completion_tokens",
        )
    return new, "max_completion_tokens"


def _num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError(
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true", param="top_logprobs"
        )
    return None
