"""Which layers the plugin takes, what it says, and that it never takes the server down: vLLM's code on the CPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from . import layers, started
from .layers import Sizes

import vllm.envs as envs  # isort: skip
import vllm.platforms  # isort: skip
from vllm.model_executor.custom_op import op_registry_oot  # isort: skip
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts  # isort: skip
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # isort: skip

from expertile.errors import ShapeError  # isort: skip
from expertile.hardware import H200  # isort: skip
from expertile.plugins.vllm import gate, loading, routed_experts, sealing  # isort: skip
from expertile.plugins.vllm.experts import ExpertileExperts  # isort: skip
from expertile.plugins.vllm.formats import Declined, activation_of  # isort: skip
from expertile.plugins.vllm.planner import Planner  # isort: skip
from expertile.plugins.vllm.settings import Settings  # isort: skip

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def said():
    """The plugin's lines of the log; vLLM's logger does not pass them on to pytest."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = started.plugin.log
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def considered(config, settings=None, layer=None, method=None, prefix="model.layers.3.mlp.experts"):
    """A Gatekeeper with those settings looks at a layer's method, as it is before weights exist."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = method or UnquantizedFusedMoEMethod(config)
    gatekeeper = gate.Gatekeeper(settings or Settings())
    gatekeeper.consider(layer or SimpleNamespace(params_dtype=config.in_dtype), method, config, prefix)
    return method


def lora(config, monkeypatch):
    config.is_lora_enabled = True


def asked_for(config, monkeypatch):
    config.moe_backend = "triton"


def by_deepep(config, monkeypatch, backend="deepep_high_throughput"):
    parallel = layers.parallel_config(ep=2, dp_size=2, all2all_backend=backend)
    config.moe_parallel_config = parallel


def batched(config, monkeypatch):
    by_deepep(config, monkeypatch, "deepep_low_latency")


def blackwell(config, monkeypatch):
    monkeypatch.setattr(type(vllm.platforms.current_platform), "capability", type(HOPPER)(10, 0))


def step(config, monkeypatch):
    config.activation = type(config.activation).SWIGLUSTEP


def clamped_gelu(config, monkeypatch):
    config.activation, config.swiglu_limit = type(config.activation).GELU, 7.0


def fp32(config, monkeypatch):
    config.in_dtype = torch.float32


def many(config, monkeypatch):
    config.num_experts = config.num_local_experts = 4096


def offloaded(config, monkeypatch):
    uva, prefetch = SimpleNamespace(cpu_offload_gb=4), SimpleNamespace(offload_group_size=0)
    found = SimpleNamespace(offload_config=SimpleNamespace(uva=uva, prefetch=prefetch))
    monkeypatch.setattr(gate, "get_current_vllm_config", lambda: found)


def loaded_by(load_format: str):
    """An engine that loads its weights that way."""

    def change(config, monkeypatch):
        found = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        monkeypatch.setattr(gate, "get_current_vllm_config", lambda: found)

    change.__name__ = f"loaded_by_{load_format}"
    return change


def draft_from_the_cache(config, monkeypatch):
    draft = SimpleNamespace(draft_load_config=SimpleNamespace(load_format="ipc_cache"))
    found = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"), speculative_config=draft)
    monkeypatch.setattr(gate, "get_current_vllm_config", lambda: found)


def invariant(config, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


HOPPER = vllm.platforms.current_platform.get_device_capability()
REASONS = [
    (lora, "LoRA adapters are enabled"),
    (asked_for, "moe_backend=triton was asked for"),
    (by_deepep, "all2all_backend=deepep_high_throughput is not supported"),
    (batched, "all2all_backend=deepep_low_latency batches tokens by expert"),
    (blackwell, "needs a Hopper GPU"),
    (step, "activation swiglustep is not one"),
    (clamped_gelu, "activation gelu with swiglu_limit=7.0"),
    (fp32, "activations are torch.float32"),
    (many, "experts=4096 is more than"),
    (offloaded, "weights are offloaded to the CPU"),
    (loaded_by("ipc_cache"), "load_format=ipc_cache may bring weights as another process laid them out"),
    (loaded_by("modelexpress"), "load_format=modelexpress may bring weights as another process laid them out"),
    (loaded_by("of_another_plugin"), "load_format=of_another_plugin may bring"),
    (draft_from_the_cache, "draft_load_config.load_format=ipc_cache may bring"),
    (invariant, "batch invariance"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[change.__name__ for change, _ in REASONS])
def test_what_is_not_served_is_left_to_vllm_with_the_reason(change, reason, said, monkeypatch):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    config = layers.moe_config(Sizes())
    method = UnquantizedFusedMoEMethod(config)
    before = dict(vars(method))
    change(config, monkeypatch)
    considered(config, method=method)
    assert vars(method) == before
    assert len(said) == 1 and said[0][0] == "INFO" and reason in said[0][1], said
    assert said[0][1].startswith("expertile leaves model.layers.*.mlp.experts to vLLM: ")


@pytest.mark.parametrize("load_format", gate.CHECKPOINTS)
def test_weights_out_of_a_checkpoint_are_served(load_format, monkeypatch):
    config = layers.moe_config(Sizes())
    loaded_by(load_format)(config, monkeypatch)
    assert considered(config).experts_cls is ExpertileExperts


def test_an_engine_without_a_config_for_loading_is_served(monkeypatch):
    monkeypatch.setattr(gate, "get_current_vllm_config", lambda: SimpleNamespace(load_config=None))
    assert considered(layers.moe_config(Sizes())).experts_cls is ExpertileExperts


DEEP, DEEP_MOE, MARLIN = "VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_TEST_FORCE_FP8_MARLIN"
ASKING = [
    ({}, None),  # vLLM's default for DeepGEMM is on: that asks for nothing
    ({DEEP_MOE: "1"}, DEEP_MOE),
    ({DEEP: "1"}, DEEP),
    ({DEEP: "1", DEEP_MOE: "1"}, DEEP),
    ({DEEP: "0"}, None),
    ({DEEP: "1", DEEP_MOE: "0"}, None),
    ({DEEP: "0", DEEP_MOE: "1"}, None),
    ({MARLIN: "1"}, MARLIN if MARLIN in envs.environment_variables else None),  # gone in 0.33
    ({MARLIN: "0"}, None),
]


@pytest.mark.parametrize(("environment", "asking"), ASKING)
def test_a_backend_that_a_variable_of_vllm_asks_for_is_left_alone(environment, asking, said, monkeypatch):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    for name in (DEEP, DEEP_MOE, MARLIN):
        monkeypatch.delenv(name, raising=False)
    config = layers.moe_config(Sizes(hidden=128, inter=128))
    layer = SimpleNamespace(params_dtype=config.in_dtype, moe_config=config)
    method = Fp8MoEMethod(Fp8Config(True, "dynamic", weight_block_size=[128, 128]), layer)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # after: the fake Hopper has none of them, and vLLM would insist
    considered(config, layer=layer, method=method)
    if asking:
        assert said[0][1].endswith(f" to vLLM: {asking}=1 was asked for")
    else:
        assert method.experts_cls is ExpertileExperts, said
    assert considered(config).experts_cls is ExpertileExperts  # it is about fp8 only


def test_data_parallel_ranks_that_gather_are_served(said):
    config = layers.moe_config(Sizes())
    config.moe_parallel_config = layers.parallel_config(ep=2, dp_size=2)
    assert considered(config).experts_cls is ExpertileExperts, said
    assert loading.most_tokens(config) == 2 * config.max_num_tokens
    config.moe_parallel_config.pcp_size = 4
    assert loading.most_tokens(config) == 8 * config.max_num_tokens


def test_another_method_is_left_alone(said):
    class Int4Method:
        pass

    considered(layers.moe_config(Sizes()), method=Int4Method())
    assert "Int4Method is not a format that expertile has" in said[0][1]


def test_a_subclass_is_another_method(said):
    """It may store its weights otherwise."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    class Special(UnquantizedFusedMoEMethod):
        pass

    config = layers.moe_config(Sizes())
    assert considered(config, method=Special(config)).experts_cls is not ExpertileExperts
    assert "Special is not a format" in said[0][1]


