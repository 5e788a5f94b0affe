"""The `torch` backend: a layer's experts by torch's own matrix products, on any device and in any dtype.

    h[r] = activation(x[token(r)] @ w13[e(r)].T + b13[e(r)])       y[r] = h[r] @ w2[e(r)].T + b2[e(r)]
    out[t] = scaling_factor * sum over j of probs[t, j] * y[place(t, j)]

Rows are put in the order of their experts, then multiplied one expert at a time, or padded to equally many rows an
expert and multiplied in one batch: which is quicker depends on the size of the weights (`_arrange`). fp8 is emulated in
fp32, with the values that the fp8 kernels see. The host learns how many rows each expert has: not for CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..problem import BLOCK, Activation, Gate, Quant
from ..weights import DTYPES, FP8, FP8_MAX, Weights

# Costs of a product, in the weight elements that a bf16 product would get through meanwhile. Measured on AMD Zen 4, two
# threads, torch 2.13, E=16, H=256, I=128, 2026-12: a call 16 us, 65 536 weights 6 us, 21 rows as long as their weights;
# decoding e4m3 to fp32 7 times as long, copying the weights of some experts once.
CALL_COST = 175_000
ROWS_PER_PASS = 20
DECODE_COST = 7


@torch.no_grad()
def torch_experts(
    x, weights: Weights, ids, probs, *, expert_map=None, weight_on_input=False, scaling_factor=1.0, out=None
):
    """out[t] = scaling_factor * sum over j of probs[t, j] * expert(ids[t, j])(x[t]); a slot without an expert adds 0.

    Shapes    x [T, H] | ids, probs [T, top_k] -> out [T, H]; the weights may be transposed views
    Dtypes    x, out as weights.dtype; ids int32 or int64; probs any floating; activation and sum over j in fp32
    weight_on_input   x @ w13.T is multiplied by probs, y is not
    """
    rows = _arrange(ids, weights, expert_map)
    if rows is None:
        return torch.zeros_like(x) if out is None else out.zero_()
    w13, w2 = _matrices(weights)
    gate_up = _product(_operand(x, w13, weights.x_scale).index_select(0, rows.token), rows, w13)
    if weight_on_input:
        gate_up = gate_up.float() * probs.reshape(-1, 1).index_select(0, rows.slot).float()
    if weights.w13_bias is not None:
        gate_up = gate_up.float() + weights.w13_bias.index_select(0, rows.expert(weights.experts))
    h = _activate(gate_up, weights.activation).to(x.dtype)
    y = _product(_operand(h, w2, weights.h_scale), rows, w2)
    if weights.w2_bias is not None:
        y = y.float() + weights.w2_bias.index_select(0, rows.expert(weights.experts))
    sums = _combine(y.to(x.dtype), rows, None if weight_on_input else probs, scaling_factor)
    return sums if out is None else out.copy_(sums)


@dataclass(frozen=True)
class _Rows:
    """The rows that are multiplied: routed rows in the order of their experts, and padding.

    local    [T * top_k] slot -> expert, or E where it is skipped
    slot     [rows] row -> slot; of padding: any
    place    [T, top_k] slot -> row; where it is skipped -> rows, one past the last
    batch    rows of each expert when padded, else 0
    experts  when padded: the experts in order, or None for all of them
    spans    when not padded: (expert, first row, end row)
    """

    local: torch.Tensor
    slot: torch.Tensor
    place: torch.Tensor
    skipped: bool
    batch: int = 0
    experts: torch.Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] = ()

    @property
    def token(self):
        """[rows] row -> token"""
        top_k = self.place.shape[1]
        return self.slot if top_k == 1 else self.slot // top_k

    def expert(self, experts: int):
        """[rows] row -> expert; of padding: any."""
        return self.local.index_select(0, self.slot).clamp_(max=experts - 1)


def _arrange(ids, weights: Weights, expert_map) -> _Rows | None:
    """The rows of ids, padded or not, whichever is quicker; None when there is none."""
    if not ids.numel():
        return None
    experts, elements = weights.experts, weights.w13[0].numel() + weights.w2[0].numel()
    local, skipped = _local_ids(ids, experts, expert_map)
    if ids.shape[0] == 1 and not skipped and elements <= CALL_COST:
        slot = torch.arange(local.numel(), device=local.device)
        return _Rows(local, slot, slot.view(ids.shape), False, batch=1, experts=local)
    counts = torch.bincount(local, minlength=experts + 1).tolist()
    routed = local.numel() - counts.pop()
    if not routed:
        return None
    hit = [expert for expert, count in enumerate(counts) if count]
    peak = _round_up(max(counts))

    stored = weights.w13.dtype == _compute_dtype(weights)
    one = elements * (1 if stored else 2 if weights.quant is Quant.NONE else 1 + DECODE_COST)
    by_row = elements / ROWS_PER_PASS
    apart = len(hit) * (2 * CALL_COST + one) + routed * by_row
    taken = 2 * CALL_COST + len(hit) * (one + elements + peak * by_row)  # elements: a copy of them is made
    whole = 2 * CALL_COST + experts * (one + (0 if stored else elements) + peak * by_row)
    order = local.argsort(stable=True)[:routed]
    if apart <= min(taken, whole):
        return _in_spans(local, ids.shape, order, counts, skipped)
    return _padded(local, ids.shape, order, counts, None if whole <= taken else hit, peak, skipped)


def _local_ids(ids, experts: int, expert_map):
    """Flat int64 [T * top_k]: the expert of each slot, or `experts` where it is skipped; and whether any is."""
    ids = ids.reshape(-1).long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.long()[ids * known], -1)
    low, high = (int(bound) for bound in ids.aminmax())
    skipped = low < 0 or high >= experts
    return (torch.where((ids >= 0) & (ids < experts), ids, experts) if skipped else ids), skipped


def _in_spans(local, shape, order, counts, skipped: bool) -> _Rows:
    spans, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, first, first + count))
            first += count
    place = local.new_full(shape, len(order))
    place.view(-1)[order] = torch.arange(len(order), device=local.device)
    return _Rows(local, order, place, skipped, spans=tuple(spans))


def _padded(local, shape, order, counts, hit, peak: int, skipped: bool) -> _Rows:
    shift, first, group = [0] * len(counts), 0, 0  # expert -> what its rows' places move by
    for expert, count in enumerate(counts):
        shift[expert] = (expert if hit is None else group) * peak - first
        first += count
        group += count > 0
    groups = len(counts) if hit is None else len(hit)
    shift = torch.tensor(shift, device=local.device).index_select(0, local.index_select(0, order))
    row = torch.arange(len(order), device=local.device) + shift
    slot = local.new_zeros(groups * peak)
    slot[row] = order
    place = local.new_full(shape, groups * peak)
    place.view(-1)[order] = row
    experts = None if hit is None else torch.tensor(hit, device=local.device)
    return _Rows(local, slot, place, skipped, batch=peak, experts=experts)


@dataclass(frozen=True)
class _Matrix:
    """w13 or w2 of all experts, handed out in the dtype that is multiplied.

    scale   [E, 1 or N or blocks, 1 or blocks]; block_row [N] names the row of blocks that a row of w takes
    """

    w: torch.Tensor  # [E, N, K]
    dtype: torch.dtype
    quant: Quant
    scale: torch.Tensor | None = None
    block_row: torch.Tensor | None = None

    def take(self, experts):
        """[G, N, K] of the experts that a tensor or a slice names; None: of all."""
        w, scale = _take(self.w, experts), _take(self.scale, experts)
        if w.dtype != FP8:
            return w.to(self.dtype)
        w = _fp8_to_fp32(w)
        if self.block_row is None:
            return w.mul_(scale)
        for block, columns in enumerate(w.split(BLOCK, 2)):
            columns.mul_(scale[:, self.block_row, block, None])
        return w


def _take(tensor, experts):
    if tensor is None or experts is None:
        return tensor
    if isinstance(experts, slice):
        return tensor[experts]
    if tensor.ndim == 3 and tensor.stride(1) == 1:  # a transposed view stays one
        return tensor.transpose(1, 2).index_select(0, experts).transpose(1, 2)
    return tensor.index_select(0, experts)


def _matrices(weights: Weights) -> tuple[_Matrix, _Matrix]:
    quant, dtype = weights.quant, _compute_dtype(weights)
    s13, s2 = weights.w13_scale, weights.w2_scale
    if quant is Quant.NONE:
        return _Matrix(weights.w13, dtype, quant), _Matrix(weights.w2, dtype, quant)
    if quant is not Quant.FP8_BLOCK:
        s13, s2 = (s.view(len(s), -1, 1) for s in (s13, s2))
        return _Matrix(weights.w13, dtype, quant, s13), _Matrix(weights.w2, dtype, quant, s2)
    row = torch.arange(weights.hidden, device=weights.device) // BLOCK
    return _Matrix(weights.w13, dtype, quant, s13, _w13_block_row(weights)), _Matrix(weights.w2, dtype, quant, s2, row)


def _w13_block_row(weights: Weights):
    """[N] row of w13 -> row of its scale blocks."""
    row = torch.arange(weights.w13.shape[1], device=weights.device)
    if not weights.split_scale:
        return row // BLOCK
    up, column = (row % 2, row // 2) if weights.activation.interleaved else (row // weights.inter, row % weights.inter)
    return up * -(-weights.inter // BLOCK) + column // BLOCK


def _compute_dtype(weights: Weights) -> torch.dtype:
    """fp32 for fp8, and for fp16 on a CPU, whose fp16 products are ten times slower than its fp32 ones."""
    dtype = DTYPES[weights.dtype]
    wide = weights.quant is not Quant.NONE or (dtype is torch.float16 and weights.device.type == "cpu")
    return torch.float32 if wide else dtype


def _fp8_to_fp32(q):
    """Exact; on a CPU by table, where torch's own cast takes five times as long."""
    if q.device.type != "cpu":
        return q.float()
    if not q.is_contiguous() and q.ndim == 3 and q.transpose(1, 2).is_contiguous():
        return _fp8_to_fp32(q.transpose(1, 2)).transpose(1, 2)
    table = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return table.index_select(0, q.reshape(-1).view(torch.uint8).int()).view(q.shape)


