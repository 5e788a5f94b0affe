"""How SageMaker AI starts a container: with the word `serve`, the model in /opt/ml/model, the rest in the environment.

SM_EXPERTILE_MAX_SEQS=64 is --max-seqs 64, =true is a flag, =false is no flag; SM_VLLM_... says the same to vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

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
        flag = "--" + name.removeprefix(prefix).lower().replace("_", "-")
        found += [flag] if value.lower() == "true" else [flag, *_values(value)]
    return found


def _values(value: str) -> list[str]:
    if value.startswith("["):
        try:
            listed = json.loads(value)
        except ValueError:
            return [value]
        return [each if isinstance(each, str) else json.dumps(each) for each in listed]
    return [value]
