"""A tar.gz that is the same bytes for the same files (and the same zlib), written as a stream."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ExpertileError
from .checkpoint import Member


class _Hashed(io.RawIOBase):
    """Writes through, and knows the SHA-256 of what it wrote."""

    def __init__(self, file):
        self.file, self.digest = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.digest.update(data)
        return self.file.write(data)


class _Followed:
    """Reads through, and says how much."""

    def __init__(self, file, read: Callable[[int], None]):
        self.file, self.say = file, read

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.say(len(data))
        return data


def write(
    out: Path, members: Sequence[Member], level: int = 1, read: Callable[[int], None] = lambda count: None
) -> str:
    """Writes the archive and returns its SHA-256. It has its name only when it is whole.

    level   of compression, 0 ... 9; weights hardly get smaller, 0 is the fastest
    read    called with the number of bytes taken in since the last call
    """
    need, free = sum(each.size for each in members), shutil.disk_usage(_there(out.parent)).free
    if need > free and level == 0:
        raise ExpertileError(f"{out} would take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            hashed = _Hashed(file)
            with (
                gzip.GzipFile(filename="", mode="wb", fileobj=hashed, mtime=0, compresslevel=level) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as archive,
            ):
                for member in sorted(members, key=lambda each: each.name):
                    _add(archive, member, read)
        os.replace(part, out)
    except OSError as error:
        raise ExpertileError(f"{out} could not be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)
    return hashed.digest.hexdigest()


def _add(archive: tarfile.TarFile, member: Member, read: Callable[[int], None]) -> None:
    """Nobody's, of no time, with one mode; a file that has become shorter is an OSError."""
    about = tarfile.TarInfo(member.name)
    about.mode, about.mtime, about.size = 0o644, 0, member.size
    with member.source.open("rb") if member.source else io.BytesIO(member.content) as file:
        archive.addfile(about, _Followed(file, read))


def _there(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())
