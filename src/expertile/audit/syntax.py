"""Expressions as text and as dotted names."""

from __future__ import annotations

import ast

_SHOWN = 72  # characters of an expression in an explanation


def show(node: ast.expr | None) -> str:
    """The expression as text, cut where it is long."""
    text = "" if node is None else " ".join(ast.unparse(node).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def dotted(node: ast.expr) -> str:
    """ "a.b" of such an expression, "" of any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_shape(node: ast.expr) -> bool:
    """x.shape, x.size()"""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "size" and not (node.args or node.keywords)
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def is_size(node: ast.expr | None) -> bool:
    """x.shape, x.shape[0], x.size(0), x.numel(), or one of those by a condition."""
    if isinstance(node, ast.IfExp):
        return is_size(node.body) and is_size(node.orelse)
    if isinstance(node, ast.Subscript):
        return is_shape(node.value)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("size", "numel")
    return isinstance(node, ast.Attribute) and node.attr == "shape"
