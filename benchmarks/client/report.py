"""The tables and warnings that a person reads after a load. It computes no measure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pageframe.benchmarks.client import measures, summary
from pageframe.benchmarks.client.measures import Distribution
from pageframe.benchmarks.client.record import CountedBy
from pageframe.benchmarks.client.summary import Summary

# the client's own delay matters once it is both noticeable and a good part of the latency that it distorts
LATE_CLIENT_S = 0.010
LATE_CLIENT_SHARE = 0.1
# without a terminal nothing says how wide a line may be; narrower, the formulas would wrap
PLAIN_WIDTH = 132

COUNTED_BY_WORDS = {
    CountedBy.USAGE: "told by a running usage in each chunk",
    CountedBy.LOGPROBS: "told by the logprobs in each chunk",
    CountedBy.CHUNKS: "one a chunk",
    CountedBy.SPREAD: "the final usage's total, spread evenly over the chunks (their number differs from it)",
}


def print_report(notes: Sequence[str], totals: Summary, warnings: Sequence[str], *, interrupted: bool) -> None:
    """Print the report on stdout: notes, the tables, failures, warnings."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    if interrupted:
        sent = totals.num_requests - totals.unsent
        console.print(f"PARTIAL: stopped by Ctrl-C after {sent} of {totals.num_requests} requests were sent")
    for note in notes:
        console.print(escape(note))
    console.print(_latency_table(totals))
    console.print(_rate_table(totals))
    counted = [f"{COUNTED_BY_WORDS[how]} in {count} answers" for how, count in totals.counted_by.items()]
    if counted:
        console.print(escape("Tokens of a chunk: " + "; ".join(counted) + "."))
    console.print(escape(f"Percentiles: {measures.PERCENTILE_DEFINITION}. Latencies are of completed requests."))
    for group in totals.failures:
        console.print(escape(f"FAILED {group.count} x {group.kind}: {group.example}"))
    for warning in warnings:
        console.print(escape(f"WARNING: {warning}"))


def find_warnings(totals: Summary, *, short_answers: int = 0, repeated_prompts: int = 0) -> list[str]:
    """What a reader must know before believing the numbers.

    Args:
        short_answers: completed answers of another length than wanted, although end tokens were to be ignored.
        repeated_prompts: requests whose prompt another request of this load had too.
    """
    warnings = []
    for what, seen, measured in (
        ("sent requests late", totals.lateness, totals.ttft),
        ("saw events late", totals.loop_lag, totals.itl),
    ):
        typical = measured.p50 if measured is not None else 0.0
        if seen is not None and seen.p99 > max(LATE_CLIENT_S, LATE_CLIENT_SHARE * typical):
            warnings.append(
                f"the client {what} (p99 {_milliseconds(seen.p99)} ms): it, not the server, may be the bottleneck"
            )
    if totals.cached_tokens > 0:
        warnings.append(
            f"{totals.cached_tokens} prompt tokens came from the server's prefix cache; if an earlier run warmed it, "
            "use another --seed or clear the cache"
        )
    if repeated_prompts:
        warnings.append(f"{repeated_prompts} requests repeat another request's prompt, which a prefix cache answers")
    if short_answers:
        warnings.append(
            f"{short_answers} answers do not have --output-len tokens: the server did not ignore end tokens"
        )
    if totals.no_token:
        warnings.append(f"{totals.no_token} completed requests gave no token; they have no TTFT")
    return warnings


def _latency_table(totals: Summary) -> Table:
    table = Table(title="Latency, milliseconds", title_justify="left")
    table.add_column("measure")
    for name in ("mean", "p50", "p90", "p99", "values"):
        table.add_column(name, justify="right")
    table.add_column("formula")
    rows = (
        ("TTFT", totals.ttft, measures.TTFT_FORMULA),
        ("TPOT", totals.tpot, measures.TPOT_FORMULA),
        ("ITL", totals.itl, measures.ITL_FORMULA),
        ("E2E", totals.e2e, measures.E2E_FORMULA),
        ("client lateness", totals.lateness, measures.LATENESS_FORMULA),
        ("client loop lag", totals.loop_lag, "how late a timer of the client ends"),
    )
    for name, seen, formula in rows:
        table.add_row(name, *_cells(seen), formula)
    return table


def _cells(seen: Distribution | None) -> list[str]:
    if seen is None:
        return ["-", "-", "-", "-", "0"]
    return [*(_milliseconds(value) for value in (seen.mean, seen.p50, seen.p90, seen.p99)), str(seen.count)]


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.2f}"


def _rate_table(totals: Summary) -> Table:
    table = Table(title="Throughput and counts", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("formula")
    unknown = "unknown: the server sends no usage"
    total_rate = f"{totals.total_rate:.2f}" if totals.total_rate is not None else "-"
    rows = [
        ("output tokens/s", f"{totals.output_rate:.2f}", summary.OUTPUT_RATE_FORMULA),
        ("total tokens/s", total_rate, summary.TOTAL_RATE_FORMULA if totals.total_rate is not None else unknown),
        ("requests/s", f"{totals.request_rate:.3f}", summary.REQUEST_RATE_FORMULA),
        ("duration, s", f"{totals.duration_s:.3f}", summary.DURATION_FORMULA),
        ("completed", f"{totals.completed} of {totals.num_requests}", "answers read to their end"),
        ("failed", str(totals.failed), "nothing is retried"),
        ("cancelled", str(totals.cancelled), f"by --cancel-rate, after {totals.cancelled_tokens} tokens in all"),
        ("peak concurrency", str(totals.peak_concurrency), "most requests between actual send and end at once"),
        ("prompt tokens", _count(totals.prompt_tokens), "of completed requests, by the server's usage"),
        ("output tokens", str(totals.output_tokens), "of completed requests, by the server's usage, else chunks"),
        ("cached prompt tokens", str(totals.cached_tokens), "by the server's usage"),
    ]
    if totals.goodput is not None:
        judged = totals.completed + totals.failed
        rows.append(("goodput, requests/s", f"{totals.goodput:.3f}", f"{summary.GOODPUT_FORMULA}; failures miss"))
        rows.append(("good requests", f"{totals.good} of {judged}", "met every objective of --slo; itl: longest gap"))
    if totals.interrupted or totals.unsent:
        rows.append(("interrupted", str(totals.interrupted), "running when Ctrl-C came"))
        rows.append(("never sent", str(totals.unsent), "left when Ctrl-C came"))
    for row in rows:
        table.add_row(*row)
    return table


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
