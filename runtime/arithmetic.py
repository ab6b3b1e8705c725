"""What computes, in which types, and with which stored values: decided once, from the machine, the model and a wish."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass

import torch

from pageframe.kernels.attention import Backend, UnsupportedError, select_backend
from pageframe.kernels.cpu import BuildError, CpuKernels, load
from pageframe.runtime.config import EngineConfig, ModelConfig
from pageframe.runtime.errors import ConfigError
from pageframe.runtime.models.compiled import can_compile
from pageframe.runtime.models.loader import stores_blocks
from pageframe.runtime.models.source import ModelSource

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Types and place of the computation.

    Args:
        storage: what weights are rounded to, unless they stay as the file has them.
        kv: what K and V are stored as.
        compute: what hidden states are.
        backend: the attention kernels.
        kernels: the compiled CPU engine, where it computes.
        keep_blocks: weights stay as the file stores them.
        batch_invariant: an answer's bits do not depend on what else is in the batch.
        notes: what the machine lacks and what that costs.
    """

    device: torch.device
    storage: torch.dtype
    kv: torch.dtype
    compute: torch.dtype
    backend: Backend
    kernels: CpuKernels | None = None
    keep_blocks: bool = False
    batch_invariant: bool = False
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> str:
        """ "file", "bf16" or "float32"."""
        if self.keep_blocks:
            return "file"
        return "bf16" if self.storage == torch.bfloat16 else "float32"


def choose_arithmetic(config: EngineConfig, model: ModelConfig, source: ModelSource) -> Arithmetic:
    """Settle what `config` leaves open.

    Raises:
        ConfigError: what it asks for does not exist here; the message says why.
    """
    device = _device(config)
    storage = TORCH_DTYPES[config.dtype]
    kernels, lack = _compiled_kernels(config, device)
    keep_blocks = _keeps_blocks(config, source, kernels, lack)
    if config.weights == "bf16" and storage != torch.bfloat16:
        raise ConfigError(f"weights is 'bf16', but dtype is {config.dtype!r}; it must be 'bf16'")
    if config.kv_dtype == "int8" and kernels is None:
        raise ConfigError(
            f"kv_dtype is 'int8', but only the compiled CPU engine has it, and it does not compute here: {lack}"
        )
    compute = storage
    notes: tuple[str, ...] = ()
    if kernels is not None:
        compute = torch.float32
    elif storage == torch.bfloat16 and device.type == "cpu":
        compute, notes = _without_kernels(lack)
    kv = TORCH_DTYPES[config.stored_kv_dtype]
    backend = _backend(config, model, device, kv, kernels)
    reason = lack or _what_torch_computes(model, backend)
    if reason and not notes:
        notes = (
            f"An answer's last bits may depend on what else is in the batch ({reason}): "
            "only the compiled CPU engine's never do.",
        )
    return Arithmetic(device, storage, kv, compute, backend, kernels, keep_blocks, not reason, notes)


def _what_torch_computes(model: ModelConfig, backend: Backend) -> str:
    """What is left to torch's operations beside the compiled engine's linears; "" for nothing."""
    if backend.name != "cpu":
        return f"attention is the {backend.name} backend's"
    return "" if can_compile(model) else "this kind of layer is put together from torch's operations"


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but no CUDA device is available; use 'cpu'")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _compiled_kernels(config: EngineConfig, device: torch.device) -> tuple[CpuKernels | None, str]:
    """The compiled engine where it is to compute, else why it does not."""
    if device.type != "cpu":
        return None, f"the device is {device.type}"
    if config.dtype != "bf16":
        return None, f"dtype is {config.dtype}"
    if config.backend not in ("auto", "cpu"):
        return None, f"backend is {config.backend}"
    try:
        return load(), ""
    except BuildError as error:
        logger.warning("no compiled CPU kernels: %s", error)
        return None, str(error)


def _keeps_blocks(config: EngineConfig, source: ModelSource, kernels: CpuKernels | None, lack: str) -> bool:
    if config.weights == "bf16":
        return False
    reason = ""
    if kernels is None:
        reason = f"only the compiled CPU engine multiplies them, and it does not compute here: {lack}"
    elif not stores_blocks(source):
        reason = f"{source.name} holds no matrix of Q4_0, Q4_1 or Q8_0"
    if reason and config.weights == "file":
        raise ConfigError(f"weights is 'file', but {reason}")
    return not reason


def _without_kernels(lack: str) -> tuple[torch.dtype, tuple[str, ...]]:
    """What computes bf16 where the compiled engine does not, and what that costs."""
    compute = torch.bfloat16 if _cpu_multiplies_bf16() else torch.float32
    arithmetic = "" if compute == torch.bfloat16 else ", in float32, since this processor has no bf16 products"
    return compute, (
        f"The compiled CPU kernels do not compute here ({lack}): torch's operations do{arithmetic}. "
        "Steps take several times as long, weights take 2 to 4 bytes each, and an answer's last bits may depend on "
        "what else is in the batch.",
    )


def _cpu_multiplies_bf16() -> bool:
    """Whether this processor has bf16 products; emulated ones are many times slower than float32."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _backend(
    config: EngineConfig, model: ModelConfig, device: torch.device, kv: torch.dtype, kernels: CpuKernels | None
) -> Backend:
    """The attention kernels asked for; left open, the compiled ones where they have this head size, or alone int8."""
    names = [config.backend]
    if config.backend == "auto" and kernels is not None:
        names = ["cpu"] if kv == torch.int8 else ["cpu", "reference"]
    for name in names:
        try:
            backend = select_backend(name, device)
            backend.check_supported(head_dim=model.head_dim, block_size=config.block_size, dtype=kv)
            return backend
        except UnsupportedError as error:
            if name == names[-1]:
                asked = "kv_dtype is 'int8', but " if kv == torch.int8 else ""
                raise ConfigError(f"{asked}{error}") from error
    raise AssertionError("one of the names either is supported or raises")
