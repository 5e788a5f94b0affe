"""Where vLLM can serve, the process becomes vLLM's own server, with our plugin on and the arguments as given."""

import json
import os
import subprocess
import sys

import pytest

from expertile.errors import ExpertileError
from expertile.serve import launch

FAKE = """
import json, os, sys
wanted = ("VLLM_PLUGINS", "VLLM_API_KEY", "EXPERTILE_VLLM_GUARD")
print(json.dumps({"argv": sys.argv[1:], "pid": os.getpid(), **{name: os.environ.get(name) for name in wanted}}))
sys.exit(7)
"""
#: The command with a Hopper GPU that is not there.
HOPPER = "from expertile.serve import launch; launch._hopper = lambda: True; "
COMMAND = "from expertile.cli_serve import main; import sys; main(sys.argv[1:])"


@pytest.fixture
def fake(tmp_path):
    """A folder with a vllm that says how it was started."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(FAKE)
    return tmp_path


def started(fake, *arguments, **environment) -> tuple[dict, int, int]:
    """What the fake vLLM said, the exit code, and the number of the process that was started."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOPPER + COMMAND, *arguments], stdout=subprocess.PIPE, text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("EXPERTILE")}
        | {"PYTHONPATH": os.pathsep.join([str(fake), *sys.path])} | environment,
    )  # fmt: skip
    out, _ = child.communicate(timeout=60)
    return json.loads(out), child.returncode, child.pid


def test_it_becomes_vllm(fake):
    said, code, pid = started(
        fake, "some/model", "--host", "0.0.0.0", "--port", "9000", "--tensor-parallel-size", "2", "--enforce-eager",
        "--max-len", "4096", "--api-key", "secret", VLLM_PLUGINS="other",
    )  # fmt: skip
    assert said["argv"] == [
        "serve", "some/model", "--host", "0.0.0.0", "--port", "9000", "--max-model-len", "4096",
        "--tensor-parallel-size", "2", "--enforce-eager",
    ]  # fmt: skip
    assert (said["pid"], code) == (pid, 7)  # the same process, and its exit code
    assert (said["VLLM_PLUGINS"], said["VLLM_API_KEY"], said["EXPERTILE_VLLM_GUARD"]) == (
        "other,expertile",
        "secret",
        "warn",
    )


def test_in_sagemakers_container_the_variables_reach_vllm(fake, tmp_path):
    said, _, _ = started(
        fake, SAGEMAKER_MODEL_PATH=str(tmp_path), SM_VLLM_TENSOR_PARALLEL_SIZE="2", SM_VLLM_ENFORCE_EAGER="true",
        SM_VLLM_ENABLE_LORA="false", SM_VLLM_MODEL="org/model", SM_EXPERTILE_SERVED_MODEL_NAME="m",
    )  # fmt: skip
    assert said["argv"] == [
        "serve", "org/model", "--host", "0.0.0.0", "--port", "8080", "--served-model-name", "m",
        "--enforce-eager", "--tensor-parallel-size", "2",
    ]  # fmt: skip
    assert said["VLLM_PLUGINS"] is None


def test_the_plugin_is_added_once():
    assert launch.vllm_environment({"VLLM_PLUGINS": "expertile"}, None, "warn")["VLLM_PLUGINS"] == "expertile"
    assert launch.vllm_environment({"VLLM_PLUGINS": ""}, None, "warn")["VLLM_PLUGINS"] == "expertile"
    found = launch.vllm_environment({"EXPERTILE_VLLM_GUARD": "off"}, None, "warn")
    assert found == {"EXPERTILE_VLLM_GUARD": "off"}


def test_which_engine(monkeypatch):
    monkeypatch.setattr(launch, "reasons_against_vllm", lambda: ["vLLM is not installed"])
    assert launch.chosen("auto") == launch.chosen("embedded") == "embedded"
    with pytest.raises(ExpertileError, match="vLLM is not installed"):
        launch.chosen("vllm")
    with pytest.raises(ExpertileError, match="'gpu' is not known"):
        launch.chosen("gpu")
    monkeypatch.setattr(launch, "reasons_against_vllm", list)
    assert (launch.chosen("auto"), launch.chosen("vllm"), launch.chosen("embedded")) == ("vllm", "vllm", "embedded")
