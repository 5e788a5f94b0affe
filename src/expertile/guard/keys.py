"""What Triton compiles one variant of a kernel for, and in what two variants differ.

Read from the sources that Triton keeps beside its compiled kernels (signature, constants, attributes), not from the
text of its cache keys: the same in 3.6, 3.7 and 3.8. Only the options are read from the text; nothing else has them as
they were given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .events import Difference

_INTEGER = re.compile(r"[iu](8|16|32|64)")
_LONGEST = 120  # characters of a value in a message
_MOST_COMPARED = 256  # variants, the latest: a kernel with more of them is slow enough already
#: Of two variants with as many differences the nearer one has these: another width is nearer than a constant.
_DISTANCE = {"equal_1": 3, "none": 3, "dtype": 3, "width": 2}

#: A direct triton.compile, or guard.warm for a target, leaves nothing in the kernel's own caches.
_FIRST = Difference("", "first", "no launch of this kernel in this process compiled or loaded it before")


class Slot(NamedTuple):
    """One argument, or one element of a tuple, as the compiler sees it.

    type      Triton's ("*bf16", "i32"); "constexpr" for constants, which an integer 1 and an argument None are as well
    constant  its value as text
    marks     attributes ("tt.divisibility=16"); None where Triton looked for none
    """

    label: str
    type: str
    constant: str | None
    marks: frozenset[str] | None
    declared: bool  # tl.constexpr in the kernel's own signature


@dataclass(frozen=True)
class Key:
    """One variant: its slots by path, its options as the launch gave them, Triton's text for both."""

    slots: Mapping[tuple, Slot]
    text: str = ""
    device: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def key_of(source, text: str = "", device: int | None = None) -> Key:
    """The Key of a Triton ASTSource or IRSource."""
    fn = getattr(source, "fn", None)
    params = {param.name: param for param in getattr(fn, "params", ())}
    constants, attributes = getattr(source, "constants", {}), getattr(source, "attrs", None) or {}
    slots: dict[tuple, Slot] = {}

    def fill(path: tuple, label: str, kind, declared: bool) -> None:
        if isinstance(kind, (tuple, list)):
            for index, element in enumerate(kind):
                fill((*path, index), f"{label}[{index}]", element, declared)
            return
        constant = _constant(constants.get(path)) if kind == "constexpr" else None
        slots[path] = Slot(
            label, str(kind), constant, None if constant is not None else _marks(attributes, path), declared
        )

    for position, (name, kind) in enumerate(source.signature.items()):
        declared = getattr(params.get(name), "is_constexpr", False)
        fill((position,), str(name), kind, declared)
    return Key(slots, text, device, _options(text))


def compiled_keys(fn) -> list[Key]:
    """The variants of a JITFunction that this process has compiled, oldest first, of all devices."""
    found = []
    for device, caches in list(getattr(fn, "device_caches", {}).items()):
        for text, kernel in list(caches[0].items()):
            held = getattr(kernel, "__dict__", {})
            if "finalize_compile" in held:  # a FutureKernel: asking it for anything else would wait for it
                kernel = held["kernel"]
            source = getattr(kernel, "src", None)
            if source is not None and hasattr(source, "signature"):
                found.append(key_of(source, text, device))
    return found


def nearest(key: Key, others: list[Key], values: Mapping[str, object]) -> tuple[Key | None, tuple[Difference, ...]]:
    """The variant that differs least, the latest of several, and the differences."""
    best, found, least = None, (_FIRST,), None
    for other in others[-_MOST_COMPARED:]:
        differences = tuple(compare(key, other, values))
        weight = (len(differences), sum(_DISTANCE.get(each.kind, 1) for each in differences))
        if least is None or weight <= least:
            best, found, least = other, differences, weight
    return best, found


