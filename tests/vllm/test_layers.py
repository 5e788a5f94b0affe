"""vLLM's layers on the CPU, taken over: float64's answers from the checkpoint's values, for each of its formats.

Everything around our experts is vLLM's own code (tests/vllm/host.py says what is faked): which method it chooses, how
it creates, loads and processes weights, its modular kernel and workspace. Our experts run on the torch backend here.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from . import layers, started  # noqa: F401  vLLM is started before its modules are imported
from .layers import Sizes

from expertile.errors import ShapeError  # isort: skip
from expertile.plugins.vllm import gate  # isort: skip
from expertile.plugins.vllm.experts import ExpertileExperts  # isort: skip
from expertile.plugins.vllm.formats import activation_of  # isort: skip
from expertile.reference import activate  # isort: skip

pytestmark = pytest.mark.usefixtures("engine")


def silu(gate, up):
    return gate * torch.sigmoid(gate) * up


def fp8(activation_scheme="dynamic", block=None):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(True, activation_scheme, weight_block_size=block)


def modelopt():
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "ignore": []}
    return ModelOptFp8Config.from_config(config)


def compressed_tensors(strategy: str, inputs: str, dynamic: bool):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    acts = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": inputs, "dynamic": dynamic}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        acts["group_size"] = 128
    group = {"targets": ["Linear", "RoutedExperts", "FusedMoE"], "weights": weights, "input_activations": acts}
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": [],
        }
    )


def check(sizes, quant, quant_config=None, activation="silu", act=silu, *, static=False, bias=False, tp=1, ep=1,
          tokens=9, dtype=torch.bfloat16, on_input=False, skip=False, fields=None):  # fmt: skip
    """All ranks of a layer, each taken over, loaded and run; their sum against float64."""
    made = layers.make_checkpoint(sizes, quant, gated="no_mul" not in activation, bias=bias, dtype=dtype)
    x, ids, probs = layers.routing(tokens, sizes)
    x = x.to(dtype)
    if skip:
        ids[1, 0] = ids[tokens - 1, :] = -1
    found = torch.zeros(tokens, sizes.hidden)
    for rank in range(tp * ep):
        ranks = dict(tp=tp, tp_rank=rank) if tp > 1 else dict(ep=ep, ep_rank=rank)
        config = layers.moe_config(
            sizes, activation, dtype, layers.parallel_config(**ranks), has_bias=bias, **(fields or {})
        )
        layer = layers.make_layer(config, quant_config, on_input=on_input)
        assert layer.quant_method.experts_cls is ExpertileExperts, "the layer was left to vLLM"
        layers.load(layer, made, static=static)
        assert isinstance(layer.quant_method.moe_kernel.fused_experts, ExpertileExperts), "given back while loading"
        found += layers.run(layer, x, ids, probs).float()
    want = layers.answer(x, ids, probs, made, act, weight_on_input=on_input)
    layers.check(found, want, quant)
    return found


def loaded():
    """A small layer in bf16, taken over."""
    layer = layers.make_layer(layers.moe_config(Sizes()))
    layers.load(layer, layers.make_checkpoint(Sizes(), "none"))
    return layer


TP = Sizes(inter=88)  # 22 a rank of four: no multiple of 8


def test_bf16():
    check(Sizes(), "none")


def test_fp16():
    check(Sizes(), "none", dtype=torch.float16)


def test_one_token_and_many():
    check(Sizes(), "none", tokens=1)
    check(Sizes(), "none", tokens=64)


def test_tensor_parallel_shards_of_odd_width():
    check(TP, "none", tp=4)


def test_expert_parallel_ranks_take_their_experts_only():
    check(Sizes(), "none", ep=3)
    check(Sizes(), "channel", compressed_tensors("channel", "token", True), ep=2)


def test_slots_that_are_skipped_count_as_nothing():
    found = check(Sizes(), "none", skip=True)
    assert not found[-1].any()


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_fp8_checkpoints_with_a_scale_a_tensor(scheme):
    check(Sizes(), "tensor", fp8(scheme), static=scheme == "static")


def test_fp8_checkpoints_in_blocks():
    check(Sizes(hidden=256, inter=384), "block", fp8(block=[128, 128]))


def test_fp8_checkpoints_in_blocks_whose_last_is_narrow():
    check(Sizes(hidden=192, inter=256), "block", fp8(block=[128, 128]))


def test_modelopt_checkpoints():
    check(Sizes(), "tensor", modelopt(), static=True)


def test_modelopt_checkpoints_without_a_gate():
    check(Sizes(), "tensor", modelopt(), "relu2_no_mul", lambda h: h.clamp(min=0) ** 2, static=True)


@pytest.mark.parametrize(
    ("quant", "inputs", "dynamic", "sizes"),
    [
        ("tensor", "tensor", False, Sizes()),
        ("tensor", "tensor", True, Sizes()),
        ("channel", "token", True, Sizes(inter=44)),
        ("block", "group", True, Sizes(hidden=256, inter=128)),
    ],
)
def test_compressed_tensors_checkpoints(quant, inputs, dynamic, sizes):
    check(sizes, quant, compressed_tensors(quant, inputs, dynamic), static=not dynamic)


def test_fp8_tensor_parallel():
    check(TP, "tensor", fp8("static"), static=True, tp=4)
    check(TP, "channel", compressed_tensors("channel", "token", True), tp=4)


def gelu(gate, up):
    return torch.nn.functional.gelu(gate) * up


def gelu_tanh(gate, up):
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


OTHERS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2_no_mul": lambda h: h.clamp(min=0) ** 2,
    "silu_no_mul": torch.nn.functional.silu,
    "gelu_no_mul": torch.nn.functional.gelu,
    "gelu_tanh_no_mul": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations(name):
    check(Sizes(), "none", None, name, OTHERS[name])


@pytest.mark.parametrize("name", [*OTHERS, "silu", "swigluoai", "swigluoai_uninterleave"])
def test_activations_to_the_last_digit(name):
    """Two kinds of gelu differ by less than a bf16 layer shows."""
    act = {**OTHERS, "silu": silu, "swigluoai": swiglu_oai, "swigluoai_uninterleave": swiglu_oai}[name]
    ours = activation_of(name, *((7.0, 1.702, 1.0) if "oai" in name else ()))
    gate, up = torch.linspace(-9, 9, 400, dtype=torch.float64).view(2, 1, 200)
    rows = torch.stack([gate, up], 2).flatten(1) if ours.interleaved else torch.cat([gate, up], 1)
    want = act(gate, up) if ours.gated else act(gate)
    assert torch.allclose(activate(rows if ours.gated else gate, ours), want, rtol=1e-12, atol=1e-12)


def test_clamps():
    check(Sizes(), "none", act=lambda g, u: silu(g.clamp(max=0.5), u.clamp(-0.5, 0.5)), fields=dict(swiglu_limit=0.5))


def swiglu_oai(gate, up, limit=7.0, alpha=1.702):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1.0)


def test_swiglu_oai_with_gate_rows_before_up_rows():
    fields = dict(swiglu_limit=1.0, swiglu_alpha=1.702, swiglu_beta=1.0)
    check(Sizes(), "none", None, "swigluoai_uninterleave", lambda g, u: swiglu_oai(g, u, 1.0), bias=True, fields=fields)


def test_swiglu_oai_with_gate_and_up_rows_in_turn():
    """gpt-oss in 16 bit: its model code loads the rows as the checkpoint has them."""
    sizes, made = Sizes(), layers.make_checkpoint(Sizes(), "none", bias=True)
    layer = layers.make_layer(layers.moe_config(sizes, "swigluoai", has_bias=True))
    for expert in range(sizes.experts):
        layer.w13_weight.data[expert, 0::2] = made.stored["w1"][expert]
        layer.w13_weight.data[expert, 1::2] = made.stored["w3"][expert]
        layer.w2_weight.data[expert] = made.stored["w2"][expert]
        layer.w13_bias.data[expert, 0::2], layer.w13_bias.data[expert, 1::2] = (
            made.biases["w1"][expert],
            made.biases["w3"][expert],
        )
        layer.w2_bias.data[expert] = made.biases["w2"][expert]
    layers.finish(layer)
    x, ids, probs = layers.routing(9, sizes)
    want = layers.answer(x.bfloat16(), ids, probs, made, swiglu_oai)
    layers.check(layers.run(layer, x.bfloat16(), ids, probs), want, "none")


def test_biases_are_added_once_among_tensor_parallel_ranks():
    check(TP, "none", bias=True, tp=2)


def test_router_weights_on_the_input():
    check(Sizes(top_k=1), "none", on_input=True)
    check(Sizes(top_k=1), "tensor", fp8("static"), static=True, on_input=True)


def test_ids_and_weights_of_other_dtypes():
    sizes, made = Sizes(), layers.make_checkpoint(Sizes(), "none")
    layer = layers.make_layer(layers.moe_config(sizes))
    layers.load(layer, made)
    x, ids, probs = layers.routing(9, sizes)
    x = x.bfloat16()
    want = layers.run(layer, x, ids, probs.bfloat16().float())
    found = layers.run(layer, x, ids.long(), probs.bfloat16())
    assert torch.equal(found, want)
    strided = torch.stack([ids, ids], 2)[:, :, 0]
    assert not strided.is_contiguous() and torch.equal(layers.run(layer, x, strided, probs.bfloat16().float()), want)


@pytest.mark.parametrize(
    "kind", ["Fp8PerTensorOnlineMoEMethod", "Fp8PtpcOnlineMoEMethod", "Fp8PerBlockOnlineMoEMethod"]
)
def test_weights_that_vllm_quantises_while_loading(kind):
    from vllm.model_executor.layers.quantization.online import fp8 as online

    class Online:
        online_quantization_config = None  # asked for from 0.30

        def get_quant_method(self, layer, prefix):
            with contextlib.suppress(TypeError):
                return getattr(online, kind)(layer=layer)
            return getattr(online, kind)(moe=layer.moe_config)

        def get_name(self):
            return "fp8"

    sizes = Sizes(hidden=128, inter=256)
    made = layers.make_checkpoint(sizes, "none")
    layer = layers.make_layer(layers.moe_config(sizes), Online())
    assert layer.quant_method.experts_cls is ExpertileExperts
    w13 = torch.stack([torch.cat([g, u]) for g, u in zip(made.stored["w1"], made.stored["w3"], strict=True)])
    layer.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.stack(made.stored["w2"]), requires_grad=False)
    layers.finish(layer)
    x, ids, probs = layers.routing(9, sizes)
    found = layers.run(layer, x.bfloat16(), ids, probs)
    layers.check(found, layers.answer(x.bfloat16(), ids, probs, made, silu), "online")


def test_weights_that_are_replaced_later_are_used():
    """Reinforcement learning writes new weights into a running engine."""
    sizes, made = Sizes(), layers.make_checkpoint(Sizes(), "none")
    layer = layers.make_layer(layers.moe_config(sizes))
    layers.load(layer, made)
    x, ids, probs = layers.routing(9, sizes)
    x = x.bfloat16()
    layers.run(layer, x, ids, probs)
    newer = layers.make_checkpoint(sizes, "none", seed=7)
    layers.load(layer, newer)
    found = layers.run(layer, x, ids, probs)
    layers.check(found, layers.answer(x, ids, probs, newer, silu), "none")


def test_parameters_that_are_exchanged_are_used():
    sizes, made, newer = Sizes(), *(layers.make_checkpoint(Sizes(), "none", seed=seed) for seed in (0, 7))
    layer, other = (layers.make_layer(layers.moe_config(sizes)) for _ in range(2))
    layers.load(layer, made)
    layers.load(other, newer)
    layer.w13_weight, layer.w2_weight = other.w13_weight, other.w2_weight
    x, ids, probs = layers.routing(9, sizes)
    found = layers.run(layer, x.bfloat16(), ids, probs)
    layers.check(found, layers.answer(x.bfloat16(), ids, probs, newer, silu), "none")


def test_the_experts_are_called_without_what_is_for_other_ranks(monkeypatch):
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    def around(*arguments, **options):
        raise AssertionError("vLLM's modular kernel was asked")

    monkeypatch.setattr(mk.FusedMoEKernelModularImpl, "_prepare", around)
    monkeypatch.setattr(mk.FusedMoEKernelModularImpl, "_allocate_buffers", around)
    layer, sizes = loaded(), Sizes()
    x, ids, probs = layers.routing(3, sizes)
    assert layers.run(layer, x.to(torch.bfloat16), ids, probs).shape == (3, sizes.hidden)


def test_both_ways_to_the_experts_give_the_same():
    layer, sizes = loaded(), Sizes()
    impl = layer.quant_method.moe_kernel.impl
    x, ids, probs = layers.routing(5, sizes)
    alone = layers.run(layer, x.to(torch.bfloat16), ids, probs)
    del impl.apply  # what was put before the class's
    assert torch.equal(layers.run(layer, x.to(torch.bfloat16), ids, probs), alone)


def test_weights_that_are_updated_often_are_wrapped_once():
    """vLLM keeps the kernel of a 16-bit layer when its weights are processed again."""
    layer = loaded()
    impl = layer.quant_method.moe_kernel.impl
    alone = impl.apply
    for _ in range(3):
        layers.finish(layer)
    assert layer.quant_method.moe_kernel.impl is impl and impl.apply is alone


def test_other_ranks_keep_what_vllm_does_around_the_experts():
    from expertile.plugins.vllm.experts import call_experts_alone

    kernel = loaded().quant_method.moe_kernel
    del kernel.impl.apply
    kernel.impl.prepare_finalize = object()
    call_experts_alone(kernel)
    assert "apply" not in vars(kernel.impl)


def test_experts_that_elastic_ep_makes_anew_serve():
    """It makes experts of ours for another number of ranks, and asks for their workspace before they see weights."""
    from vllm.model_executor.layers.fused_moe import eep_reconfigure
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    layer, sizes = loaded(), Sizes()
    method, kernel = layer.quant_method, layer.quant_method.moe_kernel
    x, ids, probs = layers.routing(5, sizes)
    want = layers.run(layer, x.bfloat16(), ids, probs)
    config = replace(layer.moe_config, num_experts=2 * sizes.experts)
    made = eep_reconfigure._make_eep_experts(method, kernel.fused_experts, kernel.prepare_finalize, config)
    assert isinstance(made, ExpertileExperts) and made.weights is None
    staged = eep_reconfigure.FusedMoEModularMethod(method, mk.FusedMoEKernel(kernel.prepare_finalize, made))
    layer.quant_method = staged
    assert torch.equal(layers.run(layer, x.bfloat16(), ids, probs), want)


def test_weights_that_are_not_what_vllm_configured_are_refused():
    experts = loaded().quant_method.moe_kernel.fused_experts
    w13, w2 = torch.zeros(6, 64, 64, dtype=torch.bfloat16), torch.zeros(6, 64, 32, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="6 experts of 64x32, vLLM's configuration says 6 of 64x48"):
        experts.prepare(w13, w2)


def test_padding_that_vllm_is_told_to_skip_goes_its_way(monkeypatch):
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    if "VLLM_MOE_SKIP_PADDING" not in mk.FusedMoEKernelModularImpl._prepare.__code__.co_names:
        pytest.skip("this vLLM has no padding to skip around the experts")
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    assert "apply" not in vars(loaded().quant_method.moe_kernel.impl)


def test_nothing_is_copied():
    sizes = Sizes()
    layer = layers.make_layer(layers.moe_config(sizes), compressed_tensors("channel", "token", True))
    layers.load(layer, layers.make_checkpoint(sizes, "channel"))
    x, ids, probs = layers.routing(3, sizes)
    layers.run(layer, x.bfloat16(), ids, probs)
    weights = layer.quant_method.moe_kernel.fused_experts.weights
    for ours, theirs in (
        ("w13", "w13_weight"),
        ("w2", "w2_weight"),
        ("w13_scale", "w13_weight_scale"),
        ("w2_scale", "w2_weight_scale"),
    ):
        assert getattr(weights, ours).data_ptr() == getattr(layer, theirs).data_ptr(), ours


@pytest.mark.parametrize("experts_only", [False, True])
@pytest.mark.parametrize("quant", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_the_benchmarks_models_are_read_as_what_they_are(quant, experts_only):
    """bench/serve_models.py writes what vLLM's readers make our formats of, routers and attention as it means them."""
    from expertile.bench import serve_models

    config = serve_models.quantization(serve_models.QWEN3, quant, experts_only)
    reader = quantization_of(config)
    layer = layers.make_layer(layers.moe_config(Sizes(hidden=128, inter=128)), reader, "model.layers.1.mlp.experts")
    assert layer.quant_method.experts_cls is ExpertileExperts
    assert gate.format_of(layer.quant_method, torch.bfloat16).label == quant
    assert format_of_linear(reader, "model.layers.1.mlp.gate") == "UnquantizedLinearMethod"
    if experts_only:
        assert format_of_linear(reader, "model.layers.1.self_attn.o_proj") == "UnquantizedLinearMethod"


def test_the_benchmarks_nemotron_is_read_as_what_it_is():
    from expertile.bench import serve_models

    reader = quantization_of(serve_models.quantization(serve_models.NEMOTRON3, "fp8_tensor"))
    sizes = Sizes(hidden=128, inter=116)
    layer = layers.make_layer(layers.moe_config(sizes, "relu2_no_mul"), reader, "backbone.layers.1.mixer.experts")
    assert layer.quant_method.experts_cls is ExpertileExperts
    found = gate.format_of(layer.quant_method, torch.bfloat16)
    assert found.label == "fp8_tensor" and found.static_scale


def quantization_of(config: dict):
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(config["quant_method"]).from_config(config)


def format_of_linear(reader, prefix: str) -> str:
    from vllm.model_executor.layers.linear import LinearBase

    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    layer.disable_tp, layer.params_dtype = True, torch.bfloat16
    return type(reader.get_quant_method(layer, prefix)).__name__
