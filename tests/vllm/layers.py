"""Small layers of vLLM, made and loaded by vLLM's code from a checkpoint we invent, and the float64 answer to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
X_SCALE, H_SCALE = 0.02, 0.5  # static activation scales: |x| up to 9, |h| up to 224


@dataclass(frozen=True)
class Sizes:
    experts: int = 6
    hidden: int = 64
    inter: int = 48  # of the whole layer: a tensor-parallel rank has its share
    top_k: int = 2


@dataclass
class Checkpoint:
    """What is on disk, per expert: e4m3 or 16-bit weights with scales, and the values that they stand for (float64)."""

    stored: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    scales: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    biases: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)


NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def make_checkpoint(sizes: Sizes, quant: str, *, gated=True, bias=False, dtype=torch.bfloat16, seed=0) -> Checkpoint:
    """quant: none, tensor, channel or block. Every projection, expert and row has a magnitude of its own."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (sizes.inter, sizes.hidden), "w3": (sizes.inter, sizes.hidden), "w2": (sizes.hidden, sizes.inter)}
    magnitude = {"w1": 1.5 if gated else 0.5, "w3": 0.75, "w2": 1.0}  # without a gate h is a square: within H_SCALE
    made = Checkpoint()
    for shard, shape in shapes.items():
        if shard == "w3" and not gated:
            continue
        rows = 1.0 + (torch.arange(shape[0]) % 3)[:, None] / 2
        values = [
            torch.randn(shape, generator=generator) * rows * magnitude[shard] * (0.5 + expert % 3) / shape[1] ** 0.5
            for expert in range(sizes.experts)
        ]
        pairs = [_store(value, quant, dtype) for value in values]
        made.stored[shard] = [stored for stored, _ in pairs]
        made.scales[shard] = [scale for _, scale in pairs]
        made.values[shard] = [_values(stored, scale, quant) for stored, scale in pairs]
        if bias:
            made.biases[shard] = [
                torch.randn(shape[0], generator=generator).to(dtype) / 4 for _ in range(sizes.experts)
            ]
    return made


