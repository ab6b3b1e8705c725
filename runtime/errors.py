"""Every exception Pageframe raises on purpose, as one tree.

The HTTP layer maps this tree to status codes; nothing here knows of HTTP. Messages name the field, the
value and the limit, and are written for the person who sent the value.
"""

from __future__ import annotations


class PageframeError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequestError(PageframeError):
    """The request itself is at fault; nothing was queued.

    Args:
        message: what is wrong, naming the field, the value and the limit.
        param: the field at fault, if one is.
        code: a short machine-readable reason, if one is defined.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class TooManyWaitError(PageframeError):
    """As many requests wait as may; nothing was queued, and one that comes later may find a place."""


class RequestNotFoundError(PageframeError):
    """No live request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"no request with id {request_id!r} is known; where one has several choices, they are known as "
            f"{request_id}-0, {request_id}-1 and so on"
        )
        self.request_id = request_id


class StartupError(PageframeError):
    """The engine cannot start: one clear line for the person who started it."""


class ConfigError(StartupError):
    """A setting is out of its range or contradicts another."""


class ModelError(StartupError):
    """A model file or folder is missing, damaged or not supported."""


class MemoryPlanError(StartupError):
    """The memory at hand does not hold even one block of the KV cache."""


class EngineError(PageframeError):
    """The engine failed on its own account; the request is not at fault."""


class EngineDeadError(EngineError):
    """The engine process has ended; no request can be served any more."""
