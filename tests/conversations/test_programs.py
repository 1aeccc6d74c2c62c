"""Programs of real processes, with the real OpenAI client, against the proxy. The policy is scripted."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from helpers.inputs.chat_tokenizer import CHATML, END, ids, tokenizer
from helpers.machine.processes import command_of
from helpers.paths import HELPERS
from helpers.suite.real_parts import used

from megatron_gvpo.conversations import dialogue, proxy
from megatron_gvpo.conversations.chat import (
    RequestRefused,
    answer_of,
    begins_with,
    check_former,
    overrides,
    read_message,
)
from megatron_gvpo.conversations.conversations import BatchedPolicy
from megatron_gvpo.conversations.converse import ConversationLimits
from megatron_gvpo.conversations.dialogue import AnsweredCalls, Dialogue
from megatron_gvpo.conversations.program_runner import ProgramRunner
from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import LOST, Prompt, Rollout
from megatron_gvpo.servers.request import Request, pack, unpack
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import segments

PROGRAMS = HELPERS / "programs" / "agent_programs.py"
# Tools and calls of them, as Qwen2.5 writes them.
WITH_CALLS = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>",
)
SECONDS = 200.0  # that a program may be idle: a busy machine takes its time


class Script:
    """A policy that says `answer(context, call)`: a text, or tokens. It records what it was asked."""

    def __init__(self, answer: Callable[[str, int], str | list[int]]) -> None:
        self._answer, self.of = answer, tokenizer(WITH_CALLS)
        self.record: list[tuple[int, tuple[int, ...], list[int]]] = []
        self.seeds: list[int] = []
        self.departed: set[int] = set()

    async def respond(self, conversation: int, request: Request) -> Rollout:
        await asyncio.sleep(0.01)
        calls = sum(number == conversation for number, _, _ in self.record)
        answer = self._answer(self.of.decode(list(request.prompt_ids)), calls)
        own = [*ids(self.of, answer), END] if isinstance(answer, str) else answer
        reason = "stop" if len(own) <= (request.max_tokens or 0) else "length"
        own = own[: request.max_tokens]
        self.record.append((conversation, request.prompt_ids, own))
        self.seeds.append(request.seed)
        return Rollout(list(own), [-0.5] * len(own), "", reason, 7)

    def end(self, conversation: int) -> None:
        self.departed.add(conversation)


class Harness:
    """Programs that are open for a test."""

    def __init__(self, **options: Any) -> None:
        self.of = tokenizer(WITH_CALLS)
        task = Task(self.of, (END,), [], [], chat=True)
        settings = {"turns": 12, "step_timeout": SECONDS, "workers": 2, **options}
        spec = f"{PROGRAMS}:run"
        self.config = ConversationConfig(program=spec, **settings)
        self._programs, self._runner = ProgramRunner(self.config, spec, task), asyncio.Runner()

    def __enter__(self) -> Harness:
        self._programs.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()
        self._programs.__exit__(None, None, None)

    def hold(
        self,
        prompts: list[Prompt],
        answer: Callable[[str, int], str | list[int]],
        n: int = 1,
        most: int = 4000,
    ) -> list[list[Rollout]]:
        """Every rollout's segments are compared with what the policy was asked."""
        self.policy = Script(answer)
        requests = [Request(p.token_ids, n, seed=100 + i) for i, p in enumerate(prompts)]
        sampling = SamplingConfig(max_tokens=most)
        running = self._programs.run_all(self.policy, prompts, requests, sampling)
        groups = self._runner.run(asyncio.wait_for(running, 500))
        used("agent programs")
        assert self.policy.departed == set(range(n * len(prompts)))
        for number, (p, rollout) in enumerate(
            (p, r) for p, g in zip(prompts, groups, strict=True) for r in g
        ):
            if rollout.finish_reason != LOST:
                check_contexts(p, rollout, [(c, o) for i, c, o in self.policy.record if i == number])
        return groups


