"""Which engine serves: vLLM's own server in place of this process, or the embedded one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from ..errors import ExpertileError, MissingExtra

ENGINES = ("auto", "vllm", "embedded")
PLUGIN = "expertile"
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "model_hosting_container_standards", "transformers")


def reasons_against_vllm() -> list[str]:
    """Why vLLM cannot serve here; nothing when it can."""
    if importlib.util.find_spec("vllm") is None:
        return ["vLLM is not installed"]
    return [] if _hopper() else ["there is no Hopper GPU"]


def _hopper() -> bool:
    from ..runtime.device import detect

    return detect().is_hopper


def chosen(engine: str) -> str:
    """vllm or embedded. ExpertileError when vLLM is asked for and cannot serve."""
    if engine not in ENGINES:
        raise ExpertileError(f"engine={engine!r} is not known: use one of {', '.join(ENGINES)}")
    if engine == "embedded":
        return engine
    reasons = reasons_against_vllm()
    if engine == "vllm" and reasons:
        raise ExpertileError(f"engine=vllm cannot serve here: {'; '.join(reasons)}")
    return "embedded" if reasons else "vllm"


def vllm_command(model: str, host: str, port: int, name: str, arguments: list[str]) -> list[str]:
    """vLLM's own OpenAI server; `arguments` go through as they are, behind ours, so that they win."""
    named = ["--served-model-name", name] if name else []
    start = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    return [*start, "--host", host, "--port", str(port), *named, *arguments]


def vllm_environment(environment: Mapping[str, str], api_key: str | None, guard: str) -> dict[str, str]:
    """With the plugin among those that vLLM may load, its guard on, and the key where no process list shows it."""
    found = dict(environment)
    listed = [each for each in found.get("VLLM_PLUGINS", "").split(",") if each]
    if "VLLM_PLUGINS" in found and PLUGIN not in listed:
        found["VLLM_PLUGINS"] = ",".join([*listed, PLUGIN])
    found.setdefault("EXPERTILE_VLLM_GUARD", guard)
    if api_key is not None:
        found["VLLM_API_KEY"] = api_key
    return found


def become(command: list[str], environment: Mapping[str, str]) -> None:
    """Replaces this process: signals, exit code and output are the other's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, dict(environment))


def check_extra() -> None:
    """MissingExtra when the embedded engine lacks a package."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"serving needs {', '.join(missing)}: pip install 'expertile[serve]'")
