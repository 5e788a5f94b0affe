"""A model's config.json -> the sizes, activation and weight format of its MoE layers. No weights are looked at.

Keys are read as vLLM and transformers read them. What these read differently, or what no format here is, is ShapeError
with key, value and what to give instead: it must not become another layer's figures. The formats of quantised weights
are in model_quant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShapeError
from ..problem import ACTIVATIONS, Activation, Gate
from . import json_file, model_quant
from .json_file import shown
from .json_values import is_count

#: What is wanted -> the names that configurations have for it, in the order in which they are looked for.
NAMES = {
    "hidden": ("moe_latent_size", "hidden_size", "d_model", "n_embd"),  # latent: what nemotron_h's experts see
    "inter": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
}
GATES = {
    "silu": Gate.SILU,
    "swish": Gate.SILU,
    "swigluoai": Gate.SILU,  # with swiglu_alpha and swiglu_limit beside it
    "gelu_pytorch_tanh": Gate.GELU_TANH,
    "gelu_new": Gate.GELU_TANH,
    "gelu": Gate.GELU_ERF,
    "relu2": Gate.RELU2,
}
#: Models whose code has the activation: no key says it.
WRITTEN_IN_CODE = {
    "gpt_oss": ["swiglu_oai/interleaved", "bias"],
    "openai_privacy_filter": ["swiglu_oai", "bias"],
}
WITHOUT_GATE = ("nemotron_h",)
#: What transformers takes where a file lacks the key.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v4": dict(swiglu_limit=10.0),
    "hy_v4": dict(swiglu_limit=10.0),
    "glm5_next_text": dict(swiglu_limit=10.0),
    "minimax_m3_vl_text": dict(swiglu_limit=7.0, swiglu_alpha=1.702),
    "nemotron_h": dict(mlp_hidden_act="relu2"),
}
GIVE_PROBLEM = "give --problem H,I,E,k[,activation][,bias] instead of --model"


@dataclass(frozen=True)
class Layer:
    """`problem` is what named_problem takes, `quant` what a benchmark row has."""

    problem: str
    quant: str


def read(path: Path, tensor_parallel: int = 1, quant: str | None = None) -> Layer:
    """The MoE layer of the config.json at `path`, or in that folder; each rank has inter / tensor_parallel.

    quant   instead of the format that the file says, which is not looked at then
    ShapeError names what the file lacks, or what is not known.
    """
    if tensor_parallel < 1:
        raise ShapeError(f"tensor_parallel={tensor_parallel}: give at least 1")
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ShapeError(
            f"model config {path} is not there: give a model's config.json, or its folder; names on a hub are not "
            "looked up"
        )
    config = json_file.read(path, "model config")
    text = _text(config, path)
    if text.get("block_configs"):
        raise ShapeError(f"{path}: block_configs={shown(text['block_configs'])}: its layers differ: {GIVE_PROBLEM}")
    sizes = {name: _size(text, name, path) for name in NAMES}
    if sizes["inter"] % tensor_parallel:
        raise ShapeError(f"inter={sizes['inter']} of {path} cannot be cut into {tensor_parallel} parts")
    sizes["inter"] //= tensor_parallel
    parts = [str(sizes[name]) for name in ("hidden", "inter", "experts", "top_k")]
    problem = ",".join([*parts, *_activation(text, path)])
    return Layer(problem, model_quant.read(config, text, path) if quant is None else quant)


def _text(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """What is said of the language model: all of the file, or an object in it; with what its code takes beside."""
    found = config.get("text_config")
    if found is not None and not isinstance(found, dict):
        raise ShapeError(f"{path}: text_config={shown(found)} is not an object: {GIVE_PROBLEM} and give --quant")
    text = found or config
    kind = text.get("model_type")
    return {**(DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}), **text}


def _size(config: Mapping[str, Any], name: str, path: Path) -> int:
    for key in NAMES[name]:
        if (found := config.get(key)) is not None:
            if not is_count(found, 1):
                raise ShapeError(f"{path}: {key}={shown(found)} is no integer of at least 1: {GIVE_PROBLEM}")
            return found
    usual = [key for key in NAMES[name] if key != "moe_latent_size"]
    raise ShapeError(f"{path} has none of {', '.join(usual)}: {GIVE_PROBLEM}")


def _activation(config: Mapping[str, Any], path: Path) -> list[str]:
    """What stands behind the sizes in a problem: nothing for silu."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in WRITTEN_IN_CODE:
        return WRITTEN_IN_CODE[kind]
    key = next((key for key in ("mlp_hidden_act", "hidden_act", "hidden_activation") if config.get(key)), "hidden_act")
    name = config.get(key) or "silu"
    if not isinstance(name, str) or name not in GATES:
        raise ShapeError(f"{path}: {key}={shown(name)}, activation {shown(name)} is not known: {GIVE_PROBLEM}")
    limits = config.get("swiglu_limits")  # a layer each; step3p7's code clamps gates after silu, which no kernel does
    if limits is not None and (not isinstance(limits, list) or any(limits)):
        raise ShapeError(
            f"{path}: swiglu_limits={shown(limits)} clamp some layers' activations and others' not: {GIVE_PROBLEM}"
        )
    limit, alpha = (_number(config, key, path) for key in ("swiglu_limit", "swiglu_alpha"))
    if name == "swigluoai" and (limit is None or alpha is None):
        raise ShapeError(
            f"{path}: {key}={shown(name)} without swiglu_limit and swiglu_alpha, activation not known: {GIVE_PROBLEM}"
        )
    if limit is None and alpha is not None:
        raise ShapeError(f"{path}: swiglu_alpha={alpha:g} without swiglu_limit: {GIVE_PROBLEM}")
    try:
        made = Activation(
            GATES[name], gated=kind not in WITHOUT_GATE and GATES[name] is not Gate.RELU2, limit=limit,
            alpha=1.0 if alpha is None else alpha, beta=0.0 if alpha is None else 1.0,
        )  # fmt: skip
    except ShapeError as error:
        said = ", ".join(f"{key}={shown(config.get(key))}" for key in (key, "swiglu_limit", "swiglu_alpha"))
        raise ShapeError(f"{path}: {said}: {error}: {GIVE_PROBLEM}") from None
    return [] if made == ACTIVATIONS["silu"] else [made.name]


def _number(config: Mapping[str, Any], key: str, path: Path) -> float | None:
    found = config.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > 0:
        raise ShapeError(f"{path}: {key}={shown(found)} is no number above 0: {GIVE_PROBLEM}")
    return float(found)
