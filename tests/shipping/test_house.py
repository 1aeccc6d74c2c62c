"""The rules of the house that no linter knows: rooms, sizes, doors, circles, openings of docstrings."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.paths import ROOT

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


LONGEST_FILE, LONGEST_FUNCTION = 600, 54  # lines; a function's without its docstring


def test_a_file_is_one_idea():
    """CONTRIBUTING.md has the rule. What a file explains is never cut to meet this number."""
    long = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in long.items() if lines > LONGEST_FILE} == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The functions of a module, each with its lines of code: decorators and docstring do not count."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begins = node.body[0].end_lineno if ast.get_docstring(node) is not None else node.lineno
            yield (
                f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
                (node.end_lineno or 0) - (begins or 0),
            )


def test_a_function_can_be_held_in_mind():
    long = [(name, lines) for path in MODULES for name, lines in functions(path)]
    assert [(name, lines) for name, lines in long if lines > LONGEST_FUNCTION] == []


def test_a_room_says_what_it_is():
    """Each folder's `__init__.py` begins with a sentence."""
    rooms = {path.parent for path in MODULES}
    assert [str(room) for room in rooms if not (room / "__init__.py").read_text().strip()] == []


@pytest.mark.parametrize(
    ("importer", "imported", "words"),
    [
        ("core/errors.py", "runs.lock", "megatron_gvpo.core.errors -> megatron_gvpo.runs.lock"),
        ("settings/rules.py", "settings.config", "No cycles are allowed in megatron_gvpo.settings"),
    ],
)
def test_an_import_that_looks_up_or_closes_a_circle_is_refused(
    importer: str, imported: str, words: str, tmp_path: Path
):
    """The contracts in pyproject.toml, which `make lint` checks, see imports for types, too."""
    shutil.copytree(PACKAGE, tmp_path / "megatron_gvpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    run = partial(subprocess.run, lint, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    few = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    assert "2 kept, 0 broken" in run(env=few).stdout
    with (tmp_path / "megatron_gvpo" / importer).open("a") as file:
        file.write(
            f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megatron_gvpo.{imported}\n"
        )
    broken = run(env=few)
    assert broken.returncode == 1 and words in broken.stdout


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
    modules: set[str] = set()
    for node in run_at_import(tree(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= members & NAMES or {node.module}
    return modules


def test_no_imports_go_in_a_circle():
    graph = {dotted(path): (imports(path) & NAMES) - {dotted(path)} for path in MODULES}
    while leaves := [name for name, imported in graph.items() if not imported]:
        graph = {name: imported - set(leaves) for name, imported in graph.items() if imported}
    assert graph == {}, "these import one another, or what does"


TARGET = re.compile(r"megatron_gvpo[\w.]*:\w+")
FOLDERS = {"megatron_gvpo": ROOT, "helpers": ROOT / "tests", "lib": ROOT / "benchmarks"}  # of our packages


def modules_named(path: Path) -> Iterator[tuple[int, str]]:
    """The modules that a file imports, in functions too, or names as `module:attribute`, with their lines."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(name), level=0):
                yield node.lineno, name
            case ast.Constant(value=str(text)) if path in MODULES and TARGET.fullmatch(text):
                yield node.lineno, text.partition(":")[0]


def test_imports_of_our_own_modules_find_them():
    """mypy ignores imports that it does not find, and a module's path in a string is read in a run alone."""
    missing = []
    for path in [*SOURCES, *(ROOT / "examples").rglob("*.py")]:
        for line, name in modules_named(path):
            if (folder := FOLDERS.get(name.partition(".")[0])) is not None:
                module = folder / name.replace(".", "/")
                if not module.is_dir() and not module.with_suffix(".py").is_file():
                    missing.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert missing == []


def test_only_its_door_imports_megatron():
    pattern = re.compile(r"^\s*(from|import) megatron[. ]", re.M)
    paths = [path.relative_to(PACKAGE) for path in MODULES if pattern.search(path.read_text())]
    # The one exception replaces functions of megatron-core by what other ranks and kernels would give.
    assert [str(path) for path in paths if path.parts[0] != "megatron"] == ["rehearsal/stand_ins.py"]


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
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        for line, name in names_compared(path)
        if name in TRANSPORTS
    ]
    assert lines == []


VAGUE = {"said", "found", "held", "given", "told", "theirs", "mine", "place", "there", "asked"}
VAGUE |= {"kept", "ours", "whole", "places", "left"}
PUBLIC = {  # these names stay, because something outside the code reads them
    "megatron_gvpo/algorithms/members/off_policy.py: place",  # a key of the configuration
    "megatron_gvpo/algorithms/members/hinted.py: place",  # a key of the configuration
    "megatron_gvpo/cluster/doctor.py: found",  # a key of `doctor --json`
    "megatron_gvpo/turns.py: given",  # methods of users read Turn.given, and rollout files have the key
}


def names_bound(path: Path) -> set[str]:
    """The variables, parameters, attributes, functions and captured patterns that a module's code names."""
    names = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case (
                ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.alias(asname=str(name))
            ):
                names.add(name)
    return names


def test_names_are_nouns_of_the_field():
    """`found`, `held` and their like say what happened to a thing, not what it is: name the thing."""
    vague = set()
    for room in ("megatron_gvpo", "examples", "tools", "benchmarks", "tests"):
        for path in (ROOT / room).rglob("*.py"):
            names = {name.strip("_") for name in names_bound(path)}
            sides = {"left"} if names & {"right", "top"} else set()  # of a box, or operands
            vague |= {f"{path.relative_to(ROOT)}: {name}" for name in names & VAGUE - sides}
    assert vague == PUBLIC


def test_arguments_are_not_unpacked_from_a_tuple_written_beside_them():
    """`f(*(a, b), c)` serves the formatter, and no reader."""
    unpacked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and any(isinstance(a, ast.Starred) and isinstance(a.value, ast.Tuple | ast.List) for a in node.args)
    ]
    assert unpacked == []


def test_no_two_classes_have_the_same_name():
    """A reader who searches for a class finds one thing, plugins of the engines included."""
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_thing_is_not_another_rather_than_no_other():
    """Messages and comments say "is not a directory"; "there is no directory" is plain, and may stay."""
    odd = re.compile(r"(?<!there )(?<!There )\b(is|are|was|were) no (?!longer|more)")
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if odd.search(line)
    ]
    assert lines == []


