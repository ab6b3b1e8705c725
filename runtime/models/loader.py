"""Fills a decoder with the weights of a GGUF file or a folder of safetensors.

Tensors are read, converted and handed over one at a time, so memory peaks near the model's own size. Knows the
files' layouts; what the names mean is in families.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pageframe.kernels.cpu import BLOCK_BYTES, CpuKernels
from pageframe.runtime.config import ModelConfig
from pageframe.runtime.errors import MemoryPlanError, ModelError
from pageframe.runtime.models.blocks import BlockMatrix
from pageframe.runtime.models.compiled import can_compile
from pageframe.runtime.models.config import read_json
from pageframe.runtime.models.decoder import Decoder, DecoderWeights
from pageframe.runtime.models.families import (
    GGUF_ROPE_FACTORS,
    family_named,
    gguf_name,
    hf_name,
    is_ignored,
    module_of,
)
from pageframe.runtime.models.gguf import GgufFile
from pageframe.runtime.models.layers import LayerWeights, mlp_activation
from pageframe.runtime.models.source import ModelSource, one_line
from pageframe.runtime.models.weights import (
    Embedding,
    Norm,
    RmsNorm,
    Weight,
    make_norm,
    make_weight,
    meet_usual_rows,
    tied_embedding,
)

Progress = Callable[[int, int], None]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_decoder(
    source: ModelSource,
    config: ModelConfig,
    *,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    kernels: CpuKernels | None = None,
    keep_blocks: bool = False,
    progress: Progress | None = None,
) -> Decoder:
    """Reads the model's weights.

    Args:
        config: what `load_model_config(source)` gave; its max_position may be changed.
        kernels: the compiled CPU engine, if it is to compute; then compute_dtype is float32.
        keep_blocks: matrices that the file stores in 4 or 8 bits keep these values, as far as the kernels know their
            format; else all are rounded to the storage dtype.
        storage_dtype: what the matrices' values are rounded to.
        compute_dtype: what the arithmetic and the hidden states use; how the values are held for it is `make_weight`'s
            choice.
        progress: called as (tensors done, tensors in all) after each tensor.

    Raises:
        ModelError: a tensor is missing, unknown, damaged or of the wrong shape.
        MemoryPlanError: the weights do not fit.
    """
    store = _GgufStore(source.gguf, config) if source.kind == "gguf" else _FolderStore(source.path, config)
    reader = _Reader(store, storage_dtype, compute_dtype, device, kernels, keep_blocks, progress)
    try:
        with torch.inference_mode(), _one_thread():
            weights = _read_weights(reader, config)
            reader.refuse_leftovers()
        meet_usual_rows()
        return Decoder(config, weights)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryPlanError(f"{source.path}: the weights do not fit in the memory of {device}") from error
        raise


def stores_blocks(source: ModelSource) -> bool:
    """Whether some matrices of the model are stored in a format of few bits that a BlockMatrix can hold."""
    if source.kind != "gguf":
        return False
    return any(tensor.type_name in BLOCK_BYTES for tensor in source.gguf.tensors.values())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Conversions are bound by memory and come in thousands of small steps: a second thread gains little on an idle
    machine, and on a busy one each step waits for the thread that lost its core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Store(Protocol):
    """Tensors by our names, in whatever file they are."""

    where: Path

    def stored_names(self) -> Iterable[str]: ...

    def stored_name(self, name: str) -> str: ...

    def is_transposed(self, name: str) -> bool: ...

    def shape(self, stored_name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...

    def read_blocks(self, name: str) -> BlockMatrix | None: ...


class _Reader:
    """Reads tensors of a store, checks their shapes, converts them, and knows which were never asked for."""

    def __init__(
        self,
        store: _Store,
        storage_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None,
        keep_blocks: bool,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.device = device
        self._kernels = kernels
        self._keep_blocks = keep_blocks
        self._progress = progress
        self._left = {name for name in store.stored_names() if not is_ignored(name)}
        self._total = len(self._left)

    def matrix(self, names: Iterable[str], rows: Iterable[int], columns: int) -> Tensor | BlockMatrix:
        """Tensors of `rows` x `columns` one below the other: as they are stored, if that is wanted and they are all
        stored in the same few bits, else in the storage dtype."""
        parts = list(zip(names, rows, strict=True))
        for name, size in parts:
            self._check(name, (size, columns))
        blocks = self._blocks([name for name, _ in parts])
        return self._values(parts, columns) if blocks is None else blocks

    def _blocks(self, names: Sequence[str]) -> BlockMatrix | None:
        if not self._keep_blocks:
            return None
        parts = [self._store.read_blocks(name) for name in names]
        matrices = [part for part in parts if part is not None]
        if len(matrices) < len(parts) or len({matrix.format for matrix in matrices}) > 1:
            return None
        for name in names:
            self._done(name)
        data = [matrix.data for matrix in matrices]
        return BlockMatrix(matrices[0].format, data[0] if len(data) == 1 else torch.cat(data))

    def _values(self, parts: Sequence[tuple[str, int]], columns: int) -> Tensor:
        whole = torch.empty(sum(size for _, size in parts), columns, dtype=self._storage_dtype, device=self.device)
        start = 0
        for name, size in parts:
            whole[start : start + size] = self._read(name, (size, columns))
            start += size
        return whole

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight or a bias, float32: few values, so they are not rounded to the storage dtype."""
        return self._read(name, (size,)).to(self.device, torch.float32, copy=True)

    def norm(self, name: str, config: ModelConfig) -> Norm:
        """A norm over hidden_size, of the config's kind."""
        size = config.hidden_size
        weight = self.vector(f"{name}.weight", size)
        bias = self.vector(f"{name}.bias", size) if config.norm == "layer" else None
        return make_norm(weight, bias, config.norm_eps)

    def dense(
        self,
        names: str,
        out_features: Sequence[int],
        bias: bool,
        layer: int,
        in_features: int,
        *,
        interleaved: bool = False,
    ) -> Weight:
        """The fused weight of the matrices `names` (space between them) of a layer, each with its out_features."""
        full_names = [f"layers.{layer}.{name}" for name in names.split()]
        weight = self.matrix([f"{name}.weight" for name in full_names], out_features, in_features)
        parts = zip(full_names, out_features, strict=True) if bias else ()
        biases = [self.vector(f"{name}.bias", size) for name, size in parts]
        return self.weight(weight, torch.cat(biases) if biases else None, interleaved=interleaved)

    def weight(self, values: Tensor | BlockMatrix, bias: Tensor | None = None, *, interleaved: bool = False) -> Weight:
        """The weight of a matrix that was read."""
        return make_weight(values, bias, self.compute_dtype, self._kernels, interleaved=interleaved)

    def embedding(self, table: Tensor | BlockMatrix) -> Embedding:
        """The lookup in a matrix that was read."""
        return Embedding(table, self.compute_dtype)

    def can_interleave(self, config: ModelConfig) -> bool:
        """Whether gate and up are for a compiled layer."""
        return self._kernels is not None and can_compile(config)

    def rope_factors(self, size: int) -> Tensor | None:
        """The file's divisors of the rotary frequencies, float32 on the CPU, or None."""
        if GGUF_ROPE_FACTORS not in self._left:
            return None
        return self._read(GGUF_ROPE_FACTORS, (size,)).float()

    def drop(self, name: str) -> None:
        """Takes a tensor as known without reading it."""
        self._left.discard(self._store.stored_name(name))

    def refuse_leftovers(self) -> None:
        """Refuses tensors that no part of the decoder asked for: the model is not what its config says.

        Raises:
            ModelError: there are some.
        """
        if self._left:
            first = min(self._left)
            raise ModelError(
                f"{self._store.where}: tensor {first!r} is no part of this model as its configuration describes it"
                + (f" ({len(self._left)} such tensors)" if len(self._left) > 1 else "")
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._check(name, shape)
        values = self._store.read(name)
        if self._store.is_transposed(name):
            values = values.T
        self._done(name)
        return values

    def _done(self, name: str) -> None:
        self.drop(name)
        if self._progress is not None:
            self._progress(self._total - len(self._left), self._total)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses a tensor that is missing or has another shape, before any memory is taken for it."""
        stored_name = self._store.stored_name(name)
        if stored_name not in self._left:
            raise ModelError(f"{self._store.where}: tensor {stored_name!r} is missing")
        found = self._store.shape(stored_name)
        if self._store.is_transposed(name):
            shape = shape[::-1]
        if found != shape:
            raise ModelError(
                f"{self._store.where}: tensor {stored_name!r} has shape {list(found)}; "
                f"the configuration asks for {list(shape)}"
            )


def _read_weights(reader: _Reader, config: ModelConfig) -> DecoderWeights:
    hidden_size, vocab_size = config.hidden_size, config.vocab_size
    rope_factors = reader.rope_factors(config.head_dim // 2)
    table = reader.matrix(["embedding.weight"], [vocab_size], hidden_size)
    positions = None
    if config.learned_positions is not None:
        positions = reader.embedding(reader.matrix(["positions.weight"], [config.learned_positions], hidden_size))
    windows = config.windows or (None,) * config.num_layers
    layers = [_read_layer(reader, config, layer, window) for layer, window in enumerate(windows)]
    final_norm = reader.norm("final_norm", config)
    if config.tie_word_embeddings:
        # In torch's packed layout this is a second copy: a row is looked up in the plain one, and the final projection
        # is a tenth of a decode step or more, which the packed one makes clearly faster.
        output = reader.weight(table)
        embedding = tied_embedding(table, output, reader.compute_dtype)
        reader.drop("output.weight")
    else:
        output = reader.weight(reader.matrix(["output.weight"], [vocab_size], hidden_size))
        embedding = reader.embedding(table)
    return DecoderWeights(
        embedding,
        layers,
        final_norm,
        output,
        reader.compute_dtype,
        reader.device,
        rope_factors=rope_factors,
        positions=positions,
    )


def _read_layer(reader: _Reader, config: ModelConfig, layer: int, window: int | None) -> LayerWeights:
    hidden_size, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    mlp_size = config.intermediate_size
    name = f"layers.{layer}"
    joined_qkv = family_named(config.family).joined_qkv
    qkv = ("qkv", [q_size + 2 * kv_size]) if joined_qkv else ("q k v", [q_size, kv_size, kv_size])
    gate_up = ("gate up", [mlp_size, mlp_size]) if config.gated_mlp else ("up", [mlp_size])
    qk_norm = None
    if config.qk_norm:
        q_norm = reader.vector(f"{name}.q_norm.weight", head_dim).expand(config.num_heads, head_dim)
        k_norm = reader.vector(f"{name}.k_norm.weight", head_dim).expand(config.num_kv_heads, head_dim)
        qk_norm = RmsNorm(torch.cat((q_norm, k_norm)), config.norm_eps)
    return LayerWeights(
        attention_norm=reader.norm(f"{name}.attention_norm", config),
        qkv=reader.dense(*qkv, config.qkv_bias, layer, hidden_size),
        qk_norm=qk_norm,
        o=reader.dense("o", [hidden_size], config.output_bias, layer, q_size),
        mlp_norm=reader.norm(f"{name}.mlp_norm", config),
        gate_up=reader.dense(*gate_up, config.mlp_bias, layer, hidden_size, interleaved=reader.can_interleave(config)),
        activate=mlp_activation(config),
        down=reader.dense("down", [hidden_size], config.mlp_bias, layer, mlp_size),
        window=window,
    )


class _GgufStore:
    """A GGUF file's tensors."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.where = file.path
        self._file = file
        pairs = family_named(config.family).gguf_rotary_pairs
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads} if pairs else {}

    def stored_names(self) -> Iterable[str]:
        return self._file.tensors

    def stored_name(self, name: str) -> str:
        return name if name == GGUF_ROPE_FACTORS else gguf_name(name)

    def is_transposed(self, name: str) -> bool:
        return False

    def shape(self, stored_name: str) -> tuple[int, ...]:
        return self._file.tensors[stored_name].shape

    def read(self, name: str) -> Tensor:
        array = self._file.read_tensor(self._file.tensors[self.stored_name(name)])
        values = torch.from_numpy(array if array.flags.writeable else array.copy())
        return self._reordered(name, values)

    def read_blocks(self, name: str) -> BlockMatrix | None:
        tensor = self._file.tensors[self.stored_name(name)]
        if tensor.type_name not in BLOCK_BYTES or len(tensor.shape) != 2:
            return None
        # A copy: the file may be replaced while it is served.
        data = torch.from_numpy(self._file.read_blocks(tensor).copy())
        return BlockMatrix(tensor.type_name, self._reordered(name, data))

    def _reordered(self, name: str, values: Tensor) -> Tensor:
        num_heads = self._heads.get(module_of(name))
        return values if num_heads is None else _halves_from_pairs(values, num_heads)


