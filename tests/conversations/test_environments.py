"""Conversations with real worker processes: turns, limits, failures of both kinds. The policy is scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.machine.processes import command_of
from helpers.suite.real_parts import used

from megatron_gvpo.conversations.conversations import Conversations
from megatron_gvpo.conversations.environments import EnvironmentProcess
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import LOST, Prompt, Rollout
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.servers.request import Request, pack, unpack
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import Turn, segments
from megatron_gvpo.workers import environments as handler
from megatron_gvpo.workers.messages import Function
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.process import CallFailed

# The record's "does" says, turn by turn, what the environment does.
ENVIRONMENT = """
import asyncio, fractions, os, pathlib, signal, time
from megatron_gvpo.conversations import Reply

class Scripted:
    def __init__(self, extra=""):
        self.extra = extra

    async def reset(self, prompt, seed):
        self.prompt, self.seed, self.heard = prompt, seed, []

    def step(self, response):
        self.heard.append(response)
        does = self.prompt.record["does"]
        act = does[min(len(self.heard), len(does)) - 1]
        mark = pathlib.Path(self.prompt.record.get("mark", "."))
        if act == "echo":
            return "+".join(self.heard) + self.extra
        if act == "seed":
            return str(self.seed % 1000)
        if act == "end":
            return Reply(None, reward=0.5, counts={"heard": len(self.heard)})
        if act == "hang" or (act == "hang once" and not mark.exists()):
            mark.touch()
            time.sleep(60)
        if act == "raise":
            raise RuntimeError("the service is down")
        if act == "exit" or (act == "exit once" and not mark.exists()):
            mark.touch()
            os._exit(3)
        if act == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "flood":
            return "9" * 10_000_000
        if act == "slow":
            time.sleep(2)
        if act == "long":
            return "9" * 300
        if act == "lie":
            return {"not": "messages"}
        if act == "nan":
            return Reply("1", reward=float("nan"))
        if act == "paid":
            return Reply(None, reward=True, counts={"half": fractions.Fraction(1, 2)})
        if act == "list":
            return Reply(None, counts=[1])
        if act == "surrogate":
            return "1\\ud8002"
        if act == "print":
            print("x" * 100, flush=True)
            return "1"
        return "1"

class Waiting(Scripted):
    async def step(self, response):
        await asyncio.sleep(60 if self.prompt.record["does"][0] == "wait" else 0.5)
        return f"{os.getpid()}" if super().step(response) == "1" else "+".join(self.heard)
"""
SECONDS = 3.0  # of a step that hangs; a busy machine may need one for a step that does not


@pytest.fixture(scope="module")
def material(task: Path) -> Task:
    """The tiny task's tokenizer: one token a character."""
    tokenizer = load_tokenizer(str(task / "model"))
    return Task(tokenizer, (end_token_id(tokenizer),), [], [])


class Script:
    """A policy that says these texts, turn by turn; each takes as many tokens as the tokenizer gives it."""

    def __init__(self, task: Task, turns: Sequence[str]) -> None:
        self._task, self._turns = task, turns
        self.contexts: dict[int, list[list[int]]] = {}

    async def respond(self, conversation: int, request: Request) -> Rollout:
        seen = self.contexts.setdefault(conversation, [])
        seen.append(list(request.prompt_ids))
        ids = [*encoded(self._task, self._turns[len(seen) - 1]), self._task.end_token_ids[0]]
        reason = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        return Rollout(ids, [-0.5] * len(ids), "", reason, 7 + len(seen))

    def end(self, conversation: int) -> None:
        pass


def encoded(task: Task, text: str) -> list[int]:
    ids: list[int] = task.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scripted.py"
    path.write_text(ENVIRONMENT)
    return path


def prompt(name: str, *does: str, **record: Any) -> Prompt:
    return Prompt(name, (5, 6, 7), "?", record={"does": list(does), **record})


class Harness:
    """Conversations that are open for a test."""

    def __init__(self, task: Task, config: ConversationConfig) -> None:
        self.task, self._runner = task, asyncio.Runner()
        self.conversations = Conversations(config, task)

    def __enter__(self) -> Harness:
        used("environment workers")
        self.conversations.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.conversations.__exit__(None, None, None)
        self._runner.close()

    def hold(
        self, prompts: Sequence[Prompt], turns: Sequence[str], n: int = 1, max_tokens: int = 200
    ) -> list[list[Rollout]]:
        self.policy = Script(self.task, turns)
        requests = [Request(p.token_ids, n, seed=100 + i) for i, p in enumerate(prompts)]
        sampling = SamplingConfig(max_tokens=max_tokens)
        return self._runner.run(self.conversations.run_all(self.policy, prompts, requests, sampling))


