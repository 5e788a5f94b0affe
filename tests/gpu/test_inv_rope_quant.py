"""The inverse-RoPE kernel on a Hopper GPU: one compilation, graphs, large addresses, against vLLM's own kernel."""

import pytest
import torch

from expertile.kernels import inv_rope_quant
from expertile.kernels.inv_rope_quant import fused_inv_rope_fp8_quant
from expertile.reference_rope import fused_inv_rope_fp8_quant as reference

MAX_POS = 8192
#: What fp32 may differ by, relative to the block's largest value.
FP32 = 4e-7


def angles():
    turn = torch.arange(MAX_POS, dtype=torch.float64)[:, None] * 10_000.0 ** -(torch.arange(32).double() / 32)
    return torch.cat([turn.cos(), turn.sin()], 1).float().cuda()


def make(tokens, heads, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    o = torch.empty(tokens, heads, 512, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
    o *= torch.exp2(torch.randint(-12, 13, (tokens, heads, 1), device="cuda", generator=generator)).bfloat16()
    return o, torch.randint(0, MAX_POS, (tokens,), device="cuda", generator=generator)


def judge(q, scales, o, positions, groups, rows):
    """The same bar as in the interpreter: the reference's scale (or its neighbour on an edge), the nearest e4m3."""
    want_q, want = reference(o[rows], positions[rows], angles(), groups)
    ratio = scales[rows].double() / want
    edge = want_q.unflatten(-1, (-1, 128)).abs().amax(-1)
    near = torch.minimum((edge - 448).abs(), (edge - 224).abs()) / 448 < FP32
    assert (near | (ratio == 1)).all() and ratio.log2().abs().le(1).all()
    value = want_q / ratio.repeat_interleave(128, -1)
    nearest = (value.clamp(-448, 448).float().to(q.dtype).double() - value).abs()
    assert ((q[rows].double() - value).abs() <= nearest + 448 * FP32).all()


@pytest.mark.parametrize(("heads", "groups"), [(64, 8), (8, 1), (16, 2), (6, 2)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 1000])
def test_values_scales_and_padding_are_those_of_float64(tokens, heads, groups):
    o, positions = make(tokens, heads)
    width, padded = heads // groups * 512, -(-tokens // 4) * 4
    guard = 1024
    memory = torch.full((groups * tokens * width + 2 * guard,), 0xFF, dtype=torch.uint8, device="cuda")
    table = torch.full((groups * width // 128 * padded + 2 * guard,), torch.nan, device="cuda")
    out = memory[guard:-guard].view(torch.float8_e4m3fn).view(groups, tokens, width)
    scales = table[guard:-guard].view(groups, width // 128, padded)
    q, found = fused_inv_rope_fp8_quant(o, positions, angles(), groups, out=out, scales=scales)
    judge(q, found, o, positions, groups, torch.arange(tokens, device="cuda"))
    assert (scales[:, :, tokens:] == 0).all()
    assert (memory[:guard] == 0xFF).all() and (memory[-guard:] == 0xFF).all()
    assert table[:guard].isnan().all() and table[-guard:].isnan().all()


def test_nan_stays_nan_and_alone():
    o, positions = make(5, 8)
    want = fused_inv_rope_fp8_quant(o, positions, angles(), 1)
    o[3, 2, 7] = torch.nan
    q, _ = fused_inv_rope_fp8_quant(o, positions, angles(), 1)
    assert q[3, 0, 2 * 512 + 7].float().isnan()
    changed = q.view(torch.uint8) != want[0].view(torch.uint8)
    assert changed.nonzero()[:, 0].unique().tolist() == [3] and (changed[3, 0].nonzero() // 128 == 2 * 4).all()


def test_one_variant_serves_every_number_of_tokens():
    kernel = inv_rope_quant._inv_rope_quant_kernel
    kernel.device_caches.clear()
    o, positions = make(4100, 8)
    for tokens in [*range(1, 70), 128, 1000, 1024, 4095, 4096, 4097]:
        for start in (0, 1):  # positions from an odd address on are no variant either
            fused_inv_rope_fp8_quant(o[:tokens], positions[start : start + tokens], angles(), 1)
    torch.cuda.synchronize()
    (caches,) = kernel.device_caches.values()
    assert len(caches[0]) == 1


def test_rows_beyond_2_to_the_31_values():
    """131072 tokens of 64 heads: 2^32 values of o, 2^32 bytes of q."""
    if torch.cuda.get_device_properties(0).total_memory < 30e9:
        pytest.skip("needs 14 GB of GPU memory")
    tokens = 131_072
    o = torch.empty(tokens, 64, 512, device="cuda", dtype=torch.bfloat16).normal_()
    positions = torch.arange(tokens, device="cuda") % MAX_POS
    q, scales = fused_inv_rope_fp8_quant(o, positions, angles(), 8)
    rows = torch.tensor([0, 1, 32_767, 32_768, 65_535, 65_536, 65_537, 98_305, tokens - 1], device="cuda")
    judge(q, scales, o, positions, 8, rows)


def test_a_graph_replays_with_other_values():
    o, positions = make(37, 8)
    q, scales = fused_inv_rope_fp8_quant(o, positions, angles(), 1)
    table = angles()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    out = torch.empty(1, 37, 4096, dtype=torch.float8_e4m3fn, device="cuda")
    kept = torch.empty(1, 32, 40, device="cuda")
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        q, scales = fused_inv_rope_fp8_quant(o, positions, table, 1, out=out, scales=kept)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for seed in (1, 2, 3):
        new_o, new_positions = make(37, 8, seed)
        o.copy_(new_o)
        positions.copy_(new_positions)
        out.view(torch.uint8).fill_(0xFF)
        kept.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        judge(q, scales, o, positions, 1, torch.arange(37, device="cuda"))
        assert (kept[:, :, 37:] == 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 64, 257])
def test_it_replaces_vllms_kernel(tokens):
    """Shapes, strides, dtypes, scales, and q but for values that lie within fp32's error of a tie."""
    vllm = pytest.importorskip("vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant")
    o, positions = make(tokens, 16)
    theirs = vllm.fused_inv_rope_fp8_quant(o, positions, angles(), n_groups=2, heads_per_group=8)
    ours = fused_inv_rope_fp8_quant(o, positions, angles(), 2)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
    assert (ours[1] == theirs[1]).double().mean() > 0.999
    assert (ours[0].view(torch.uint8) == theirs[0].view(torch.uint8)).double().mean() > 0.999
