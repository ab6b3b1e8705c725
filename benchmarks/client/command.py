"""The command line of the load client: its flags, and what each way to end means.

Exit codes: 0 measured, 1 every request failed, 2 the load could not be run as asked, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from pageframe.benchmarks.client.bench import EXIT_INTERRUPTED, bench
from pageframe.benchmarks.client.errors import InputError
from pageframe.benchmarks.client.settings import (
    DEFAULT_CONCURRENCY,
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    DEFAULT_REQUESTS,
    KEY_VARIABLE,
    settings_from,
)

EXIT_BAD_INPUT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pageframe bench serve`."""
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per request to FILE")
    output.add_argument(
        "--slo",
        metavar="LIMITS",
        help="report goodput under these limits in milliseconds: ttft=MS,tpot=MS,itl=MS,e2e=MS, any of them",
    )


def run(args: argparse.Namespace) -> int:
    """Run the load that parsed arguments ask for; the exit code. Nothing a person can cause ends in a traceback."""
    try:
        settings = settings_from(args, os.environ)
        _raise_file_limit()
        return asyncio.run(bench(settings))
    except InputError as error:
        print(f"pageframe bench: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("pageframe bench: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", required=True, help="base URL of the server, with or without /v1")
    group.add_argument("--model", help="model to ask for (default: the first that the server lists)")
    group.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token, never printed (or {KEY_VARIABLE})")
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="which API to load (%(default)s)"
    )
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds until a request fails (%(default)s)"
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"requests to send ({DEFAULT_REQUESTS}; with --prompts: one per prompt)",
    )
    group.add_argument(
        "--concurrency", type=int, metavar="C", help=f"closed loop: requests at once ({DEFAULT_CONCURRENCY})"
    )
    group.add_argument("--rate", type=float, metavar="R", help="open loop: requests per second, Poisson arrivals")
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="shape of the gamma distribution of arrival gaps (1: Poisson; below: burstier; inf: constant)",
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="requests before the load, not measured (%(default)s)"
    )
    group.add_argument(
        "--cancel-rate",
        type=float,
        default=0.0,
        metavar="F",
        help="fraction of requests whose connection is closed after a random number of tokens (%(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="of prompts, arrivals, cancellations and sampling (%(default)s)"
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-len", type=int, metavar="N", help=f"tokens of a random prompt ({DEFAULT_INPUT_LEN})")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='prompts instead of random ones: one a line, or JSON lines with "prompt", "messages", "turns" (the '
        'first) or "question"',
    )
    group.add_argument(
        "--output-len",
        type=int,
        default=DEFAULT_OUTPUT_LEN,
        metavar="N",
        help="most tokens of an answer (%(default)s)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="ask for exactly --output-len tokens (ignore_eos and min_tokens), where the server accepts it "
        "(default: with random prompts)",
    )
    group.add_argument(
        "--chunk-usage",
        action="store_true",
        help="ask for a usage in every chunk (continuous_usage_stats), which makes ITL exact where chunks carry "
        "several tokens",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (%(default)s)")


def _raise_file_limit() -> None:
    """Each request at once needs a file descriptor; the usual soft limit of 1,024 would fail them."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
