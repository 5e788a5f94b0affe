"""transformers (5.17 and later): experts by expertile, for models that use its ExpertsInterface, and for Llama-4.

    from expertile.plugins.transformers import register, use

    register()                                                       # before the model is made; as often as you like
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="expertile")

    use(model)                                                       # or switch a model that is already there
    use(model, quant="fp8_block")                                    # its 16-bit experts quantised on first use

register() adds the name `expertile`, which takes weights as they are, and `expertile_fp8_tensor`,
`expertile_fp8_channel`, `expertile_fp8_block`, which quantise them on first use and keep both. Llama-4's experts do not
go through the interface: for that model call `use`, which replaces the forward of its MoE blocks.

A module's weights are described once and kept on it until its parameters change (written through `.data`, they do not
show it: call `use` again). What is not understood raises UnsupportedProblem: a gate is recognised by what it computes,
never by its name. There is no backward pass.
"""

from __future__ import annotations

import itertools
import math
import types
from functools import partial

import torch
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from .. import api, backward, reference
from ..errors import ShapeError, UnsupportedProblem
from ..problem import BLOCK, Activation, Gate, Quant
from ..weights import DTYPES, FP8, Weights

#: Name for transformers -> how its experts are quantised on first use.
NAMES = {"expertile": Quant.NONE} | {f"expertile_{q.value}": q for q in Quant if q is not Quant.NONE}
KEPT = "_expertile_weights"  # attribute of an experts module: {(quant, dtype): (stamps of its parameters, Weights)}


def register() -> None:
    """Makes the names of NAMES known to transformers as experts implementations. Idempotent."""
    for name, quant in NAMES.items():
        for interface in (ExpertsInterface, FP8ExpertsInterface):
            interface.register(name, partial(experts_forward, quant=quant))


def use(model, quant: Quant | str | None = None):
    """The same model, its experts now computed by expertile; `quant`: quantised on first use.

    Raises    ShapeError for an unknown quant; UnsupportedProblem when the model has no experts that can be switched
    """
    register()
    quant = Quant.NONE if quant is None else quant
    known = {q.value: name for name, q in NAMES.items()}
    if quant not in known:
        raise ShapeError(f"quant={quant!r} is not known: use one of {', '.join(known)}")
    for module in model.modules():
        module.__dict__.pop(KEPT, None)
    blocks = [module for module in model.modules() if isinstance(module, Llama4TextMoe)]
    for block in blocks:
        if block.top_k != 1:
            raise UnsupportedProblem(f"Llama4TextMoe with top_k={block.top_k}: weights on the input need top_k=1")
        block.forward = types.MethodType(partial(_llama4_forward, Quant(quant)), block)
    if any(hasattr(module, "is_concatenated") for module in model.modules()):  # what the interface's decorator sets
        model.set_experts_implementation(known[quant])
    elif not blocks:
        raise UnsupportedProblem(
            f"{type(model).__name__} has no experts that go through transformers' ExpertsInterface"
        )
    return model


def experts_forward(module, hidden_states, top_k_index, top_k_weights, *, quant: Quant = Quant.NONE):
    """out[t] = sum over j of top_k_weights[t, j] * experts[top_k_index[t, j]](hidden_states[t]).

    Shapes    hidden_states [T, H] | top_k_index, top_k_weights [T, top_k] -> out [T, H]
    Dtypes    out as hidden_states; ids int32 or int64, those >= num_experts (expert parallelism) contribute nothing
    """
    weights = weights_of(module, quant, hidden_states.dtype)
    x = hidden_states.to(DTYPES[weights.dtype]).contiguous()
    with torch.no_grad():
        y = api.moe(x, weights, top_k_index, top_k_weights)
    return _without_backward(y.to(hidden_states.dtype), module, hidden_states, top_k_weights)


