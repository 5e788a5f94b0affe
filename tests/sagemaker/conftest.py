"""A model folder of a few bytes, a wheel of a few lines, and an AWS made by moto."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if any(importlib.util.find_spec(name) is None for name in ("boto3", "moto", "safetensors")):
    collect_ignore_glob = ["test_*.py"]


def safetensors_file(path: Path, values: int = 4) -> None:
    """A file with one tensor of so many float32, byte by byte as the format says."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 * values)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    for number in (1, 2):
        safetensors_file(folder / f"model-{number}.safetensors", 256 * number)
    files = {f"w{number}": f"model-{number}.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.fixture
def wheel(tmp_path) -> Path:
    """A distribution `expertile-probe` with one module."""
    path = tmp_path / "wheels" / "expertile_probe-1.0-py3-none-any.whl"
    path.parent.mkdir()
    about = "expertile_probe-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("expertile_probe.py", "answer = 42\n")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: expertile-probe\nVersion: 1.0\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def aws(monkeypatch):
    """moto's AWS; its list of instance types ends before Hopper, so it takes any."""
    from moto import mock_aws
    from moto.sagemaker.models import FakeEndpointConfig

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(FakeEndpointConfig, "validate_instance_type", lambda self, instance_type: None)
    with mock_aws():
        yield


@pytest.fixture
def run(monkeypatch):
    """run(*arguments) -> what `expertile sagemaker ...` printed; errors come through."""
    from typer.testing import CliRunner

    from expertile.cli_sagemaker import app

    def command(*arguments) -> str:
        done = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})
        if done.exception:
            raise done.exception
        return done.output

    return command
