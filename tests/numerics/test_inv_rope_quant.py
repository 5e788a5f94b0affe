"""Attention output rotated back and quantised, against float64: values, scales, layout, padding, what is refused."""

import pytest
import torch

from expertile.errors import ShapeError, UnsupportedProblem
from expertile.kernels import inv_rope_quant
from expertile.kernels.inv_rope_quant import fused_inv_rope_fp8_quant
from expertile.reference_rope import fused_inv_rope_fp8_quant as reference
from expertile.reference_rope import inverse_rope, power_of_two_scales
from expertile.weights import FP8

from .kernel_inputs import DEVICE, Poisoned, on_device

MAX_POS = 4096
#: fp32 rotates and divides: relative to the block's largest value, so that cancellation does not count against it.
FP32 = 4e-7


def angles(max_pos=MAX_POS):
    """cos || sin as a model tabulates them."""
    speed = 10_000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    turn = torch.arange(max_pos, dtype=torch.float64)[:, None] * speed
    return on_device(torch.cat([turn.cos(), turn.sin()], 1).float())


def make(tokens, heads, seed=0, spread=True):
    """o whose blocks differ in size by up to 2^24, with NaN behind each head and each token: strides must be used."""
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(tokens, heads, 4, 128, generator=generator)
    if spread:
        o *= torch.exp2(torch.randint(-12, 13, (tokens, heads, 4, 1), generator=generator).float())
    wide = torch.full((tokens, heads + 1, 520), torch.nan)
    wide[:, :heads, :512] = o.view(tokens, heads, 512)
    positions = torch.randint(0, MAX_POS, (tokens,), generator=generator)
    return on_device(wide.bfloat16())[:, :heads, :512], on_device(positions)


