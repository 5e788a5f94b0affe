"""Triton and Gluon kernels in a module's syntax tree: their parameters, and what is done with them inside."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property

from .syntax import called, dotted

_JIT = {"jit"}
_LIBRARIES = {"triton", "gluon", "tl"}
_WIDTHS = {
    "int1",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "i32",
    "i64",
    "u32",
    "u64",
    "int",
}
#: Calls that take an address first, and those of them that give one back.
_ACCESSES = {"load", "store", "make_block_ptr", "make_tensor_descriptor", "async_copy_global_to_shared", "prefetch"}
_PASSING = {"make_block_ptr", "make_tensor_descriptor", "advance", "cast"}
#: Calls whose result says nothing of an argument's divisibility.
_ENDING = {"load", "where", "cdiv", "min", "max", "minimum", "maximum", "range", "clamp"}
_BUILTINS = {"range", "min", "max", "cdiv", "abs", "int", "float", "bool", "len", "print", "isinstance"}
_SHAPED = {"make_block_ptr", "make_tensor_descriptor"}


@dataclass(frozen=True)
class Parameter:
    """
    constexpr    part of the key by its value
    width        annotated as an integer of fixed width: 32 or 64 bits are no question
    specialised  by ==1 and, if `aligned`, by divisibility by 16
    pointer      used as the base of an address
    addresses    enters an address otherwise, as a stride does
    handed_on    given to a function of the user's, which is not followed
    """

    name: str
    line: int
    constexpr: bool = False
    width: bool = False
    specialised: bool = True
    aligned: bool = True
    pointer: bool = False
    addresses: bool = False
    handed_on: bool = False


@dataclass(frozen=True)
class Kernel:
    """
    uses         names in it that may be other kernels
    keys         names that an autotuner benchmarks anew for
    heuristics   constexpr -> the expression and parameter of the lambda that computes it from the arguments
    """

    name: str
    path: str
    line: int
    parameters: tuple[Parameter, ...]
    end_line: int = 0
    uses: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    heuristics: dict[str, ast.Lambda] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}


def kernels_in(functions: list[ast.FunctionDef], tree: ast.Module, path: str, jits: frozenset[str]) -> list[Kernel]:
    """Those of a module's functions that have a jit decorator of Triton or Gluon, nested ones too, by their lines."""
    constants = _lists(tree)
    found = [node for node in functions if any(is_jit(each, jits) for each in node.decorator_list)]
    return sorted((_kernel(node, path, constants) for node in found), key=lambda kernel: kernel.line)


def is_jit(decorator: ast.expr, names: frozenset[str] = frozenset()) -> bool:
    """`@triton.jit`, `@gluon.jit`, with or without a call, or what else of `names` means one of them."""
    name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
    library, _, last = name.rpartition(".")
    return name in names or (last in _JIT and library in _LIBRARIES)


def jit_names(imports: list[ast.alias], froms: list[ast.ImportFrom], tree: ast.Module) -> frozenset[str]:
    """Local names of jit: by `from triton import jit as j`, `import triton as tr` and, in the module, `j = tr.jit`."""
    from_triton = [a for node in froms if (node.module or "").split(".")[0] == "triton" for a in node.names]
    found = {a.asname or a.name for a in from_triton if a.name in _JIT}
    libraries = [a.asname or a.name for a in imports if a.name.split(".")[0] == "triton"]
    libraries += [a.asname or a.name for a in from_triton if a.name in _LIBRARIES]
    found |= {f"{library}.{name}" for library in libraries for name in _JIT}
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_jit(node.value, frozenset(found)) and dotted(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _kernel(node: ast.FunctionDef, path: str, constants: dict[str, list]) -> Kernel:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    never: set[str] = set()
    unaligned: set[str] = set()
    keys: list[str] = []
    everything = {arg.arg for arg in arguments}  # of a list that cannot be read: nothing is claimed
    heuristics: dict[str, ast.Lambda] = {}
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in decorator.keywords if keyword.arg}
        kind = called(decorator)
        for option, into in (("do_not_specialize", never), ("do_not_specialize_on_alignment", unaligned)):
            listed = _named(given.get(option), arguments, constants)
            into |= everything if listed is None else listed
        if kind == "autotune":
            key = given.get("key") or (decorator.args[1] if len(decorator.args) > 1 else None)
            keys += sorted(_named(key, arguments, constants) or ())
        if kind == "heuristics":
            table = given.get("values") or (decorator.args[0] if decorator.args else None)
            heuristics |= _lambdas(table)
    uses = Uses(node)
    parameters = tuple(
        Parameter(
            arg.arg,
            arg.lineno,
            constexpr="constexpr" in _text(arg.annotation),
            width=_text(arg.annotation).strip("'\"").split(".")[-1] in _WIDTHS,
            specialised=arg.arg not in never,
            aligned=arg.arg not in unaligned,
            pointer=arg.arg in uses.pointers or arg.arg.lower().endswith(("ptr", "ptrs", "_desc", "descriptor")),
            addresses=arg.arg in uses.addresses,
            handed_on=arg.arg in uses.handed_on,
        )
        for arg in arguments
    )
    mentioned = frozenset(dotted(each) for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))
    return Kernel(node.name, path, node.lineno, parameters, node.end_lineno or 0, mentioned, tuple(keys), heuristics)


