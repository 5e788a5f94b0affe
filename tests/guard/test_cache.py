"""The compile cache as one file: what is unpacked is not compiled again, and what is damaged or foreign is refused."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import guard_kernels as kernels
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from expertile import guard
from expertile.errors import ExpertileError
from expertile.guard import cache, manifest, toolchain
from expertile.guard.cache import CacheRefused, pack, try_unpack, unpack, verify

HERE = Path(__file__).parent
SM90 = GPUTarget("cuda", 90, 32)


@pytest.fixture
def packed(tmp_path, x):
    """A packed cache of three variants of two kernels."""
    for n in (5, 16):
        kernels.plus[(1,)](x, n, 64)
    kernels.affine[(1,)](torch.zeros(16), None, 1.0, (5, 6), triton.language.float32)
    path = tmp_path / "kernels.cache"
    pack(path)
    return path


def emptied(monkeypatch, folder) -> Path:
    """Another machine's cache: nothing in it, nothing in the kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    kernels.plus.device_caches.clear()
    kernels.affine.device_caches.clear()
    return folder


def files(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_after_unpacking_elsewhere_nothing_is_compiled(packed, tmp_path, monkeypatch, x):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    unpacked = unpack(packed)
    assert unpacked == verify(packed) and unpacked.kernels == 3
    with guard.seal("error") as sealed:
        for n in (5, 16):
            kernels.plus[(1,)](x, n, 64)
        kernels.affine[(1,)](torch.zeros(16), None, 1.0, (5, 6), triton.language.float32)
    assert [event.kind for event in sealed.events] == ["load"] * 3
    assert files(folder) == set(unpacked.files)
    for group in folder.rglob("__grp__*"):
        for name, path in json.loads(group.read_text())["child_paths"].items():
            assert path == str(group.parent / name) and Path(path).is_file()


LAUNCH = """
import sys
sys.path.insert(0, {here!r})
import guard_driver, guard_kernels as kernels, torch
from expertile import guard
from expertile.guard.cache import try_unpack
guard_driver.activate()
print(try_unpack({path!r}))
with guard.seal("count") as sealed:
    kernels.plus[(1,)](torch.zeros(256, dtype=torch.int32), 5, 64)
print([event.kind for event in sealed.events])
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "truncated"])
def test_a_new_process_starts_warm_or_says_why_not_and_compiles(packed, tmp_path, damaged):
    if damaged:
        packed.write_bytes(packed.read_bytes()[:-100])
    code = LAUNCH.format(here=str(HERE), path=str(packed))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "new")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    reason, events = done.stdout.splitlines()
    assert events == ("['compile']" if damaged else "['load']")
    assert (reason == "None") is not damaged
    assert ("kernels will be compiled" in done.stderr and "truncated" in done.stderr) is damaged


def test_unpacking_twice_or_at_once_changes_nothing(packed, tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    folder = emptied(monkeypatch, tmp_path / "shared")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: unpack(packed), range(8)))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    unpack(packed)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    assert files(folder) == set(verify(packed).files)


def test_a_kernel_becomes_visible_only_when_it_is_whole(packed, tmp_path, monkeypatch):
    """Group files, which Triton looks for, come after all others, and every file by a rename in its own folder."""
    emptied(monkeypatch, tmp_path / "elsewhere")
    order, replaced = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append((Path(a), Path(b))), replaced(a, b)))
    unpack(packed)
    grouped = [to.name.startswith("__grp__") for _, to in order]
    assert grouped == sorted(grouped) and sum(grouped) == 3
    assert all(temporary.parent == to.parent for temporary, to in order)


def test_a_full_disk_is_a_reason_and_leaves_no_group_behind(packed, tmp_path, monkeypatch):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    replaced, left = os.replace, iter(range(4))

    def replace_some(a, b):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        replaced(a, b)

    monkeypatch.setattr(os, "replace", replace_some)
    assert "No space left on device" in try_unpack(packed)
    assert len(files(folder)) == 4 and not any("__grp__" in name or ".tmp" in name for name in files(folder))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_refused_before_anything_is_written(packed, tmp_path, monkeypatch, share):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    data = packed.read_bytes()
    packed.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CacheRefused, match="truncated"):
        unpack(packed)
    assert not folder.exists()


def test_a_flipped_bit_anywhere_is_refused(packed, tmp_path, monkeypatch):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    data = packed.read_bytes()
    refused = 0
    for place in range(0, len(data), 3):
        changed = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        try:
            if gzip.decompress(changed) == gzip.decompress(data):
                continue  # the time in gzip's header, or another way to write the same zeros
        except Exception:
            pass
        packed.write_bytes(changed)
        with pytest.raises(CacheRefused):
            unpack(packed)
        refused += 1
    assert refused > 0.98 * len(data) / 3
    assert not folder.exists()


def test_a_flipped_bit_in_the_contents_is_refused_by_the_hashes(packed, tmp_path, monkeypatch):
    """Also where gzip's own checksum was made to fit."""
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    data = gzip.decompress(packed.read_bytes())
    with tarfile.open(packed) as tar:
        members = [(member.offset_data, member.size) for member in tar]
    for start, size in members:
        place = start + size // 2
        packed.write_bytes(gzip.compress(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]))
        with pytest.raises(CacheRefused, match="damaged"):
            unpack(packed)
    assert len(members) > 10 and not folder.exists()


