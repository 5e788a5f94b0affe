"""What the plugin takes for granted about vLLM, each claim read out of vLLM's own source with ast: nothing is imported.

A claim is a function of Tree (source.py). It asserts, and its name is what the test is called when vLLM has changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from .source import Source, Tree

MOE = "vllm/model_executor/layers/fused_moe/"
QUANT = "vllm/model_executor/layers/quantization/"
KERNEL = MOE + "modular_kernel.py"
CONFIG = MOE + "config.py"
PLUGIN = Path(__file__).parents[2] / "src" / "expertile" / "plugins" / "vllm"

CLAIMS: dict[str, Callable[[Tree], None]] = {}


def claim(function):
    CLAIMS[function.__name__] = function
    return function


def ours(name: str, of: str) -> Source:
    return getattr(Source(name, (PLUGIN / name).read_text(encoding="utf-8")), of)


@claim
def general_plugins_are_called_without_arguments(tree):
    module = tree["vllm/plugins/__init__.py"]
    assert module.values["DEFAULT_PLUGINS_GROUP"] == "vllm.general_plugins"
    assert "func()" in module.load_general_plugins.text and "VLLM_PLUGINS" in module.load_plugins_by_group.text


@claim
def a_registered_class_takes_a_layers_place_by_its_name(tree):
    module = tree["vllm/model_executor/custom_op.py"]
    assert "op_registry_oot" in module.values
    layer = module.PluggableLayer
    assert layer.register_oot.arguments == ["cls", "_decorated_layer_cls", "name"]
    assert (
        "cls.__name__" in layer.__getattr__("__new__").text and "op_registry_oot[" in layer.__getattr__("__new__").text
    )


@claim
def routed_experts_are_such_a_layer(tree):
    layer = tree[MOE + "routed_experts.py"].RoutedExperts
    assert layer.bases == ["PluggableLayer"] and not layer.defines("__new__")


@claim
def the_method_is_chosen_before_sizes_and_weights(tree):
    layer = tree[MOE + "routed_experts.py"].RoutedExperts
    assert layer._get_quant_method.arguments == ["self", "prefix", "quant_config", "moe_config"]
    start = layer.__getattr__("__init__")
    order = [start.calls(name)[0].lineno for name in ("_get_quant_method", "maybe_roundup_sizes", "create_weights")]
    assert order == sorted(order)
    start.sets("params_dtype", "moe_config", "layer_name", "global_num_experts", "quant_method")
    assert layer.defines("expert_map")


@claim
def the_factory_gives_a_layer_the_most_tokens_of_a_step(tree):
    module = tree[MOE + "layer.py"]
    assert "max_num_tokens=max_num_batched_tokens" in module.text
    assert "max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens" in module.text


def _method(tree, path: str, name: str, backend: str, *attributes: str):
    method = getattr(tree[path], name)
    start = method.__getattr__("__init__")
    start.sets(backend, "experts_cls", *attributes)
    return method


@claim
def unquantised_method(tree):
    path = MOE + "unquantized_fused_moe_method.py"
    method = _method(tree, path, "UnquantizedFusedMoEMethod", "unquantized_backend")
    assert method.process_weights_after_loading.arguments == ["self", "layer"]


@claim
def fp8_checkpoint_method(tree):
    start = ("weight_block_size", "block_quant", "quant_config")
    method = _method(tree, QUANT + "fp8.py", "Fp8MoEMethod", "fp8_backend", *start)
    assert "activation_scheme" in method.text
    assert method.process_weights_after_loading.arguments == ["self", "layer"]


@claim
def modelopt_fp8_method(tree):
    method = _method(tree, QUANT + "modelopt.py", "ModelOptFp8MoEMethod", "fp8_backend")
    start = method.__getattr__("__init__").text
    assert "weight_key=kFp8StaticTensorSym" in start and "activation_key=kFp8StaticTensorSym" in start


@claim
def compressed_tensors_fp8_method(tree):
    path = QUANT + "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py"
    attributes = ("weight_quant", "static_input_scales", "weight_block_size")
    _method(tree, path, "CompressedTensorsW8A8Fp8MoEMethod", "fp8_backend", *attributes)


@claim
def online_fp8_methods(tree):
    module = tree[QUANT + "online/fp8.py"]
    _method(tree, QUANT + "online/fp8.py", "_Fp8OnlineMoEBase", "fp8_backend", "weight_block_size")
    for name in ("Fp8PerTensorOnlineMoEMethod", "Fp8PerBlockOnlineMoEMethod", "Fp8PtpcOnlineMoEMethod"):
        assert getattr(module, name).bases == ["_Fp8OnlineMoEBase"]
    assert module.Fp8PtpcOnlineMoEMethod.values["per_out_ch_quant"] is True
    assert module._Fp8OnlineMoEBase.values["per_out_ch_quant"] is False


@claim
def every_method_we_know_exists(tree):
    names = {key.value for key in Source("", (PLUGIN / "formats.py").read_text()).values["METHODS"].keys}
    text = "\n".join(tree[path].text for path in (
        MOE + "unquantized_fused_moe_method.py", QUANT + "fp8.py", QUANT + "modelopt.py", QUANT + "online/fp8.py",
        QUANT + "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py",
    ))  # fmt: skip
    gone = {name for name in names if f"class {name}(" not in text} - (
        {"Fp8OnlineMoEMethod"} if tree.version > (0, 24) else set()
    )
    assert not gone, gone


@claim
def the_triton_backends_convert_nothing(tree):
    fp8, plain = tree[MOE + "oracle/fp8.py"], tree[MOE + "oracle/unquantized.py"]
    assert "TRITON" in fp8.Fp8MoeBackend.values and "TRITON" in plain.UnquantizedMoeBackend.values
    converting = fp8.convert_to_fp8_moe_kernel_format
    branch = converting.node.body[-2]
    while branch.orelse:  # if ... elif ... else: if the backend is not one that is let through: raise
        assert "Fp8MoeBackend.TRITON]" not in ast.unparse(branch.test)
        assert not ast.unparse(branch.test).endswith("Fp8MoeBackend.TRITON")
        (branch,) = branch.orelse
    assert ast.unparse(branch.test).startswith("fp8_backend not in [Fp8MoeBackend.TRITON,")
    assert converting.text.endswith("return (w13, w2, w13_scale, w2_scale)")
    assert plain.convert_to_unquantized_kernel_format.text.endswith(
        "return (w13_weight.contiguous(), w2_weight.contiguous())"
    )


@claim
def kernels_are_made_of_the_methods_class(tree):
    for path, name in (
        ("oracle/fp8.py", "make_fp8_moe_kernel"),
        ("oracle/unquantized.py", "make_unquantized_moe_kernel"),
    ):
        makes = getattr(tree[MOE + path], name).calls("experts_cls")
        assert makes and {"moe_config", "quant_config"} <= {key.arg for key in makes[-1].keywords}


@claim
def the_loader_lets_the_method_process_its_layer(tree):
    process = tree["vllm/model_executor/model_loader/utils.py"].process_weights_after_loading
    assert "quant_method = getattr(module, 'quant_method', None)" in process.text
    assert "quant_method.process_weights_after_loading(module)" in process.text


@claim
def experts_are_made_and_called_like_this(tree):
    kernel = tree[KERNEL]
    assert kernel.FusedMoEExperts.__getattr__("__init__").arguments == [
        "self", "moe_config", "quant_config", "max_num_tokens", "num_dispatchers",
    ]  # fmt: skip
    modular, our = kernel.FusedMoEExpertsModular, ours("experts.py", "ExpertileExperts")
    assert modular.apply.arguments == our.apply.arguments
    assert modular.workspace_shapes.arguments == our.workspace_shapes.arguments
    (call,) = kernel.FusedMoEKernelModularImpl._fused_experts.calls("apply")
    assert {key.arg for key in call.keywords} | {"self"} == set(our.apply.arguments)


@claim
def we_define_every_abstract_method(tree):
    kernel, our = tree[KERNEL], ours("experts.py", "ExpertileExperts")
    needed = kernel.FusedMoEExperts.abstract | kernel.FusedMoEExpertsModular.abstract
    missing = {name for name in needed if not our.defines(name)}
    assert not missing, missing


@claim
def predicates_take_what_ours_take(tree):
    base, our = tree[KERNEL].FusedMoEExperts, ours("experts.py", "ExpertileExperts")
    for node in our.node.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_supports") and base.defines(node.name):
            assert getattr(base, node.name).arguments == getattr(our, node.name).arguments, node.name
    assert base.is_supported_config.arguments == [
        "cls",
        "moe_config",
        "weight_key",
        "activation_key",
        "activation_format",
    ]


@claim
def inputs_come_unquantised_when_asked(tree):
    impl = tree[KERNEL].FusedMoEKernelModularImpl._prepare
    assert "defer_input_quant=self.fused_experts.expects_unquantized_inputs" in impl.text
    for file, name in (("no_dp_ep", "_quantize_input"), ("naive_dp_ep", "_quantize_and_setup_dispatch")):
        body = getattr(tree[f"{MOE}prepare_finalize/{file}.py"], name)
        first = body.node.body[0]
        assert isinstance(first, ast.If) and ast.unparse(first.test) == "defer_input_quant", f"{file}: {name}"


@claim
def router_weights_on_the_input_are_multiplied_in_by_vllm(tree):
    for file, name in (
        ("no_dp_ep", "MoEPrepareAndFinalizeNoDPEPModular"),
        ("naive_dp_ep", "MoEPrepareAndFinalizeNaiveDPEPModular"),
    ):
        prepare = getattr(tree[f"{MOE}prepare_finalize/{file}.py"], name).prepare
        assert "if apply_router_weight_on_input:" in prepare.text and "a1 = a1 * topk_weights" in prepare.text


@claim
def a_kernel_can_be_made_of_other_experts(tree):
    """What a layer that fails while loading is given back with."""
    kernel = tree[KERNEL].FusedMoEKernel
    assert kernel.__getattr__("__init__").arguments == ["self", "prepare_finalize", "fused_experts"]
    assert kernel.defines("prepare_finalize") and kernel.defines("fused_experts")
    experts = tree[MOE + "experts/triton_moe.py"].TritonExperts
    assert experts.__getattr__("__init__").required[:3] in (["self", "moe_config", "quant_config"],)


@claim
def sums_are_left_as_they_are(tree):
    noop = tree[MOE + "topk_weight_and_reduce.py"].TopKWeightAndReduceNoOP
    assert "return fused_expert_output" in noop.apply.text and "output.copy_(fused_expert_output" in noop.apply.text


@claim
def around_the_experts_alone_nothing_is_done(tree):
    """Without other ranks: tokens are prepared by our flags alone, and the result is copied. call_experts_alone."""
    impl, kernel = tree[KERNEL].FusedMoEKernelModularImpl, tree[KERNEL].FusedMoEKernel
    taken = ["self", "hidden_states", "w1", "w2", "topk_ids", "topk_weights", "activation", "global_num_experts",
             "expert_map", "apply_router_weight_on_input", "shared_experts", "shared_experts_input"]  # fmt: skip
    assert impl.apply.arguments == taken
    passed = ", ".join(f"{name}={name}" for name in [*taken[1:4], "topk_weights", "topk_ids", *taken[6:]])
    assert f"return self.impl.apply({passed})" in kernel.apply.text
    assert "if not self.prepare_finalize.supports_async():" in impl._prepare.text
    last = tree[MOE + "prepare_finalize/no_dp_ep.py"].MoEPrepareAndFinalizeNoDPEPModular.finalize
    assert len(last.node.body) == 2 and last.text.endswith(
        "weight_and_reduce_impl.apply(output=output, fused_expert_output=fused_expert_output, "
        "topk_weights=topk_weights, topk_ids=topk_ids, apply_router_weight_on_input=apply_router_weight_on_input)"
    )


@claim
def the_workspace_is_lent_as_one_piece(tree):
    manager = tree["vllm/v1/worker/workspace.py"].WorkspaceManager
    assert manager.defines("get_simultaneous") and manager.defines("is_locked")
    assert "256" in tree["vllm/v1/worker/workspace.py"].text
    allocate = tree[KERNEL].FusedMoEKernelModularImpl._allocate_buffers
    assert (
        "get_simultaneous(((max_shape_size,), workspace_dtype), (workspace2_shape, workspace_dtype))" in allocate.text
    )


@claim
def configurations_have_what_we_read(tree):
    config = tree[CONFIG]
    moe = {"num_experts", "experts_per_token", "hidden_dim", "num_local_experts", "activation", "moe_parallel_config",
           "in_dtype", "moe_backend", "max_num_tokens", "has_bias", "is_lora_enabled", "swiglu_limit", "swiglu_alpha",
           "swiglu_beta", "intermediate_size_per_partition", "is_act_and_mul"}  # fmt: skip
    assert moe <= config.FusedMoEConfig.fields, moe - config.FusedMoEConfig.fields
    parallel = {"tp_rank", "ep_rank", "dp_rank", "pcp_rank", "dp_size", "all2all_backend", "use_all2all_kernels",
                "use_ag_rs_all2all_kernels", "use_batched_activation_format"}  # fmt: skip
    assert parallel <= config.FusedMoEParallelConfig.fields, parallel - config.FusedMoEParallelConfig.fields
    quant = {"w1_scale", "w2_scale", "a1_scale", "a2_scale", "w1_bias", "w2_bias", "block_shape", "per_out_ch_quant"}
    assert quant <= config.FusedMoEQuantConfig.fields, quant - config.FusedMoEQuantConfig.fields
    offload = tree["vllm/config/offload.py"]
    assert {"uva", "prefetch"} <= offload.OffloadConfig.fields and "cpu_offload_gb" in offload.UVAOffloadConfig.fields
    assert "offload_group_size" in offload.PrefetchOffloadConfig.fields


@claim
def layerwise_reloads_process_temporary_tensors(tree):
    """And then put the layer's own back: what was processed must not be kept. loading.after_loading."""
    module = tree["vllm/model_executor/model_loader/reload/layerwise.py"]
    processing = module._layerwise_process.text
    steps = [
        "materialize_layer(layer",
        "process_weights_after_loading(layer)",
        "_copy_and_restore_kernel_tensors(layer",
    ]
    places = [processing.index(step) for step in steps]
    assert places == sorted(places)
    assert "param.data.copy_(getattr(layer, name))" in module._copy_and_restore_kernel_tensors.text


