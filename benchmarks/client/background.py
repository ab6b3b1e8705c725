"""Running one coroutine beside another piece of work. It does not know what either does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def running_beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the body runs, and stop it after that. Its own failure is raised at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
