"""A role that no message has is refused by name, where the chat template would write it without an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.demonstrations import DemonstrationReader
from megatron_gvpo.data.messages import check_roles, compared_texts
from megatron_gvpo.data.prompts import load_prompts
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)
# As Llama 3.1 and gpt-oss look at roles.
LLAMA = (
    "{% for message in messages %}{% if message.role == 'tool' or message.role == \"ipython\" %}T"
    "{% elif not (message.role == 'user') and message['role'] in ['developer', 'system'] %}S{% endif %}"
    "{{ message.content }}{% endfor %}"
)


def tokenizer_with(task: Path, template: str) -> Any:
    tokenizer = load_tokenizer(str(task / "model"))
    tokenizer.chat_template = template
    return tokenizer


def load(tmp_path: Path, tokenizer: Any, chat: Any, **data: Any) -> Any:
    file = tmp_path / "chats.jsonl"
    good = [{"role": "user", "content": "1+1="}]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (good, chat)))
    dataset = DatasetConfig(path=str(file), answer_key=None)
    return load_prompts(dataset, DataConfig(train=dataset, **data), tokenizer, longest=900, end_token_ids=[1])


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("human", ": write user"),
        ("gpt", ": write assistant"),
        ("USER", ": write user"),
        (" user", ": write user"),
        ("asistant", ": write assistant"),
        ("model", ": write assistant"),
        ("", ""),
        ("wizard", ""),
        ("developer", ""),
    ],
)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_an_unknown_role_is_refused(task: Path, tmp_path: Path, role: str, meant: str, system: str) -> None:
    """Fails on the old code, which trained on `<|im_start|>human`."""
    chat = [{"role": "user", "content": "1+"}, {"role": role, "content": "1="}]
    with pytest.raises(DataError) as refused:
        load(tmp_path, tokenizer_with(task, CHATML), chat, system_prompt=system or None)
    assert str(refused.value) == (
        f"{tmp_path / 'chats.jsonl'}, line 2: message 1 has the role {role!r}, and roles are system, user, "
        f"assistant, tool; further ones count where the chat template compares with them{meant}"
    )


@pytest.mark.parametrize("role", ["user", "developer", "ipython"])
def test_a_role_that_the_template_knows_is_taken(task: Path, tmp_path: Path, role: str) -> None:
    chat = [{"role": "assistant", "content": "1"}, {"role": role, "content": "1+1="}]
    first, second = load(tmp_path, tokenizer_with(task, LLAMA), chat)
    assert first.text == "1+1=" and second.text.endswith("1+1=")


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["tool", "user"], "message 0 has the role 'tool' and is the first"),
        (["user", "tool"], "message 1 has the role 'tool' and follows one of user"),
        (["system", "tool", "user"], "message 1 has the role 'tool' and follows one of system"),
    ],
)
def test_a_tool_answers_a_call(task: Path, tmp_path: Path, roles: list[str], words: str) -> None:
    chat = [{"role": role, "content": "1+1="} for role in roles]
    with pytest.raises(
        DataError, match=rf"line 2: {words}.*must follow the message of the assistant that calls"
    ):
        load(tmp_path, tokenizer_with(task, CHATML), chat)
    check_roles([{"role": role} for role in ("user", "assistant", "tool", "tool", "assistant", "tool")])


@pytest.mark.parametrize("chat", [True, False])
def test_demonstrations_have_roles_too(task: Path, chat: bool) -> None:
    """Fails on the old code: without a template the policy's turn `gpt` was taken for the environment's."""
    solution = [{"role": role, "content": "1"} for role in ("assistant", "human", "gpt", "user", "assistant")]
    read = DemonstrationReader(tokenizer_with(task, CHATML), [1], chat, ())
    with pytest.raises(DataError, match=r"message 1 has the role 'human'.*: write user"):
        read(solution)


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (CHATML, ()),
        (LLAMA, ("tool", "ipython", "user", "developer", "system")),
        ("{% set role = messages[0]['role'] %}{% if role != 'function' %}{% endif %}", ("function",)),
        ("{% if messages[0].get('role') == 'observation' %}{% endif %}", ("observation",)),
        ("{% if messages[0].role | lower in ('critic',) %}{% endif %}", ("critic",)),
        ("{{ {'user': 'U', 'judge': 'J'}[messages[0]['role']] }}", ("user", "judge")),
        ("{% generation %}{% if message.role == 'a' %}{% endif %}{% endgeneration %}", ("a",)),
        ("{% if messages[0].content == 'human' %}human{% endif %}{{ 'wizard' }}", ()),
        ("{% if", ()),
    ],
)
def test_a_template_knows_the_roles_with_which_it_compares(template: str, roles: tuple[str, ...]) -> None:
    assert compared_texts(template) == roles
