"""Hides secrets in texts: all text that is written or shown passes `hide`, or `hide_secrets`.

`secrets.py` finds the secrets of a configuration and adds them here. The list of secrets belongs to the
process, not to a configuration, because texts that must not show them come from everywhere: a reward's error
or output, a judge's explanation, a tool's answer, a library's error.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

REDACTED = "<redacted>"
SHORTEST = 6  # shorter secrets are not hidden, because they would match parts of words
CUT = 12  # a secret of this length or more is also recognised by its first third at the end of a cut text

_USER_IN_URL = re.compile(r'://([^/?#\s"]+)@')
_QUERY_OF_URL = re.compile(r"([?&][\w-]*(?:key|token|secret|password|signature)=)([^&#\s]+)", re.I)
_ELLIPSIS = re.compile(r"\s*(?:\.\.\.|\N{HORIZONTAL ELLIPSIS}|\Z)")

_known: dict[str, str] = {}  # secrets, each with the text that takes its place
_spelled: list[tuple[str, str]] = []  # every spelling of each secret, with its replacement; the longest first


def add_secret(secret: str, instead: str = REDACTED) -> None:
    """Let `hide` and `hide_secrets` replace this secret by `instead`.

    A secret of fewer than SHORTEST characters is ignored, because texts without the secret would change, too.
    """
    global _spelled
    if len(secret) < SHORTEST or secret in _known:
        return
    _known[secret] = instead
    spelled = {text: _known[each] for each in _known for text in _spellings(each)}
    _spelled = sorted(spelled.items(), key=lambda pair: len(pair[0]), reverse=True)


def hide(text: str) -> str:
    """The text without known secrets, and without users, passwords and keys in any URL."""
    return hide_credentials(hide_secrets(text))


def hide_secrets(text: str) -> str:
    """The text without known secrets, in any of their spellings. Everything else stays unchanged.

    It is for texts that are data, such as responses, in which a URL with a user may be a part of the task.
    """
    for spelling, instead in _spelled:
        if spelling in text:
            text = text.replace(spelling, instead)
    for secret, instead in _known.items():
        if len(secret) >= CUT and "/" not in secret:  # a path may end before another begins
            text = _hide_beginning(text, secret, instead)
    return text


def hide_credentials(text: str) -> str:
    """The text without users, passwords and keys in URLs."""
    if "://" in text:
        text = _USER_IN_URL.sub(f"://{REDACTED}@", text)
    return _QUERY_OF_URL.sub(rf"\g<1>{REDACTED}", text) if "=" in text else text


def hide_in(values: Any) -> Any:
    """The values, nested lists and mappings, with `hide_secrets` of each text; keys stay as they are."""
    if isinstance(values, str):
        return hide_secrets(values)
    if isinstance(values, Mapping):
        return {key: hide_in(value) for key, value in values.items()}
    if isinstance(values, list | tuple) and not (values and isinstance(values[0], int | float)):
        return [hide_in(value) for value in values]
    return values


def credentials_in_urls(text: str) -> Iterator[str]:
    """The passwords and keys in the text's URLs, encoded and decoded; the user if it has no password."""
    if "://" not in text:
        return
    for user in _USER_IN_URL.findall(text):
        name, _, password = user.partition(":")
        yield from {password or name, unquote(password or name)}
    for _, key in _QUERY_OF_URL.findall(text):
        yield from {key, unquote_plus(key)}


def _spellings(secret: str) -> set[str]:
    """The secret as itself, in Python's and JSON's notation, in URLs, in HTML, and inside base64."""
    escaped = secret.replace("\\", "\\\\")
    return {
        secret,
        escaped,
        escaped.replace("'", "\\'"),
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        quote(secret, errors="replace"),
        quote(secret, safe="", errors="replace"),
        quote_plus(secret, errors="replace"),
        html.escape(secret),
        *_in_base64(secret.encode(errors="replace")),
    }


def _in_base64(secret: bytes) -> Iterator[str]:
    """The characters that the secret alone decides in the base64 of a longer text, such as `user:password`.

    These characters depend on the number of bytes before the secret, modulo three. A short secret decides too
    few characters to be recognised.
    """
    for before in range(3):
        code = base64.b64encode(bytes(before) + secret).decode().rstrip("=")
        alone = code[(0, 2, 3)[before] : len(code) - ((before + len(secret)) % 3 > 0)]
        if len(alone) > SHORTEST:
            yield from {alone, alone.replace("+", "-").replace("/", "_")}


def _hide_beginning(text: str, secret: str, instead: str) -> str:
    """Hide the beginning of a secret at the end of a text that was cut off.

    Error messages are cut before their secrets are known.
    """
    beginning = secret[: max(SHORTEST, len(secret) // 3)]
    at = text.find(beginning)
    while at >= 0:
        end = at + len(beginning)
        while text[end : end + 1] == secret[end - at : end - at + 1] != "":
            end += 1
        if _ELLIPSIS.match(text, end):
            text = text[:at] + instead + text[end:]
        at = text.find(beginning, at + 1)
    return text
