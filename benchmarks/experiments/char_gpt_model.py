"""A small GPT over characters, of GPT-2's shape, as torch modules that can be trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    vocab_size: int
    layers: int
    heads: int
    width: int
    context: int

    @property
    def num_weights(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocab_size + self.context) * self.width + self.layers * block + 2 * self.width

    def training_bytes(self, batch: int) -> int:
        """What a training takes at least: weights, gradients and two moments in float32; of each position the values
        that a block keeps for its gradients, in bf16, and the float32 logits and their gradients."""
        position = self.layers * 16 * self.width * 2 + self.vocab_size * 2 * 4
        return 16 * self.num_weights + batch * self.context * position


class Conv1D(nn.Module):
    """A linear map whose weight lies [in_features, out_features], as GPT-2 stores it."""

    def __init__(self, in_features: int, out_features: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) * deviation)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = dropout
        self.c_attn = Conv1D(shape.width, 3 * shape.width, 0.02)
        self.c_proj = Conv1D(shape.width, shape.width, 0.02 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        mixed = self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout, self.training)


class Mlp(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.c_fc = Conv1D(shape.width, 4 * shape.width, 0.02)
        self.c_proj = Conv1D(4 * shape.width, shape.width, 0.02 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, NORM_EPS)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.width, NORM_EPS)
        self.mlp = Mlp(shape, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        summed: Tensor = x + self.mlp(self.ln_2(x))
        return summed


class CharGpt(nn.Module):
    """GPT-2 with GPT-2's parameter names; the output projection is the embedding."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, NORM_EPS)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, length] -> logits [batch, length, vocab_size]."""
        x = F.dropout(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])), self.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits: Tensor = F.linear(self.ln_f(x), self.wte.weight)
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean loss, in nats per character, of windows int64 [batch, context + 1]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
