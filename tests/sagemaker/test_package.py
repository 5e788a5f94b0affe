"""What an artefact holds and what it must not; that it is the same bytes every time, and never half there."""

import io
import os
import pickle
import tarfile
import tracemalloc
import zipfile

import pytest
from conftest import safetensors_file

from expertile.errors import ExpertileError
from expertile.sagemaker import archive, artefact, checkpoint
from expertile.sagemaker.checkpoint import Member


def contents(path):
    with tarfile.open(path) as file:
        return {each.name: file.extractfile(each).read() for each in file.getmembers()}


def test_an_artefact_holds_the_model_the_wheel_and_how_to_install_it(model, wheel, tmp_path, run):
    out = tmp_path / "out" / "m.tar.gz"
    output = run("package", model, "--out", out, "--wheel", wheel)
    found = contents(out)
    assert set(found) == {
        "config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json",
        "requirements.txt", f"requirements/{wheel.name}",
    }  # fmt: skip
    assert found["requirements.txt"] == b"--no-index\n--find-links requirements\nexpertile_probe==1.0\n"
    assert found["model-2.safetensors"] == (model / "model-2.safetensors").read_bytes()
    assert "7 files" in output and "sagemaker deploy" in output


def test_the_same_files_give_the_same_bytes_whatever_their_times_modes_and_owners(model, wheel, tmp_path, run):
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    said = run("package", model, "--out", first, "--wheel", wheel)
    for path in model.iterdir():
        os.utime(path, (1e9, 1e9))
        path.chmod(0o600)
    again = run("package", model, "--out", second, "--wheel", wheel)
    assert first.read_bytes() == second.read_bytes()
    assert said.split("sha256 ")[1][:64] == again.split("sha256 ")[1][:64]
    import hashlib

    assert hashlib.sha256(first.read_bytes()).hexdigest() == said.split("sha256 ")[1][:64]


def test_weights_may_stay_where_they_are(wheel, tmp_path, run):
    out = tmp_path / "m.tar.gz"
    output = run("package", "--weights", "s3://bucket/qwen/", "--out", out, "--wheel", wheel)
    assert set(contents(out)) == {"requirements.txt", f"requirements/{wheel.name}"}
    assert "--weights s3://bucket/qwen/" in output


@pytest.mark.parametrize("weights", ["http://b/p", "s3://bucket/qwen", "Qwen/Qwen3-30B-A3B", ""])
def test_weights_that_deploy_would_refuse_are_not_packed(wheel, weights):
    with pytest.raises(ExpertileError, match="give s3://bucket/prefix/"):
        artefact.extras("vllm", [wheel], weights)
    assert artefact.extras("lmi", [wheel], "Qwen/Qwen3-30B-A3B")


def test_lmi_gets_its_properties(model, wheel, tmp_path, run):
    out = tmp_path / "m.tar.gz"
    run("package", model, "--out", out, "--wheel", wheel, "--for", "lmi", "--option", "max_model_len=8192")
    lines = contents(out)["serving.properties"].decode().splitlines()
    assert lines[0] == "engine=Python"
    assert "option.entryPoint=djl_python.lmi_vllm.vllm_async_service" in lines
    assert "option.rolling_batch=disable" in lines and "option.max_model_len=8192" in lines
    assert not any(line.startswith("option.model_id") for line in lines)


def test_lmi_is_told_where_weights_are_that_it_has_not(wheel, tmp_path, run):
    out = tmp_path / "m.tar.gz"
    run("package", "--weights", "s3://bucket/qwen/", "--out", out, "--wheel", wheel, "--for", "lmi")
    assert b"option.model_id=s3://bucket/qwen/\n" in contents(out)["serving.properties"]


def test_an_option_cannot_smuggle_another_line():
    with pytest.raises(ExpertileError, match="no spaces, line ends"):
        artefact.properties(None, {"x": "1\noption.trust_remote_code=true"})


def test_links_are_followed_and_hidden_names_are_not_taken(model, tmp_path):
    blob = tmp_path / "blob"
    (model / "model-1.safetensors").rename(blob)
    (model / "model-1.safetensors").symlink_to(blob)
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("secret")
    found = checkpoint.members(model)
    assert {each.name for each in found if each.name.startswith(".")} == set()
    assert next(each for each in found if each.name == "model-1.safetensors").size == blob.stat().st_size


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda model: (model / "config.json").unlink(), "config.json is not there"),
        (lambda model: [path.unlink() for path in model.glob("*.safetensors")], "there is no .safetensors file"),
        (lambda model: (model / "pytorch_model.bin").write_bytes(b"x"), "is a pickle"),
        (lambda model: (model / "weights").write_bytes(pickle.dumps([1], protocol=4)), "is a pickle"),
        (lambda model: (model / "modeling.py").write_text("import os"), "is code that the container would run"),
        (lambda model: (model / "requirements.txt").write_text("x"), "what the artefact itself brings"),
        (lambda model: (model / "gone").symlink_to("nowhere"), "a broken link"),
        (lambda model: os.mkfifo(model / "pipe"), "not a file that can be packed"),
        (lambda model: (model / "model-2.safetensors").unlink(), r"lists model-2.safetensors, which is not there"),
        (lambda model: (model / "model.safetensors.index.json").write_text("[]"), "has no weight_map"),
        (lambda model: os.truncate(model / "model-2.safetensors", 700), "is not whole"),
        (lambda model: (model / "model-1.safetensors").write_text("version https://git-lfs"), "is not whole"),
    ],
)
def test_what_must_not_be_packed_is_refused_and_nothing_is_written(model, wheel, tmp_path, run, spoil, message):
    spoil(model)
    with pytest.raises(ExpertileError, match=message):
        run("package", model, "--out", tmp_path / "m.tar.gz", "--wheel", wheel)
    assert not (tmp_path / "m.tar.gz").exists()


