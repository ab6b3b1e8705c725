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

#: The compute capability from which on NVIDIA's GPUs have bf16.
MIN_CAPABILITY = (8, 0)
#: fp8 as NVIDIA's GPUs have it; `_stored_kv` gives that of the device.
TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


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
    _check_codes(config, device, kernels, lack)
    compute = storage
    notes: tuple[str, ...] = ()
    if kernels is not None:
        compute = torch.float32
    elif storage == torch.bfloat16 and device.type == "cpu":
        compute, notes = _without_kernels(lack)
    backend, kv = _backend(config, model, device, kernels)
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


def _check_codes(config: EngineConfig, device: torch.device, kernels: CpuKernels | None, lack: str) -> None:
    """Refuse codes for K and V where no kernels for them compute; the Triton backend says itself which it has."""
    on_triton = config.backend == "triton" or (config.backend == "auto" and device.type == "cuda")
    if config.kv_dtype == "auto" or on_triton:
        return
    if config.kv_dtype == "fp8":
        raise ConfigError("kv_dtype is 'fp8', but only the triton backend has it, on a GPU")
    if kernels is None:
        raise ConfigError(
            "kv_dtype is 'int8', but only the compiled CPU engine and the triton backend have it; the first does not "
            f"compute here: {lack}"
        )


def _backend(
    config: EngineConfig, model: ModelConfig, device: torch.device, kernels: CpuKernels | None
) -> tuple[Backend, torch.dtype]:
    """The attention kernels asked for, and what they store K and V as; left open, the compiled ones where they have
    this head size, or alone int8."""
    names = [config.backend]
    if config.backend == "auto" and kernels is not None:
        names = ["cpu"] if config.kv_dtype == "int8" else ["cpu", "reference"]
    for name in names:
        try:
            backend = select_backend(name, device)
            if backend.name == "triton":
                _check_gpu(device)
            kv = _stored_kv(config, device)
            backend.check_supported(head_dim=model.head_dim, block_size=config.block_size, dtype=kv)
            return backend, kv
        except UnsupportedError as error:
            if name == names[-1]:
                asked = "" if config.kv_dtype == "auto" else f"kv_dtype is {config.kv_dtype!r}, but "
                raise ConfigError(f"{asked}{error}") from error
    raise AssertionError("one of the names either is supported or raises")


def _check_gpu(device: torch.device) -> None:
    """Refuse a GPU that Triton's kernels are not for.

    Raises:
        UnsupportedError: it is one of NVIDIA's, and too old for bf16.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the triton "
            "backend needs 8.0 or later, or one of AMD's GPUs; device can be 'cpu'"
        )


def _stored_kv(config: EngineConfig, device: torch.device) -> torch.dtype:
    """What K and V are stored as.

    Raises:
        UnsupportedError: it is fp8, and this device has none.
    """
    if config.kv_dtype != "fp8":
        return TORCH_DTYPES[config.stored_kv_dtype]
    # Imported only when wanted: it pulls in the compiler. Only the Triton backend has fp8.
    from pageframe.kernels.triton.dtypes import fp8_dtype

    dtype = fp8_dtype(device)
    if dtype is None:
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} does not compute with it: NVIDIA's GPUs do from compute capability "
            "8.9 on, AMD's gfx942 does; it can be 'auto' or 'int8'"
        )
    return dtype
