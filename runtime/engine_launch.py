"""The engine process before it is told anything: how it is spawned and ended.

Imports nothing that takes time, so that the process can import torch while its parent imports the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator


async def launch_engine(log_level: str = "info") -> asyncio.subprocess.Process:
    """Spawn an engine process, for an EngineClient. It ends when its standard input is closed, too.

    Args:
        log_level: least severe messages that it logs, on standard error.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # what lies in the current folder is not the engine's to import
        "-m",
        "pageframe.runtime.engine_process",
        log_level.upper(),
        stdin=asyncio.subprocess.PIPE,
    )


async def end_engine(process: asyncio.subprocess.Process) -> None:
    """End it at once, if it has not ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python looks for no garbage in this block, nor ever after in what it made.

    Imports make hundreds of thousands of objects that stay. Looking them through again and again is an eighth of
    the time that importing torch takes, and later each full collection would be a pause of a tenth of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
