"""What the parts of the GPU script write and its report reads: rows of one table, kept in a file as they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: What a row says of itself: as good as it must be, not as good, and not measured.
OK, SHORT, FAILED, NOT_MEASURED = "ok", "short", "FAILED", "not measured"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        part, case: what was measured.
        value: the figure, with its unit.
        share: of the limit that was measured here.
        verdict: OK, SHORT, FAILED, NOT_MEASURED, or "" where nothing is asked of it.
        note: targets, others' figures, reasons.
        numbers: the raw figures, in SI units.
    """

    part: str
    case: str
    value: str = ""
    share: str = ""
    verdict: str = ""
    note: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


class Results:
    """Rows in a file. Each is written at once: a part that is stopped leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self._rows.append(row)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps([asdict(each) for each in self._rows]))
        fresh.replace(self._path)


@contextmanager
def measuring(results: Results, part: str, case: str) -> Iterator[None]:
    """Within this a case is measured: if that fails, a row says why, and what comes after it runs all the same."""
    try:
        yield
    except Exception as problem:  # a kernel that can't be compiled or launched there must not hide the others
        reason = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        results.add(Row(part, case, verdict=FAILED, note=reason[:300]))


def read_rows(path: Path) -> list[Row]:
    """The rows that a part left; none where it left no file."""
    return [Row(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def format_table(rows: Iterable[Row]) -> str:
    """The rows as plain text: nothing that prints better may be installed there."""
    head = ("part", "case", "value", "share", "verdict", "note")
    cells = [head] + [(row.part, row.case, row.value, row.share, row.verdict, row.note) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
