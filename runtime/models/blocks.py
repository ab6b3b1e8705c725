"""Matrices as a GGUF file stores them: rows of groups of 32 values, each group with its scale.

What a file's bytes mean, and nothing of how a kernel wants them. Formats: ggml's block_q4_0, block_q4_1 and block_q8_0
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pageframe.kernels.cpu import BLOCK_BYTES, GROUP


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix in one of the formats of BLOCK_BYTES: "Q4_0" (a value is scale * (code - 8)), "Q4_1" (scale * code +
    minimum) or "Q8_0" (scale * code).

    Args:
        format: its name.
        data: uint8 [out_features, in_features / 32 * bytes of a group].
    """

    format: str
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.data.shape[0], self.data.shape[1] // BLOCK_BYTES[self.format] * GROUP

    def rows(self, ids: Tensor) -> Tensor:
        """The values of some rows, float32 [len(ids), in_features]."""
        groups = self.data.index_select(0, ids).view(len(ids), -1, BLOCK_BYTES[self.format])
        scale = _halves(groups, 0)
        if self.format == "Q8_0":
            values = scale * groups[:, :, 2:].view(torch.int8)
        else:
            codes = groups[:, :, -GROUP // 2 :]
            codes = torch.cat((codes & 15, codes >> 4), dim=2).float()
            values = scale * (codes - 8) if self.format == "Q4_0" else scale * codes + _halves(groups, 2)
        return values.view(len(ids), -1)


def _halves(groups: Tensor, start: int) -> Tensor:
    """The float16 numbers at a byte of each group, float32 [rows, groups, 1]."""
    return groups[:, :, start : start + 2].contiguous().view(torch.float16).float()
