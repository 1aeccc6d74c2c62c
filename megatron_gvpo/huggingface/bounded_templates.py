"""Renders chat templates with limits on the size of texts and on time.

A chat template is a program that comes with a model. `{{ 'x' * 1000000000 }}` in it would take all memory,
and nested loops might never end. transformers runs it in Jinja's sandbox, which denies access to Python's
objects and bounds each `range`, but neither the sizes of texts nor the time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

LONGEST = 2**26  # characters of a text, or items of a list: four times the longest record of a data set
_BITS = 2**16  # the longest integer
SECONDS = 20.0  # processor time for a chat, where real templates take milliseconds
# processor time for a template whose last chat took too long, because several callers try it before all fail
AGAIN = 0.5
_INDENT = 1000  # characters of an indentation, or of a width that comes from the chat
_compile: Callable[[str], Template] = chat_template_utils._compile_jinja_template


def bound_templates() -> None:
    """Let transformers render chat templates in the environment of this module."""
    chat_template_utils._compile_jinja_template = compiled


@lru_cache(maxsize=64)
def compiled(template: str) -> Template:
    """The chat template, ready to render. Raises jinja2.TemplateError for one that cannot be read."""
    return environment().from_string(template)


@lru_cache(maxsize=1)
def environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers' chat templates, with bounds."""
    original = _compile("").environment
    bounded = _Bounded(
        trim_blocks=original.trim_blocks,
        lstrip_blocks=original.lstrip_blocks,
        extensions=[type(extension) for extension in original.extensions.values()],
    )
    bounded.globals.update(original.globals)
    bounded.filters.update(original.filters)
    # This filter is removed: it chooses again for every text, and trained prompts would differ from sampled
    # ones.
    del bounded.filters["random"]
    for name in ("center", "format", "indent", "join", "replace", "tojson"):
        bounded.filters[name] = _checked(name, bounded.filters[name])
    bounded.filters[_Bounds.CONCATENATED] = lambda values: _joined("", map(str, values))
    bounded.filters[_Bounds.TIMED] = _timed
    return bounded


# Each thread has `at`, its processor time when it began to render a chat, and the `seconds` that it may take.
_begun = threading.local()


class _TimedTemplate(Template):
    """A template that records the time when it begins; templates that it calls count as a part of it."""

    is_slow = False  # true if its last chat took longer than SECONDS

    def render(self, *arguments: Any, **named: Any) -> str:
        _begun.at, _begun.seconds = time.thread_time(), AGAIN if self.is_slow else SECONDS
        try:
            text: str = super().render(*arguments, **named)
        finally:
            self.is_slow = time.thread_time() - _begun.at > _begun.seconds
        return text


def _check_time() -> None:
    if time.thread_time() - getattr(_begun, "at", 0.0) > getattr(_begun, "seconds", SECONDS):
        raise SecurityError(f"it goes on without end: {SECONDS:g} seconds is the most for a chat")


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


class _Bounded(ImmutableSandboxedEnvironment):
    """Raises SecurityError before a text, a list or a number grows beyond the bounds, and after SECONDS."""

    template_class = _TimedTemplate
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a template, a macro or a block, which comes in parts."""
        return _joined("", parts)

    def _parse(self, *arguments: Any) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(*arguments))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "**", int(), int():
                _bound(left.bit_length() * right, _BITS)
            case "*", int(), int():
                _bound(left.bit_length() + right.bit_length(), _BITS)
            case ("*", int(count), value) | ("*", value, int(count)):
                _bound(_size(value) * count)
            case "+", _, _:
                _bound(_size(left) + _size(right))
            case "%", str(), _:
                _check("format", left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        _check_time()
        name = getattr(function, "__name__", "")
        # Jinja's sandbox wraps str.format and no other method of a text.
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):
            if name == "join" and len(arguments) == 1:
                return _joined(text, arguments[0])
            _check(name, text, (*arguments, *named.values()))
        elif name == "generate_lorem_ipsum":
            raise SecurityError("it writes a text of lipsum, which has any length")
        return super().call(context, function, *arguments, **named)


class _Bounds(NodeTransformer):
    """Rewrites `a ~ b` as a filter that checks the sizes, and the items of a loop as one for the time."""

    CONCATENATED, TIMED = "concatenated", "timed"

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - the name that jinja2 calls
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, self.CONCATENATED, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the name that jinja2 calls
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, self.TIMED, [], [], None, None, lineno=node.lineno)
        return node


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which raises SecurityError before it writes a text that is too long."""
    own = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that Jinja adds, such as its context

    @wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        value, *others = arguments[own:]
        if name == "join":
            value = list(value)
            separator = str(named.get("d", others[0] if others else ""))
            _bound(sum(map(_size, value)) + len(separator) * len(value))
        else:
            _check(name, value, (*others, *named.values()))
        return function(*arguments[:own], value, *others, **named)

    return bounded


def _check(name: str, value: Any, arguments: Iterable[Any]) -> None:
    """Raise SecurityError if a filter or a method would make a text of `value` that is too long."""
    sizes = list(arguments)
    widest = max((number for number in sizes if isinstance(number, int)), default=1)
    texts = [str(text) for text in sizes if isinstance(text, str)]
    match name:
        case "center" | "expandtabs" | "indent" | "ljust" | "rjust" | "zfill":
            _bound(max(_size(value), 1) * widest)
        case "tojson":
            _bound(widest, _INDENT)
        case "replace" if len(texts) == 2:
            old, new = texts
            _bound(len(value) + str(value).count(old) * len(new))
        case "format" | "format_map":
            text = str(value)
            _bound(len(text) + (text.count("%") + text.count("{")) * max(map(_size, sizes), default=0))
            _bound(max(map(int, re.findall(r"\d{1,18}", text)), default=0))
            if re.search(r"%[-+ #0-9.]*\*|\{[^}]*\{", text) and widest > _INDENT:
                raise SecurityError(f"it pads a text to {widest} characters")


def _joined(separator: str, parts: Iterable[str]) -> str:
    """The parts as one text.

    Raises SecurityError as soon as it is too long, because the parts may never end.
    """
    taken, size = list[str](), 0
    for part in parts:
        _bound(size := size + len(separator) + len(part))
        taken.append(part)
    return separator.join(taken)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | Mapping) else 0


def _bound(size: int, largest: int = LONGEST) -> None:
    if size > largest:
        raise SecurityError(
            f"it writes texts or numbers without bound ({size:,}, and {largest:,} is the most)"
        )
