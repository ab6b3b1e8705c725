"""What `pageframe bench phases` measured, and how it is shown. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from pageframe.benchmarks.experiments.grids import legend_below, plain_log_axes
from pageframe.benchmarks.experiments.report import (
    COLORS,
    INK,
    NOT_MEASURED,
    draw_line,
    new_figure,
    save_figure,
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation of one request after the other: each turn adds `prompt` tokens and gets `answer` tokens."""

    name: str
    turns: int
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return self.turns * (self.prompt + self.answer)


@dataclass(slots=True)
class ChatCost:
    """What a conversation took; sums over its turns.

    Args:
        cached_tokens: prompt tokens found computed.
        first_tokens: seconds to the first token of each turn.
        prefill_floor, decode_floor: the least seconds possible.
        decoded_tokens: tokens behind the first one of each turn.
    """

    chat: Chat
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    prefill_floor: float = 0.0
    decode_seconds: float = 0.0
    decode_floor: float = 0.0
    decoded_tokens: int = 0

    @property
    def prefill_seconds(self) -> float:
        return sum(self.first_tokens)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """Seconds as measured (a median), the floor's, and what the floor is made of."""

    seconds: float
    floor: float
    bound: str

    @property
    def share(self) -> float:
        """The floor's part of the time: 1 is as fast as it can be."""
        return self.floor / self.seconds


Key = Chat | int | tuple[int, int]


@dataclass(slots=True)
class Results:
    """Everything the report needs.

    Args:
        notes: sentences on what the model has no room for.
        chats: those that were held to their end.
        first_tokens: to the first token, by prompt length.
        decode: of one step, by (context, number of requests).
        skipped: why a chat, a prompt length or a (context, number of requests) was not measured.
    """

    prompt_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    requests: tuple[int, ...]
    planned_chats: tuple[Chat, ...]
    notes: tuple[str, ...] = ()
    machine: str = ""
    chats: dict[Chat, ChatCost] = field(default_factory=dict)
    first_tokens: dict[int, Cell] = field(default_factory=dict)
    decode: dict[tuple[int, int], Cell] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether anything was that a plot shows."""
        return bool(self.first_tokens or self.decode)

    def not_measured(self, key: Key) -> str:
        """A table's cell: what was reached neither measured nor skipped was interrupted."""
        return f"{NOT_MEASURED}: {self.skipped.get(key, 'interrupted')}"

    def as_json(self) -> dict[str, Any]:
        return {
            "hardware": self.machine,
            "notes": self.notes,
            "chats": [asdict(cost) for cost in self.chats.values()],
            "first_tokens": {length: asdict(cell) for length, cell in self.first_tokens.items()},
            "decode": [
                {"context": context, "requests": requests, **asdict(cell)}
                for (context, requests), cell in self.decode.items()
            ],
            "not_measured": {
                "chats": {chat.name: self.not_measured(chat) for chat in self.planned_chats if chat not in self.chats},
                "first_tokens": {n: self.not_measured(n) for n in self.prompt_lens if n not in self.first_tokens},
                "decode": [
                    {"context": context, "requests": requests, "why": self.not_measured((context, requests))}
                    for context in self.contexts
                    for requests in self.requests
                    if (context, requests) not in self.decode
                ],
            },
        }


def print_report(console: Console, results: Results, partial: bool) -> None:
    """Tables and sentences."""
    console.print(results.machine)
    for note in results.notes:
        console.print(note, style="dim")
    if partial:
        console.print("Interrupted: this is partial, only what was measured until then.", style="bold")
    console.print(_chats(results))
    console.print(_first_tokens(results))
    console.print(_decode(results))
    for sentence in sentences(results):
        console.print(sentence, soft_wrap=True)


def _chats(results: Results) -> Table:
    table = Table(title="one request at a time; percents are the floor's part of the time, 100% is as fast as can be")
    columns = ("", "prompt (found)", "answers", "first token, ms", "prefill, s", "decode, s", "decoded tokens/s")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for chat in results.planned_chats:
        cost = results.chats.get(chat)
        cells = [results.not_measured(chat)] + [""] * 5
        if cost is not None:
            cells = [
                f"{cost.prompt_tokens:,} ({cost.cached_tokens:,})",
                f"{chat.turns * chat.answer:,}",
                f"{median(cost.first_tokens) * 1e3:.0f}",
                f"{cost.prefill_seconds:.2f} ({cost.prefill_floor / cost.prefill_seconds:.0%})",
                f"{cost.decode_seconds:.2f} ({cost.decode_floor / cost.decode_seconds:.0%})",
                f"{cost.decoded_tokens / cost.decode_seconds:.1f}",
            ]
        table.add_row(chat.name, *cells)
    return table