@pytest.fixture
def harness(material: Task, file: Path) -> Iterator[Harness]:
    with Harness(material, patient(file)) as opened:
        yield opened


@pytest.fixture
def hasty(material: Task, file: Path) -> Iterator[Harness]:
    """For steps that hang."""
    with Harness(material, patient(file).model_copy(update={"step_timeout": SECONDS})) as opened:
        yield opened


def patient(file: Path) -> ConversationConfig:
    own = {"environment": f"{file}:Scripted", "turns": 4, "observation_tokens": 40, "workers": 2}
    return ConversationConfig(**own, step_timeout=200)


def test_a_conversation_is_the_tokens_that_the_policy_saw_and_said(harness: Harness) -> None:
    [[rollout]] = harness.hold([prompt("a", "echo", "echo", "end")], ["1+2", "3", "4*5"])
    task, end = harness.task, harness.task.end_token_ids[0]
    sampled = [[*encoded(task, text), end] for text in ("1+2", "3", "4*5")]
    heard = [tuple(encoded(task, text)) for text in ("1+2", "1+2+3")]
    assert rollout.token_ids == [t for ids in sampled for t in ids]
    assert rollout.turns == [
        Turn(0, reward=0.0),
        Turn(4, 0, None, heard[0], reward=0.0),
        Turn(6, 1, None, heard[1], reward=0.5),
    ]
    assert rollout.spans == [(8, 0, 4), (9, 4, 6), (10, 6, 10)] and rollout.weight_version == 8
    assert (rollout.finish_reason, len(rollout.logprobs)) == ("stop", 10)
    assert [m["role"] for m in rollout.messages] == ["assistant", "user"] * 2 + ["assistant"]
    assert rollout.counts == {"environment_reward": 0.5, "observation_tokens": 8.0, "heard": 3.0}
    [segment] = segments((5, 6, 7), rollout.token_ids, rollout.turns)
    contexts = harness.policy.contexts[0]
    assert [segment.ids[:position] for position, _, _ in segment.own] == contexts, "trained as it was sampled"
    assert unpack(pack([[rollout]])) == [[rollout]]


def test_members_of_a_group_face_the_same_seed_and_others_another(harness: Harness) -> None:
    first, second = harness.hold([prompt("a", "seed", "end"), prompt("b", "seed", "end")], ["1", "2"], n=3)
    seeds = [[r.messages[1]["content"] for r in group] for group in (first, second)]
    assert len(set(seeds[0])) == len(set(seeds[1])) == 1 and seeds[0] != seeds[1]


def test_limits_end_a_conversation_and_are_never_lost(harness: Harness) -> None:
    [[turns]] = harness.hold([prompt("a", "go")], ["1"] * 9)
    assert (len(turns.turns), turns.finish_reason) == (4, "length")
    [[tokens]] = harness.hold([prompt("a", "go")], ["1"] * 9, max_tokens=7)
    assert (len(tokens.turns), tokens.finish_reason) == (3, "length")  # 2 + 1 + 2 + 1, and 1 for the third
    assert tokens.token_ids[-1] != harness.task.end_token_ids[0]
    assert [turn.reward for turn in tokens.turns] == [0.0, 0.0, None], "it never heard the last"
    [[long]] = harness.hold([prompt("a", "long", "end")], ["1", "2"])
    assert long.messages[1]["content"] == "[300 tokens: too long to be shown]"
    assert (long.counts["observations_dropped"], long.finish_reason) == (1.0, "stop")
    [[flood]] = harness.hold([prompt("a", "flood", "end")], ["1", "2"])
    assert flood.messages[1]["content"] == "[10000000 characters: too long to be shown]"


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("raise", "RuntimeError: the service is down (scripted.py, line 27)"),
        # The second attempt repeats the turn before.
        ("hang", f"it took longer than {2 * SECONDS:g} seconds"),
        ("exit", "it ended its process (exit code 3)"),
        ("killed", "signal 9, Killed (perhaps by the kernel, for memory)"),
        ("lie", "or a Reply"),
        ("nan", "step returned nan as its reward"),
        ("list", "step returned list as its counts: want a mapping of names"),
    ],
)
def test_failures_of_the_environment_lose_the_conversation_and_no_other(
    request: pytest.FixtureRequest, act: str, problem: str
) -> None:
    harness = request.getfixturevalue("hasty" if act == "hang" else "harness")
    prompts = [prompt("bad", "echo", act), prompt("good", "echo", "echo", "end")]
    [bad], [good] = harness.hold(prompts, ["1", "2", "3"])
    assert bad.finish_reason == LOST and problem in bad.text and not bad.token_ids
    assert act not in ("lie", "nan") or bad.text.endswith(problem), "no line of this package"
    assert good.finish_reason == "stop" and good.messages[3]["content"] == "1+2"


