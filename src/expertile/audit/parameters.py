"""What a function's own text says of its parameters."""

from __future__ import annotations

import ast

from . import names
from .tensors import named
from .values import UNKNOWN, Value

_TENSOR_ATTRIBUTES = {
    *("shape", "stride", "size", "device", "dtype", "numel", "data_ptr", "view", "contiguous", "is_contiguous", "ndim"),
    *(
        "to",
        "reshape",
        "dim",
        "element_size",
        "unsqueeze",
        "squeeze",
        "transpose",
        "is_cuda",
        "new_empty",
        "untyped_storage",
    ),
}


def tensor_like(node: ast.AST) -> set[str]:
    """Names of which an attribute is used that tensors have."""
    return {
        each.value.id
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.attr in _TENSOR_ATTRIBUTES
    }


def parameter(arg: ast.arg, used_as_tensor: bool) -> Value:
    annotation = "" if arg.annotation is None else ast.unparse(arg.annotation)
    if any(several in annotation.lower() for several in ("list[", "sequence[", "tuple[", "dict[", "iterable[")):
        return UNKNOWN
    if "Tensor" in annotation or (used_as_tensor and not annotation):
        return Value(tensor=named(arg.arg))
    if annotation and "int" not in annotation and annotation not in ("Any", "object"):
        return UNKNOWN
    return names.by_name(arg.arg, f"{arg.arg} is an argument, by its name", letters=True)
