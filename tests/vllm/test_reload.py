"""Weights that change in a running engine, by vLLM's own ways: they are used, and no second copy of them stays."""

from __future__ import annotations

import gc

import pytest
import torch

from . import layers, started  # noqa: F401  vLLM is started before its modules are imported
from .layers import Sizes
from .test_layers import compressed_tensors, fp8, modelopt

from vllm.model_executor.model_loader import reload  # isort: skip

from expertile.plugins.vllm.experts import ExpertileExperts  # isort: skip

pytestmark = pytest.mark.usefixtures("engine")

#: Each of its own size: vLLM keeps layers that it has reloaded.
CASES = {
    "bf16": ("none", lambda: None, Sizes(hidden=72)),
    "tensor": ("tensor", fp8, Sizes(hidden=80)),
    "tensor-static": ("tensor", modelopt, Sizes(hidden=88)),
    "channel": ("channel", lambda: compressed_tensors("channel", "token", True), Sizes(hidden=96)),
    "block": ("block", lambda: fp8(block=[128, 128]), Sizes(hidden=256, inter=128)),
}


def running(quant: str, reader, sizes: Sizes, made, *, static: bool):
    """(a model of one layer, that layer), loaded as vLLM's loaders do."""
    model = torch.nn.Module()
    model.experts = layer = layers.make_layer(layers.moe_config(sizes), reader)
    reload.record_metadata_for_reloading(model)
    layers.load(layer, made, static=static)
    assert isinstance(layer.quant_method.moe_kernel.fused_experts, ExpertileExperts)
    return model, layer


def reload_weights(model, layer, made, *, static: bool) -> None:
    """`reload_weights` of vLLM's runner: into temporary tensors, processed there, copied to where the layer's are."""
    reload.initialize_layerwise_reload(model)
    assert layer.w13_weight.is_meta
    layers.load_by_parameters(layer, made, static=static)
    reload.finalize_layerwise_reload(model, None)


def copies(layer) -> set[int]:
    """Addresses of all tensors in this process that are as large as the layer's w13."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {each.data_ptr() for each in tensors if each.shape == layer.w13_weight.shape and not each.is_meta}


@pytest.mark.parametrize("case", CASES)
def test_weights_that_vllm_reloads_layer_by_layer_are_used_and_not_kept_twice(case):
    quant, reader, sizes = CASES[case]
    static = case == "tensor-static"
    x, ids, probs = layers.routing(9, sizes)
    x = x.bfloat16()

    def loaded(made):
        model, layer = running(quant, reader(), sizes, made, static=static)
        return model, layer, layers.run(layer, x, ids, probs)

    newer = [layers.make_checkpoint(sizes, quant, seed=seed) for seed in (7, 8)]
    wants = [loaded(made)[-1] for made in newer]
    model, layer, _ = loaded(layers.make_checkpoint(sizes, quant))
    place, before = layer.w13_weight.data_ptr(), copies(layer)
    for made, want in zip(newer, wants, strict=True):
        reload_weights(model, layer, made, static=static)
        assert layer.w13_weight.data_ptr() == place, "CUDA graphs read the old place"
        assert copies(layer) == before
        assert torch.equal(layers.run(layer, x, ids, probs), want)
        assert copies(layer) == before
