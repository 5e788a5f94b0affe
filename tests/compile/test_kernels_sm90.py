"""Plans that the policy can choose for known layers, compiled for sm_90a: instructions, spills, shared memory."""

import itertools
import re
from dataclasses import replace
from functools import cache

import pytest

from expertile.hardware import H200
from expertile.kernels import (
    combine,
    decode_experts,
    grouped_gemm,
    hopper_gemm,
    quantize,
    router,
    routing,
    stream,
    swapped_gemm,
)
from expertile.plans import Backend, GemmConfig, Stream, ring_smem_bytes
from expertile.policy import decide, table
from expertile.policy.model import SPECIALIZED_BYTES, smem_bytes
from expertile.problem import LAYERS, Quant, named_problem
from expertile.router import ROUTERS
from expertile.runtime.compile import compile_specialization
from expertile.runtime.triton_experts import products, ring_layer, specializations

#: label of the problem, and whether the activations' scales are given ahead
QUANTS = (
    ("bf16", False),
    ("fp8_tensor", True),
    ("fp8_tensor", False),
    ("fp8_channel", False),
    ("fp8_block", False),
)
TOKENS = [2**power for power in range(14)]
SMALL = replace(H200, smem_bytes=100_000)  # its tiles are further down the ladder


def reachable():
    """Plans with different tiles: of the table, of the ladder for layers that it lacks, and where less memory is."""
    cases = [*itertools.product(LAYERS, QUANTS, [H200])]
    cases += [*itertools.product(["qwen3-30b-a3b"], QUANTS, [SMALL]), ("qwen3-30b-a3b", ("fp16", False), H200)]
    for name, (label, static), hardware in cases:
        seen = set()
        for tokens in TOKENS:
            problem = named_problem(name, tokens, label, static_scale=static)
            plan = decide(problem, hardware, Backend.TRITON)
            if plan.name not in seen:
                seen.add(plan.name)
                yield plan


def test_every_tile_of_the_shipped_table_is_compiled_here():
    compiled = {config for _, config, _ in gemms()} | {plan.gemm1 for plan, _ in rings()}
    for entry in table.load("h200")["entries"]:
        first, second = entry["gemm1"], entry["gemm2"]
        tiles = {"no": (first, second), "down": (first,), "ring": (first,), "both": ()}[entry["stream"]]
        assert {GemmConfig(*tile) for tile in tiles} <= compiled


def separate_scales(problem) -> bool:
    """Whether gate and up rows have scale blocks of their own, as `prepare` makes them."""
    act = problem.activation
    return problem.quant is Quant.FP8_BLOCK and act.gated and not act.interleaved


def gemms():
    """Each grouped product once for its tile, kernel and everything but n and k: (plan, config, product)."""
    found = {}
    for plan in reachable():
        first, second = products(plan, separate_scales(plan.problem))
        pairs = [(plan.gemm1, first)] if plan.stream in (Stream.NO, Stream.DOWN) else []
        pairs += [(plan.gemm2, second)] if plan.stream is Stream.NO else []
        for config, product in pairs:
            whole = product.k % config.block_k == 0
            operands = (product.dtype, product.quant, product.static_scale, product.gated, product.gather)
            key = (config, *operands, product.out_quant, product.bias, whole)
            found.setdefault(key, (plan, config, product))
    return list(found.values())


def streams():
    found = {}
    for plan in reachable():
        first, second = products(plan, False)
        if plan.stream is Stream.BOTH:
            found.setdefault(("up", plan.gemm1, first.quant, first.n, first.k), ("up", plan, plan.gemm1, first))
        if plan.stream in (Stream.BOTH, Stream.DOWN):
            found.setdefault(("down", plan.gemm2, second.quant, second.n, second.k), ("down", plan, plan.gemm2, second))
    return list(found.values())


def rings():
    found = {}
    for plan in reachable():
        if plan.stream is Stream.RING:
            layer = ring_layer(plan, separate_scales(plan.problem))
            found.setdefault((plan.gemm1, layer.mode, layer.dtype, layer.activation, layer.bias), (plan, layer))
    return list(found.values())


def named(case):
    plan, config, product = case
    return f"{config.name} {plan.problem.label} {'gemm1' if product.gather else 'gemm2'} k{product.k}"


@cache
def compiled_gemm(config, product):
    kernel = hopper_gemm if config.specialized else swapped_gemm if config.tma else grouped_gemm
    return compile_specialization(kernel.signature(config, product))


