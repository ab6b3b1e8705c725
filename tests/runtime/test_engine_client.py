"""The client's start, where the engine cannot."""

from __future__ import annotations

import asyncio

import pytest

from pageframe.runtime import engine_client
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_client import EngineClient
from pageframe.runtime.errors import StartupError


def test_an_engine_that_ends_before_it_connects_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client.sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match="ended with code 1 before it was ready"):
        asyncio.run(asyncio.wait_for(EngineClient.start(EngineConfig()), timeout=60))