@pytest.mark.parametrize("off", ["bf16", "layers.3", "mlp.experts", "model.layers.3.mlp.experts"])
def test_formats_and_layers_can_be_switched_off(off, said):
    settings = Settings.from_environment({"EXPERTILE_VLLM_OFF": f"fp8_block, {off}"})
    assert considered(layers.moe_config(Sizes()), settings).experts_cls is not ExpertileExperts
    assert f"EXPERTILE_VLLM_OFF names {off}" in said[0][1]


def test_a_format_may_be_in_capitals():
    assert Settings.from_environment({"EXPERTILE_VLLM_OFF": "BF16,FP8_block"}).off == ("bf16", "fp8_block")


@pytest.mark.parametrize("off", ["fp16", "layers.30", "layers.33", "experts.0", "layer"])
def test_other_names_do_not_switch_a_layer_off(off):
    settings = Settings.from_environment({"EXPERTILE_VLLM_OFF": off})
    assert considered(layers.moe_config(Sizes()), settings).experts_cls is ExpertileExperts


@pytest.mark.parametrize(
    "environment",
    [
        {"EXPERTILE_VLLM": "no"},
        {"EXPERTILE_VLLM_GUARD": "loud"},
        *({"EXPERTILE_VLLM_OFF": text} for text in ("fp8", "layers.3:bf16", "int4", "e4m3", "MXFP4", "layers..3")),
        {"EXPERTILE_POLICY": "fastest"},
    ],
)
def test_a_switch_without_a_valid_value_is_an_error(environment):
    with pytest.raises(ShapeError, match=f"{next(iter(environment))}"):
        Settings.from_environment(environment)


