"""Draws a memory plan: for a terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pageframe.runtime import memory_plan
from pageframe.runtime.errors import ConfigError
from pageframe.runtime.memory_plan import format_bytes
from pageframe.runtime.memory_tables import (
    block_size_rows,
    curve_lengths,
    dtype_rows,
    heads_rows,
    requests_that_fit,
)

if TYPE_CHECKING:
    from pageframe.api.plan_command import MeasuredPool, Plan

_TIMES = "\N{MULTIPLICATION SIGN}"
_INK = "#333333"
#: (colour, line, marker) of the plot's lines: Okabe and Ito's colours, and told apart without them too.
_STYLES = (("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"))


def draw_plan(plan: Plan) -> RenderableType:
    """The plan for a terminal: shape, formula, pool, and what fits."""
    return Group(_draw_model(plan), Text(), _draw_formula(plan), Text(), _draw_fits(plan), *_draw_notes(plan))


def _draw_model(plan: Plan) -> Text:
    model = plan.model
    if plan.weight_bytes is None:
        facts = [f"{model.num_heads} heads", f"head_dim {model.head_dim}", "a shape only: its weights are not counted"]
        return Text.assemble((plan.model_name, "bold"), "\n", (", ".join(facts), "dim"))
    facts = [
        model.family,
        f"{plan.num_parameters / 1e6:,.0f} M parameters",
        f"{model.num_layers} layers",
        f"{model.num_heads} heads",
        f"{model.num_kv_heads} KV heads of {model.head_dim}",
        f"hidden size {model.hidden_size:,}",
        f"vocabulary {model.vocab_size:,}",
        f"{model.max_position:,} positions",
    ]
    return Text.assemble((plan.model_name, "bold"), "\n", (", ".join(facts), "dim"))


def _factors(plan: Plan, num_tokens: int | None = None) -> tuple[str, str]:
    """The formula in words and in numbers: of one token, or of so many."""
    model = plan.model
    number_bytes, scale_bytes = memory_plan.KV_DTYPE_BYTES[plan.kv_dtype]
    factors = {"2 (K and V)": "2", "layers": f"{model.num_layers:,}", "KV heads": f"{model.num_kv_heads:,}"}
    if scale_bytes:  # beside numbers of one byte
        factors["(head_dim + scale)"] = f"({model.head_dim:,} + {scale_bytes})"
    else:
        factors["head_dim"] = f"{model.head_dim:,}"
    if num_tokens is not None:
        factors["tokens"] = f"{num_tokens:,}"
    if not scale_bytes:
        factors["bytes"] = str(number_bytes)
    times = f" {_TIMES} "
    return times.join(factors), times.join(factors.values())


def _draw_formula(plan: Plan) -> Table:
    names, numbers = _factors(plan)
    tokens = "1 token" if plan.block_size == 1 else f"{plan.block_size} tokens"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_row("formula", names)
    table.add_row(
        "one token",
        f"{numbers} ({plan.kv_dtype}) = {plan.bytes_per_token:,} bytes",
        format_bytes(plan.bytes_per_token),
    )
    table.add_row(
        "one block", f"{_TIMES} {tokens} = {plan.bytes_per_block:,} bytes", format_bytes(plan.bytes_per_block)
    )
    table.add_row(
        "one request",
        f"at most {plan.max_model_len:,} tokens (max_model_len)",
        format_bytes(plan.bytes_per_token * plan.max_model_len),
    )
    free = "free"
    if plan.weight_bytes is not None:
        free += f", of which the weights will take about {format_bytes(plan.weight_bytes)}"
    table.add_row("this machine", free, format_bytes(plan.free_bytes))
    pool = Text.assemble(f"{plan.num_blocks:,} blocks = {plan.pool_tokens:,} tokens ", (f"({plan.pool_rule})", "dim"))
    table.add_row("the pool", pool, format_bytes(plan.pool_bytes))
    return table


def _draw_fits(plan: Plan) -> Group:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("tokens each", "blocks each", "fit paged", "fit reserved", "gain"):
        table.add_column(heading, justify="right", header_style="cyan")
    for fit in plan.fits:
        gain = f"{_TIMES} {fit.paged / fit.reserved:.3g}"
        table.add_row(f"{fit.tokens:,}", f"{fit.blocks:,}", Text(f"{fit.paged:,}", "bold"), f"{fit.reserved:,}", gain)
    caption = f": paged (blocks as needed), or {plan.max_model_len:,} tokens reserved for each"
    return Group(Text.assemble(("Requests at once", "bold"), caption), table)


def _draw_notes(plan: Plan) -> list[Text]:
    notes = []
    if any(fit.paged > plan.max_num_requests for fit in plan.fits):
        notes.append(Text(f"At most {plan.max_num_requests:,} run at once (max_num_requests).", "dim"))
    if plan.max_model_len < plan.model.max_position and plan.max_model_len == plan.pool_tokens:
        notes.append(
            Text(f"The pool bounds max_model_len; the model has {plan.model.max_position:,} positions.", "yellow")
        )
    if plan.exceeds_machine:
        free = format_bytes(plan.free_bytes)
        notes.append(Text(f"The pool is for a larger machine: {free} are free here, weights included.", "yellow"))
    return [Text(), *notes] if notes else []


def draw_details(plan: Plan, measured: MeasuredPool | None) -> RenderableType:
    """The formula over all its factors beside a real pool, and what each choice changes."""
    lengths = [fit.tokens for fit in plan.fits]
    return Group(
        Text(),
        _draw_measured(plan, measured),
        Text(),
        _draw_heads(plan),
        Text(),
        _draw_block_sizes(plan, lengths),
        Text(),
        _draw_dtypes(plan),
    )


def _draw_measured(plan: Plan, measured: MeasuredPool | None) -> Group:
    names, numbers = _factors(plan, plan.max_model_len)
    total = plan.bytes_per_token * plan.max_model_len
    lines = [
        Text.assemble(("Worked out", "bold"), f": {names}"),
        Text.assemble(f"  {numbers} = {total:,} bytes = ", (format_bytes(total), "bold")),
    ]
    if measured is None:
        lines.append(Text("  not measured: no small real pool was allocated", "dim"))
    else:
        tokens = measured.num_blocks * plan.block_size
        formula = plan.bytes_per_token * tokens
        verdict = "the same" if measured.allocated == formula else f"{measured.allocated - formula:+,} bytes"
        blocks = "1 block" if measured.num_blocks == 1 else f"{measured.num_blocks:,} blocks"
        lines.append(Text(f"  a real pool of {blocks} ({tokens:,} tokens): {measured.allocated:,} bytes allocated"))
        lines.append(Text.assemble(f"  the formula says {formula:,} bytes: ", (verdict, "bold")))
        if measured.resident is not None:
            over = measured.resident - formula
            lines.append(Text(f"  written whole, it took {measured.resident:,} bytes of this process's RAM: {over:+,}"))
    return Group(*lines)


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", header_style="cyan")
    return table


def _draw_heads(plan: Plan) -> Group:
    table = _table("KV heads", "number", "bytes a token", "of one each")
    for row in heads_rows(plan.model, plan.kv_dtype):
        table.add_row(row.name, f"{row.num_kv_heads:,}", f"{row.bytes_per_token:,}", f"{_TIMES} {row.ratio:.3g}")
    return Group(Text(f"Heads that share K and V: the model has {plan.model.num_heads} heads", "bold"), table)


def _draw_block_sizes(plan: Plan, lengths: Sequence[int]) -> Group:
    table = _table("block size", "a block", "unused", *(f"at {length:,}" for length in lengths))
    for row in block_size_rows(plan.bytes_per_token, lengths):
        shares = (f"{share:.2%}" for share in row.wasted)
        chosen = "bold" if row.block_size == plan.block_size else ""
        table.add_row(
            str(row.block_size), format_bytes(row.bytes_per_block), f"{row.mean_tail:g}", *shares, style=chosen
        )
    caption = ": slots of a request's last block unused on average, and their share"
    return Group(Text.assemble(("Block size", "bold"), caption), table)


def _draw_dtypes(plan: Plan) -> Group:
    table = _table("K and V as", "bytes a token", "tokens in the pool")
    for row in dtype_rows(plan.model, plan.pool_bytes):
        _, scale_bytes = memory_plan.KV_DTYPE_BYTES[row.name]
        name = f"{row.name} with its scales" if scale_bytes else row.name
        chosen = "bold" if row.name == plan.kv_dtype else ""
        table.add_row(name, f"{row.bytes_per_token:,}", f"{row.pool_tokens:,}", style=chosen)
    return Group(Text.assemble(("Type", "bold"), f": the same {format_bytes(plan.pool_bytes)}"), table)


def save_plot(plan: Plan, path: Path) -> None:
    """Requests that fit against the length of each, for three sizes of the pool, and with the longest reserved.

    Raises:
        ConfigError: the file can't be written, or its kind is unknown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    settings: Any = {
        **ink,
        "font.size": 11,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "svg.hashsalt": "pageframe",
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(9, 5.5))
        lengths = curve_lengths(plan.max_model_len)
        for (color, line, marker), factor in zip(_STYLES, (2.0, 1.0, 0.5), strict=True):
            num_blocks = max(1, int(plan.num_blocks * factor))
            label = f"{format_bytes(num_blocks * plan.bytes_per_block)}, paged"
            fits = [requests_that_fit(length, num_blocks, plan.block_size) for length in lengths]
            axes.plot(lengths, fits, color=color, linestyle=line, marker=marker, markevery=8, linewidth=2, label=label)
        reserved = plan.pool_tokens // plan.max_model_len
        label = f"{format_bytes(plan.pool_bytes)}, {plan.max_model_len:,} tokens reserved for each"
        axes.plot(lengths, [reserved] * len(lengths), color="#CC79A7", linestyle=":", linewidth=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
        axes.set_xlabel("context of each request (tokens)")
        axes.set_ylabel("requests that fit at once")
        axes.set_title(f"{plan.model_name}: {plan.bytes_per_token:,} bytes a token in {plan.kv_dtype}")
        axes.grid(color="#DDDDDD")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.tight_layout()
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise ConfigError(f"plot is {path}; it can't be written: {error}") from error
        finally:
            pyplot.close(figure)