@pytest.mark.parametrize("case", gemms(), ids=named)
def test_grouped_products_run_on_wgmma_without_spills_in_the_memory_that_the_policy_counts(case):
    plan, config, product = case
    compiled = compiled_gemm(config, product)
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    operand, k = (product.dtype, 16) if product.quant is Quant.NONE else ("e4m3", 32)
    operand = {"fp16": "f16"}.get(operand, operand)
    side = config.block_m if config.swap else min(config.block_n, 256)
    if config.specialized and product.quant is Quant.FP8_BLOCK:
        side = 128  # two halves in turn, each promoted with its scale
    assert set(compiled.mma) == {f"wgmma m64n{side}k{k} f32.{operand}.{operand}"}
    assert bool(compiled.features["tma_load"]) == (config.tma or config.specialized)
    assert bool(compiled.features["pdl_wait"]) == plan.pdl
    counted = smem_bytes(config, plan.problem)
    if config.specialized:
        assert compiled.warps == config.warps and compiled.features["setmaxnreg"]
        assert bool(compiled.features["cp.async"]) == product.gather
        assert counted - SPECIALIZED_BYTES < compiled.smem_bytes <= counted
        assert not compiled.features["stmatrix"], "the epilogue goes through shared memory"
        piece = "st.global.v4.b32" if not product.out_quant else "st.global.v2.b32"  # eight values of 16 or 8 bits
        assert piece in compiled.ptx
    elif product.quant is Quant.FP8_BLOCK:  # counted for both products, of which one may have fewer scales on their way
        both = [replace(each, out_quant="") for each in products(plan, separate_scales(plan.problem))]
        most = max(compiled_gemm(config, each).smem_bytes for each in both)
        assert compiled.smem_bytes <= most <= counted <= most + 256
    else:
        assert compiled.smem_bytes == counted
    assert compiled.smem_bytes <= H200.smem_bytes


@pytest.mark.parametrize("case", rings(), ids=lambda case: f"{case[0].name} {case[0].problem.label}")
def test_rings_that_can_be_chosen_do_not_spill(case):
    plan, layer = case
    for signature in decode_experts.signature(plan.gemm1, layer, plan.problem.tokens):
        compiled = compile_specialization(signature)
        assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert compiled.smem_bytes <= ring_smem_bytes(plan.gemm1) <= H200.smem_bytes


@pytest.mark.parametrize(
    "case", streams(), ids=lambda case: f"{case[0]} {case[2].name} {case[3].quant.value} k{case[3].k}"
)
def test_streamed_products_read_sixteen_bytes_at_a_time_without_spills(case):
    which, plan, config, product = case
    signature = stream.signature_up if which == "up" else stream.signature_down
    compiled = compile_specialization(signature(config, product, plan.problem.experts))
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert not compiled.mma
    assert "ld.global.v4" in compiled.ptx
    if which == "down":
        before, _, _ = compiled.ptx.partition("griddepcontrol.wait")
        item = 2 if product.quant is Quant.NONE else 1
        rows = config.block_n * (1 << (product.top_k - 1).bit_length()) * (1 << (product.k - 1).bit_length())
        assert before.count("ld.global.v4") * 16 * 32 * config.warps >= rows * item, "weights are not asked for ahead"


@pytest.mark.parametrize("experts", [8, 60, 128, 512])
@pytest.mark.parametrize("rows", [8, 500, 5000])
@pytest.mark.parametrize("quant", [Quant.NONE, Quant.FP8_BLOCK])
def test_routing_has_no_spills(rows, experts, quant):
    for spec in routing.signature(experts, rows, 16, width=2048, quant=quant, mapped=experts == 60):
        compiled = compile_specialization(spec)
        assert compiled.spill_bytes == compiled.stack_bytes == 0


@pytest.mark.parametrize("width", [176, 768, 2688, 7168])
def test_quantising_and_combining_have_no_spills(width):
    specs = [quantize.signature(width, quant, counted=True) for quant in (Quant.FP8_TENSOR, Quant.FP8_BLOCK)]
    specs += [quantize.signature(width, Quant.FP8_TENSOR, static=True)]
    specs += [combine.signature(width, 128, top_k, tokens) for top_k in (1, 8) for tokens in (1, 4096)]
    for spec in specs:
        compiled = compile_specialization(spec)
        assert compiled.spill_bytes == compiled.stack_bytes == 0


def test_the_router_has_no_spills():
    for name, experts, top_k in (("softmax", 128, 8), ("deepseek_v3", 256, 8), ("llama4", 16, 1)):
        compiled = compile_specialization(router.signature(experts, ROUTERS[name], top_k))
        assert compiled.spill_bytes == compiled.stack_bytes == 0


@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
@pytest.mark.parametrize(
    "name, label", [("qwen3-30b-a3b", "fp8_block"), ("nemotron-3-nano", "fp8_tensor"), ("gpt-oss-120b", "bf16")]
)
def test_clamps_and_limits_let_nan_through(name, label, tokens):
    plan = decide(named_problem(name, tokens, label, static_scale=label == "fp8_tensor"), H200, Backend.TRITON)
    assembly = [compile_specialization(each).ptx for each in specializations(plan)]
    assert any("min.NaN.f32" in text or "max.NaN.f32" in text for text in assembly)
    for text in assembly:  # a plain maximum is that of absmax, of whose values none is negative
        assert "min.f32" not in text and not re.search(r"max\.f32[^;]*0f(00000000|C3E00000)", text)
