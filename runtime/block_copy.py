"""Copies of whole blocks that a step makes before its forward pass, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CopyKind(str, Enum):
    """From where to where."""

    FORK = "fork"
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's K and V in every layer. `src` and `dst` are block ids, or slots of host memory, as `kind` says.

    A step's copies are made one after the other, in the order in which they were decided: a later one may overwrite
    what an earlier one read.
    """

    kind: CopyKind
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """What decides between copying blocks back from host memory and computing them again. Seconds.

    Args:
        per_block: copying one block.
        per_token: computing one prompt token.
    """

    per_block: float
    per_token: float


#: Nothing is measured: copying is never held against a block.
FREE_COPIES = CopyCosts(per_block=0.0, per_token=0.0)
