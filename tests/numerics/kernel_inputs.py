"""What tests of kernels work on: layers with every trap laid, memory that shows a stray write, and the bar.

Traps that every layer has: experts without a row are NaN in weights, scales and biases; the rows of x lie apart with
NaN between them; scratch memory is 0xFF bytes (NaN in every float, -1 in int32); outputs are too, with guard rows on
both sides that must stay so.
Interpreter  no bf16 and no programmatic launches; its casts to e4m3 are mended in conftest.py
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch

from expertile import reference
from expertile.api import prepare
from expertile.hardware import H200
from expertile.plans import RING_WARPS, Backend, GemmConfig, Plan, Stream
from expertile.policy import ring_reasons, tile_reasons
from expertile.policy.tiles import fused_quant, stream_tiles
from expertile.problem import BLOCK, Problem, activation
from expertile.reference import local_ids
from expertile.routing import Routing
from expertile.runtime import execute, triton_experts
from expertile.runtime.torch_experts import torch_experts
from expertile.runtime.workspace import Workspace
from expertile.weights import DTYPES, FP8, FP8_MAX, Weights

INTERPRETER = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETER else "cpu"
DTYPES_HERE = ("fp16",) if DEVICE == "cpu" else ("bf16", "fp16")
POISON = 0xFF

#: Added to 1.5 times torch's error: what fp32 sums in another order may differ by.
EPSILON = 2e-6
#: e4m3 products on WGMMA keep about 14 bits of a partial sum; the interpreter's are exact.
FP8_SUM = 0.0 if DEVICE == "cpu" else 5e-4


def fp8_sums(contracted: int) -> float:
    """The most that a value of h may be off for that, relative to its row's largest, in units of FP8_SUM.

    Every 32 products are cut off towards zero, so it grows with their number. Emulated with 13 bits kept: 1.3 for 288
    values, 6.0 to 7.7 for 2064.
    """
    return max(4.0, contracted / 32 / 6.5)


SWAP = GemmConfig(16, 64, 64, 4, 3, swap=True)
TMA = GemmConfig(16, 128, 64, 4, 3, swap=True, tma=True)
PLAIN = GemmConfig(64, 64, 64, 4, 3, swap=False, group_m=4)
SPECIALIZED = GemmConfig(128, 256, 64, 12, 4, group_m=2, specialized=True)


@dataclass(frozen=True)
class Case:
    """Sizes and options of one layer, and how its rows are spread over the experts."""

    tokens: int = 5
    hidden: int = 64
    inter: int = 32
    experts: int = 4
    top_k: int = 2
    dtype: str = "fp16"
    quant: str = "none"
    static: bool = False
    split_scale: bool = False
    activation: str = "silu"
    interleaved: bool = False
    bias: bool = False
    weight_on_input: bool = False
    ids: str = "uniform"  # a key of IDS
    mapped: bool = False  # ids name twice as many experts, of which every other one is here
    id_dtype: torch.dtype = torch.int32
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k)) or "default"


@dataclass(frozen=True, eq=False)
class Layer:
    case: Case
    x: torch.Tensor
    weights: Weights
    ids: torch.Tensor
    probs: torch.Tensor
    expert_map: torch.Tensor | None = None

    @property
    def local(self):
        """[T, top_k] expert here of each slot, -1 where it is skipped."""
        return local_ids(self.ids, self.weights.experts, self.expert_map)


def _uniform(tokens, total, top_k, generator):
    return torch.rand(tokens, total, generator=generator).topk(top_k, dim=1).indices


def _bad(tokens, total, top_k, generator):
    """Case 6: some ids name no expert."""
    ids = _uniform(tokens, total, top_k, generator)
    wrong = torch.tensor([-1, total, total + 7, 2**30])
    place = torch.rand(tokens, top_k, generator=generator) < 0.4
    ids[place] = wrong[torch.arange(int(place.sum())) % 4]
    return ids


def _twice(tokens, total, top_k, generator):
    """Case 7: every token has one expert twice."""
    ids = _uniform(tokens, total, top_k, generator)
    ids[:, -1] = ids[:, 0]
    return ids


IDS = {
    "uniform": _uniform,
    "one": lambda tokens, total, top_k, generator: torch.full((tokens, top_k), total // 2),  # the others have no row
    "none": lambda tokens, total, top_k, generator: torch.full((tokens, top_k), -1),
    "bad": _bad,
    "twice": _twice,
}


def make_layer(case: Case) -> Layer:
    generator = torch.Generator().manual_seed(case.seed)
    total = case.experts * (2 if case.mapped else 1)
    ids = IDS[case.ids](case.tokens, total, case.top_k, generator)
    mapped = None
    if case.mapped:
        mapped = torch.full((total,), -1, dtype=torch.int32)
        mapped[1::2] = torch.randperm(case.experts, generator=generator).int()
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(DTYPES_BY_NAME[case.dtype])
    probs = torch.randn(case.tokens, case.top_k, generator=generator).softmax(1)
    weights = make_weights(case, local_ids(ids, case.experts, mapped), generator)
    layer = Layer(case, x, weights, ids.to(case.id_dtype), probs, mapped)
    layer = replace(layer, **{name: on_device(getattr(layer, name)) for name in ("x", "ids", "probs", "expert_map")})
    return replace(layer, x=widened(layer.x))


DTYPES_BY_NAME = {dtype.value: found for dtype, found in DTYPES.items()}


def on_device(tensor):
    return None if tensor is None else tensor.to(DEVICE)


def widened(tensor):
    """The same values with 16 NaN behind each row, so that whoever reads past a row shows."""
    wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 16).float().fill_(torch.nan).to(tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def make_weights(case: Case, local, generator) -> Weights:
    act = activation(case.activation, interleaved=case.interleaved)
    rows = case.inter * (2 if act.gated else 1)
    unused = torch.ones(case.experts, dtype=torch.bool)
    unused[local[local >= 0].unique()] = False

    def poisoned_where_unused(tensor):
        tensor[unused] = torch.nan
        return on_device(tensor)

    fields, matrices, poisoned = {}, [], ["w13_bias", "w2_bias"] if case.bias else []
    for name, shape, split in (
        ("w13", (rows, case.hidden), case.split_scale),
        ("w2", (case.hidden, case.inter), False),
    ):
        w = torch.randn(case.experts, *shape, generator=generator)
        if case.quant == "none":
            w = (w * shape[1] ** -0.5).to(DTYPES_BY_NAME[case.dtype])
        else:
            w = (w * 100).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            scale = weight_scales(case.quant, case.experts, shape, split) * shape[1] ** -0.5 / 100
            fields[f"{name}_scale"] = on_device(scale)
            poisoned.append(f"{name}_scale")
            w = w.float()
        w = poisoned_where_unused(w)
        matrices.append(w if case.quant == "none" else w.to(FP8))
        if case.bias:
            bias = torch.randn(case.experts, shape[0], generator=generator).to(DTYPES_BY_NAME[case.dtype])
            fields[f"{name}_bias"] = on_device(bias)
    if case.static:
        fields.update(x_scale=4 / FP8_MAX, h_scale=4 / FP8_MAX)  # values beyond 4 are clamped
    if case.quant == "fp8_block":
        fields["split_scale"] = case.split_scale
    weights = prepare(*matrices, quant=case.quant, activation=act, dtype=DTYPES_BY_NAME[case.dtype], **fields)
    for name in poisoned:  # afterwards: prepare refuses such scales
        getattr(weights, name)[unused] = torch.nan
    return weights


def weight_scales(quant: str, experts: int, shape: tuple[int, int], split: bool = False):
    """Cases 16 and 17: scales that no two neighbours share, so that a wrong or transposed one shows."""
    expert = 2.0 ** -torch.arange(experts).remainder(3)
    if quant == "fp8_tensor":
        return expert
    if quant == "fp8_channel":
        return expert[:, None] * 2.0 ** -torch.arange(shape[0]).remainder(5)
    blocks = 2 * -(-shape[0] // 2 // BLOCK) if split else -(-shape[0] // BLOCK)
    i, j = torch.arange(blocks)[:, None], torch.arange(-(-shape[1] // BLOCK))[None, :]
    return expert[:, None, None] * 2.0 ** -((i + j) % 7)


def make_plan(layer: Layer, gemm1: GemmConfig, gemm2: GemmConfig | None = None) -> Plan:
    """A plan for the kernels with these tiles, quantisation of h fused where it can be."""
    problem, gemm1 = problem_of(layer), fitted(gemm1, layer)
    gemm2 = fitted(gemm2 or gemm1, layer)
    fuse = fused_quant(problem, gemm1)
    return Plan(problem, "h200", Backend.TRITON, gemm1, gemm2, fuse_quant=fuse, pdl=not INTERPRETER)


def fitted(config: GemmConfig, layer: Layer) -> GemmConfig:
    """A specialised tile contracts 128 bytes a step."""
    return replace(config, block_k=64 if layer.case.quant == "none" else 128) if config.specialized else config


def make_stream_plan(layer: Layer, gemm1: GemmConfig | None = None) -> Plan:
    """Both products streamed, or with a tile for GEMM1 only the second."""
    problem = problem_of(layer)
    up, down = stream_tiles(problem)
    stream = Stream.BOTH if gemm1 is None else Stream.DOWN
    return Plan(problem, "h200", Backend.TRITON, gemm1 or up, down, stream=stream, pdl=not INTERPRETER)


def make_ring_plan(layer: Layer, block_n: int = 128, stages: int = 4) -> Plan:
    """Both products in one launch."""
    problem = problem_of(layer)
    block_m = max(8, 1 << (problem.tokens - 1).bit_length())
    wide = 64 if layer.case.quant == "none" else 128
    tile = GemmConfig(block_m, block_n, wide, RING_WARPS, stages, True, 1, True)
    return Plan(problem, "h200", Backend.TRITON, tile, tile, stream=Stream.RING, pdl=not INTERPRETER)


def problem_of(layer: Layer) -> Problem:
    total = None if layer.expert_map is None else layer.expert_map.numel()
    case = layer.case
    return layer.weights.problem(case.tokens, case.top_k, total_experts=total, weight_on_input=case.weight_on_input)


def skip_if_refused(plan: Plan):
    """Skips a tile that the policy would not give to this problem, with its reasons."""
    tiles = {Stream.DOWN: (plan.gemm1,), Stream.NO: (plan.gemm1, plan.gemm2)}.get(plan.stream, ())
    reasons = [reason for tile in tiles for reason in tile_reasons(tile, plan.problem, H200)]
    if plan.stream is Stream.RING:
        reasons += ring_reasons(plan.gemm1, plan.problem, H200)
    if INTERPRETER and (plan.stream is Stream.RING or any(tile.specialized for tile in tiles)):
        reasons.append("Gluon has no interpreter")
    if reasons:
        pytest.skip("; ".join(dict.fromkeys(reasons)))


class Poisoned:
    """A tensor in the middle of poisoned memory. `check()` fails when anything around it was written."""

    def __init__(self, shape, dtype, byte: int = POISON):
        item = torch.empty((), dtype=dtype).element_size()
        row = math.prod(shape[1:]) * item
        self.size, self.guard, self.byte = shape[0] * row, -(-2 * row // 256) * 256, byte
        self.memory = torch.full((self.size + 2 * self.guard,), byte, dtype=torch.uint8, device=DEVICE)
        self.tensor = self.memory[self.guard : self.guard + self.size].view(dtype).view(shape)

    def check(self):
        before, after = self.memory[: self.guard], self.memory[self.guard + self.size :]
        assert (before == self.byte).all(), "written before the first row"
        assert (after == self.byte).all(), "written behind the last row"


def run_kernels(plan: Plan, layer: Layer, *, scaling_factor: float = 1.0, backwards: bool = False):
    """out of route, quantize, GEMM1, quantize, GEMM2, combine as `runtime.execute` chains them, in poisoned memory.

    backwards  the tile list is reversed, so that of two tiles that write one row the other wins
    """
    return run_and_keep(plan, layer, scaling_factor, backwards)[0]


def run_and_keep(plan: Plan, layer: Layer, scaling_factor: float = 1.0, backwards: bool = False):
    """out, and what the plan's buffers hold afterwards, by their names."""
    out = Poisoned(layer.x.shape, layer.x.dtype)
    scratch = Poisoned((plan.workspace_bytes,), torch.uint8)
    x = layer.x.clone()
    route = triton_experts.row_routing.route_rows
    with patch.object(triton_experts.row_routing, "route_rows", routed_backwards(route) if backwards else route):
        execute.run(
            plan, layer.x, layer.weights, layer.ids, layer.probs, out.tensor, expert_map=layer.expert_map,
            scaling_factor=scaling_factor, workspace=Workspace(scratch.tensor),
        )  # fmt: skip
    out.check()
    scratch.check()
    assert torch.equal(layer.x, x), "x was written (case 22)"
    return out.tensor, Workspace(scratch.tensor).tensors(plan)


