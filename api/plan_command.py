"""`pageframe plan`: the memory of the KV cache worked out with a model's own numbers.

Reads the model's shape and this machine's free memory; loads no weights, speaks to no server. So it knows nothing of a
GPU's memory: for one, say its size with --kv-memory. The one thing that takes torch is the small real pool whose bytes
stand beside the formula's; --no-measure leaves it out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pageframe.api.plan_drawing import draw_details, draw_plan, save_plot
from pageframe.runtime import memory_plan
from pageframe.runtime.config import DEFAULT_MODEL, EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError, StartupError
from pageframe.runtime.memory_plan import PoolSize, num_parameters
from pageframe.runtime.memory_tables import block_size_rows, dtype_rows, heads_rows, requests_that_fit
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

REQUEST_LENGTHS = (128, 512, 2048, 8192)
#: The worked example: 4,096 tokens of such a model take 2 GiB.
EXAMPLE_SHAPE, EXAMPLE_TOKENS = "32,32,32,128", 4096
#: Of each number of a shape: its name and the most it may be, far beyond any model.
SHAPE_LIMITS = (("layers", 1000), ("heads", 65_536), ("KV heads", 65_536), ("head_dim", 65_536))
#: A measured pool takes about the first, enough to be seen in a process's memory; one block is measured whatever it
#: takes, up to the second.
MEASURED_BYTES, MEASURED_BLOCK_LIMIT = 64 * 2**20, 256 * 2**20
EXIT_BAD_INPUT = 2

#: EngineConfig's fields that decide the plan, and how the command line reads each.
_FLAGS = {
    "model": str,
    "dtype": str,
    "block_size": int,
    "num_blocks": int,
    "kv_memory": str,
    "kv_dtype": str,
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
        kv_dtype: what K and V are stored as: "bf16", "float32", "int8" or "fp8".
        weight_bytes: an estimate from the model's shape; None where only the shape of K and V is known.
        pool_rule: what the pool's size follows from, in words.
    """

    model_name: str
    model: ModelConfig
    dtype: str
    kv_dtype: str
    block_size: int
    bytes_per_token: int
    bytes_per_block: int
    free_bytes: int
    weight_bytes: int | None
    num_blocks: int
    pool_rule: str
    max_model_len: int
    max_num_requests: int
    fits: tuple[Fit, ...]

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def exceeds_machine(self) -> bool:
        """Whether the pool asked for is larger than what this machine has left beside the weights."""
        return self.pool_bytes > self.free_bytes - (self.weight_bytes or 0)


@dataclass(frozen=True, slots=True)
class MeasuredPool:
    """A small real pool, in bytes.

    Args:
        num_blocks: with which it was allocated.
        allocated: size of its storage.
        resident: by how much this process's memory in RAM grew until all of the pool was written; None where the
            system does not tell.
    """

    num_blocks: int
    allocated: int
    resident: int | None


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
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--shape", metavar="LAYERS,HEADS,KV_HEADS,HEAD_DIM", help="plan for a model of this shape instead of a file's"
    )
    shape.add_argument(
        "--example",
        action="store_true",
        help=f"the worked example: --shape {EXAMPLE_SHAPE} --max-model-len {EXAMPLE_TOKENS} in bf16",
    )
    parser.add_argument(
        "--lengths",
        metavar="N,N,…",
        help="contexts to count requests for, in tokens (default: some that the model has)",
    )
    parser.add_argument("--no-measure", action="store_true", help="allocate no small real pool beside the formula")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw how many requests fit against their length")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 2 and one line on stderr where the model, a flag or the memory does not allow one."""
    try:
        config = _engine_config(args)
        shape = _shape_model(EXAMPLE_SHAPE if args.example else args.shape, config)
        lengths = None if args.lengths is None else _parse_numbers("lengths", args.lengths)
        plan = make_plan(config, model=shape, lengths=lengths)
        measured = None if args.no_measure else measure(plan)
        if args.plot is not None:
            save_plot(plan, args.plot)
    except StartupError as error:
        Console(stderr=True).print(f"pageframe: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    console = Console(highlight=False)
    if args.json:
        console.out(json.dumps(plan_json(plan, measured), indent=2), highlight=False)
        return 0
    console.print(draw_plan(plan))
    console.print(draw_details(plan, measured))
    if args.plot is not None:
        console.print(f"The plot is in {args.plot}.", markup=False)
    return 0


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    values = {name: getattr(args, name) for name in _FLAGS}
    if args.example:
        for name, fixed in (("dtype", "bf16"), ("kv_dtype", "auto"), ("max_model_len", None)):
            if values[name] != fixed:
                raise ConfigError(f"{name} is {values[name]}; --example has its own, --shape {EXAMPLE_SHAPE} takes any")
        values |= {"dtype": "bf16", "max_model_len": EXAMPLE_TOKENS}
    if values["kv_memory"] is not None:
        values["kv_memory"] = memory_plan.parse_bytes(values["kv_memory"])
    return EngineConfig(**values)


def _parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, with commas between them.

    Raises:
        ConfigError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 and 0 < int(part) < 2**31 for part in parts):
        raise ConfigError(
            f"{name} is {text[:80]!r}; it must be whole numbers from 1 to {2**31 - 1} with commas between them"
        )
    return tuple(int(part) for part in parts)


