"""Cobalt on conversations: each is cut at the policy's turns, and every beginning goes on as it went on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.suite.real_parts import used
from test_template import END, ids, tokenizer

from megatron_gvpo.conversations.conversations import Conversations
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.data.converters import beginnings
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig

# It remembers what was said, and pays for the length of it; the third turn ends the conversation.
ENVIRONMENT = """
from megatron_gvpo.conversations import Reply

class Remembers:
    def reset(self, prompt, seed):
        self.texts = []

    def step(self, response):
        self.texts.append(response)
        paid = len("".join(self.texts)) / 10
        return Reply(None if len(self.texts) == 3 else "+".join(self.texts), reward=paid)
"""
SAID = ["hello", "llo he", "h"]


class Policy:
    """Says these texts turn by turn."""

    def __init__(self, texts: list[str]) -> None:
        self._texts, self.contexts = list(texts), list[tuple[int, ...]]()

    async def respond(self, conversation: int, request: Request) -> Rollout:
        self.contexts.append(request.prompt_ids)
        tokens = [*ids(OF, self._texts.pop(0)), END]
        return Rollout(tokens, [-0.5] * len(tokens), "", "stop", 1)

    def end(self, conversation: int) -> None:
        pass


OF = tokenizer()


@contextmanager
def opened(directory: Path, turns: int) -> Iterator[Conversations]:
    used("environment workers")
    file = directory / "remembers.py"
    file.write_text(ENVIRONMENT)
    config = ConversationConfig(
        environment=f"{file}:Remembers", turns=turns, earlier_key="earlier", step_timeout=200
    )
    with Conversations(config, Task(OF, (END,), [], [], chat=True)) as conversations:
        yield conversations


def hold(conversations: Conversations, record: dict[str, object], policy: Policy) -> Rollout:
    text = OF.apply_chat_template(record["prompt"], tokenize=False, add_generation_prompt=True)
    prompt = Prompt("p", ids(OF, text), text, record=record)
    request = Request(prompt.token_ids, 1, seed=7)
    sampling = SamplingConfig(max_tokens=400)
    with asyncio.Runner() as runner:
        [[rollout]] = runner.run(conversations.run_all(policy, [prompt], [request], sampling))
    return rollout


def test_every_beginning_of_a_conversation_goes_on_with_one_turn_as_it_went_on(tmp_path: Path) -> None:
    full_policy = Policy(SAID)
    record = {"prompt": [{"role": "user", "content": "say"}], "earlier": [], "id": 3}
    with opened(tmp_path, turns=3) as conversations:
        rollout = hold(conversations, record, full_policy)
    assert [turn.reward for turn in rollout.turns] == pytest.approx([0.5, 1.1, 1.2])
    cut = beginnings(record, rollout)
    assert [beginning["earlier"] for beginning in cut] == [[], SAID[:1], SAID[:2]] and cut[2]["id"] == 3
    with opened(tmp_path, turns=1) as conversations:
        for i, beginning in enumerate(cut):
            policy = Policy(SAID[i : i + 1])
            next_turn = hold(conversations, beginning, policy)
            assert policy.contexts == [full_policy.contexts[i]], "the context in which the turn was sampled"
            assert [turn.reward for turn in next_turn.turns] == [rollout.turns[i].reward]
            assert next_turn.counts["environment_reward"] == rollout.turns[i].reward
    assert beginnings({"prompt": "say", "earlier": []}, rollout)[1]["prompt"] == cut[1]["prompt"]


def test_a_record_without_earlier_turns_is_named(tmp_path: Path) -> None:
    record = {"prompt": [{"role": "user", "content": "say"}], "earlier": "hello"}
    with (
        opened(tmp_path, turns=1) as conversations,
        pytest.raises(RolloutError, match="earlier_key=earlier: in the record of prompt p it is hello, and"),
    ):
        hold(conversations, record, Policy(SAID))
    with pytest.raises(ValueError, match="earlier_key is for an environment"):
        ConversationConfig(tools=("a.py:f",), earlier_key="earlier")
