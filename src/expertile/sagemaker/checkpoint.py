"""What of a model folder belongs into an artefact: safetensors, configuration, tokenizer; nothing that runs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from ..errors import ExpertileError, MissingExtra

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
RESERVED = ("requirements.txt", "serving.properties", "requirements")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Member:
    """A file of the artefact: its name there, where it is, or what it holds; its bytes when it was looked at."""

    name: str
    source: Path | None = None
    content: bytes = b""
    size: int = field(init=False)

    def __post_init__(self):
        there = self.source is not None and self.source.exists()
        object.__setattr__(self, "size", self.source.stat().st_size if there else len(self.content))


def members(folder: Path, leave_out: Sequence[str] = (), code: bool = False) -> list[Member]:
    """The files of a model folder, checked; links are followed, names with a dot in front are not taken.

    leave_out   patterns of names, as in *.bin
    code        whether .py files are taken: the container would run them
    Raises      ExpertileError for a folder that is no model, weights that are pickles, or files that are not whole
    """
    if not (folder / "config.json").is_file():
        raise ExpertileError(f"no model in {folder}: config.json is not there; give the folder of a model")
    found = [
        Member(path.relative_to(folder).as_posix(), path)
        for path in sorted(folder.rglob("*"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and not path.is_dir()
    ]
    found = [each for each in found if not any(fnmatch(each.name, pattern) for pattern in leave_out)]
    for each in found:
        _check(each, code)
    weights = [each for each in found if each.name.endswith(".safetensors")]
    if not weights:
        raise ExpertileError(f"no weights in {folder}: there is no .safetensors file")
    for each in weights:
        _check_whole(each.source)
    _check_index(folder, {each.name for each in found})
    return found


def _check(member: Member, code: bool) -> None:
    if not member.source.is_file():
        raise ExpertileError(f"{member.source} is not a file that can be packed: a broken link, a socket or the like")
    first = Path(member.name).parts[0]
    if first in RESERVED:
        raise ExpertileError(
            f"{member.source} is what the artefact itself brings: --leave-out '{first}*', or rename it"
        )
    advice = f"--leave-out '*{member.source.suffix or member.name}'"
    if member.source.suffix.lower() in PICKLES or _is_pickle(member.source):
        raise ExpertileError(f"{member.source} is a pickle, which runs code when it is loaded: convert it, or {advice}")
    if member.source.suffix == ".py" and not code:
        raise ExpertileError(f"{member.source} is code that the container would run: {advice}, or --code to take it")


def _is_pickle(path: Path) -> bool:
    """By its first bytes: a pickle, or torch's zip of one."""
    with path.open("rb") as file:
        head = file.read(2)
    if head[:1] == b"\x80" and head[1:] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return not path.name.endswith(".safetensors")
    if head == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            return any(name.endswith(".pkl") for name in file.namelist())
    return False


def _check_whole(path: Path) -> None:
    """Reads the header alone: where its tensors end, the file must end."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra("packing a model needs safetensors: pip install 'expertile[sagemaker]'") from None
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ExpertileError(f"{path} is not whole: {error}; fetch it again") from None


def _check_index(folder: Path, names: set[str]) -> None:
    if INDEX not in names:
        return
    try:
        listed = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ExpertileError(f"{folder / INDEX} has no weight_map: fetch it again") from None
    if missing := sorted(listed - names):
        raise ExpertileError(f"{folder}: {INDEX} lists {missing[0]}, which is not there ({len(missing)} missing)")
