"""POST /v1/completions: texts or token ids in, their continuations out, whole or streamed."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.answers import Answer
from pageframe.api.job import Job, Piece
from pageframe.api.logprobs import CompletionLogprobs
from pageframe.api.prompts import (
    check_num_choices,
    check_prompt_logprobs,
    encode_prompt,
    engine_fields,
    num_kept_tokens,
    sampling_params,
    stream_fields,
    text_grammar,
)
from pageframe.api.schemas import CompletionBody, check_body
from pageframe.api.service import ServerState, Service
from pageframe.api.stream import GenerationResponse
from pageframe.runtime.tokenizer import Tokenizer


async def completions(state: ServerState, request: Request) -> Response:
    """Continues texts."""
    service = state.accepting()
    job, echoes = await state.bodies.take(
        request, lambda content: _job(service, content), max_ids=service.max_model_len, admit=state.check_queue
    )
    answer = CompletionAnswer(job, f"cmpl-{uuid.uuid4().hex}", service.model_name, service.tokenizer, echoes)
    return GenerationResponse(state, job, answer)


class CompletionAnswer(Answer):
    """An answer as text_completion, whole or in chunks.

    Args:
        echoes: each prompt's text, which its choices' texts begin with; None: they do not.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_in_choice = True

    def __init__(
        self, job: Job, response_id: str, model_name: str, tokenizer: Tokenizer, echoes: list[str] | None
    ) -> None:
        super().__init__(job, response_id, model_name, tokenizer)
        self._echoes = echoes
        #: Choices whose prompt has gone out, as text and as logprobs.
        self._echoed: set[int] = set()
        self._has_prompt_logprobs: set[int] = set()
        self._logprobs_so_far = [
            CompletionLogprobs(tokenizer, skips_special=job.params.skip_special_tokens) for _ in range(job.num_choices)
        ]

    def message(self, piece: Piece) -> dict[str, Any]:
        return {"text": self._echo(piece.index) + piece.text}

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        text = self._echo(piece.index) + piece.text
        return [{"text": text}] if text else []

    def opening(self) -> list[dict[str, Any]]:
        return []

    def blank(self) -> dict[str, Any]:
        return {"text": ""}

    def closing(self) -> dict[str, Any]:
        return {"text": ""}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        writer = self._logprobs_so_far[piece.index]
        prompt = {} if self._echoes is None else self._prompt_logprobs(writer, self._echoes, piece)
        own = writer.of(piece)
        return {name: prompt.get(name, []) + entries for name, entries in own.items()}

    def _echo(self, index: int) -> str:
        """What stands in front of the choice's next text: the prompt, once."""
        if self._echoes is None or index in self._echoed:
            return ""
        self._echoed.add(index)
        return self._echoes[index // self._job.params.n]

    def _prompt_logprobs(self, writer: CompletionLogprobs, echoes: list[str], piece: Piece) -> dict[str, list[Any]]:
        """What stands in front of the logprobs of the choice's next tokens: the prompt's, once."""
        if piece.index in self._has_prompt_logprobs:
            return {}
        self._has_prompt_logprobs.add(piece.index)
        text, num_top = echoes[piece.index // self._job.params.n], self._job.params.logprobs
        return writer.of_prompt(self._job.prompt_of(piece.index), piece.prompt_logprobs, text, num_top or 0)


def _job(service: Service, content: dict[str, Any]) -> tuple[Job, list[str] | None]:
    body = check_body(CompletionBody, content)
    service.check_model(body.model)
    grammar, grammar_field = text_grammar(body)
    told = [body.prompt_logprobs, body.logprobs if body.echo else None]
    params = sampling_params(
        body,
        service,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((number for number in told if number is not None), default=None),
        grammar=grammar,
        grammar_field=grammar_field,
    )
    stream = stream_fields(body)
    check_num_choices(len(body.prompt), params.n)
    job = Job(
        prompts=_prompts(service, body),
        params=params,
        field_names={"grammar": grammar_field},
        **engine_fields(body),
        **stream,
    )
    check_prompt_logprobs(job)
    return job, _echoes(service, body, job.prompts) if body.echo else None


def _prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    many = len(body.prompt) > 1
    num_kept = num_kept_tokens(service, body.truncate_prompt_tokens, body.max_tokens)
    prompts = []
    for number, prompt in enumerate(body.prompt):
        if isinstance(prompt, str):
            param = f"prompt[{number}]" if many else "prompt"
            prompts.append(encode_prompt(service, prompt, add_special_tokens=True, param=param, num_kept=num_kept))
        else:
            prompts.append(prompt if num_kept is None else prompt[-num_kept:])
    return prompts


def _echoes(service: Service, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
    """The prompts as text: as it was given, unless it came as token ids or was cut."""
    return [
        given
        if isinstance(given, str) and body.truncate_prompt_tokens is None
        else service.tokenizer.decode(token_ids, skip_special_tokens=False)
        for given, token_ids in zip(body.prompt, prompts, strict=True)
    ]
