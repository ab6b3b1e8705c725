"""A progress bar while a model loads, for people at a terminal. Knows nothing of models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def loading_bar(model_name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, gone when the block ends; gives what to call with (tensors loaded, in all).

    Where standard error is no terminal there is no bar.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    # Imported here: a server without a terminal starts sooner for it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {model_name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
