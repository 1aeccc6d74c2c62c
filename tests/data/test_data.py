"""Prompts from right and wrong files as users have them, and the order in which they are visited."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.suite.package_log import own_records
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_gvpo.core import slow_work
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data import sources
from megatron_gvpo.data.order import PromptOrder
from megatron_gvpo.data.prompts import PromptWriter, load_prompts
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no role tool') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, without a chat template."""
    characters = ["<pad>", "<end>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>")
    chat.chat_template = CHAT_TEMPLATE
    return chat


def jsonl(file: Path, *records: Any) -> str:
    """Write records, or lines that are not valid records, to a file."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file.write_text("".join(line + "\n" for line in lines))
    return str(file)


def load(path: Any, tokenizer: PreTrainedTokenizerFast, /, **settings: Any) -> list[Prompt]:
    """Call load_prompts with its settings and those of DatasetConfig and DataConfig in one namespace."""
    of_dataset = {key: settings.pop(key) for key in list(settings) if key in DatasetConfig.model_fields}
    dataset = DatasetConfig(path=str(path), **of_dataset)
    positions = settings.pop("positions", None)
    data = DataConfig(train=dataset, **settings)
    longest = data.max_prompt_tokens or 1024
    return load_prompts(dataset, data, tokenizer, longest=longest, end_token_ids=(END,), positions=positions)


GOOD = [
    {"prompt": "1+2=", "answer": "3", "solution": "three", "level": 1},
    {"prompt": "2+2=", "answer": "4", "solution": "four", "level": 2},
]


def test_a_record_becomes_a_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path / "a.jsonl", *GOOD)
    first, second = load(path, tokenizer, demonstration_key="solution")
    assert (first.text, first.answer, first.record["level"]) == ("1+2=", "3", 1)
    assert tokenizer.decode(first.token_ids) == "1+2="
    assert first.demonstration is not None
    assert tokenizer.decode(first.demonstration[:-1]) == "three" and first.demonstration[-1] == END
    assert first.id == "a.jsonl:1" and second.id == "a.jsonl:2"


def test_jsonl_parquet_and_directories_agree(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    jsonl(tmp_path / "b.jsonl", GOOD[0], "", GOOD[1])  # empty lines do not count
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GOOD), tmp_path / "a.parquet")
    (tmp_path / "README.md").write_text("no data")
    lines, rows = (load(tmp_path / name, tokenizer) for name in ("b.jsonl", "a.parquet"))
    assert [p.record for p in lines] == [p.record for p in rows] == GOOD
    assert load(tmp_path, tokenizer) == rows + lines
    assert load(tmp_path, tokenizer, limit=3) == rows + lines[:1]


def test_what_json_writes_as_a_pair_is_a_character(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(jsonl(tmp_path / "a.jsonl", {"prompt": "1 \U0001f600", "answer": "x"}), tokenizer)
    assert prompt.text == "1 \U0001f600" and len(prompt.token_ids) == 3


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *((3, "3"), (-2.5, "-2.5"), ("3", "3"), ("3.0", "3.0"), (3.0, "3"), (-0.0, "0")),
        *((0.00001, "0.00001"), (1.5e-7, "0.00000015"), (1e16, "10000000000000000")),
    ],
)
def test_numbers_are_answers(tmp_path: Path, tokenizer: Any, answer: Any, text: str) -> None:
    (prompt,) = load(jsonl(tmp_path / "a.jsonl", {"prompt": "?", "answer": answer}), tokenizer)
    assert prompt.answer == text


def test_no_answer_is_needed_where_none_is_named(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = load(jsonl(tmp_path / "a.jsonl", {"prompt": "?"}), tokenizer, answer_key=None)
    assert prompt.answer is None


def test_the_end_token_is_not_doubled(tmp_path: Path, tokenizer: Any) -> None:
    record = {"prompt": "?", "answer": "x", "solution": "x<end>"}
    (prompt,) = load(jsonl(tmp_path / "a.jsonl", record), tokenizer, demonstration_key="solution")
    assert prompt.demonstration is not None and prompt.demonstration.count(END) == 1


def test_a_demonstration_must_fit_the_model(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", *GOOD)  # the longer one: 4 prompt tokens, 5 characters, the end token
    assert len(load(path, tokenizer, demonstration_key="solution", positions=10)) == 2
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 1: the prompt has 4 tokens and its demonstration 6 "
    ):
        load(path, tokenizer, demonstration_key="solution", positions=9)
    assert len(load(path, tokenizer, positions=9)) == 2, (
        "without demonstrations, responses have their own limit"
    )


def test_chat_template(tmp_path: Path, chat_tokenizer: Any) -> None:
    system, user = {"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}
    prompts = ["Hi", [user], [system, user]]
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": p, "answer": "x"} for p in prompts))
    plain = "<user>Hi\n<assistant>"
    assert [p.text for p in load(path, chat_tokenizer)] == [plain, plain, f"<system>Own.\n{plain}"]
    with_system = load(path, chat_tokenizer, system_prompt="Be.")
    assert [p.text for p in with_system] == [f"<system>Be.\n{plain}"] * 2 + [f"<system>Own.\n{plain}"]
    assert chat_tokenizer.decode(with_system[0].token_ids) == with_system[0].text


@pytest.mark.parametrize("prompt", ["", " \n", [{"role": "user", "content": " "}]])
def test_messages_without_any_text_are_no_prompt(tmp_path: Path, chat_tokenizer: Any, prompt: Any) -> None:
    """Fails on the old code: the template's own tokens made a prompt of nothing."""
    with pytest.raises(DataError, match=r"line 2: the prompt is empty: no message has any text"):
        load(jsonl(tmp_path / "a.jsonl", ASK, ASK | {"prompt": prompt}), chat_tokenizer)