def rewritten(path, change_files=dict, change_body=lambda body: None, digest=True, order=sorted, kind=None):
    """The packed cache taken apart, changed and put together again, hashes included, as somebody might."""
    with tarfile.open(path) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    body = json.loads(contents.pop("manifest.json"))
    contents = change_files(contents)
    body["files"] = {name: {"sha256": cache._sha256(data), "bytes": len(data)} for name, data in contents.items()}
    body.pop("digest")
    change_body(body)
    body["digest"] = manifest._digest(body) if digest else "0" * 64
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in (("manifest.json", json.dumps(body).encode()), *((n, contents[n]) for n in order(contents))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if kind is not None and name != "manifest.json":
                member.type, member.size, member.linkname = kind, 0, "/etc/passwd"
            tar.addfile(member, io.BytesIO(data) if member.size else None)
    path.write_bytes(gzip.compress(buffer.getvalue()))


def test_taken_apart_and_put_together_it_is_still_whole(packed, tmp_path, monkeypatch):
    rewritten(packed)
    emptied(monkeypatch, tmp_path / "elsewhere")
    assert unpack(packed).kernels == 3


FOLDER = "A" * 52


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "/tmp/evil", f"{FOLDER}/../evil", f"{FOLDER}/../../evil.json", f"../{FOLDER}/evil", f"{FOLDER}/a/b",
        f"{FOLDER}/.evil", f"{FOLDER}/..", f"{FOLDER}/a\\b", f"{FOLDER}/", "evil", f"{FOLDER.lower()}/evil",
        f"{FOLDER}\0/evil",
    ],
)  # fmt: skip
def test_no_path_leaves_the_cache(packed, tmp_path, monkeypatch, name):
    folder = emptied(monkeypatch, tmp_path / "a" / "b" / "elsewhere")
    rewritten(packed, lambda contents: {**contents, name: b"evil"})
    with pytest.raises(CacheRefused):
        unpack(packed)
    assert not folder.exists() and not [path for path in tmp_path.rglob("*evil*") if "plus" not in str(path)]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_only_plain_files_are_taken(packed, tmp_path, monkeypatch, kind):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    rewritten(packed, kind=kind)
    with pytest.raises(CacheRefused, match="not in the manifest"):
        unpack(packed)
    assert not folder.exists()


