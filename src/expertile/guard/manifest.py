"""The first member of a packed cache: what it was made for, and the hash of every file."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from importlib.resources import files as package_files

from .. import __version__
from ..errors import ExpertileError
from .toolchain import Toolchain

FORMAT = 1
_DEVICE = re.compile(r"[^\0]{1,200}")


class CacheRefused(ExpertileError):
    """A packed cache is damaged, or was made for something else; the message says which."""


@dataclass(frozen=True)
class Plans:
    """What a cache holds every variant of: one layer on one device, up to a number of tokens.

    table  hash of the device's plan table; with expertile's version it decides which kernels a call launches
    """

    device: str
    problem: str
    quant: str
    max_tokens: int
    table: str
    expertile: str = __version__

    @classmethod
    def of(cls, device: str, problem: str, quant: str, max_tokens: int) -> Plans:
        return cls(device, problem, quant, max_tokens, table_hash(device))

    def reasons_against_here(self) -> list[str]:
        """Why calls here would launch other kernels; nothing when they launch these."""
        found = []
        if self.expertile != __version__:
            found.append(f"made by expertile {self.expertile}, here is {__version__}")
        elif self.table != table_hash(self.device):
            found.append(f"made for another plan table of {self.device}")
        device = _hardware()
        if device and device != self.device:
            found.append(f"made for the plans of {self.device}, the GPU here is {device}")
        return found


@dataclass(frozen=True)
class Manifest:
    """What a packed cache is.

    toolchain  Triton, ptxas and target that the kernels were compiled with and for
    kernels    how many
    plans      what it holds every variant of; None for whatever a cache held
    files      path -> {"sha256", "bytes"}
    """

    toolchain: Toolchain
    kernels: int
    plans: Plans | None = None
    files: dict[str, dict] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def to_json(self) -> bytes:
        body = asdict(self)
        return json.dumps(body | {"digest": _digest(body)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        try:
            body = json.loads(text)
            json.dumps(body, ensure_ascii=False).encode()  # raises on half a surrogate pair, which nothing prints
            said = body.pop("digest")
            if body["format"] != FORMAT:
                raise CacheRefused(f"format {body['format']}, this version of expertile reads format {FORMAT}")
            if said != _digest(body):
                raise CacheRefused("the manifest is damaged: its digest does not fit")
            plans = Plans(**body["plans"]) if body["plans"] else None
            return cls(**body | {"toolchain": Toolchain(**body["toolchain"]), "plans": plans})._checked()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheRefused(f"the manifest is damaged: {error}") from None
        except RecursionError:
            raise CacheRefused("the manifest is damaged: it is nested too deeply") from None

    def _checked(self) -> Manifest:
        """Itself, when its fields have their types. A file may have been made to look right."""
        entries = self.files.values()
        if not all(isinstance(each["sha256"], str) and isinstance(each["bytes"], int) for each in entries):
            raise CacheRefused("the manifest is damaged: files without hash or size")
        if not all(isinstance(value, str) for name, value in vars(self.toolchain).items() if name != "environment"):
            raise CacheRefused("the manifest is damaged: the toolchain is no text")
        if self.plans and not (isinstance(self.plans.device, str) and _DEVICE.fullmatch(self.plans.device)):
            raise CacheRefused("the manifest is damaged: its plans are for no device")
        return self


def table_hash(device: str) -> str:
    """Of the shipped plan table of that device; "" where there is none."""
    path = package_files("expertile.policy") / "tables" / f"{device}.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _hardware() -> str:
    """The Hardware name of the GPU at hand; "" without one."""
    from ..runtime.device import detect

    found = detect()
    return found.name if found.is_gpu else ""


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
