"""`pageframe plan`: the memory of the KV cache worked out with a model's own numbers.

Reads the model's shape and this machine's free memory; loads no weights, imports no torch, speaks to no server. So it
knows nothing of a GPU's memory: for one, say its size with --kv-memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pageframe.runtime import memory_plan
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.errors import StartupError
from pageframe.runtime.memory_plan import PoolSize, format_bytes
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

REQUEST_LENGTHS = (128, 512, 2048, 8192)
_TIMES = "\N{MULTIPLICATION SIGN}"

#: EngineConfig's fields that decide the plan, and how the command line reads each.
_FLAGS = {
    "model": str,
    "dtype": str,
    "block_size": int,
    "num_blocks": int,
    "kv_memory": str,
    "max_model_len": int,
    "max_num_requests": int,
}


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests of one length fit in the pool at once.

    Args:
        tokens: context of each request.
        blocks: what each takes when paged.
        paged, reserved: how many fit in blocks taken as needed, and with max_model_len slots set aside for each.
    """

    tokens: int
    blocks: int
    paged: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of one plan. Sizes in bytes.

    Args:
        weight_bytes: an estimate from the model's shape.
        pool_rule: what the pool's size follows from, in words.
    """

    model_name: str
    model: ModelConfig
    dtype: str
    block_size: int
    bytes_per_token: int
    bytes_per_block: int
    free_bytes: int
    weight_bytes: int
    num_blocks: int
    pool_rule: str
    max_model_len: int
    max_num_requests: int
    fits: tuple[Fit, ...]

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def exceeds_machine(self) -> bool:
        """Whether the pool asked for is larger than what this machine has left beside the weights."""
        return self.pool_bytes > self.free_bytes - self.weight_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    for name, kind in _FLAGS.items():
        field = fields[name]
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=field.default,
            choices=field.metadata["choices"] or None,
            help=field.metadata["help"],
        )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 and one line on stderr where the model, a flag or the memory does not allow one."""
    try:
        plan = make_plan(_engine_config(args))
    except StartupError as error:
        Console(stderr=True).print(f"pageframe: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console = Console(highlight=False)
    if args.json:
        console.out(json.dumps(plan_json(plan), indent=2), highlight=False)
    else:
        console.print(draw_plan(plan))
    return 0


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    values = {name: getattr(args, name) for name in _FLAGS}
    if values["kv_memory"] is not None:
        values["kv_memory"] = memory_plan.parse_bytes(values["kv_memory"])
    # The token budget plays no part here; it only has to pass the check against max_num_requests.
    budget = max(EngineConfig.__dataclass_fields__["max_num_batched_tokens"].default, args.max_num_requests)
    return EngineConfig(**values, max_num_batched_tokens=budget)


def make_plan(config: EngineConfig, *, free_bytes: int | None = None) -> Plan:
    """Work the plan out. A pool that was asked for may be larger than this machine's memory: it may be for another.

    Args:
        free_bytes: memory to plan with; None measures this machine's.

    Raises:
        StartupError: the model cannot be read, a setting contradicts it, or not one block fits.
    """
    source = resolve_source(config.model)
    model = load_model_config(source)
    free_bytes = memory_plan.free_memory() if free_bytes is None else free_bytes
    weight_bytes = num_parameters(model) * memory_plan.DTYPE_BYTES[config.dtype]
    bytes_per_token = memory_plan.kv_bytes_per_token(model, config.dtype)
    left_bytes = max(0, free_bytes - weight_bytes)
    asked = (config.num_blocks or 0) * bytes_per_token * config.block_size or config.kv_memory or 0
    pool = memory_plan.size_pool(config, model, available=max(left_bytes, asked), cap=memory_plan.CPU_POOL_CAP)
    max_model_len = pool.max_model_len
    lengths = sorted({length for length in REQUEST_LENGTHS if length < max_model_len} | {max_model_len})
    return Plan(
        model_name=source.name,
        model=model,
        dtype=config.dtype,
        block_size=config.block_size,
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_token * config.block_size,
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        num_blocks=pool.num_blocks,
        pool_rule=_pool_rule(config, pool, asked, left_bytes),
        max_model_len=max_model_len,
        max_num_requests=config.max_num_requests,
        fits=tuple(_fit(length, pool.num_blocks, config.block_size, max_model_len) for length in lengths),
    )


def _pool_rule(config: EngineConfig, pool: PoolSize, asked: int, available: int) -> str:
    """What the pool's size follows from, in words."""
    if asked:
        return "as asked for"
    if pool.num_blocks == pool.enough:
        return f"all that {config.max_num_requests:,} requests can use"
    if available * memory_plan.POOL_SHARE >= memory_plan.CPU_POOL_CAP:
        return "the cap on a CPU"
    return f"{memory_plan.POOL_SHARE:.0%} of what the weights leave"


def _fit(tokens: int, num_blocks: int, block_size: int, max_model_len: int) -> Fit:
    blocks = -(-tokens // block_size)
    return Fit(tokens, blocks, paged=num_blocks // blocks, reserved=num_blocks * block_size // max_model_len)


def num_parameters(model: ModelConfig) -> int:
    """Weights of the decoder, counted from its shape; biases and the norms of q and k, which are few, left out."""
    hidden = model.hidden_size
    attention = 2 * hidden * model.head_dim * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * layer + embeddings + hidden


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object; sizes are in bytes."""
    return {
        "model": {
            "name": plan.model_name,
            "family": plan.model.family,
            "num_layers": plan.model.num_layers,
            "num_heads": plan.model.num_heads,
            "num_kv_heads": plan.model.num_kv_heads,
            "head_dim": plan.model.head_dim,
            "hidden_size": plan.model.hidden_size,
            "vocab_size": plan.model.vocab_size,
            "max_position": plan.model.max_position,
            "num_parameters": num_parameters(plan.model),
        },
        "dtype": plan.dtype,
        "block_size": plan.block_size,
        "bytes": {"per_token": plan.bytes_per_token, "per_block": plan.bytes_per_block, "pool": plan.pool_bytes},
        "num_blocks": plan.num_blocks,
        "pool_tokens": plan.pool_tokens,
        "max_model_len": plan.max_model_len,
        "max_num_requests": plan.max_num_requests,
        "machine": {
            "free_bytes": plan.free_bytes,
            "weight_bytes": plan.weight_bytes,
            "exceeded": plan.exceeds_machine,
        },
        "requests": [dataclasses.asdict(fit) for fit in plan.fits],
    }


def draw_plan(plan: Plan) -> RenderableType:
    """The plan for a terminal: shape, formula, pool, and what fits."""
    return Group(_draw_model(plan), Text(), _draw_formula(plan), Text(), _draw_fits(plan), *_draw_notes(plan))


def _draw_model(plan: Plan) -> Text:
    model = plan.model
    facts = [
        model.family,
        f"{num_parameters(model) / 1e6:,.0f} M parameters",
        f"{model.num_layers} layers",
        f"{model.num_heads} heads",
        f"{model.num_kv_heads} KV heads of {model.head_dim}",
        f"hidden size {model.hidden_size:,}",
        f"vocabulary {model.vocab_size:,}",
        f"{model.max_position:,} positions",
    ]
    return Text.assemble((plan.model_name, "bold"), "\n", (", ".join(facts), "dim"))


def _draw_formula(plan: Plan) -> Table:
    model, element = plan.model, memory_plan.DTYPE_BYTES[plan.dtype]
    factors = [2, model.num_layers, model.num_kv_heads, model.head_dim, element]
    names = ["2 (K and V)", "layers", "KV heads", "head_dim", "bytes"]
    tokens = "1 token" if plan.block_size == 1 else f"{plan.block_size} tokens"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_row("formula", f" {_TIMES} ".join(names))
    table.add_row(
        "one token",
        f" {_TIMES} ".join(map(str, factors)) + f" ({plan.dtype}) = {plan.bytes_per_token:,} bytes",
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
    weights = f"free, of which the weights will take about {format_bytes(plan.weight_bytes)}"
    table.add_row("this machine", weights, format_bytes(plan.free_bytes))
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
