"""Every number of every section and block has a type and bounds, and every text has an end."""

import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import check_plain
from megatron_gvpo.core.section import Section
from megatron_gvpo.core.yaml_files import parse_value
from megatron_gvpo.settings.config import build_config, load_config

HUGE = [True, False, 1e300, -1e300, 10**19, -(10**19), math.nan, math.inf]


def sections(above: type[Section] = Section) -> Iterator[type[Section]]:
    for section in above.__subclasses__():
        yield section
        yield from sections(section)


def numbers(annotation: Any) -> Iterator[typing.Callable[[Any], Any]]:
    """How a bad number is put into a field: as it is, into a list, or into a mapping."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (int, float):
        yield lambda bad: bad
    elif origin is tuple:
        for i, part in enumerate(p for p in parts if p is not Ellipsis):
            for inside in numbers(part):
                yield lambda bad, i=i, inside=inside: [*(["1"] * i), inside(bad)]
    elif origin is dict:
        for inside in numbers(parts[1]):
            yield lambda bad, inside=inside: {"x": inside(bad)}
    elif origin is not typing.Literal:
        for part in parts:
            yield from numbers(part)


FIELDS = {
    f"{section.__name__}.{name}": (section, name, list(numbers(field.annotation)))
    for section in sections()
    if section.__module__.startswith("megatron_gvpo")
    for name, field in section.model_fields.items()
    if any(True for _ in numbers(field.annotation))
}


def test_there_are_numbers():
    assert len(FIELDS) > 150 and {"OptimizerConfig.lr", "PPO.clip_low", "ParallelConfig.tp"} <= FIELDS.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_a_boolean_or_a_huge_number_is_refused(field):
    """Fails on the former Section, for which true was 1 and 1e300 a learning rate."""
    section, name, wrappers = FIELDS[field]
    for wrap in wrappers:
        for bad in HUGE:
            with pytest.raises(ValidationError) as error:
                section.model_validate({name: wrap(bad)})
            wrong = [item for item in error.value.errors() if item["loc"][:1] == (name,)]
            assert any(item["input"] is bad or item["input"] == bad for item in wrong), (bad, wrong)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.lr=true", "optimizer.lr: Input should be a valid number (given: True)"),
        ('optimizer.lr="1e-5"', "optimizer.lr: expected a number, found text: write it without quotes"),
        ("train.steps=1:30", "train.steps: Input should be a valid integer (given: '1:30')"),
        ("train.steps=010", "train.steps: Input should be a valid integer (given: '010')"),
        ("train.seed=99999999999999999999", "override train.seed: more than 64 bits for one number"),
        ("train.seed=4294967296", "train.seed: Input should be less than or equal to 4294967295"),
        ("train.steps=" + "9" * 5000, "train.steps: Input should be a valid integer (given: '999"),
        ("rewards.workers=5000", "rewards.workers: Input should be less than or equal to 1024"),
        ("rollout.servers={port: 65535, count: 2}", "rollout.servers: port=65535: the last of count=2"),
        ("rollout.temperature=1e-5", "rollout.temperature: Input should be greater than or equal to 0.01"),
        ("algorithm={recipe: gpg, batch_policy: {by: true}}", "algorithm.batch_policy.by: Input should be a"),
        ("output_dir=a\nb", "output_dir: the path has a control character"),
        ('output_dir="a\\0b"', "override output_dir: the text has a NUL character"),
        (f"output_dir={'x' * 300}", "output_dir: longer than a path may be"),
        ("output_dir=\udcff", "override output_dir: the text is not UTF-8"),
        ("model=[&a [*a]]", "override model: 0.0.0.0"),
        (f"model={'[' * 400}", "model: expected settings as `key: value`, found '[[["),
        ("rewards.components=[{name: a, options: {b: !!binary eHg=}}]", "override rewards.components: 0.opt"),
        (f"{'x' * 5000}=1", "x"),
        ("nonsense" * 500, "override 'nonsense"),
    ],
)
def test_what_a_user_is_told(good, override, problem):
    with pytest.raises(ConfigError) as error:
        load_config([good], [override])
    assert str(error.value).startswith(problem)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [\n" * 3000, "not valid YAML"),
        (f"train: {{steps: {'9' * 5000}}}\n", "not valid YAML"),
        ("train: !!int ''\n", "not valid YAML"),
        ("train: !!timestamp x\n", "not valid YAML"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\n" + "".join(
            f"c{i}: &c{i} [*c{i - 1}, *c{i - 1}]\n" if i else "c0: &c0 [*b, *b]\n" for i in range(40)
        ), "more than 100000 values"),
        ("a: &a {b: *a}\n", "nested deeper than 50 levels"),
        ("x: " + "y" * 2**20, "longer than 1 MiB"),
        ("a: 1\nb: \x01\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_files_that_nobody_means(tmp_path, text, problem):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config([file])
    assert problem in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_thousand_errors_fit_on_a_screen(good):
    with pytest.raises(ConfigError) as error:
        load_config([good], [f"train.x{i}=1" for i in range(1000)])
    lines = str(error.value).splitlines()
    assert len(lines) == 41 and lines[-1] == "and 960 more errors" and max(map(len, lines)) <= 400


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-7", -7), ("1_000", 1000), ("1e3", 1000.0), ("-.5", -0.5), (".inf", math.inf)],
)
def test_numbers_as_yaml_has_them(text, value):
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


@pytest.mark.parametrize("text", ["010", "1:30", "1.2.3", "0b1", "0x1", "0x_", "1e", "--1", "12h"])
def test_words_that_look_like_numbers(text):
    assert parse_value(text) == text


def test_options_are_finite(good):
    """A checkpoint and a job script hold the configuration as JSON, which has no infinity."""
    rewards = "rewards.components=[{name: math}, {name: a, function: x:y, options: {limit: [1, .inf]}}]"
    with pytest.raises(ConfigError, match=r"rewards\.components\.1\.options\.limit\.1: expected a finite"):
        load_config([good], [rewards])


def test_a_step_has_an_end(good):
    with pytest.raises(ConfigError, match=r"train\.prompts_per_step=1000000 x rollout\.n=16: more than 1000"):
        load_config([good], ["train.prompts_per_step=1000000", "rollout.n=16"])


def test_python_values_are_checked_too(good):
    values = load_config([good]).model_dump()
    component = {"name": "own", "function": "x:y", "options": {"seen": {1, 2}}}
    values["rewards"]["components"] = [component]
    with pytest.raises(ConfigError, match=r"rewards\.components\.0\.options\.seen: expected text, a number"):
        build_config(values)
    check_plain({"a": [1, 2.5, None, True, "x", ("y",)], 3: {"b": {}}})
