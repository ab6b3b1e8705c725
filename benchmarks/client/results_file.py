"""The per-request results as JSON lines. It does not know how they were measured.

One JSON object a line, told apart by "type":

- first line, `header`: "version" (of this format), "started_at" (UTC), "settings" (every flag but the API key),
  "model", "path", "optional_fields" (sent beyond the plain request), "notes" and "formulas".
- one `request` line per request that was sent, by "index": "intended_s", "sent_s", "first_token_s", "end_s" (seconds
  from the start of the load, by the client's monotonic clock; null: did not happen), "chunk_times_s" and
  "chunk_tokens" (when each chunk with content was read, how many tokens it carried), "tokens_counted_by" (usage,
  logprobs, chunks, spread), "prompt_tokens", "output_tokens", "cached_tokens", "outcome" (ok, failed, cancelled,
  interrupted), "finish_reason", "error" (null, or {"kind", "message"}), and "ttft_s", "tpot_s", "e2e_s" (null where
  not defined, or not completed).
- last line, `summary`: the fields of summary.Summary, and "partial" (true: Ctrl-C ended the load early).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, TextIO

from pageframe.benchmarks.client import measures, summary
from pageframe.benchmarks.client.measures import chunk_tokens, latencies, output_tokens, prompt_tokens
from pageframe.benchmarks.client.record import Outcome, RequestRecord
from pageframe.benchmarks.client.settings import LoadSettings
from pageframe.benchmarks.client.summary import Summary

FORMAT_VERSION = 1
FORMULAS = {
    "ttft": measures.TTFT_FORMULA,
    "tpot": measures.TPOT_FORMULA,
    "itl": measures.ITL_FORMULA,
    "e2e": measures.E2E_FORMULA,
    "lateness": measures.LATENESS_FORMULA,
    "percentile": measures.PERCENTILE_DEFINITION,
    "duration": summary.DURATION_FORMULA,
    "request_rate": summary.REQUEST_RATE_FORMULA,
    "output_rate": summary.OUTPUT_RATE_FORMULA,
    "total_rate": summary.TOTAL_RATE_FORMULA,
    "goodput": summary.GOODPUT_FORMULA,
}


def write_results(
    file: TextIO,
    settings: LoadSettings,
    facts: dict[str, Any],
    records: list[RequestRecord],
    totals: Summary,
    *,
    partial: bool,
) -> None:
    """Write all lines. `facts` are the header's fields beyond settings and formulas."""
    for line in _lines(settings, facts, records, totals, partial=partial):
        file.write(json.dumps(line, default=str) + "\n")


def _lines(
    settings: LoadSettings,
    facts: dict[str, Any],
    records: list[RequestRecord],
    totals: Summary,
    *,
    partial: bool,
) -> Iterator[dict[str, Any]]:
    flags = dataclasses.asdict(settings)
    del flags["api_key"]
    if settings.burstiness == float("inf"):
        flags["burstiness"] = "inf"  # JSON has no infinity
    yield {"type": "header", "version": FORMAT_VERSION, **facts, "settings": flags, "formulas": FORMULAS}
    for record in records:
        yield {"type": "request", **request_fields(record)}
    yield {"type": "summary", "partial": partial, **dataclasses.asdict(totals)}


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The `request` line of one record, without its type."""
    tokens, counted_by = chunk_tokens(record.chunks, record.output_tokens)
    seen = latencies(record) if record.outcome is Outcome.OK else None
    return {
        "index": record.index,
        "intended_s": record.intended_s,
        "sent_s": record.sent_s,
        "first_token_s": record.chunks[0].time_s if record.chunks else None,
        "end_s": record.end_s,
        "chunk_times_s": [chunk.time_s for chunk in record.chunks],
        "chunk_tokens": tokens,
        "tokens_counted_by": counted_by,
        "prompt_tokens": prompt_tokens(record),
        "output_tokens": output_tokens(record),
        "cached_tokens": record.cached_tokens,
        "outcome": record.outcome,
        "finish_reason": record.finish_reason,
        "error": dataclasses.asdict(record.failure) if record.failure is not None else None,
        "ttft_s": seen.ttft_s if seen is not None else None,
        "tpot_s": seen.tpot_s if seen is not None else None,
        "e2e_s": seen.e2e_s if seen is not None else None,
    }
