"""Declarations of variants: checked against the kernel, and made into arguments that Triton takes for a launch's."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..errors import ShapeError

#: An integer of each class that Triton tells apart: neither 1 nor a multiple of 16, and a multiple of 16.
_INTEGERS = {"i32": (3, 16), "i64": ((1 << 40) + 3, 1 << 40), "u64": ((1 << 63) + 3, 1 << 63)}
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\](?:,NVMMASharedLayout(\(.*\)))?>")  # with a layout: of Gluon
_NARROW = ("i8", "i16", "u8", "u16", "u32")  # only by an annotation in the kernel, whatever the value
_TYPE = "give it as text, '*bf16', 'i32', 'fp32', a descriptor, or a value that stands for itself"


@dataclass(frozen=True)
class Variant:
    """One variant of one kernel. `kernels.tiles.Specialization` has the same fields and is taken as well.

    kernel     a @triton.jit or @gluon.jit function
    types      argument -> Triton type ("*bf16", "i32", "fp32", "tensordesc<bf16[64, 128]>", in Gluon with the text of
               its layout behind the sizes), a tuple of such, or a value that stands for itself; those with a constant
               have none, or "constexpr"
    constants  the value of each tl.constexpr argument, and of every other argument that is None or 1
    divisible_by_16   arguments whose value or address is a multiple of 16; default: every pointer
    options    num_warps, num_stages, ... in the order in which the launch gives them: it is part of Triton's key

    >>> Variant(kernel, {"x_ptr": "*bf16", "n": "i32"}, {"BLOCK": 128}, options={"num_warps": 4})  # doctest: +SKIP
    """

    kernel: object
    types: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


_FIELDS = [each.name for each in fields(Variant)]


def check(variant) -> None:
    """Raises ShapeError, naming kernel and value, for what is no declaration, or names arguments that are not there."""
    if not all(hasattr(variant, name) for name in _FIELDS):
        raise ShapeError(f"{variant!r} is no variant: give expertile.guard.Variant(kernel, types, constants)")
    kernel = variant.kernel
    if not hasattr(kernel, "device_caches"):
        if type(kernel).__name__ == "InterpretedFunction":
            raise ShapeError(f"{kernel.__name__} is interpreted, so nothing is compiled: unset TRITON_INTERPRET")
        own = hasattr(kernel, "fn") and hasattr(kernel, "arg_names")
        advice = "an autotuned kernel's own function, kernel.fn" if own else "the decorated kernel itself"
        raise ShapeError(f"{kernel!r} is not a @triton.jit function: give {advice}")
    divisible, where = variant.divisible_by_16, kernel.__name__
    for name in ("types", "constants", "options"):
        value = getattr(variant, name)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ShapeError(f"{where}: {name}={value!r}: give a dict by name")
    if divisible is not None and (isinstance(divisible, str) or not _are_names(divisible)):
        raise ShapeError(f"{where}: divisible_by_16={divisible!r}: give a tuple of names, as ('x_ptr', 'n')")
    names, own_names = kernel.arg_names, {*variant.types, *variant.constants, *(divisible or ())}
    if unknown := own_names - {*names}:
        raise ShapeError(f"{where} has no argument {', '.join(sorted(unknown))}: it has {', '.join(names)}")
    if twice := [name for name in variant.constants if variant.types.get(name, "constexpr") != "constexpr"]:
        raise ShapeError(f"{where}: {', '.join(twice)} has a type and a constant: give one of the two")
    if twice := [name for name in variant.options if name in names]:
        raise ShapeError(f"{where}: {', '.join(twice)} among the options is an argument: give its type or constant")


def _are_names(value) -> bool:
    return isinstance(value, (tuple, list, set, frozenset)) and all(isinstance(each, str) for each in value)


def arguments(variant, backend) -> tuple:
    """Positional arguments that Triton's binder takes for a launch of the variant: checked against the declaration."""
    from triton.runtime.jit import create_function_from_signature

    kernel = variant.kernel
    given = tuple(_argument(variant, param) for param in kernel.params)
    _check_options(variant, backend)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    try:
        _, found, _ = bind(*given, **variant.options)
    except TypeError as error:  # of one that stands for itself
        raise ShapeError(f"{kernel.__name__}: types={dict(variant.types)!r}: {error}: {_TYPE}") from None
    for param, value, specialized in zip(kernel.params, given, found, strict=True):
        _check(variant, param, value, specialized)
    return given


