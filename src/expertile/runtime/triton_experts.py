"""The TRITON backend: which kernel is launched with what, in the order of the plan."""

from __future__ import annotations

from functools import partial

from ..kernels import combine, decode_experts, grouped_gemm, hopper_gemm, quantize, stream, swapped_gemm
from ..kernels import routing as row_routing
from ..kernels.tiles import Product, Specialization, launch
from ..plans import GemmConfig, Plan, Stream
from ..problem import Quant
from ..routing import Routing
from ..weights import Weights
from .launches import Recorder, span
from .workspace import Workspace

ROUTED = ("gather", "offsets", "tiles", "tile_count", "next_tile")


def products(plan: Plan, split_scale: bool) -> tuple[Product, Product]:
    """What GEMM1 and GEMM2 compute under this plan. A streamed GEMM2 reads h by slot, a grouped one by row."""
    p = plan.problem
    out_quant = ("block" if p.quant is Quant.FP8_BLOCK else "static") if plan.fuse_quant else ""
    if plan.stream is Stream.DOWN:
        out_quant = "static" if p.static_scale else ""
    common = dict(dtype=p.dtype.value, quant=p.quant, static_scale=p.static_scale, bias=p.bias)
    gemm1 = Product(
        n=p.inter,
        k=p.hidden,
        top_k=p.top_k,
        gather=True,
        scatter=plan.stream is not Stream.NO,
        activation=p.activation,
        split_scale=split_scale,
        out_quant=out_quant,
        weight_on_input=p.weight_on_input,
        **common,
    )
    return gemm1, Product(n=p.hidden, k=p.inter, top_k=p.top_k, gather=False, scatter=True, **common)


def triton_experts(
    plan: Plan, x, weights: Weights, ids, probs, out, *, expert_map=None, scaling_factor=1.0, workspace=None
):
    """out [T, H] of one MoE layer by the plan's kernels; scratch memory from `workspace`, or from torch's allocator.

    A workspace that keeps calls starts the kernels of a call like an earlier one directly.
    """
    workspace = workspace or Workspace.for_plan(plan, x.device, calls=None)
    if workspace.calls is None:
        return _experts(plan, x, weights, ids, probs, out, expert_map, scaling_factor, workspace, launch)
    w, memory = weights, workspace.memory
    sources = (x, ids, probs, out, memory, expert_map, w.w13, w.w2, w.w13_scale, w.w2_scale, w.w13_bias, w.w2_bias,
               w.x_scale, w.h_scale)  # fmt: skip
    addresses = [None if t is None else t.data_ptr() for t in sources]
    biases = None if w.w13_bias is None else (w.w13_bias.dtype, w.w2_bias.dtype)
    key = (
        id(plan), scaling_factor, w.split_scale, x.stride(0), out.stride(0), ids.dtype, probs.dtype, w.w13.stride(),
        w.w2.stride(), x.get_device(), None if expert_map is None else expert_map.numel(), memory.numel(), biases,
        *(None if address is None else address % 16 for address in addresses),
    )  # fmt: skip
    recorded = workspace.calls.find(key)
    if recorded is not None:
        recorded(addresses)
        return out
    recorder = Recorder()
    _experts(plan, x, w, ids, probs, out, expert_map, scaling_factor, workspace, recorder)
    spans = [plan.workspace_bytes if t is memory else span(t) for t in sources]
    recorded = recorder.recorded(plan, addresses, spans)
    if recorded is not None:
        workspace.calls.keep(key, recorded)
    return out


def _experts(plan, x, weights, ids, probs, out, expert_map, scaling_factor, workspace, launch):
    run_kernels = {Stream.BOTH: _stream, Stream.RING: _ring}.get(plan.stream, _grouped)
    scratch, how = workspace.tensors(plan), dict(pdl=plan.pdl, launch=launch)
    return run_kernels(plan, x, weights, ids, probs, out, expert_map, scaling_factor, scratch, how)


def _stream(plan, x, w, ids, probs, out, expert_map, scaling_factor, scratch, how):
    product1, _ = products(plan, w.split_scale)
    h = stream.stream_up(
        x, w.w13, scratch["h"], ids, plan.gemm1, product1, expert_map=expert_map, x_scale=w.x_scale,
        w_scale=w.w13_scale, h_scale=w.h_scale, bias=w.w13_bias, probs=probs if plan.problem.weight_on_input else None,
        **how,
    )  # fmt: skip
    return _stream_down(plan, h, w, ids, probs, out, expert_map, scaling_factor, how)


def _stream_down(plan, h, w, ids, probs, out, expert_map, scaling_factor, how):
    _, product2 = products(plan, w.split_scale)
    return stream.stream_down(
        h, w.w2, out, ids, None if plan.problem.weight_on_input else probs, plan.gemm2, product2,
        expert_map=expert_map, factor=scaling_factor, h_scale=w.h_scale, w_scale=w.w2_scale, bias=w.w2_bias, **how,
    )  # fmt: skip


def ring_layer(plan: Plan, split_scale: bool) -> decode_experts.Layer:
    """What decode_experts computes under this plan."""
    p = plan.problem
    return decode_experts.Layer(
        p.hidden, p.inter, p.experts, p.top_k, p.dtype.value, p.activation, p.quant, p.static_scale, split_scale, p.bias
    )


