"""The format of a model's expert weights, out of its config.json: quantization_config, what it leaves out, dtype.

vLLM and transformers are followed, where they agree: vllm/model_executor/layers/quantization (fp8, modelopt,
compressed_tensors), vllm/models/deepseek_v4, transformers/quantizers and its FP8Experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ShapeError
from ..problem import BLOCK
from . import json_file
from .json_file import shown
from .json_values import is_count

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
#: Keys under which a method lists what it leaves as it was.
LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
#: Where a layer's experts may lie; a pattern is tried at each place, a name says it itself.
ROOTS = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")
ROOMS = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn", "moe")
#: The products of one expert, in the ways that checkpoints have them.
PRODUCTS = (
    ("0.gate_proj", "0.up_proj", "0.down_proj"),
    ("0.w1", "0.w2", "0.w3"),
    ("0.up_proj", "0.down_proj"),
    ("gate_up_proj", "down_proj"),
)
EXPERTS_CLASSES = ("Linear", "RoutedExperts", "FusedMoE")  # of a layer's module, where a target is a class
MOST_LAYERS = 1 << 12
GIVE = "give the format with --quant"


def read(config: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> str:
    """`config` is all of the file at `path`, `text` what it says of the language model; as a benchmark row has it."""
    key, found = _quantization(config, text, path)
    method = str(found.get("quant_method")).lower().replace("compressed_tensors", "compressed-tensors")
    _experts_dtype(found, text, method, path)
    if not found or _all_left_out(found, key, method, text, path):
        return _dtype(config, text, path)
    if method == "compressed-tensors":
        return _compressed(found, key, text, path) or _dtype(config, text, path)
    if block := found.get("weight_block_size"):
        if block != [BLOCK, BLOCK]:
            raise ShapeError(f"{path}: weight_block_size={shown(block)}, blocks of {BLOCK} x {BLOCK} are known: {GIVE}")
        if method == "fp8":
            _check_fp8(found, key, path)
            return "fp8_block"
    algorithm = str(found.get("quant_algo") or "").upper()
    if (method, algorithm) in (("fp8", ""), ("modelopt", "FP8")):
        _check_fp8(found, key, path)
        return "fp8_tensor"
    said = f"{key}.quant_method={shown(found.get('quant_method'))}"
    said += f", quant_algo={shown(found['quant_algo'])}" if found.get("quant_algo") else ""
    raise ShapeError(f"{path}: {said}: weights quantised that way are not known: {GIVE}")


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """(the key or file that has it, what it says); nothing where weights are not quantised."""
    for each in (config, text):
        for key in ("quantization_config", "compression_config"):
            if found := _object(each, key, path):
                default = {"quant_method": "compressed-tensors"} if key == "compression_config" else {}
                return key, _flat({**default, **found}, path)
    beside = path.with_name("hf_quant_config.json")  # where older ModelOpt wrote it, and nowhere else
    if path.name == "config.json" and beside.is_file():
        return beside.name, _flat(json_file.read(beside, "model's quantisation"), path)
    return "quantization_config", {}


def _flat(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """ModelOpt's older form has all of it in an object of its own."""
    inner = found.get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) and "quant_method" not in found else found


