"""Responses in the tokens of a teacher with another tokenizer: the same text, or a reason why not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.inputs import chat_tokenizer, text_teachers
from helpers.inputs.chat_tokenizer import CHATML, END, ids
from transformers import PreTrainedTokenizerBase

from megatron_gvpo.algorithms.losses.gvpo_plus_plus import GVPOPlusPlus
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.teacher_text import REASONS, TeacherText, TeacherTokens
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.training.text_teacher import TextTeacher
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

POLICY = chat_tokenizer.tokenizer()
TEACHER = text_teachers.byte_level()
QUESTION = "say hello"


def prompt_of(question: str = QUESTION, policy: PreTrainedTokenizerBase = POLICY, system: str = "") -> Prompt:
    text = question
    if policy.chat_template:
        messages = [{"role": "user", "content": question}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        text = str(policy.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return Prompt("p", ids(policy, text), text, record={"prompt": question})


def rollout_of(tokens: Sequence[int], ended: bool = True, policy_end: int = END) -> Rollout:
    own = [*tokens, policy_end] if ended else list(tokens)
    return Rollout(own, [], "", "stop" if ended else "length")


def write(text: TeacherText, *rollouts: Rollout, prompt: Prompt | None = None) -> list[TeacherTokens | str]:
    written = text.write([Group(prompt or prompt_of(), list(rollouts))])
    return [w if isinstance(w, str) else one(w) for w in written]


def one(pieces: tuple[TeacherTokens, ...]) -> TeacherTokens:
    [piece] = pieces
    return piece


def in_teacher(
    response: str,
    teacher: PreTrainedTokenizerBase = TEACHER,
    policy: PreTrainedTokenizerBase = POLICY,
    ended: bool = True,
    **data: object,
) -> tuple[str, str]:
    """(context, response) that the teacher reads, as its own tokenizer decodes them."""
    text = text_teachers.text_for(policy, [END], teacher, **data)
    prompt = prompt_of(policy=policy, system=str(data.get("system_prompt", "")))
    [written] = write(text, rollout_of(ids(policy, response), ended), prompt=prompt)
    assert isinstance(written, TeacherTokens), written
    return teacher.decode(written.prompt), teacher.decode(written.response)


def reason(rollout: Rollout, teacher: PreTrainedTokenizerBase = TEACHER, **more: object) -> str:
    text = text_teachers.text_for(POLICY, [END], teacher, **more)  # type: ignore[arg-type]
    [written] = write(text, rollout)
    assert isinstance(written, str), written
    assert written in REASONS
    return written


def test_the_teacher_reads_its_own_template_and_end_and_the_same_text():
    context, response = in_teacher("hello, 2+2=4")
    assert context == "<s><|user|>say hello<|model|>"
    assert response == "hello, 2+2=4</s>"


def test_its_tokens_are_its_own():
    text = text_teachers.text_for(POLICY, [END], TEACHER)
    own = ids(POLICY, "hello")
    [written] = write(text, rollout_of(own))
    assert isinstance(written, TeacherTokens)
    assert len(own) == 1 and TEACHER.convert_ids_to_tokens(written.response) == ["h", "e", "llo", "</s>"]
    assert written.joint == 0


def test_a_response_that_was_cut_off_has_no_end():
    assert in_teacher("hello", ended=False)[1] == "hello"


def test_an_end_without_text_is_a_response():
    assert in_teacher("")[1] == "</s>"


def test_the_system_prompt_reaches_the_teachers_template():
    context, _ = in_teacher("hi", system_prompt="Be brief.")
    assert context == "<s><|user|>Be brief. | <|user|>say hello<|model|>"


def test_a_template_that_takes_no_system_prompt_is_refused_at_the_start():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    teacher = text_teachers.byte_level(refusing + text_teachers.TEMPLATE)
    text = text_teachers.text_for(POLICY, [END], teacher, system_prompt="Be brief.")
    prompt = prompt_of(system="Be brief.")
    with pytest.raises(ConfigError, match=r"teacher\.path: .*no system"):
        text.check(prompt)
    assert write(text, rollout_of(ids(POLICY, "hi")), prompt=prompt) == ["prompt"]
    with pytest.raises(DataError, match=r"system_prompt needs a chat template"):
        text_teachers.text_for(POLICY, [END], text_teachers.byte_level(None), system_prompt="Be brief.")


def test_white_space_at_the_joint_stays_although_the_template_trims_messages():
    assert in_teacher("  hello \n")[1] == "  hello \n</s>"


@pytest.mark.parametrize("response", ["hello", " hello", "héllo ünd 猫", "1 + 1", "<0x41>", "\u00a0x"])
def test_a_tokenizer_that_puts_a_space_before_texts_reads_the_same_text(response: str):
    teacher = text_teachers.metaspace()
    text = text_teachers.text_for(POLICY, [END], teacher)
    [written] = write(text, rollout_of(ids(POLICY, response)))
    assert isinstance(written, TeacherTokens), written
    prompt = "<s><|user|>say hello<|model|>"
    assert [*written.prompt, *written.response] == list(ids(teacher, prompt + response + "</s>"))


@pytest.mark.parametrize("response", ["hello", " hello", "1 + 1", "猫"])
def test_a_policy_that_writes_spaces_before_words_keeps_its_text(response: str):
    policy = text_teachers.metaspace()
    text = text_teachers.text_for(policy, [1], TEACHER)
    prompt = prompt_of(policy=policy)
    joined = ids(policy, prompt.text + response)
    assert joined[: len(prompt.token_ids)] == prompt.token_ids
    own = rollout_of(joined[len(prompt.token_ids) :], policy_end=1)
    [written] = write(text, own, prompt=prompt)
    assert isinstance(written, TeacherTokens), written
    assert TEACHER.decode(written.response) == response + "</s>"


def test_without_templates_texts_follow_each_other_and_the_first_token_is_the_tokenizers():
    policy, teacher = chat_tokenizer.tokenizer(None), text_teachers.metaspace(None)
    text = text_teachers.text_for(policy, [END], teacher)
    prompt = Prompt("p", ids(policy, "1+1="), "1+1=", record={"prompt": "1+1="})
    [written] = write(text, rollout_of(ids(policy, "2")), prompt=prompt)
    assert isinstance(written, TeacherTokens)
    assert teacher.convert_ids_to_tokens(written.prompt) == ["<s>", "▁1", "+", "1", "="]
    assert teacher.convert_ids_to_tokens(written.response) == ["2", "</s>"]


def test_a_token_over_the_joint_is_scored_and_counted():
    """The teacher has one token for the prompt's last character and the response's first."""
    policy, teacher = chat_tokenizer.tokenizer(None), text_teachers.byte_level(None)
    text = text_teachers.text_for(policy, [END], teacher)
    prompt = Prompt("p", ids(policy, "hel"), "hel", record={"prompt": "hel"})
    joining, apart = write(text, rollout_of(ids(policy, "lo!")), rollout_of(ids(policy, "p")), prompt=prompt)
    assert isinstance(joining, TeacherTokens) and isinstance(apart, TeacherTokens)
    assert teacher.decode(joining.prompt) == "he" and teacher.decode(joining.response) == "llo!</s>"
    assert joining.joint == 1
    assert teacher.decode(apart.prompt) == "hel" and apart.joint == 0


@pytest.mark.parametrize(
    ("policy_opens", "teacher", "context"),
    [
        ("", text_teachers.OPENING, "<|model|>"),
        ("", text_teachers.NOT_THINKING, "<|model|>"),
        ("<think>\n", text_teachers.TEMPLATE, "<|model|><think>\n"),
        ("<think>\n", text_teachers.NOT_THINKING, "<|model|><think>\n"),
        ("<think>\n\n</think>\n\n", text_teachers.OPENING, "<|model|><think>\n\n</think>\n\n"),
    ],
)
def test_a_turn_begins_as_the_policys_whatever_the_teachers_template_opens(
    policy_opens: str, teacher: str, context: str
):
    policy = chat_tokenizer.tokenizer(CHATML.replace("assistant\n", "assistant\n" + policy_opens))
    read = in_teacher("2</think>4", text_teachers.byte_level(teacher), policy)
    assert read == (f"<s><|user|>say hello{context}", "2</think>4</s>")


def test_thinking_that_the_teachers_template_drops_is_scored():
    dropping = text_teachers.TEMPLATE.replace(
        "{{ m.content | trim }}", "{{ m.content.split('</think>')[-1] | trim }}"
    )
    response = "<think>\n1+1\n</think>\n2"
    assert in_teacher(response, text_teachers.byte_level(dropping))[1] == response + "</s>"


def test_a_response_without_tokens_is_excluded():
    assert reason(rollout_of([], ended=False)) == "empty"


def test_special_tokens_in_the_text_are_excluded():
    """One that the policy sampled, its letters one by one, and letters that are special to the teacher."""
    start = POLICY.convert_tokens_to_ids("<|im_start|>")
    assert reason(rollout_of([*ids(POLICY, "2"), start])) == "special"
    spelled = [token for letter in "<|im_start|>" for token in ids(POLICY, letter)]
    assert reason(rollout_of(spelled)) == "tokens"
    for mark in ("</s>", "<|user|>"):
        assert reason(rollout_of(ids(POLICY, f"2{mark}3"))) == "special"


def test_added_tokens_that_are_not_special_are_text():
    assert in_teacher("<c></call>2")[1] == "<c></call>2</s>"


def test_a_character_that_was_cut_is_excluded():
    cat = ids(POLICY, "猫")
    assert len(cat) == 3
    assert reason(rollout_of(cat[:2], ended=False)) == "bytes"
    assert reason(rollout_of([*ids(POLICY, "a"), cat[1], *ids(POLICY, "b")])) == "bytes"
    assert in_teacher("\ufffd")[1] == "\ufffd</s>", "the character that stands for others, written as itself"


def test_other_tokens_than_those_of_the_text_are_excluded():
    letters = [token for letter in "hello" for token in ids(POLICY, letter)]
    assert len(letters) == 5 and reason(rollout_of(letters)) == "tokens"


def test_a_prompt_that_the_data_does_not_have_is_excluded():
    text = text_teachers.text_for(POLICY, [END], TEACHER)
    hinted = prompt_of(QUESTION + " loudly")
    changed = Prompt("p", hinted.token_ids, hinted.text, record={"prompt": QUESTION})
    assert write(text, rollout_of(ids(POLICY, "hello")), prompt=changed) == ["prompt"]


def test_a_text_that_the_teacher_forgets_is_excluded():
    lower = text_teachers.lower_case()
    assert reason(rollout_of(ids(POLICY, "Hello")), lower) == "text"
    assert in_teacher("hello", lower)[1] == "hello</s>"
    unknown = text_teachers.metaspace(byte_fallback=False)
    assert reason(rollout_of(ids(POLICY, "猫")), unknown) == "special", "its token for unknown characters"


def test_a_response_that_the_teachers_context_does_not_hold_is_excluded():
    rollout = rollout_of(ids(POLICY, "hello"))
    context, response = in_teacher("hello")
    room = len(ids(TEACHER, context + response))
    [written] = write(text_teachers.text_for(POLICY, [END], TEACHER, longest=room), rollout)
    assert isinstance(written, TeacherTokens)
    assert reason(rollout, longest=room - 1) == "long"


def conversation(second: Sequence[int], agent: str = "") -> Rollout:
    """The policy says hello, is told to go on, and says `second`."""
    first = [*ids(POLICY, "hello"), END]
    between = ids(POLICY, "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    rollout = rollout_of([*first, *second])
    rollout.turns = [Turn(0), Turn(len(first), after=0, given=between, agent=agent)]
    rollout.messages = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": POLICY.decode(second)},
    ]
    return rollout


def test_every_turn_is_scored_after_the_messages_before_it_and_nothing_else_is():
    text = TextTeacher(text_teachers.text_for(POLICY, [END], TEACHER))
    prompt = prompt_of()
    talk, single = conversation(ids(POLICY, "2+2")), rollout_of(ids(POLICY, "hello"))
    groups, warnings = text.begin([Group(prompt, [talk, single])], step=1)
    rows = TrainBatch.from_groups(groups).trained()
    of_teacher = text.rows(rows)
    assert not warnings and [
        (TEACHER.decode(context), TEACHER.decode(response))
        for context, response in zip(of_teacher.prompt_ids, of_teacher.response_ids, strict=True)
    ] == [
        ("<s><|user|>say hello<|model|>", "hello</s>"),
        ("<s><|user|>say hello<|model|>hello</s><|user|>go on<|model|>", "2+2</s>"),
        ("<s><|user|>say hello<|model|>", "hello</s>"),
    ]
    teacher_r = -torch.rand(of_teacher.offsets[-1])
    first, second, other = of_teacher.sequence_sum(teacher_r).tolist()
    sums_n = rows.sequence_sum(text.spread(rows, teacher_r))
    torch.testing.assert_close(sums_n, torch.tensor([first + second, other]))


def test_a_conversation_whose_turns_are_not_its_messages_is_excluded():
    assert reason(conversation(ids(POLICY, "2"), agent="other")) == "turns"
    silent = conversation(ids(POLICY, "2"))
    silent.messages = silent.messages[:2]
    assert reason(silent) == "turns"
    changed = conversation(ids(POLICY, "2"))
    changed.messages[2] = {"role": "assistant", "content": "3"}
    assert reason(changed) == "turns"
    assert reason(conversation(ids(POLICY, "猫")[:2])) == "bytes", "a fault of one turn is the conversation's"


def test_responses_keep_their_order_beside_excluded_ones():
    text = text_teachers.text_for(POLICY, [END], TEACHER)
    good = rollout_of(ids(POLICY, "hello"))
    other = prompt_of("say 2")
    groups = [
        Group(prompt_of(), [rollout_of([], ended=False), good]),
        Group(other, [rollout_of(ids(POLICY, "2")), rollout_of(ids(POLICY, "猫")[:2])]),
    ]
    written = text.write(groups)
    texts = [w if isinstance(w, str) else TEACHER.decode([*one(w).prompt, *one(w).response]) for w in written]
    assert texts == [
        "empty",
        "<s><|user|>say hello<|model|>hello</s>",
        "<s><|user|>say 2<|model|>2</s>",
        "bytes",
    ]


def test_the_loss_gets_the_teachers_sums_and_the_policys_lengths():
    """GVPO++'s gradient by its formula, of the responses that are left."""
    text = TextTeacher(text_teachers.text_for(POLICY, [END], TEACHER))
    responses = ["hello", "2+2=4", "猫", ""]
    rollouts = [rollout_of(ids(POLICY, response)) for response in responses]
    rollouts.insert(1, rollout_of(ids(POLICY, "猫")[:2], ended=False))
    groups, [warning] = text.begin([Group(prompt_of(), rollouts)], step=3)
    assert warning.startswith("step 3: 1 of 5 responses are not valid UTF-8")
    assert text.metrics["teacher/excluded"] == text.metrics["teacher/excluded_bytes"] == 0.2
    assert not text.begin(groups, step=4)[1], "a reason is told once"
    rows = TrainBatch.from_groups(groups).trained()
    of_teacher = text.rows(rows)
    assert len(rows) == len(of_teacher) == 4
    assert rows.length_n.tolist() == [2, 6, 4, 1] and of_teacher.length_n.tolist() == [4, 6, 4, 1]

    torch.manual_seed(0)
    teacher_r = -5 * torch.rand(of_teacher.offsets[-1])
    rows = rows.with_columns(ref_logp_r=text.spread(rows, teacher_r))
    logp_r = -torch.rand(rows.offsets[-1], dtype=torch.float64, requires_grad=True)
    share, _ = GVPOPlusPlus(alpha=0.5)(LossInputs(rows, logp_r, BatchTotals.of(rows)))
    (gradient_r,) = torch.autograd.grad(share, logp_r)
    weight_n = rows.length_n.double() ** -0.5
    z_n = weight_n * (rows.sequence_sum(logp_r.detach()) - of_teacher.sequence_sum(teacher_r.double()))
    expected_n = weight_n * (z_n - z_n.mean()) / 3
    torch.testing.assert_close(gradient_r, expected_n[rows.seq_r], rtol=1e-5, atol=1e-6)