def _argument(variant, param):
    name = param.name
    if name in variant.constants:
        value = variant.constants[name]
        if param.is_constexpr and not _hashable(value):
            raise ShapeError(f"{variant.kernel.__name__}: {name}={value!r} cannot be hashed, so no launch can have it")
        if not param.is_constexpr and value is not None and not (type(value) is int and value == 1):
            raise ShapeError(
                f"{variant.kernel.__name__}: {name}={value!r} is no constant to Triton: of arguments that are no "
                "tl.constexpr only None and 1 are; give its type instead"
            )
        return value
    if name in variant.types and not param.is_constexpr:
        return _example(variant.types[name], _is_divisible(variant, name), f"{variant.kernel.__name__}: {name}")
    if param.has_default:
        return param.default
    if param.is_constexpr:
        raise ShapeError(f"{variant.kernel.__name__}: {name} is a tl.constexpr: give its value among the constants")
    raise ShapeError(f"{variant.kernel.__name__}: {name} has neither a type nor a constant: {_TYPE}")


def _hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _check_options(variant, backend) -> None:
    """What Triton would say of the options at a launch, with the kernel's name."""
    where = f"{variant.kernel.__name__}: options={dict(variant.options)!r}"
    try:
        known = vars(backend.parse_options(dict(variant.options)))
    except Exception as error:  # asserts, and whatever a wrong type leads to
        raise ShapeError(f"{where}: {error}: give them as a launch does") from None
    if unknown := [name for name in variant.options if name not in known]:
        raise ShapeError(f"{where}: Triton has no option {', '.join(unknown)}: give num_warps, num_stages and the like")


def _is_divisible(variant, name: str) -> bool:
    if variant.divisible_by_16 is None:
        return str(variant.types[name]).startswith("*")
    return name in variant.divisible_by_16


def _example(kind, divisible: bool, where: str):
    """A value that Triton gives this type."""
    if isinstance(kind, tuple):
        return tuple(_example(each, divisible, where) for each in kind)
    if isinstance(kind, type) or type(kind).__name__ == "dtype":  # of torch, Triton or NumPy
        raise ShapeError(f"{where} has type {kind!r}: {_TYPE}")
    if not isinstance(kind, str):
        return kind
    if kind.startswith("*"):
        return _pointer(kind[1:], 16 if divisible else 8, where)
    if described := _DESCRIPTOR.fullmatch(kind):
        base = _pointer(described[1], 16, where)
        try:
            return _descriptor(base, [int(size) for size in described[2].split(",")], described[3])
        except (ValueError, AssertionError, TypeError, SyntaxError) as error:
            raise ShapeError(f"{where} has type {kind!r}, which is no descriptor: {error}") from None
    if kind in _INTEGERS or kind in _NARROW:
        return _INTEGERS.get(kind, _INTEGERS["i32"])[divisible]
    if kind in ("i1", "u1"):
        return True
    if kind.startswith(("fp", "bf")):
        return 0.5
    raise ShapeError(f"{where} has type {kind!r}: {_TYPE}")


def _pointer(element: str, address: int, where: str):
    """Stands for a tensor of that element type at an address like that."""
    import torch
    from triton._utils import type_canonicalisation_dict
    from triton.runtime.jit import MockTensor

    element = element.removeprefix("k")
    names = [name for name, found in type_canonicalisation_dict.items() if found == element and hasattr(torch, name)]
    if not names:
        raise ShapeError(f"{where} points to {element!r}, which no torch dtype is to Triton: write it as '*bf16'")
    mock = MockTensor(getattr(torch, names[0]))
    mock.data_ptr = lambda: address
    return mock


def _descriptor(base, block: list[int], layout: str | None):
    """A tensor of one block, its rows 1024 elements apart so that any of them may start there. `layout` is what stands
    behind the name in the text of a Gluon layout: "(swizzle_byte_width=128, ...)".
    """
    strides = [1024 ** (len(block) - 1 - axis) for axis in range(len(block))]
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, block, strides, block)
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    said = {each.arg: ast.literal_eval(each.value) for each in ast.parse(f"f{layout}", mode="eval").body.keywords}
    return TensorDescriptor(base, block, strides, block, NVMMASharedLayout(**said))


def _check(variant, param, value, specialized: tuple) -> None:
    """The declaration says what a launch would have compiled, or it is wrong."""
    found, said = specialized[0], variant.types.get(param.name)
    if param.name in variant.constants or not isinstance(said, (str, tuple)) or param.is_constexpr:
        return
    if not _agrees(said, found):
        raise ShapeError(f"{variant.kernel.__name__}: {param.name} is declared {said}, a launch makes it {found}")


def _agrees(said, found) -> bool:
    if isinstance(said, tuple):
        return isinstance(found, tuple) and len(said) == len(found) and all(map(_agrees, said, found))
    return not isinstance(said, str) or {"i1": "u1"}.get(said, said) == found.replace("*k", "*")
