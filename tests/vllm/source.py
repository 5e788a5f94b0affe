"""Source files of one vLLM as ast reads them: what a class defines, takes, sets and calls. Nothing is imported."""

from __future__ import annotations

import ast
from functools import cached_property
from pathlib import Path


class Tree:
    """The source of one version; `changed` replaces text in files, to see that claims notice."""

    def __init__(self, folder: Path, version: str, changed: dict[str, tuple[str, str]] | None = None):
        self.folder, self.changed = folder, changed or {}
        self.version = tuple(map(int, version.split(".")[:2]))
        self._parsed: dict[str, Source] = {}

    def __getitem__(self, path: str) -> Source:
        if path not in self._parsed:
            file = self.folder / path
            assert file.is_file(), f"{path} is gone"
            text = file.read_text(encoding="utf-8")
            if path in self.changed:
                old, new = self.changed[path]
                assert old in text, f"nothing to change: {old!r} is not in {path}"
                text = text.replace(old, new)
            self._parsed[path] = Source(path, text)
        return self._parsed[path]

    def has(self, path: str) -> bool:
        return (self.folder / path).is_file()


class Source:
    """One file, or a class or function in it."""

    def __init__(self, path: str, text: str | None = None, node: ast.AST | None = None):
        self.path, self.node = path, node if node is not None else ast.parse(text)

    def __getattr__(self, name: str) -> Source:
        """The class or function of that name in this body."""
        for node in ast.iter_child_nodes(self.node):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                found = node  # of overloads the last
        if "found" not in locals():
            raise AssertionError(f"{self.path} has no {name}")
        return Source(f"{self.path}: {name}", node=found)

    def defines(self, name: str) -> bool:
        nodes = ast.iter_child_nodes(self.node)
        return any(isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name for node in nodes)

    @property
    def arguments(self) -> list[str]:
        a = self.node.args
        return [each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs)]

    @property
    def required(self) -> list[str]:
        a = self.node.args
        plain = [each.arg for each in (*a.posonlyargs, *a.args)]
        return plain[: len(plain) - len(a.defaults)]

    @property
    def bases(self) -> list[str]:
        return [ast.unparse(base).split(".")[-1] for base in self.node.bases]

    @property
    def fields(self) -> set[str]:
        """Annotated names of a (data)class body and its methods."""
        body = self.node.body
        names = {
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        return names | {node.name for node in body if isinstance(node, ast.FunctionDef)}

    @property
    def values(self) -> dict[str, object]:
        """Constants assigned in a body: members of an enum, names of a module."""
        found = {}
        for node in self.node.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value.value if isinstance(node.value, ast.Constant) else node.value
        return found

    @property
    def abstract(self) -> set[str]:
        methods = [node for node in self.node.body if isinstance(node, ast.FunctionDef)]
        return {m.name for m in methods if any("abstractmethod" in ast.unparse(deco) for deco in m.decorator_list)}

    @cached_property
    def text(self) -> str:
        """Normalised: how ast prints it."""
        return ast.unparse(self.node)

    def calls(self, name: str) -> list[ast.Call]:
        """Calls whose function ends in that name, in order."""
        found = [node for node in ast.walk(self.node) if isinstance(node, ast.Call)]
        found = [node for node in found if ast.unparse(node.func).split(".")[-1] == name]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def sets(self, *attributes: str) -> None:
        """Asserts that self.<attribute> is assigned here."""
        targets = set()
        for node in ast.walk(self.node):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    each = target.elts if isinstance(target, ast.Tuple) else [target]
                    targets |= {ast.unparse(part) for part in each}
        missing = [name for name in attributes if f"self.{name}" not in targets]
        assert not missing, f"{self.path} no longer sets {missing}"
