"""The memory of K and V: some blocks in every layer, on one device. Knows blocks by their numbers only.

Copies between a GPU's pool and the host's are made by the GPU, in the order of its stream, and the host waits for none
of them: not even a copy back out of a slot just filled, which comes later in the same order. Only where the host itself
reads or writes a slot (`read`, `fill`) does it wait for all that the stream was told.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from pageframe.kernels.attention import fill_block, read_block
from pageframe.kernels.huge_pages import huge_page_memory
from pageframe.kernels.triton.transfer import page_locked, page_unlock, to_device

#: What K and V are stored as where they are codes with scales: int8, and fp8 e4m3 as NVIDIA's and AMD's GPUs have it.
CODE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class KvPool:
    """Blocks in every layer. Their memory is taken once, here.

    Args:
        shape: of one layer, see `kv_cache_shape`.
        dtype: what K and V are stored as; those of CODE_DTYPES are for codes with scales.
        beside_gpu: host memory that is copied from and to a GPU's pool: page-locked, and what a block has in all layers
            lies together, for one copy.

    Attributes:
        caches: each layer's K and V, as backends take them.
        scales: each layer's scales, None where K and V are no codes.
    """

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        beside_gpu: bool = False,
    ) -> None:
        self._device = device
        self._beside_gpu = beside_gpu
        values = self._take((num_layers, *shape), dtype)
        self.caches = values.unbind(0)
        self.scales: tuple[torch.Tensor, ...] | None = None
        #: [num_layers, num_blocks, …], codes as bytes: torch does not index every type of them.
        self._tensors = [values]
        if dtype in CODE_DTYPES:
            scales = self._take((num_layers, *shape[:-1]), torch.float32)
            self.scales = scales.unbind(0)
            self._tensors = [values.view(torch.uint8), scales]

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not self._beside_gpu and self._device.type == "cpu":
            return huge_page_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        if not self._beside_gpu:
            return torch.empty(shape, dtype=dtype, device=self._device)
        num_layers, num_blocks, *rest = shape
        values = page_locked((num_blocks, num_layers, *rest), dtype)
        # At the process' end the lock ends by itself, and the device may be lost by then.
        weakref.finalize(self, page_unlock, values).atexit = False
        return values.transpose(0, 1)

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def read(self, layer: int, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `read_block`."""
        self._wait()
        if self.scales is None:
            return read_block(self.caches[layer], block_id)
        only = slice(block_id, block_id + 1)
        return read_block(self.caches[layer][only].float(), 0, self.scales[layer][only])

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Set every slot of these blocks, in every layer, to `value`: NaN poisons what nobody may read."""
        self._wait()
        ids = _on(self._device, block_ids)
        if self.scales is None:
            for kv_cache in self.caches:
                fill_block(kv_cache, ids, value)
            return
        codes, scales = self._tensors
        one = torch.ones(1, dtype=self.caches[0].dtype).view(torch.uint8)
        codes.index_fill_(1, ids, int(one))
        scales.index_fill_(1, ids, value)

    def copy_from(self, source: KvPool, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        """Copy, in every layer, block src_ids[i] of `source`, which may be this pool, over block dst_ids[i]. All are
        read before any is overwritten; no id is twice in dst_ids. Of a GPU's pool and the host's, the latter must be
        `beside_gpu`; nobody waits for the copies, see the top of this file."""
        for theirs, ours in zip(source._tensors, self._tensors, strict=True):
            if source._device == self._device:
                read = theirs.index_select(1, _on(source._device, src_ids))
                ours.index_copy_(1, _on(self._device, dst_ids), read)
            elif self._beside_gpu:
                read = theirs.transpose(0, 1).index_select(0, _on(source._device, src_ids))
                for block, dst in zip(read, dst_ids, strict=True):
                    ours[:, dst].copy_(block, non_blocking=True)
            else:
                read = _blocks_of(theirs, src_ids, self._device)
                ours.index_copy_(1, _on(self._device, dst_ids), read.transpose(0, 1))

    def _wait(self) -> None:
        """Before the host touches what a GPU copies from and to."""
        if self._beside_gpu:
            torch.cuda.synchronize()


def _blocks_of(host: torch.Tensor, block_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """Blocks of a pool beside a GPU, on that GPU: [len(block_ids), num_layers, …]."""
    blocks = torch.empty((len(block_ids), *host[:, 0].shape), dtype=host.dtype, device=device)
    for block, block_id in zip(blocks, block_ids, strict=True):
        block.copy_(host[:, block_id], non_blocking=True)
    return blocks


def _on(device: torch.device, block_ids: Sequence[int]) -> torch.Tensor:
    return to_device(np.array(block_ids, np.int64), device)
