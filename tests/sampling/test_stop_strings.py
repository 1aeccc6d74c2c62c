"""A response ends with the token that completes a stop string, and keeps every token that was sampled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers.inputs.chat_tokenizer import END, ids, tokenizer
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, KeepGroups, configure, fit
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.task import load_task
from megatron_gvpo.groups import Rollout
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import SamplingConfig

OF = tokenizer()
REQUESTS = [Request((5, 6, 7), 8, seed=1), Request((9,), 8, seed=2), Request((3, 4, 5, 6), 8, seed=3)]
STOP = ("12", "7", "+3", "40")


def end_by_scanning(of: object, token_ids: list[int], stop: tuple[str, ...]) -> int | None:
    """Read the definition: the least number of tokens whose text has a stop string."""
    for count in range(1, len(token_ids) + 1):
        text = of.decode(token_ids[:count], skip_special_tokens=False)
        if any(string in text for string in stop):
            return count
    return None


# ---------------------------------------------------------------- in tokens that are given


def test_the_end_is_the_first_token_that_completes_a_string():
    generator, ends = random.Random(0), []
    euro, words = (
        list(ids(OF, "€")),
        [list(ids(OF, word)) for word in ("hello", "llo", "he", "</call>", "<|im_end|>")],
    )
    stop = ("lhe", "€", "ohe", "l€", "</call>h")
    for _ in range(300):
        parts = [generator.choice([*words, euro, euro[:2]]) for _ in range(generator.randrange(12))]
        token_ids = [token for part in parts for token in part]
        ends.append(StopStrings(OF).end(token_ids, stop))
        assert ends[-1] == end_by_scanning(OF, token_ids, stop)
    assert len(set(ends)) > 10 and None in ends


def test_a_token_that_writes_more_than_the_string_is_kept():
    [hello] = ids(OF, "hello")
    assert StopStrings(OF).end([5, hello, 6], ["he"]) == 2
    assert StopStrings(OF).end([hello], ["hello"]) == 1


def test_a_string_in_more_tokens_than_the_tokenizer_would_take_is_found():
    """SGLang looks at as many last tokens as the tokenizer gives the string, and one more."""
    letters = [OF.convert_tokens_to_ids(letter) for letter in "hello"]
    assert len(ids(OF, "hello")) == 1 and StopStrings(OF).end([7, *letters, 8], ["hello"]) == 6


def test_special_tokens_are_text():
    assert StopStrings(OF).end([*ids(OF, "a"), END, *ids(OF, "b")], ["<|im_end|>"]) == 2
    assert StopStrings(OF).end([*ids(OF, "a"), END, *ids(OF, "b")], ["ab"]) is None


# ---------------------------------------------------------------- the embedded engine


@pytest.fixture(scope="module")
def engine(task: Path) -> LocalModel:
    path = str(task / "model")
    engine = LocalModel(
        path,
        AutoTokenizer.from_pretrained(path),
        device="cpu",
        dtype=torch.float32,
        batch_size=64,
        end_token_ids=(1,),
    )
    used("embedded rollout engine")
    engine.load(AutoModelForCausalLM.from_pretrained(path).state_dict().items(), version=1)
    return engine


def sampled(engine: LocalModel, **sampling: object) -> list[Rollout]:
    rows = engine.generate(REQUESTS, SamplingConfig(max_tokens=30, **sampling))
    return [rollout for row in rows for rollout in row]


@pytest.mark.parametrize("blind", [False, True], ids=["it sees the string", "it finds it at the end"])
def test_responses_are_the_beginnings_of_those_without_stop_strings(
    engine: LocalModel, task: Path, monkeypatch: pytest.MonkeyPatch, blind: bool
):
    if blind:  # as with many tokens that have no text
        monkeypatch.setattr(StopStrings, "recent", staticmethod(lambda stop: 1))
    of = AutoTokenizer.from_pretrained(task / "model")
    reasons = []
    for full, rollout in zip(sampled(engine), sampled(engine, stop=STOP), strict=True):
        end = end_by_scanning(of, full.token_ids, STOP)
        assert rollout.token_ids == full.token_ids[:end]
        torch.testing.assert_close(
            torch.tensor(rollout.logprobs), torch.tensor(full.logprobs[:end]), atol=1e-5, rtol=0
        )
        assert rollout.finish_reason == ("stop" if end is not None else full.finish_reason)
        assert rollout.text == of.decode(rollout.token_ids, skip_special_tokens=True)
        reasons.append((rollout.finish_reason, rollout.token_ids[-1] == 1))
    assert ("stop", False) in reasons and len(set(reasons)) > 1


def test_a_string_that_the_last_possible_token_completes_is_a_stop(engine: LocalModel, task: Path):
    of, full = AutoTokenizer.from_pretrained(task / "model"), sampled(engine)[0]
    string = of.decode(full.token_ids[:4])
    assert len(full.token_ids) > 4
    for most, reason in ((3, "length"), (4, "stop")):
        sampling = SamplingConfig(max_tokens=most, stop=[string])
        [[rollout]] = engine.generate([Request((5, 6, 7), 1, seed=1)], sampling)
        assert (rollout.token_ids, rollout.finish_reason) == (full.token_ids[:most], reason)


# ---------------------------------------------------------------- whole runs


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_run_trains_on_such_responses_and_evaluates_with_the_same(task: Path, tmp_path: Path):
    recorder = KeepGroups()
    settings = ("rollout.stop=['1','2','3','4']", "train.steps=1", "rollout.max_tokens=8", *GVPO)
    metrics = fit(configure(task, tmp_path / "run", *settings), [recorder])
    rollouts = [rollout for group in recorder.groups for rollout in group.rollouts]
    ended = [r for r in rollouts if r.finish_reason == "stop" and r.token_ids[-1] != 1]
    assert ended and all(r.text[-1] in "1234" and not set(r.text[:-1]) & set("1234") for r in ended)
    assert metrics is not None


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("['']", r"rollout\.stop\.0: .*at least 1 character"),
        ('["\\ufffd"]', r"rollout\.stop\.0: .*cannot have the replacement character"),
        ('["\\ud800"]', r"rollout\.stop: 0: the text is not UTF-8"),
        ("[3]", r"rollout\.stop\.0: .*string"),
        ("'</answer>'", r"rollout\.stop: .*tuple|rollout\.stop: .*list"),
        ("{a: b}", r"rollout\.stop: "),
        (f"[{'x' * 300}]", r"rollout\.stop\.0: .*at most 256 characters"),
        (str([str(i) for i in range(33)]), r"rollout\.stop: .*at most 32"),
    ],
)
def test_what_cannot_be_a_stop_string_is_refused(task: Path, tmp_path: Path, value: str, message: str):
    with pytest.raises(ConfigError, match=message):
        configure(task, tmp_path, f"rollout.stop={value}")


@pytest.mark.parametrize("section", ["rollout", "eval.sampling"])
def test_a_string_that_the_tokenizer_cannot_write_is_refused(task: Path, tmp_path: Path, section: str):
    config = configure(task, tmp_path, f"{section}.stop=['7','</answer>']")
    with pytest.raises(
        DataError, match=rf"{section}\.stop: the tokenizer in .*model cannot write '</answer>'"
    ):
        load_task(config, ModelCard.read(config.model.path))