def test_a_zip_of_a_pickle_is_found_by_what_it_holds(model):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("archive/data.pkl", b"")
    (model / "weights.dat").write_bytes(data.getvalue())
    with pytest.raises(ExpertileError, match="is a pickle"):
        checkpoint.members(model)


def test_what_is_refused_can_be_left_out_and_code_can_be_taken(model):
    (model / "pytorch_model.bin").write_bytes(b"x")
    (model / "modeling.py").write_text("")
    names = {each.name for each in checkpoint.members(model, leave_out=["*.bin"], code=True)}
    assert "modeling.py" in names and "pytorch_model.bin" not in names


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "give the folder of a model, or with --weights"),
        (("MODEL", "--weights", "s3://b/x/"), "give the folder of a model, or with --weights"),
        (("MODEL", "--out", "m.zip"), "SageMaker takes a .tar.gz"),
        (("MODEL", "--out", "MODEL/m.tar.gz"), "inside the model's folder"),
        (("MODEL", "--for", "tgi"), "use one of vllm, lmi"),
        (("MODEL", "--option", "a=b"), "options are LMI's"),
        (("MODEL", "--for", "lmi", "--option", "a"), "give NAME=VALUE"),
        (("MODEL", "--wheel", "MODEL/config.json"), "is not a wheel"),
    ],
)
def test_a_bad_option_is_one_sentence(model, wheel, tmp_path, run, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = [str(each).replace("MODEL", str(model)) for each in arguments]
    with pytest.raises(ExpertileError, match=message):
        run("package", *given, *(() if "--wheel" in given else ("--wheel", wheel)))


def test_a_folder_in_the_artefacts_place_is_refused_before_anything_is_packed(model, wheel, tmp_path, run, monkeypatch):
    monkeypatch.setattr(checkpoint, "members", lambda *args: pytest.fail("it began"))
    (tmp_path / "m.tar.gz").mkdir()
    with pytest.raises(ExpertileError, match="is a folder: give a file"):
        run("package", model, "--wheel", wheel, "--out", tmp_path / "m.tar.gz")


def test_a_damaged_wheel_is_refused(wheel):
    data = bytearray(wheel.read_bytes())
    data[data.index(b"answer")] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ExpertileError, match=r"is damaged at expertile_probe\.py"):
        artefact.check_wheel(wheel)


def test_a_failure_leaves_what_was_there_and_no_part(model, tmp_path):
    out = tmp_path / "m.tar.gz"
    out.write_text("before")
    members = checkpoint.members(model)

    def stop(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archive.write(out, members, read=stop)
    assert out.read_text() == "before" and [path.name for path in tmp_path.glob("*part*")] == []


def test_a_file_that_shrinks_while_it_is_packed_is_an_error(model, tmp_path):
    members = checkpoint.members(model)
    seen = []

    def shrink(count):
        if not seen:
            os.truncate(model / "model-2.safetensors", 8)
        seen.append(count)

    with pytest.raises(ExpertileError, match="could not be written"):
        archive.write(tmp_path / "m.tar.gz", members, read=shrink)
    assert not (tmp_path / "m.tar.gz").exists()


def test_weights_are_not_read_into_memory(model, tmp_path):
    safetensors_file(model / "model-1.safetensors", 16 << 20)  # 64 MiB
    read = []
    tracemalloc.start()
    archive.write(tmp_path / "m.tar.gz", checkpoint.members(model), level=0, read=read.append)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
    assert sum(read) == sum(path.stat().st_size for path in model.iterdir())


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: type("usage", (), {"free": 10}))
    with pytest.raises(ExpertileError, match="GB are free there"):
        archive.write(tmp_path / "new" / "m.tar.gz", [Member("a", content=b"x" * 100)], level=0)
    assert not (tmp_path / "new").exists()


def test_expertiles_own_wheel_is_built_from_the_checkout(tmp_path):
    pytest.importorskip("hatchling", reason="needs hatchling to build a wheel")
    if not (artefact.Path(artefact.__file__).parents[3] / "pyproject.toml").is_file():
        pytest.skip("expertile does not run from a checkout here")
    wheel = artefact.check_wheel(artefact.built_wheel(tmp_path))
    with zipfile.ZipFile(wheel) as file:
        assert "expertile/sagemaker/archive.py" in file.namelist()
