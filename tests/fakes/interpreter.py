"""Triton's interpreter, made faster: it patches Triton's language anew in every call of a device function, which takes
longer than the call. Imported where the interpreter is on and Triton is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton
import triton.language as tl


def patch_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """What the interpreter patches stays so until the launch ends. Without the interpreter this does nothing."""
    if not triton.knobs.runtime.interpret:
        return
    interpreter: Any = triton.runtime.interpreter
    patch_language: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[str] = set()

    def patch_new(function: Any) -> Any:
        modules = {name for name, value in function.__globals__.items() if value is tl or value is tl.core}
        is_launch = not patched
        if not is_launch and modules <= patched:
            return None  # nobody restores a nested call's
        patched.update(modules)
        scope = patch_language(function)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    patch.setattr(interpreter, "_patch_lang", patch_new)
