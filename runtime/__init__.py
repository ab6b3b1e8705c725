"""The engine. `from pageframe.runtime import LLM, SamplingParams` is its public face.

Names are handed on when they are first used: importing a light module of this package must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pageframe.runtime.llm import LLM, ChoiceResult, GenerationResult
    from pageframe.runtime.request import SamplingParams

__all__ = ["LLM", "ChoiceResult", "GenerationResult", "SamplingParams"]

_HOMES = {"LLM": "llm", "ChoiceResult": "llm", "GenerationResult": "llm", "SamplingParams": "request"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
