"""A model's config.json -> the sizes, activation and weight format of its MoE layers. No weights are looked at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShapeError

#: What is wanted -> the names that configurations have for it, in the order in which they are looked for.
NAMES = {
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "inter": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk"),
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu_erf",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Layer:
    """`problem` is what named_problem takes, `quant` what a benchmark row has."""

    problem: str
    quant: str


def read(path: Path, tensor_parallel: int = 1) -> Layer:
    """The MoE layer of the config.json at `path`, or in that folder; each rank has inter / tensor_parallel.

    ShapeError names what the file lacks, or what is not known.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapeError(f"model config: {error}") from None
    except json.JSONDecodeError as error:
        raise ShapeError(f"{path} is not JSON: {error}") from None
    text = config.get("text_config", config)
    sizes = {name: _size(text, name, path) for name in NAMES}
    if sizes["inter"] % tensor_parallel:
        raise ShapeError(f"inter={sizes['inter']} of {path} cannot be cut into {tensor_parallel} parts")
    sizes["inter"] //= tensor_parallel
    parts = [str(sizes[name]) for name in ("hidden", "inter", "experts", "top_k")]
    return Layer(",".join([*parts, *_activation(text, path)]), _quant(config, text, path))


def _size(config: dict, name: str, path: Path) -> int:
    for key in NAMES[name]:
        if isinstance(config.get(key), int):
            return config[key]
    raise ShapeError(f"{path} has none of {', '.join(NAMES[name])}: give --problem H,I,E,k")


def _activation(config: dict, path: Path) -> list[str]:
    if config.get("model_type") == "gpt_oss":
        return ["swiglu_oai/interleaved", "bias"]
    name = config.get("mlp_hidden_act") or config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if name not in ACTIVATIONS:
        raise ShapeError(f"{path}: activation {name!r} is not known: give --problem H,I,E,k,activation")
    return [] if ACTIVATIONS[name] == "silu" else [ACTIVATIONS[name]]


def _quant(config: dict, text: dict, path: Path) -> str:
    found: Any = config.get("quantization_config") or text.get("quantization_config")
    if not found:
        return "fp16" if (text.get("dtype") or text.get("torch_dtype")) == "float16" else "bf16"
    if found.get("weight_block_size"):
        if list(found["weight_block_size"]) != [128, 128]:
            raise ShapeError(f"{path}: weight_block_size={found['weight_block_size']}, blocks of 128 x 128 are known")
        return "fp8_block"
    method, algorithm = str(found.get("quant_method")), str(found.get("quant_algo", ""))
    if method in ("fp8", "modelopt") and algorithm in ("", "FP8"):
        return "fp8_tensor"
    if method == "compressed-tensors":
        return _compressed(found, path)
    raise ShapeError(f"{path}: weights quantised by {method} {algorithm} are not known: give --quant")


def _compressed(found: dict, path: Path) -> str:
    groups = found.get("config_groups", {}).values()
    kinds = {(g["weights"].get("type"), g["weights"].get("num_bits"), g["weights"].get("strategy")) for g in groups}
    names = {("float", 8, strategy): f"fp8_{strategy}" for strategy in ("channel", "tensor", "block")}
    if len(kinds) == 1 and (kind := next(iter(kinds))) in names:
        return names[kind]
    raise ShapeError(f"{path}: weights in groups of {kinds or 'no kind'} are not known: give --quant")
