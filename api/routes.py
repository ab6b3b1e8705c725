"""The small routes: models, health, version, metrics, forgetting computed prefixes."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from pageframe.api.encoding import json_response
from pageframe.api.errors import RETRY_AFTER_SECONDS, ApiError
from pageframe.api.service import STUCK_AFTER_SECONDS, ServerState, Service

_STARTED = int(time.time())
#: What GET /version tells of the ResolvedConfig.
_TOLD = (
    "device",
    "instruction_set",
    "threads",
    "backend",
    "dtype",
    "compute_dtype",
    "weights",
    "kv_dtype",
    "graphs",
    "max_num_batched_tokens",
    "mixed_token_budget",
    "batch_invariant",
    "notes",
)


async def list_models(state: ServerState, request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(state.ready())]})


async def get_model(state: ServerState, request: Request) -> Response:
    """A model by its name."""
    service = state.ready()
    service.check_model(request.path_params["model_id"])
    return json_response(_model(service))


async def health(state: ServerState, request: Request) -> Response:
    """200 while requests are served; 503 with the reason otherwise."""
    since_step = 0.0 if state.service is None else state.service.client.seconds_since_progress()
    status, reason = _condition(state, since_step)
    content: dict[str, Any] = {"status": status, "seconds_since_last_step": round(since_step, 3)}
    if status == "ok":
        return json_response(content)
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in ("starting", "draining") else {}
    return json_response({**content, "reason": reason}, status=503, headers=headers)


async def version(state: ServerState, request: Request) -> Response:
    """Pageframe's version; once the model is ready, also what computes it, and how."""
    try:
        number = importlib.metadata.version("pageframe")
    except importlib.metadata.PackageNotFoundError:
        number = "not installed"
    content: dict[str, Any] = {"version": number}
    if state.service is not None:
        resolved = state.service.client.resolved
        content |= {"model": resolved.model_name} | {name: getattr(resolved, name) for name in _TOLD}
    return json_response(content)


async def metrics(state: ServerState, request: Request) -> Response:
    """Counters for Prometheus."""
    service = state.service or state.ready()
    return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


async def reset_prefix_cache(state: ServerState, request: Request) -> Response:
    """Makes the engine forget all computed prefixes."""
    service = state.ready()
    _check_origin(request)
    return json_response({"blocks_forgotten": await service.client.reset_prefix_cache()})


def _check_origin(request: Request) -> None:
    """A POST without a body has no content type that would keep a web page elsewhere from sending it. Browsers name the
    page's origin.

    Raises: ApiError: 403, it is not this server's.
    """
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers["host"]:
        raise ApiError(403, f"pages of {origin[:200]!r} may not do this", code="origin_not_allowed")


def _condition(state: ServerState, since_step: float) -> tuple[str, str]:
    if state.service is None:
        return "starting", "the model is still loading"
    client = state.service.client
    if not client.is_alive:
        return "dead", f"the engine has ended: {client.death_note}"
    if state.draining:
        return "draining", "the server is shutting down"
    if since_step > STUCK_AFTER_SECONDS:
        return "stuck", f"requests wait and no step was made for {since_step:.0f} s"
    return "ok", ""


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "pageframe",
        "root": service.client.resolved.model_name,
        "max_model_len": service.max_model_len,
    }
