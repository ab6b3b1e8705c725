"""Configuration: frozen, resolved once at start, never changed later."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from pageframe.runtime.block_copy import FREE_COPIES, CopyCosts
from pageframe.runtime.errors import ConfigError

DEFAULT_MODEL = "default"
DTYPES = ("bf16", "float32")
WEIGHTS = ("auto", "bf16", "file")
KV_DTYPES = ("auto", "int8", "fp8")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "cpu", "reference", "triton")
CONTEXT_FULL = ("stop", "slide")
MAX_BLOCK_SIZE = 256
#: max_num_batched_tokens where nobody says it. A GPU's products are worth their launches only over thousands of tokens.
CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET = 512, 8192
MOST_BATCHED_TOKENS = 2**24
#: Of the other numbers: from, to. The upper ends are far beyond any machine; they keep arithmetic and arrays sound.
LIMITS = {
    "num_blocks": (1, 2**31 - 1),
    "kv_memory": (1, 2**60),
    "max_model_len": (1, 2**31 - 1),
    "max_num_requests": (1, 65_536),
    "max_num_batched_tokens": (1, MOST_BATCHED_TOKENS),
    "mixed_token_budget": (1, MOST_BATCHED_TOKENS),
    "host_cache": (1, 2**60),
    "slide_by": (1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "threads": (1, 1024),
}


def flag(default: Any, help: str, *, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that the command line turns into a flag."""
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a person asks of the engine. `None` means: chosen at start from the model and the machine.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str = flag(
        DEFAULT_MODEL,
        "a GGUF file, a Hugging Face folder or a hub id; 'default' is SmolLM2-135M-Instruct",
        unit="model",
    )
    dtype: str = flag("bf16", "type of the arithmetic, and of K and V unless --kv-dtype has another", choices=DTYPES)
    weights: str = flag(
        "auto",
        "how weights are held: as a GGUF file stores them (file, for Q4_0, Q4_1 and Q8_0), or in --dtype (bf16); auto "
        "takes the first that is possible",
        choices=WEIGHTS,
    )
    device: str = flag("auto", "where the model runs", choices=DEVICES)
    backend: str = flag(
        "auto",
        "what computes attention: kernels compiled for this CPU (cpu), torch (reference) or triton; auto takes the "
        "fastest that is possible",
        choices=BACKENDS,
    )
    block_size: int = flag(16, "token slots in a block, a power of two from 1 to 256", unit="tokens")
    num_blocks: int | None = flag(None, "blocks in the KV pool; given, it overrides --kv-memory", unit="blocks")
    kv_memory: int | None = flag(
        None,
        "memory of the KV pool, such as 512MiB or 4GiB; default: from free memory, at most 4GiB on CPU",
        unit="bytes",
    )
    kv_dtype: str = flag(
        "auto",
        "how K and V are held: in the arithmetic's type (auto), or rounded to int8 or, on a GPU that has it, fp8, in "
        "about half of bf16's memory",
        choices=KV_DTYPES,
    )
    max_model_len: int | None = flag(
        None, "longest context of a request; default: the model's own, or what the pool holds", unit="tokens"
    )
    max_num_requests: int = flag(256, "most requests that run at once", unit="requests")
    max_num_batched_tokens: int | None = flag(
        None,
        "token budget of one step; default: 512, on a GPU 8192, and at least --max-num-requests",
        unit="tokens",
    )
    mixed_token_budget: int | None = flag(
        None,
        "token budget of a step in which requests decode, so that prompts do not hold up their next tokens; default: "
        "what this CPU computes in 35 ms, measured at start; on a GPU as --max-num-batched-tokens",
        unit="tokens",
    )
    graphs: bool = flag(True, "on a GPU, record decode steps at start and replay them: launches cost more than kernels")
    prefix_cache: bool = flag(True, "find prefixes that were computed before and share their blocks")
    host_cache: int | None = flag(
        None, "host memory for blocks that leave the KV pool, such as 2GiB; default: none", unit="bytes"
    )
    on_context_full: str = flag(
        "stop", "a request whose context is full ends, or goes on with the later part of it", choices=CONTEXT_FULL
    )
    slide_by: int | None = flag(
        None, "tokens that leave a full context with --on-context-full slide; default: half of it", unit="tokens"
    )
    seed: int | None = flag(None, "makes the seeds of unseeded requests repeatable", unit="seed")
    threads: int | None = flag(
        None, "CPU threads of the forward pass; default: one for each that this process may run on", unit="threads"
    )

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("weights", self.weights, WEIGHTS)
        _check_choice("device", self.device, DEVICES)
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _check_choice("on_context_full", self.on_context_full, CONTEXT_FULL)
        if self.kv_dtype != "auto" and self.dtype != "bf16":
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}, but dtype is {self.dtype!r}; it must be 'bf16'")
        if self.slide_by is not None and self.on_context_full != "slide":
            raise ConfigError(f"slide_by is {self.slide_by}; it needs on_context_full slide")
        if self.host_cache is not None and not self.prefix_cache:
            raise ConfigError("host_cache needs prefix_cache: it holds what the prefix cache can find")
        size = self.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ConfigError(f"block_size is {size}; it must be a power of two from 1 to {MAX_BLOCK_SIZE}")
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be from {low} to {high}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_requests:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_requests "
                f"({self.max_num_requests}), since each step gives every decoding request its token"
            )

    @classmethod
    def offline(cls, **settings: Any) -> Self:
        """For work whose tokens nobody reads as they come: where the settings do not say otherwise, no step is kept
        short for the sake of those that decode.

        Raises:
            ConfigError: a setting is at fault.
        """
        return cls(**{"mixed_token_budget": MOST_BATCHED_TOKENS} | settings)

    def mixed_budget(self, device_type: str) -> int | None:
        """mixed_token_budget as it is on "cpu" or "cuda": no more than any step's."""
        return None if self.mixed_token_budget is None else min(self.mixed_token_budget, self.token_budget(device_type))

    def token_budget(self, device_type: str) -> int:
        """max_num_batched_tokens as it is on "cpu" or "cuda"."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_requests, CPU_TOKEN_BUDGET if device_type == "cpu" else GPU_TOKEN_BUDGET)

    @property
    def stored_kv_dtype(self) -> str:
        """What K and V are stored as: "bf16", "float32", "int8" or "fp8"."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Args:
        kind: "linear" (all frequencies divided by `factor`) or "llama3" (Llama 3.1's: only long wavelengths,
            blended between `low_freq_factor` and `high_freq_factor`).
        original_max_position: the trained context, in tokens (llama3 only).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, whatever file it came from. Sizes are counts of elements, not bytes."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    #: "rms": by the root of the mean square; "layer": the mean taken away first, and a bias added.
    norm: str = "rms"
    #: Rows of the table of learned positions, which are added to the embedding; None: heads are rotated instead.
    learned_positions: int | None = None
    #: Of the MLP: "silu", "gelu" or "gelu_tanh".
    activation: str = "silu"
    #: The activated projection is multiplied by a second one.
    gated_mlp: bool = True
    #: Per layer: how many tokens back a query sees, itself included; None sees everything.
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def longest_window(self) -> int | None:
        """The longest of the layers' windows; None where some layer sees everything."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else None

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Everything decided at start. Travels to the API process in the ready message.

    Args:
        model_name: what the model calls itself, for people.
        kv_bytes_per_token: bytes of K and V of one token over all layers, the scales of codes included.
        pool_bytes: bytes of the whole KV pool.
        host_slots: blocks that host memory holds, 0 for no host tier.
        graphs: decode steps are recorded at start and replayed.
        copy_costs: measured at start where there is a host tier.
        mixed_token_budget: see `token_budget.step_budget`; None bounds nothing.
        slide_by: tokens that leave a full context; None where a request ends there.
        weights: how they are held: "file", "bf16" or "float32".
        kv_dtype: what K and V are stored as: "bf16", "float32", "int8" or "fp8".
        instruction_set: what the compiled CPU engine was compiled for, "" where torch's operations compute.
        batch_invariant: an answer's bits depend on nothing but its request, not on what else is in the batch.
        notes: what the machine lacks and what that costs, one sentence each.
    """

    model_name: str
    model: ModelConfig
    dtype: str
    compute_dtype: str
    device: str
    backend: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_requests: int
    max_num_batched_tokens: int
    threads: int
    kv_bytes_per_token: int
    pool_bytes: int
    graphs: bool = False
    prefix_cache: bool = True
    host_slots: int = 0
    copy_costs: CopyCosts = FREE_COPIES
    mixed_token_budget: int | None = None
    slide_by: int | None = None
    weights: str = "float32"
    kv_dtype: str = "float32"
    instruction_set: str = ""
    batch_invariant: bool = False
    notes: tuple[str, ...] = ()

    @property
    def window(self) -> int | None:
        """Tokens that any layer looks back; None where some layer looks at everything."""
        return self.model.longest_window

    @property
    def max_blocks(self) -> int:
        """Entries of one block-table row: blocks that hold max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)
