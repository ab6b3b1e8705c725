"""Events as plain dicts that go out as JSON."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from pageframe.runtime.journal import EVENT_KINDS, Event

_FIELDS = {event_type: tuple(field.name for field in fields(event_type)) for event_type in EVENT_KINDS.values()}


def event_json(number: int, event: Event) -> dict[str, Any]:
    """An event with its number and kind. JSON knows no infinity: what would take for ever is null."""
    values: dict[str, Any] = {"id": number, "kind": event.kind}
    for name in _FIELDS[type(event)]:
        value = getattr(event, name)
        values[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return values