@pytest.mark.parametrize("text", ["[]", '{"others": "no"}', '{"tables": ["nowhere.json"]}', "[" * 100_000])
def test_a_wrong_file_of_the_policy_turns_the_plugin_off_with_one_line(tmp_path, monkeypatch, said, text):
    path = tmp_path / "policy.json"
    path.write_text(text)
    monkeypatch.setenv("EXPERTILE_POLICY", str(path))
    started.plugin.register()
    ((level, line),) = said
    assert level == "WARNING" and "expertile stays off, vLLM is as it was" in line and str(path) in line


def test_one_line_says_what_is_taken_for_all_layers_alike(said):
    gatekeeper = gate.Gatekeeper(Settings(off=("layers.5",)))
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for number in range(48):
        config = layers.moe_config(Sizes())
        layer = SimpleNamespace(params_dtype=config.in_dtype)
        gatekeeper.consider(layer, UnquantizedFusedMoEMethod(config), config, f"model.layers.{number}.mlp.experts")
    assert [text for _, text in said] == [
        "expertile takes model.layers.*.mlp.experts: bf16, 6 experts of 64x48, top 2, silu (vLLM would take TRITON)",
        "expertile leaves model.layers.*.mlp.experts to vLLM: EXPERTILE_VLLM_OFF names layers.5",
    ]


def test_one_rank_speaks_for_all(said):
    config = layers.moe_config(Sizes(), parallel=layers.parallel_config(tp=2, tp_rank=1))
    considered(config)
    assert [level for level, _ in said] == ["DEBUG"]


def test_a_layer_is_looked_at_before_it_has_weights(monkeypatch):
    seen = []
    stock = gate.Gatekeeper._format
    monkeypatch.setattr(
        gate.Gatekeeper, "_format", lambda *args: seen.append(list(args[1].parameters())) or stock(*args)
    )
    layer = layers.make_layer(layers.moe_config(Sizes()))
    assert seen == [[]] and len(list(layer.parameters())) == 2


def test_an_error_while_looking_leaves_the_layer_to_vllm(said, monkeypatch):
    monkeypatch.setattr(gate, "format_of", lambda *arguments: 1 / 0)
    layer = layers.make_layer(layers.moe_config(Sizes()))
    assert layer.quant_method.experts_cls is TritonExperts
    assert said[0][0] == "WARNING" and "looking at it failed" in said[0][1]