def _llama4_forward(quant: Quant, block, hidden_states):
    """Llama4TextMoe.forward: the router's sigmoid scales the input of the one expert that a token visits."""
    hidden_states = hidden_states.reshape(-1, block.hidden_dim)
    _, logits = block.router(hidden_states)
    weights = weights_of(block.experts, quant, hidden_states.dtype)
    with torch.no_grad():
        x = hidden_states.to(DTYPES[weights.dtype]).contiguous()
        routed = api.moe(x, weights, logits=logits, router="llama4", top_k=1, weight_on_input=True)
    out = block.shared_expert(hidden_states)
    return out + _without_backward(routed.to(out.dtype), block.experts, hidden_states, logits), logits


def _without_backward(y, module, *inputs):
    """y, which says so when a gradient is asked for instead of leaving the experts' part of it out."""
    return backward.refused(y, *inputs, *module.parameters(recurse=False))


def weights_of(module, quant: Quant = Quant.NONE, dtype: torch.dtype | None = None) -> Weights:
    """The Weights of an experts module, made anew only when one of its parameters is another, or was written to.

    dtype     of x, where the module stores e4m3 and so does not say
    """
    key = (quant, dtype if module.down_proj.dtype == FP8 else None)
    kept = module.__dict__.setdefault(KEPT, {})
    if key not in kept or kept[key][0] != _stamps(module):
        weights = _describe(module, *key)
        kept[key] = _stamps(module), weights  # after: describing may have turned a parameter's storage
    return kept[key][1]


def _stamps(module) -> list:
    return [_stamp(parameter) for parameter in module._parameters.values() if parameter is not None]


def _stamp(parameter):
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def _describe(module, quant: Quant, dtype) -> Weights:
    name = type(module).__name__
    for key, parameter in module._parameters.items():
        if hasattr(parameter, "to_local"):
            raise UnsupportedProblem(f"{name}.{key} is a DTensor: expertile needs the local part as a plain tensor")
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedProblem(f"{name} has a norm behind each expert, which expertile does not compute")
    gated = getattr(module, "has_gate", True)
    up = "gate_up_proj" if gated else "up_proj"
    w13, w2 = getattr(module, up), module.down_proj
    activation = _activation_of(module, gated)
    if w13.dtype == FP8:
        return _describe_fp8(module, quant, dtype, up, activation)
    if not w13.is_floating_point():
        raise UnsupportedProblem(f"{name}.{up} is {w13.dtype}: packed 4-bit weights are not supported")
    if getattr(module, "is_transposed", isinstance(module, Llama4TextExperts)):
        w13, w2 = (_turned(w, relay=quant is Quant.NONE) for w in (w13, w2))
    biases = [getattr(module, f"{key}_bias") for key in (up, "down_proj")] if getattr(module, "has_bias", False) else []
    b13, b2 = (bias.detach() for bias in biases) if biases else (None, None)
    return api.prepare(w13.detach(), w2.detach(), quant=quant, activation=activation, w13_bias=b13, w2_bias=b2)


def _turned(parameter, relay: bool):
    """[E, N, K] view of a parameter [E, K, N]. On a GPU its storage is turned too, once: the kernels read along K."""
    view = parameter.detach().transpose(1, 2)
    if relay and view.is_cuda and view.stride(2) != 1:
        parameter.data = view.contiguous().transpose(1, 2)
        view = parameter.detach().transpose(1, 2)
    return view


