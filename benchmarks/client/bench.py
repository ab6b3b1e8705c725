"""One run of the load client from settings to exit code: find out, prepare, warm up, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from pageframe.benchmarks.client.arrivals import arrival_times
from pageframe.benchmarks.client.background import running_beside
from pageframe.benchmarks.client.errors import InputError
from pageframe.benchmarks.client.exchange import Exchange, Job, LiveCounts
from pageframe.benchmarks.client.load import LoadResult, choose_cancelled, run_load, start_clock
from pageframe.benchmarks.client.measures import output_tokens
from pageframe.benchmarks.client.progress import show_progress
from pageframe.benchmarks.client.prompt_file import Prompt, read_prompts
from pageframe.benchmarks.client.random_prompts import PromptSet, token_prompts, word_prompts
from pageframe.benchmarks.client.record import Outcome
from pageframe.benchmarks.client.report import find_warnings, print_report
from pageframe.benchmarks.client.request_body import (
    OptionalFields,
    encode_body,
    endpoint_path,
    negotiate,
    request_body,
)
from pageframe.benchmarks.client.results_file import write_results
from pageframe.benchmarks.client.server import Server, open_session
from pageframe.benchmarks.client.settings import DEFAULT_CONCURRENCY, LoadSettings
from pageframe.benchmarks.client.summary import Summary, summarise

EXIT_OK = 0
EXIT_ALL_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """Everything that is decided before the first request of the load."""

    model: str
    optional: OptionalFields
    prompts: list[Prompt]  # those of the load
    warmup_prompts: list[Prompt]
    repeated_prompts: int
    prompt_note: str


async def bench(settings: LoadSettings) -> int:
    """Run the load and print its report; the exit code.

    Raises:
        InputError: the load cannot be run as asked; nothing of it was sent.
    """
    file_prompts = None
    if settings.prompts_file is not None:
        file_prompts = read_prompts(settings.prompts_file, chat=settings.endpoint == "chat")
    results = _open_results(settings)
    try:
        return await _bench(settings, file_prompts, results)
    finally:
        if results is not None:
            results.close()


async def _bench(settings: LoadSettings, file_prompts: list[Prompt] | None, results: TextIO | None) -> int:
    async with open_session() as session:
        server = Server(session, settings.base_url, api_key=settings.api_key, timeout_s=settings.timeout_s)
        load = await _prepare(settings, server, file_prompts)
        notes = _notes(settings, load)
        if load.warmup_prompts:
            warmup = await _warm_up(settings, server, load)
            if warmup.interrupted:
                print("interrupted during the warm-up; nothing was measured", file=sys.stderr)
                return EXIT_INTERRUPTED
            notes.append(_warmup_note(warmup))
        jobs = _jobs(settings, load)
        started_at = datetime.now(UTC)
        result = await _run(settings, server, jobs, settings.concurrency, "load")
    totals = summarise(
        result.records, num_requests=len(jobs), loop_lags_s=result.loop_lags_s, objectives=settings.objectives
    )
    warnings = find_warnings(
        totals, short_answers=_short_answers(settings, load, result), repeated_prompts=load.repeated_prompts
    )
    print_report(notes, totals, warnings, interrupted=result.interrupted)
    if results is not None:
        facts = _facts(settings, load, notes, started_at)
        write_results(results, settings, facts, result.records, totals, partial=result.interrupted)
    return _exit_code(totals, result)


async def _prepare(settings: LoadSettings, server: Server, file_prompts: list[Prompt] | None) -> PreparedLoad:
    model = await server.find_model(settings.model)
    optional = await negotiate(server, settings, model)
    if file_prompts is not None:
        count = settings.num_requests or len(file_prompts)
        used = [file_prompts[i % len(file_prompts)] for i in range(count + settings.num_warmup)]
        note = f"{min(count, len(file_prompts))} prompts of {settings.prompts_file}"
    else:
        assert settings.num_requests is not None, "random prompts have a number"
        count = settings.num_requests
        made = await _random_prompts(settings, server, model, count + settings.num_warmup)
        used, note = made.prompts, made.note
    repeated = max(0, count - len(file_prompts)) if file_prompts is not None else 0
    return PreparedLoad(model, optional, used[:count], used[count:], repeated, note)


async def _random_prompts(settings: LoadSettings, server: Server, model: str, count: int) -> PromptSet:
    assert settings.input_len is not None, "random prompts have a length"
    tokenizer = await server.find_tokenizer(model)
    if tokenizer is None:
        return word_prompts(count, settings.input_len, settings.seed)
    print(f"making {count} prompts with the server's tokenizer", file=sys.stderr)
    chat = settings.endpoint == "chat"
    return await token_prompts(tokenizer, count, settings.input_len, settings.seed, chat=chat)


async def _warm_up(settings: LoadSettings, server: Server, load: PreparedLoad) -> LoadResult:
    jobs = [
        Job(index, _body(settings, load, prompt, len(load.prompts) + index))
        for index, prompt in enumerate(load.warmup_prompts)
    ]
    return await _run(settings, server, jobs, settings.concurrency or DEFAULT_CONCURRENCY, "warm-up")


async def _run(
    settings: LoadSettings, server: Server, jobs: Sequence[Job], concurrency: int | None, label: str
) -> LoadResult:
    counts = LiveCounts()
    async with running_beside(show_progress(counts, len(jobs), label)):
        exchange = Exchange(server, endpoint_path(settings), start_clock(), counts)
        return await run_load(exchange, jobs, concurrency=concurrency)


def _jobs(settings: LoadSettings, load: PreparedLoad) -> list[Job]:
    count = len(load.prompts)
    cancelled = choose_cancelled(count, settings.cancel_rate, settings.output_len, settings.seed)
    arrivals: Sequence[float | None] = [None] * count
    if settings.rate is not None:
        arrivals = arrival_times(count, settings.rate, settings.burstiness, settings.seed)
    return [
        Job(
            index=index,
            body=_body(settings, load, prompt, index),
            known_prompt_tokens=prompt.num_tokens,
            intended_s=arrivals[index],
            cancel_after=cancelled.get(index),
        )
        for index, prompt in enumerate(load.prompts)
    ]


def _body(settings: LoadSettings, load: PreparedLoad, prompt: Prompt, index: int) -> bytes:
    return encode_body(
        request_body(settings, load.model, prompt, load.optional, index=index, output_len=settings.output_len)
    )


def _open_results(settings: LoadSettings) -> TextIO | None:
    """The results file, opened before the load so that a wrong path costs no run."""
    if settings.json_file is None:
        return None
    try:
        return settings.json_file.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {settings.json_file} cannot be written: {error.strerror}") from None


def _notes(settings: LoadSettings, load: PreparedLoad) -> list[str]:
    if settings.rate is None:
        how = f"closed loop, {settings.concurrency} at once"
    else:
        kind = "Poisson" if settings.burstiness == 1 else f"gamma (burstiness {settings.burstiness:g})"
        how = f"open loop, {settings.rate:g} requests/s, {kind} arrivals, not rescaled"
    notes = [
        f"Server: {settings.base_url}{endpoint_path(settings)}, model {load.model}",
        f"Load: {len(load.prompts)} requests, {how}, seed {settings.seed}",
        f"Prompts: {load.prompt_note}",
        f"Answers: at most {settings.output_len} tokens, temperature {settings.temperature:g}",
        f"Sent beyond the plain request: {', '.join(load.optional.names()) or 'nothing'}",
    ]
    wanted = OptionalFields(settings.ignore_eos, settings.ignore_eos, True, settings.chunk_usage).names()
    refused = [name for name in wanted if name not in load.optional.names()]
    if refused:
        notes.append(f"Left out, because the server refuses it: {', '.join(refused)}")
    if settings.cancel_rate:
        notes.append(f"Cancelled by the client: {settings.cancel_rate:.1%} of the requests, mid-stream")
    return notes


def _warmup_note(warmup: LoadResult) -> str:
    failed = [record for record in warmup.records if record.failure is not None]
    note = f"Warm-up: {len(warmup.records)} requests, not measured"
    if not failed or failed[0].failure is None:
        return note
    return f"{note}; {len(failed)} FAILED, such as {failed[0].failure.kind}: {failed[0].failure.message}"


def _short_answers(settings: LoadSettings, load: PreparedLoad, result: LoadResult) -> int:
    if not load.optional.ignore_eos:
        return 0
    done = [record for record in result.records if record.outcome is Outcome.OK]
    return sum(output_tokens(record) != settings.output_len for record in done)


def _facts(settings: LoadSettings, load: PreparedLoad, notes: list[str], started_at: datetime) -> dict[str, Any]:
    return {
        "started_at": started_at.isoformat(),
        "model": load.model,
        "path": endpoint_path(settings),
        "optional_fields": load.optional.names(),
        "notes": notes,
    }


def _exit_code(totals: Summary, result: LoadResult) -> int:
    if result.interrupted:
        return EXIT_INTERRUPTED
    sent = totals.num_requests - totals.unsent
    return EXIT_ALL_FAILED if totals.failed == sent else EXIT_OK
