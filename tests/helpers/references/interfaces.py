"""Compares the names and keywords that code uses of a library with that library's Python sources.

Nothing is imported: both sides are syntax trees. So libraries can be checked that only a GPU's machine
can load.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

Node = ast.AST
UNKNOWN = ast.Pass()  # what a name stands for where it comes from another library, or from compiled code
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Library:
    """The modules of a library, read from the folder that holds its package."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self._modules: dict[str, dict[str, Node | str] | None] = {}

    def module(self, name: str) -> dict[str, Node | str] | None:
        """{name: its definition, or the dotted name that it was imported as} of a module; None without it."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not file.is_file():
                self._modules[name] = {} if path.is_dir() else None
            else:
                inside = name if path.is_dir() else name.rpartition(".")[0]
                self._modules[name] = {}
                self._modules[name] = dict(self._bound(ast.parse(file.read_text()).body, inside))
        return self._modules[name]

    def _bound(self, body: list[ast.stmt], package: str) -> Iterator[tuple[str, Node | str]]:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield node.name, node
                case ast.Import():
                    for name in node.names:
                        yield (
                            (name.asname or name.name.partition(".")[0]),
                            (name.name if name.asname else name.name.partition(".")[0]),
                        )
                case ast.ImportFrom():
                    base = source_of(node, package)
                    for name in node.names:
                        if name.name == "*":
                            yield from (self.module(base) or {}).items()
                        else:
                            yield name.asname or name.name, f"{base}.{name.name}"
                case ast.Assign():
                    for target in node.targets:
                        for leaf in ast.walk(target):
                            if isinstance(leaf, ast.Name):
                                yield leaf.id, UNKNOWN
                case ast.AnnAssign() if isinstance(node.target, ast.Name):
                    yield node.target.id, UNKNOWN
                case _:
                    for field in ("body", "orelse", "finalbody"):
                        yield from self._bound(getattr(node, field, []), package)
                    for handler in getattr(node, "handlers", []):
                        yield from self._bound(handler.body, package)

    def find(self, dotted: str) -> Node | None:
        """The definition of a dotted name; UNKNOWN where the sources do not tell; None if it is missing."""
        if dotted.partition(".")[0] != self.package:
            return UNKNOWN
        head, tail = dotted, list[str]()
        while (names := self.module(head)) is None:
            head, _, last = head.rpartition(".")
            tail.insert(0, last)
        if not tail:
            return UNKNOWN
        if tail[0] not in names:
            return UNKNOWN if "__getattr__" in names else None
        entry = names[tail[0]]
        if isinstance(entry, str):
            return UNKNOWN if entry == dotted else self.find(".".join([entry, *tail[1:]]))
        return entry if len(tail) == 1 else UNKNOWN  # a class's own attributes may be made anywhere

    def parameters(self, definition: Node, method: str = "__init__") -> Parameters | None:
        """The parameters of a function, or of a class's method; None where the sources do not tell."""
        if isinstance(definition, Definition):
            decorated = [ast.unparse(d) for d in definition.decorator_list]
            plain = not any("contextmanager" not in d and "lru_cache" not in d for d in decorated)
            return Parameters.of(definition, bound=False) if plain else None
        if not isinstance(definition, ast.ClassDef):
            return None
        for node in definition.body:
            if isinstance(node, Definition) and node.name == method:
                return Parameters.of(node, bound=True)
        if any("dataclass" in ast.unparse(d) for d in definition.decorator_list) and not definition.bases:
            fields = [
                node.target.id
                for node in definition.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            ]
            return Parameters(fields, {*fields}, None, False)
        return None


@dataclass(frozen=True)
class Parameters:
    positional: list[str]
    named: set[str]
    rest: str | None  # *args
    any_name: bool  # **kwargs

    @staticmethod
    def of(function: Definition, *, bound: bool) -> Parameters:
        of = function.args
        positional = [a.arg for a in (*of.posonlyargs, *of.args)][bound:]
        named = {*positional, *(a.arg for a in of.kwonlyargs)}
        return Parameters(positional, named, of.vararg and of.vararg.arg, of.kwarg is not None)