def _halves_from_pairs(values: Tensor, num_heads: int) -> Tensor:
    """Rows (or a bias) of q or k: from rotary pairs that lie side by side to (i, i + head_dim / 2)."""
    rows = values.view(num_heads, -1, 2, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape)


class _FolderStore:
    """The tensors of a Hugging Face folder's safetensors, one file or sharded."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.where = folder
        self._names = family_named(config.family).hf_names
        self._shards: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        for shard in self._shard_names():
            handle = self._open(shard)
            for stored_name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                if stored_name in self._shard_of:
                    first = self._shard_of[stored_name]
                    raise ModelError(f"{folder}: tensor {stored_name!r} is in {first} and in {shard}")
                self._shard_of[stored_name] = shard
        has_base = any(stored_name.startswith(self._names.base) for stored_name in self._shard_of)
        self._with_base = has_base or not self._names.base_may_lack

    def stored_names(self) -> Iterable[str]:
        return self._shard_of

    def stored_name(self, name: str) -> str:
        return name if name == GGUF_ROPE_FACTORS else hf_name(name, self._names, with_base=self._with_base)

    def is_transposed(self, name: str) -> bool:
        return name.endswith(".weight") and module_of(name) in self._names.transposed

    def shape(self, stored_name: str) -> tuple[int, ...]:
        return tuple(self._shards[self._shard_of[stored_name]].get_slice(stored_name).get_shape())

    def read(self, name: str) -> Tensor:
        stored_name = self.stored_name(name)
        shard = self._shard_of[stored_name]
        values: Tensor = self._shards[shard].get_tensor(stored_name)
        if not values.is_floating_point():
            raise ModelError(f"{self.where / shard}: tensor {stored_name!r} is {values.dtype}, not floating point")
        return values

    def read_blocks(self, name: str) -> BlockMatrix | None:
        return None

    def _shard_names(self) -> list[str]:
        index = self.where / _INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
                raise ModelError(f"{index}: weight_map must name a file for each tensor")
            shards = sorted(set(weight_map.values()))
            for shard in shards:
                if Path(shard).name != shard:
                    raise ModelError(f"{index}: weight_map names {shard!r}, which is no plain file name")
            return shards
        if (self.where / _SINGLE).is_file():
            return [_SINGLE]
        found = sorted(path.name for path in self.where.glob("*.safetensors"))
        if len(found) == 1:
            return found
        if found:
            raise ModelError(f"{self.where}: holds {len(found)} safetensors files but no {_INDEX}")
        pickled = sorted(path.name for path in self.where.glob("*.bin"))
        why = f"; {pickled[0]} is a pickle, which is never loaded" if pickled else ""
        raise ModelError(f"{self.where}: holds no *.safetensors{why}")

    def _open(self, shard: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.where / shard
        try:
            self._shards[shard] = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{path}: is missing, but {_INDEX} names it") from None
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors: {one_line(error)}") from error
        return self._shards[shard]