@pytest.mark.parametrize("act", ["hang once", "exit once"])
def test_a_worker_that_is_gone_once_is_replaced_and_the_conversation_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, act: str
) -> None:
    harness = request.getfixturevalue("hasty" if act == "hang once" else "harness")
    [[rollout]] = harness.hold(
        [prompt("a", "echo", act, "echo", "end", mark=str(tmp_path / "m"))], list("1234")
    )
    assert rollout.finish_reason == "stop"
    assert rollout.messages[5]["content"] == "1+2+3", "it has heard every turn once"


def test_a_worker_that_is_replaced_has_the_environment_that_the_run_began_with(
    harness: Harness, file: Path, tmp_path: Path
) -> None:
    """A file that is edited while a run goes on is for the next run."""
    file.write_text(ENVIRONMENT.replace('"+".join', '"-".join'))
    [[rollout]] = harness.hold(
        [prompt("a", "exit once", "echo", "end", mark=str(tmp_path / "m"))], list("123")
    )
    assert (tmp_path / "m").exists() and rollout.messages[3]["content"] == "1+2"


def test_a_conversation_has_so_many_seconds_for_its_answers(material: Task, file: Path) -> None:
    config = ConversationConfig(environment=f"{file}:Scripted", turns=9, rollout_timeout=3.0)
    with Harness(material, config) as opened:
        [slow], [quick] = opened.hold([prompt("slow", "slow"), prompt("quick", "seed")], ["1"] * 9)
    assert slow.finish_reason == quick.finish_reason == "length"
    assert 1 <= len(slow.turns) <= 2 and len(quick.turns) == 9


def test_failures_do_not_count_in_the_time_of_a_conversation(
    material: Task, file: Path, tmp_path: Path
) -> None:
    """Otherwise a worker that failed would end it as if the policy had taken too long."""
    own = {"environment": f"{file}:Scripted", "turns": 4, "step_timeout": SECONDS, "rollout_timeout": SECONDS}
    with Harness(material, ConversationConfig(**own)) as opened:
        acts = ["echo", "hang once", "end"]
        [[rollout]] = opened.hold([prompt("a", *acts, mark=str(tmp_path / "m"))], list("123"))
    assert (rollout.finish_reason, len(rollout.turns)) == ("stop", 3)


def test_a_process_that_has_ended_is_not_waited_for(file: Path) -> None:
    """Such a step took all of its time, and then the policy was told that its tool was slow."""
    function = Function("environment", f"{file}:Scripted", {})
    process = EnvironmentProcess(handler, function, {}, Printout(["environment"]))
    process.wait_ready()

    async def late() -> None:
        await process.end("it is ended")
        with pytest.raises(CallFailed, match="its process had ended before") as error:
            await process.step(0, None, "1", 5.0)
        assert error.value.is_gone and error.value.cause == "ended"

    asyncio.run(late())


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("wait", f"it took longer than {SECONDS:g} seconds"),
        ("hang", f"it took longer than {SECONDS:g} seconds"),
        ("exit", "it ended its process (exit code 3)"),
    ],
)
def test_asynchronous_steps_overlap_and_a_bad_one_costs_no_other(
    material: Task, file: Path, act: str, problem: str
) -> None:
    """One after the other, 120 steps of half a second would take a minute."""
    config = ConversationConfig(environment=f"{file}:Waiting", turns=3, step_timeout=SECONDS)
    prompts = [
        prompt("bad", act),
        *(prompt(f"p{i}", "go", "echo") for i in range(60 if act == "wait" else 6)),
    ]
    with Harness(material, config) as opened:
        [process] = [worker.process for worker in opened.conversations._environments._workers]
        begin = time.monotonic()
        [bad], *good = opened.hold(prompts, ["1", "2", "3"])
        seconds = time.monotonic() - begin
        [after] = [worker.process for worker in opened.conversations._environments._workers]
    assert bad.finish_reason == LOST and problem in bad.text
    for [rollout] in good:
        assert len(rollout.turns) == 3 and rollout.messages[3]["content"] == "1+2"
    assert (after is process) == (act == "wait"), "a step that only waits can be given up"
    if act == "wait":
        assert seconds < 40 and len({r.messages[1]["content"] for [r] in good}) == 1


