"""POST /v1/completions: text or token ids in, their continuation out, whole or streamed."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.answers import Answer
from pageframe.api.generation import Job, Piece
from pageframe.api.logprobs import CompletionLogprobs
from pageframe.api.prompts import encode_prompt, engine_fields, sampling_params, stream_fields
from pageframe.api.schemas import CompletionBody, check_body
from pageframe.api.service import ServerState, Service
from pageframe.api.stream import GenerationResponse
from pageframe.runtime.tokenizer import Tokenizer


async def completions(state: ServerState, request: Request) -> Response:
    """Continues a text."""
    service = state.accepting()
    job = await state.bodies.take(
        request, lambda content: _job(service, content), max_ids=service.max_model_len, admit=state.check_queue
    )
    answer = CompletionAnswer(job, f"cmpl-{uuid.uuid4().hex}", service.model_name, service.tokenizer)
    return GenerationResponse(state, job, answer)


class CompletionAnswer(Answer):
    """An answer as text_completion, whole or in chunks."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, response_id: str, model_name: str, tokenizer: Tokenizer) -> None:
        super().__init__(job, response_id, model_name)
        self._logprobs_so_far = [
            CompletionLogprobs(tokenizer, skips_special=job.params.skip_special_tokens) for _ in range(job.params.n)
        ]

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def closing(self) -> dict[str, Any]:
        return {"text": ""}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return self._logprobs_so_far[piece.index].of(piece)


def _job(service: Service, content: dict[str, Any]) -> Job:
    body = check_body(CompletionBody, content)
    service.check_model(body.model)
    params = sampling_params(body, service, max_tokens=body.max_tokens, logprobs=body.logprobs)
    stream = stream_fields(body)
    prompt = body.prompt
    if isinstance(prompt, str):
        prompt = encode_prompt(service, prompt, add_special_tokens=True, param="prompt")
    return Job(
        prompt_token_ids=prompt,
        params=params,
        user=body.user,
        request_id=body.request_id,
        **engine_fields(body),
        **stream,
    )
