"""POST /v1/chat/completions: messages in, an assistant's message out, whole or streamed."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.answers import Answer
from pageframe.api.job import Job, Piece
from pageframe.api.logprobs import chat_logprobs
from pageframe.api.prompts import (
    check_prompt_logprobs,
    encode_prompt,
    engine_fields,
    num_kept_tokens,
    render_chat,
    sampling_params,
    stream_fields,
    text_grammar,
)
from pageframe.api.schemas import ChatBody, check_body
from pageframe.api.service import ServerState, Service
from pageframe.api.stream import GenerationResponse
from pageframe.api.tool_grammar import tool_grammar
from pageframe.api.tool_parsers import join_tool_calls
from pageframe.api.tools import ToolUse, plan_tools
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.tokenizer import Tokenizer


async def chat_completions(state: ServerState, request: Request) -> Response:
    """Answers a conversation."""
    service = state.accepting()
    job, tools = await state.bodies.take(
        request, lambda content: _job(service, content), has_template=True, admit=state.check_queue
    )
    answer = ChatAnswer(job, f"chatcmpl-{uuid.uuid4().hex}", service.model_name, service.tokenizer, tools)
    return GenerationResponse(state, job, answer)


class ChatAnswer(Answer):
    """An answer as chat.completion, or as chat.completion.chunk events.

    Args:
        tools: None: the model was shown none, and all that it writes is content.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_in_choice = False

    def __init__(
        self, job: Job, response_id: str, model_name: str, tokenizer: Tokenizer, tools: ToolUse | None
    ) -> None:
        super().__init__(job, response_id, model_name, tokenizer)
        self._parsers = None if tools is None else [tools.parser() for _ in range(job.num_choices)]
        #: The grammar leaves no other text, so what is no call is the rest of one that was cut off.
        self._calls_only = tools is not None and tools.choice.mode == "required"

    def message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if self._parsers is not None:
            delta = self._parsers[piece.index].push(piece.text, final=True)
            calls = join_tool_calls(delta.tool_calls)
            content = "" if self._calls_only else delta.content
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
        return {"message": message}

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        content = piece.text
        calls: list[dict[str, Any]] = []
        if self._parsers is not None:
            delta = self._parsers[piece.index].push(piece.text, final=piece.finish_reason is not None)
            content, calls = "" if self._calls_only else delta.content, delta.tool_calls
        fields: list[dict[str, Any]] = [{"delta": {"content": content}}] if content else []
        # A call at a time: clients that read only the first of a chunk's calls are common.
        return fields + [{"delta": {"tool_calls": [call]}} for call in calls]

    def opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def blank(self) -> dict[str, Any]:
        return {"delta": {"content": ""}}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(piece, self._tokenizer)

    def finish_reason(self, piece: Piece) -> str | None:
        if self._parsers is None or piece.finish_reason is None:
            return piece.finish_reason
        return self._parsers[piece.index].finish_reason(piece.finish_reason)


def _job(service: Service, content: dict[str, Any]) -> tuple[Job, ToolUse | None]:
    body = check_body(ChatBody, content)
    service.check_model(body.model)
    tools = _tool_use(service, body)
    grammar, grammar_field = _grammar(service, body, tools)
    max_tokens, limit_name = _max_tokens(body)
    params = sampling_params(
        body,
        service,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
        grammar_field=grammar_field,
    )
    stream = stream_fields(body)
    kwargs: dict[str, Any] = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    if tools is not None:
        kwargs["tools"] = tools.definitions
    text = render_chat(service, body.messages, body, **kwargs)
    num_kept = num_kept_tokens(service, body.truncate_prompt_tokens, max_tokens)
    job = Job(
        prompts=[encode_prompt(service, text, add_special_tokens=False, param="messages", num_kept=num_kept)],
        params=params,
        shown_ids=frozenset() if tools is None else tools.shown_ids(service.tokenizer),
        field_names={"prompt": "messages", "max_tokens": limit_name, "grammar": grammar_field},
        **engine_fields(body),
        **stream,
    )
    check_prompt_logprobs(job)
    return job, tools


def _tool_use(service: Service, body: ChatBody) -> ToolUse | None:
    if service.template is None:
        return None  # what follows says so
    return plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls, service.template)


def _grammar(service: Service, body: ChatBody, tools: ToolUse | None) -> tuple[GrammarSpec | None, str]:
    """The grammar of the answer, of its text or of its calls, and the name of the field that asks for it."""
    grammar, field = text_grammar(body)
    if tools is None:
        return grammar, field
    if grammar is not None:
        raise InvalidRequestError(
            f"{field} and tools exclude one another, since calls have a form of their own; give one of them, or "
            f'tool_choice "none", with which {field} applies',
            param=field,
        )
    return tool_grammar(tools, service.tokenizer), "tools"


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
