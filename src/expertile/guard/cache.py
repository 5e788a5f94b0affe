"""Triton's compile cache as one file: pack it where it was filled, unpack it where the first request must not compile.

The file is a gzipped tar. Its first member, manifest.json, says what the rest was made for and the SHA-256 of every
file; the others lie as in Triton's cache, `<hash>/<name>`. Triton's group files hold absolute paths; here they hold
names, and get the paths of the folder that they are unpacked into. Nothing is written before everything is checked.

The hashes show damage, not who made the file: its contents are run, so unpack only what you trust.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import re
import stat
import tarfile
import uuid
import zlib
from pathlib import Path

from ..errors import ExpertileError
from .manifest import CacheRefused, Manifest, Plans
from .toolchain import Toolchain

MANIFEST, GROUP = "manifest.json", "__grp__"
LARGEST_MANIFEST = 64 << 20  # bytes
_FOLDER = re.compile(r"[A-Z2-7]{52}")  # a SHA-256 in base 32
LOGGER = logging.getLogger("expertile.guard")


def pack(
    path: str | os.PathLike, cache_dir: str | os.PathLike | None = None, *, target=None, plans: Plans | None = None
) -> Manifest:
    """Writes what Triton's cache holds for one target and this Triton into one file, atomically.

    cache_dir  default: Triton's own (TRITON_CACHE_DIR, else ~/.triton/cache)
    target     a GPUTarget; default: the only one found
    plans      what the cache holds every variant of, for a cache that was filled for that
    Raises     ExpertileError when the cache holds nothing to pack, or kernels for several targets and none is named;
               when the path is something other than a file, which would be replaced
    """
    path, cache_dir = place(path), _folder(cache_dir)
    try:
        toolchain, contents, kernels = _gather(cache_dir, target)
    except OSError as error:
        raise ExpertileError(f"cannot read {cache_dir}: {error.strerror or error}") from None
    files = {name: {"sha256": _sha256(data), "bytes": len(data)} for name, data in contents.items()}
    manifest = Manifest(toolchain, kernels, plans, files)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in {MANIFEST: manifest.to_json(), **contents}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    try:
        _write(path, packed.getvalue())
    except OSError as error:
        raise ExpertileError(f"cannot write {path}: {error.strerror or error}") from None
    return manifest


def place(path: str | os.PathLike) -> Path:
    """Where a packed cache of that path is written: behind links, which stay. Raises where it cannot be."""
    try:
        found = Path(os.path.realpath(path))
        mode = found.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        raise ExpertileError(f"cannot write {os.fspath(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise ExpertileError(f"{os.fspath(path)!r} is a folder: name the file to write")
    if not stat.S_ISREG(mode):
        raise ExpertileError(f"{os.fspath(path)!r} is a device, FIFO or socket and would be replaced: name a file")
    return found


def verify(path: str | os.PathLike) -> Manifest:
    """What the file is, after every hash in it was checked. Raises CacheRefused with the reason when it is damaged."""
    return _read(Path(path))[0]


def reasons_against_here(manifest: Manifest) -> list[str]:
    """Why launches in this process would not find the kernels; nothing when they will."""
    try:
        here = Toolchain.here(manifest.toolchain.target)
    except RuntimeError:  # of Triton's make_backend
        return [f"made for target {manifest.toolchain.target!r}, for which Triton here has no backend"]
    reasons = manifest.toolchain.reasons_against(here)
    return reasons + (manifest.plans.reasons_against_here() if manifest.plans else [])


def unpack(path: str | os.PathLike, cache_dir: str | os.PathLike | None = None) -> Manifest:
    """Puts the file's contents into Triton's cache, so that launches find their kernels compiled.

    cache_dir  default: Triton's own. Processes may be using it, on this and other machines: each file appears whole or
               not at all, and the group files, which make Triton see a kernel, come last
    Raises     CacheRefused, before anything is written: damaged; or made for another Triton, ptxas, device or plan
               table, so that its kernels would not be found
    """
    manifest, contents = _read(Path(path))
    if reasons := reasons_against_here(manifest):
        raise CacheRefused(f"{path}: {'; '.join(reasons)}")
    cache_dir = _folder(cache_dir).absolute()
    try:
        for name in sorted(contents, key=lambda name: (_is_group(name), name)):
            target = cache_dir / name
            data = _placed(contents[name], target) if _is_group(name) else contents[name]
            if not (target.is_file() and target.read_bytes() == data):
                _write(target, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CacheRefused(f"{path}: cannot write into {cache_dir}: {reason}") from None
    return manifest


def try_unpack(path: str | os.PathLike, cache_dir: str | os.PathLike | None = None) -> str | None:
    """`unpack` for a server's start: None when it worked, else the reason, which is logged; then launches compile."""
    try:
        unpack(path, cache_dir)
    except Exception as error:  # whatever is wrong with a file, serving goes on
        reason = str(error) if isinstance(error, ExpertileError) else f"{type(error).__name__}: {error}"
        LOGGER.warning("the packed cache is not used, kernels will be compiled: %s", reason)
        return reason
    return None