def _shape_model(shape: str | None, config: EngineConfig) -> ModelConfig | None:
    """A model of which only what K and V depend on is known; None without a shape.

    Raises:
        ConfigError: it is no shape, or there is a model too.
    """
    if shape is None:
        return None
    if config.model != DEFAULT_MODEL:
        raise ConfigError(f"shape is {shape!r} and model is {config.model!r}; only one of them can be planned for")
    numbers = _parse_numbers("shape", shape)
    if len(numbers) != 4:
        raise ConfigError(f"shape is {shape!r}; it must be four numbers: layers, heads, KV heads, head_dim")
    for (name, limit), number in zip(SHAPE_LIMITS, numbers, strict=True):
        if number > limit:
            raise ConfigError(f"shape has {number} {name}; they must be from 1 to {limit}")
    num_layers, num_heads, num_kv_heads, head_dim = numbers
    if num_heads % num_kv_heads:
        raise ConfigError(f"shape has {num_kv_heads} KV heads; they must divide its {num_heads} heads")
    return ModelConfig(
        family="shape",
        vocab_size=0,
        hidden_size=num_heads * head_dim,
        intermediate_size=0,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=config.max_model_len or EXAMPLE_TOKENS,
        norm_eps=1e-5,
        rope_theta=1e4,
    )


def make_plan(
    config: EngineConfig,
    *,
    free_bytes: int | None = None,
    model: ModelConfig | None = None,
    lengths: Sequence[int] | None = None,
) -> Plan:
    """Work the plan out. A pool that was asked for may be larger than this machine's memory: it may be for another.

    Args:
        free_bytes: memory to plan with; None measures this machine's.
        model: a shape without weights, to plan for in place of config.model; its pool, unless asked for, holds one
            request of the longest context.
        lengths: contexts to count requests for; None takes those of REQUEST_LENGTHS that the model allows.

    Raises:
        StartupError: the model cannot be read, a setting contradicts it, or not one block fits.
    """
    free_bytes = memory_plan.free_memory() if free_bytes is None else free_bytes
    if model is None:
        source = resolve_source(config.model)
        name, model = source.name, load_model_config(source)
        weight_bytes = num_parameters(model) * memory_plan.DTYPE_BYTES[config.dtype]
        rule = ""
    else:
        name, weight_bytes = f"{model.num_layers} layers of {model.num_kv_heads} KV heads", None
        rule = ""
        if config.num_blocks is None and config.kv_memory is None:
            config = dataclasses.replace(config, num_blocks=-(-model.max_position // config.block_size))
            rule = "what one request can use"
    bytes_per_token = memory_plan.kv_bytes_per_token(model, config.stored_kv_dtype)
    left_bytes = max(0, free_bytes - (weight_bytes or 0))
    asked = (config.num_blocks or 0) * bytes_per_token * config.block_size or config.kv_memory or 0
    pool = memory_plan.size_pool(config, model, available=max(left_bytes, asked), cap=memory_plan.CPU_POOL_CAP)
    return Plan(
        model_name=name,
        model=model,
        dtype=config.dtype,
        kv_dtype=config.stored_kv_dtype,
        block_size=config.block_size,
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_token * config.block_size,
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        num_blocks=pool.num_blocks,
        pool_rule=rule or _pool_rule(config, pool, asked, left_bytes),
        max_model_len=pool.max_model_len,
        max_num_requests=config.max_num_requests,
        fits=tuple(
            _fit(length, pool.num_blocks, config.block_size, pool.max_model_len)
            for length in _lengths(lengths, pool.max_model_len)
        ),
    )


def _lengths(asked: Sequence[int] | None, max_model_len: int) -> list[int]:
    """The contexts to count requests for.

    Raises:
        ConfigError: one of those asked for is longer than a request may be.
    """
    if asked is None:
        return sorted({length for length in REQUEST_LENGTHS if length < max_model_len} | {max_model_len})
    if max(asked) > max_model_len:
        raise ConfigError(
            f"lengths has {max(asked)}; a request has at most {max_model_len} tokens here (max_model_len)"
        )
    return sorted(set(asked))


def measure(plan: Plan) -> MeasuredPool | None:
    """Allocate a small pool of this plan's blocks for real, and write to all of it; None where even one block is too
    large for that."""
    # Beside the pool there is a narrow decoder, which takes more where blocks are of one slot.
    if plan.bytes_per_block > min(MEASURED_BLOCK_LIMIT, plan.free_bytes // 8):
        return None
    # Torch comes with this import.
    from pageframe.runtime.pool_measure import measure_pool

    num_blocks = max(1, MEASURED_BYTES // plan.bytes_per_block)
    memory = measure_pool(plan.model, plan.kv_dtype, num_blocks=num_blocks, block_size=plan.block_size)
    return MeasuredPool(num_blocks, memory.allocated, memory.resident)


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
    return Fit(
        tokens,
        blocks=-(-tokens // block_size),
        paged=requests_that_fit(tokens, num_blocks, block_size),
        reserved=num_blocks * block_size // max_model_len,
    )


def plan_json(plan: Plan, measured: MeasuredPool | None = None) -> dict[str, Any]:
    """The plan as a JSON object; sizes are in bytes."""
    lengths = [fit.tokens for fit in plan.fits]
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
            "num_parameters": None if plan.weight_bytes is None else num_parameters(plan.model),
        },
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
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
        "measured": None if measured is None else dataclasses.asdict(measured),
        "kv_heads": [dataclasses.asdict(row) for row in heads_rows(plan.model, plan.kv_dtype)],
        "block_sizes": [dataclasses.asdict(row) for row in block_size_rows(plan.bytes_per_token, lengths)],
        "kv_dtypes": [dataclasses.asdict(row) for row in dtype_rows(plan.model, plan.pool_bytes)],
    }
