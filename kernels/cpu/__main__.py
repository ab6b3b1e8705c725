"""Compiles the CPU engine if need be, so that no start has to, and prints one line about it.

Always ends with status 0: without it, torch's operations serve.
"""

from __future__ import annotations

from pageframe.kernels.cpu import BuildError, load
from pageframe.kernels.cpu.build import cache_folder

try:
    print(f"the CPU kernels are compiled for {load().instruction_set}, in {cache_folder()}")  # noqa: T201 - a command
except BuildError as error:
    print(f"no compiled CPU kernels, so torch's operations will serve, slower: {error}")  # noqa: T201
