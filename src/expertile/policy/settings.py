"""What the policy is told beside problem and device: by a call, by one environment variable, by a file of problems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ShapeError
from ..plans import Backend, GemmConfig, Layout, Stream
from ..problem import Problem, named_problem
from .histogram import UNIFORM, check_name
from .libraries import Installed

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
    tokens: tuple[int, int] = (0, 1 << 62)
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
    Tables are looked for beside the file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapeError(f"{VARIABLE}: {error}") from None
    except json.JSONDecodeError as error:
        raise ShapeError(f"{path} is not JSON: {error}") from None
    known = {field.name for field in fields(Settings)} - {"installed", "told"} | {"problems"}
    _only(data, known, path)
    told = tuple(_told(entry, path) for entry in data.pop("problems", ()))
    for name, kind in (("backend", Backend), ("layout", Layout)):
        if data.get(name) is not None:
            data[name] = _member(kind, data[name], name, path)
    data["tables"] = tuple(str(path.parent / table) for table in data.get("tables", ()))
    check_name(data.get("routing", UNIFORM))
    return Settings(installed=installed, told=told, **data)


def _told(entry: Any, path: Path) -> Told:
    _only(entry, {"problem", "quant", *(field.name for field in fields(Told))} - {"sizes", "label"}, path)
    found: dict[str, Any] = {}
    if "problem" in entry:
        problem = named_problem(entry["problem"], 1)
        found["sizes"] = (problem.hidden, problem.inter, problem.experts, problem.top_k)
    if "quant" in entry:
        found["label"] = named_problem("8,8,1,1", 1, entry["quant"]).label
    if "activation" in entry:
        found["activation"] = entry["activation"]
    if "tokens" in entry:
        least, most = entry["tokens"]
        found["tokens"] = (int(least), int(most))
    for name, kind in (("backend", Backend), ("stream", Stream)):
        if name in entry:
            found[name] = _member(kind, entry[name], name, path)
    for name in ("gemm1", "gemm2"):
        if name in entry:
            try:
                found[name] = GemmConfig(**entry[name])
            except TypeError as error:
                raise ShapeError(f"{path}: {name}={entry[name]!r}: {error}") from None
    if "fuse_quant" in entry:
        found["fuse_quant"] = bool(entry["fuse_quant"])
    return Told(**found)


def _only(data: Any, known: set[str], path: Path) -> None:
    if not isinstance(data, dict):
        raise ShapeError(f"{path}: {data!r} is not an object")
    for name in data:
        if name not in known:
            raise ShapeError(f"{path}: {name!r} is not known: use some of {', '.join(sorted(known))}")


def _member(kind, value, name: str, path: Path):
    if value not in [member.value for member in kind]:
        raise ShapeError(f"{path}: {name}={value!r}: use one of {', '.join(member.value for member in kind)}")
    return kind(value)
