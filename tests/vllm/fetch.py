"""vLLM's Python files, out of its wheels on the package index, without downloading the wheels.

    python tests/vllm/fetch.py [VERSION ...]     default: the versions that the contract is tested for

A wheel is a ZIP with its directory at the end: that is read first, then the ranges that hold .py files. Some 10 MB in
ten requests a version, of 300. Kept in build/vllm/<version>; what is there is not fetched again. The packages that its
modules import on the way to its MoE layers are installed into build/vllm/packages, without their own dependencies.
EXPERTILE_VLLM_FILES names another folder than build/vllm; pip's index is used.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import urllib.request
import zipfile
import zlib
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("EXPERTILE_VLLM_FILES", HERE.parents[1] / "build" / "vllm"))
PACKAGES = FOLDER / "packages"
VERSIONS = ("0.24.0", "0.26.0", "0.33.0")
DONE = ".complete"
TAIL = 1 << 20  # the ZIP's directory is shorter
GAP = 1 << 18  # files closer than this come in one range
TIMEOUT_S = 120


class Remote(io.RawIOBase):
    """A file on a server that understands ranges, as zipfile wants one."""

    def __init__(self, url: str, size: int):
        self.url, self.size, self.place = url, size, 0
        self.start = max(0, size - TAIL)
        self.tail = self.range(self.start, size)

    def range(self, first: int, end: int) -> bytes:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: the server sends no ranges (status {answer.status})")
            return answer.read()

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.place

    def seek(self, offset, whence=0):
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def read(self, count=-1):
        end = self.size if count < 0 else min(self.place + count, self.size)
        first, self.place = self.place, end
        if first >= self.start:
            return self.tail[first - self.start : end - self.start]
        return self.range(first, end)


def wheel(version: str) -> tuple[str, int]:
    """(url, size) of vLLM's wheel for x86-64."""
    index = _index().rstrip("/") + "/vllm/"
    request = urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        files = json.load(answer)["files"]
    for file in files:
        if file["filename"].startswith(f"vllm-{version}-") and file["filename"].endswith("x86_64.whl"):
            return urllib.request.urljoin(index, file["url"]), file["size"]
    raise OSError(f"{index} has no vllm {version} for x86-64")


def fetch(version: str) -> Path:
    """The folder with that version's Python files; OSError when they cannot be had."""
    folder = FOLDER / version
    if (folder / DONE).exists():
        return folder
    url, size = wheel(version)
    remote = Remote(url, size)
    wanted = [entry for entry in zipfile.ZipFile(remote).infolist() if entry.filename.endswith(".py")]
    for first, end, entries in _ranges(wanted, size):
        data = remote.range(first, end)
        for entry in entries:
            path = folder / entry.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_content(entry, data, entry.header_offset - first))
    (folder / DONE).touch()
    return folder


def _ranges(entries, size: int) -> list[tuple[int, int, list]]:
    found: list[list] = []
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        end = entry.header_offset + 30 + len(entry.filename) + 1024 + entry.compress_size
        if found and entry.header_offset - found[-1][1] < GAP:
            found[-1][1] = max(found[-1][1], end)
            found[-1][2].append(entry)
        else:
            found.append([entry.header_offset, end, [entry]])
    return [(first, min(end, size), entries) for first, end, entries in found]


def _content(entry, data: bytes, at: int) -> bytes:
    name, extra = struct.unpack("<HH", data[at + 26 : at + 30])
    start = at + 30 + name + extra
    packed = data[start : start + entry.compress_size]
    content = zlib.decompress(packed, -15) if entry.compress_type == zipfile.ZIP_DEFLATED else packed
    if zlib.crc32(content) != entry.CRC:
        raise OSError(f"{entry.filename} did not arrive whole")
    return content


def fetch_packages() -> None:
    """What vLLM's modules import, as far as the plugin's tests need them."""
    wanted = (HERE / "packages.txt").read_text()
    if (PACKAGES / DONE).exists() and (PACKAGES / DONE).read_text() == wanted:
        return
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(PACKAGES), "-r", str(HERE / "packages.txt")], check=True)
    (PACKAGES / DONE).write_text(wanted)


def _index() -> str:
    """pip's index: what its settings say, else the one it has of its own."""
    from pip._internal.models.index import PyPI

    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or said or PyPI.simple_url


def main(versions) -> None:
    try:
        for version in versions or VERSIONS:
            print(f"vLLM {version}: {fetch(version)}", flush=True)
        fetch_packages()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"vLLM's files are not to be had here, its tests are skipped: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