def _operand(x, matrix: _Matrix, scale):
    """x as it is multiplied: in the product's dtype, rounded to e4m3 values where it is quantised."""
    if matrix.quant is Quant.NONE:
        return x.to(matrix.dtype)
    x = x.float()
    if scale is None:
        groups = x.split(BLOCK if matrix.quant is Quant.FP8_BLOCK else x.shape[1], 1)
        scales = [group.abs().amax(1, keepdim=True).clamp_(min=1e-10).div_(FP8_MAX) for group in groups]
    else:
        groups, scales = (x,), (scale,)
    parts = [
        _fp8_to_fp32((group / s).clamp_(-FP8_MAX, FP8_MAX).to(FP8)).mul_(s)
        for group, s in zip(groups, scales, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _product(x, rows: _Rows, matrix: _Matrix):
    """y[r] = x[r] @ w[expert(r)].T"""
    if rows.batch:
        w = matrix.take(rows.experts)
        return torch.bmm(x.view(len(w), rows.batch, -1), w.transpose(1, 2)).view(len(x), -1)
    y = x.new_empty(len(x), matrix.w.shape[1])
    for expert, first, end in rows.spans:
        end = min(first + _round_up(end - first), len(x))  # what it adds, the experts after it overwrite
        torch.mm(x[first:end], matrix.take(slice(expert, expert + 1))[0].T, out=y[first:end])
    return y


def _round_up(rows: int) -> int:
    """A multiple of 16 from 32 on: oneDNN builds a product anew for every size, which takes as long as 100 rows."""
    return rows if rows < 32 else -(-rows // 16) * 16


def _activate(gate_up, activation: Activation):
    """h, in fp32."""
    if not activation.gated:
        return _gate(gate_up.float(), activation)
    if activation.interleaved:
        gate, up = gate_up[:, ::2].float(), gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, 1)
        gate = gate.float()
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.float().clamp(-activation.limit, activation.limit)
    if activation.beta:
        up = up.float() + activation.beta
    return _gate(gate, activation).mul_(up)


def _gate(g, activation: Activation):
    if activation.gate is Gate.SILU:
        return F.silu(g) if activation.alpha == 1.0 else torch.sigmoid(g * activation.alpha).mul_(g)
    if activation.gate is Gate.RELU2:
        return F.relu(g).square_()
    return F.gelu(g, approximate="tanh" if activation.gate is Gate.GELU_TANH else "none")


def _combine(y, rows: _Rows, probs, scaling_factor: float):
    """out[t] = scaling_factor * sum over j of probs[t, j] * y[place[t, j]], skipped slots left out; one rounding."""
    place, dtype = rows.place, y.dtype
    if probs is None:
        probs = y.new_ones(place.shape)
    if probs.dtype != y.dtype or scaling_factor != 1.0:
        probs = probs.float() * scaling_factor
    if rows.skipped:
        probs = probs.masked_fill(place == len(y), 0.0)
        y = torch.cat([y, y.new_zeros(1, y.shape[1])])
    if probs.dtype != y.dtype:
        if y.dtype is torch.bfloat16:  # as the sum of two bf16 numbers: quicker than y in fp32, and as exact as needed
            high = probs.bfloat16()
            probs, place = torch.cat([high, (probs - high).bfloat16()], 1), torch.cat([place, place], 1)
        else:
            y = y.float()
    return F.embedding_bag(place, y, per_sample_weights=probs, mode="sum").to(dtype)  # accumulates in fp32