# Rooms whose matter is the configuration as a whole: its rules, records, predictions and commands.
ABOUT_CONFIGURATIONS = (
    "settings",
    "checks",
    "runs",
    "planner",
    "inspection",
    "rehearsal",
    "replay",
    "cluster",
    "cli",
)
# The functions of other rooms that read nearly all of it, or hand it on in parts.
TAKES_A_CONFIGURATION = {
    "huggingface/card.py: ModelCards.__init__",  # every section that names a model
    "data/task.py: load_task",  # the sections that say what a prompt, a response and an answer are
    "megatron/policy.py: Policy.of",  # hands on seven sections
    "sampling/rollouts.py: Rollouts.__init__",  # builds the engine, the reward workers and their servers
    "training/components.py: Components.__init__",  # builds everything
    "training/trainer.py: Trainer.__init__",
    "training/evaluate.py: evaluate",
    "training/evaluate.py: evaluate_named",
    "training/evaluate.py: _load",
    "training/conversion.py: checkpoint_to_hugging_face",  # preflight checks all of it
    "training/ranks.py: choose_ranks",  # the layout is checked, and memory predicted, for each number
    "training/ranks.py: rank_memory",
    "training/ranks.py: warning",
}


def test_each_part_gets_its_own_sections():
    """A function's signature says which sections of the configuration it reads."""
    takers = set()
    for path in MODULES:
        name = path.relative_to(PACKAGE)
        if name.parts[0] in ABOUT_CONFIGURATIONS:
            continue
        for scope in ast.walk(tree(path)):
            if not isinstance(scope, ast.Module | ast.ClassDef):
                continue
            prefix = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
            for node in scope.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    types = [ast.unparse(arg.annotation) for arg in all_arguments(node) if arg.annotation]
                    if any(re.search(r"\bConfig\b", kind) for kind in types):
                        takers.add(f"{name}: {prefix}{node.name}")
    assert takers == TAKES_A_CONFIGURATION


def all_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_docstrings_name_the_thing_first():
    opening = re.compile(r"(What|Of|Whether|That)\b")
    lines = [
        f"{path}: {text.splitlines()[0]}"
        for path in SOURCES
        for text in docstrings(path)
        if opening.match(text)
    ]
    assert lines == []
