"""What the policy is told beside problem and device: by a call, by one environment variable, by a file of problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ShapeError
from ..plans import Backend, GemmConfig, Layout, Stream
from ..problem import Problem, named_problem
from . import json_file
from .histogram import UNIFORM, check_name
from .json_values import (
    MOST,
    Take,
    activation_name,
    count,
    file_names,
    flag,
    made_by,
    one_of,
    or_null,
    taken,
    tile,
    token_range,
    wrong,
)
from .libraries import Installed
from .table import load_file

VARIABLE = "EXPERTILE_POLICY"
OTHERS = "others"


@dataclass(frozen=True)
class Told:
    """What a file says about some problems: those whose fields are the ones given here (None: any).

    tokens    the least and the most of them
    backend   forced; an error where it cannot run
    gemm1, gemm2, stream, fuse_quant    of our kernels' plan, in place of the table's; all but gemm1 may be left out
    """

    sizes: tuple[int, int, int, int] | None = None
    label: str | None = None
    activation: str | None = None
    tokens: tuple[int, int] = (0, MOST)
    backend: Backend | None = None
    gemm1: GemmConfig | None = None
    gemm2: GemmConfig | None = None
    stream: Stream | None = None
    fuse_quant: bool | None = None

    def about(self, problem: Problem) -> bool:
        sizes = (problem.hidden, problem.inter, problem.experts, problem.top_k)
        return (
            self.sizes in (None, sizes)
            and self.label in (None, problem.label)
            and self.activation in (None, problem.activation.name)
            and self.tokens[0] <= problem.tokens <= self.tokens[1]
        )


@dataclass(frozen=True)
class Settings:
    """What decide() takes into account beside problem and device. The default: our kernels, uniform routing.

    backend      forced for every problem that the call and `told` say nothing about
    others       other libraries' kernels may be chosen unasked, where they were measured to be faster
    installed    packages that are here, as (name, version)
    routing      how tokens are expected to spread over experts
    layout       how the weights lie since they were loaded; None: as in the checkpoint, and a copy can still be made
    spare_bytes  memory that a copy of a layer's weights may take; None: any amount
    scratch_bytes  memory that a call of another library may take beside its result; None: any amount
    tables       files of measured entries that come before the shipped ones
    told         overrides by problem; the first that is about a problem counts
    """

    backend: Backend | None = None
    others: bool = False
    installed: Installed = ()
    routing: str = UNIFORM
    layout: Layout | None = None
    spare_bytes: int | None = None
    scratch_bytes: int | None = None
    tables: tuple[str, ...] = ()
    told: tuple[Told, ...] = ()

    def about(self, problem: Problem) -> Told | None:
        return next((told for told in self.told if told.about(problem)), None)


DEFAULT = Settings()


def from_environment(environment: Mapping[str, str], installed: Installed = ()) -> Settings:
    """The Settings that EXPERTILE_POLICY asks for: a backend's name, `others`, or a file of problems (.json).

    ShapeError names a value that is none of them.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return replace(DEFAULT, installed=installed)
    if text == OTHERS:
        return replace(DEFAULT, installed=installed, others=True)
    if text in [member.value for member in Backend]:
        return replace(DEFAULT, installed=installed, backend=Backend(text))
    if text.endswith(".json"):
        return from_file(Path(text), installed)
    known = ", ".join(member.value for member in Backend)
    raise ShapeError(f"{VARIABLE}={text!r}: give a backend ({known}), {OTHERS!r}, or a file that ends in .json")


def from_file(path: Path, installed: Installed = ()) -> Settings:
    """The Settings in a JSON file: fields of Settings by name, and "problems", a list of overrides.

    An override has "problem" (a known layer or "H,I,E,k"), "quant", "activation", "tokens" ([least, most]) to say what
    it is about, and "backend", or "gemm1", "gemm2" (fields of GemmConfig), "stream", "fuse_quant", to say what is done.
    Tables are looked for beside the file. ShapeError names file, key and value of whatever is wrong.
    """
    data = json_file.read(path, "the policy's file")
    problems = data.pop("problems", [])
    found = taken(data, _OF_SETTINGS, f"{path}: ", more=("problems",))
    if not isinstance(problems, list):
        raise wrong(f"{path}: problems", problems, "give a list of objects")
    forced = found.get("backend")
    told = tuple(_told(entry, f"{path}: problems[{place}]", forced) for place, entry in enumerate(problems))
    found["tables"] = tuple(str(path.parent / name) for name in found.get("tables", ()))
    for name in found["tables"]:
        try:
            load_file(name)  # what is wrong with it is found here, not in the middle of a call
        except ShapeError as error:
            raise ShapeError(f"{path}: tables: {error}") from None
    return Settings(installed=installed, told=told, **found)


def _told(entry: Any, where: str, forced: Backend | None) -> Told:
    found = taken(entry, _OF_TOLD, f"{where}.")
    kernel = [name for name in ("gemm1", "gemm2", "stream", "fuse_quant") if name in found]
    backend = found.get("backend") or forced
    if kernel and backend not in (None, Backend.TRITON):
        raise wrong(f"{where}.{kernel[0]}", entry[kernel[0]], f"only triton takes it, not backend={backend.value!r}")
    if kernel and "gemm1" not in found and found.get("stream", Stream.NO) is Stream.NO:
        raise wrong(f"{where}.{kernel[0]}", entry[kernel[0]], "give gemm1 too, of which it is a change")
    if "problem" in found:
        found["sizes"] = found.pop("problem")
    if "quant" in found:
        found["label"] = found.pop("quant")
    return Told(**found)


def _sizes(name: str) -> tuple[int, int, int, int]:
    if name.count(",") > 3:
        raise ShapeError("give H,I,E,k alone; the activation is a key of its own")
    problem = named_problem(name, 1)
    return problem.hidden, problem.inter, problem.experts, problem.top_k


_OF_SETTINGS: dict[str, Take] = {
    "backend": or_null(one_of(Backend)),
    "others": flag,
    "routing": made_by(check_name, "give a text such as uniform, hot, zipf1.2 or trace:FILE"),
    "layout": or_null(one_of(Layout)),
    "spare_bytes": or_null(count),
    "scratch_bytes": or_null(count),
    "tables": file_names,
}
_OF_TOLD: dict[str, Take] = {
    "problem": made_by(_sizes, "give a known layer or H,I,E,k as a text"),
    "quant": made_by(lambda name: named_problem("8,8,1,1", 1, name).label, "give a text such as bf16 or fp8_block"),
    "activation": activation_name,
    "tokens": token_range,
    "backend": one_of(Backend),
    "gemm1": tile,
    "gemm2": tile,
    "stream": one_of(Stream),
    "fuse_quant": flag,
}