def _describe_fp8(module, quant: Quant, dtype, up: str, activation: Activation) -> Weights:
    """FP8Experts: e4m3 weights, a scale per 128x128 block or, without block_size, one each for gate, up and down."""
    name = type(module).__name__
    w13, w2 = getattr(module, up).detach(), module.down_proj.detach()
    s13, s2 = (getattr(module, f"{key}_scale_inv").detach().float() for key in (up, "down_proj"))
    split = None
    if module.block_size is not None:
        if tuple(module.block_size) != (BLOCK, BLOCK):
            raise UnsupportedProblem(f"{name} has block_size={module.block_size}: only {BLOCK}x{BLOCK} is supported")
        found = Quant.FP8_BLOCK
        split = s13.shape[1] != -(-w13.shape[1] // BLOCK)
    elif torch.equal(s13[:, :1].expand_as(s13), s13):
        found, s13 = Quant.FP8_TENSOR, s13[:, :1]
    else:  # gate and up differ: one scale a row says so
        found, s2 = Quant.FP8_CHANNEL, s2.expand(-1, w2.shape[1], 1)
        s13 = s13.repeat_interleave(w13.shape[1] // s13.shape[1], 1)
    if quant not in (Quant.NONE, found):
        raise UnsupportedProblem(f"{name} is stored as {found.value} and is not quantised anew: use 'expertile'")
    x_scale, h_scale = _static_scales(module, found, up)
    return api.prepare(
        w13, w2, quant=found, activation=activation, dtype=dtype, w13_scale=s13, w2_scale=s2, split_scale=split,
        x_scale=x_scale, h_scale=h_scale,
    )  # fmt: skip


def _static_scales(module, found: Quant, up: str):
    """x_scale and h_scale, None where activations are quantised by what they are."""
    name = type(module).__name__
    if module.activation_scheme != "static":
        return None, None
    if found is not Quant.FP8_TENSOR:
        raise UnsupportedProblem(
            f"{name} has static activation scales with {found.value} weights: only fp8_tensor takes them"
        )
    scales = [getattr(module, f"{key}_activation_scale").detach().flatten() for key in (up, "down_proj")]
    for key, scale in zip((up, "down_proj"), scales, strict=True):
        if not torch.equal(scale, scale[:1].expand_as(scale)):
            raise UnsupportedProblem(
                f"{name}.{key}_activation_scale is {scale.min():g} to {scale.max():g}: all experts must share one"
            )
    return scales[0][0], scales[1][0]


def _activation_of(module, gated: bool) -> Activation:
    """The Activation that computes what the module's `_apply_gate` (or `act_fn`, without a gate) computes."""
    alphas, limits = (
        [1.0, *_numbers(module, "alpha", "swiglu_alpha")],
        [None, *_numbers(module, "limit", "swiglu_limit")],
    )
    gate, up = _probes(limits).to(module.down_proj.device).unbind(1)
    layouts = {False: torch.cat([gate, up]), True: torch.stack([gate, up], 1).flatten()} if gated else {False: gate}
    for interleaved, probe in layouts.items():
        probe = probe[None]
        wanted = _gate_function(module, gated)(probe).double()
        for candidate in _candidates(gated, interleaved, alphas, limits):
            if torch.allclose(reference.activate(probe, candidate), wanted, rtol=1e-6, atol=1e-7):
                return candidate
    raise UnsupportedProblem(
        f"{type(module).__name__} computes a gate that expertile does not know "
        f"(act_fn={getattr(module, 'act_fn', None)}, alpha={alphas[1:]}, limit={limits[1:]})"
    )


def _numbers(module, *names: str) -> list[float]:
    values = [getattr(module, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, (int, float)) and 0 < value < math.inf]


def _probes(limits):
    """[n, 2] pairs of gate and up, beyond every limit on both sides, and far apart where the gates differ."""
    points = {-30.0, -8.0, -3.0, -1.0, -0.25, 0.0, 0.25, 1.0, 2.0, 3.0, 8.0, 30.0}
    points |= {sign * factor * limit for limit in limits if limit for sign in (-1, 1) for factor in (0.9, 1.1, 2.0)}
    return torch.tensor(list(itertools.product(sorted(points), repeat=2)), dtype=torch.float64)


def _gate_function(module, gated: bool):
    if not gated:
        return module.act_fn
    if hasattr(module, "_apply_gate"):
        return module._apply_gate
    return lambda gate_up: module.act_fn(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]  # Llama4TextExperts


def _candidates(gated: bool, interleaved: bool, alphas, limits):
    for gate, alpha, beta, limit in itertools.product(Gate, alphas, (0.0, 1.0), limits):
        if alpha != 1.0 and gate is not Gate.SILU:
            continue
        if gated:
            yield Activation(gate, True, alpha, beta, limit, interleaved)
        elif beta == 0.0 and limit is None:
            yield Activation(gate, False, alpha)
