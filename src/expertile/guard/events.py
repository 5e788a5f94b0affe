"""What a sealed guard saw: which kernel, which argument split it, how, where, and what to do about it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass, field

#: What a launch can differ in: in two or three words, and what to do, `{name}` being the argument.
KINDS = {
    "equal_1": ("== 1", 'do_not_specialize=["{name}"] (1 is then an integer like any other), or warm both'),
    "divisible_by_16": (
        "divisible by 16",
        'do_not_specialize_on_alignment=["{name}"] where speed does not hang on it, else bucket {name} to multiples of '
        "16, or warm both",
    ),
    "address": (
        "address divisible by 16",
        "allocate or slice {name} at multiples of 16 bytes, or "
        'do_not_specialize_on_alignment=["{name}"] where speed does not hang on it, or warm both',
    ),
    "width": ("32 or 64 bit", "annotate {name}: tl.int64 in the kernel, with do_not_specialize, or warm both widths"),
    "none": ("None or not", "always pass {name}, or never, or warm both"),
    "dtype": ("type", "warm {name} with each type that it will have"),
    "attribute": ("attribute", "warm both"),
    "constexpr": ("constexpr value", "warm each value of {name}"),
    "option": ("option", "launch with the same {name}, or warm each value"),
    "spelling": ("options written differently", "give the options in the same order and number at every launch"),
    "device": ("device", "warm on every device of the process"),
    "first": ("not launched before", "warm it before sealing"),
    "untuned": ("never tuned before", "launch it before sealing, or fix the configuration"),
    "again": ("compiled before", "keep the kernel's object: a new one or a changed source has an empty cache"),
    "autotune_key": (
        "autotune key",
        "take {name} out of key=[...] or bucket it if it follows a run-time size, warm each value, or fix the "
        "configuration",
    ),
    "launcher": ("C launcher", "load the kernel before sealing: guard.warm does, and so does one launch"),
    "unknown": ("unknown", "warm it before sealing"),
}

DONE = {
    "compile": "was compiled",
    "load": "was loaded from the cache on disk",
    "autotune": "was tuned",
    "launcher": "had its C launcher compiled",
}
REFUSED = {
    "compile": "would be compiled",
    "autotune": "would be tuned",
    "launcher": "would have its C launcher compiled",
}


@dataclass(frozen=True)
class Difference:
    """One argument in which a launch differs from the nearest variant that is compiled.

    argument     its name: "EM", "shape[1]" in a tuple, "num_warps" for an option; "" where no argument is to blame
    kind         a key of KINDS
    now, before  what it is in this launch and in the nearest variant, in words
    value        its value in this launch where it is known: "17", "bfloat16[8, 64]"
    """

    argument: str
    kind: str
    now: str = ""
    before: str = ""
    value: str = ""

    @property
    def text(self) -> str:
        if not self.argument:
            return f"{self.now}; {self.before}" if self.before else self.now
        given = f"={self.value}" if self.value and self.value != self.now else ""
        return f"{self.argument}{given}: {self.now}; compiled: {self.before}"

    @property
    def label(self) -> str:
        return f"{self.argument} ({KINDS[self.kind][0]})" if self.argument else KINDS[self.kind][0]

    @property
    def advice(self) -> str:
        if "[" in self.argument and self.kind in ("equal_1", "divisible_by_16", "address"):
            return f"make {self.argument} an argument of its own (Triton always looks into tuples), or warm both"
        if self.kind == "constexpr" and _is_number(self.now) and _is_number(self.before):
            name = self.argument
            return f"bucket {name}, or make it a run-time argument, if it follows a run-time size; else warm each value"
        return KINDS[self.kind][1].format(name=self.argument)


@dataclass(frozen=True)
class Event:
    """One stall after sealing, or in mode `error` one that was prevented.

    kind         compile, load (found compiled on disk), autotune (configurations were measured), launcher (C compiler)
    kernel       module.qualname
    differences  from the nearest compiled variant
    key, nearest_key   Triton's own cache keys of both; "" where there is none
    variants     of this kernel that were compiled before
    site         file:line in function, the innermost outside of Triton
    ms           lost; None when nothing was compiled
    compiles     for autotune: how many configurations it compiled
    failed       the compiler raised
    """

    kind: str
    kernel: str
    differences: tuple[Difference, ...]
    key: str = ""
    nearest_key: str = ""
    variants: int = 0
    device: int | None = None
    site: str = ""
    ms: float | None = None
    compiles: int = 0
    failed: bool = False
    time: float = field(default_factory=time.time)
    pid: int = field(default_factory=os.getpid)
    thread: str = field(default_factory=lambda: threading.current_thread().name)

    @property
    def cause(self) -> str:
        """The same for all events that one remedy removes."""
        return f"{self.kind} {self.kernel}: {self.blame}"

    @property
    def blame(self) -> str:
        return ", ".join(dict.fromkeys(difference.label for difference in self.differences))

    @property
    def advice(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(difference.advice for difference in self.differences))

    @property
    def text(self) -> str:
        """The event in words, several lines."""
        happened = DONE[self.kind] if self.ms is not None else REFUSED[self.kind]
        happened = "failed to compile" if self.failed else happened
        took = "" if self.ms is None else f" in {self.ms:.0f} ms"
        inside = f" ({self.compiles} configurations compiled)" if self.compiles else ""
        lines = [f"{self.kernel} {happened} after sealing{took}{inside}, at {self.site}"]
        lines += [f"  {difference.text}" for difference in self.differences]
        if self.nearest_key:
            lines.append(f"  nearest of {self.variants} compiled: {self.nearest_key}")
        return "\n".join([*lines, *(f"  -> {advice}" for advice in self.advice)])

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        return asdict(self) | {"cause": self.cause, "blame": self.blame, "advice": list(self.advice)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
