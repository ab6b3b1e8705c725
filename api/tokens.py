"""POST /tokenize and /detokenize: what the engine would see of a text or of messages, and the way back.

Answers are made into JSON where they are computed: that, too, takes long where there are many tokens.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.encoding import encode_json
from pageframe.api.prompts import encode_prompt, render_chat
from pageframe.api.schemas import DetokenizeBody, TokenizeBody, check_body
from pageframe.api.service import ServerState, Service
from pageframe.api.tools import plan_tools
from pageframe.runtime.errors import InvalidRequestError


async def tokenize(state: ServerState, request: Request) -> Response:
    """The token ids of a prompt or of messages."""
    service = state.ready()
    answer = await state.bodies.take(request, lambda content: _tokenize(service, content), has_template=True)
    return Response(answer, media_type="application/json")


async def detokenize(state: ServerState, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = state.ready()
    answer = await state.bodies.take(
        request, lambda content: _detokenize(service, content), max_ids=service.max_model_len
    )
    return Response(answer, media_type="application/json")


def _tokenize(service: Service, content: dict[str, Any]) -> bytes:
    body = check_body(TokenizeBody, content)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt and messages: exactly one of them must be given", param="prompt")
    is_text = body.prompt is not None
    if body.messages is None:
        if body.tools:
            raise InvalidRequestError("tools are shown beside messages; a prompt has none", param="tools")
        text = body.prompt
    else:
        text = render_chat(service, body.messages, body, **_tools(service, body))
    assert text is not None
    add_special = is_text if body.add_special_tokens is None else body.add_special_tokens
    param = "prompt" if is_text else "messages"
    ids = encode_prompt(service, text, add_special_tokens=add_special, param=param)
    return encode_json({"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len})


def _tools(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """What a chat request with these tools shows the template."""
    use = None if service.template is None else plan_tools(body.tools, None, None, service.template)
    return {} if use is None else {"tools": use.definitions}


def _detokenize(service: Service, content: dict[str, Any]) -> bytes:
    body = check_body(DetokenizeBody, content)
    service.check_model(body.model)
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < service.vocab_size:
            raise InvalidRequestError(
                f"tokens[{index}] is {token_id}; it must be at least 0 and below the vocabulary's {service.vocab_size}",
                param="tokens",
            )
    return encode_json({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})
