"""The rules of the house that no linter knows: rooms, sizes, doors, circles, openings of docstrings."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

from megatron_gvpo.settings.transports import TRANSPORTS

PACKAGE = ROOT / "megatron_gvpo"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "plugins" not in path.parts)
SOURCES = [
    *MODULES,
    *(path for room in ("tests", "benchmarks", "tools") for path in (ROOT / room).rglob("*.py")),
]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_at_most_a_dozen_modules_lie_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= 12


def test_no_room_is_crowded():
    crowded = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(room): count for room, count in crowded.items() if count > 16} == {}


def test_no_file_is_long():
    assert [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 400] == []


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by name alone: two files of one name fail wherever one process collects both."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path) for path in MODULES}


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that an import of the module runs: none of functions, none for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from run_at_import(other)
            continue
        yield child
        yield from run_at_import(child)


def imports(path: Path) -> set[str]:
    """The dotted names that an import of this module imports; `from a import b` is a.b if that exists."""
    found: set[str] = set()
    for node in run_at_import(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & NAMES or {node.module}
    return found


def test_no_imports_go_in_a_circle():
    graph = {dotted(path): (imports(path) & NAMES) - {dotted(path)} for path in MODULES}
    while leaves := [name for name, found in graph.items() if not found]:
        graph = {name: found - set(leaves) for name, found in graph.items() if found}
    assert graph == {}, "these import one another, or what does"


def test_only_its_door_imports_megatron():
    pattern = re.compile(r"^\s*(from|import) megatron[. ]", re.M)
    found = [path.relative_to(PACKAGE) for path in MODULES if pattern.search(path.read_text())]
    # A rehearsal replaces functions of megatron-core that would wait for a device or for other ranks.
    assert {path.parts[0] for path in found} == {"megatron", "rehearsal"}


def names_compared(path: Path) -> Iterator[tuple[int, str]]:
    """The strings with which the module's code compares, each with its line: ==, in, match."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        else:
            continue
        for part in compared:
            for one in part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield node.lineno, one.value


def test_no_check_asks_for_a_transports_name():
    """A new transport is an entry in TRANSPORTS: its traits say what the checks want to know."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        for line, name in names_compared(path)
        if name in TRANSPORTS
    ]
    assert found == []


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_docstrings_name_the_thing_first():
    opening = re.compile(r"(What|Of|Whether|That)\b")
    found = [
        f"{path}: {text.splitlines()[0]}"
        for path in SOURCES
        for text in docstrings(path)
        if opening.match(text)
    ]
    assert found == []
