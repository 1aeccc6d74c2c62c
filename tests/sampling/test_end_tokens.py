"""Responses end at the same tokens with every engine, and texts that are given as responses end with one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.chat_tokenizer import CHATML, END, ids, tokenizer
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, KeepGroups, configure, fit
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.data.demonstrations import DemonstrationReader
from megatron_gvpo.data.prompts import PromptWriter, load_prompts
from megatron_gvpo.data.task import load_task
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.end_tokens import end_token_ids, ended
from megatron_gvpo.sampling.batch_sampler import BatchContext
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig, SamplingConfig
from megatron_gvpo.turns import segments

OF = tokenizer()
EOS, TURN, USER = len(OF), len(OF) + 1, len(OF) + 2  # as `of_family` adds them
# As Gemma 3 writes a chat; its tokenizer's end token is another one.
GEMMA = (
    "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# As GLM 4.5: what comes next ends a turn.
GLM = (
    "{% for m in messages %}{{ '</turn>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As gpt-oss: only the last turn ends with an end token.
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}"
    "{{ '</turn>' if loop.last and not add_generation_prompt else '</call>' }}{% endfor %}"
)


def of_family(template: str | None) -> Any:
    """The tokenizer of a family that ends turns with another token than texts."""
    of = tokenizer(template)
    of.add_special_tokens({"additional_special_tokens": ["<eos>", "</turn>", "<|user|>"]})
    of.eos_token = "<eos>"
    assert of.convert_tokens_to_ids(["<eos>", "</turn>", "<|user|>"]) == [EOS, TURN, USER]
    return of


def model_with(directory: Path, generation: Any = None, config: Any = None) -> str:
    """A model's directory with these contents of generation_config.json and config.json."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": USER + 1} | (config or {})))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return str(directory)


# ---------------------------------------------------------------- what the files say


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, [END]),
        ({}, {}, [END]),
        ({"eos_token_id": None}, {"eos_token_id": None}, [END]),
        ({"eos_token_id": 7}, {}, [END, 7]),
        ({"eos_token_id": [7, END, 0]}, {"eos_token_id": 8}, [END, 7, 0, 8]),
        (None, {"eos_token_id": [8, 9]}, [END, 8, 9]),
        (None, {"eos_token_id": 8, "text_config": {"eos_token_id": 9}}, [END, 8, 9]),
    ],
)
def test_end_tokens_are_the_tokenizers_and_those_of_both_files(
    tmp_path: Path, generation: Any, config: Any, expected: list[int]
) -> None:
    path = model_with(tmp_path / "model", generation, config)
    assert end_token_ids(path, ModelCard.read(path), OF) == tuple(expected)
    assert end_token_ids(path, ModelCard.read(path), OF, stop_token_ids=(30, END)) == (*expected, 30)


