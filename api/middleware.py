"""What happens around every route, as plain ASGI: request ids, the Host check, keys, the last resort against failures.

Plain ASGI because a wrapper that owns `receive` hides a client's going away. Knows nothing of what routes do.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import re
import socket
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageframe.api.auth import ANYONE, Access, Caller
from pageframe.api.errors import ApiError

logger = logging.getLogger(__name__)

REQUEST_ID_RULE = "1 to 128 letters, digits or any of . _ : -"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LABEL = re.compile(r"[a-z0-9_-]+")
_SCOPE_KEY = "pageframe.label"
_CALLER_KEY = "pageframe.caller"
#: The one path that needs no key, as it is sent.
_OPEN_PATH = b"/health"
_NOBODY = Caller("", is_admin=False)
_CHALLENGE = 'Bearer realm="pageframe"'
#: A browser that opens the dashboard asks for the key itself, and sends it with all that the page asks for.
_PAGE_PATHS = (b"/dashboard", b"/dashboard/")
_PAGE_CHALLENGE = 'Basic realm="pageframe: the admin key is the password", charset="UTF-8"'
#: Suffixes that no public name can have, so no web page's own name either.
_PRIVATE_SUFFIXES = (".local", ".internal", ".home.arpa", ".lan")


def is_request_id(text: str) -> bool:
    return REQUEST_ID.fullmatch(text) is not None


class RequestLabel:
    """What `x-request-id` will say. The header gives it first; the body's `request_id` wins over it."""

    __slots__ = ("value",)

    def __init__(self, value: str | None) -> None:
        self.value = value


def request_label(scope: Scope) -> RequestLabel:
    """The label of this request, changeable until the response starts."""
    label: RequestLabel = scope[_SCOPE_KEY]
    return label


class RequestIds:
    """Sends `x-request-id` with every response, and logs what escapes the routes under that id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = scope[_SCOPE_KEY] = RequestLabel(_given_id(scope))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                label.value = label.value or uuid.uuid4().hex
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label.value.encode("ascii"))]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if not started:
                raise
            # The error answer has gone out already; the traceback belongs in the log, beside the id it carries.
            logger.exception("request %s failed", label.value)


class HostCheck:
    """Refuses a Host that a web page elsewhere could have chosen (DNS rebinding).

    A page can point a name of its own at this machine, never an address or a name outside the public DNS. So these
    pass: any IP address, localhost and its subdomains, the host listened on; and where it listens beyond loopback,
    also names without a dot, names under .local, .internal, .lan and .home.arpa, and this machine's own name.
    """

    def __init__(self, app: ASGIApp, bound_host: str) -> None:
        self._app = app
        self._names = {"localhost", bound_host.lower()}
        self._loopback_only = _is_loopback(bound_host)
        if not self._loopback_only:
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not self._allows(_host_name(hosts[0])):
                shown = ", ".join(hosts)[:100] or "missing"
                error = ApiError(
                    400,
                    f"the Host header is {shown}; this server answers to localhost, IP addresses and {self._bound}",
                    code="host_not_allowed",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    @property
    def _bound(self) -> str:
        return "the host it listens on" if self._loopback_only else "private names"

    def _allows(self, name: str) -> bool:
        if _is_address(name) or name in self._names or name.endswith(".localhost"):
            return True
        if self._loopback_only:
            return False
        return _LABEL.fullmatch(name) is not None or name.endswith(_PRIVATE_SUFFIXES)


class KeyCheck:
    """Where the server has keys, answers 401 to whoever sends none of them, whatever is asked for, but at /health.

    Denying comes first: a request is let through by its key or by its path as it was sent, before anything is decoded
    or routed and before its body is read.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_CALLER_KEY] = self._caller(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if not self._access.needs_key:
            return ANYONE
        if scope.get("raw_path") == _OPEN_PATH:
            return _NOBODY
        key = _key(scope)
        if key is None:
            raise _unauthorized(
                scope,
                "this server needs an API key, in one header such as 'Authorization: Bearer KEY'",
                "missing_api_key",
                "",
            )
        caller = self._access.find(key)
        if caller is None:
            raise _unauthorized(
                scope, "the API key is not one of this server's", "invalid_api_key", ', error="invalid_token"'
            )
        return caller


def request_caller(scope: Scope) -> Caller:
    """Who sends this request."""
    caller: Caller = scope[_CALLER_KEY]
    return caller


def check_admin(scope: Scope) -> None:
    """Raises: ApiError: 403, this request's key is not the admin key."""
    if not request_caller(scope).is_admin:
        message = "this route needs the admin key, which the server is given with --admin-key"
        if scope.get("raw_path") in _PAGE_PATHS and _scheme(scope) == b"basic":
            # A 403 would leave the browser with the wrong key for good; so it asks again.
            raise _unauthorized(scope, message, "admin_key_needed", "")
        raise ApiError(
            403,
            message,
            code="admin_key_needed",
            headers={"www-authenticate": _CHALLENGE + ', error="insufficient_scope"'},
        )


def _unauthorized(scope: Scope, message: str, code: str, details: str) -> ApiError:
    is_page = scope.get("raw_path") in _PAGE_PATHS
    challenge = _PAGE_CHALLENGE if is_page else _CHALLENGE + details
    return ApiError(401, message, code=code, headers={"www-authenticate": challenge})


def _key(scope: Scope) -> bytes | None:
    """The key of the one Authorization header; None where there is none, or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = bytes(values[0]).partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip() or None
    return _password(key.strip()) if scheme.lower() == b"basic" and _is_own_page(scope) else None


def _scheme(scope: Scope) -> bytes:
    """Of the Authorization header that opened this request."""
    value = next(value for name, value in scope["headers"] if name == b"authorization")
    return bytes(value).partition(b" ")[0].lower()


def _password(credentials: bytes) -> bytes | None:
    """The password of HTTP's Basic scheme (RFC 7617), whatever the name before it."""
    try:
        decoded = base64.b64decode(credentials, validate=True)
    except binascii.Error:
        return None
    return decoded.partition(b":")[2] or None


def _is_own_page(scope: Scope) -> bool:
    """Browsers send a password they know with every request, also one that a page elsewhere makes; they say so."""
    sites = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
    return all(site in (b"same-origin", b"none") for site in sites)


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if is_request_id(text) else None
    return None


def _host_name(header: str) -> str:
    """The name or address in a Host header: no port, no brackets, lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        inner, bracket, _ = header[1:].partition("]")
        return inner if bracket and _is_address(inner) else header
    name, colon, _ = header.rpartition(":")
    return (name if colon else header).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