def _gather(cache_dir: Path, target) -> tuple[Toolchain, dict[str, bytes], int]:
    """The toolchain, the files by name in the archive, and the number of kernels."""
    import triton

    kernels: dict[str, list[dict[str, bytes]]] = {}
    contents: dict[str, bytes] = {}
    for folder in sorted(cache_dir.iterdir()) if cache_dir.is_dir() else ():
        if not folder.is_dir() or not _FOLDER.fullmatch(folder.name):
            continue
        groups = list(folder.glob(f"{GROUP}*.json"))
        for group in groups:
            found = _kernel(group)
            if found and found[1] == triton.__version__:
                kernels.setdefault(found[0], []).append(found[2])
        if not groups:  # launchers and tuning results
            loose = [each for each in sorted(folder.glob("*.*")) if each.is_file() and _is_plain(each.name)]
            contents |= {f"{folder.name}/{each.name}": each.read_bytes() for each in loose}
    wanted = _named(target) if target else None
    if wanted is None and len(kernels) > 1:
        raise ExpertileError(f"{cache_dir} holds kernels for {', '.join(sorted(kernels))}: name the target to pack")
    wanted = wanted or next(iter(kernels), None)
    if not kernels.get(wanted):
        for_it = f" for {wanted}" if wanted else ""
        raise ExpertileError(f"{cache_dir} holds no kernel that Triton {triton.__version__} compiled{for_it}")
    for kernel in kernels[wanted]:
        contents |= kernel
    return Toolchain.here(wanted), contents, len(kernels[wanted])


def _kernel(group: Path) -> tuple[str, str, dict[str, bytes]] | None:
    """Target, Triton's version and files of a kernel in the cache; None for one that is not whole."""
    folder = group.parent
    try:
        names = sorted(json.loads(group.read_text())["child_paths"])
        metadata = json.loads((folder / group.name.removeprefix(GROUP)).read_text())
        found = _named(metadata["target"]), metadata["triton_version"]
        contents = {f"{folder.name}/{name}": (folder / name).read_bytes() for name in names if _is_plain(name)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ExpertileError):
        return None
    if len(contents) < len(names):
        return None
    contents[f"{folder.name}/{group.name}"] = json.dumps({"child_paths": {name: name for name in names}}).encode()
    return *found, contents


def _named(target) -> str:
    """A GPUTarget, or what Triton wrote of one, as "cuda 90"."""
    target = target if isinstance(target, dict) else getattr(target, "__dict__", {"": target})
    if not {"backend", "arch"} <= target.keys():
        raise ExpertileError(f'target={target.get("", target)!r}: give one as GPUTarget("cuda", 90, 32)')
    return f"{target['backend']} {target['arch']}"


def _read(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and files, all of them checked."""
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                manifest, contents = _members(tar)
            while stream.read(1 << 20):  # to the end: gzip's own checksum stands there
                pass
    except FileNotFoundError:
        raise CacheRefused(f"{path}: no such file") from None
    except CacheRefused as error:
        raise CacheRefused(f"{path}: {error}") from None
    except (OSError, ValueError, EOFError, tarfile.TarError, zlib.error) as error:
        raise CacheRefused(f"{path} is truncated or damaged, or no packed cache: {error}") from None
    return manifest, contents


def _members(tar: tarfile.TarFile) -> tuple[Manifest, dict[str, bytes]]:
    manifest, contents = None, {}
    for member in tar:
        if manifest is None:
            if member.name != MANIFEST or not member.isreg() or member.size > LARGEST_MANIFEST:
                raise CacheRefused("no packed cache: it does not begin with a manifest")
            manifest = Manifest.from_json(tar.extractfile(member).read())
            _check_names(manifest)
            continue
        entry = manifest.files.get(member.name)
        if entry is None or member.name in contents or not member.isreg():
            raise CacheRefused(f"{member.name!r} is not in the manifest")
        if member.size != entry["bytes"]:
            raise CacheRefused(f"{member.name} has {member.size} bytes instead of {entry['bytes']}")
        contents[member.name] = tar.extractfile(member).read()
        if _sha256(contents[member.name]) != entry["sha256"]:
            raise CacheRefused(f"{member.name} is damaged: its hash does not fit")
    if manifest is None:
        raise CacheRefused("no packed cache: it is empty")
    missing = sorted({*manifest.files} - {*contents})
    if missing:
        raise CacheRefused(f"truncated: {len(missing)} of {len(manifest.files)} files are missing, {missing[0]} first")
    for name in filter(_is_group, contents):
        _check_group(name, contents)
    return manifest, contents


def _check_names(manifest: Manifest) -> None:
    """Every path is a folder as Triton names them and a plain file name in it: nothing leaves the cache."""
    for name in manifest.files:
        folder, _, file = name.partition("/")
        if not _FOLDER.fullmatch(folder) or not _is_plain(file):
            raise CacheRefused(f"{name!r} is no path in a Triton cache")


def _check_group(name: str, contents: dict[str, bytes]) -> None:
    """A group names files beside it, and no others."""
    folder = name.partition("/")[0]
    try:
        children = [*json.loads(contents[name])["child_paths"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CacheRefused(f"{name} is no group of Triton's") from None
    for child in children:
        if f"{folder}/{child}" not in contents:
            raise CacheRefused(f"{name} names {child!r}, which is not in the file")


def _is_plain(file: str) -> bool:
    return bool(file) and not file.startswith(".") and not {*file} & {*"/\\\0"}


def _is_group(name: str) -> bool:
    return name.partition("/")[2].startswith(GROUP)


def _placed(group: bytes, place: Path) -> bytes:
    """A group file with the absolute paths that Triton wants."""
    return json.dumps(
        {"child_paths": {name: str(place.parent / name) for name in json.loads(group)["child_paths"]}}
    ).encode()


def _write(path: Path, data: bytes) -> None:
    """The whole file or none of it, also for readers on other machines that share the file system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _folder(cache_dir: str | os.PathLike | None) -> Path:
    """Triton's own where none is given; a variable of a script that was empty is none."""
    if cache_dir is None:
        from triton import knobs

        return Path(knobs.cache.dir)
    if not os.fspath(cache_dir):
        raise ExpertileError("cache_dir='': name a folder, or leave it out for Triton's own")
    return Path(cache_dir)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