@pytest.mark.parametrize("value", [10**6, -1, "2", [2, None], [[2]], True, 2.0, {}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_is_no_token_is_refused_with_its_file(tmp_path: Path, file: str, value: Any) -> None:
    content = {"eos_token_id": value}
    path = model_with(tmp_path / "model", *((content,) if file != "config.json" else (None, content)))
    with pytest.raises(ConfigError, match=rf"model/{file}: eos_token_id=.* is not a token") as refused:
        end_token_ids(path, ModelCard.read(path), OF)
    assert f"vocab_size={USER + 1}" in str(refused.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = model_with(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json, line 1: not valid JSON"):
        end_token_ids(path, ModelCard.read(path), OF)


def test_the_token_that_sglang_always_stops_at_is_one_everywhere(tmp_path: Path) -> None:
    of = of_family(CHATML)
    of.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    path = model_with(tmp_path / "model", config={"vocab_size": len(of)})
    assert end_token_ids(path, ModelCard.read(path), of) == (EOS, of.convert_tokens_to_ids("<|eom_id|>"))


# ---------------------------------------------------------------- how a text that is given ends


@pytest.mark.parametrize(
    ("template", "generation", "stop", "first"),
    [
        (GEMMA, [EOS, TURN], (), TURN),
        (GEMMA, None, (TURN,), TURN),  # rollout.stop_token_ids alone name it
        (GEMMA, None, (), EOS),  # sampling does not stop there
        (GLM, [EOS, USER, TURN], (), USER),
        (HARMONY, [EOS, TURN], (), TURN),
        (CHATML, [EOS, END], (), END),
        ("{{ raise_exception('no') }}", [EOS, TURN], (), EOS),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [EOS, TURN], (), EOS),
    ],
)
def test_a_text_ends_with_the_token_that_the_template_writes(
    tmp_path: Path, template: str, generation: Any, stop: tuple[int, ...], first: int
) -> None:
    of = of_family(template)
    path = model_with(tmp_path / "model", {"eos_token_id": generation})
    end_ids = end_token_ids(path, ModelCard.read(path), of, stop, chat=True)
    assert end_ids[0] == first and set(end_ids) == {EOS, *(generation or ()), *stop}
    assert end_token_ids(path, ModelCard.read(path), of, stop)[0] == EOS, (
        "without the template it is the tokenizer's"
    )


def test_every_text_that_is_given_as_a_response_ends_there_once(tmp_path: Path) -> None:
    of, ends = of_family(GEMMA), (TURN, EOS)
    record = {"prompt": "a", "solution": "hello", "responses": []}
    record["responses"] = [{"response": t, "reward": 1.0} for t in ("he", "he</turn>", "he<eos>")]
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    keys = {"demonstration_key": "solution", "responses_key": "responses", "answer_key": None}
    dataset = DatasetConfig(path=str(tmp_path / "data.jsonl"), **keys)
    data = DataConfig(train=dataset)
    [prompt] = load_prompts(dataset, data, of, longest=99, end_token_ids=ends)
    assert prompt.demonstration == (*ids(of, "hello"), TURN)
    he = ids(of, "he")
    assert [r.token_ids for r in prompt.responses] == [(*he, TURN), (*he, TURN), (*he, EOS)]
    context = BatchContext(0, 0, None, PromptWriter(dataset, data, of, 99), ends, None)
    assert context.encode_response("he") == context.encode_response("he</turn>") == [*he, TURN]
    assert ended((), ends) == (TURN,)
    of.chat_template = GEMMA.replace("{{ m.content", "{{ '<final>' if m.role == 'assistant' }}{{ m.content")
    context = BatchContext(0, 0, None, PromptWriter(dataset, data, of, 99), ends, None)
    assert context.encode_response("he") == [*ids(of, "<final>he"), TURN]


@pytest.mark.parametrize(("template", "end"), [(GEMMA, TURN), (GLM, USER)])
def test_a_chat_is_trained_as_its_template_writes_it(template: str, end: int) -> None:
    """With GLM's, a turn before a tool's answer ends with another token than the others."""
    of, ends = of_family(template), (end, TURN, EOS)
    turns = (("assistant", "he"), ("tool", "a"), ("assistant", "llo"), ("user", "b"), ("assistant", "ll"))
    chat = [{"role": role, "content": word} for role, word in turns]
    shown = DemonstrationReader(of, ends, chat=True, tools=())(chat)
    question = [{"role": "user", "content": "q"}]
    prompt = ids(of, of.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
    assert shown.chat is not None
    [segment] = segments(prompt, shown.token_ids, shown.chat.turns)
    chat_ids = ids(of, of.apply_chat_template([*question, *chat, question[0]], tokenize=False))
    assert tuple(segment.ids) == chat_ids[: len(segment.ids)]
    own = [segment.ids[start : start + count] for start, _, count in segment.own]
    assert [turn[-1] for turn in own] == [TURN, end, end]


def test_a_conversation_goes_on_after_any_end_token() -> None:
    of = of_family(GEMMA)
    template, answer = Template(of, (TURN, EOS), chat=True), [{"role": "user", "content": "b"}]
    assert template.tokens_between(TURN, answer) == ids(of, "\n<turn>user\nb</turn>\n<turn>model\n")
    assert template.tokens_between(EOS, answer) == ids(of, "</turn>\n<turn>user\nb</turn>\n<turn>model\n")


# ---------------------------------------------------------------- the embedded engine, and a run with it


def with_further_ends(task: Path, directory: Path, further: list[int]) -> Path:
    """A copy of the tiny model whose generation_config.json has further end tokens."""
    shutil.copytree(task / "model", directory)
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [1, *further]}))
    return directory


def test_the_embedded_engine_stops_where_transformers_does(task: Path, tmp_path: Path) -> None:
    further = list(range(2, 20, 3))
    path = str(with_further_ends(task, tmp_path / "model", further))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    of = AutoTokenizer.from_pretrained(path)
    how = {"device": "cpu", "dtype": torch.float32, "batch_size": 64}
    engine = LocalModel(path, of, end_token_ids=end_token_ids(path, ModelCard.read(path), of), **how)
    used("embedded rollout engine")
    engine.load(model.state_dict().items(), version=1)
    requests = [Request((a, b), 1, seed=0) for a in range(3, 12) for b in range(3, 8)]
    sampled = engine.generate(requests, SamplingConfig(temperature=0.01, top_p=1e-6, max_tokens=12))
    reasons = set()
    for request, [rollout] in zip(requests, sampled, strict=True):
        prompt = torch.tensor([request.prompt_ids])
        plain = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 12, "pad_token_id": 0}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **plain)[0, 2:].tolist()
        assert rollout.token_ids == expected
        assert rollout.finish_reason == ("stop" if expected[-1] in (1, *further) else "length")
        reasons.add((rollout.finish_reason, expected[-1] == 1))
    assert ("stop", False) in reasons, "a further end token was met"


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_run_ends_its_responses_there_and_exports_the_file(task: Path, tmp_path: Path) -> None:
    further = list(range(2, 20, 3))
    model, recorder = with_further_ends(task, tmp_path / "model", further), KeepGroups()
    settings = (f"model.path={model}", "train.steps=1", "data.eval=null", *GVPO)
    fit(configure(task, tmp_path / "run", *settings), [recorder])
    rollouts = [rollout for group in recorder.groups for rollout in group.rollouts]
    ends = {1, *further}
    assert {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"} & set(further)
    for rollout in rollouts:
        assert ends.isdisjoint(rollout.token_ids[:-1])
        assert (rollout.finish_reason == "stop") == (rollout.token_ids[-1] in ends)
    file = "generation_config.json"
    assert (tmp_path / "run" / "hf" / file).read_text() == (model / file).read_text()


def test_a_task_has_the_tokens_of_the_file_and_of_the_configuration(task: Path, tmp_path: Path) -> None:
    model = with_further_ends(task, tmp_path / "model", [4])
    settings = (f"model.path={model}", "rollout.stop_token_ids=[5]", "data.eval=null")
    config = configure(task, tmp_path / "run", *settings)
    assert load_task(config, ModelCard.read(config.model.path)).end_token_ids == (1, 4, 5)