def _named(value: ast.expr | None, arguments: list[ast.arg], constants: dict[str, list]) -> set[str] | None:
    """Arguments named in a list by name or by index; None where it cannot be read."""
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return set()
    entries = constants.get(value.id) if isinstance(value, ast.Name) else _entries(value)
    if entries is None:
        return None
    names = {entry for entry in entries if isinstance(entry, str)}
    return names | {arguments[e].arg for e in entries if isinstance(e, int) and 0 <= e < len(arguments)}


def _entries(node: ast.expr) -> list | None:
    """Of a constant, or a list, tuple or set of constants."""
    if isinstance(node, ast.Constant):
        return [node.value]
    if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return None
    found = [each.value for each in node.elts if isinstance(each, ast.Constant)]
    return found if len(found) == len(node.elts) else None


def _lists(tree: ast.Module) -> dict[str, list]:
    """Module-level lists of constants by name."""
    found: dict[str, list] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and (entries := _entries(node.value)) is not None:
            found |= {target.id: entries for target in node.targets if isinstance(target, ast.Name)}
    return found


def _lambdas(table: ast.expr | None) -> dict[str, ast.Lambda]:
    if not isinstance(table, ast.Dict):
        return {}
    pairs = zip(table.keys, table.values, strict=True)
    return {str(k.value): v for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Lambda)}


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


class Uses:
    """Which arguments of a kernel are bases of addresses, and which enter addresses otherwise.

    Followed through assignments in the order of the text, so a name stands for what it was last made of. The trail is
    that of divisibility: sums, products and remainders carry it on; comparisons (masks), divisions, bounds and choices
    end it.
    """

    def __init__(self, node: ast.FunctionDef):
        names = {arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
        self.base = {name: {name} for name in names}  # name -> arguments it may point into
        self.made = {name: {name} for name in names}  # name -> arguments it was computed from
        self.pointers: set[str] = set()
        self.addresses: set[str] = set()
        self.handed_on: set[str] = set()
        for _ in range(2):  # what a loop carries round
            for statement in node.body:
                self._statement(statement)
        self.addresses -= self.pointers

    def _statement(self, node: ast.AST) -> None:
        """What a statement reads comes before what it assigns; statements inside it come last."""
        inside = [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler))]
        for child in ast.iter_child_nodes(node):
            if child not in inside:
                for each in ast.walk(child):
                    if isinstance(each, ast.Call):
                        self._call(each)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._assign(node)
        for child in inside:
            self._statement(child)

    def _assign(self, node) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    more = isinstance(node, ast.AugAssign)
                    self.made[name.id] = self._sources(node.value) | (self.made.get(name.id, set()) if more else set())
                    if not more:
                        self.base[name.id] = self._bases(node.value)

    def _call(self, node: ast.Call) -> None:
        name = called(node)
        if isinstance(node.func, ast.Name) and name not in _BUILTINS:
            self.handed_on |= set().union(*(self._sources(each) for each in node.args), set())
        if name not in _ACCESSES and not name.startswith("atomic_"):
            return
        named = [k.value for k in node.keywords if k.arg in ("pointer", "base", "shape", "strides")]
        for value in [*(node.args if name in _SHAPED else node.args[:1]), *named]:
            bases = self._bases(value)
            self.pointers |= bases
            self.addresses |= self._sources(value) - bases

    def _bases(self, node: ast.expr) -> set[str]:
        """Arguments that may be what an address is an offset from: the left end of its sum."""
        if isinstance(node, ast.Name):
            return self.base.get(node.id, set())
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            return self._bases(node.left)
        if isinstance(node, ast.IfExp):
            return self._bases(node.body) | self._bases(node.orelse)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return self._bases(node.func.value)
        if isinstance(node, ast.Call) and node.args and called(node) in _PASSING:
            return self._bases(node.args[0])
        return set()

    def _sources(self, node: ast.AST) -> set[str]:
        """Arguments whose value the expression carries on."""
        if isinstance(node, ast.Name):
            return self.made.get(node.id, set())
        if isinstance(node, ast.Compare) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div))
        ):
            return set()
        if isinstance(node, ast.Call):
            if called(node) in _ENDING:
                return set()
        return set().union(*(self._sources(child) for child in ast.iter_child_nodes(node)), set())
