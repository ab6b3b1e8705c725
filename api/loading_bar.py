"""A progress bar while a model loads, for people at a terminal. Knows nothing of models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def loading_bar(model_name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, gone when the block ends; gives what to call with (tensors loaded, in all).

    Where standard error is no terminal there is no bar.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {model_name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