@pytest.mark.parametrize("child", ["/etc/passwd", "../../evil", "not_in_the_file.json"])
def test_a_group_names_only_files_beside_it(packed, tmp_path, monkeypatch, child):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")

    def change(contents):
        group = next(name for name in contents if "__grp__" in name)
        return {**contents, group: json.dumps({"child_paths": {child: child}}).encode()}

    rewritten(packed, change)
    with pytest.raises(CacheRefused, match="which is not in the file"):
        unpack(packed)
    assert not folder.exists()


def foreign(body, **changes):
    body["toolchain"].update(changes)


def plans_of(device):
    return vars(manifest.Plans(device, "64,48,8,2", "bf16", 16, ""))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: foreign(body, triton="3.5.0"), f"made with Triton '3.5.0', here is '{triton.__version__}'"),
        (lambda body: foreign(body, build="0" * 16), "made with another build of Triton"),
        (lambda body: foreign(body, ptxas="ptxas 11.0"), "made with ptxas 'ptxas 11.0', here is"),
        (lambda body: foreign(body, environment={"DISABLE_LLVM_OPT": "1"}), "made with the environment"),
        (lambda body: foreign(body, platform="Linux s390x cpython-311"), "made with platform 'Linux s390x"),
        (lambda body: foreign(body, target="cuda 100"), "made for target 'cuda 100', the GPU here is 'cuda 90'"),
        (lambda body: body.update(format=2), "format 2, this version of expertile reads format 1"),
        (lambda body: body.pop("kernels"), "the manifest is damaged"),
        (lambda body: body.update(extra=1), "the manifest is damaged"),
        (lambda body: body.update(toolchain=[]), "the manifest is damaged"),
        (lambda body: foreign(body, ptxas=None), "the manifest is damaged"),
        (lambda body: body.update(files={"x": {"sha256": 5, "bytes": "many"}}), "the manifest is damaged"),
        (lambda body: foreign(body, target="moon 7"), "made for target 'moon 7', for which Triton here has no backend"),
        (lambda body: foreign(body, device="\ud800"), "the manifest is damaged"),
        (lambda body: body.update(plans=plans_of("x" * 5000)), "the manifest is damaged: its plans are for no device"),
    ],
)  # fmt: skip
def test_a_foreign_file_is_refused_with_the_reason(packed, tmp_path, monkeypatch, change, reason):
    folder = emptied(monkeypatch, tmp_path / "elsewhere")
    monkeypatch.setattr(toolchain, "_target", lambda: "cuda 90")  # as on a Hopper GPU
    rewritten(packed, change_body=change)
    with pytest.raises(CacheRefused, match=reason):
        unpack(packed)
    assert re.search(reason, try_unpack(packed))
    assert not folder.exists()


