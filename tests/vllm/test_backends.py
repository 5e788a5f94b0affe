"""What runtime/backends and the exported files take for granted about vLLM, read out of its own source."""

from __future__ import annotations

import ast

import pytest

from expertile.hardware import H200
from expertile.problem import named_problem
from expertile.runtime.backends.vllm import ACTIVATIONS
from expertile.tune import engine_files

from .contract import CONFIG, MOE
from .fetch import DONE, FOLDER
from .source import Tree

VERSIONS = ("0.26.0", "0.33.0")


@pytest.fixture(params=VERSIONS)
def tree(request):
    if not (FOLDER / request.param / DONE).is_file():
        pytest.skip(f"needs vLLM {request.param}'s Python files: python tests/vllm/fetch.py (network)")
    return Tree(FOLDER / request.param, request.param)


def test_the_triton_experts_take_what_they_are_given(tree):
    assert {
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "quant_config", "global_num_experts"
    } <= set(tree[MOE + "fused_moe.py"].fused_experts.arguments)  # fmt: skip
    assert tree[MOE + "fused_moe.py"].fused_experts.arguments[:5] == [
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids"
    ]  # fmt: skip


def test_the_modular_experts_are_made_and_called_like_this(tree):
    oracle = tree[MOE + "oracle/fp8.py"]
    assert oracle.make_fp8_moe_kernel.arguments[:4] == [
        "moe_quant_config", "moe_config", "experts_cls", "fp8_backend"
    ]  # fmt: skip
    assert {"VLLM_CUTLASS", "DEEPGEMM"} <= set(oracle.Fp8MoeBackend.values)
    assert tree[MOE + "experts/cutlass_moe.py"].defines("CutlassExpertsFp8")
    assert tree[MOE + "experts/deep_gemm_moe.py"].defines("DeepGemmExperts")
    assert tree[MOE + "modular_kernel.py"].FusedMoEKernel.apply.arguments[1:10] == [
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map",
        "apply_router_weight_on_input",
    ]  # fmt: skip


def test_configurations_and_activations_have_the_names_that_are_used(tree):
    config = tree[CONFIG]
    for name in ("biased_moe_quant_config", "fp8_w8a8_moe_quant_config"):
        assert config.defines(name)
    taken = set(config.fp8_w8a8_moe_quant_config.arguments)
    assert {"w1_scale", "w2_scale", "a1_scale", "a2_scale", "w1_bias", "w2_bias", "block_shape"} <= taken
    assert {"per_act_token_quant", "per_out_ch_quant", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"} <= taken
    assert "FUSED_MOE_UNQUANTIZED_CONFIG" in config.values
    known = set(tree[MOE + "activation.py"].MoEActivation.values.values())
    assert set(ACTIVATIONS.values()) <= known


def test_a_session_is_entered_by_these_names(tree):
    config = tree["vllm/config/vllm.py"]
    assert config.defines("set_current_vllm_config") and config.defines("get_current_vllm_config_or_none")
    assert tree["vllm/v1/worker/workspace.py"].init_workspace_manager.arguments[0] == "device"


def test_triton_kernels_are_called_like_this(tree):
    calls = tree[MOE + "experts/gpt_oss_triton_kernels_moe.py"]
    assert calls.make_routing_data.arguments == ["topk_ids", "topk_weights", "num_local_experts"]
    taken = calls.triton_kernel_fused_experts.arguments
    assert taken[:8] == [
        "output_tensor", "hidden_states", "w1", "w2", "routing_data", "gather_indx", "scatter_indx", "topk"
    ]  # fmt: skip
    assert {"activation", "quant_config", "swiglu_alpha", "swiglu_limit", "global_num_experts"} <= set(taken)


@pytest.mark.parametrize("quant", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block"])
def test_files_are_named_and_read_as_vllm_does(tree, quant):
    """Its own function makes the name; the file's keys are those that its lookup takes off or turns into numbers."""
    source = tree[MOE + "fused_moe.py"]
    scope = {"get_device_name_as_file_name": lambda: "NVIDIA_H200_NVL"}
    exec(compile(ast.Module([source.get_config_file_name.node], []), "vllm", "exec"), scope)
    problem = named_problem("qwen3-30b-a3b", 1, quant)
    block = [128, 128] if quant == "fp8_block" else None
    dtype = None if quant == "bf16" else "fp8_w8a8"
    want = scope["get_config_file_name"](problem.experts, problem.inter, dtype, block)
    assert engine_files.file_name("vllm", problem, "NVIDIA H200 NVL") == want
    lookup = source.get_moe_configs.text
    assert "VLLM_TUNED_CONFIG_FOLDER" in lookup and "pop('triton_version', None)" in lookup
    assert "E, _, N = w2_shape" in source.try_get_optimal_moe_config.text


def test_its_kernel_takes_the_parameters_that_are_searched(tree):
    package = tree[MOE + "__init__.py"]
    assert "_config" in package.values and package.defines("get_config")
    kernel = tree[MOE + "fused_moe.py"].fused_moe_kernel.arguments
    assert {name for name in engine_files.KEYS if name.isupper()} <= set(kernel)
    assert engine_files.tiles(named_problem("qwen3-30b-a3b", 64), H200)
