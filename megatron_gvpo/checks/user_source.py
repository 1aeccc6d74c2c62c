"""The functions and classes of a user's file, by its source alone.

Rewards, environments and programs are imported by workers, which start after the models are loaded. Their
files are checked here before that, and nothing of them runs: of a function or a class there is a stub with
the same arguments and an empty body.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_gvpo.core.user_functions import spec_parts

# If a file uses one of these, only running it shows which names it has.
_DYNAMIC = {"globals", "exec", "setattr"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_source(spec: str) -> Any:
    """A stub of the function or class that `spec` names; None where only running the file can tell.

    Raises ValueError for a file that is missing, is not Python, or lacks the name.
    """
    source, name = spec_parts(spec)
    if not source.endswith(".py"):
        if _is_missing(source.partition(".")[0], Path()):
            raise ValueError(f"importing {source} failed: there is no module {source.partition('.')[0]}")
        return None
    try:
        tree = ast.parse(Path(source).read_bytes(), source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"importing {source} failed: {type(error).__name__}: {error}") from None
    _check_imports(tree, source)
    names = _names(tree)
    if names is None:
        return None
    if name not in names:
        functions = [key for key, node in names.items() if isinstance(node, _Function | ast.ClassDef)]
        raise ValueError(f"{source} has no function {name!r}; it has: {', '.join(functions) or 'none'}")
    stub = _stub(names[name])
    if stub is None:
        return None
    made: dict[str, Any] = {}
    module = ast.fix_missing_locations(ast.Module([stub], []))
    exec(compile(module, source, "exec"), {"__name__": source, "object": object}, made)
    return made[name]


def check_tool(spec: str) -> None:
    """Raises ValueError, beyond `check_source`, for a tool whose arguments lack a type or a description.

    The chat template shows the policy a schema that is made of both. transformers reads the docstring in full
    when the schema is made.
    """
    check_source(spec)
    source, name = spec_parts(spec)
    if not source.endswith(".py"):
        return
    tree = ast.parse(Path(source).read_bytes(), source)
    definitions = {node.name: node for node in tree.body if isinstance(node, _Function)}
    if (node := definitions.get(name)) is None or node.decorator_list:
        return
    text = ast.get_docstring(node) or ""
    for argument in (*node.args.args, *node.args.kwonlyargs):
        problem = None
        if argument.annotation is None:
            problem = "a type, as city: str"
        elif not re.search(rf"^\s*{argument.arg}\s*(\(.*\))?:", text, re.MULTILINE):
            problem = "a line under Args: in the docstring"
        if problem:
            raise ValueError(
                f"line {node.lineno}: its argument {argument.arg} needs {problem}: the policy is shown both "
                "(docs/howto/tools.md)"
            )


def _check_imports(tree: ast.Module, source: str) -> None:
    """Raises ValueError if the file always imports a module that is not installed."""
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path" for node in ast.walk(tree)):
        return  # the file may change where Python looks for modules
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(
                f"importing {source} failed: line {node.lineno}: a relative import, and the file is not in a "
                "package"
            )
        imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        for module in (name.partition(".")[0] for name in imported):
            if _is_missing(module, Path(source).parent):
                raise ValueError(
                    f"importing {source} failed: line {node.lineno}: there is no module {module!r}; install "
                    "its package in the run's environment"
                )


def _is_missing(module: str, directory: Path) -> bool:
    """True if no import could find the module, neither beside the file nor in the current directory."""
    directories = (directory, Path())
    if any((d / module).is_dir() or (d / f"{module}.py").is_file() for d in directories):
        return False
    try:
        return module not in sys.modules and find_spec(module) is None
    except (ImportError, ValueError):
        return False


def _names(tree: ast.Module) -> dict[str, ast.AST] | None:
    """The names that the module's own statements bind; None where they cannot be seen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) or (isinstance(node, ast.Name) and node.id in _DYNAMIC):
            return None
    definitions: dict[str, ast.AST] = {}
    waiting: list[ast.AST] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.ClassDef):
            definitions[node.name] = node
            continue  # a nested function's names are local to it
        if isinstance(node, ast.alias):
            definitions[(node.asname or node.name).partition(".")[0]] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            definitions[node.id] = node
        waiting += reversed(list(ast.iter_child_nodes(node)))
    return None if definitions.keys() & {"*", "__getattr__"} else definitions


def _stub(node: ast.AST) -> ast.stmt | None:
    """The definition without its body; None where decorators or base classes may change its arguments."""
    if isinstance(node, _Function):
        return None if node.decorator_list else _empty(node)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.bases or node.keywords:
        return None
    body: list[ast.stmt] = []
    for statement in node.body:
        if isinstance(statement, _Function) and not statement.decorator_list:
            body.append(_empty(statement))
        elif not isinstance(statement, ast.Expr | ast.AnnAssign | ast.Pass):
            return None  # such as a method that is assigned
    return ast.ClassDef(node.name, [], [], body or [ast.Pass()], [], type_params=[])


def _empty(node: _Function) -> ast.stmt:
    parameters = node.args
    arguments = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in parameters.posonlyargs],
        args=[ast.arg(a.arg) for a in parameters.args],
        vararg=ast.arg(parameters.vararg.arg) if parameters.vararg else None,
        kwonlyargs=[ast.arg(a.arg) for a in parameters.kwonlyargs],
        kw_defaults=[None if default is None else ast.Constant(None) for default in parameters.kw_defaults],
        kwarg=ast.arg(parameters.kwarg.arg) if parameters.kwarg else None,
        defaults=[ast.Constant(None) for _ in parameters.defaults],
    )
    return type(node)(node.name, arguments, [ast.Pass()], [], type_params=[])