def _ring(plan, x, w, ids, probs, out, expert_map, scaling_factor, t, how):
    layer = ring_layer(plan, w.split_scale)
    x_scale, h_scale = t.get("x_scale", w.x_scale), t.get("h_scale", w.h_scale)
    decode_experts.begin(ids, x, t.get("x_q"), x_scale, t["hit"], t["counters"], layer, expert_map=expert_map, **how)
    decode_experts.decode_experts(
        t.get("x_q", x), w.w13, w.w2, t.get("h"), t.get("h_q"), t["y"], ids, t["hit"], t["counters"], plan.gemm1, layer,
        sms=plan.sms, expert_map=expert_map, x_scale=x_scale, h_scale=h_scale, w13_scale=w.w13_scale,
        w2_scale=w.w2_scale, b13=w.w13_bias, b2=w.w2_bias, **how,
    )  # fmt: skip
    return combine.combine(
        t["y"], ids, probs, out, plan.problem.experts, expert_map=expert_map, factor=scaling_factor, **how
    )


def _grouped(plan, x, w, ids, probs, out, expert_map, scaling_factor, t, how):
    p, quantized = plan.problem, plan.problem.quant is not Quant.NONE
    product1, product2 = products(plan, w.split_scale)
    routing = Routing(**{name: t[name] for name in ROUTED}, block_m=plan.gemm1.block_m)
    x_scale, h_scale = (t.get("x_scale", w.x_scale), t.get("h_scale", w.h_scale)) if quantized else (None, None)
    quantizing = dict(x=x, x_q=t["x_q"], x_scale=x_scale, quant=p.quant, static=p.static_scale) if quantized else {}
    row_routing.route_rows(ids, p.experts, routing, t["counts"], expert_map, **quantizing, **how)
    streamed = plan.stream is Stream.DOWN
    h = t["h_q"] if plan.fuse_quant and not streamed else t["h"]
    gemm(plan.gemm1, plan.sms)(
        t["x_q"] if quantized else x, w.w13, routing, plan.gemm1, product1, h, x_scale=x_scale, w_scale=w.w13_scale,
        y_scale=h_scale if product1.out_quant else None, bias=w.w13_bias, probs=probs if p.weight_on_input else None,
        **how,
    )  # fmt: skip
    if streamed:
        return _stream_down(plan, h, w, ids, probs, out, expert_map, scaling_factor, how)
    if quantized and not plan.fuse_quant:
        rows = routing.offsets[p.experts :]
        h, _ = quantize.quantize(h, t["h_q"], h_scale, p.quant, static=p.static_scale, rows=rows, **how)
    gemm(plan.gemm2, plan.sms)(
        h, w.w2, routing, plan.gemm2, product2, t["y"], x_scale=h_scale, w_scale=w.w2_scale, bias=w.w2_bias, **how
    )
    return combine.combine(
        t["y"], ids, None if p.weight_on_input else probs, out, p.experts,
        expert_map=expert_map, factor=scaling_factor, **how,
    )  # fmt: skip


def _kernel(config: GemmConfig):
    """The file whose product this tile is for."""
    return hopper_gemm if config.specialized else swapped_gemm if config.tma else grouped_gemm


def gemm(config: GemmConfig, sms: int):
    """The launcher of the product that this tile is for."""
    if config.specialized:
        return partial(hopper_gemm.hopper_gemm, programs=sms)
    return swapped_gemm.swapped_gemm if config.tma else grouped_gemm.grouped_gemm


def specializations(plan: Plan, split_scale: bool = False, mapped: bool = False) -> list[Specialization]:
    """What a call under this plan (scaling factor 1) asks the compiler for: the signatures of its launches in order."""
    p, pdl, dtype = plan.problem, plan.pdl, plan.problem.dtype.value
    first, second = products(plan, split_scale)
    weighted = not p.weight_on_input
    down = dict(weighted=weighted, mapped=mapped, pdl=pdl)
    if plan.stream is Stream.BOTH:
        up = stream.signature_up(plan.gemm1, first, p.experts, mapped=mapped, pdl=pdl)
        return [up, stream.signature_down(plan.gemm2, second, p.experts, **down)]
    if plan.stream is Stream.RING:
        found = decode_experts.signature(plan.gemm1, ring_layer(plan, split_scale), p.tokens, mapped=mapped, pdl=pdl)
        return [*found, combine.signature(p.hidden, p.experts, p.top_k, p.tokens, dtype, mapped, pdl)]
    quantizing = dict(width=p.hidden, quant=p.quant, dtype=dtype, static=p.static_scale)
    found = [*row_routing.signature(p.experts, p.rows, plan.gemm1.block_m, mapped=mapped, pdl=pdl, **quantizing)]
    found.append(_kernel(plan.gemm1).signature(plan.gemm1, first, pdl))
    if plan.stream is Stream.DOWN:
        return [*found, stream.signature_down(plan.gemm2, second, p.experts, **down)]
    if p.quant is not Quant.NONE and not plan.fuse_quant:
        found.append(quantize.signature(p.inter, p.quant, dtype, p.static_scale, counted=True, pdl=pdl))
    found.append(_kernel(plan.gemm2).signature(plan.gemm2, second, pdl))
    return [*found, combine.signature(p.hidden, p.experts, p.top_k, p.tokens, dtype, mapped, pdl)]
