"""Sizes and strides of tensors, and what their methods leave of them."""

from __future__ import annotations

import ast

from . import names
from .syntax import dotted, show
from .values import (
    FEATURE_BITS,
    UNKNOWN,
    Tensor,
    Value,
    contiguous,
    count,
    feature,
    multiply,
    product,
)

#: Methods that give the same sizes, and those that give some that are not followed.
SAME = {
    "contiguous",
    "to",
    "cuda",
    "float",
    "half",
    "bfloat16",
    "int",
    "long",
    "clone",
    "detach",
    "type",
    "abs",
    "clamp",
}
_OTHER = {"unsqueeze", "squeeze", "flatten", "expand", "narrow", "select", "repeat", "sum", "chunk", "split"}
_ORDER = {"transpose", "permute", "t", "swapaxes"}


def guessed(node: ast.expr) -> Tensor:
    """A tensor of which only the name is known: the last part of a dotted one."""
    name = dotted(node)
    return named(name.split(".")[-1], name or show(node))


def named(name: str, shown: str = "") -> Tensor:
    return Tensor(shown or name, names.is_activation(name), names.is_narrow(name))


def of_shape(name: str, shape: tuple[Value, ...], strides: tuple[Value, ...] | None = None) -> Tensor:
    """As torch allocates it, unless strides are given."""
    return Tensor(name, bool(shape) and shape[0].varies, False, shape, strides or contiguous(shape))


def like(tensor: Tensor, name: str) -> Tensor:
    """empty_like and its kind: contiguous."""
    strides = contiguous(tensor.shape) if tensor.shape else None
    return Tensor(name, tensor.activation, tensor.narrow, tensor.shape, strides)


def dimension(tensor: Tensor, index: int, rank: int = 0) -> Value:
    """`rank`: of how many sizes, where that is known."""
    if tensor.shape is not None:
        return tensor.shape[index] if -len(tensor.shape) <= index < len(tensor.shape) else UNKNOWN
    if index == 0 and tensor.activation:
        return count(f"the first size of {tensor.name}")
    if tensor.narrow or not (index == -1 or (index == 1 and rank == 2)):
        return UNKNOWN
    return feature() if tensor.activation and index == -1 else Value(bits=FEATURE_BITS)


def stride(tensor: Tensor, index: int) -> Value:
    """Of a tensor whose strides are not known, nothing is claimed: most are rows of a fixed width."""
    strides = tensor.strides
    return strides[index] if strides is not None and -len(strides) <= index < len(strides) else UNKNOWN


def elements(tensor: Tensor) -> Value:
    if tensor.shape is not None:
        return product(list(tensor.shape))
    if not tensor.activation:
        return UNKNOWN
    rows = count(f"the number of elements of {tensor.name}")
    return multiply(rows, UNKNOWN if tensor.narrow else feature())


def method(name: str, node: ast.Call, tensor: Tensor, arguments: list[Value], sure: bool) -> Value | None:
    """What tensor.name(...) gives. Where it is not `sure` to be a tensor, None of all but what only tensors have."""
    index = arguments[0].constant if arguments and isinstance(arguments[0].constant, int) else None
    text = show(node)
    if name == "size":
        return Value(tensor=tensor, items=tensor.shape) if index is None else dimension(tensor, index).step(text)
    if name == "stride":
        return Value(items=tensor.strides) if index is None else stride(tensor, index).step(text)
    if name == "numel":
        return elements(tensor).step(text)
    if name in SAME:
        strides = contiguous(tensor.shape) if name == "contiguous" and tensor.shape else tensor.strides
        return Value(tensor=Tensor(text, tensor.activation, tensor.narrow, tensor.shape, strides))
    if not sure:
        return None
    if name in ("view", "reshape"):
        shape = arguments[0].items if len(arguments) == 1 and arguments[0].items else tuple(arguments)
        return Value(tensor=_viewed(text, tensor, shape))
    if name == "as_strided" and len(arguments) > 1 and arguments[0].items and arguments[1].items:
        return Value(tensor=of_shape(text, arguments[0].items, arguments[1].items))
    if name in _ORDER:
        return Value(tensor=permuted(text, tensor, name, [each.constant for each in arguments]))
    return Value(tensor=Tensor(text)) if name in _OTHER else None


def _viewed(name: str, tensor: Tensor, shape: tuple[Value, ...]) -> Tensor:
    """A size of -1 follows the tokens where the tensor's first one does."""
    if not shape:
        return Tensor(name, tensor.activation, tensor.narrow)
    sizes = []
    for place, size in enumerate(shape):
        if size.known and size.constant == -1:
            size = count(f"{name}: its -1") if tensor.activation and place == 0 else UNKNOWN
        sizes.append(size)
    return of_shape(name, tuple(sizes))


def permuted(name: str, tensor: Tensor, how: str, order: list) -> Tensor:
    """transpose, swapaxes, permute and t, where the sizes are known."""
    if tensor.shape is None or not all(isinstance(each, int) for each in order):
        return Tensor(name)
    rank = len(tensor.shape)
    places = list(range(rank))
    if how == "permute" and sorted(each % rank for each in order) == places:
        places = [each % rank for each in order]
    elif how in ("transpose", "swapaxes") and len(order) == 2:
        one, other = (each % rank for each in order)
        places[one], places[other] = places[other], places[one]
    elif how == "t" and rank == 2:
        places.reverse()
    else:
        return Tensor(name)
    shape = tuple(tensor.shape[place] for place in places)
    strides = tuple(tensor.strides[place] for place in places) if tensor.strides else None
    return Tensor(name, shape[0].varies, tensor.narrow, shape, strides)