def check_contexts(prompt: Prompt, rollout: Rollout, record: list[tuple[tuple[int, ...], list[int]]]) -> None:
    """Every own token occurs once, after exactly the context that the policy was asked with."""
    sequences = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
    begins = [turn.begin for turn in rollout.turns] + [len(rollout.token_ids)]
    placed: list[int] = []
    for segment in sequences:
        for position, first, count in segment.own:
            turn = begins.index(first)
            sampled = rollout.token_ids[first : begins[turn + 1]]
            assert count == len(sampled) and segment.ids[position : position + count] == sampled
            assert (tuple(segment.ids[:position]), sampled) in record
            placed += range(first, first + count)
    assert sorted(placed) == list(range(len(rollout.token_ids)))
    assert len(rollout.logprobs) == len(rollout.token_ids)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with Harness() as opened:
        yield opened


def prompt(does: str, **record: Any) -> Prompt:
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    return Prompt(does, ids(tokenizer(WITH_CALLS), text), text, record={"does": does, **record})


def call(a: int, b: int) -> str:
    return f'so <tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_an_openai_tool_loop_is_one_chat_of_the_tokens_that_were_sampled(harness: Harness) -> None:
    of = harness.of
    drift = [*of.convert_tokens_to_ids(["he", "llo"]), *ids(of, call(5, 4)), END]  # "hello" is one token
    answers: list[str | list[int]] = [call(2, 3), drift, "9"]
    [[rollout]] = harness.hold([prompt("tool_loop")], lambda _, i: answers[i])
    assert [(t.after, t.keep) for t in rollout.turns][1:] == [(0, None), (1, None)]
    assert len(segments(prompt("x").token_ids, rollout.token_ids, rollout.turns)) == 1
    assert of.decode(rollout.turns[1].given).startswith(
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>"
    )
    assert '"name": "add"' in of.decode(rollout.turns[0].given), "the tools reach the template"
    assert (rollout.counts["right"], rollout.counts["environment_reward"]) == (1.0, 1.0)
    assert rollout.counts["overridden_calls"] == 1, "a call with another temperature"
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in rollout.messages] == roles
    assert (rollout.finish_reason, rollout.counts["retried_calls"]) == ("stop", 0)


def test_a_call_may_name_the_stop_strings_of_the_run() -> None:
    run = SamplingConfig(stop=("</a>",))
    assert not any(overrides({"stop": stop}, run) for stop in (None, [], "</a>", ["</a>"]))
    assert overrides({"stop": ["</b>"]}, run) and overrides({"stop": "</a>"}, SamplingConfig())


@pytest.mark.parametrize(
    "option",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"parallel_tool_calls": False},
        {"stop_token_ids": [3]},
        {"ignore_eos": True},
        {"min_tokens": 5},
        {"structured_outputs": {"regex": "a|b"}},
    ],
)
def test_a_call_that_asks_for_other_samples_is_counted(option: dict[str, Any]) -> None:
    run = SamplingConfig(stop_token_ids=(4,))
    assert overrides(option, run)
    assert not overrides(dict.fromkeys(option), run) and not overrides({"stop_token_ids": [4]}, run)


def test_thoughts_beside_a_messages_content_reach_the_chat_template() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    assert read_message(message) == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    other = read_message({**message, "reasoning": "1 + 3"})
    assert begins_with([read_message(message)], [message]) and not begins_with([other], [message])


def test_functions_in_their_former_form_are_refused() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    with pytest.raises(RequestRefused, match="function_call is not read: use tools and tool_calls"):
        read_message(call)
    with pytest.raises(RequestRefused, match="functions is not read"):
        check_former({"functions": [{"name": "add"}], "function_call": "auto"})
    check_former({"functions": None})