def compare(key: Key, other: Key, values: Mapping[str, object]) -> Iterator[Difference]:
    """The differences of `key` from `other`, at least one; values are the launch's, by argument."""
    count = 0
    for path in sorted({*key.slots, *other.slots}):
        now, before = key.slots.get(path), other.slots.get(path)
        kind = _kind(now, before)
        if kind:
            count += 1
            slot = now or before
            value = _value(values, slot.label, path)
            yield Difference(slot.label, kind, _words(now, kind), _words(before, kind), value)
    for name in dict.fromkeys([*key.options, *other.options]):
        now, before = (each.options.get(name, "not given") for each in (key, other))
        if now != before:
            count += 1
            yield Difference(name, "option", short(str(now)), short(str(before)))
    if key.device != other.device and None not in (key.device, other.device):
        yield Difference("", "device", f"compiled for device {other.device}, launched on device {key.device}")
    elif not count and key.text != other.text:
        yield Difference("", "spelling", f"options {_tail(key.text)}", f"compiled: {_tail(other.text)}")
    elif not count:
        yield Difference("", "again", "the same variant was compiled before")


def _kind(now: Slot | None, before: Slot | None) -> str:
    """A key of events.KINDS, or "" where the two do not differ."""
    if now is None or before is None:
        return "dtype"
    if now.type == before.type:
        if now.constant != before.constant:
            return "none" if "None" in (now.constant, before.constant) and not now.declared else "constexpr"
        return _kind_of_marks(now, before)
    constant, other = (now, before) if now.type == "constexpr" else (before, now)
    if constant.type == "constexpr":
        if constant.constant == "None":
            return "none"
        return "equal_1" if _INTEGER.fullmatch(other.type) else "dtype"
    return "width" if _INTEGER.fullmatch(now.type) and _INTEGER.fullmatch(before.type) else "dtype"


def _kind_of_marks(now: Slot, before: Slot) -> str:
    if now.marks == before.marks:
        return ""
    if None in (now.marks, before.marks):  # an integer with its type in the signature that is 1 has none
        return "equal_1"
    if any(not mark.startswith("tt.divisibility") for mark in now.marks ^ before.marks):
        return "attribute"
    return "address" if now.type.startswith("*") else "divisible_by_16"


def _words(slot: Slot | None, kind: str) -> str:
    """What the slot is, as far as `kind` goes."""
    if slot is None:
        return "absent"
    if kind == "equal_1":
        return (
            "1, which is a variant of its own" if slot.constant or slot.marks is None else f"{slot.type} other than 1"
        )
    if kind in ("divisible_by_16", "address"):
        thing = "address " if kind == "address" else ""
        return f"{thing}divisible by 16" if slot.marks else f"{thing}not divisible by 16"
    if kind == "attribute":
        return ", ".join(sorted(slot.marks)) or "none"
    return short(slot.constant) if slot.constant is not None else slot.type


def _marks(attributes: Mapping, path: tuple) -> frozenset[str] | None:
    found = attributes.get(path)
    return None if found is None else frozenset("=".join(map(str, each)) for each in found)


def _constant(value) -> str:
    """As Triton's key has it: a function by its hash, so that a changed one differs."""
    return f"{value.__name__} {value.cache_key[:12]}" if hasattr(value, "cache_key") else repr(value)


def _value(values: Mapping[str, object], label: str, path: tuple) -> str:
    value = values.get(label.partition("[")[0])
    for index in path[1:]:
        value = value[index] if isinstance(value, (tuple, list)) and index < len(value) else None
    if value is None or isinstance(value, (bool, int, float, str)):
        return "" if value is None else short(repr(value))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return "" if shape is None or dtype is None else f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _tail(text: str) -> str:
    """The options in the text of a key, which ends with them: "[...]{...}"."""
    return text[text.rfind("]{") + 1 :]


def _options(text: str) -> dict[str, object]:
    if "]{" not in text:
        return {}
    try:
        return ast.literal_eval(_tail(text))
    except (ValueError, SyntaxError):
        return {"options": _tail(text)}
