"""ServerConfig: what a person asks of the HTTP side. Knows nothing of models, engines or sockets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageframe.runtime.config import flag
from pageframe.runtime.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_PORT = 65535
MAX_BODY_BYTES = 2**31
MIN_JOURNAL_SIZE, MAX_JOURNAL_SIZE = 64 * 1024, 2**40
MAX_DRAIN_TIMEOUT = 3600.0
MAX_MAX_QUEUE = 1_000_000


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens and when it lets go.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 address of the machine", unit="address")
    port: int = flag(8000, "port to listen on; 0 takes a free one", unit="port")
    served_model_name: str | None = flag(None, "the model's name in the API; default: its own name", unit="name")
    api_keys: str | None = flag(
        None,
        "file of API keys, one a line, alone or behind its tenant's name; default: PAGEFRAME_API_KEYS, else no key is "
        "needed",
        unit="file",
    )
    admin_key: str | None = flag(
        None,
        "file of the one key for /inspect, /metrics and resets where keys are needed; default: PAGEFRAME_ADMIN_KEY",
        unit="file",
    )
    max_queue: int = flag(1024, "most requests that wait to run; further ones are refused with 429", unit="requests")
    max_body_bytes: int = flag(16 * 1024**2, "largest request body", unit="bytes")
    drain_timeout: float = flag(
        30.0, "after SIGTERM or Ctrl-C, how long running requests may go on before they are cut off", unit="seconds"
    )
    journal: str | None = flag(
        None,
        "record what the engine decides, and why, as lines of JSON in this file; no text, and tokens as keyed digests",
        unit="file",
    )
    journal_size: int = flag(
        64 * 1024**2,
        "the recording goes on in a new file when one is about so large; four older ones are kept",
        unit="bytes",
    )
    journal_token_ids: bool = flag(False, "record token ids, which anybody can read as text, instead of digests")
    log_level: str = flag("info", "least severe messages that are logged", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host is empty; it must be an address or a name such as 127.0.0.1")
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port is {self.port}; it must be from 0 to {MAX_PORT}")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError(f"served_model_name is {self.served_model_name!r}; it must have a visible character")
        if self.served_model_name is not None and not self.served_model_name.isprintable():
            raise ConfigError(f"served_model_name is {self.served_model_name!r}; it must be printable text")
        if not 0 <= self.max_queue <= MAX_MAX_QUEUE:
            raise ConfigError(f"max_queue is {self.max_queue}; it must be from 0 to {MAX_MAX_QUEUE}")
        if not 1 <= self.max_body_bytes <= MAX_BODY_BYTES:
            raise ConfigError(f"max_body_bytes is {self.max_body_bytes}; it must be from 1 to {MAX_BODY_BYTES}")
        if not math.isfinite(self.drain_timeout) or not 0 <= self.drain_timeout <= MAX_DRAIN_TIMEOUT:
            raise ConfigError(f"drain_timeout is {self.drain_timeout:g}; it must be from 0 to {MAX_DRAIN_TIMEOUT:g}")
        if not MIN_JOURNAL_SIZE <= self.journal_size <= MAX_JOURNAL_SIZE:
            raise ConfigError(
                f"journal_size is {self.journal_size}; it must be from {MIN_JOURNAL_SIZE} to {MAX_JOURNAL_SIZE}"
            )
        if self.journal_token_ids and self.journal is None:
            raise ConfigError("journal_token_ids needs journal: it says what is recorded there")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
