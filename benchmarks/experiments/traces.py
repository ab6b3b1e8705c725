"""Lengths and times of requests: from a recorded trace, or drawn where there is none.

A trace is one of

    a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens          Azure's LLM inference traces
    JSON lines with timestamp (ms), input_length, output_length        Mooncake's traces
    a folder (or its .tar, .tar.gz, .tar.xz) of chunk-N-trace.csv and  ServeGen's client models; requests are drawn
    chunk-N-dataset.json                                               from their rates and length distributions

None of them comes with Pageframe. `synthetic_trace` needs no file: prompts are lognormal with a median of
PROMPT_MEDIAN = 1000 tokens and a deviation of PROMPT_SIGMA = 1.0 in the logarithm, answers with a median of
OUTPUT_MEDIAN = 150 and OUTPUT_SIGMA = 0.85, independent of one another and cut at PROMPT_MAX = 16000 and
OUTPUT_MAX = 1000, about as in a public trace of conversations; arrivals are a Poisson process of one request a second.
"""

from __future__ import annotations

import csv
import json
import lzma
import math
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pageframe.benchmarks.experiments.report import InputError

PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX = 1000, 1.0, 16_000
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX = 150, 0.85, 1000
#: How many requests are drawn from ServeGen's distributions.
DRAWN_REQUESTS = 10_000
#: ServeGen's length distributions are of windows of this many seconds.
_SERVEGEN_WINDOW = 21_600
_SERVEGEN_FILE = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
_PAIR = re.compile(r"(\d+):\s*([0-9.eE+-]+)")
_MAX_LENGTH = 2**24
#: What comes of a file that is not what it seems to be.
_MALFORMED = (
    OSError,
    tarfile.TarError,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    csv.Error,
    ValueError,
    OverflowError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        arrival: seconds from the first request.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def synthetic_trace(num_requests: int, seed: int) -> list[TraceRequest]:
    """A trace drawn as this module's docstring says."""
    generator = np.random.default_rng(seed)
    prompts = generator.lognormal(np.log(PROMPT_MEDIAN), PROMPT_SIGMA, num_requests)
    outputs = generator.lognormal(np.log(OUTPUT_MEDIAN), OUTPUT_SIGMA, num_requests)
    prompts = np.ceil(np.minimum(prompts, PROMPT_MAX))
    outputs = np.ceil(np.minimum(outputs, OUTPUT_MAX))
    arrivals = np.cumsum(generator.exponential(1.0, num_requests))
    return _in_order(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))