def source_of(node: ast.ImportFrom, package: str) -> str:
    """The dotted module that `from ... import` names, in a module of `package`."""
    parents = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def imported(tree: Node) -> Iterator[tuple[str, str]]:
    """(name in the file, dotted name) of everything that it imports absolutely, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                yield (name.asname, name.name) if name.asname else (top, top)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


class Uses(ast.NodeVisitor):
    """The problems of one file that uses `library`, as `line: what is wrong`."""

    def __init__(self, library: Library, file: Path, versions: str = "") -> None:
        self.library, self.problems = library, list[str]()
        self.used = 0  # names that were looked up
        self._guarded = 0
        self._functions: list[Node] = []
        self._classes: list[ast.ClassDef] = []
        tree = ast.parse(file.read_text())
        if versions:
            tree = Newest(Version(versions)).visit(tree)
        self._names = dict(imported(tree))
        self.visit(tree)

    def _dotted(self, node: Node) -> str | None:
        """The dotted name of the library that an expression is; None for any other."""
        parts = list[str]()
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or (base := self._names.get(node.id)) is None:
            return None
        full = ".".join([base, *parts])
        return full if full.partition(".")[0] == self.library.package else None

    def _check(self, dotted: str, node: Node) -> None:
        self.used += 1
        if self.library.find(dotted) is None and not self._guarded:
            self.problems.append(f"{node.lineno}: there is no {dotted}")  # type: ignore[attr-defined]

    def visit_Try(self, node: ast.Try) -> None:
        catches = " ".join(ast.unparse(h.type) if h.type else "Exception" for h in node.handlers)
        optional = bool(re.search(r"\b(ImportError|ModuleNotFoundError|AttributeError|Exception)\b", catches))
        self._guarded += optional
        for child in node.body:
            self.visit(child)
        self._guarded -= optional
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(child)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level and node.module.partition(".")[0] == self.library.package:
            for name in node.names:
                self._check(f"{node.module}.{name.name}", node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (dotted := self._dotted(node)) is not None:
            self._check(dotted, node)
        else:
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        shown, parameters = ast.unparse(node.func), None
        if (dotted := self._dotted(node.func)) is not None:
            definition = self.library.find(dotted)
            parameters = None if definition is None else self.library.parameters(definition)
        elif (method := re.fullmatch(r"super\(\)\.(\w+)", shown)) and self._classes:
            base = next(iter(map(self._dotted, self._classes[-1].bases)), None)
            definition = None if base is None else self.library.find(base)
            if definition is not None:
                shown, parameters = f"{base}.{method[1]}", self.library.parameters(definition, method[1])
        if parameters is None:
            return
        self.used += 1
        used = {k.arg for k in node.keywords if k.arg} | self._collected(node)
        if not parameters.any_name and (unknown := used - parameters.named):
            self.problems.append(f"{node.lineno}: {shown} takes no {', '.join(sorted(unknown))}")
        positional = [a for a in node.args if not isinstance(a, ast.Starred)]
        if parameters.rest is None and len(positional) > len(parameters.positional):
            most = len(parameters.positional)
            self.problems.append(f"{node.lineno}: {shown} takes {most} positional arguments")

    def _collected(self, node: ast.Call) -> set[str]:
        """The names that this function puts into the dictionaries that it passes as `**name`."""
        passed = {k.value.id for k in node.keywords if k.arg is None and isinstance(k.value, ast.Name)}
        if not passed or not self._functions:
            return set()
        keys_seen = set[str]()
        for inner in ast.walk(self._functions[-1]):
            match inner:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name in passed:
                    keys_seen |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))]
                ) if name in passed:
                    keys_seen.add(key)
        return keys_seen


class Newest(ast.NodeTransformer):
    """Leaves of `if is_te_min_version("2.1.0"): ... else: ...` only what this version runs."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def visit_If(self, node: ast.If) -> Node | list[ast.stmt]:
        self.generic_visit(node)
        taken = self._truth(node.test)
        if taken is None:
            return node
        return (node.body if taken else node.orelse) or [ast.Pass()]

    def visit_IfExp(self, node: ast.IfExp) -> Node:
        self.generic_visit(node)
        taken = self._truth(node.test)
        return node if taken is None else (node.body if taken else node.orelse)

    def _truth(self, test: ast.expr) -> bool | None:
        match test:
            case ast.UnaryOp(op=ast.Not()):
                inner = self._truth(test.operand)
                return None if inner is None else not inner
            case ast.BoolOp():
                known = [self._truth(value) for value in test.values]
                decisive = isinstance(test.op, ast.Or)
                return decisive if decisive in known else (None if None in known else not decisive)
            case ast.Call(func=ast.Name(id="is_te_min_version"), args=[ast.Constant(value=str(wanted)), *_]):
                return self._version >= Version(wanted)
            case ast.Compare(left=ast.Call(func=ast.Name(id="get_te_version")), comparators=[other]):
                if numbers := re.search(r"Version\('([\d.]+)'\)", ast.unparse(other)):
                    wanted = Version(numbers[1])
                    match test.ops[0]:
                        case ast.Lt():
                            return self._version < wanted
                        case ast.GtE():
                            return self._version >= wanted
        return None
