"""What is looked at before a checkpoint is served: files that are whole, a tokenizer, no tensor missing."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import UnsupportedProblem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)
POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")  # or null
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
SHOWN = 3  # names in a message
LONGEST_REASON = 300  # characters of what others' code says
log = logging.getLogger("expertile.serve")


def check_files(folder: Path) -> None:
    """The JSON files hold objects, each safetensors file ends where its header says and has what the index lists.

    Raises    UnsupportedProblem, with the file
    """
    found = {name: _object(folder / name) for name in OBJECTS if (folder / name).is_file()}
    for name, tensors in _weights(folder, found.get(INDEX)).items():
        path = folder / name
        if not path.is_file():
            raise UnsupportedProblem(f"{path} is not there, but {INDEX} lists it: fetch it")
        try:
            with safe_open(path, framework="pt") as file:
                missing = sorted(tensors - set(file.keys()))
        except (SafetensorError, OSError) as error:
            raise UnsupportedProblem(f"{path} is not whole: {error}; fetch it again") from error
        if missing:
            raise UnsupportedProblem(f"{path} lacks tensors that {INDEX} lists: {_few(missing)}; fetch it again")


def check_config(folder: Path) -> None:
    """Values that would fail later, with words that do not name their key. UnsupportedProblem names it."""
    path = folder / "config.json"
    found = _object(path)
    inner = found.get("text_config")
    config = found | inner if isinstance(inner, dict) else found
    for name in POSITIVE:
        if isinstance(config.get(name), int) and config[name] < 1:
            raise UnsupportedProblem(f"{name}={config[name]} in {path}: at least 1 is needed; see the model's original")
    act = config.get("hidden_act")
    if isinstance(act, str) and act not in ACT2FN and "auto_map" not in found:  # code of the model's own may know it
        raise UnsupportedProblem(f"hidden_act={act!r} in {path} is not known to transformers: silu is the usual one")
    chosen, experts = config.get("num_experts_per_tok"), next((config[name] for name in EXPERTS if config.get(name)), 0)
    if isinstance(chosen, int) and isinstance(experts, int) and experts and not 1 <= chosen <= experts:
        raise UnsupportedProblem(f"num_experts_per_tok={chosen} in {path}: 1 to {experts} of its {experts} experts")


def load_tokenizer(folder: Path, **options):
    """transformers' tokenizer. UnsupportedProblem where files are missing: it makes an empty one for some classes."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        raise UnsupportedProblem(f"the tokenizer in {folder} cannot be loaded: {in_words(error)}") from error
    names = dict(tokenizer.vocab_files_names)
    whole = names.pop("tokenizer_file", "tokenizer.json")
    if not (folder / whole).is_file() and not (names and all((folder / each).is_file() for each in names.values())):
        others = f", or {' and '.join(names.values())}" if names else ""
        raise UnsupportedProblem(f"{folder} has no tokenizer: {whole}{others} is needed; fetch it")
    _check_templates(folder, tokenizer.chat_template)
    return tokenizer


def _check_templates(folder: Path, given: str | dict[str, str] | None) -> None:
    """Their syntax alone: what they say to messages shows with a request."""
    for template in given.values() if isinstance(given, dict) else [given] if given else []:
        try:
            render_jinja_template(conversations=[], chat_template=template)
        except TemplateSyntaxError as error:
            said = f"the chat template in {folder} is no Jinja: {in_words(error)} (line {error.lineno})"
            raise UnsupportedProblem(f"{said}; fetch it again") from error


def check_tensors(folder: Path, info: Mapping[str, Collection], network: PreTrainedModel) -> None:
    """By what transformers says of the loading, to which a tied weight is not missing. Tensors too many are logged.

    Raises    UnsupportedProblem, with the first names, for tensors that would be random and layers left out
    """
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedProblem(
            f"tensors are missing in {folder}: {_few(missing)}; fetch it again, or see config.json"
        )
    if wrong := sorted(info["mismatched_keys"]):
        found = [f"{name} is {list(is_)}, not {list(wanted)}" for name, is_, wanted in wrong]
        raise UnsupportedProblem(f"tensors in {folder} have other shapes than config.json says: {_few(found)}")
    unused = sorted(info["unexpected_keys"])
    if beyond := _of_layers_beyond(unused, network):
        raise UnsupportedProblem(
            f"{folder} has layers beyond num_hidden_layers of config.json: {_few(beyond)}; set num_hidden_layers right"
        )
    if unused:
        log.warning("tensors in %s that the model does not use: %s", folder, _few(unused))


def _of_layers_beyond(unused: list[str], network: PreTrainedModel) -> list[str]:
    """Tensors of further layers than the model has. Those that predict further tokens may follow."""
    more = getattr(network.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    stacks = {f".{name}": len(each) for name, each in network.named_modules() if isinstance(each, nn.ModuleList)}
    found = []
    for name in unused:
        match = re.match(r"(.*\blayers)\.(\d+)\.", name)
        lengths = [length for stack, length in stacks.items() if match and stack.endswith(f".{match[1]}")]
        if lengths and int(match[2]) >= max(lengths) + more:
            found.append(name)
    return found


def in_words(error: Exception) -> str:
    """One line of it; with the class, which says more than the text, where that is no sentence."""
    words = " ".join(str(error).split())
    words = f"{words[:LONGEST_REASON]} ..." if len(words) > LONGEST_REASON else words.removesuffix(".")
    return words if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {words}"


def _weights(folder: Path, index: dict | None) -> dict[str, set[str]]:
    """The files that transformers would read, each with the tensors that the index lists."""
    if index is None:
        return {SINGLE: set()} if (folder / SINGLE).is_file() else {}
    listed, found = index.get("weight_map"), {}
    if not isinstance(listed, dict) or not all(isinstance(each, str) for each in listed.values()):
        raise UnsupportedProblem(f"{folder / INDEX} has no weight_map: fetch it again")
    for tensor, name in listed.items():
        found.setdefault(name, set()).add(tensor)
    return found


def _object(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedProblem(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(found, dict):
        raise UnsupportedProblem(f"{path} holds no JSON object: fetch it again")
    return found


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > SHOWN else "")
