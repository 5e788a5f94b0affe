"""vLLM's layers through our Triton kernels, in Triton's interpreter: every kind of plan in vLLM's own workspace.

Plans are those for an H200. bf16 products are wrong in the interpreter: 16-bit layers are fp16 here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ..conftest import INTERPRETER
from ..numerics.conftest import right_casts_to_fp8  # noqa: F401  a fixture of the session

if not INTERPRETER:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from . import layers, started  # noqa: F401
from .layers import Sizes
from .test_layers import compressed_tensors, fp8, modelopt, silu

from expertile.hardware import H200  # isort: skip
from expertile.plans import Backend, GemmConfig, Stream  # isort: skip
from expertile.plugins.vllm import experts as plugin_experts  # isort: skip
from expertile.plugins.vllm import loading, planner  # isort: skip
from expertile.policy.tiles import fused_quant  # isort: skip

pytestmark = pytest.mark.usefixtures("engine")
TOKENS = (1, 5, 40)


@pytest.fixture(autouse=True)
def as_on_an_h200(monkeypatch):
    """Plans but for programmatic launch and Gluon's tiles, which the interpreter has not."""
    stock = planner.decide

    def decide(*given, **more):
        plan = replace(stock(*given, **more), pdl=False)
        if plan.stream is Stream.NO and plan.gemm1.specialized:
            tile = GemmConfig(64, 128, plan.gemm1.block_k, 4, 4, group_m=8)
            plan = replace(plan, gemm1=tile, gemm2=tile, fuse_quant=fused_quant(plan.problem, tile))
        return plan

    monkeypatch.setattr(planner, "decide", decide)
    monkeypatch.setattr(plugin_experts, "detect", lambda device: H200)
    monkeypatch.setattr(loading, "warm", lambda *arguments, **options: [])


CASES = {
    "fp16": ("none", None, {}, Sizes()),
    "fp16-odd-shards": ("none", None, dict(tp=4), Sizes(inter=88)),
    "fp16-ep": ("none", None, dict(ep=3), Sizes()),
    "tensor-static": ("tensor", modelopt, dict(static=True), Sizes()),
    "tensor-static-no-gate": ("tensor", modelopt, dict(static=True, activation="relu2_no_mul"), Sizes()),
    "tensor-dynamic": ("tensor", fp8, {}, Sizes()),
    "channel": ("channel", lambda: compressed_tensors("channel", "token", True), {}, Sizes(inter=44)),
    "channel-ep": ("channel", lambda: compressed_tensors("channel", "token", True), dict(ep=2), Sizes()),
    "block": ("block", lambda: fp8(block=[128, 128]), {}, Sizes(hidden=256, inter=128)),
    "on-input": ("none", None, dict(on_input=True), Sizes(top_k=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_vllms_layer_in_vllms_workspace(name):
    from vllm.v1.worker.workspace import current_workspace_manager

    quant, quant_config, options, sizes = CASES[name]
    options = dict(options)
    activation, static, on_input = (
        options.pop("activation", "silu"), options.pop("static", False), options.pop("on_input", False)
    )  # fmt: skip
    act = silu if activation == "silu" else lambda h: h.clamp(min=0) ** 2
    made = layers.make_checkpoint(sizes, quant, gated=activation == "silu", dtype=torch.float16)
    calls = {tokens: layers.routing(tokens, sizes, seed=tokens) for tokens in TOKENS}
    found = {tokens: torch.zeros(tokens, sizes.hidden) for tokens in TOKENS}
    ranks = options.get("tp", 1) * options.get("ep", 1)
    for rank in range(ranks):
        parallel = layers.parallel_config(**options, **{f"{way}_rank": rank for way in options})
        config = layers.moe_config(sizes, activation, torch.float16, parallel)
        layer = layers.make_layer(config, quant_config() if quant_config else None, on_input=on_input)
        layers.load(layer, made, static=static)
        plans = layer.quant_method.moe_kernel.fused_experts.planner(sizes.top_k, sizes.experts)
        for tokens, (x, ids, probs) in calls.items():
            assert plans.plan(tokens).backend is Backend.TRITON
            with torch.inference_mode():
                current_workspace_manager().get_simultaneous(((1 << 22,), torch.uint8))[0].fill_(255)  # NaN
            found[tokens] += layers.run(layer, x.half(), ids, probs).float()
    for tokens, (x, ids, probs) in calls.items():
        want = layers.answer(x.half(), ids, probs, made, act, weight_on_input=on_input)
        layers.check(found[tokens], want, quant)


def test_the_cases_have_every_kind_of_plan():
    """Streamed in two launches, and grouped: what the sizes and token counts above make the policy choose."""
    from expertile.policy import decide
    from expertile.problem import Problem

    kinds = {
        decide(Problem(tokens, 64, 48, 6, 2, dtype="fp16"), H200).stream for tokens in TOKENS
    }  # fmt: skip
    assert {Stream.BOTH, Stream.NO} <= kinds
