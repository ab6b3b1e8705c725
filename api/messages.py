"""Chat messages from a request, checked and turned into the plain dicts that a chat template reads.

Knows nothing of templates or of tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pageframe.api.checks import refuse_unknown, wrong
from pageframe.runtime.errors import InvalidRequestError

_COMMON = frozenset({"role", "content", "name"})
_FIELDS = {
    "system": _COMMON,
    "developer": _COMMON,
    "user": _COMMON,
    "assistant": _COMMON | {"tool_calls"},
    "tool": _COMMON | {"tool_call_id"},
}
ROLES = tuple(_FIELDS)
#: What the official client writes when an answer is sent back as a message; these values say nothing.
_SILENT: dict[str, tuple[object, ...]] = {
    "refusal": (None,),
    "audio": (None,),
    "function_call": (None,),
    "annotations": (None, []),
    "tool_calls": (None, []),
    "name": (None,),
    "tool_call_id": (None,),
}
#: Templates know system; developer is its newer name.
_TEMPLATE_ROLES = {"developer": "system"}
_TOOL_CALL_FIELDS = frozenset({"id", "type", "function"})
_FUNCTION_FIELDS = frozenset({"name", "arguments"})


def check_messages(value: object) -> list[dict[str, Any]]:
    """The messages as a template reads them: content is a string, the parts of a list joined by line ends; a
    developer message is a system message; the arguments of tool calls are objects.

    Raises:
        InvalidRequestError: a message is not one of the shapes above.
    """
    if not isinstance(value, list):
        raise wrong("messages", value, "must be a list of messages")
    if not value:
        raise InvalidRequestError("messages is an empty list; it must have at least 1 message", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _check_message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(path, message, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise wrong(f"{path}.role", role, f"must be one of {', '.join(_FIELDS)}")
    given = {name: value for name, value in message.items() if value not in _SILENT.get(name, ())}
    refuse_unknown(given, _FIELDS[role], path)
    for name in ("name", "tool_call_id"):
        if name in given:
            _string(given[name], f"{path}.{name}")
    if role == "tool" and "tool_call_id" not in given:
        raise InvalidRequestError(
            f"{path}.tool_call_id is missing; a tool message names the call it answers", param=path
        )
    given["role"] = _TEMPLATE_ROLES.get(role, role)
    if "tool_calls" in given:
        given["tool_calls"] = _check_tool_calls(given["tool_calls"], f"{path}.tool_calls")
    given["content"] = _check_content(message.get("content"), f"{path}.content", may_be_null="tool_calls" in given)
    return given


def _check_content(content: object, path: str, *, may_be_null: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_null:
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_check_part(part, f"{path}[{index}]") for index, part in enumerate(content))
    raise wrong(path, content, "must be a string or a list of text parts; null only beside tool calls")


def _check_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong(path, part, 'must be an object such as {"type": "text", "text": "…"}')
    if part.get("type") != "text":
        raise wrong(f"{path}.type", part.get("type"), "is not supported; only text parts are")
    refuse_unknown(part, frozenset({"type", "text"}), path)
    return _string(part.get("text"), f"{path}.text")


def _check_tool_calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong(path, calls, "must be a list of tool calls")
    return [_check_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _check_tool_call(call: object, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise wrong(path, call, "must be an object with id, type and function")
    refuse_unknown(call, _TOOL_CALL_FIELDS, path)
    if call.get("type") != "function":
        raise wrong(f"{path}.type", call.get("type"), 'must be "function"')
    function = call.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{path}.function", function, "must be an object with name and arguments")
    refuse_unknown(function, _FUNCTION_FIELDS, f"{path}.function")
    return {
        "id": _string(call.get("id"), f"{path}.id"),
        "type": "function",
        "function": {
            "name": _string(function.get("name"), f"{path}.function.name"),
            "arguments": _check_arguments(function.get("arguments"), f"{path}.function.arguments"),
        },
    }


def _check_arguments(text: object, path: str) -> dict[str, Any]:
    """Arguments travel as JSON text, but templates write them out themselves, from an object. An empty text is none, as
    some clients write it."""
    if text == "":
        return {}
    try:
        arguments = msgspec.json.decode(_string(text, path))
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(path, text, "must be the JSON text of an object")
    return arguments


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise wrong(path, value, "must be a string")
    return value