def read_trace(path: Path, seed: int) -> list[TraceRequest]:
    """The requests of a trace in the order of their arrival; those without a token on either side are left out.

    Args:
        seed: of what is drawn where the trace holds distributions.

    Raises:
        InputError: the file can't be read, or is none of the known formats.
    """
    try:
        return _read(path, seed)
    except _MALFORMED as error:
        raise InputError(f"trace is {path}; it can't be read: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """In one line; a KeyError alone would be no more than a name."""
    return repr(error) if isinstance(error, KeyError) else " ".join(str(error).split()) or type(error).__name__


def _read(path: Path, seed: int) -> list[TraceRequest]:
    if path.is_dir():
        return _draw(_folder_files(path), path, seed)
    if tarfile.is_tarfile(path):
        return _draw(_archive_files(path), path, seed)
    text = path.read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    rows = _mooncake_rows(text, path) if first.startswith("{") else _azure_rows(text, path)
    return _requests(rows, path)


def scaled(trace: Sequence[TraceRequest], count: int, max_len: int, seed: int) -> tuple[list[TraceRequest], float]:
    """A stretch of `count` requests, their lengths made smaller by one factor so that 95% fit into max_len tokens, and
    the others cut; also the factor. Each keeps at least one token on both sides.

    Raises:
        InputError: the trace has fewer requests.
    """
    if len(trace) < count:
        raise InputError(f"requests is {count}; the trace has {len(trace)}")
    start = int(np.random.default_rng(seed).integers(0, len(trace) - count + 1))
    stretch = trace[start : start + count]
    factor = min(1.0, max_len / float(np.percentile([request.total_tokens for request in stretch], 95)))
    requests = []
    for request in stretch:
        output = min(max(1, round(request.output_tokens * factor)), max_len - 1)
        prompt = min(max(1, round(request.prompt_tokens * factor)), max_len - output)
        requests.append(TraceRequest(request.arrival - stretch[0].arrival, prompt, output))
    return requests, factor


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests with their arrivals stretched to `rate` a second on average; 0 has them come all at once."""
    span = requests[-1].arrival
    factor = (len(requests) - 1) / rate / span if rate and span else 0.0
    return [replace(request, arrival=request.arrival * factor) for request in requests]


def _in_order(rows: Iterable[tuple[float, float, float]]) -> list[TraceRequest]:
    """Requests of (seconds, prompt tokens, output tokens), the first at 0."""
    ordered = sorted(rows)
    return [TraceRequest(time - ordered[0][0], int(prompt), int(output)) for time, prompt, output in ordered]


def _requests(rows: Iterable[tuple[float, int, int]], path: Path) -> list[TraceRequest]:
    """Raises: InputError: none is left, or they are endlessly far apart."""
    requests = _in_order(row for row in rows if 0 < row[1] <= _MAX_LENGTH and 0 < row[2] <= _MAX_LENGTH)
    if not requests:
        raise InputError(f"trace is {path}; it holds no request of at least one prompt token and one output token")
    _finite(requests[-1].arrival, "the time from the first to the last request")
    return requests


def _finite(value: float, name: str) -> float:
    """Raises: ValueError: it is not."""
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def _azure_rows(text: str, path: Path) -> Iterator[tuple[float, int, int]]:
    reader = csv.DictReader(text.splitlines())
    columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not columns <= set(reader.fieldnames or ()):
        raise InputError(
            f"trace is {path}; it is neither a CSV file with {', '.join(sorted(columns))}, nor JSON lines with "
            "timestamp, input_length and output_length, nor a folder or archive of chunk-N-trace.csv and "
            "chunk-N-dataset.json"
        )
    try:
        for row in reader:
            # Seven digits of a second are one more than fromisoformat takes everywhere.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield time, int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except _MALFORMED as error:
        raise InputError(f"trace is {path}; line {reader.reader.line_num} is no request: {_describe(error)}") from error


def _mooncake_rows(text: str, path: Path) -> Iterator[tuple[float, int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            time = _finite(float(record["timestamp"]), "timestamp")
            yield time / 1e3, int(record["input_length"]), int(record["output_length"])
        except _MALFORMED as error:
            raise InputError(f"trace is {path}; line {number} is no request: {_describe(error)}") from error


# ---- ServeGen: distributions ----------------------------------------------------------------------------------------


def _folder_files(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if _SERVEGEN_FILE.match(file.name)}


def _archive_files(path: Path) -> dict[str, str]:
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            content = archive.extractfile(member) if member.isfile() and _SERVEGEN_FILE.match(name) else None
            if content is not None:
                files[name] = content.read().decode("utf-8")
    return files


def _draw(files: Mapping[str, str], path: Path, seed: int) -> list[TraceRequest]:
    """DRAWN_REQUESTS requests: each of a client's window, chosen by its rate, at a uniform time in it, with prompt and
    answer drawn apart from that window's distributions."""
    generator = np.random.default_rng(seed)
    windows: list[tuple[float, float, Mapping[str, Any]]] = []
    rates: list[float] = []
    for name in sorted(files):
        if name.endswith("-trace.csv"):
            lengths = _read_lengths(files, name, path)
            for start, end, rate in _read_rates(files[name], name, path):
                distribution = lengths.get(str(int(start) // _SERVEGEN_WINDOW * _SERVEGEN_WINDOW))
                if rate > 0 and distribution:
                    windows.append((start, end, distribution))
                    rates.append(rate * (end - start))
    if not windows:
        raise InputError(f"trace is {path}; it holds no chunk-N-trace.csv with its chunk-N-dataset.json")
    weights = np.asarray(rates) / _finite(sum(rates), "the sum of all rates")
    rows: list[tuple[float, int, int]] = []
    for index, count in enumerate(generator.multinomial(DRAWN_REQUESTS, weights).tolist()):
        if count:
            start, end, distribution = windows[index]
            times = generator.uniform(start, end, count)
            prompts = _draw_lengths(distribution, "input_tokens", count, generator, path)
            outputs = _draw_lengths(distribution, "output_tokens", count, generator, path)
            rows += zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return _requests(rows, path)


def _read_lengths(files: Mapping[str, str], name: str, path: Path) -> Mapping[str, Any]:
    dataset = name.replace("-trace.csv", "-dataset.json")
    try:
        content = json.loads(files.get(dataset, "{}"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"trace is {path}; {dataset} is not JSON: {_describe(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"trace is {path}; {dataset} is not a JSON object")
    return content


def _read_rates(text: str, name: str, path: Path) -> list[tuple[float, float, float]]:
    """(start, end, requests a second) of each window."""
    reader = csv.reader(text.splitlines())
    try:
        rows = [(_finite(float(row[0]), "time"), _finite(float(row[1]), "rate")) for row in reader if row]
    except _MALFORMED as error:
        raise InputError(
            f"trace is {path}; {name}, line {reader.line_num} is no time and rate: {_describe(error)}"
        ) from error
    starts = [start for start, _ in rows]
    width = starts[1] - starts[0] if len(starts) > 1 else 600.0
    return [(start, start + width, rate) for start, rate in rows]


def _draw_lengths(
    window: Mapping[str, Any], side: str, count: int, generator: np.random.Generator, path: Path
) -> npt.NDArray[np.int64]:
    """`count` lengths of a distribution written as "{length: share, …}"."""
    pairs = [(int(length), float(share)) for length, share in _PAIR.findall(str(window.get(side, "")))]
    total = _finite(sum(share for _, share in pairs), f"the sum of a window's {side}")
    if not pairs or not total > 0:
        raise InputError(f"trace is {path}; a window has no {side}")
    picks = generator.choice(len(pairs), count, p=[share / total for _, share in pairs])
    return np.array([length for length, _ in pairs])[picks]