def test_chat_template_can_be_switched_off(tmp_path: Path, chat_tokenizer: Any) -> None:
    (prompt,) = load(
        jsonl(tmp_path / "a.jsonl", {"prompt": "Hi", "answer": "x"}), chat_tokenizer, chat_template=False
    )
    assert prompt.text == "Hi"


TO_USER = {"role": "user", "content": "?"}
ASK = {"prompt": "?", "answer": "x"}


@pytest.mark.parametrize(
    ("records", "settings", "message"),
    [
        ([], {}, "a.jsonl: no records"),
        ([ASK, '{"prompt": '], {}, "a.jsonl, line 2: not valid JSON"),
        ([ASK, '{"prompt": "cut o'], {}, "line 2: not valid JSON: Invalid control character at column 18"),
        ([ASK, "", "[1, 2]"], {}, "a.jsonl, line 3: expected an object {...}, found list"),
        ([ASK, {"answer": "x"}], {}, "a.jsonl, line 2: field 'prompt' is missing; fields there: answer"),
        (
            [ASK, {"prompt": "?", "Answer": 1}],
            {},
            "line 2: field 'answer' is missing; fields there: prompt, Answer",
        ),
        ([ASK | {"answer": None}], {}, "line 1: field 'answer' is null"),
        ([ASK], {"demonstration_key": "solution"}, "line 1: field 'solution' is missing"),
        (
            [ASK | {"solution": 7}],
            {"demonstration_key": "solution"},
            "(field 'solution') is neither a string nor a list of chat messages",
        ),
        ([ASK | {"prompt": 7}], {}, "line 1: the prompt is not a string but int 7"),
        ([ASK | {"prompt": ""}], {}, "line 1: the prompt is empty: it has no tokens"),
        ([ASK | {"solution": ""}], {"demonstration_key": "solution"}, "line 1: the demonstration (field 'so"),
        (
            [ASK | {"solution": " \n"}],
            {"demonstration_key": "solution"},
            "or white space alone",
        ),
        (
            [ASK | {"prompt": "<image>?", "images": ["a.png"]}],
            {},
            "line 1: the prompt has <image>, and no key names the images: the record has the field 'images'",
        ),
        ([ASK | {"prompt": ["1", "2"]}], {}, "line 1: the prompt is not a string but list ['1', '2']"),
        ([ASK, '{"prompt": "1", "prompt": "2", "answer": "x"}'], {}, "line 2: field 'prompt' is given twice"),
        ([ASK | {"note": {}}, '{"prompt": "1", "n": {"a": 1, "a": 2}}'], {}, "line 2: field 'a' is given tw"),
        ([ASK, '{"prompt": "1", "answer": NaN}'], {}, "line 2: not valid JSON: NaN is not a number"),
        ([ASK, '{"prompt": "1", "answer": 1e999}'], {}, "'answer' is inf, which is not an answer"),
        (['{"prompt": ' + "[" * 100_000], {}, "line 1: not valid JSON: nested too deeply"),
        (['{"prompt": ' + "9" * 5000 + "}"], {}, "line 1: a number of more than 4,300 digits: write"),
        ([ASK, ASK | {"prompt": "\ud83d"}], {}, "a.jsonl, line 2: half of a surrogate pair"),
        ([ASK | {"note": ["cut: \udc00"]}], {}, "a.jsonl, line 1: half of a surrogate pair"),
        ([ASK | {"answer": ["x"]}], {}, "field 'answer' is neither a string nor a number but list ['x']"),
        ([ASK | {"answer": True}], {}, "field 'answer' is neither a string nor a number but bool True"),
        ([ASK | {"prompt": [TO_USER]}], {}, "the tokenizer has no chat template"),
        ([ASK, ASK | {"prompt": "12345"}], {"max_prompt_tokens": 4}, "line 2: the prompt has 5 tokens"),
    ],
)
def test_bad_records(tmp_path: Path, tokenizer: Any, records: list[Any], settings: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        load(jsonl(tmp_path / "a.jsonl", *records), tokenizer, **settings)
    assert message in str(error.value) and f"{tmp_path}/a.jsonl" in str(error.value)


def test_a_line_has_an_end(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 2**20)
    path = jsonl(tmp_path / "a.jsonl", ASK, ASK | {"prompt": "x" * 2**20})
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: longer than 1 MiB"):
        load(path, tokenizer)


def test_slow_work_shows_itself(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails on the old code, which was silent for a minute."""
    monkeypatch.setattr(slow_work, "FIRST", 0.001)
    monkeypatch.setattr(slow_work, "AGAIN", 0.001)
    path = jsonl(tmp_path / "a.jsonl", *[ASK] * 1100)
    load(path, tokenizer)
    assert f"reading {path}: " in (printed := capfd.readouterr().err) and " records so far" in printed
    monkeypatch.setenv("RANK", "1")
    load(path, tokenizer)
    assert capfd.readouterr().err == ""


def test_characters_that_the_tokenizer_drops_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails on the old code, which trained on what was left of them, or called the prompt empty."""
    path = jsonl(tmp_path / "a.jsonl", ASK, ASK | {"prompt": "1 \U0001f600 é"}, ASK | {"prompt": "é"})
    with caplog.at_level(logging.WARNING):
        load(path, tokenizer)
    [warning] = [record.getMessage() for record in own_records(caplog)]
    assert warning.startswith(f"{path}, line 2: the tokenizer has no token for ") and "U+1F600" in warning
    assert warning.endswith("and writes <pad> for them")
    known = {"<end>": 0, "one": 1, "<unk>": 2}  # the word, and no letter of it
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    caplog.clear()
    of_words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    load(jsonl(tmp_path / "b.jsonl", {"prompt": "one", "answer": 1}), of_words)
    assert own_records(caplog) == []
    pairs = Tokenizer(models.BPE({"<end>": 0, "o": 1, "n": 2, "e": 3, " ": 4}, []))  # as the quickstart's
    dropping = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<end>")
    load(jsonl(tmp_path / "c.jsonl", {"prompt": "one !", "answer": 1}), dropping)
    assert own_records(caplog)[0].getMessage().endswith("has no token for '!' (U+0021), and leaves them out")
    with pytest.raises(DataError, match=r"line 1: the prompt is empty: the tokenizer knows none of str '!'"):
        load(jsonl(tmp_path / "d.jsonl", {"prompt": "!", "answer": 1}), dropping)


def test_a_text_that_the_tokenizer_refuses(tmp_path: Path) -> None:
    """Fails on the old code with a traceback: tokenizers raises a bare Exception."""
    words = Tokenizer(models.WordLevel({"<end>": 0, "one": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    refusing = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": text, "answer": 1} for text in ("one", "two")))
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the tokenizer cannot write str 'two': WordLevel"):
        load(path, refusing)


def test_a_parquet_record_is_plain_json(tmp_path: Path, tokenizer: Any) -> None:
    """A checkpoint of accumulated groups holds records as JSON, which has no dates, decimals or bytes."""
    odd = {"when": datetime(2026, 1, 31), "price": Decimal("1.50"), "raw": b"x\xff", "deep": [{"a": b"y"}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ASK | odd]), tmp_path / "a.parquet")
    (prompt,) = load(tmp_path / "a.parquet", tokenizer)
    assert json.loads(json.dumps(prompt.record)) == prompt.record
    assert prompt.record["price"] == "1.50" and prompt.record["deep"] == [{"a": "y"}]


def test_a_system_prompt_needs_a_chat_template(tmp_path: Path, tokenizer: Any, chat_tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", ASK)
    with pytest.raises(DataError, match=r"system_prompt needs .* the tokenizer has no chat template"):
        load(path, tokenizer, system_prompt="Be.")
    with pytest.raises(DataError, match=r"system_prompt needs .* data.chat_template is false"):
        load(path, chat_tokenizer, system_prompt="Be.", chat_template=False)


@pytest.mark.parametrize("prompt", [[], ["Hi"], [{"role": "user"}], [{"role": "user", "content": 1}], 3])
def test_bad_messages(tmp_path: Path, chat_tokenizer: Any, prompt: Any) -> None:
    problem = r"line 2: (the prompt is neither a string nor a list of|message 0 of the prompt)"
    with pytest.raises(DataError, match=problem):
        load(jsonl(tmp_path / "a.jsonl", ASK, {"prompt": prompt, "answer": "x"}), chat_tokenizer)


def test_a_chat_template_that_refuses(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat = [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "?"}]
    with pytest.raises(DataError, match=r"a.jsonl, line 1: the chat template refuses .* no role tool"):
        load(jsonl(tmp_path / "a.jsonl", {"prompt": chat, "answer": "x"}), chat_tokenizer)


def test_a_chat_template_that_refuses_in_several_lines(tmp_path: Path, chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('first\n  second\n') }}"
    with pytest.raises(DataError, match=r"refuses the prompt: first second$"):
        load(jsonl(tmp_path / "a.jsonl", ASK), chat_tokenizer)


def test_a_chat_template_that_fails(tmp_path: Path, chat_tokenizer: Any) -> None:
    """A template is a program: jinja raises other errors than its own, too."""
    chat_tokenizer.chat_template = "{% for i in range(99999999999) %}x{% endfor %}"
    with pytest.raises(DataError, match=r"a.jsonl, line 1: the chat template refuses .*OverflowError"):
        load(jsonl(tmp_path / "a.jsonl", ASK), chat_tokenizer)


def test_a_chat_template_that_leaves_out_what_is_said(tmp_path: Path, chat_tokenizer: Any) -> None:
    """Fails on the old code: every prompt became the same text, and the run trained on it."""
    chat_tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{% endfor %}"
    with pytest.raises(DataError, match=r"the chat template does not write the content .*'<user>'"):
        load(jsonl(tmp_path / "a.jsonl", ASK), chat_tokenizer)


def test_a_prompt_with_more_text_is_written_like_the_others(
    tmp_path: Path, tokenizer: Any, chat_tokenizer: Any
) -> None:
    """The text goes before or after the last user message."""
    messages = [{"role": "user", "content": "1+1"}, {"role": "system", "content": "2"}]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2", "answer": "4"}, {"prompt": messages, "answer": "2"})
    data = DataConfig(train=DatasetConfig(path=path))
    plain, chat = load(path, chat_tokenizer)
    write = PromptWriter(data.train, data, chat_tokenizer, 40).extended
    assert write(plain, " hint").text == "<user>2+2 hint\n<assistant>"
    assert write(chat, "hint ", before=True).text == "<user>hint 1+1\n<system>2\n<assistant>"
    assert write(plain, "x" * 40) is None
    bare = PromptWriter(data.train, data, tokenizer, 40).extended(plain, "1+1=2, ", before=True)
    assert (bare.text, tokenizer.decode(bare.token_ids), bare.answer) == ("1+1=2, 2+2", "1+1=2, 2+2", "4")


def test_long_prompts_can_be_dropped(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "x" * n, "answer": "x"} for n in (3, 4, 5, 6)))
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("RANK", "3")
        short_prompts = load(path, tokenizer, max_prompt_tokens=4, prompt_too_long="drop")
        assert not caplog.text, "every rank reads the data, and one of them tells"
        monkeypatch.delenv("RANK")
        assert load(path, tokenizer, max_prompt_tokens=4, prompt_too_long="drop") == short_prompts
    assert [p.id for p in short_prompts] == ["a.jsonl:1", "a.jsonl:2"]
    assert "dropped 2 of 4 prompts" in caplog.text
    with pytest.raises(DataError, match=r"every prompt is longer than data.max_prompt_tokens=2 tokens"):
        load(path, tokenizer, max_prompt_tokens=2, prompt_too_long="drop")


def test_records_that_a_function_leaves_out_are_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A function for other records may leave out nearly all of them, and the run would train on the rest."""
    (tmp_path / "own.py").write_text(
        "def some(record): return record if record['prompt'] == 'xx' else None\n"
    )
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "x" * n, "answer": "x"} for n in (1, 2, 3)))
    with caplog.at_level(logging.WARNING):
        prompts = load(path, tokenizer, convert=f"{tmp_path}/own.py:some")
    assert [prompt.text for prompt in prompts] == ["xx"]
    assert caplog.text.rstrip().endswith("own.py:some left out 2 of 3 records")


def test_bad_files(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "folder.jsonl" / "inner.jsonl").mkdir()
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "a.parquet").write_text("no Parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    for name, message in {
        "missing.jsonl": "no such file or directory",
        "missing": "no such file or directory",
        "empty": "no .jsonl or .parquet file in this directory",
        "a.csv": "expected a .jsonl or .parquet file",
        "folder.jsonl": "no .jsonl or .parquet file in this directory",
        "a.parquet": "not a readable Parquet file",
        "latin.jsonl": "line 1: not UTF-8",
    }.items():
        with pytest.raises(DataError) as error:
            load(tmp_path / name, tokenizer)
        assert name in str(error.value) and message in str(error.value)


def test_hub_data_sets_need_datasets(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"'someone/sums' is not a local file.*pip install datasets"):
        load("someone/sums", tokenizer)


def test_the_tokenizer_must_know_an_end(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert end_token_id(tokenizer) == END
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match=r"no end token; name it as eos_token in tokenizer_config.json"):
        end_token_id(endless)
    with pytest.raises(DataError, match=r"no tokenizer there"):
        load_tokenizer(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    assert end_token_id(load_tokenizer(str(tmp_path))) == END
    (tmp_path / "chat_template.jinja").touch()
    with pytest.raises(DataError, match=r"chat_template.jinja there is empty"):
        load_tokenizer(str(tmp_path))


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    order = PromptOrder(10, seed=3)
    epochs = [order.take(10) for _ in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert PromptOrder(10, seed=4).take(10) != epochs[0]
    assert PromptOrder(10, seed=3, shuffle=False).take(12) == [*range(10), 0, 1]


@pytest.mark.parametrize("k", [1, 3, 7, 16])
def test_batches_straddle_epochs(k: int) -> None:
    uninterrupted = PromptOrder(7, seed=0).take(7 * 48)
    order = PromptOrder(7, seed=0)
    assert [i for _ in range(7 * 48 // k) for i in order.take(k)] == uninterrupted


def test_resuming_anywhere_is_exact() -> None:
    uninterrupted = PromptOrder(5, seed=1).take(100)
    order, taken = PromptOrder(5, seed=1), list[int]()
    for _ in range(12):  # positions within, at the end of, and across epochs
        state = json.loads(json.dumps(order.state_dict()))
        resumed = PromptOrder(5, seed=1)
        resumed.load_state_dict(state)
        assert resumed.seed_for_next() == order.seed_for_next()
        assert resumed.take(20) == uninterrupted[len(taken) : len(taken) + 20]
        taken += order.take(3)


def test_sampling_seeds_do_not_repeat() -> None:
    order = PromptOrder(4, seed=0)
    seeds = []
    for _ in range(100):
        seeds.append(order.seed_for_next())
        order.take(4)
    assert len(set(seeds)) == 100
    assert order.seed_for_next() != PromptOrder(4, seed=1).seed_for_next()


def test_another_data_set_cannot_be_resumed() -> None:
    with pytest.raises(DataError, match=r"trained on 5 prompts, and data.train now has 6"):
        PromptOrder(6, seed=0).load_state_dict(PromptOrder(5, seed=0).state_dict())