@pytest.mark.parametrize("member", ["manifest", "group"])
def test_what_is_nested_too_deeply_is_refused(packed, tmp_path, monkeypatch, member):
    deep = b"[" * 100_000

    def change(contents):
        return {**contents, next(name for name in contents if "__grp__" in name): deep}

    if member == "group":
        rewritten(packed, change)
    else:
        with gzip.open(packed, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            info = tarfile.TarInfo("manifest.json")
            info.size = len(deep)
            tar.addfile(info, io.BytesIO(deep))
    with pytest.raises(CacheRefused, match=r"nested too deeply|no group of Triton's"):
        verify(packed)


def test_an_empty_folder_name_is_not_this_folder_and_a_target_is_no_text(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ExpertileError, match="cache_dir='': name a folder"):
        unpack(packed, "")
    assert files(tmp_path) == before
    with pytest.raises(ExpertileError, match=r"target='cuda 90': give one as GPUTarget"):
        pack(tmp_path / "other.cache", target="cuda 90")


def test_the_command_makes_the_files_folders_and_says_the_compiler_briefly(packed, tmp_path):
    words = ["cache", "pack", str(tmp_path / "made" / "as needed" / "k.cache")]
    done = subprocess.run([sys.executable, "-m", "expertile.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert verify(words[-1]).kernels == 3
    assert len(done.stdout.splitlines()[1]) < 80, done.stdout


def test_only_a_file_is_replaced(packed, tmp_path):
    fifo, link, loop = tmp_path / "fifo", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(fifo)
    link.symlink_to(packed)
    loop.symlink_to(loop)
    for path, words in (
        (fifo, "would be replaced"), (tmp_path, "is a folder: name the file"), ("", "is a folder"),
        ("/dev/null", "would be replaced"), (loop, "cannot write"), ("x" * 5000, "cannot write"),
    ):  # fmt: skip
        with pytest.raises(ExpertileError, match=words):
            pack(path)
    assert fifo.is_fifo() and Path("/dev/null").is_char_device()
    packed.unlink()
    pack(link)
    assert link.is_symlink() and verify(packed).kernels == 3


def test_a_manifest_with_another_digest_is_refused(packed):
    rewritten(packed, digest=False)
    with pytest.raises(CacheRefused, match="digest"):
        verify(packed)


@pytest.mark.parametrize("data", [b"", b"hello", gzip.compress(b"hello"), gzip.compress(b"\0" * 10240)])
def test_what_is_no_packed_cache_is_refused(tmp_path, data):
    path = tmp_path / "some.file"
    path.write_bytes(data)
    with pytest.raises(CacheRefused, match=r"some.file"):
        verify(path)
    with pytest.raises(CacheRefused, match="no such file"):
        verify(tmp_path / "nothing")


def test_files_that_are_missing_or_not_announced_are_refused(packed):
    whole = packed.read_bytes()
    rewritten(packed, order=lambda contents: sorted(contents)[1:])
    with pytest.raises(CacheRefused, match=r"truncated: 1 of \d+ files are missing"):
        verify(packed)
    packed.write_bytes(whole)
    rewritten(packed, order=lambda contents: [*sorted(contents), sorted(contents)[0]])
    with pytest.raises(CacheRefused, match="not in the manifest"):
        verify(packed)


def test_only_whole_kernels_of_this_triton_and_target_are_packed(tmp_path, monkeypatch, x):
    folder = emptied(monkeypatch, tmp_path / "mixed")
    variant = guard.Variant(kernels.plus, {"x_ptr": "*i32", "n": "i32"}, {"BLOCK": 64})
    guard.warm([variant], target=SM90, progress=False)
    (kernel,) = folder.iterdir()
    assert pack(tmp_path / "one.cache").kernels == 1
    guard.warm([variant], target=GPUTarget("cuda", 80, 32), progress=False)
    with pytest.raises(ExpertileError, match="holds kernels for cuda 80, cuda 90: name the target"):
        pack(tmp_path / "two.cache")
    only = pack(tmp_path / "one.cache", target=SM90)
    assert only.kernels == 1 and only.toolchain.target == "cuda 90"
    assert {name.partition("/")[0] for name in only.files} == {kernel.name}
    old = kernel / "plus.json"
    old.write_text(old.read_text().replace(triton.__version__, "3.5.0"))
    with pytest.raises(ExpertileError, match=r"holds no kernel that Triton .* compiled for cuda 90"):
        pack(tmp_path / "none.cache", target=SM90)
    old.unlink()
    with pytest.raises(ExpertileError, match="holds no kernel"):
        pack(tmp_path / "none.cache", target=SM90)


def test_launchers_and_tuning_results_are_packed_too_and_what_is_being_written_is_not(packed, tmp_path, monkeypatch):
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    for name in (
        f"{FOLDER}/launcher.so",
        f"{'B' * 52}/plus.autotune.json",
        f"{'C' * 52}/tmp.pid_1_2/x.json",
        "odd/x.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    found = pack(packed)
    assert {f"{FOLDER}/launcher.so", f"{'B' * 52}/plus.autotune.json"} <= set(found.files)
    assert not [name for name in found.files if "tmp.pid" in name or "odd" in name]
    emptied(monkeypatch, tmp_path / "elsewhere")
    unpack(packed)
    assert (tmp_path / "elsewhere" / FOLDER / "launcher.so").read_text() == "{}"


def test_packing_is_reproducible_and_replaces_a_file_at_once(packed):
    first = packed.read_bytes()
    pack(packed)
    assert packed.read_bytes() == first and [path.name for path in packed.parent.glob("*cache*")] == [packed.name]
    with pytest.raises(ExpertileError, match="cannot write"):
        pack("/proc/nowhere/file")


def test_a_layers_cache_is_refused_where_other_kernels_would_be_launched(packed, monkeypatch):
    monkeypatch.setattr(manifest, "_hardware", lambda: "")
    plans = manifest.Plans.of("h200", "qwen3-30b-a3b", "bf16", 64)
    assert plans.table and not plans.reasons_against_here()
    assert "made for another plan table of h200" in replace(plans, table="0").reasons_against_here()
    assert "made by expertile 0.0.1, here is" in replace(plans, expertile="0.0.1").reasons_against_here()[0]
    monkeypatch.setattr(manifest, "_hardware", lambda: "h100")
    assert plans.reasons_against_here() == ["made for the plans of h200, the GPU here is h100"]
    pack(packed, plans=replace(plans, table="0"))
    assert verify(packed).plans.table == "0"
    with pytest.raises(CacheRefused, match="another plan table"):
        unpack(packed)


def expertile(*arguments, **environment):
    command = [sys.executable, str(HERE / "guard_command.py"), "cache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
def test_the_command_line_compiles_a_layer_packs_verifies_and_unpacks_it(tmp_path, monkeypatch):
    path, folder = tmp_path / "layer.cache", tmp_path / "elsewhere"
    layer = ("--problem", "64,48,8,2", "--max-tokens", "16", "--device", "h200")
    done = expertile("pack", path, *layer)
    assert done.returncode == 0, done.stderr
    assert (
        "every variant of 64,48,8,2 bf16 up to 16 tokens on h200" in done.stdout
        and "for cuda 90, Triton" in done.stdout
    )
    assert expertile("verify", path).stdout == done.stdout
    assert expertile("unpack", path, "--cache-dir", folder).returncode == 0
    assert files(folder) == set(verify(path).files)

    from expertile.cli_cache import layer_variants
    from expertile.hardware import H200

    emptied(monkeypatch, folder)
    variants = layer_variants("64,48,8,2", "bf16", False, False, 16, H200)
    assert variants and guard.warm(variants, target=SM90, progress=False).compiled == 0

    path.write_bytes(path.read_bytes()[:-9])
    for command in ("verify", "unpack"):
        done = expertile(command, path)
        assert done.returncode == 2 and done.stdout == ""
        assert (
            done.stderr.startswith("expertile: ") and "truncated" in done.stderr and len(done.stderr.splitlines()) == 1
        )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--problem", "nope", "--device", "h200"), "nope"),
        (("--problem", "64,48,8,2", "--device", "b200"), "b200"),
        (("--problem", "64,48,8,2", "--device", "cpu"), "name the device"),
        (("--problem", "64,48,8,2", "--device", "h200", "--max-tokens", "0"), "max_tokens=0"),
        (("--problem", "64,48,8,2", "--device", "h200", "--cache-dir", "x"), "cache_dir"),
        (("--problem", "64,48,8,2", "--device", "h200", "--quant", "fp32"), "compiles nothing"),
        ((), "holds no kernel"),
        (("--problem", "64,48,8,2", "--device", "h200", "--max-tokens", "1048577"), "give 1 to 1048576"),
        (("--quant", "bf16", "--max-tokens", "64"), "quant='bf16', max_tokens=64: of a layer"),
        (("--device", "h200"), "device='h200'"),
        (("--static-scale",), "static_scale"),
        (("--cache-dir", ""), "cache_dir='': name a folder"),
        (("--cache-dir", "x" * 5000), "cannot read xxx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_bad_input_is_one_line_on_stderr(tmp_path, arguments, word):
    done = expertile("pack", tmp_path / "x.cache", *arguments)
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "x.cache").exists()
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("expertile: ") and word in line
