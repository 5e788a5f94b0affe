"""A model's config.json -> the sizes, activation and weight format of its MoE layers. No weights are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ShapeError
from ..policy import json_file
from ..policy.json_file import shown
from ..policy.json_values import is_count

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
    if tensor_parallel < 1:
        raise ShapeError(f"tensor_parallel={tensor_parallel}: give at least 1")
    path = path / "config.json" if path.is_dir() else path
    config = json_file.read(path, "model config")
    text = _object(config, "text_config", path) or config
    sizes = {name: _size(text, name, path) for name in NAMES}
    if sizes["inter"] % tensor_parallel:
        raise ShapeError(f"inter={sizes['inter']} of {path} cannot be cut into {tensor_parallel} parts")
    sizes["inter"] //= tensor_parallel
    parts = [str(sizes[name]) for name in ("hidden", "inter", "experts", "top_k")]
    return Layer(",".join([*parts, *_activation(text, path)]), _quant(config, text, path))


def _object(config: dict, key: str, path: Path) -> dict:
    """An object of the file; an empty one where it has none."""
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise ShapeError(f"{path}: {key}={shown(found)} is not an object: give --problem and --quant")
    return found or {}


def _size(config: dict, name: str, path: Path) -> int:
    for key in NAMES[name]:
        if (found := config.get(key)) is not None:
            if not is_count(found, 1):
                raise ShapeError(f"{path}: {key}={shown(found)} is no integer of at least 1: give --problem H,I,E,k")
            return found
    raise ShapeError(f"{path} has none of {', '.join(NAMES[name])}: give --problem H,I,E,k")


def _activation(config: dict, path: Path) -> list[str]:
    if config.get("model_type") == "gpt_oss":
        return ["swiglu_oai/interleaved", "bias"]
    name = config.get("mlp_hidden_act") or config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ShapeError(f"{path}: activation {shown(name)} is not known: give --problem H,I,E,k,activation")
    return [] if ACTIVATIONS[name] == "silu" else [ACTIVATIONS[name]]


def _quant(config: dict, text: dict, path: Path) -> str:
    found = _object(config, "quantization_config", path) or _object(text, "quantization_config", path)
    if not found:
        return "fp16" if (text.get("dtype") or text.get("torch_dtype")) == "float16" else "bf16"
    if block := found.get("weight_block_size"):
        if block != [128, 128]:
            raise ShapeError(f"{path}: weight_block_size={shown(block)}, blocks of 128 x 128 are known")
        return "fp8_block"
    method, algorithm = str(found.get("quant_method")), str(found.get("quant_algo") or "")
    if method in ("fp8", "modelopt") and algorithm in ("", "FP8"):
        return "fp8_tensor"
    if method == "compressed-tensors":
        return _compressed(found, path)
    raise ShapeError(f"{path}: weights quantised by {method} {algorithm} are not known: give --quant")


def _compressed(found: dict, path: Path) -> str:
    groups = _object(found, "config_groups", path)
    weights = [_object(_object(groups, name, path), "weights", path) for name in groups]
    kinds = {tuple(str(each.get(key)) for key in ("type", "num_bits", "strategy")) for each in weights}
    names = {("float", "8", strategy): f"fp8_{strategy}" for strategy in ("channel", "tensor", "block")}
    if len(kinds) == 1 and (kind := next(iter(kinds))) in names:
        return names[kind]
    known = ", ".join(" ".join(kind) for kind in sorted(kinds)) or "no kind"
    raise ShapeError(f"{path}: weights in groups of {shown(known)} are not known: give --quant")