@claim
def elastic_ep_makes_experts_of_the_same_class(tree):
    made = tree[MOE + "eep_reconfigure.py"]._make_eep_experts
    assert made.arguments == ["quant_method", "source_experts", "prepare_finalize", "moe_config"]
    assert "experts_cls = source_experts.__class__" in made.text and "return experts_cls(**experts_kwargs)" in made.text


@claim
def load_formats_are_those_we_know(tree):
    """A new one may bring weights that were processed elsewhere: gate.CHECKPOINTS has those that do not."""
    module = tree["vllm/model_executor/model_loader/__init__.py"]
    formats = {node.value for node in ast.walk(module.values["LoadFormats"]) if isinstance(node, ast.Constant)}
    ours = Source("", (PLUGIN / "gate.py").read_text()).values["CHECKPOINTS"]
    known = {node.value for node in ours.elts}
    assert formats - known == ({"ipc_cache", "modelexpress"} if tree.version >= (0, 33) else {"modelexpress"})
    load = tree["vllm/config/load.py"]
    assert "return load_format.lower()" in load.LoadConfig.text and "load_format" in load.LoadConfig.fields
    assert "draft_load_config" in tree["vllm/config/speculative.py"].SpeculativeConfig.fields


@claim
def deep_gemm_is_asked_for_by_a_variable_that_is_set(tree):
    """Both are on by default. gate.asked_for."""
    variables = {ast.unparse(key): ast.unparse(value) for key, value in _items(tree["vllm/envs.py"])}
    for name in ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"):
        assert variables[f"'{name}'"] == f"lambda: bool(int(os.getenv('{name}', '1')))"
    chosen = tree[MOE + "oracle/fp8.py"].select_fp8_moe_backend.text
    assert "if envs.is_set('VLLM_USE_DEEP_GEMM') or envs.is_set('VLLM_MOE_USE_DEEP_GEMM'):" in chosen
    assert "if not envs.VLLM_USE_DEEP_GEMM or not envs.VLLM_MOE_USE_DEEP_GEMM:" in chosen


