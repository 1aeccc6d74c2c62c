"""Names of reward components, which are names of metrics, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.metric_names import own_names
from megatron_gvpo.settings.config import load_config


def load(good: Path, name: str) -> str:
    component = {"name": name, "function": "x:y"}
    config = load_config([good], [f"rewards.components={json.dumps([component])}"])
    return config.rewards.components[0].name


@pytest.mark.parametrize("name", ["brevity", "_own", "quality-v2.1", "réponse", "a" * 64])
def test_names_of_components(good: Path, name: str):
    assert load(good, name) == name


@pytest.mark.parametrize("name", ["", "a\nb", "a b", "a/b", "2nd", "a\x1b[31m", "b" * 65, "c" * 5000])
def test_names_that_no_table_can_show(good: Path, name: str):
    with pytest.raises(
        ConfigError, match=r"^rewards\.components\.0\.name: the name .*: expected a letter"
    ) as error:
        load(good, name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("name", sorted(own_names("reward/<component>")))
def test_names_of_other_metrics(good: Path, name: str):
    words = rf"^rewards\.components\.0\.name: the name '{name}' is that of another metric, as are .*: choose"
    with pytest.raises(ConfigError, match=words):
        load(good, name)
