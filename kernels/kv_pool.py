"""The memory of K and V: some blocks in every layer, on one device. Knows blocks by their numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageframe.kernels.attention import fill_block, read_block

#: What K and V are stored as where they are codes with scales: int8, and fp8 e4m3 as NVIDIA's and AMD's GPUs have it.
CODE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class KvPool:
    """Blocks in every layer. Their memory is taken once, here.

    Args:
        shape: of one layer, see `kv_cache_shape`.
        dtype: what K and V are stored as; those of CODE_DTYPES are for codes with scales.

    Attributes:
        caches: each layer's K and V, as backends take them.
        scales: each layer's scales, None where K and V are no codes.
    """

    def __init__(self, num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        values = torch.empty((num_layers, *shape), dtype=dtype, device=device)
        self.caches = values.unbind(0)
        self.scales: tuple[torch.Tensor, ...] | None = None
        #: [num_layers, num_blocks, …], codes as bytes: torch does not index every type of them.
        self._tensors = [values]
        if dtype in CODE_DTYPES:
            scales = torch.empty(values.shape[:-1], dtype=torch.float32, device=device)
            self.scales = scales.unbind(0)
            self._tensors = [values.view(torch.uint8), scales]

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def read(self, layer: int, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `read_block`."""
        if self.scales is None:
            return read_block(self.caches[layer], block_id)
        only = slice(block_id, block_id + 1)
        return read_block(self.caches[layer][only].float(), 0, self.scales[layer][only])

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Set every slot of these blocks, in every layer, to `value`: NaN poisons what nobody may read."""
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
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
        read before any is overwritten; no id is twice in dst_ids."""
        src = torch.tensor(src_ids, dtype=torch.int64, device=source._device)
        dst = torch.tensor(dst_ids, dtype=torch.int64, device=self._device)
        for theirs, ours in zip(source._tensors, self._tensors, strict=True):
            ours.index_copy_(1, dst, theirs.index_select(1, src).to(self._device))
