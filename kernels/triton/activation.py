"""The kernel between an MLP's matrices: one half of the projection, activated, times the other half."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Kernels are written in Triton's language, whose types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pageframe.kernels.triton import UNFUSED, launches

#: What the gate goes through; see `gated`.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: Columns of the result that one program makes.
MAX_BLOCK = 1024
SQRT_HALF = tl.constexpr(0.7071067811865476)
#: -2 * sqrt(2 / pi)
TANH_FACTOR = tl.constexpr(-1.5957691216057308)


@triton.jit
def gated_kernel(
    gate_up_ptr,  # [num_tokens, 2 * SIZE], contiguous: gate, then up
    out_ptr,  # [num_tokens, SIZE], contiguous, out
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """One program: BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    gate_ptr = gate_up_ptr + token * (2 * SIZE) + column
    gate = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF))
    else:
        # 0.5 * (1 + tanh(x)) = 1 / (1 + exp(-2x)), right also where exp overflows, as above
        activated = gate / (1.0 + tl.exp((gate + 0.044715 * gate * gate * gate) * TANH_FACTOR))
    tl.store(out_ptr + token * SIZE + column, (activated * up).to(out_ptr.dtype.element_ty), mask=exists)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up, in float32, rounded once.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], contiguous: gate, then up.
        activation: one of ACTIVATIONS: x * sigmoid(x), x * Phi(x), and Phi's approximation by tanh (Hendrycks and
            Gimpel, https://arxiv.org/abs/1606.08415).

    Returns:
        [num_tokens, intermediate_size] in gate_up's dtype.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "the kernel counts on contiguous rows"
    assert activation in ACTIVATIONS, f"the activation is {activation!r}"
    out = gate_up.new_empty((num_tokens, size))
    block = min(MAX_BLOCK, triton.next_power_of_2(size))
    gated_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, ACTIVATION=activation, **UNFUSED
    )
    launches["gated"] += 1
    return out
