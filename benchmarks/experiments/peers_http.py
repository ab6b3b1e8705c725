"""The same load on each engine's own HTTP server, by one client in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pageframe.benchmarks.experiments.peers_engines import LLAMA, OURS, VLLM, LlamaInstallation, VllmInstallation
from pageframe.benchmarks.experiments.peers_process import PeerError, PeerServer, foreign_environment
from pageframe.benchmarks.experiments.server_process import free_port


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `streams` requests at once.

    Args:
        prompt, output: tokens of each.
        rounds: requests in all, divided by streams.
    """

    streams: int
    prompt: int
    output: int
    rounds: int = 3

    def __str__(self) -> str:
        return f"{self.prompt} + {self.output}, {self.streams} streams"


@dataclass(frozen=True, slots=True)
class Served:
    """What the client saw: output tokens per second, median TTFT and 99th percentile of ITL in seconds."""

    output_rate: float
    first_token: float
    p99_gap: float


LOADS = (Load(8, 128, 128), Load(32, 128, 128))
QUICK_LOADS = (Load(2, 16, 4, rounds=1),)


def serve_own(flags: Sequence[str], variables: Mapping[str, str] | None = None) -> PeerServer:
    """`pageframe serve` as it is, with these flags and environment variables beside."""
    port = free_port()
    command = [sys.executable, "-m", "pageframe.api.cli", "serve", "--port", str(port), *flags]
    return PeerServer(OURS, f"http://127.0.0.1:{port}", command, os.environ | dict(variables or {}))


def serve_vllm(installation: VllmInstallation, longest: int) -> PeerServer:
    """vLLM's OpenAI server, its prefix cache off as in the offline rows."""
    port = free_port()
    server = "vllm.entrypoints.openai.api_server"
    command = [str(installation.python), "-m", server, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(installation.model), "--dtype", installation.dtype, "--max-model-len", str(longest)]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    return PeerServer(VLLM, f"http://127.0.0.1:{port}", command, foreign_environment(installation.variables()))


def serve_llama(installation: LlamaInstallation, loads: Sequence[Load]) -> PeerServer:
    """llama-server with a slot for each stream, and no cache of prompts, which would copy the slots' memory about."""
    port = free_port()
    slots = max(load.streams for load in loads)
    slot_tokens = max(load.prompt + load.output for load in loads) + 64
    command = installation.command("llama-server", "--host", "127.0.0.1", "--port", str(port), "-np", str(slots))
    command += ["-c", str(slots * slot_tokens), "--no-cache-prompt", "--cache-ram", "0", "--no-webui"]
    return PeerServer(LLAMA, f"http://127.0.0.1:{port}", command, foreign_environment({}))


def drive(server: PeerServer, load: Load, seed: int) -> Served:
    """Run the load client against this server, while all others stand still.

    Raises:
        PeerError: some request failed, or the client did.
    """
    with server.turn():
        try:
            return drive_url(server.url, load, seed)
        except PeerError as error:
            raise server.failure(str(error)) from None


def drive_url(url: str, load: Load, seed: int) -> Served:
    """Run the load client against whatever serves there.

    Raises:
        PeerError: some request failed, or the client did.
    """
    flags = {
        "url": url,
        "requests": load.streams * load.rounds,
        "concurrency": load.streams,
        "warmup": load.streams,
        "input-len": load.prompt,
        "output-len": load.output,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        command = [sys.executable, "-m", "pageframe.benchmarks.client", "--json", str(results)]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"the load client ended with status {done.returncode}: {done.stderr[-500:]}")
        summary = json.loads(results.read_text().splitlines()[-1])
    wanted = load.streams * load.rounds * load.output
    if summary["output_tokens"] != wanted:
        raise PeerError(f"{summary['output_tokens']} tokens came instead of {wanted}")
    return Served(summary["output_rate"], summary["ttft"]["p50"], summary["itl"]["p99"])


@contextlib.contextmanager
def all_serving(
    starts: dict[str, Callable[[], PeerServer]], fail: Callable[[PeerError], object]
) -> Iterator[dict[str, PeerServer]]:
    """All servers, started one after the other, until the block ends. Those that do not start are handed to `fail`."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, PeerServer] = {}
        for name, start in starts.items():
            try:
                servers[name] = start()
            except PeerError as error:
                fail(error)
            else:
                stack.callback(servers[name].close)
        yield servers
