"""Both products in one launch, compiled for sm_90a: instructions, spills, shared memory of the tiles that are tried."""

import itertools
from dataclasses import replace

import pytest

from expertile.hardware import H200
from expertile.kernels import decode_experts
from expertile.kernels.decode_experts import Layer
from expertile.plans import RING_WARPS, GemmConfig, ring_smem_bytes
from expertile.policy.rules import ring_reasons
from expertile.policy.tiles import ring_tiles
from expertile.problem import ACTIVATIONS, LAYERS, Quant, named_problem
from expertile.runtime.compile import compile_specialization

FORMATS = [("bf16", False), ("fp8_tensor", True), ("fp8_tensor", False), ("fp8_channel", False), ("fp8_block", False)]


def tile(block_m, block_n, quant, stages):
    return GemmConfig(block_m, block_n, 64 if quant in ("bf16", "fp16") else 128, RING_WARPS, stages, True, 1, True)


def layer_of(problem) -> Layer:
    p = problem
    return Layer(
        p.hidden, p.inter, p.experts, p.top_k, p.dtype.value, p.activation, p.quant, p.static_scale, bias=p.bias
    )


def cases():
    """Every tile that is tried for a layer, in every format; scales a row of w are added like scales an expert."""
    for (quant, static), tokens in itertools.product(FORMATS, (8, 16, 32, 64)):
        problem = named_problem("qwen3-30b-a3b", tokens, quant, static_scale=static)
        if quant != "fp8_channel" or tokens == 16:
            yield from ((config, problem) for config in ring_tiles(problem, H200))


def name(case):
    config, problem = case
    return f"{config.block_m}x{config.block_n} s{config.stages} {problem.label} {problem.static_scale} {problem.inter}"


OTHERS = [
    (tile(16, 128, "fp8_tensor", 6), named_problem("nemotron-3-nano", 16, "fp8_tensor", static_scale=True)),
    (tile(32, 256, "fp8_block", 5), named_problem("deepseek-v3-tp8", 32, "fp8_block")),
    (tile(16, 128, "fp8_tensor", 6), named_problem("qwen3-next-80b-a3b", 16, "fp8_tensor")),
    (tile(32, 128, "fp8_tensor", 9), named_problem("qwen3-next-80b-a3b", 32, "fp8_tensor")),
    (tile(64, 128, "fp8_tensor", 8), named_problem("mixtral-8x7b-tp2", 64, "fp8_tensor")),
    (tile(8, 128, "fp16", 6), named_problem("qwen3-30b-a3b", 8, "fp16")),
    (tile(16, 128, "bf16", 6), replace(named_problem("qwen3-30b-a3b", 16, "bf16"), bias=True)),
    (tile(8, 256, "fp8_block", 3), replace(named_problem("qwen3-30b-a3b", 8, "fp8_block"), bias=True)),
]


@pytest.mark.parametrize("case", [*cases(), *OTHERS], ids=name)
def test_a_ring_runs_on_wgmma_without_spills_in_the_memory_that_the_policy_counts(case):
    config, problem = case
    assert not ring_reasons(config, problem, H200)
    begin, decode = map(
        compile_specialization, decode_experts.signature(config, layer_of(problem), problem.tokens, mapped=problem.bias)
    )
    for compiled in (begin, decode):
        assert compiled.spill_bytes == compiled.stack_bytes == 0
        assert compiled.features["pdl_wait"] and compiled.features["pdl_launch"]
    operand, k = ({"bf16": "bf16", "fp16": "f16"}[problem.dtype.value], 16)
    operand, k = (operand, k) if problem.quant is Quant.NONE else ("e4m3", 32)
    assert set(decode.mma) == {f"wgmma m64n{config.block_m}k{k} f32.{operand}.{operand}"}
    assert decode.features["tma_load"] and decode.features["setmaxnreg"] and not decode.features["cp.async"]
    assert decode.warps == config.warps and 32 * decode.warps * decode.registers <= 65536
    counted = ring_smem_bytes(config)
    stages = config.stages * 128 * (config.block_n + config.block_m)
    assert stages < decode.smem_bytes <= counted <= H200.smem_bytes and counted - stages <= 17 * 1024
    assert "fence.proxy.async.global" in decode.ptx and "ld.acquire.gpu" in decode.ptx, "h is read by TMA"


def test_the_kernel_refuses_what_the_policy_refuses():
    """Every known layer and activation: a tile that has reasons against it raises, and no other does."""
    refused = 0
    for layer, quant, block_n in itertools.product(LAYERS, ("bf16", "fp8_tensor", "fp8_block"), (64, 128, 256)):
        for tokens, block_m in ((3, 8), (40, 32), (64, 64), (5, 128)):
            problem = named_problem(layer, tokens, quant)
            refused += agree(tile(block_m, block_n, quant, 3), problem)
    for activation in ACTIVATIONS.values():
        problem = replace(named_problem("qwen3-30b-a3b", 8, "bf16"), activation=activation)
        refused += agree(tile(8, 128, "bf16", 4), problem)
    assert refused > 20


def agree(config, problem) -> bool:
    reasons = ring_reasons(config, problem, H200)
    try:
        layer_of(problem).check(config, problem.tokens)
    except decode_experts.ShapeError:
        assert reasons
    else:
        assert not reasons
    return bool(reasons)
