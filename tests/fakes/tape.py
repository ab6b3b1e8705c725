"""A recorder of decode steps that needs no GPU: it keeps the operations themselves, and refuses what CUDA's refuses.

A replay makes the recorded operations again, in the recorded memory. It runs none of the Python around them: what that
read from the host, a length, a batch, stays as it was when the step was recorded, as in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], torch.Tensor]

#: The host would wait for a number of the device's, or for how many there are.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim"}
#: By torch's names for them: reads of the host, and memory that is not of the recording's pool.
FOREIGN = {
    *("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "pin_memory", "synchronize", "tolist"),
    *("as_tensor", "tensor"),
}


class Tape:
    """See `Record` in cuda_graphs.py.

    Attributes:
        recorded: the sizes of the recorded steps, in order.
        replays: by size, how often.
    """

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replays: Counter[int] = Counter()

    def __call__(self, run: Run) -> Run:
        run()
        recording = _Recording()
        with _watched(recording), _Named(recording), recording:
            result = run()
        size = len(result)
        self.recorded.append(size)

        def replay() -> torch.Tensor:
            self.replays[size] += 1
            for call in recording.calls:
                call()
            return result

        return replay


class _Recording(TorchDispatchMode):
    """Keeps every operation made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.is_launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_launching:
            return func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        masks = name.startswith("index") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1])
        )
        if name in READS or masks:
            _refuse(name)
        results = func(*args, **kwargs)
        self.calls.append(partial(_again, partial(func, *args, **kwargs), results))
        return results

    def launch(self, call: Callable[[], None]) -> None:
        """Make and keep a kernel's launch, whose interpreter may do as it likes."""
        self.is_launching = True
        try:
            call()
        finally:
            self.is_launching = False
        self.calls.append(call)


class _Named(TorchFunctionMode):
    """Refuses what leaves no operation to be seen."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in FOREIGN and not self._recording.is_launching:
            _refuse(name)
        return func(*args, **(kwargs or {}))


def _again(call: Callable[[], Any], results: Any) -> None:
    """Make an operation once more, its results in the memory of the first time's."""
    for first, fresh in zip(tree_leaves(results), tree_leaves(call()), strict=True):
        if isinstance(first, torch.Tensor) and fresh.data_ptr() != first.data_ptr():
            first.copy_(fresh)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} while a step is recorded")


@contextmanager
def _watched(recording: _Recording) -> Iterator[None]:
    """Within this, interpreted launches are kept, and numpy's memory is refused: both pass by torch's modes."""
    from_numpy = torch.from_numpy

    def refused(array: Any) -> torch.Tensor:
        if not recording.is_launching:
            _refuse("from_numpy")
        return from_numpy(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", refused)
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is not None:
            run = interpreter.InterpretedFunction.run

            def recorded(kernel: Any, *args: Any, **options: Any) -> None:
                recording.launch(partial(run, kernel, *args, **options))

            patch.setattr(interpreter.InterpretedFunction, "run", recorded)
        yield
