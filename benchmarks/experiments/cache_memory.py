"""The four ways to keep K and V, and the memory that each takes by formula. Arithmetic only; no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What keeps K and V; the value is its name for people."""

    NOTHING = "no cache"
    GROWN = "concatenated"
    RESERVED = "reserved whole"
    PAGED = "paged"


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of K/V memory.

    Args:
        reserved: the most that was taken from everybody else until now.
        used: what holds K and V of a token.
    """

    reserved: int
    used: int

    @property
    def wasted(self) -> int:
        return self.reserved - self.used

    @property
    def waste_share(self) -> float:
        """Wasted bytes of reserved ones; 0 where nothing is reserved."""
        return self.wasted / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the formulas need to know.

    Args:
        token_bytes: K and V of one token over all layers.
        block_size: slots of a block; every way's K and V are in whole blocks of a request.
        max_len: tokens per request that a cache reserved whole has room for.
    """

    token_bytes: int
    num_layers: int
    block_size: int
    max_len: int

    def held(self, kind: Kind, num_requests: int, prompt_len: int, num_new: int) -> Held:
        """K/V memory of requests of equal length when each has made `num_new` tokens, of which the last one has no K
        and V yet."""
        length = prompt_len + num_new - 1
        used = num_requests * length * self.token_bytes
        if kind is Kind.NOTHING:
            return Held(0, 0)
        if kind is Kind.GROWN:
            # While a layer is copied into a longer one, the shorter one is still there.
            shorter = self._blocks(num_requests, length - 1) // self.num_layers if num_new > 1 else 0
            return Held(self._blocks(num_requests, length) + shorter, used)
        if kind is Kind.RESERVED:
            return Held(self._blocks(num_requests, self.max_len), used)
        # A request is admitted with room for its prompt and the first token that it makes.
        return Held(self._blocks(num_requests, max(length, prompt_len + 1)), used)

    def _blocks(self, num_requests: int, length: int) -> int:
        """Bytes of the blocks of requests of `length` tokens."""
        return num_requests * -(-length // self.block_size) * self.block_size * self.token_bytes

    def requests_that_fit(self, kind: Kind, memory: int, prompt_len: int, num_new: int) -> int | None:
        """Requests of this length that `memory` bytes hold at once; None where K and V set no limit."""
        one = self.held(kind, 1, prompt_len, num_new).reserved
        return memory // one if one else None
