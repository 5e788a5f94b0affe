"""Where a launch came from, and what Triton knows about it at that moment: one look at the stack."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

_HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True)
class Call:
    """site: file:line in function, the innermost outside of Triton. The rest is what JITFunction holds: the text of its
    key, the device, the arguments by name, the source to compile, and in a kernel's first launch the kernel."""

    site: str
    key: str = ""
    device: int | None = None
    values: Mapping[str, object] = field(default_factory=dict)
    source: object = None
    loading: object = None


def look() -> Call:
    import triton

    home = os.path.dirname(os.path.abspath(triton.__file__))
    frame, found = sys._getframe(1), {}
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(home + os.sep):
            _read(frame, found)
        elif not path.startswith(_HERE + os.sep) and path != contextlib.__file__:
            break
        frame = frame.f_back
    if frame is None:
        return Call("a thread of Triton's own", **found)
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    return Call(f"{path}:{frame.f_lineno} in {name}", **found)


def _read(frame, found: dict) -> None:
    """Notes what the frames of JITFunction.run, JITFunction._do_compile and CompiledKernel._init_handles hold."""
    name, local = frame.f_code.co_name, frame.f_locals
    if name == "_do_compile":
        found.update(key=local.get("key", ""), device=local.get("device"), source=local.get("src"))
    elif name == "run" and "bound_args" in local:
        found["values"] = dict(local["bound_args"])
    elif name == "_init_handles":
        found["loading"] = local.get("self")