def _items(module: Source):
    found = module.values["environment_variables"]
    return zip(found.keys, found.values, strict=True)


@claim
def a_backend_that_was_asked_for_is_not_auto(tree):
    assert tree[CONFIG].FusedMoEConfig.values["moe_backend"] == "auto"


@claim
def activations_are_called_what_we_call_them(tree):
    values = set(tree[MOE + "activation.py"].MoEActivation.values.values())
    module = Source("", (PLUGIN / "formats.py").read_text())
    known = {key.value for key in module.values["ACTIVATIONS"].keys} | {module.values["UNINTERLEAVED"]}
    assert known <= values, known - values


@claim
def formats_have_the_keys_we_use(tree):
    defined = set(tree[QUANT + "utils/quant_utils.py"].values)
    used = {node.attr for file in ("experts.py", "gate.py") for node in ast.walk(ast.parse((PLUGIN / file).read_text()))
            if isinstance(node, ast.Attribute) and node.attr.startswith("kFp8")}  # fmt: skip
    assert len(used) >= 6 and used <= defined, used - defined


@claim
def the_compile_cache_hashes_every_variable_that_vllm_knows(tree):
    module = tree["vllm/envs.py"]
    assert isinstance(module.values["environment_variables"], ast.Dict)
    assert "environment_variables.items()" in module.compile_factors.text


@claim
def vllm_says_when_it_has_warmed_up(tree):
    if tree.version >= (0, 25):
        monitor = tree["vllm/utils/jit_monitor.py"]
        assert monitor.is_active.arguments == [] and "activate_jit_monitor" in tree["vllm/v1/worker/gpu_worker.py"].text


@claim
def the_platform_tells_a_hopper(tree):
    platform = tree["vllm/platforms/interface.py"].Platform
    assert platform.is_device_capability.arguments[:2] == ["cls", "capability"] and platform.defines("is_cuda")