@pytest.mark.parametrize("what", ["weights_of", "warm"])
def test_an_error_while_loading_gives_the_layer_back(what, said, monkeypatch):
    from expertile.plugins.vllm import experts

    def fail(*arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr({"weights_of": experts, "warm": loading}[what], what, fail)
    sizes = Sizes(hidden=80 if what == "warm" else 64)  # another shape: warmed once a process
    layer = layers.make_layer(layers.moe_config(sizes))
    layers.load(layer, layers.make_checkpoint(sizes, "none"))
    method = layer.quant_method
    assert type(method.moe_kernel.fused_experts) is TritonExperts and method.experts_cls is TritonExperts
    levels = [level for level, _ in said]
    assert levels == ["INFO", "WARNING"] or levels == ["WARNING"]
    assert "gives model.layers.3.mlp.experts back to vLLM" in said[-1][1]


def test_kernels_are_compiled_ahead_once_for_each_shape(monkeypatch):
    calls = []

    def warm(weights, top_k, most, **options):
        calls.append((weights, top_k, most, options, torch.get_default_dtype()))
        return [1]

    monkeypatch.setattr(loading, "warm", warm)
    sizes = Sizes(hidden=96)
    for number in range(3):
        layer = layers.make_layer(layers.moe_config(sizes, max_num_tokens=100), name=f"model.layers.{number}.experts")
        layers.load(layer, layers.make_checkpoint(sizes, "none"))
    ((weights, top_k, most, options, dtype),) = calls
    assert (top_k, most, dtype) == (2, 100, torch.float32)
    assert weights.hidden == 96 and options["expert_map"] is None
    layer = layers.make_layer(layers.moe_config(sizes, parallel=layers.parallel_config(ep=2, ep_rank=1)))
    layers.load(layer, layers.make_checkpoint(sizes, "none"))
    assert len(calls) == 2 and calls[1][3]["expert_map"] is layer.expert_map is not None


def test_scratch_memory_of_the_largest_step_is_enough_for_all():
    """vLLM locks its workspace at what the largest step took; the first is not asked for: it may be the output's."""
    config = layers.moe_config(Sizes())
    layer = layers.make_layer(config)
    layers.load(layer, layers.make_checkpoint(Sizes(), "none"))
    experts = layer.quant_method.moe_kernel.fused_experts
    problem = experts.problem(2, 6)
    plans = Planner(problem, H200)
    experts._planners[(2, 6)] = plans
    before = 0
    for tokens in range(1, 300):
        first, second, out = experts.workspace_shapes(tokens, 96, 64, 2, 6, 6, None, config.activation)
        assert first == (0,) and out == (tokens, 64)
        assert second[0] >= before and 2 * second[0] >= plans.plan(tokens).workspace_bytes + 2 * 4 * tokens * 2
        before = second[0]
    del experts._planners[(2, 6)]


def test_what_the_workspace_held_does_not_matter():
    from vllm.v1.worker.workspace import current_workspace_manager

    sizes = Sizes(top_k=1)
    layer = layers.make_layer(layers.moe_config(sizes), on_input=True)
    layers.load(layer, layers.make_checkpoint(sizes, "none"))
    x, ids, probs = layers.routing(9, sizes)
    want = layers.run(layer, x.bfloat16(), ids.long(), probs)
    with torch.inference_mode():
        current_workspace_manager().get_simultaneous(((1 << 20,), torch.uint8))[0].fill_(255)
    assert torch.equal(layers.run(layer, x.bfloat16(), ids.long(), probs), want)


def test_hidden_states_must_come_unquantised():
    layer = layers.make_layer(layers.moe_config(Sizes()))
    layers.load(layer, layers.make_checkpoint(Sizes(), "none"))
    experts = layer.quant_method.moe_kernel.fused_experts
    assert experts.expects_unquantized_inputs
    x, ids, probs = layers.routing(4, Sizes())
    with pytest.raises(Exception, match=r"hidden_states came as torch[.]float8_e4m3fn"):
        experts.apply(
            x.bfloat16(), x.to(layers.FP8), layer.w13_weight, layer.w2_weight, probs, ids, layer.activation, 6, None,
            None, None, x, x, None, False,
        )  # fmt: skip


def test_swiglu_constants_that_vllm_would_ignore_are_refused():
    assert activation_of("swigluoai", 7.0, 1.702, 1.0).interleaved
    with pytest.raises(Declined, match="swigluoai with swiglu_limit=10"):
        activation_of("swigluoai", 10.0)
    with pytest.raises(Declined, match="silu with swiglu_alpha"):
        activation_of("silu", 7.0, 1.702)


def test_registering_again_changes_nothing():
    ours = op_registry_oot["RoutedExperts"]
    started.plugin.register()
    assert op_registry_oot["RoutedExperts"] is ours and issubclass(ours, RoutedExperts) and ours.of_expertile


def test_the_plugin_can_be_switched_off(monkeypatch):
    monkeypatch.delitem(op_registry_oot, "RoutedExperts")
    monkeypatch.setenv("EXPERTILE_VLLM", "0")
    started.plugin.register()
    assert "RoutedExperts" not in op_registry_oot
    assert type(layers.make_layer(layers.moe_config(Sizes()))) is RoutedExperts


def test_a_wrong_switch_turns_it_off_and_not_the_server(monkeypatch, said):
    monkeypatch.delitem(op_registry_oot, "RoutedExperts")
    monkeypatch.setenv("EXPERTILE_VLLM_GUARD", "loud")
    started.plugin.register()
    assert "RoutedExperts" not in op_registry_oot
    assert said == [
        (
            "WARNING",
            "expertile stays off, vLLM is as it was: EXPERTILE_VLLM_GUARD='loud': use one of off, count, warn, error",
        )
    ]


def test_a_vllm_that_is_not_understood_turns_it_off_and_not_the_server(monkeypatch, said):
    monkeypatch.delitem(op_registry_oot, "RoutedExperts")
    monkeypatch.setattr(routed_experts, "install", lambda settings: 1 / 0)
    started.plugin.register()
    assert said[0][0] == "WARNING" and "loading the plugin failed" in said[0][1]


def test_another_plugin_keeps_its_place(monkeypatch, said):
    class Theirs(RoutedExperts):
        pass

    monkeypatch.setitem(op_registry_oot, "RoutedExperts", Theirs)
    started.plugin.register()
    assert op_registry_oot["RoutedExperts"] is Theirs and "another plugin" in said[0][1]


def test_the_compile_cache_knows_the_plugin(monkeypatch):
    with_ours = envs.compile_factors()
    assert with_ours["EXPERTILE_VLLM_FINGERPRINT"]
    monkeypatch.setenv("EXPERTILE_VLLM_OFF", "fp8_block")
    assert envs.compile_factors()["EXPERTILE_VLLM_OFF"] != with_ours["EXPERTILE_VLLM_OFF"]
    monkeypatch.delitem(envs.environment_variables, "EXPERTILE_VLLM_FINGERPRINT")
    assert "EXPERTILE_VLLM_FINGERPRINT" not in envs.compile_factors()


def test_the_guard_is_sealed_when_vllm_is_warm(monkeypatch):
    sealed, warm = [], []
    monkeypatch.setattr(sealing, "seal", sealed.append)
    monkeypatch.setattr(sealing, "warm_up_is_over", lambda: bool(warm))
    seal = sealing.Seal("warn")
    seal.check()
    assert sealed == []
    warm.append(True)
    seal.check()
    seal.check()
    assert sealed == ["warn"]
    sealing.Seal("off").check()
    assert sealed == ["warn"]


def test_layers_share_the_seal_of_the_settings_that_the_plugin_was_installed_with(monkeypatch):
    """What the environment and the policy's file say later is not looked at: a first step could fail of it."""
    sealed = []
    monkeypatch.setattr(sealing, "seal", sealed.append)
    monkeypatch.setattr(sealing, "warm_up_is_over", lambda: True)
    gatekeeper = gate.Gatekeeper(Settings(guard="count"))
    config = layers.moe_config(Sizes())
    made = [layers.make_layer(config, name=f"model.layers.{number}.experts") for number in range(2)]
    for layer in made:
        gatekeeper.consider(layer, layer.quant_method, config, layer.layer_name)
        layers.load(layer, layers.make_checkpoint(Sizes(), "none"))
    assert sealed == []
    monkeypatch.setenv("EXPERTILE_VLLM_GUARD", "loud")
    monkeypatch.setenv("EXPERTILE_POLICY", "gone.json")
    x, ids, probs = layers.routing(3, Sizes())
    for layer in made:
        layers.run(layer, x.bfloat16(), ids, probs)
    assert sealed == ["count"]


def test_vllm_says_when_it_is_warm(monkeypatch):
    assert not sealing.warm_up_is_over()
    try:
        from vllm.utils import jit_monitor
    except ImportError:
        from vllm.v1.worker.workspace import current_workspace_manager

        monkeypatch.setattr(type(current_workspace_manager()), "is_locked", lambda self: True)
    else:
        monkeypatch.setattr(jit_monitor, "_active", True)
    assert sealing.warm_up_is_over()


def test_no_driver_was_started():
    assert not torch.cuda.is_initialized()
