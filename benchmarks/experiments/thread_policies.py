"""How many threads serve best, how long they spin for one another before they sleep, and whether each stays on a core
of its own, with the server under load.

    python -m pageframe.benchmarks.experiments.thread_policies [--threads 1 2] [--spins 1000 10000 100000]
        [--bind false true] [--busy] [--streams 8] [--repeats 3] [--quick]

Each policy is a server of its own (`pageframe serve --threads N`, GOMP_SPINCOUNT and OMP_PROC_BIND in its environment);
all get the same closed loop from the same client, in turns, while the others stand still. The engine's threads, the
HTTP process and the client share the machine's cores. With --busy one more process uses a core all the time. The table
has medians.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pageframe.benchmarks.experiments.grids import count
from pageframe.benchmarks.experiments.peers_http import Load, Served, all_serving, drive, serve_own
from pageframe.benchmarks.experiments.peers_process import PeerError, PeerServer


@dataclass(frozen=True, slots=True)
class Policy:
    """Threads of the forward pass, GOMP_SPINCOUNT and OMP_PROC_BIND."""

    threads: int
    spins: int
    bind: str

    def __str__(self) -> str:
        bound = ", bound to cores" if self.bind == "true" else ""
        return f"{self.threads} threads, {self.spins:,} spins{bound}"

    def serve(self) -> PeerServer:
        environment = {"GOMP_SPINCOUNT": str(self.spins), "OMP_PROC_BIND": self.bind}
        return serve_own(["--threads", str(self.threads)], environment)


@contextlib.contextmanager
def busy_neighbour(wanted: bool) -> Iterator[None]:
    """A process that uses a core until the block ends."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(policies: list[Policy], load: Load, repeats: int, busy: bool) -> dict[Policy, list[Served]]:
    """What the client saw of each policy, one entry per repeat.

    Raises:
        PeerError: a server did not start, or a request failed.
    """
    console = Console(stderr=True)

    def fail(error: PeerError) -> None:
        raise error

    served: dict[Policy, list[Served]] = {policy: [] for policy in policies}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("serving", total=len(policies) * repeats)
        with all_serving({str(policy): policy.serve for policy in policies}, fail) as servers, busy_neighbour(busy):
            for repeat in range(repeats):
                for policy in policies:
                    served[policy].append(drive(servers[str(policy)], load, seed=repeat))
                    bar.advance(task)
    return served


def show(served: dict[Policy, list[Served]], load: Load, repeats: int, busy: bool) -> None:
    beside = ", beside a process that uses a core" if busy else ""
    table = Table(title=f"{load}, medians of {repeats}, {len(os.sched_getaffinity(0))} cores{beside}")
    for column in ("policy", "output tokens/s", "median TTFT, ms", "p99 ITL, ms"):
        table.add_column(column, justify="right")
    for policy, runs in served.items():
        table.add_row(
            str(policy),
            f"{median(run.output_rate for run in runs):.0f}",
            f"{median(run.first_token for run in runs) * 1e3:.0f}",
            f"{median(run.p99_gap for run in runs) * 1e3:.0f}",
        )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description="Threads and their waiting, with the server under load.")
    parser.add_argument("--threads", type=count, nargs="+", default=[1, cores], help="threads to try")
    parser.add_argument(
        "--spins", type=count, nargs="+", default=[1_000, 10_000, 100_000], help="GOMP_SPINCOUNTs to try"
    )
    parser.add_argument("--bind", choices=("false", "true"), nargs="+", default=["false"], help="OMP_PROC_BINDs to try")
    parser.add_argument("--streams", type=count, default=8, help="requests at once (default: 8)")
    parser.add_argument("--repeats", type=count, default=3, help="runs of each (default: 3)")
    parser.add_argument("--busy", action="store_true", help="one more process uses a core all the time")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    options = parser.parse_args(arguments)
    choices = product(dict.fromkeys(options.threads), options.spins, options.bind)
    policies = [Policy(threads, spins, bind) for threads, spins, bind in choices]
    load = Load(options.streams, 128, 128)
    if options.quick:
        policies, load, options.repeats = policies[:2], Load(2, 16, 4, rounds=1), 1
    try:
        served = measure(policies, load, options.repeats, options.busy)
    except PeerError as error:
        print(f"thread_policies: {error}", file=sys.stderr)
        return 1
    show(served, load, options.repeats, options.busy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