def _store(value, quant: str, dtype):
    if quant == "none":
        return value.to(dtype), None
    if quant == "tensor":
        scale = value.abs().max() / FP8_MAX
        return (value / scale).to(FP8), scale
    if quant == "channel":
        scale = value.abs().amax(1, keepdim=True) / FP8_MAX
        return (value / scale).to(FP8), scale
    scale = torch.ones(-(-value.shape[0] // BLOCK), -(-value.shape[1] // BLOCK))
    stored = torch.empty(value.shape, dtype=FP8)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scale[row, column] = value[at].abs().max() / FP8_MAX
            stored[at] = (value[at] / scale[row, column]).to(FP8)
    return stored, scale


def _values(stored, scale, quant: str):
    value = stored.double()
    if quant == "block":
        rows, columns = value.shape
        return value * scale.double().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return value if scale is None else value * scale.double()


def answer(x, ids, probs, made: Checkpoint, act, *, weight_on_input=False):
    """[T, H] float64: out[t] = sum over j of probs[t, j] * expert ids[t, j] (x[t]). act(gate, up) or act(only)."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    gated = "w3" in made.values
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert, weight = int(ids[token, slot]), float(probs[token, slot])
            if expert < 0:
                continue
            row = x[token].double() * (weight if weight_on_input else 1.0)
            first = [
                made.values[shard][expert] @ row + _bias(made, shard, expert) for shard in ("w1", "w3")[: 1 + gated]
            ]
            y = made.values["w2"][expert] @ act(*first) + _bias(made, "w2", expert)
            out[token] += y * (1.0 if weight_on_input else weight)
    return out


def _bias(made: Checkpoint, shard: str, expert: int):
    return made.biases[shard][expert].double() if made.biases else 0.0


def parallel_config(tp=1, tp_rank=0, ep=1, ep_rank=0, **changes):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    found = FusedMoEParallelConfig.make_no_parallel()
    fields = dict(tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank, use_ep=ep > 1, **changes)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def moe_config(sizes: Sizes, activation="silu", dtype=torch.bfloat16, parallel=None, **fields):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType

    parallel = parallel or parallel_config()
    return FusedMoEConfig(
        num_experts=sizes.experts, experts_per_token=sizes.top_k, hidden_dim=sizes.hidden,
        intermediate_size=sizes.inter, num_local_experts=sizes.experts // parallel.ep_size,
        num_logical_experts=sizes.experts, activation=MoEActivation.from_str(activation), device="cpu",
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=dtype,
        **{"max_num_tokens": 64, **fields},
    )  # fmt: skip


def make_layer(config, quant_config=None, name="model.layers.3.mlp.experts", on_input=False):
    """vLLM's RoutedExperts (or what replaced it) with its weights created, not loaded."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    parallel = config.moe_parallel_config
    manager = ExpertMapManager(
        max_num_batched_tokens=config.max_num_tokens, top_k=config.experts_per_token,
        global_num_experts=config.num_experts, num_redundant_experts=0, num_expert_group=None,
        moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
    names = {} if config.is_act_and_mul else {"ckpt_up_proj_name": None}
    try:
        return RoutedExperts(name, config.in_dtype, config, quant_config, manager,
                             **_constants(config), apply_router_weight_on_input=on_input, **names)  # fmt: skip
    except TypeError as error:
        if "ckpt_up_proj_name" not in str(error):
            raise
        return RoutedExperts(name, config.in_dtype, config, quant_config, manager,
                             **_constants(config), apply_router_weight_on_input=on_input)  # fmt: skip


def _constants(config) -> dict:
    names = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    return {name: getattr(config, name) for name in names}


def load(layer, made: Checkpoint, *, static=False) -> None:
    """The checkpoint through vLLM's weight loader, each rank taking its part, then vLLM's processing."""
    load_by_parameters(layer, made, static=static)
    if made.biases:
        _load_biases(layer, made)
    finish(layer)


def load_by_parameters(layer, made: Checkpoint, *, static=False) -> None:
    """Weights and scales by the loaders of the layer's parameters, which are looked up first, as vLLM's models do.

    Scales come first: vLLM's layerwise reload counts values, input scales of w1 and w3 twice, and takes a layer for
    complete that much too early.
    """
    places = dict(layer.named_parameters())
    scale_name = next((name for name in ("weight_scale_inv", "weight_scale") if f"w13_{name}" in places), None)

    def load_one(parameter: str, tensor, kind: str, shard: str, expert: int) -> None:
        name = f"{layer.layer_name}.{expert}.{NAMES[shard]}.{kind}"
        places[parameter].weight_loader(places[parameter], tensor, name, shard, expert)

    for shard, stored in made.stored.items():
        ours = "w2" if shard == "w2" else "w13"
        for expert, weight in enumerate(stored):
            if static:
                scale = torch.tensor(X_SCALE if ours == "w13" else H_SCALE)
                load_one(f"{ours}_input_scale", scale, "input_scale", shard, expert)
            if scale_name and made.scales[shard][expert] is not None:
                load_one(f"{ours}_{scale_name}", made.scales[shard][expert], scale_name, shard, expert)
            load_one(f"{ours}_weight", weight, "weight", shard, expert)


def _load_biases(layer, made: Checkpoint) -> None:
    """Models with biases load them by code of their own: one rank of a tensor-parallel group adds that of w2."""
    parallel = layer.moe_config.moe_parallel_config
    for expert in range(len(made.biases["w1"])):
        local = expert if layer.expert_map is None else int(layer.expert_map[expert])
        if local < 0:
            continue
        first = [
            made.biases[shard][expert].chunk(parallel.tp_size)[parallel.tp_rank]
            for shard in made.biases
            if shard != "w2"
        ]
        layer.w13_bias.data[local] = torch.cat(first)
        layer.w2_bias.data[local] = made.biases["w2"][expert] if parallel.tp_rank == 0 else 0


def finish(layer) -> None:
    """As vLLM's loader does: under the model's dtype, the method processes its layer."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(layer.moe_config.in_dtype)
    try:
        layer.quant_method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(before)


def routing(tokens: int, sizes: Sizes, seed=1):
    """(x, ids, probs) with distinct experts a token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sizes.hidden, generator=generator)
    best, ids = torch.randn(tokens, sizes.experts, generator=generator).topk(sizes.top_k, dim=-1)
    return x, ids.to(torch.int32), best.sigmoid()


@torch.inference_mode()
def run(layer, x, ids, probs):
    """The layer's own apply: vLLM's modular kernel, prepare and finalise steps and workspace around the experts."""
    return layer.quant_method.apply(layer, x, probs, ids, None, None)


#: Bars on ||y - want|| / ||want|| of tokens, (root mean square over several, any): those of the benchmarks; `online`
#: against weights that were not quantised.
BARS = {"none": (0.01, 0.02), "fp8": (0.06, 0.15), "online": (0.09, 0.18)}


def check(found, want, quant: str) -> None:
    """The answer is right, up to the rounding of the format."""
    errors = (found.double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)
    mean, most = BARS.get(quant, BARS["fp8"])
    assert errors.max() < most and (len(errors) < 5 or errors.square().mean().sqrt() < mean), errors
