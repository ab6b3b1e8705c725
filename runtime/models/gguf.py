"""Reads the header of a GGUF file (metadata and tensor table) and the values of its tensors.

Every count, length and offset is checked against the file's size before it is used, so a damaged file ends in
one clear error. Knows the container, not what its keys and tensors mean. No torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pageframe.runtime.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 65_535
_LONG_ROW = 4096
_ROWS_AT_ONCE = 16

# Value types of the format: number -> struct code of the fixed-size ones.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table.

    Args:
        shape: outermost dimension first (numpy's order, the reverse of the file's).
        type_id: ggml's number of the storage type.
        type_name: its name, such as "Q4_1".
        start, num_bytes: where the data lies in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    start: int
    num_bytes: int


class GgufFile:
    """An open GGUF file. The metadata is read at once, the tensor table on first use, tensor data when asked for.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or is of a version that is not supported.
    """

    metadata: dict[str, Any]
    """Key -> int, float, bool, str, or a list of one of these."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is empty"
            raise ModelError(f"{path}: cannot be read: {reason}") from error
        self._size = len(self._data)
        self._position = 0
        self._num_tensors, num_keys = self._read_start()
        self.metadata = {}
        for _ in range(num_keys):
            key = self._read_key()
            if key in self.metadata:
                self._fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._read_value(self._read_scalar("I"), key)
        self._table_start = self._position

    @cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        """The tensor table by name, in file order; each entry's data is known to lie within the file.

        Raises:
            ModelError: the table is damaged, the file is truncated, or a type is unknown.
        """
        self._position = self._table_start
        raw: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(self._num_tensors):
            name = self._read_key()
            num_dimensions = self._read_scalar("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                self._fail(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
            shape = tuple(reversed(self._unpack(f"<{num_dimensions}Q")))
            raw.append((name, shape, *self._unpack("<IQ")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            self._fail(f"general.alignment is {alignment!r}; it must be a multiple of 8")
        data_start = -(-self._position // alignment) * alignment
        table: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in raw:
            if name in table:
                self._fail(f"tensor {name!r} appears twice")
            if offset % alignment:
                self._fail(f"tensor {name!r} starts at {offset}, which is no multiple of the alignment {alignment}")
            table[name] = self._located(name, shape, type_id, data_start + offset)
        return table

    def read_tensor(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        """The values of a tensor of the table, dequantised: float32, shape as in the table.

        Raises:
            ModelError: its type cannot be dequantised.
        """
        from gguf import GGMLQuantizationType

        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        kind = GGMLQuantizationType(tensor.type_id)
        if kind == GGMLQuantizationType.F32:
            return raw.view("<f4").reshape(tensor.shape)
        if kind == GGMLQuantizationType.F16:
            return raw.view("<f2").reshape(tensor.shape).astype(np.float32)
        rows = raw.reshape(_num_long_rows(tensor.shape), -1)
        try:
            with np.errstate(all="ignore"):  # a damaged scale may overflow to infinity
                return _dequantised(rows, kind, math.prod(tensor.shape)).reshape(tensor.shape)
        except NotImplementedError:
            self._fail(f"tensor {tensor.name!r} is stored as {tensor.type_name}, which cannot be dequantised")

    def read_blocks(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The bytes of a matrix as they are stored: uint8 [rows, bytes of a row], a view of the file."""
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start).reshape(tensor.shape[0], -1)

    def _read_start(self) -> tuple[int, int]:
        """Magic, version and counts -> (number of tensors, number of metadata keys)."""
        if self._data[:4] != _MAGIC:
            self._fail(f"is no GGUF file: it starts with {self._data[:4]!r}, not {_MAGIC!r}")
        self._position = 4
        version = self._read_scalar("I")
        if version & 0xFFFF == 0 and version:
            self._fail("is a big-endian GGUF file; only little-endian ones are supported")
        if version not in _VERSIONS:
            self._fail(f"has GGUF version {version}; versions 2 and 3 are supported")
        num_tensors, num_keys = self._unpack("<QQ")
        # An entry takes at least 8 + 4 + 8 + 4 + 8 bytes in the tensor table and 8 + 4 + 1 in the metadata.
        for what, count, size in (("tensors", num_tensors, 32), ("metadata keys", num_keys, 13)):
            if count > self._size // size:
                self._fail(f"claims {count} {what}, more than its {self._size} bytes can hold")
        return num_tensors, num_keys

    def _located(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
            values_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self._fail(f"tensor {name!r} has the unknown type {type_id}")
        if 0 in shape or shape[-1] % values_per_block:
            self._fail(f"tensor {name!r} has shape {shape}, which {kind.name} (by {values_per_block}) cannot have")
        num_bytes = math.prod(shape) // values_per_block * bytes_per_block
        if start + num_bytes > self._size:
            self._fail(f"is truncated: tensor {name!r} ends at byte {start + num_bytes}, the file at {self._size}")
        return GgufTensor(name, shape, type_id, kind.name, start, num_bytes)

    def _read_value(self, value_type: int, key: str) -> Any:
        if value_type in _SCALARS:
            return self._read_scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self._read_strings(1)[0]
        if value_type != _ARRAY:
            self._fail(f"metadata key {key!r} has the unknown type {value_type}")
        item_type, count = self._unpack("<IQ")
        if item_type == _STRING:
            return self._read_strings(count)
        if item_type not in _SCALARS:
            self._fail(f"metadata key {key!r} is an array of type {item_type}, which is not supported")
        dtype = np.dtype(_SCALARS[item_type]).newbyteorder("<")
        start = self._advance(count * dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, start).tolist()

    def _read_strings(self, count: int) -> list[str]:
        """`count` strings in a row. A vocabulary holds 10^5 of them, so the loop is kept bare."""
        if count > (self._size - self._position) // 8:
            self._fail(f"is truncated or damaged: an array claims {count} strings at byte {self._position}")
        data, size, position = self._data, self._size, self._position
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            if start > size:
                self._fail_truncated(position)
            position = start + length_at(data, position)[0]
            if position > size:
                self._fail_truncated(start)
            strings.append(data[start:position].decode("utf-8", "replace"))
        self._position = position
        return strings

    def _read_key(self) -> str:
        length = self._read_scalar("Q")
        if length > _MAX_NAME_BYTES:
            self._fail(f"has a name of {length} bytes at byte {self._position}; at most {_MAX_NAME_BYTES} are allowed")
        start = self._advance(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"has a name at byte {start} that is not UTF-8")

    def _read_scalar(self, code: str) -> Any:
        return self._unpack("<" + code)[0]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        start = self._advance(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, start)

    def _advance(self, num_bytes: int) -> int:
        """Moves past `num_bytes` and returns where they start."""
        start = self._position
        if start + num_bytes > self._size:
            self._fail_truncated(start)
        self._position = start + num_bytes
        return start

    def _fail_truncated(self, position: int) -> NoReturn:
        self._fail(f"is truncated or damaged: its header runs past the end of the file at byte {position}")

    def _fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")


def _num_long_rows(shape: tuple[int, ...]) -> int:
    """How many rows to dequantise a tensor as: its own, merged by twos until they are long.

    Types are stored in blocks within a row, so merged rows hold the same blocks. Pieces of _ROWS_AT_ONCE long rows
    stay within a core's cache and are large enough that the time is not spent on calls.
    """
    num_rows, length = math.prod(shape[:-1]), shape[-1]
    while num_rows % 2 == 0 and length < _LONG_ROW:
        num_rows, length = num_rows // 2, length * 2
    return num_rows


def _dequantised(rows: npt.NDArray[np.uint8], kind: Any, num_values: int) -> npt.NDArray[np.float32]:
    """Rows of whole blocks -> their values in one array, converted in pieces so that nothing else of its size exists.

    Args:
        kind: gguf's GGMLQuantizationType.
    """
    from gguf.quants import dequantize

    values = np.empty(num_values, np.float32)
    row_length = num_values // len(rows)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = dequantize(rows[start : start + _ROWS_AT_ONCE], kind)
        values[start * row_length : start * row_length + part.size] = part.reshape(-1)
    return values
