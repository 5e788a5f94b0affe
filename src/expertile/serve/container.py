"""How SageMaker AI starts a container: with the word `serve`, the model in /opt/ml/model, the rest in the environment.

SM_EXPERTILE_MAX_SEQS=64 is --max-seqs 64, =true is a flag, =false is no flag; SM_VLLM_... says the same to vLLM.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import ExpertileError

PORT, HOST = 8080, "0.0.0.0"
MODEL_PATH, DEFAULT_MODEL_PATH = "SAGEMAKER_MODEL_PATH", "/opt/ml/model"
PREFIX, VLLM_PREFIX = "SM_EXPERTILE_", "SM_VLLM_"
OURS = ("MODEL", "HOST", "PORT")  # settled here, for vLLM too


def model_path(environment: Mapping[str, str] = os.environ) -> str:
    """SM_EXPERTILE_MODEL, else SM_VLLM_MODEL, else the folder that SageMaker puts the artefact into."""
    named = environment.get(f"{PREFIX}MODEL") or environment.get(f"{VLLM_PREFIX}MODEL")
    return named or environment.get(MODEL_PATH) or DEFAULT_MODEL_PATH


def is_container(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this looks like a container that SageMaker has started: the artefact's folder is there."""
    return Path(environment.get(MODEL_PATH) or DEFAULT_MODEL_PATH).is_dir()


def arguments(environment: Mapping[str, str], prefix: str) -> list[str]:
    """Command-line arguments for the variables that begin with prefix, in the order of their names.

    >>> arguments({"SM_EXPERTILE_MAX_SEQS": "64", "SM_EXPERTILE_JSON_LOGS": "true", "SM_EXPERTILE_X": "False"}, PREFIX)
    ['--json-logs', '--max-seqs', '64']

    A JSON array becomes several arguments, one an element, as in the AWS vLLM images; an empty value is none.
    """
    found = []
    for name in sorted(environment):
        value = environment[name].strip()
        if not name.startswith(prefix) or name.removeprefix(prefix) in OURS or value.lower() in ("", "false"):
            continue
        flag = _flag(name)
        found += [flag] if value.lower() == "true" else [flag, *_values(value)]
    return found


def check(environment: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    """ExpertileError, with the variable, for a value that the option of its name does not take.

    kinds   of options by their flags: boolean, integer, text; of others nothing is known here
    """
    for name in sorted(environment):
        value, kind = environment[name].strip(), kinds.get(_flag(name))
        word = value.lower()
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX) in OURS or kind is None or word in ("", "false"):
            continue
        if kind == "boolean" and word != "true":
            raise ExpertileError(f"{name}={value}: give true or false")
        if kind == "integer" and not all(re.fullmatch(r"[+-]?\d+", each) for each in _values(value)):
            raise ExpertileError(f"{name}={value}: give a whole number")
        if kind == "text" and word == "true":
            raise ExpertileError(f"{name}={value}: it is no flag, give the value of {_flag(name)}")


def unknown(environment: Mapping[str, str], kinds: Mapping[str, str]) -> list[str]:
    """NAME=value of the variables with our prefix that are no option of ours."""
    ours = [name for name in sorted(environment) if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in OURS]
    return [f"{name}={environment[name]}" for name in ours if _flag(name) not in kinds]


@contextmanager
def blamed(environment: Mapping[str, str]):
    """An ExpertileError about FIELD=... gets the name of the variable that has said so."""
    try:
        yield
    except ExpertileError as error:
        name = f"{PREFIX}{str(error).partition('=')[0].upper()}"
        if name not in environment:
            raise
        raise type(error)(f"{name}={environment[name]}: {error}") from None


def _flag(name: str) -> str:
    for prefix in (PREFIX, VLLM_PREFIX):
        name = name.removeprefix(prefix)
    return "--" + name.lower().replace("_", "-")


def _values(value: str) -> list[str]:
    if value.startswith("["):
        try:
            listed = json.loads(value)
        except ValueError:
            return [value]
        return [each if isinstance(each, str) else json.dumps(each) for each in listed]
    return [value]