CLOSES = """
class Holds(Scripted):
    def close(self):
        pathlib.Path(self.prompt.record["closed"]).write_text("+".join(self.heard))
        raise RuntimeError("the container does not answer")

class HoldsLong(Holds):
    async def close(self):
        await asyncio.sleep(0.1)
        super().close()
"""


@pytest.mark.parametrize("name", ["Holds", "HoldsLong"])
def test_an_environment_is_closed_however_its_conversation_ends(
    material: Task, file: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """At once, and not with the next batch: it may hold a container."""
    file.write_text(ENVIRONMENT + CLOSES)
    acts = {"ended": ["echo", "end"], "limit": ["echo"], "failed": ["raise"]}
    marks = {does: file.parent / does for does in acts}
    prompts = [prompt(does, *acts[does], closed=str(mark)) for does, mark in marks.items()]
    config = ConversationConfig(environment=f"{file}:{name}", turns=3, step_timeout=200)
    with Harness(material, config) as opened:
        groups = opened.hold(prompts, list("123"))
        assert [r.finish_reason for [r] in groups] == ["stop", "length", LOST]
        deadline = time.monotonic() + 100
        while not all(mark.exists() and mark.read_text() for mark in marks.values()):
            assert time.monotonic() < deadline, [mark for mark in marks.values() if not mark.exists()]
            time.sleep(0.05)
        assert [mark.read_text() for mark in marks.values()] == ["1+2", "1+2+3", "1"]
        [[again]] = opened.hold([prompt("again", "echo", "end", closed=str(marks["ended"]))], list("12"))
    assert again.finish_reason == "stop", "the worker goes on"
    assert "[environment] close: RuntimeError: the container does not answer" in capfd.readouterr().err


def test_workers_end_with_their_environments(harness: Harness) -> None:
    workers = harness.conversations._environments._workers
    guards = [psutil.Process(worker.process.pid) for worker in workers]
    assert len(guards) == 2 and all("workers.reaper" in " ".join(command_of(guard)) for guard in guards)
    harness.conversations.__exit__(None, None, None)
    assert not any(guard.is_running() for guard in guards)


def test_numbers_of_other_types_are_paid_and_halves_of_surrogate_pairs_are_replaced(harness: Harness) -> None:
    prompts = [prompt("paid", "paid"), prompt("surrogate", "surrogate", "end")]
    [[paid], [surrogate]] = harness.hold(prompts, ["1", "2"])
    assert paid.counts["environment_reward"] == 1.0 and paid.counts["half"] == 0.5
    assert surrogate.messages[1]["content"] == "1?2" and surrogate.finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Nothing", "has no function 'Nothing'"),
        ("half", "it lacks reset and step"),
        ("Half", "it lacks step"),
        ("Picky", "it cannot be made with the options {}: missing a required argument: 'size'"),
        ("Deaf", "step does not take what it is called with, step(response): too many positional arguments"),
        ("Down", "ConnectionRefusedError: no service (mine.py, line 11)"),
    ],
)
def test_what_is_no_environment_is_an_error_at_the_start(
    material: Task, tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(): pass\nclass Half:\n    def reset(self, prompt, seed): pass\n"
        "class Picky(Half):\n    def __init__(self, size): pass\n    def step(self, response): pass\n"
        "class Deaf(Half):\n    def step(self): pass\n"
        "class Down(Half):\n    def step(self, response): pass\n"
        "    def prepare(): raise ConnectionRefusedError('no service')\n"
    )
    config = ConversationConfig(environment=f"{tmp_path}/mine.py:{name}")
    with (
        pytest.raises(ConfigError, match=r"rollout\.conversation\.environment=") as error,
        Harness(material, config),
    ):
        pass
    assert problem in str(error.value)
