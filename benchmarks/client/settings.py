"""What a load is to be: every flag checked, with its default filled in. It reads no file and opens no connection."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pageframe.benchmarks.client.errors import InputError
from pageframe.benchmarks.client.measures import Objectives

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 128
DEFAULT_BURSTINESS = 1.0
KEY_VARIABLE = "OPENAI_API_KEY"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """A checked load.

    Exactly one of `concurrency` (closed loop) and `rate` (open loop, requests per second) is set, and exactly one
    of `input_len` (tokens of a random prompt) and `prompts_file`. `num_requests` None means: one per prompt of the
    file. `base_url` has neither /v1 nor a slash at its end.
    """

    base_url: str
    model: str | None
    api_key: str | None = field(repr=False)
    endpoint: str
    num_requests: int | None
    concurrency: int | None
    rate: float | None
    burstiness: float
    input_len: int | None
    prompts_file: Path | None
    output_len: int
    ignore_eos: bool
    chunk_usage: bool
    temperature: float
    seed: int
    timeout_s: float
    num_warmup: int
    cancel_rate: float
    objectives: Objectives | None
    json_file: Path | None


def settings_from(args: argparse.Namespace, environment: Mapping[str, str]) -> LoadSettings:
    """The settings that parsed arguments mean.

    Raises:
        InputError: a value is out of its range, or two flags contradict each other.
    """
    _refuse_contradictions(args)
    _check_ranges(args)
    closed = args.rate is None
    random_prompts = args.prompts is None
    requests = args.requests
    if requests is None and random_prompts:
        requests = DEFAULT_REQUESTS
    return LoadSettings(
        base_url=_base_url(args.url),
        model=args.model,
        api_key=_api_key(args.api_key, environment),
        endpoint=args.endpoint,
        num_requests=requests,
        concurrency=_given(args.concurrency, DEFAULT_CONCURRENCY) if closed else None,
        rate=args.rate,
        burstiness=_given(args.burstiness, DEFAULT_BURSTINESS),
        input_len=_given(args.input_len, DEFAULT_INPUT_LEN) if random_prompts else None,
        prompts_file=args.prompts,
        output_len=args.output_len,
        ignore_eos=_given(args.ignore_eos, random_prompts),
        chunk_usage=args.chunk_usage,
        temperature=args.temperature,
        seed=args.seed,
        timeout_s=args.timeout,
        num_warmup=args.warmup,
        cancel_rate=args.cancel_rate,
        objectives=parse_objectives(args.slo) if args.slo is not None else None,
        json_file=args.json,
    )


def parse_objectives(text: str) -> Objectives:
    """Objectives from `name=milliseconds` pairs with commas between; the names are ttft, tpot, itl, e2e.

    Raises:
        InputError: a pair is malformed, unknown, repeated, or not a positive number.
    """
    limits: dict[str, float] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in ("ttft", "tpot", "itl", "e2e"):
            raise InputError(f"--slo has {pair.strip()!r}; it takes ttft=MS, tpot=MS, itl=MS, e2e=MS, commas between")
        if name in limits:
            raise InputError(f"--slo names {name} twice")
        try:
            milliseconds = float(value)
        except ValueError:
            raise InputError(f"--slo {name} is {value!r}; it must be a number of milliseconds") from None
        if not (milliseconds > 0 and math.isfinite(milliseconds)):
            raise InputError(f"--slo {name} is {value}; it must be above 0 and finite")
        limits[name] = milliseconds / 1000
    return Objectives(limits.get("ttft"), limits.get("tpot"), limits.get("itl"), limits.get("e2e"))


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _refuse_contradictions(args: argparse.Namespace) -> None:
    if args.rate is not None and args.concurrency is not None:
        raise InputError(
            "--rate and --concurrency contradict each other: an open loop sends on time, however many are running"
        )
    if args.burstiness is not None and args.rate is None:
        raise InputError("--burstiness needs --rate: a closed loop has no arrival process")
    if args.input_len is not None and args.prompts is not None:
        raise InputError("--input-len and --prompts contradict each other: a file's prompts have their own lengths")


def _check_ranges(args: argparse.Namespace) -> None:
    for flag, whole, least in (
        ("requests", args.requests, 1),
        ("concurrency", args.concurrency, 1),
        ("input-len", args.input_len, 1),
        ("output-len", args.output_len, 1),
        ("warmup", args.warmup, 0),
    ):
        if whole is not None and whole < least:
            raise InputError(f"--{flag} is {whole}; it must be at least {least}")
    for flag, number in (("rate", args.rate), ("timeout", args.timeout)):
        if number is not None and not (number > 0 and math.isfinite(number)):
            raise InputError(f"--{flag} is {number}; it must be above 0 and finite")
    if args.burstiness is not None and not args.burstiness > 0:
        raise InputError(f"--burstiness is {args.burstiness}; it must be above 0 (inf: constant gaps)")
    if not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise InputError(f"--temperature is {args.temperature}; it must be at least 0 and finite")
    if not 0 <= args.cancel_rate <= 1:
        raise InputError(f"--cancel-rate is {args.cancel_rate}; it must be a fraction from 0 to 1")


def _base_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        reachable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # a port that is no number, an unclosed bracket
        raise InputError(f"--url is {url!r}: {error}") from None
    if "@" in parts.netloc:
        raise InputError("--url holds a user name or password; give a key with --api-key or " + KEY_VARIABLE)
    if not reachable or parts.query or parts.fragment:
        raise InputError(f"--url is {url!r}; it must be like http://127.0.0.1:8000, with or without /v1")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _api_key(flag: str | None, environment: Mapping[str, str]) -> str | None:
    key = flag if flag is not None else environment.get(KEY_VARIABLE)
    if not key:
        return None
    if not all("!" <= character <= "~" for character in key):
        raise InputError(f"--api-key (or {KEY_VARIABLE}) holds a character that no HTTP header may carry")
    return key
