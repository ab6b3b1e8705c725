"""How every check of a request's fields words its refusal: a wrong value, and a name that is not known.

Knows nothing of the fields.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from pageframe.api.errors import shorten
from pageframe.runtime.errors import InvalidRequestError

#: Of a path in a message, which the request's own names may be part of.
_MAX_PATH = 200


def wrong(path: str, value: object, rule: str) -> InvalidRequestError:
    """The refusal of a value.

    Args:
        path: of the field, such as `tools[0].type`.
        rule: the rest of a sentence that begins with "it".
    """
    return InvalidRequestError(f"{path} is {shorten(value)}; it {rule}", param=path)


def refuse_unknown(names: Iterable[str], known: Container[str], path: str = "") -> None:
    """Raises: InvalidRequestError: a name of the object at `path` ("": of the body) is not `known`. It stops there."""
    for name in names:
        if name not in known:
            field = (f"{path}.{name}" if path else name)[:_MAX_PATH]
            raise InvalidRequestError(f"{field} is not a known field", param=field, code="unknown_field")
