"""Runs the model: owns the weights, the KV pool and the device's copy of the block tables.

It knows batches, not requests: no queues, no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pageframe.kernels.attention import AttentionPlan, Backend, kv_cache_shape
from pageframe.kernels.kv_pool import KvPool
from pageframe.kernels.triton.transfer import to_device
from pageframe.runtime.batch import Batch
from pageframe.runtime.block_copy import BlockCopy, CopyKind
from pageframe.runtime.block_table import TableUpdates
from pageframe.runtime.cuda_graphs import DecodeGraphs, recorder
from pageframe.runtime.models.decoder import Decoder

#: Copies go through memory of their own on both sides, so that much at a time, in bytes.
COPIED_AT_ONCE = 16 * 1024**2


class ModelRunner:
    """One decoder over one KV pool.

    Args:
        decoder: the model, its weights already on `device`.
        backend: attention kernels.
        kv_dtype: what K and V are stored as; int8 and fp8 are codes with scales.
        host_slots: blocks that host memory holds beside the pool, 0 for none.
        graphs: decode steps are recorded at start and replayed (cuda_graphs.py); the backend must be triton.

    The memory of both is taken once, here, and so is the time for recording.

    Raises:
        UnsupportedError: graphs are wanted of a backend that has none.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_requests: int,
        max_blocks: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        host_slots: int = 0,
        graphs: bool = False,
    ) -> None:
        model = decoder.config
        shape = kv_cache_shape(num_blocks, model.num_kv_heads, block_size, model.head_dim)
        self.decoder = decoder
        self._backend = backend
        self._block_size = block_size
        self._device = device
        self._pool = KvPool(model.num_layers, shape, kv_dtype, device)
        self._copied_at_once = max(1, COPIED_AT_ONCE * num_blocks // self._pool.nbytes)
        host_shape, host = (host_slots, *shape[1:]), torch.device("cpu")
        self._host_pool = KvPool(model.num_layers, host_shape, kv_dtype, host, beside_gpu=device.type == "cuda")
        self._tables = torch.zeros((max_num_requests, max_blocks), dtype=torch.int32, device=device)
        self._graphs = self._record(max_num_requests) if graphs else None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool as allocated."""
        return self._pool.nbytes

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """One pass over a step's tokens; K and V are written to their slots.

        Returns:
            hidden states [len(batch.wanted), hidden_size] of the wanted tokens, before the final norm; valid until the
            next call.
        """
        self._apply(batch.table_updates)
        self.copy_blocks(batch.copies)
        if self._graphs is not None and self._graphs.fits(batch):
            hidden = self._graphs.run(batch)
        else:
            hidden = self._run_layers(
                to_device(batch.token_ids, self._device),
                to_device(batch.positions, self._device),
                to_device(batch.slots, self._device),
                self._backend.plan_attention(batch, self._tables, self._block_size),
            )
        # A step of decodes alone wants all: picking them one by one would be a copy.
        return hidden if batch.wants_all else hidden[to_device(batch.wanted, self._device)]

    def _run_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        return self.decoder.forward(
            token_ids, positions, self._pool.caches, slots, plan, self._backend, self._pool.scales
        )

    @torch.inference_mode()
    def _record(self, max_num_requests: int) -> DecodeGraphs:
        return DecodeGraphs(
            self._run_layers,
            self._backend,
            self._tables,
            block_size=self._block_size,
            max_num_requests=max_num_requests,
            record=recorder(self._device),
        )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden_size]."""
        return self.decoder.logits(hidden, self._backend)

    @torch.inference_mode()
    def arg_max(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Decoder.arg_max`."""
        return self.decoder.arg_max(hidden)

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Make these copies, one after the other as far as it can be told."""
        for kind, run in _independent_runs(copies, self._copied_at_once):
            source = self._host_pool if kind is CopyKind.TO_DEVICE else self._pool
            target = self._host_pool if kind is CopyKind.TO_HOST else self._pool
            target.copy_from(source, [copy.src for copy in run], [copy.dst for copy in run])

    def synchronize(self) -> None:
        """See `Runner.synchronize`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one block of one layer, each [num_kv_heads, block_size, head_dim]."""
        return self._pool.read(layer, block_id)

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """Overwrite whole blocks in every layer; tests poison free blocks with NaN this way."""
        self._pool.fill(block_ids, value)

    def fill_host_slots(self, slots: Sequence[int], value: float) -> None:
        """Overwrite whole slots of host memory, as `fill_blocks` does for blocks."""
        self._host_pool.fill(slots, value)

    def _apply(self, updates: TableUpdates) -> None:
        if len(updates):
            rows = to_device(updates.rows.astype(np.int64), self._device)
            indices = to_device(updates.indices.astype(np.int64), self._device)
            self._tables[rows, indices] = to_device(np.ascontiguousarray(updates.block_ids), self._device)


def _independent_runs(copies: Sequence[BlockCopy], longest: int) -> Iterator[tuple[CopyKind, list[BlockCopy]]]:
    """Runs of copies of one kind that may be made all at once: none reads or overwrites what another one writes."""
    run: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        # Only a fork's source and target are numbers of the same kind.
        overlaps = copy.dst in written or (copy.kind is CopyKind.FORK and copy.src in written)
        if run and (copy.kind is not run[0].kind or overlaps or len(run) == longest):
            yield run[0].kind, run
            run, written = [], set()
        run.append(copy)
        written.add(copy.dst)
    if run:
        yield run[0].kind, run