def _first_tokens(results: Results) -> Table:
    table = Table(title="time to first token, one request")
    for column in ("prompt tokens", "ms", "prompt tokens/s", "floor, ms", "bound by", "floor / measured"):
        table.add_column(column, justify="right")
    for length in results.prompt_lens:
        cell = results.first_tokens.get(length)
        cells = [results.not_measured(length)] + [""] * 4
        if cell is not None:
            cells = [f"{cell.seconds * 1e3:.0f}", f"{length / cell.seconds:,.0f}", f"{cell.floor * 1e3:.0f}"]
            cells += [cell.bound, f"{cell.share:.0%}"]
        table.add_row(f"{length:,}", *cells)
    return table


def _decode(results: Results) -> Table:
    table = Table(title="decode")
    for column in ("requests", "context", "ms a step", "tokens/s", "floor, tokens/s", "bound by", "floor / measured"):
        table.add_column(column, justify="right")
    for requests in results.requests:
        for context in results.contexts:
            cell = results.decode.get((context, requests))
            cells = [results.not_measured((context, requests))] + [""] * 4
            if cell is not None:
                cells = [f"{cell.seconds * 1e3:.1f}", f"{requests / cell.seconds:.1f}", f"{requests / cell.floor:.1f}"]
                cells += [cell.bound, f"{cell.share:.0%}"]
            table.add_row(f"{requests:,}", f"{context:,}", *cells)
        table.add_section()
    return table


def sentences(results: Results) -> Iterator[str]:
    """Each phase in words."""
    if results.first_tokens:
        length = max(results.first_tokens)
        cell = results.first_tokens[length]
        yield (
            f"Prefill: a prompt of {length:,} tokens has its first token after {cell.seconds:.2f} s, "
            f"{length / cell.seconds:,.0f} tokens/s; {cell.bound} alone would take {cell.floor:.2f} s, "
            f"{cell.share:.0%} of that."
        )
    if results.decode:
        context = max(context for context, _ in results.decode)
        numbers = [requests for requests in results.requests if (context, requests) in results.decode]
        answers = []
        for requests in dict.fromkeys((numbers[0], numbers[-1])):
            cell = results.decode[context, requests]
            answers.append(
                f"{requests:,} request{'' if requests == 1 else 's'} get{'s' if requests == 1 else ''} "
                f"{requests / cell.seconds:.1f} tokens/s, {cell.share:.0%} of what {cell.bound} allows"
            )
        yield f"Decode: at a context of {context:,} tokens " + "; ".join(answers) + "."
    if not results.measured:
        yield f"Prefill and decode were {NOT_MEASURED}."


def plot(results: Results, path: Path) -> None:
    """Time to first token against prompt length, and tokens per second against context, each with its floor."""
    figure, (prefill, decode) = new_figure(1, 2)
    if results.first_tokens:
        lengths = sorted(results.first_tokens)
        cells = [results.first_tokens[length] for length in lengths]
        draw_line(prefill, 0, "measured", lengths, [cell.seconds for cell in cells])
        prefill.plot(lengths, [cell.floor for cell in cells], color=COLORS[0], marker="_", linewidth=1, label="floor")
    plain_log_axes(prefill, results.prompt_lens)
    prefill.set(xlabel="prompt tokens", ylabel="seconds to the first token", title="prefill, 1 request")
    legend_below(prefill)

    for index, requests in enumerate(results.requests):
        contexts = [context for context in results.contexts if (context, requests) in results.decode]
        if contexts:
            cells = [results.decode[context, requests] for context in contexts]
            name = f"{requests:,} request{'' if requests == 1 else 's'}"
            draw_line(decode, index, name, contexts, [requests / cell.seconds for cell in cells])
            floor = [requests / cell.floor for cell in cells]
            decode.plot(contexts, floor, color=COLORS[index % len(COLORS)], marker="_", linewidth=1)
    plain_log_axes(decode, results.contexts)
    decode.set(xlabel="context, tokens", ylabel="decoded tokens per second", title="decode")
    decode.plot([], [], color=INK, marker="_", linewidth=1, label="the floor's limit")
    legend_below(decode)
    save_figure(figure, path)
