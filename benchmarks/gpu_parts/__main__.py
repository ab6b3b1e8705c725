"""One part of the GPU script, in a process of its own: `python -m pageframe.benchmarks.gpu_parts PART OUT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

#: What the server or the tests need and a GPU machine may lack.
MISSING_THERE = (
    "aiohttp",
    "fastapi",
    "gguf",
    "huggingface_hub",
    "llguidance",
    "matplotlib",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "rich",
    "transformers",
    "uvicorn",
    "zmq",
)


class _Missing(MetaPathFinder):
    """Modules that cannot be imported, as if they were not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in MISSING_THERE:
            _raise_missing(fullname)
        return None


def _raise_missing(name: str) -> NoReturn:
    raise ModuleNotFoundError(f"No module named {name!r} (a rehearsal does without it)", name=name)


def main() -> int:
    parser = argparse.ArgumentParser(description="One part of the GPU script.")
    parser.add_argument("part")
    parser.add_argument("out", type=Path, help="where its rows go")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if args.rehearse:
        sys.meta_path.insert(0, _Missing())
    import torch

    from pageframe.benchmarks import tune_triton
    from pageframe.benchmarks.gpu_parts import attention, checks, machine, sampling, serving
    from pageframe.benchmarks.gpu_parts.results import Results
    from pageframe.benchmarks.gpu_parts.sizes import REAL, TOY

    sizes, device = (TOY, torch.device("cpu")) if args.rehearse else (REAL, torch.device("cuda"))
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit("no GPU is here: --rehearse runs without one")
    results = Results(args.out)
    torch.manual_seed(0)
    if args.part in sizes.models:
        serving.run(args.part, results, sizes, device)
        return 0
    if args.part == "tune":
        tune_triton.run(results, device, args.out.with_name("table.json") if args.rehearse else None)
        return 0
    parts = {
        "machine": machine.run,
        "checks": checks.run,
        "attention": attention.run,
        "others": attention.run_others,
        "sampling": sampling.run,
    }
    parts[args.part](results, sizes, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