def test_sub_agents_ask_at_the_same_time_and_have_names(harness: Harness) -> None:
    [group] = harness.hold([prompt("sub_agents")], lambda context, i: f"{i}", n=3)
    for rollout in group:
        agents = [turn.agent for turn in rollout.turns]
        assert sorted(agents) == ["", "", "one", "one", "two", "two"] and agents[0] == agents[-1] == ""
        assert len(segments(prompt("x").token_ids, rollout.token_ids, rollout.turns)) == 3
        assert rollout.counts["environment_reward"] == 0.5
    assert len(set(harness.policy.seeds)) == 18


def test_an_agents_name_is_text_whatever_bytes_the_header_has() -> None:
    """A rollout's file takes no half of a surrogate pair, as which aiohttp reads other bytes."""
    names = list[str]()

    async def handler(request: web.Request) -> web.Response:
        names.append(proxy._agent(request))
        return web.Response()

    async def ask() -> None:
        app = web.Application()
        app.router.add_get("/", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Agent: one \xff\r\n\r\n")
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await runner.cleanup()

    asyncio.run(ask())
    assert names == ["one ?"]


def test_of_retries_the_answer_counts_that_a_later_call_shows(harness: Harness) -> None:
    [[rollout]] = harness.hold([prompt("retries")], lambda _, i: f"try {i}")
    texts = [harness.of.decode(rollout.token_ids[t.begin : t.begin + 5]) for t in rollout.turns]
    assert texts == ["try 0", "try 4"], "shown, and the last of two that are not"
    assert rollout.counts["retried_calls"] == 3


def test_tools_that_are_made_for_every_task_are_forgotten(harness: Harness) -> None:
    """The run would grow with every task."""
    for number in range(300):
        harness._programs._template(json.dumps([{"type": "function", "function": {"name": f"f{number}"}}]))
    assert len(harness._programs._templates) < 250 and "" in harness._programs._templates


def test_a_long_chat_is_kept_once_and_not_once_for_every_call() -> None:
    """A batch of agents with a hundred turns would take gigabytes."""
    calls, chat = AnsweredCalls((5,)), [{"role": "user", "content": "a"}]
    for number in range(100):
        response = Rollout([6, END], [-0.5] * 2, "", "stop")
        answer = {"role": "assistant", "content": f"{number}"}
        calls.add(tuple(range(5, 6 + number)), response, messages=[dict(m) for m in (*chat, answer)])
        chat += [answer, {"role": "user", "content": "b"}]
    assert len({id(m) for call in calls.calls for m in call.messages}) < 300
    assert [len(call.messages) for call in calls.calls] == list(range(2, 202, 2))


def test_of_several_answers_the_one_that_is_sent_back_without_its_thoughts_is_trained() -> None:
    """Reasoning models get their answers back so; the last answer was trained in its place."""
    calls, chat = AnsweredCalls((1, 2)), [{"role": "user", "content": "a"}]
    for content, token_ids in (("<think>long</think>one", [5, 6, END]), ("<think>so</think>two", [7, END])):
        answer = {"role": "assistant", "content": content}
        calls.add((1, 2), Rollout(token_ids, [-0.5] * len(token_ids), "", "stop"), messages=[*chat, answer])
    chat += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "b"}]
    last = {"role": "assistant", "content": "three"}
    calls.add((1, 2, 6, END, 3), Rollout([4, END], [-0.5] * 2, "", "stop"), messages=[*chat, last])
    assert [call.number for call in calls.without_retries()] == [0, 2]