def run(o, positions, cos_sin, groups):
    """(q, scales) in poisoned memory whose guards must stay, and the whole memory of the scales."""
    tokens, heads, _ = o.shape
    width, padded = heads // groups * 512, -(-tokens // 4) * 4
    out, scales = Poisoned((groups, tokens, width), FP8), Poisoned((groups, width // 128, padded), torch.float32)
    kept = o.clone()
    got = fused_inv_rope_fp8_quant(o, positions, cos_sin, groups, out=out.tensor, scales=scales.tensor)
    out.check()
    scales.check()
    assert torch.equal(o.view(torch.int16), kept.view(torch.int16))  # NaN is not equal to itself
    assert got[0].data_ptr() == out.tensor.data_ptr() and got[1].data_ptr() == scales.tensor.data_ptr()
    return *got, scales.tensor


def judge(q, scales, o, positions, cos_sin, groups):
    """Scales are the reference's, or its neighbour's where fp32 cannot tell; no e4m3 number is nearer than q's."""
    want_q, want = reference(o, positions, cos_sin, groups)
    assert q.shape == want_q.shape and scales.shape == want.shape
    ratio = scales.double() / want
    if not (ratio == 1).all():
        edge = want_q.unflatten(-1, (-1, 128)).abs().amax(-1)
        near = torch.minimum((edge - 448).abs(), (edge - 224).abs()) / 448 < FP32
        assert near[ratio != 1].all() and ratio[ratio != 1].log2().abs().eq(1).all()
    value = want_q / ratio.repeat_interleave(128, -1)
    nearest = (value.clamp(-448, 448).float().to(FP8).double() - value).abs()
    assert ((q.double() - value).abs() <= nearest + 448 * FP32).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (6, 2), (8, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 11])
def test_values_scales_and_padding_are_those_of_float64(tokens, heads, groups, dtype):
    o, positions = make(tokens, heads)
    cos_sin = angles()
    q, scales, memory = run(o, positions.to(dtype), cos_sin, groups)
    judge(q, scales, o, positions, cos_sin, groups)
    assert (memory[:, :, tokens:] == 0).all()
    assert torch.equal(memory[:, :, :tokens].permute(2, 0, 1), scales)


@pytest.mark.parametrize("tokens", [1, 3, 4, 6])
def test_the_layout_is_that_of_the_kernel_it_replaces(tokens):
    """q [T, G, D] with strides (D, T * D, 1); scales [T, G, K] with strides (1, K * padded, padded)."""
    o, positions = make(tokens, 4)
    padded = -(-tokens // 4) * 4
    for memory in ({}, {"out": torch.empty(2, tokens, 1024, dtype=FP8, device=DEVICE)}):
        q, scales = fused_inv_rope_fp8_quant(o, positions, angles(), 2, **memory)
        assert (q.dtype, q.shape, q.stride()) == (FP8, (tokens, 2, 1024), (1024, tokens * 1024, 1))
        assert (scales.dtype, scales.shape) == (torch.float32, (tokens, 2, 8))
        assert scales.stride() == (1, 8 * padded, padded)


def test_no_tokens_give_empty_results():
    o = torch.empty(0, 4, 512, dtype=torch.bfloat16, device=DEVICE)
    q, scales = fused_inv_rope_fp8_quant(o, torch.empty(0, dtype=torch.int64, device=DEVICE), angles(), 2)
    assert q.shape == (0, 2, 1024) and scales.shape == (0, 2, 8)


def test_a_head_is_found_by_its_strides():
    """Heads first in memory; and one token, whose stride means nothing."""
    o, positions = make(5, 3)
    across = o.transpose(0, 1).contiguous().transpose(0, 1)
    assert across.stride() == (512, 5 * 512, 1)
    judge(*run(across, positions, angles(), 3)[:2], o, positions, angles(), 3)
    one = o[:1].contiguous().as_strided((1, 3, 512), (3, 512, 1))
    judge(*run(one, positions[:1], angles(), 1)[:2], o[:1], positions[:1], angles(), 1)


def test_a_row_of_o_may_lie_beyond_2_to_the_31_values():
    """Only the pages that are touched take memory."""
    o, positions = make(5, 1)
    far = torch.empty(4 * 2**29 + 512, dtype=torch.bfloat16, device=DEVICE).as_strided((5, 1, 512), (2**29, 512, 1))
    far.copy_(o)
    q, scales = fused_inv_rope_fp8_quant(far, positions, angles(), 1)
    judge(q, scales, o, positions, angles(), 1)


def test_positions_may_start_anywhere():
    o, positions = make(5, 2)
    odd = torch.cat([positions.new_zeros(1), positions])[1:]
    assert odd.data_ptr() % 16 == 8
    judge(*run(o, odd, angles(), 1)[:2], o, positions, angles(), 1)


@pytest.mark.parametrize("size", [-140.0, -45.0, 0.0, 100.0, 127.0])
def test_scales_are_exact_on_and_beside_a_power_of_two(size):
    """absmax 448 * 2^e fits its scale exactly, the next bf16 number above needs the next one."""
    peak = torch.tensor([448.0, 450.0, 446.0, 256.0], dtype=torch.float64) * 2.0 ** min(size, 119.0)
    o = torch.zeros(1, 1, 4, 128, dtype=torch.float64)
    o[..., 0] = peak
    o = on_device(o.view(1, 1, 512).bfloat16())
    q, scales, _ = run(o, on_device(torch.zeros(1, dtype=torch.int64)), angles(), 1)
    assert torch.equal(scales.double(), power_of_two_scales(o.double()))
    judge(q, scales, o, on_device(torch.zeros(1, dtype=torch.int64)), angles(), 1)
    assert (scales > 0).all() and (torch.frexp(scales.double())[0] == 0.5).all()


@pytest.mark.parametrize(("mantissa", "scale"), [(0x5FFFFF, 2.0**-8), (0x600000, 2.0**-8), (0x600001, 2.0**-7)])
def test_the_next_scale_begins_one_fp32_number_above_448(mantissa, scale):
    """Only a rotated value has all the bits: here it is the cosine itself."""
    o = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=DEVICE)
    o[..., 448] = 1.0
    table = on_device(torch.zeros(1, 64, dtype=torch.int32))
    table[0, 0] = (127 << 23) + mantissa
    _, scales, _ = run(o, on_device(torch.zeros(1, dtype=torch.int64)), table.view(torch.float32), 1)
    assert scales[0, 0, 3].item() == scale


def test_zeros_have_the_floors_scale():
    o, positions = torch.zeros(2, 2, 512, dtype=torch.bfloat16, device=DEVICE), on_device(torch.arange(2))
    q, scales, _ = run(o, positions, angles(), 1)
    assert (q.float() == 0).all() and (scales == 2.0**-42).all() and 2.0**-42 >= 1e-10 / 448 > 2.0**-43


def test_one_bad_token_stays_alone():
    o, positions = make(6, 2)
    o = o.clone()
    want = run(o, positions, angles(), 1)
    o[2, 1, 17], o[2, 1, 500] = torch.nan, torch.inf
    q, scales, _ = run(o, positions, angles(), 1)
    others = torch.tensor([0, 1, 3, 4, 5], device=DEVICE)
    assert torch.equal(q[others].view(torch.uint8), want[0][others].view(torch.uint8))
    assert torch.equal(scales[others], want[1][others])
    if DEVICE != "cpu":  # the interpreter's cast, as it is mended here, has no NaN
        assert q[2, 0, 512 + 17].float().isnan()


def test_the_reference_turns_forward_rotation_back():
    """A rotation by +angle, written out pair by pair, comes back to what it was; position 0 is left alone."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 2, 512, generator=generator, dtype=torch.float64)
    positions, table = torch.tensor([0, 1, 5, 17, 300, 1000, 4095]), angles().double().cpu()
    turned = x.clone()
    for token, position in enumerate(positions.tolist()):
        for pair in range(32):
            cos, sin = table[position, pair], table[position, 32 + pair]
            even, odd = x[token, :, 448 + 2 * pair], x[token, :, 449 + 2 * pair]
            turned[token, :, 448 + 2 * pair] = even * cos - odd * sin
            turned[token, :, 449 + 2 * pair] = even * sin + odd * cos
    back = inverse_rope(turned, positions, table)
    assert torch.allclose(back, x, rtol=0, atol=1e-6) and torch.equal(back[0], turned[0])
    assert not torch.allclose(turned[1:], x[1:], atol=1e-2)


def bad(**changes):
    o, positions = torch.zeros(4, 4, 512, dtype=torch.bfloat16, device=DEVICE), on_device(torch.arange(4))
    return dict(o=o, positions=positions, cos_sin=angles(8), groups=2) | changes


BAD = {
    "float16 (4, 4, 512)": lambda: bad(o=torch.zeros(4, 4, 512, dtype=torch.float16, device=DEVICE)),
    "(4, 4, 256)": lambda: bad(o=torch.zeros(4, 4, 256, dtype=torch.bfloat16, device=DEVICE)),
    "groups=3": lambda: bad(groups=3),
    "groups=0": lambda: bad(groups=0),
    "strides (2080, 516, 1)": lambda: bad(
        o=torch.zeros(4, 5, 516, dtype=torch.bfloat16, device=DEVICE)
        .view(-1)[: 4 * 2080]
        .view(4, -1)
        .as_strided((4, 4, 512), (2080, 516, 1))
    ),
    "strides (4096, 1024, 2)": lambda: bad(o=torch.zeros(4, 4, 1024, dtype=torch.bfloat16, device=DEVICE)[..., ::2]),
    "address": lambda: bad(o=torch.zeros(4 * 2048 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(4, 4, 512)),
    "positions are torch.float32": lambda: bad(positions=torch.zeros(4, device=DEVICE)),
    "positions are torch.int64 (3,)": lambda: bad(positions=torch.zeros(3, dtype=torch.int64, device=DEVICE)),
    "strides (2,)": lambda: bad(positions=torch.zeros(8, dtype=torch.int64, device=DEVICE)[::2]),
    "cos_sin is torch.float64": lambda: bad(cos_sin=angles(8).double()),
    "cos_sin is torch.float32 (8, 32)": lambda: bad(cos_sin=angles(8)[:, :32].contiguous()),
    "cos_sin has strides (128, 1)": lambda: bad(cos_sin=angles(16).view(8, 128)[:, :64]),
    "out is torch.bfloat16": lambda: bad(out=torch.empty(2, 4, 1024, dtype=torch.bfloat16, device=DEVICE)),
    "out is torch.float8_e4m3fn (4, 2, 1024)": lambda: bad(out=torch.empty(4, 2, 1024, dtype=FP8, device=DEVICE)),
    "scales is torch.float32 (2, 8, 5)": lambda: bad(scales=torch.empty(2, 8, 5, device=DEVICE)),
    "scales has strides": lambda: bad(scales=torch.empty(2, 4, 8, device=DEVICE).transpose(1, 2)),
}


@pytest.mark.parametrize("word", BAD)
def test_what_does_not_fit_is_named(word):
    with pytest.raises(ShapeError) as error:
        fused_inv_rope_fp8_quant(**BAD[word]())
    assert word in str(error.value)


def test_without_a_hopper_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    arguments = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in bad().items()}
    with pytest.raises(UnsupportedProblem, match=r"cpu.*9\.0"):
        inv_rope_quant.fused_inv_rope_fp8_quant(**arguments)
