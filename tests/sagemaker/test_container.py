"""The container's side: an artefact unpacked into a root of its own, installed and started as the images do it."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENTRY = REPOSITORY / "serving" / "vllm-openai" / "entrypoint.sh"
needs_files = pytest.mark.skipif(not ENTRY.is_file(), reason="needs a checkout, for serving/")


@pytest.fixture
def root(model, wheel, tmp_path, run):
    """opt/ml/model of a container, with the artefact in it."""
    out = tmp_path / "m.tar.gz"
    run("package", model, "--out", out, "--wheel", wheel)
    folder = tmp_path / "root" / "opt" / "ml" / "model"
    folder.mkdir(parents=True)
    with tarfile.open(out) as file:
        file.extractall(folder, filter="data")
    return folder


def environment(tmp_path, pip: bool) -> Path:
    """A Python environment with nothing in it, or pip alone."""
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), str(place)], check=True)
    return place / "bin" / "python"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_the_artefact_installs_itself_without_a_network(root, tmp_path, monkeypatch, tool):
    """By what AWS' images call before the server starts, from another folder, with every index out of reach."""
    pytest.importorskip("model_hosting_container_standards", reason="needs model-hosting-container-standards")
    from model_hosting_container_standards.common.dependency_manager import install_requirements

    path = [folder for folder in os.environ["PATH"].split(":") if tool == "uv" or not Path(folder, "uv").exists()]
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if tool == "uv" and uv is None:
        pytest.skip("needs uv")
    monkeypatch.setenv("PATH", ":".join([*path, *([str(Path(uv).parent)] if tool == "uv" else [])]))
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.chdir("/")
    python = environment(tmp_path, pip=tool == "pip")
    assert install_requirements(model_path=str(root), python_executable=str(python))
    done = subprocess.run([python, "-c", "import expertile_probe; print(expertile_probe.answer)"], capture_output=True)
    assert done.stdout == b"42\n", done.stderr


def started(root, tmp_path, *arguments, fails=False, **variables):
    """entrypoint.sh with an `expertile` that only tells how it was called; (its calls, standard error)"""
    programs, told = tmp_path / "bin", tmp_path / "told"
    programs.mkdir(exist_ok=True)
    fake = programs / "expertile"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{told}\n[ "$1" != cache ] || exit {int(fails)}\n')
    fake.chmod(0o755)
    told.unlink(missing_ok=True)
    given = {"PATH": f"{programs}:/usr/bin:/bin", "SAGEMAKER_MODEL_PATH": str(root), **variables}
    done = subprocess.run(["sh", str(ENTRY), *arguments], env=given, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return told.read_text().splitlines(), done.stderr


@needs_files
def test_the_entry_point_becomes_the_server(root, tmp_path):
    assert started(root, tmp_path, "serve") == (["serve"], "")
    assert started(root, tmp_path)[0] == ["serve"]
    assert started(root, tmp_path, "serve", "/model", "--host", "0.0.0.0")[0] == ["serve /model --host 0.0.0.0"]


@needs_files
def test_packed_kernels_are_unpacked_first_and_those_of_the_artefact_before_the_images(root, tmp_path):
    image = tmp_path / "kernels of the image"
    image.touch()
    calls, _ = started(root, tmp_path, "serve", EXPERTILE_KERNELS=str(image))
    assert calls == [f"cache unpack {image}", "serve"]
    (root / "kernels.cache").touch()
    calls, _ = started(root, tmp_path, "serve", EXPERTILE_KERNELS=str(image))
    assert calls == [f"cache unpack {root}/kernels.cache", "serve"]


@needs_files
def test_kernels_that_do_not_fit_are_told_and_the_server_starts(root, tmp_path):
    (root / "kernels.cache").touch()
    calls, said = started(root, tmp_path, "serve", fails=True)
    assert calls[-1] == "serve" and "kernels.cache is not used" in said


@needs_files
def test_a_packed_model_is_served_as_sagemaker_asks_for_it(tmp_path, wheel, run):
    """package, unpack, `IMAGE serve`; then /ping and /invocations on the port, and SIGTERM."""
    needed = ("fastapi", "uvicorn", "transformers", "model_hosting_container_standards", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs the extra `serve`: {', '.join(missing)}")
    with socket.socket() as port:
        if port.connect_ex(("127.0.0.1", 8080)) == 0:
            pytest.skip("SageMaker's port, 8080, is taken here")
    model = REPOSITORY / "models" / "tiny-moe"
    run("package", model, "--out", tmp_path / "m.tar.gz", "--wheel", wheel, "--leave-out", "eval.txt")
    root = tmp_path / "opt" / "ml" / "model"
    with tarfile.open(tmp_path / "m.tar.gz") as file:
        file.extractall(root, filter="data")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "expertile").write_text(f'#!/bin/sh\nexec {sys.executable} -m expertile.cli "$@"\n')
    (programs / "expertile").chmod(0o755)
    variables = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SAGEMAKER_MODEL_PATH": str(root),
        "SM_EXPERTILE_MAX_SEQS": "4", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        ["sh", str(ENTRY), "serve"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert wait_for_ping(process, 60) == 200
        body = json.dumps({"prompt": "import os", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(
            "http://127.0.0.1:8080/invocations", body, {"Content-Type": "application/json"}
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=20) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] == 4
        process.terminate()
        process.wait(timeout=20)
    finally:
        process.kill()
        output = process.communicate()[0].decode()
    assert "Traceback" not in output, output


def wait_for_ping(process, seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            return urllib.request.urlopen("http://127.0.0.1:8080/ping", timeout=2).status
        except OSError:  # an HTTPError too: 503 until it is ready
            time.sleep(0.3)
    return 0
