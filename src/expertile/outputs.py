"""Where a command writes at its end: tried before anything is measured, so that nothing that was measured is lost. And
options that it would drop.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .errors import ExpertileError


def check_file(path: Path, option: str = "out") -> Path:
    """The path; ExpertileError where no file can be written there. Leaves nothing behind: neither file nor folder."""
    try:
        if path.is_dir():
            raise ExpertileError(f"{option}={str(path)!r} is a folder: give a file")
        if path.exists() and not path.is_file():
            return path  # a device or a pipe: to open it would be to use it
        missing = [folder for folder in path.parents if not folder.exists()]
        there = path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        finally:
            if not there:
                _remove(path, missing)
    except (FileExistsError, NotADirectoryError):
        blocking = next((str(each) for each in path.parents if each.exists() and not each.is_dir()), "a file")
        raise ExpertileError(f"{option}={str(path)!r} cannot be written: {blocking} is no folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExpertileError(f"{option}={str(path)!r} cannot be written: {reason}") from None
    return path


def check_folder(path: Path, option: str) -> Path:
    """The same of a folder, which may not be there yet, for files in it."""
    if path.exists() and not path.is_dir():
        raise ExpertileError(f"{option}={str(path)!r} is no folder: give one")
    check_file(path / ".expertile", option)
    return path


def refuse_unused(context, way: str, used: set[str]) -> None:
    """ExpertileError naming the options given, says a typer.Context, that are not `used` with the option `way`."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
    if unused := [f"--{name.replace('_', '-')}" for name in given if name not in used]:
        raise ExpertileError(f"{way} measures nothing and does not use {', '.join(unused)}: leave that out")


def _remove(path: Path, folders: list[Path]) -> None:
    """What the attempt made, unless somebody else has written there in the meantime."""
    with suppress(OSError):
        if path.stat().st_size == 0:
            path.resolve().unlink()  # what a link leads to, not the link
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
