"""The engine. `from pageframe.runtime import LLM, SamplingParams` is its public face.

Names are handed on when they are first used: importing a light module of this package must not import torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pageframe.runtime.llm import LLM, ChoiceResult, GenerationResult
    from pageframe.runtime.request import SamplingParams

# How long an OpenMP thread spins for its partners before it sleeps; read once, when torch loads OpenMP, hence here.
# This bridges the gap between two steps, where waking a thread is dear. The default spins for many milliseconds more:
# beside another busy process a step then waits for a thread that lost its core to a spinning one (benchmarks/LOG.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

__all__ = ["LLM", "ChoiceResult", "GenerationResult", "SamplingParams"]

_HOMES = {"LLM": "llm", "ChoiceResult": "llm", "GenerationResult": "llm", "SamplingParams": "request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