def test_a_call_that_its_client_gives_up_uses_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "_MOST_GIVEN_UP", 3)

    async def respond(request: Request) -> Rollout:
        await asyncio.sleep(0.05)
        return Rollout([7], [-0.1], "", "stop")

    async def converse() -> list[int]:
        limits = ConversationLimits(2, 100, 10, 64)
        calls = Dialogue(respond, lambda _: None, Prompt("0", (1, 2), "p"), 1, limits, 8)
        lengths = []
        for seconds in (0.01, 0.01, 9, 0.01, 9):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    answer = await calls.ask((1, 2), None)
                    calls.record((1, 2), answer, "")
                    lengths.append(len(answer.token_ids))
        return lengths

    with pytest.raises(RequestRefused, match="gave up 3 calls"):
        asyncio.run(converse())
    monkeypatch.setattr(dialogue, "_MOST_GIVEN_UP", 4)
    assert asyncio.run(converse()) == [1, 1]


def test_compaction_and_stripped_thinking_begin_segments(harness: Harness) -> None:
    [[cut], [forgets]] = harness.hold(
        [prompt("compaction"), prompt("forgetful")], lambda _, i: f"<think>{i}</think>it is {i}"
    )
    assert len(segments(prompt("x").token_ids, cut.token_ids, cut.turns)) == 2
    keeps = [turn.keep for turn in cut.turns]
    assert keeps[1:3] == [None, None] and keeps[3] is not None and keeps[4] is None
    assert len(segments(prompt("x").token_ids, forgets.token_ids, forgets.turns)) == 3


def test_limits_are_errors_that_openai_clients_understand() -> None:
    with Harness(turns=3, turn_tokens=20) as harness:
        caught, careless = harness.hold([prompt("limits"), prompt("careless")], lambda _, i: "x" * 9)
        assert (len(caught[0].turns), caught[0].finish_reason) == (3, "length")
        assert (caught[0].counts["refused_turns"], caught[0].counts["environment_reward"]) == (1.0, 0.25)
        assert (len(careless[0].turns), careless[0].finish_reason) == (3, "length"), "it is scored, not lost"
        assert careless[0].counts["environment_reward"] == 0
        [[killed]] = harness.hold([prompt("killed_at_the_limit")], lambda _, i: "x" * 9)
        assert killed.finish_reason == LOST and "signal 9" in killed.text, "it is lost, not scored"
        [[full]] = harness.hold([prompt("limits")], lambda _, i: "x" * 9, most=60)
        assert full.finish_reason == "length" and full.counts["refused_context_length_exceeded"] == 1
        environment_tokens = sum(len(turn.given) for turn in full.turns)
        assert 40 < len(full.token_ids) + environment_tokens <= 60
        harness.hold([prompt("limits")], lambda _, i: "x" * 50)
        assert [len(o) for _, _, o in harness.policy.record] == [20, 20, 20]


def test_a_text_that_cannot_fit_is_refused_before_it_is_made_into_tokens() -> None:
    """30 MB took seven gigabytes and minutes, in which nobody was served and no signal was heard."""
    begin = time.monotonic()
    with Harness() as harness:
        [[rollout]] = harness.hold([prompt("shouts")], lambda _, i: "x", most=60)
    assert rollout.counts["environment_reward"] == 0.5 and rollout.finish_reason == "length"
    assert len(rollout.turns) == 1 and time.monotonic() - begin < 60


def test_a_program_that_asks_for_ever_is_ended_and_scored() -> None:
    """It catches the refusals, as some loops do, and would never return."""
    with Harness(turns=2, step_timeout=5) as harness:
        [[rollout]] = harness.hold([prompt("insists")], lambda _, i: "hm")
    assert (rollout.finish_reason, rollout.counts["environment_reward"]) == ("length", 0)


def test_a_program_has_so_many_seconds_between_its_answers() -> None:
    with Harness(turns=9, rollout_timeout=5) as harness:
        [[rollout]] = harness.hold([prompt("slow")], lambda _, i: f"{i}")
    assert (
        rollout.finish_reason == "length" and 1 <= rollout.counts["retried_calls"] + len(rollout.turns) <= 2
    )


