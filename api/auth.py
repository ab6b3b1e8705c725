"""Who may use the server: API keys, each a tenant's, and an admin key.

Only SHA-256 digests of keys are kept, and no message or repr holds a key. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from pageframe.api.config import ServerConfig
from pageframe.runtime.errors import ConfigError

API_KEYS_VARIABLE = "PAGEFRAME_API_KEYS"
ADMIN_KEY_VARIABLE = "PAGEFRAME_ADMIN_KEY"
MAX_KEYS = 10_000
MAX_KEY_LENGTH = 512
MAX_TENANT_LENGTH = 64
#: Shorter keys can be guessed.
MIN_KEY_LENGTH = 16
#: What a bearer token may consist of: RFC 6750, section 2.1.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
#: What a digest that is nobody's is compared with: no key has it.
_NO_DIGEST = bytes(hashlib.sha256().digest_size)
_ADMIN_LABEL = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sends a request.

    Args:
        tenant: whose requests share prefixes with whom; "" on a server without keys.
        is_admin: may look inside.
    """

    tenant: str
    is_admin: bool


#: The caller of a server without keys.
ANYONE = Caller("", is_admin=True)


class Access:
    """The keys of a server. Without any, none is needed.

    Args:
        callers: of each key, by its SHA-256 digest.
    """

    def __init__(self, callers: Mapping[bytes, Caller] | None = None) -> None:
        self._callers = {digest: (digest, caller) for digest, caller in (callers or {}).items()}

    @property
    def needs_key(self) -> bool:
        return bool(self._callers)

    def find(self, key: bytes) -> Caller | None:
        """Whose key it is; None where it is nobody's.

        The time that looking a digest up takes tells of the digest at most, from which no key can be guessed nearer;
        the comparison takes as long for any two.
        """
        digest = hashlib.sha256(key).digest()
        known, caller = self._callers.get(digest, (_NO_DIGEST, None))
        return caller if hmac.compare_digest(known, digest) else None

    def __str__(self) -> str:
        """How many keys there are, of how many tenants."""
        callers = [caller for _, caller in self._callers.values()]
        tenants = [caller.tenant for caller in callers if not caller.is_admin]
        has_admin = "yes" if len(tenants) < len(callers) else "no"
        return f"API keys: {len(tenants)}, tenants: {len(set(tenants))}, admin key: {has_admin}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key as somebody wrote it.

    Args:
        place: where, for messages.
        tenant: as it is written; where the key stands alone, its number among the keys there, as "key-1".
        is_named: it is written.
    """

    place: str
    tenant: str
    is_named: bool
    digest: bytes


def load_access(config: ServerConfig, environ: MutableMapping[str, str]) -> Access:
    """The keys that the files of `config` hold, or the environment's.

    Args:
        environ: the two variables are taken out of it, so that no child process gets them.

    Raises:
        ConfigError: a file cannot be read, an entry is not of the right form, a key is there twice, or where keys are
            asked for there are none. No message shows what a line says.
    """
    api_keys = _entries("api_keys", config.api_keys, API_KEYS_VARIABLE, environ)
    admin_keys = _entries("admin_key", config.admin_key, ADMIN_KEY_VARIABLE, environ)
    if len(admin_keys) > 1 or any(entry.is_named for entry in admin_keys):
        raise ConfigError(f"{admin_keys[-1].place}: it must be one key and nothing else; there is one admin")
    if len(api_keys) > MAX_KEYS:
        raise ConfigError(f"there are {len(api_keys)} API keys; at most {MAX_KEYS} are allowed")
    _refuse_repeated(api_keys + admin_keys)
    _refuse_labels_as_names(api_keys, has_admin=bool(admin_keys))
    return Access(
        {entry.digest: Caller(entry.tenant, is_admin=False) for entry in api_keys}
        | {entry.digest: Caller(_ADMIN_LABEL, is_admin=True) for entry in admin_keys}
    )


def _entries(field: str, file: str | None, variable: str, environ: MutableMapping[str, str]) -> list[_Entry]:
    """The entries of a file or, with commas or line ends between them, of a variable; none where neither is given."""
    text = environ.pop(variable, None)
    if file is not None and text is not None:
        raise ConfigError(f"{field} names a file and {variable} is set as well; give one of them")
    if file is not None:
        source, lines = file, _read(field, file).splitlines()
    elif text is not None:
        source, lines = variable, text.replace(",", "\n").splitlines()
    else:
        return []
    entries: list[_Entry] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            entries.append(_entry(words, f"{source}, line {number}", f"key-{len(entries) + 1}"))
    if not entries:
        raise ConfigError(f"{field}: {source} holds no key; without keys, leave it out")
    return entries


def _entry(words: list[str], place: str, label: str) -> _Entry:
    if len(words) > 2:
        raise ConfigError(f"{place}: it has {len(words)} words; it must be a key, or a tenant and its key")
    tenant, key = words if len(words) == 2 else (None, words[0])
    if tenant is not None and not (tenant.isprintable() and len(tenant) <= MAX_TENANT_LENGTH):
        raise ConfigError(f"{place}: the tenant must be printable text of at most {MAX_TENANT_LENGTH} characters")
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_LENGTH:
        raise ConfigError(
            f"{place}: the key must be 1 to {MAX_KEY_LENGTH} letters, digits or any of . _ ~ + / - and may end in ="
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{place}: the key has {len(key)} characters, so it can be guessed; it must have at least {MIN_KEY_LENGTH}"
        )
    return _Entry(place, label if tenant is None else tenant, tenant is not None, hashlib.sha256(key.encode()).digest())


def _read(field: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{field}: {file} is no text in UTF-8") from None


def _refuse_labels_as_names(entries: list[_Entry], *, has_admin: bool) -> None:
    """A tenant of that name would share computed prefixes with the key that is labelled so."""
    labels = {entry.tenant for entry in entries if not entry.is_named} | ({_ADMIN_LABEL} if has_admin else set())
    for entry in entries:
        if entry.is_named and entry.tenant in labels:
            raise ConfigError(
                f"{entry.place}: the tenant's name is what a key without a name is called; choose another"
            )


def _refuse_repeated(entries: list[_Entry]) -> None:
    places: dict[bytes, str] = {}
    for entry in entries:
        place = places.setdefault(entry.digest, entry.place)
        if place != entry.place:
            raise ConfigError(f"{entry.place} has the key of {place}; each key must stand once")
