"""What stands between a layer's matrix products, each kernel against plain torch in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pageframe.kernels.attention import kv_cache_shape
from pageframe.kernels.triton import launches
from pageframe.kernels.triton.activation import ACTIVATIONS, gated
from pageframe.kernels.triton.dtypes import fp8_dtype
from pageframe.kernels.triton.norm import add_rms_norm
from pageframe.kernels.triton.rope import rotate_and_write

EPS = 1e-5
NUM_BLOCKS = 5
MAX_POSITION = 100
NAN = float("nan")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Arithmetic in float32, and one rounding to `dtype`."""
    return {"rtol": 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps, "atol": 1e-5}


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(device, dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


# ---- residual and norm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 7), (2, 64), (1, 576), (4, 1000), (1, 9000)])
def test_add_and_norm(
    device: torch.device, rng: np.random.Generator, num_tokens: int, size: int, has_delta: bool, dtype: torch.dtype
) -> None:
    hidden = normal(rng, num_tokens, size, dtype=dtype, device=device) * 3
    delta = normal(rng, num_tokens, size, dtype=dtype, device=device) if has_delta else None
    weight = normal(rng, size, dtype=torch.float32, device=device)
    total = hidden.double() + (0 if delta is None else delta.double())
    result = add_rms_norm(hidden, delta, weight, EPS)
    assert result.dtype == hidden.dtype == dtype
    torch.testing.assert_close(hidden.double(), total, **tolerance(dtype))
    # What is normed is the sum as the stream now holds it, to the bit.
    assert torch.equal(result, add_rms_norm(hidden, None, weight, EPS))
    torch.testing.assert_close(result.double(), rms_norm(hidden.double(), weight.double()), **tolerance(dtype))


def test_the_norm_goes_where_it_is_told_and_leaves_the_rest(device: torch.device, rng: np.random.Generator) -> None:
    memory = torch.full((4, 50), NAN, device=device)
    hidden = normal(rng, 2, 50, dtype=torch.float32, device=device)
    before = hidden.clone()
    result = add_rms_norm(hidden, None, torch.ones(50, device=device), EPS, out=memory[1:3])
    assert result.data_ptr() == memory[1].data_ptr()
    assert torch.equal(hidden, before)
    expected = rms_norm(before.double(), torch.ones((), device=device))
    torch.testing.assert_close(memory[1:3].double(), expected, **tolerance(torch.float32))
    assert memory[[0, 3]].isnan().all()


def test_a_row_of_zeros_is_normed_to_zeros(device: torch.device) -> None:
    assert not add_rms_norm(torch.zeros(2, 12, device=device), None, torch.ones(12, device=device), EPS).any()


# ---- gated activation -----------------------------------------------------------------------------------------------

ORACLES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of numpy, in the interpreter: 1 / inf is right
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("num_tokens", "size", "dtype"),
    [(1, 1, torch.float32), (3, 96, torch.bfloat16), (2, 1000, torch.float32), (1, 1500, torch.float32)],
)
def test_gated(
    device: torch.device, rng: np.random.Generator, num_tokens: int, size: int, dtype: torch.dtype, activation: str
) -> None:
    gate_up = normal(rng, num_tokens, 2 * size, dtype=dtype, device=device) * 3
    gate_up[0, : size // 2] *= 100
    gate, up = gate_up.double().chunk(2, dim=1)
    result = gated(gate_up, activation)
    assert (result.dtype, result.shape) == (dtype, (num_tokens, size))
    torch.testing.assert_close(result.double(), ORACLES[activation](gate) * up, **tolerance(dtype))


# ---- QK norm, rotation, K and V to their slots ----------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    group: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    kv: str = "float32"
    qk_norm: bool = False

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    def kv_dtype(self, device: torch.device) -> torch.dtype:
        dtype = fp8_dtype(device) if self.kv == "fp8" else getattr(torch, self.kv)
        if dtype is None:
            pytest.skip("this device has no fp8")
        return dtype


HEADS = [
    Heads(),
    Heads(group=3, num_kv_heads=3, qk_norm=True),
    Heads(group=1, num_kv_heads=5, head_dim=80, block_size=1, kv="float16"),
    Heads(group=4, num_kv_heads=1, head_dim=128, block_size=16, dtype=torch.bfloat16, kv="bfloat16", qk_norm=True),
    Heads(group=9, num_kv_heads=2, head_dim=96, kv="int8", qk_norm=True),
    Heads(group=2, num_kv_heads=3, head_dim=16, dtype=torch.bfloat16, kv="int8"),
    Heads(group=2, num_kv_heads=5, head_dim=256, block_size=8, kv="fp8"),
    Heads(group=7, num_kv_heads=1, head_dim=80, dtype=torch.bfloat16, kv="fp8", qk_norm=True),
]


@dataclass(frozen=True)
class Inputs:
    """One call of `rotate_and_write`, and its heads in float64: those of q and k normed and rotated."""

    qkv: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    qk_norm: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor


def make_inputs(rng: np.random.Generator, heads: Heads, num_tokens: int, device: torch.device) -> Inputs:
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    qkv = normal(rng, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=heads.dtype, device=device)
    positions = torch.from_numpy(rng.integers(0, MAX_POSITION, num_tokens)).to(device)
    angles = torch.from_numpy(rng.uniform(0, 6, (MAX_POSITION, head_dim // 2))).to(device)
    # Each table is one half of a wider one, as a decoder's are.
    cos, sin = angles.cos().float().repeat(1, 2), angles.sin().float().repeat(1, 2)
    num_slots = NUM_BLOCKS * heads.block_size
    inner = rng.permutation(np.arange(1, num_slots - 1))[:1]
    slots = rng.permutation([0, num_slots - 1, *inner, -1, -1])[:num_tokens]
    norm = normal(rng, num_heads + num_kv_heads, head_dim, dtype=torch.float32, device=device)
    split = qkv.double().view(num_tokens, -1, head_dim).split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    qk = rms_norm(split[0], norm.double()) if heads.qk_norm else split[0]
    pairs = torch.complex(*qk.chunk(2, dim=2)) * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    rotated = torch.cat((pairs.real, pairs.imag), dim=2)
    return Inputs(
        qkv=qkv,
        positions=positions,
        cos=cos[:, : head_dim // 2],
        sin=sin[:, head_dim // 2 :],
        slots=torch.from_numpy(slots).to(device),
        qk_norm=norm if heads.qk_norm else None,
        q=rotated[:, :num_heads],
        k=rotated[:, num_heads:],
        v=split[1],
    )


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rotated_and_written(device: torch.device, rng: np.random.Generator, heads: Heads) -> None:
    inputs = make_inputs(rng, heads, 5, device)
    kv_dtype = heads.kv_dtype(device)
    shape = kv_cache_shape(NUM_BLOCKS, heads.num_kv_heads, heads.block_size, heads.head_dim)
    has_scales = kv_dtype.itemsize == 1
    # Bytes that no kernel writes here: NaN, or -128 among int8 codes.
    kv_cache = torch.full(shape, NAN if kv_dtype != torch.int8 else -128, device=device).to(kv_dtype)
    kv_scales = torch.full(shape[:-1], NAN, device=device) if has_scales else None

    q = rotate_and_write(
        inputs.qkv,
        inputs.positions,
        inputs.cos,
        inputs.sin,
        inputs.slots,
        kv_cache,
        kv_scales,
        num_heads=heads.num_heads,
        qk_norm=inputs.qk_norm,
        eps=EPS,
    )
    assert (q.dtype, q.shape) == (heads.dtype, (5, heads.num_heads, heads.head_dim))
    torch.testing.assert_close(q.double(), inputs.q, **tolerance(heads.dtype))
    untouched = torch.ones(shape[:-1], dtype=torch.bool)
    for token, slot in enumerate(inputs.slots.tolist()):
        if slot < 0:
            continue
        for part, expected in enumerate((inputs.k[token], inputs.v[token])):
            at = (slot // heads.block_size, part, slice(None), slot % heads.block_size)
            untouched[at] = False
            if kv_scales is None:
                torch.testing.assert_close(kv_cache[at].double(), expected, **tolerance(kv_dtype))
            else:
                check_codes(kv_cache[at], kv_scales[at], expected)
    assert int((~untouched).sum()) == 3 * 2 * heads.num_kv_heads, "three tokens have a slot"
    rest = kv_cache.cpu().float()[untouched]
    assert (rest == -128).all() if kv_dtype == torch.int8 else rest.isnan().all()
    assert kv_scales is None or kv_scales.cpu()[untouched].isnan().all()


def check_codes(codes: Tensor, scales: Tensor, expected: Tensor) -> None:
    """Codes [heads, head_dim] times their scales are the numbers, to the nearest code, and the largest fits exactly."""
    largest = 127 if codes.dtype == torch.int8 else torch.finfo(codes.dtype).max
    torch.testing.assert_close(scales.double(), expected.abs().amax(dim=1) / largest, rtol=1e-5, atol=0)
    error = (codes.double() * scales.double()[:, None] - expected).abs()
    step = scales.double()[:, None].expand_as(expected)
    if codes.dtype != torch.int8:
        # Three bits behind the leading one; below the least normal code the step is as it is there.
        least_normal = torch.finfo(codes.dtype).smallest_normal
        step = torch.maximum(expected.abs(), step * least_normal) / 8
    assert (error <= step * 0.5001 + 1e-5).all()


def test_no_token_is_written_and_all_are_rotated(device: torch.device, rng: np.random.Generator) -> None:
    """Slot -1, as padding has it."""
    heads = Heads()
    inputs = make_inputs(rng, heads, 1, device)
    kv_cache = torch.full(kv_cache_shape(1, heads.num_kv_heads, 4, heads.head_dim), NAN, device=device)
    q = rotate_and_write(
        inputs.qkv,
        inputs.positions,
        inputs.cos,
        inputs.sin,
        torch.tensor([-1], device=device),
        kv_cache,
        num_heads=heads.num_heads,
    )
    torch.testing.assert_close(q.double(), inputs.q, **tolerance(torch.float32))
    assert kv_cache.isnan().all()


def test_a_slot_past_2_to_the_31_numbers(device: torch.device, rng: np.random.Generator) -> None:
    """The pool's memory is never touched but for that slot."""
    heads = Heads(group=1, num_kv_heads=1, head_dim=16, block_size=16)
    num_blocks = 2**31 // (2 * 16 * 16) + 2
    inputs = make_inputs(rng, heads, 1, device)
    codes = torch.empty(kv_cache_shape(num_blocks, 1, 16, 16), dtype=torch.int8, device=device)
    scales = torch.empty(codes.shape[:-1], device=device)
    slots = torch.tensor([num_blocks * 16 - 1], device=device)
    rotate_and_write(inputs.qkv, inputs.positions, inputs.cos, inputs.sin, slots, codes, scales, num_heads=1)
    check_codes(codes[-1, 0, :, -1], scales[-1, 0, :, -1], inputs.k[0])
    check_codes(codes[-1, 1, :, -1], scales[-1, 1, :, -1], inputs.v[0])


def test_each_call_is_one_launch(device: torch.device, rng: np.random.Generator) -> None:
    before = Counter(launches)
    test_rotated_and_written(device, rng, HEADS[0])
    add_rms_norm(torch.ones(2, 3, device=device), torch.ones(2, 3, device=device), torch.ones(3, device=device), EPS)
    gated(torch.ones(2, 6, device=device), "silu")
    assert launches - before == {"rotate_and_write": 1, "add_rms_norm": 1, "gated": 1}
