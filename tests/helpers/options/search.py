"""Changes one option of a run after the other, and says what each change did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from helpers.options.other_values import Option, changed
from helpers.options.small_run import Seen, differ, run
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.data.sources import DataError
from megatron_gvpo.settings.advice import advice
from megatron_gvpo.settings.config import Config

Effect = Literal["trained", "reported", "told", "refused", "idle"]
_REFUSALS = (ConfigError, DataError, RolloutError, UserFunctionError, ValueError)
BESIDE = 32  # the most runs for an option beside other settings


class Base(NamedTuple):
    """A run to compare with; `seen` is None where it is refused."""

    values: dict[str, Any]
    seen: Seen | None
    advice: str


class Trial(NamedTuple):
    """A change, what it did, and the error or warning that names it."""

    path: tuple[str | int, ...]
    value: Any
    effect: Effect
    text: str = ""


def configured(values: Mapping[str, Any]) -> Config:
    """The configuration, with a teacher if the method needs one. Raises ValueError."""
    values = {key: value for key, value in values.items() if key != "teacher"}
    if AlgorithmConfig.model_validate(values["algorithm"]).needs_teacher:
        values["teacher"] = {"path": values["model"]["path"]}
    return Config.model_validate(values)


def base_of(values: dict[str, Any]) -> Base:
    try:
        config = configured(values)
        return Base(values, run(config), advice(config) or "")
    except _REFUSALS:
        return Base(values, None, "")


def tried(base: Base, path: tuple[str | int, ...], value: Any) -> Trial:
    """Change one option of the base, and compare what can be seen of the two runs."""
    try:
        config = configured(changed(base.values, path, value))
        warnings = advice(config) or ""
        seen = run(config)
    except _REFUSALS as error:
        return Trial(path, value, "refused" if base.seen is not None else "idle", str(error))
    if base.seen is None or differ(base.seen.trained, seen.trained):
        return Trial(path, value, "trained")
    if differ(base.seen.reported, seen.reported):
        return Trial(path, value, "reported")
    if warnings != base.advice and str(path[-1]) in warnings:
        return Trial(path, value, "told", warnings)
    return Trial(path, value, "idle")


def trials(base: Base, option: Option, section: tuple[str | int, ...]) -> Iterator[Trial]:
    """The changes of an option, up to the first that trains other numbers."""
    for value in option.others:
        trial = tried(base, (*section, *option.path), value)
        yield trial
        if trial.effect == "trained":
            return


def has_effect(trials_of: list[Trial]) -> bool:
    return any(trial.effect in ("trained", "reported") for trial in trials_of)


def search(base: Base, option: Option, around: list[Option], section: tuple[str | int, ...]) -> list[Trial]:
    """The trials of an option; if none has an effect, also those beside other values of options around it."""
    alone = list(trials(base, option, section))
    return alone if has_effect(alone) else [*alone, *_beside_others(base, option, around, section)]


def _beside_others(
    base: Base, option: Option, around: list[Option], section: tuple[str | int, ...]
) -> Iterator[Trial]:
    """The trials of an option in bases that differ in one other option, up to the first with an effect."""
    others = [(other, value) for other in around if other.path != option.path for value in other.others[:4]]
    others.sort(key=lambda pair: not isinstance(pair[1], str | bool))  # switches first
    count = 0
    for other, value in others:
        values: Mapping[str, Any] = changed(base.values, (*section, *other.path), value)
        beside = base_of(dict(values))
        if beside.seen is None and not _is_valid(values):
            continue
        of_option = list(trials(beside, option._replace(others=option.others[:3]), section))
        count += 1 + sum(trial.effect != "refused" for trial in of_option)
        yield from of_option
        if has_effect(of_option) or count >= BESIDE:
            return


def _is_valid(values: Mapping[str, Any]) -> bool:
    try:
        configured(values)
    except ValueError:
        return False
    return True
