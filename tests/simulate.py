"""Serve random workloads in random configurations, each from its own seed, and count what happened.

`python tests/simulate.py --seeds 200` runs seeds 0 to 199; a violation names its seed, and `--seed N` runs that one
again. The checks are those of fakes/simulation.py, after every step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from fakes.workload import simulate

COUNTED = {
    "steps": "steps",
    "mixed": "mixed_steps",
    "preemptions": "preemptions",
    "hits": "journal: hit",
    "forks": "journal: fork",
    "slides": "journal: slide",
    "evictions": "journal: evict",
    "copies out": "copies: to_host",
    "copies back": "copies: to_device",
    "aborts": "aborts",
    "failed forwards": "errors",
}


def run_seed(task: tuple[int, int]) -> tuple[int, Counter[str], str]:
    """One seed: what happened, and the traceback of a violation or ""."""
    seed, num_steps = task
    try:
        return seed, simulate(seed, num_steps), ""
    except Exception:
        return seed, Counter(), traceback.format_exc()


def main() -> int:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Column, Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=200, help="how many seeds, from 0 (default: %(default)s)")
    which.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--steps", type=int, default=5000, help="steps for each (default: %(default)s)")
    args = parser.parse_args()
    seeds = range(args.seeds) if args.seed is None else [args.seed]
    total: Counter[str] = Counter()
    violations = []
    errors = Console(stderr=True)
    with multiprocessing.Pool() as pool:
        results = pool.imap_unordered(run_seed, [(seed, args.steps) for seed in seeds])
        for seed, counts, violation in track(results, "simulating", total=len(seeds), console=errors, transient=True):
            total += counts
            if violation:
                violations.append(seed)
                errors.print(f"seed {seed} with --steps {args.steps}:\n{violation}", markup=False, highlight=False)
    table = Table("", Column("all seeds", justify="right"))
    table.add_row("seeds", f"{len(seeds):,}")
    for name, key in COUNTED.items():
        table.add_row(name, f"{total[key]:,}")
    table.add_row("violations", str(len(violations)))
    Console().print(table)
    if violations:
        errors.print(f"violations with seeds {sorted(violations)}; again: --seed N --steps {args.steps}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
