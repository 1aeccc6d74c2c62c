"""Secrets in a configuration: `{env: NAME}` values, and their absence from everything that a run writes.

`Config` replaces each `{env: NAME}` by the environment variable's value when it is made. Code that writes a
configuration writes `as_written(config)`, which has `{env: NAME}` again; code that writes a message passes it
through `hide` (`redaction.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import DEPTH
from megatron_gvpo.core.redaction import (
    REDACTED,
    SHORTEST,
    add_secret,
    credentials_in_urls,
    hide,
    hide_credentials,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:api_?key|key|token|pass(?:word|wd|phrase)|secret|credentials?|authorization|bearer)$", re.I
)
_API_KEY = re.compile(r"(?:api|access|private|secret)[_-]?key$", re.I)
_VARIABLE = re.compile(r"\{env: ([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z_]{1,24}")
# Parts of the keys of values that the user's code, or a service, gets: any of them may be a secret.
_PASSED_ON = {"options", "request", "env", "headers", "command", "args", "url", "urls", "api_key_env"}
# A pattern of services' keys, which are neither words nor paths.
_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[^\s/.~][^\s]{11,}")

# The sources of the values that this process has read: "{env: NAME}", or REDACTED for a literal secret.
_sources: dict[str, str] = {}


def resolve(values: Any) -> Any:
    """`values`, nested, with the variable's value in place of each `{env: NAME}`.

    Raises ValueError, which names key and variable, for a variable that is not set. Values that are nested
    deeper than any configuration stay as they are. From then on output hides these secrets, and other secrets
    in the environment.
    """
    _remember_environment()
    return _resolved(values, "", {}, 0)


def _resolved(values: Any, at: str, done: dict[int, Any], depth: int) -> Any:
    if not isinstance(values, Mapping | list | tuple) or depth > DEPTH:
        return values
    if id(values) in done:  # YAML's aliases may repeat a value, or contain themselves
        return done[id(values)]
    done[id(values)] = values
    if isinstance(values, Mapping):
        if (name := _named_variable(values)) is not None and at.rpartition(".")[2] != "options":
            resolved: Any = read_variable(name, at)
        else:
            pairs = (
                (key, _resolved(v, f"{at}.{key}".lstrip("."), done, depth + 1)) for key, v in values.items()
            )
            resolved = dict(pairs)
    else:
        resolved = [_resolved(value, f"{at}.{i}", done, depth + 1) for i, value in enumerate(values)]
    done[id(values)] = resolved
    return resolved


def read_variable(name: str, key: str) -> str:
    """The secret in the environment variable that configuration key `key` names.

    From then on output hides it if one of the two names says that it is a secret, or if the user's code or a
    service gets it and it does not consist of letters only. A variable may also contain a project, a
    directory or the name of a field, which texts and paths have as well. Raises ValueError, which names key
    and variable, for a variable that is not set, or that has a line break.
    """
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"{key}: ${name} is not set")
    if not value.isprintable():  # such as a line break at the end, which no HTTP header takes
        raise ValueError(f"{key}: ${name} contains a line break or another character that cannot be printed")
    _sources[value] = source = f"{{env: {name}}}"
    is_named = any(_names_secret(n, value) for n in (name, key.rpartition(".")[2]))
    if is_named or (_is_passed_on(key) and not _WORD.fullmatch(value)):
        add_secret(value, source)
    for credential in credentials_in_urls(value):
        add_secret(credential)
    return value


def _remember_environment() -> None:
    """Hide further keys in the environment, such as HF_TOKEN and WANDB_API_KEY.

    Rewards and tools can read these variables. Such a variable has the name of a secret, and its value looks
    like one.
    """
    for name, value in os.environ.items():
        if _is_unmistakable(name) and _KEY.fullmatch(value) and value.isprintable():
            add_secret(value, f"{{env: {name}}}")


def from_variable(value: str) -> bool:
    """True if this process has read the value from an environment variable, as `{env: NAME}`."""
    return _sources.get(value, REDACTED) != REDACTED


def without_secret(value: str) -> str:
    """The value, or `{env: NAME}` if it was read from a variable, however short it is."""
    return _sources[value] if from_variable(value) else value


def short_secrets() -> list[str]:
    """The sources of secrets that are too short to be hidden inside texts, such as `{env: JUDGE_KEY}`."""
    return sorted(
        source
        for value, source in _sources.items()
        if len(value) < SHORTEST and _is_unmistakable(source.removeprefix("{env: ").removesuffix("}"))
    )


def is_secret_name(name: str) -> bool:
    """True for the name of a variable or an HTTP header that holds a secret, such as Authorization."""
    return _SECRET_NAME.search(name) is not None


def remember(secret: str) -> None:
    """Hide this secret, which is not in a variable, from now on."""
    _sources.setdefault(secret, REDACTED)
    add_secret(secret)


def literal_secrets(values: Any) -> list[str]:
    """The dotted keys of secrets that are written in `values`, which are hidden from now on.

    They are recognised by the name of an option (`options: {api_key: ...}`), and in URLs
    (`https://user:password@host`). Raises ConfigError for one that was removed when the file was written.
    """
    keys = []
    for key, value in _strings(values):
        if from_variable(value):
            continue
        credentials = list(credentials_in_urls(value))
        if (problem := _gap(key, value, credentials)) is not None:
            raise ConfigError(
                f"{key}: {problem}, as '{key}={{env: NAME}}', with the value in the environment variable NAME"
            )
        for credential in credentials:
            add_secret(credential)
        if is_secret := _is_secret_option(key, value):
            remember(value)
        if is_secret or credentials:
            keys.append(key)
    return keys


def _gap(key: str, value: str, credentials: Sequence[str]) -> str | None:
    """Says which secret a text lacks that a run has written without it, and what to do; None for no gap."""
    if REDACTED in credentials or (value == REDACTED and _is_secret_option(key, value)):
        return "the secret was removed when this file was written: give it again"
    if _is_passed_on(key) and _VARIABLE.search(value):
        return "`{env: NAME}` stands for a whole value, not for a part of a text: give all of it"
    return None


def as_written(config: BaseModel) -> dict[str, Any]:
    """The configuration as nested JSON values that may be written, shown and sent anywhere.

    Values that came from `{env: NAME}` become that mapping again, so that the result loads where the
    variables are set. Literal secrets are "<redacted>".
    """
    written: dict[str, Any] = _written(config.model_dump(mode="json"), "")
    return written


def _written(value: Any, at: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _written(inner, f"{at}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_written(inner, f"{at}.{i}") for i, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    if value in _sources:
        name = _VARIABLE.fullmatch(_sources[value])
        return {"env": name[1]} if name else REDACTED
    if _is_secret_option(at, value):
        return REDACTED
    # A path or a name that has the value of a variable in it must load as it is.
    return hide(value) if _is_passed_on(at) else hide_credentials(value)


def _strings(values: Any, at: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(dotted key, value) of all strings in nested values, down to the depth of configurations."""
    if isinstance(values, str) and values:
        yield at, values
    elif isinstance(values, Mapping) and depth <= DEPTH:
        for key, value in values.items():
            yield from _strings(value, f"{at}.{key}".lstrip("."), depth + 1)
    elif isinstance(values, list | tuple) and depth <= DEPTH:
        for i, value in enumerate(values):
            yield from _strings(value, f"{at}.{i}", depth + 1)


def _is_secret_option(at: str, value: str) -> bool:
    """True for an option of a user's function whose name is a secret's; no key of the schema is one."""
    before, _, name = at.rpartition(".")
    return "options" in before.split(".") and bool(value) and _names_secret(name, value)


def _is_passed_on(key: str) -> bool:
    return not _PASSED_ON.isdisjoint(key.split("."))


def _names_secret(name: str, value: str) -> bool:
    """True if the name says that the value is a secret.

    `key: problem` names a field of the data: a word of letters is a secret only under an unmistakable name.
    """
    return _is_unmistakable(name) or (is_secret_name(name) and not _WORD.fullmatch(value))


def _is_unmistakable(name: str) -> bool:
    return is_secret_name(name) and (not name.lower().endswith("key") or bool(_API_KEY.search(name)))


def _named_variable(values: Mapping[Any, Any]) -> str | None:
    name = values.get("env")
    return name if len(values) == 1 and isinstance(name, str) else None
