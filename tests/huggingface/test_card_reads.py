"""A run's process reads the config.json of its model at most twice: in the checks, and to train.

The rest gets the card (`huggingface.card.ModelCard`). The libraries read the file for themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.suite.real_parts import used

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.settings.config import load_config

# Reports every line of the package from which a file named config.json is opened: the innermost function
# that is not the standard library's, where that is one of the package's.
COUNTING = """
import atexit, json, sys

LIBRARY = ("pathlib", "json", "/codecs.py", "<frozen", "tokenize.py", "contextlib.py")
reads = []

def watch(event, arguments):
    if event != "open" or not str(arguments[0]).endswith("/config.json"):
        return
    frame = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in LIBRARY):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    if "/megatron_gvpo/" in name and "/site-packages/" not in name:
        caller = frame.f_back
        while caller is not None and "/huggingface/card.py" in caller.f_code.co_filename:
            caller = caller.f_back
        reads.append(f"{name} for {caller.f_code.co_filename}:{caller.f_lineno}")

sys.addaudithook(watch)
atexit.register(lambda: print("READS " + json.dumps(reads)))

from megatron_gvpo.cli import main
sys.exit(main())
"""
MOST = 2  # in the checks before the libraries are loaded, and where the run is put together


def reads_of(task: Path, out: Path, *overrides: str) -> list[str]:
    """The lines of the package that opened a config.json during a training run of one step."""
    command = [sys.executable, "-c", COUNTING, "train", str(task / "run.yaml"), f"output_dir={out}"]
    settings = [
        "train.steps=1",
        "optimizer.warmup_steps=0",
        "rollout.max_tokens=4",
        "checkpoint.export_hf=false",
        *overrides,
    ]
    done = subprocess.run([*command, *settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    used("megatron-core and Megatron-Bridge, 1 rank")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("READS ")]
    reads: list[str] = json.loads(line.removeprefix("READS "))
    return reads


def test_a_training_run_reads_config_json_twice(task: Path, tmp_path: Path) -> None:
    reads = reads_of(task, tmp_path / "run", "data.eval.limit=2")
    assert 1 <= len(reads) <= MOST, "\n".join(reads)


def test_each_model_of_a_run_is_read_once(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("policy", 8), ("served", 9), ("teacher", 10), ("draft", 11)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    opened: list[str] = []
    read = ModelCard.read.__func__  # type: ignore[attr-defined]

    def counted(cls: type[ModelCard], directory: str, key: str = "model.path") -> ModelCard:
        opened.append(key)
        card: ModelCard = read(cls, directory, key)
        return card

    monkeypatch.setattr(ModelCard, "read", classmethod(counted))
    overrides = [
        f"model.path={tmp_path}/policy",
        "rollout.engine=vllm",
        f"rollout.servers.model_path={tmp_path}/served",
        f"rollout.speculation={{method: draft, model: {tmp_path}/draft}}",
        "algorithm.loss.reference=teacher",
        f"teacher={{path: {tmp_path}/teacher}}",
    ]
    cards = ModelCards(load_config([good], overrides))
    for _ in range(2):
        read_cards = (cards.policy, cards.served, cards.teacher, cards.draft)
        assert [card["vocab_size"] for card in read_cards] == [8, 9, 10, 11]
    keys = ["model.path", "rollout.servers.model_path", "teacher.path", "rollout.speculation.model"]
    assert opened == keys
    same = ModelCards(load_config([good], [f"model.path={tmp_path}/policy"]))
    assert same.served is same.policy


def test_a_card_that_is_missing_names_its_key(good: Path, tmp_path: Path) -> None:
    overrides = ["rollout.engine=vllm", f"rollout.servers.model_path={tmp_path}/none"]
    with pytest.raises(ConfigError, match=r"^rollout\.servers\.model_path=.*none: no config\.json there"):
        _ = ModelCards(load_config([good], overrides)).served


@pytest.mark.parametrize(
    ("files", "path", "remedy"),
    [
        (["model.safetensors"], "model.safetensors", "it is a file: name its directory"),
        (
            ["adapter_config.json"],
            "",
            "it is an adapter: name its base model",
        ),
        (["inner/config.json"], "", "/inner has one"),
        (["snapshots/1a2b/config.json"], "", "/snapshots/1a2b has one"),
        ([], "none", "there is no such directory"),
    ],
)
def test_what_is_not_a_models_directory(files: list[str], path: str, remedy: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=rf"no config\.json there .*{remedy}"):
        ModelCard.read(tmp_path / path)


def test_names_of_the_hub_are_told_to_be_downloaded() -> None:
    for name in ("Qwen/Qwen3-4B", "https://huggingface.co/Qwen/Qwen3-4B"):
        with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen3-4B --local-dir DIR"):
            ModelCard.read(name)