@pytest.mark.parametrize(
    ("does", "problem"),
    [
        ("exit", "it ended its process (exit code 3)"),
        ("fail", "RuntimeError: a bug (agent_programs.py, line "),
        ("silent", "it returned without an answer of the policy"),
        ("lie", "the program returned str 'yes': want the reward as a number, a Reply or None"),
        ("no_key", "AuthenticationError: Error code: 401 - no running rollout has this key"),
        ("responses", "POST /v1/responses: Not Found; this endpoint has /v1/chat/completions, /inference"),
    ],
)
def test_a_program_that_fails_twice_is_lost_and_no_other(harness: Harness, does: str, problem: str) -> None:
    [bad], [good] = harness.hold([prompt(does), prompt("late")], lambda _, i: "hm")
    assert bad.finish_reason == LOST and problem in bad.text and not bad.token_ids
    assert good.finish_reason == "stop" and good.counts["environment_reward"] == 1


def test_a_program_that_hangs_is_ended_and_lost() -> None:
    with Harness(step_timeout=3) as harness:
        [[rollout]] = harness.hold([prompt("hang")], lambda _, i: "hm")
        assert rollout.finish_reason == LOST
        problem = "it neither asked the policy nor returned for 3 seconds (rollout.conversation.step_timeout)"
        assert rollout.text == problem
        deadline = time.monotonic() + 50  # of the 60 s that it hangs
        while running_programs() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running_programs() == []