def routed_backwards(route_rows):
    def route(ids, experts, routing, *arguments, **options):
        route_rows(ids, experts, routing, *arguments, **options)
        count = int(routing.tile_count)
        routing.tiles[:count] = routing.tiles[:count].flip(0)
        return routing

    return route


def torch_routing(local, experts: int, block_m: int, spare: int = 3, backwards: bool = False) -> Routing:
    """Routing made by torch from [R] experts, -1 where a slot is skipped; `spare` tiles behind the list."""
    local = local.reshape(-1).cpu()
    order = torch.argsort(torch.where(local < 0, experts, local), stable=True)
    counts = torch.bincount(local[local >= 0], minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    tiles = [
        (expert, first, min(first + block_m, int(offsets[expert + 1])), 0)
        for expert in range(experts)
        for first in range(int(offsets[expert]), int(offsets[expert + 1]), block_m)
    ]
    count = torch.tensor([len(tiles)], dtype=torch.int32)
    end = [(-1, 2**30, 2**30, 2**30)] * spare
    tiles = torch.tensor((tiles[::-1] if backwards else tiles) + end, dtype=torch.int32).view(-1, 4)
    gather = order.int()
    gather[int(offsets[-1]) :] = 2**30  # rows that do not exist
    found = (gather, offsets.int(), tiles, count, torch.zeros(2, dtype=torch.int32))
    return Routing(*map(on_device, found), block_m)


def row_error(y, ref) -> float:
    """max over rows of |y - ref| / |ref|; a row that is zero in ref must be exactly zero."""
    y, ref = y.double(), ref.double()
    size = ref.norm(dim=1)
    assert torch.isfinite(y).all(), f"not finite in rows {(~torch.isfinite(y).all(1)).nonzero().flatten().tolist()}"
    assert (y[size == 0] == 0).all(), "a row without experts is not exactly zero"
    return ((y - ref).norm(dim=1)[size > 0] / size[size > 0]).amax().item() if (size > 0).any() else 0.0


def check_moe(plan: Plan, layer: Layer, scaling_factor: float = 1.0):
    """Runs the layer and returns out. The bar: no row further from float64 than 1.5 times what torch is in its dtype.

    fp8 is held by its stages as well, and on a GPU by them alone: sums of 14 bits put some values of h on the other
    side of a rounding to e4m3, so that h is right and yet another one than float64 has.
    """
    y, buffers = run_and_keep(plan, layer, scaling_factor)
    if layer.case.quant != "none":
        check_stages(y, buffers, plan, layer, scaling_factor)
        if DEVICE == "cuda":
            return y
    options = dict(
        expert_map=layer.expert_map, weight_on_input=layer.case.weight_on_input, scaling_factor=scaling_factor
    )
    arguments = (layer.x, layer.weights, layer.ids, layer.probs)
    torch_error = row_error(torch_experts(*arguments, **options), reference.moe(*arguments, **options, round_h=True))
    assert torch_error < {"fp16": 1e-3, "bf16": 8e-3}[layer.case.dtype], "torch is off: the bar would mean nothing"
    rounds_h = not (plan.fuse_quant or (plan.stream is not Stream.NO and layer.case.static))
    error = row_error(y, reference.moe(*arguments, **options, round_h=rounds_h))
    assert error <= 1.5 * torch_error + EPSILON
    return y


def check_stages(y, buffers, plan: Plan, layer: Layer, scaling_factor: float):
    """fp8, stage by stage: x is rounded to e4m3, or to its neighbour where it lies between the two; h is float64's for
    that x, rounded likewise; y follows from that h.
    """
    w, slots = layer.weights, layer.local.reshape(-1)
    x_q = (buffers["x_q"], buffers.get("x_scale", w.x_scale)) if "x_q" in buffers else None
    if x_q is not None:
        x, nearest = (
            reference.dequantize(q, x_q[1]) for q in (x_q[0], reference.quantize(layer.x, w.quant, x_q[1])[0])
        )
        exact_x = layer.x.double()
        assert ((x - exact_x).abs() <= (nearest - exact_x).abs() + 1e-6 * exact_x.abs()).all()
        if not layer.case.static:
            want = reference.quantize(layer.x, w.quant)[1]
            assert ((x_q[1] - want).abs() <= 1e-6 * want).all()
    exact = exact_h(layer, x_q)
    most = exact.abs().amax(1, keepdim=True)
    # what h may differ by before it is e4m3
    unsure = torch.finfo(layer.x.dtype).eps * exact.abs() + (EPSILON + fp8_sums(w.hidden) * FP8_SUM) * most
    if plan.stream is Stream.RING:  # h lies by expert and token
        slot = (slots >= 0).nonzero().flatten()
        row = slots[slot] * plan.gemm1.block_m + slot // layer.case.top_k
        q, scale = buffers["h_q"][row], w.h_scale if layer.case.static else buffers["h_scale"][row]
    elif plan.stream is Stream.NO:
        slot = buffers["gather"][: int(buffers["offsets"][-1])].long()
        q, scale = buffers["h_q"][: len(slot)], buffers.get("h_scale", w.h_scale)
        scale = scale if layer.case.static else scale[: len(slot)]
        assert torch.equal(slot.sort().values, (slots >= 0).nonzero().flatten())
    else:
        slot = (slots >= 0).nonzero().flatten()
        h = buffers["h"][slot]
        if not layer.case.static:
            assert ((h.double() - exact[slot]).abs() <= unsure[slot]).all()
        q, scale = (h, w.h_scale) if layer.case.static else reference.quantize(h, w.quant)
    if not layer.case.static:
        want = reference.quantize(exact[slot], w.quant)[1].double()
        assert ((scale - want).abs() <= unsure[slot].amax(1, keepdim=True) / FP8_MAX).all()
    h, nearest = (reference.dequantize(each, scale) for each in (q, reference.quantize(exact[slot], w.quant, scale)[0]))
    assert ((h - exact[slot]).abs() <= (nearest - exact[slot]).abs() + unsure[slot]).all()

    rows = torch.zeros(len(slots), w.hidden, dtype=torch.float64, device=DEVICE)
    rows[slot] = reference.grouped_gemm(h, reference.dequantize_weights(w)[1], slots[slot])
    if w.w2_bias is not None:
        rows[slot] += w.w2_bias[slots[slot]].double()
    probs = None if layer.case.weight_on_input else layer.probs
    ref = reference.combine(rows, layer.local, probs, scaling_factor)
    rounded = reference.combine(rows.to(y.dtype), layer.local, probs, scaling_factor).to(y.dtype)
    assert row_error(y, ref) <= 1.5 * row_error(rounded, ref) + EPSILON + FP8_SUM


def exact_h(layer: Layer, x_q=None):
    """h of every slot, [T * top_k, I] float64, before it is rounded; zero or so where the slot is skipped.

    x_q   (q, scale) that the kernels made of x; rounded here otherwise
    """
    w, slots = layer.weights, layer.local.reshape(-1)
    x = reference.dequantize(*(x_q or reference.quantize(layer.x, w.quant, w.x_scale)))
    x = x.repeat_interleave(layer.case.top_k, 0)
    gate_up = reference.grouped_gemm(x, reference.dequantize_weights(w)[0], slots)
    if layer.case.weight_on_input:
        gate_up *= layer.probs.reshape(-1, 1)
    if w.w13_bias is not None:
        gate_up[slots >= 0] += w.w13_bias[slots[slots >= 0]].double()
    return reference.activate(gate_up, w.activation)
