"""What is looked at before a checkpoint is served: files that are whole, a tokenizer, no tensor missing."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer

from ..errors import UnsupportedProblem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)
SHOWN = 3  # names in a message
LONGEST_REASON = 300  # characters of what others' code says


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
    return tokenizer


def check_tensors(folder: Path, info: Mapping[str, Collection]) -> None:
    """By what transformers says of the loading, to which a tied weight is not missing.

    Raises    UnsupportedProblem, with the first names, for tensors that would be random
    """
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedProblem(
            f"tensors are missing in {folder}: {_few(missing)}; fetch it again, or see config.json"
        )
    if wrong := sorted(info["mismatched_keys"]):
        found = [f"{name} is {list(is_)}, not {list(wanted)}" for name, is_, wanted in wrong]
        raise UnsupportedProblem(f"tensors in {folder} have other shapes than config.json says: {_few(found)}")


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