def running_programs() -> list[psutil.Process]:
    """The processes of programs: below a guard is the process that starts them, and below that they are."""
    guards = [c for c in psutil.Process().children() if "workers.programs" in " ".join(command_of(c))]
    assert guards
    programs = [p for guard in guards for p in guard.children(recursive=True)[1:]]
    return [p for p in programs if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_programs_wait_for_a_starter_that_has_no_time() -> None:
    """Its channel is full by then: four prompts of 60 kB. With another starter, all programs would end."""
    with Harness(workers=1) as harness:
        [started] = harness._programs._starters
        [starter] = psutil.Process(started._process.pid).children()
        starter.suspend()
        threading.Timer(4, starter.resume).start()
        groups = harness.hold([prompt("late", pad="x" * 60_000) for _ in range(8)], lambda _, i: "hm")
        assert starter.is_running() and all(r.finish_reason == "stop" for [r] in groups)


@pytest.mark.parametrize("does", ["exit_once", "kill_starter_once"])
def test_a_program_that_fails_once_is_started_again(harness: Harness, tmp_path: Path, does: str) -> None:
    [[rollout], [other]] = harness.hold(
        [prompt(does, mark=str(tmp_path / "m")), prompt("late")], lambda _, i: "hm"
    )
    assert len(rollout.turns) == 1 and rollout.counts["environment_reward"] == 1
    assert other.finish_reason == "stop"
    seeds = [
        seed for seed, (i, _, _) in zip(harness.policy.seeds, harness.policy.record, strict=True) if i == 0
    ]
    assert len(seeds) == 2 and seeds[0] == seeds[1], "the same samples"


def test_a_program_that_always_kills_its_starter_costs_no_other() -> None:
    """All share one starter, so that whoever kills it ends the first attempt of the others, too.

    The policy answers in rounds, as the embedded engine does: no conversation may wait for another's end.
    """
    with Harness(workers=1) as harness:
        answer = [*ids(harness.of, "hm"), END]
        policy = BatchedPolicy(
            lambda batch: [[Rollout(answer, [-0.5] * len(answer), "", "stop", 7)] for _ in batch], 5
        )
        prompts = [prompt("kill_starter"), *[prompt("late") for _ in range(4)]]
        requests = [Request(p.token_ids, 1, seed=i) for i, p in enumerate(prompts)]
        running = harness._programs.run_all(policy, prompts, requests, SamplingConfig(max_tokens=4000))
        [[killer], *others] = harness._runner.run(asyncio.wait_for(running, 120))
    assert [rollout.finish_reason for [rollout] in others] == ["stop"] * 4
    assert killer.finish_reason == LOST and "the process that starts programs" in killer.text


def test_other_ways_to_ask(harness: Harness) -> None:
    errors = {
        "n": "n=2: one answer a call; ask several times for more, each time with another X-Agent "
        "header or user, because equal calls of one agent count as retries",
        "image": "a message has content that is not a text, which the policy cannot read",
        "role": "a message needs a role, and a text as its content",
        "empty": "messages: List should have at least 1 item after validation, not 0",
        "tokens": "max_tokens: Input should be greater than 0",
    }
    prompts = [prompt("environment"), prompt("tokens"), prompt("refused", **errors)]
    [[variables], [tokens], [refused]] = harness.hold(prompts, lambda _, i: "abc")
    assert len(variables.token_ids) == 2 and variables.finish_reason == "length"
    assert [(t.after, t.keep, t.given) for t in tokens.turns] == [(-1, None, ()), (0, None, (7, 8))]
    assert tokens.counts["overridden_calls"] == 2
    assert all(refused.counts[name] == 1 for name in errors)


def test_random_programs_are_trained_in_the_contexts_that_were_sampled(harness: Harness) -> None:
    """`Harness.hold` compares every rollout with the policy's own record."""
    rng = random.Random(5)
    used_tokens = set[tuple[int, ...]]()

    def say(context: str, _: int) -> list[int]:
        while (tokens := tuple(rng.randrange(5, 200) for _ in range(rng.randrange(1, 6)))) in used_tokens:
            pass
        used_tokens.add(tokens)
        return [*tokens, END]

    prompts = [prompt("anything", seed=seed) for seed in range(24)]
    groups = harness.hold(prompts, say)
    assert all(r.finish_reason == "stop" for [r] in groups), [r.text for [r] in groups]
    several = [
        len(segments(p.token_ids, r.token_ids, r.turns)) for p, [r] in zip(prompts, groups, strict=True)
    ]
    assert max(several) > 2 and sum(r.counts["retried_calls"] for [r] in groups) > 0
    assert sum(len(r.turns) for [r] in groups) > 50


def test_half_a_surrogate_pair_in_a_call_stays_json() -> None:
    """Ranks exchange the messages of a conversation, and no UTF-8 has it."""
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    message = read_message({"role": "assistant", "content": None, "tool_calls": [call]})
    json.dumps(message, ensure_ascii=False).encode()
    text = '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'
    answer, reason = answer_of(text, "hermes", True, 1)
    assert (answer["content"], reason) == (text, "stop")


@pytest.mark.parametrize("value", [str(10**30), "[" * 1100 + "]" * 1100])
def test_whatever_the_policy_writes_in_a_call_reaches_the_other_ranks(value: str) -> None:
    """The run ended with an error of msgpack's."""
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    answer, reason = answer_of(text, "hermes", True, 1)
    rollout = Rollout([5], [-0.5], "", "stop", messages=[read_message(answer)])
    [again] = all_gather_msgpack(pack([[rollout]]))
    assert reason == "tool_calls" and unpack(again) == [[rollout]]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Agent", "it is a class; a program is a function run(prompt, endpoint)"),
        ("short", "it is called as run(prompt, endpoint) with options {}: too many positional arguments"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_is_no_program_is_an_error_at_the_start(tmp_path: Path, name: str, problem: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Agent:\n    pass\n\n\ndef short(prompt):\n    pass\n")
    spec = f"{file}:{name}"
    programs = ProgramRunner(
        ConversationConfig(program=spec), spec, Task(tokenizer(), (END,), [], [], chat=True)
    )
    with pytest.raises(ConfigError) as error, programs:
        pass
    assert str(error.value).startswith(f"rollout.conversation.program={spec}: ") and problem in str(
        error.value
    )


def test_a_program_is_the_only_partner(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of environment, tools and program"):
        ConversationConfig(program="a.py:run", environment="b.py:B")