def _object(config: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """An object of the file; an empty one where it has none."""
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise ShapeError(f"{path}: {key}={shown(found)} is not an object: {GIVE}")
    return found or {}


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> str:
    """Of weights that are not quantised; bf16 where nothing says it, which vLLM takes on Hopper."""
    for each, key in product((config, text), ("dtype", "torch_dtype")):
        if (found := each.get(key)) is not None:
            name = found.removeprefix("torch.") if isinstance(found, str) else ""
            if name in DTYPES:
                return DTYPES[name]
            if name == "float32":
                raise ShapeError(
                    f"{path}: {key}={shown(found)}: vLLM would compute in bf16, transformers in fp32, for which there "
                    f"are no kernels: {GIVE}, e.g. --quant bf16"
                )
            raise ShapeError(f"{path}: {key}={shown(found)} is none of {', '.join(DTYPES)}: {GIVE}")
    return "bf16"


def _experts_dtype(found: Mapping[str, Any], text: Mapping[str, Any], method: str, path: Path) -> None:
    """Refuses experts of another format than the other weights', as DeepSeek-V4 has them."""
    for key in ("moe_quant_algo", "store_dtype"):
        if said := found.get(key):
            raise ShapeError(f"{path}: {key}={shown(said)}: experts of that format are not known: {GIVE}")
    said = text.get("expert_dtype", found.get("expert_dtype"))
    if said is None and str(text.get("model_type")).startswith("deepseek_v4") and method == "fp8":
        raise ShapeError(f"{path}: no expert_dtype, which vLLM reads as fp4 and transformers as fp8: {GIVE}")
    if said is not None and not (said == "fp8" and found):
        raise ShapeError(f"{path}: expert_dtype={shown(said)}: experts of that format are not known: {GIVE}")


def _check_fp8(found: Mapping[str, Any], key: str, path: Path) -> None:
    if (kind := found.get("fmt")) not in (None, "e4m3"):
        raise ShapeError(f"{path}: {key}.fmt={shown(kind)}: fp8 of e4m3 is known: {GIVE}")


def _compressed(found: dict[str, Any], key: str, text: Mapping[str, Any], path: Path) -> str:
    """The format of the group that has the experts; "" where none has them. A name comes before a class."""
    groups = [_object(_object(found, "config_groups", path), name, path) for name in found.get("config_groups") or {}]
    layers, by_name, by_class = _layers(text), [], []
    for group in groups:
        targets = _names(group, "targets", path) if group.get("targets") is not None else ["Linear"]
        hit = _hit(targets, "compressed-tensors", layers, path)
        if hit and hit != layers:
            raise ShapeError(f"{path}: {key}: targets={shown(targets)} are {_some(hit, layers)}: {GIVE}")
        if hit:
            by_name.append(group)
        elif set(targets) & set(EXPERTS_CLASSES):
            by_class.append(group)
    chosen = by_name or by_class
    if groups and not chosen:
        return ""
    weights = [_object(group, "weights", path) for group in chosen]
    kinds = {" ".join(str(each.get(name)) for name in ("type", "num_bits", "strategy")) for each in weights}
    known = {f"float 8 {strategy}": f"fp8_{strategy}" for strategy in ("channel", "tensor", "block")}
    if len(kinds) != 1 or not kinds <= set(known):
        said = ", ".join(sorted(kinds)) or "no kind"
        raise ShapeError(f"{path}: weights in {key}.config_groups of {shown(said)} are not known: {GIVE}")
    if any("input_activations" in group and group["input_activations"] is None for group in chosen):
        raise ShapeError(f"{path}: input_activations=None: products of fp8 weights with 16-bit x are not known: {GIVE}")
    name = known[kinds.pop()]
    for each in weights if name == "fp8_block" else ():
        block = each.get("block_structure")
        if block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            raise ShapeError(f"{path}: block_structure={shown(block)}, blocks of {BLOCK} x {BLOCK} are known: {GIVE}")
    return name


def _all_left_out(found: Mapping[str, Any], key: str, method: str, text: Mapping[str, Any], path: Path) -> bool:
    """Whether the experts stay as they were; ShapeError where those of some layers do."""
    layers = _layers(text)
    for name in LEFT_OUT:
        if found.get(name) is None:
            continue
        hit = _hit(_names(found, name, path), method, layers, path)
        if hit and hit == layers:
            return True
        if hit:
            raise ShapeError(
                f"{path}: {key}.{name} leaves {_some(hit, layers)} unquantised: {GIVE}, for which of them you mean"
            )
    return False


def _some(hit: set[int], layers: set[int]) -> str:
    return f"the experts of {len(hit)} of {len(layers)} layers (layer {min(hit)}, not layer {min(layers - hit)})"


def _names(found: Mapping[str, Any], key: str, path: Path) -> list[str]:
    names = found[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ShapeError(f"{path}: {key}={shown(names)} is no list of names: {GIVE}")
    return names


def _layers(text: Mapping[str, Any]) -> set[int]:
    """The layers that have experts, without the first dense ones; those that predict further tokens come after them."""
    count, dense = text.get("num_hidden_layers"), text.get("first_k_dense_replace")
    most = count if isinstance(count, int) and is_count(count, 1) else 1
    first = dense if isinstance(dense, int) and is_count(dense) and dense < most else 0
    return set(range(first, min(most, MOST_LAYERS)))


def _hit(names: Sequence[str], method: str, layers: set[int], path: Path) -> set[int]:
    """The layers whose experts the names and patterns are of. A name without `experts` in it may be of a dense layer's
    or attention's place: it counts only where it fits every layer.
    """
    found: set[int] = set()
    for name in names:
        if re.fullmatch(r"[\w.-]*", name):
            found |= _named(name, layers)
            continue
        fits = _pattern(name, method, path)
        hit = set()
        for layer in sorted(layers):
            if _fits_experts(fits, layer):
                hit.add(layer)
            elif "experts" not in name:
                hit = set()
                break
        found |= hit
    return found & layers


def _named(name: str, layers: set[int]) -> set[int]:
    """
    >>> _named("model.layers.3.mlp.experts.0.up_proj", {2, 3}), _named("model.layers.3.mlp.shared_experts", {2, 3})
    ({3}, set())
    """
    parts = name.split(".")
    if "experts" not in parts:
        return set()
    before = parts[: parts.index("experts")]
    if any(part.startswith("mtp") for part in before):
        return set()
    numbers = [int(part) for part in before if re.fullmatch("[0-9]{1,9}", part)]
    return {numbers[-1]} if numbers else layers


def _pattern(name: str, method: str, path: Path) -> Callable[[str], bool]:
    """Whether it fits a module: a regex after re:, a glob of ModelOpt, else a regex as transformers has them."""
    try:
        if name.startswith("re:") or not method.startswith("modelopt"):
            regex = re.compile(name.removeprefix("re:"))
            return lambda module: bool(regex.match(module))
    except re.error as error:
        if name.startswith("re:"):
            raise ShapeError(f"{path}: {shown(name)} is no regular expression ({error}): {GIVE}") from None
    return lambda module: fnmatchcase(module, name)


def _fits_experts(fits: Callable[[str], bool], layer: int) -> bool:
    return any(
        fits(experts) or any(all(fits(f"{experts}.{part}") for part in parts) for parts in PRODUCTS)
        for experts in _places(layer)
    )


def _places(layer: int) -> Iterator[str]:
    return (f"{root}layers.{layer}.{room}.experts" for root, room in product(ROOTS, ROOMS))
