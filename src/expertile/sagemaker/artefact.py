"""What an artefact holds beside the model: expertile's wheel, how it is installed without a network, LMI's options."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ExpertileError
from .checkpoint import Member

TARGETS = ("vllm", "lmi")
WHEELS = "requirements"  # the folder that the images look into for wheels
#: Where SageMaker puts an artefact, and further sources by their names.
MODEL_PATH, WEIGHTS_CHANNEL = "/opt/ml/model", "weights"
WEIGHTS_PATH = f"/opt/ml/additional-model-data-sources/{WEIGHTS_CHANNEL}"
S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
LMI = {
    "engine": "Python",
    "option.entryPoint": "djl_python.lmi_vllm.vllm_async_service",
    "option.async_mode": "true",
    "option.rolling_batch": "disable",
    "option.tensor_parallel_degree": "max",
}


def extras(
    target: str, wheels: Sequence[Path], weights: str | None = None, options: Mapping[str, str] | None = None
) -> list[Member]:
    """requirements.txt and its wheels; for LMI serving.properties too.

    weights   where the weights are when the artefact has none: s3://bucket/prefix/ or a name on the hub
    options   LMI only: engine arguments, as in max_model_len=8192
    """
    if target not in TARGETS:
        raise ExpertileError(f"target={target!r} is not known: use one of {', '.join(TARGETS)}")
    if options and target != "lmi":
        raise ExpertileError(
            "options are LMI's: for the vLLM image give engine arguments with deploy --env SM_VLLM_..."
        )
    if weights is not None and target == "vllm":
        check_prefix(weights)
    found = [Member(f"{WHEELS}/{wheel.name}", wheel) for wheel in wheels]
    found.append(Member("requirements.txt", content=requirements(wheels).encode()))
    if target == "lmi":
        found.append(Member("serving.properties", content=properties(weights, options or {}).encode()))
    return found


def check_prefix(weights: str) -> None:
    """ExpertileError for what the vLLM image cannot have its weights from."""
    if not (S3.fullmatch(weights) and weights.endswith("/")):
        raise ExpertileError(f"weights={weights!r}: give s3://bucket/prefix/, which holds config.json and safetensors")


def requirements(wheels: Sequence[Path]) -> str:
    """Installs exactly these wheels, from beside the file; what they need must be there already.

    pip and uv take the folder relative to the file, wherever it lies.
    """
    pins = sorted("==".join(wheel.name.split("-")[:2]) for wheel in wheels)
    return "\n".join(["--no-index", f"--find-links {WHEELS}", *pins]) + "\n"


def properties(weights: str | None, options: Mapping[str, str]) -> str:
    """serving.properties: LMI's vLLM service; without option.model_id it takes the artefact's own folder."""
    given = {f"option.{name.removeprefix('option.')}": value for name, value in options.items()}
    model = {"option.model_id": weights} if weights else {}
    for name, value in {**given, **model}.items():
        if not name.removeprefix("option.") or any(character in name + value for character in "\r\n=:\\ "):
            if name != "option.model_id" or any(character in value for character in "\r\n\\ "):
                raise ExpertileError(f"option {name}={value!r}: no spaces, line ends, backslashes, = or : in it")
    return "".join(f"{name}={value}\n" for name, value in {**LMI, **model, **given}.items())


def check_wheel(path: Path) -> Path:
    """The path of a wheel that is whole and installs anywhere. ExpertileError otherwise."""
    if not path.is_file() or path.suffix != ".whl" or len(path.name.split("-")) < 5:
        raise ExpertileError(f"{path} is not a wheel: give a file as in expertile-0.1.0-py3-none-any.whl")
    try:
        with zipfile.ZipFile(path) as wheel:
            bad = wheel.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        raise ExpertileError(f"{path} is not a wheel: {error}") from None
    if bad:
        raise ExpertileError(f"{path} is damaged at {bad}: build it again")
    return path


def built_wheel(folder: Path) -> Path:
    """expertile's own wheel, built from the checkout that runs. ExpertileError when there is none."""
    source = Path(__file__).resolve().parents[3]
    if not (source / "pyproject.toml").is_file():
        raise ExpertileError("expertile does not run from a checkout here: give its wheel with --wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    with tempfile.TemporaryDirectory(prefix="expertile-wheel-") as work:
        done = subprocess.run([*command, "-w", str(folder), str(source)], capture_output=True, text=True, cwd=work)
    wheels = sorted(folder.glob("expertile-*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ExpertileError(f"expertile's wheel could not be built ({last}): install hatchling, or give --wheel")
    return wheels[-1]
