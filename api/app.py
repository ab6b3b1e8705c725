"""The ASGI application: every route in one table, and errors in OpenAI's shape whatever raised them.

Knows nothing of sockets, processes or signals.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pageframe.api import inspect, routes
from pageframe.api.chat import chat_completions
from pageframe.api.completions import completions
from pageframe.api.dashboard_files import dashboard, dashboard_file, home
from pageframe.api.errors import ApiError, internal_error, to_api_error
from pageframe.api.middleware import HostCheck, KeyCheck, RequestIds, check_admin
from pageframe.api.openapi import description, request_body
from pageframe.api.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pageframe.api.service import ServerState
from pageframe.api.tokens import detokenize, tokenize
from pageframe.runtime.errors import PageframeError

Handler = Callable[[ServerState, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", routes.list_models),
    # The rest of the path, because a hub id has a slash in it.
    ("GET", "/v1/models/{model_id:path}", routes.get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", routes.health),
    ("GET", "/version", routes.version),
)
#: Where the server has keys, these take the admin key.
ADMIN_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/metrics", routes.metrics),
    ("POST", "/reset_prefix_cache", routes.reset_prefix_cache),
    ("GET", "/inspect/kv", inspect.inspect_kv),
    ("GET", "/inspect/blocks", inspect.inspect_blocks),
    ("GET", "/inspect/requests", inspect.inspect_requests),
    ("GET", "/inspect/requests/{request_id}", inspect.inspect_request),
    ("GET", "/inspect/requests/{request_id}/story", inspect.inspect_story),
    ("DELETE", "/inspect/requests/{request_id}", inspect.cancel_request),
    ("GET", "/inspect/steps", inspect.inspect_steps),
    ("GET", "/inspect/prefixes", inspect.inspect_prefixes),
    ("GET", "/inspect/events", inspect.inspect_events),
    ("GET", "/inspect/live", inspect.inspect_live),
    ("GET", "/", home),
    ("GET", "/dashboard", dashboard),
    ("GET", "/dashboard/{name:path}", dashboard_file),
)
#: What the routes with a body take; each checks it itself.
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
#: Routes of OpenAI's that are not here, and what is instead.
INSTEAD = {
    "/v1/responses": "instead, POST /v1/chat/completions answers a conversation, all of which comes in messages",
    "/v1/embeddings": "the model served here writes text, with POST /v1/chat/completions, and makes no embeddings",
}


def create_app(state: ServerState) -> ASGIApp:
    """The whole HTTP side over a state that may still be starting."""
    # The documentation pages would load scripts from elsewhere, so there are none; /openapi.json needs nothing.
    app = FastAPI(title="Pageframe", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi = lambda: description(app, state.service)  # type: ignore[method-assign]
    for method, path, handler in ROUTES:
        _add_route(app, method, path, handler, state)
    # For those who look whether it lives; the server leaves the body out.
    _add_route(app, "HEAD", "/health", routes.health, state, is_described=False)
    for method, path, handler in ADMIN_ROUTES:
        _add_route(app, method, path, _for_admin(handler), state)
    app.add_exception_handler(PageframeError, _on_known_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    return RequestIds(HostCheck(KeyCheck(app, state.access), state.config.host))


def _add_route(
    app: FastAPI, method: str, path: str, handler: Handler, state: ServerState, *, is_described: bool = True
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(state, request)

    extra = {"requestBody": request_body(path, BODIES[path])} if path in BODIES else None
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=handler.__name__,
        description=handler.__doc__,
        openapi_extra=extra,
        include_in_schema=is_described,
    )


def _for_admin(handler: Handler) -> Handler:
    @functools.wraps(handler)
    async def checked(state: ServerState, request: Request) -> Response:
        check_admin(request.scope)
        return await handler(state, request)

    return checked


async def _on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PageframeError)
    return to_api_error(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = _no_route(request.url.path), "route_not_found"
    else:
        message, code = f"{request.method} is not allowed on {request.url.path[:200]!r}", "method_not_allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


def _no_route(path: str) -> str:
    message = f"there is no route {path[:200]!r}"
    for route, instead in INSTEAD.items():
        if path == route or path.startswith(route + "/"):
            return f"{message}: {instead}"
    return message


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client went away while it sent its body: nobody reads this."""
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    return internal_error().response()
