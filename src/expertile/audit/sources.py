"""Python files under a path, read and parsed without running anything; what cannot be read is said, not skipped."""

from __future__ import annotations

import ast
import io
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ExpertileError

LARGEST_BYTES = 4 << 20  # of a file that is parsed: a tree takes some hundred times as much memory
_SKIPPED = {"__pycache__", "node_modules", "site-packages.dist"}
_COMMENT = re.compile(r"#\s*expertile:\s*ok\b[ \t:,-]*(?P<reason>.*?)\s*$")
_JIT, _LIBRARY = re.compile(rb"\bjit\b"), re.compile(rb"triton|gluon")
_LAUNCH, _NAME = re.compile(rb"\]\s*\("), re.compile(rb"[A-Za-z_]\w*", re.ASCII)
_CALLED = re.compile(rb"([A-Za-z_]\w*)\s*\[([^\n]*?)\]\s*\(", re.ASCII)  # x[...](
_GRID = re.compile(rb"grid|lambda|,", re.IGNORECASE)
_SIGNATURE = re.compile(rb"\bdef\s+\w+\s*\(((?:[^()]|\([^()]*\))*)", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A file's bytes; none where it was not read, says `trouble`."""

    path: str
    data: bytes = b""
    trouble: str = ""

    @property
    def may_define(self) -> bool:
        """Whether a kernel may be defined in it."""
        return bool(_JIT.search(self.data) and _LIBRARY.search(self.data))

    def may_launch(self, kernels: set[bytes]) -> bool:
        """Whether one of those kernels may be launched in it."""
        return bool(_LAUNCH.search(self.data)) and self.mentions(kernels)

    @property
    def may_hand_on(self) -> bool:
        """Whether a parameter may be launched in it."""
        called = {name for name, grid in _CALLED.findall(self.data) if b"kernel" in name or _GRID.search(grid)}
        return bool(called) and not called.isdisjoint(_NAME.findall(b" ".join(_SIGNATURE.findall(self.data))))

    def mentions(self, names: set[bytes]) -> bool:
        return bool(names) and not names.isdisjoint(_NAME.findall(self.data))


@dataclass(frozen=True)
class Parsed:
    """A source's tree, and line -> the reason of a suppression on it, "" where none is given."""

    path: str
    tree: ast.Module
    comments: dict[int, str] = field(default_factory=dict)


def python_files(paths: list[Path]) -> Iterator[Path]:
    """Files ending in .py under the paths, each once whatever links lead to it; hidden folders are left out. Folders
    that cannot be listed are among them, so that reading them says why.

    Raises    ExpertileError for a path that is not there, or is neither file nor folder
    """
    seen: set[str] = set()
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            raise ExpertileError(f"{_short(path)}: {_reason(error)}: give files and folders") from None
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ExpertileError(f"{path} is a {_kind(mode)}: give files and folders")
        for found in [path] if stat.S_ISREG(mode) else _below(path):
            real = os.path.realpath(found)
            if real not in seen:
                seen.add(real)
                yield found


def _below(folder: Path) -> Iterator[Path]:
    failed: list[Path] = []
    listed = os.walk(folder, onerror=lambda error: failed.append(Path(error.filename)))
    for here, folders, files in listed:  # does not follow links to folders: no loops
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(here, name)
    yield from failed


def read(path: Path) -> Source:
    shown = os.fsencode(path).decode(errors="replace")  # a name of bytes that are no text is printed all the same
    try:
        found = path.stat()  # through links: one named x.py may lead to a device that never ends
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            return Source(shown, trouble=f"is a {_kind(found.st_mode)}: not read")
        if found.st_size > LARGEST_BYTES:
            return Source(shown, trouble=f"larger than {LARGEST_BYTES >> 20} MiB: not read")
        data = path.read_bytes()
    except OSError as error:
        return Source(shown, trouble=f"cannot be read: {_reason(error)}")
    return Source(shown, data)


def _kind(mode: int) -> str:
    names = ((stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"))
    return next((name for test, name in names if test(mode)), "device")


def _short(path: Path, longest: int = 200) -> str:
    text = str(path)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def parse(source: Source) -> Parsed | str:
    """The tree, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the file's own escapes and the like
            tree = ast.parse(source.data, filename=source.path)
    except SyntaxError as error:
        return f"line {error.lineno or 0}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"cannot be parsed: {error or type(error).__name__}"
    return Parsed(source.path, tree, comments(source.data) if b"expertile:" in source.data else {})


def comments(data: bytes) -> dict[int, str]:
    """line -> reason of each `# expertile: ok reason`; strings that look like one do not count.

    >>> comments(b"x = 1  # expertile: ok warmed for both classes")
    {1: 'warmed for both classes'}
    """
    found = {}
    try:
        for token in tokenize.tokenize(io.BytesIO(data).readline):
            if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
                found[token.start[0]] = match["reason"]
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass  # the parser accepted it; what was found up to here stands
    return found
