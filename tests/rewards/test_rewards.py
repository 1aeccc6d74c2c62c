"""Rewards: the right answers are recognised, and no reward function can hurt the run.

The tests of the pool run real worker processes, which really hang, crash and get killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.machine.processes import having, left_having
from helpers.suite.real_parts import used

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.converters import boxed
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.math_answer import verify_math
from megatron_gvpo.rewards.math_format import verify_format
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.rewards import RewardConfig, RewardsConfig


def prompt(answer: str | None = "41", **record: Any) -> Prompt:
    return Prompt("p", (1, 2), "12+34-5=", answer, record=record)


def response(text: str, tokens: tuple[int, ...] = (1,)) -> Rollout:
    return Rollout(list(tokens), [-0.5] * len(tokens), text, "stop")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{41}", "41"),
        (r"12+34=46 \boxed{ 41 } and so on", "41"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),  # an escaped brace opens nothing
        (r"\boxed{}", ""),
        (r"\boxed{41", None),
        (r"\boxed{1} then \boxed{\frac{1}{2}", None),
        (r"boxed{41}", None),
        ("41", None),
        ("", None),
    ],
)
def test_boxed(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("41", "41"),
        ("41", " 41 "),
        ("41", "+41"),
        ("41", "041"),
        ("-7", "- 7"),
        ("1000", "1,000"),
        ("5", "5.0"),
        ("5", r"5\text{ cm}"),
        ("5", "x=5"),
        (r"\boxed{41}", "41"),
        ("1/2", r"\frac{1}{2}"),
        (r"\frac{1}{2}", "0.5"),
        ("1/2", "2/4"),
        ("0.5", r"50\%"),
        ("x+1", "1 + x"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("12 apples", "12 apples"),
        ("50", r"50\%"),
        ("12.5", "12.5%"),
        ("50", "50 percent"),
        ("46", "46 dollars"),
        ("46", r"\$46 per hour"),
        ("46 dollars", "46"),
        ("46", "46 months"),
        ("1000", r"1\,000"),
        ("1234567", r"1\,234\,567"),
        ("1000", "1\u202f000"),
        ("5", "5."),
        ("9" * 5000, "9" * 5000),  # more digits than Python turns into an integer
        ("5", r"5\text{ cm}"),
        ("36", r"36\text{ square units}"),
        (r"36\text{ cm}^2", "36"),
        (r"2\text{ hours }30\text{ minutes}", r"2 \text{ hours } 30 \text{ minutes}"),
        (r"1\text{ and }2", "1, 2"),
        (r"\frac13", "0.333333"),
        (r"2\sqrt2", "2.828427"),
        (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"),
        ("41", "m+n = 41"),  # as AIME's problems ask
        ("41", "f(2) = 41"),
        ("41", "|S| = 41"),
        ("41", "x^2 = 41"),
        ("1 1/2", r"\frac32"),
        ("-2 3/4", "-2.75"),
        ("1.5", "1 1/2"),
        ("17", "17_{10}"),
        ("121_3", "121_{3}"),
        ("121_3", "121"),
        ("10:00 am", r"10:00\text{ am}"),
    ],
)
def test_equal_answers(answer: str, content: str) -> None:
    assert verify_math(prompt(answer), response(rf"so \boxed{{{content}}}")) == 1.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("41", r"\boxed{42}"),
        ("41", r"\boxed{-41}"),
        ("41", r"\boxed{4 1}"),
        ("41", r"\boxed{410}"),
        ("41", r"\boxed{}"),
        ("41", r"\boxed{41"),
        ("41", "41"),
        ("41", ""),
        ("41", r"\boxed{41} no, \boxed{40}"),  # the last one counts
        ("41", r"\boxed{41} no, \boxed{40"),
        ("41", r"\boxed{40, 41}"),
        ("41", r"\boxed{==}"),
        ("41", r"\boxed{\frac{}}"),
        ("41", rf"\boxed{{{'9' * 5000}}}"),
        ("41", r"\boxed{4\,1}"),
        ("90", r"\boxed{10\;080}"),
        ("41", r"\boxed{41 or 42}"),
        ("41", r"\boxed{41 thousand}"),
        ("41", r"\boxed{41 Hundredths}"),
        ("41", r"\boxed{40 dollars}"),
        ("3 red", r"\boxed{3 blue}"),
        ("1/2", r"\boxed{\frac{1}{3}}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("x+1", r"\boxed{x-1}"),
        ("41", r"\boxed{41\text{ thousand}}"),
        ("41", r"\boxed{41\mathrm{ dozen}}"),
        ("41", r"\boxed{41\text{ but not }{42}}"),
        ("5", r"\boxed{5\text{ cm}+\frac{1}{2}}"),
        (r"10\text{ a.m.}", r"\boxed{10\text{ p.m.}}"),
        (r"2\text{ hours }30\text{ minutes}", r"\boxed{2\text{ hours }15\text{ minutes}}"),
        # different numbers with a difference that math-verify takes for 0
        (r"1-\frac{1}{2^{100}}", r"\boxed{1-\frac{1}{2^{99}}}"),
        (r"\frac{1}{2^{60}}", r"\boxed{\frac{1}{2^{61}}}"),
        (r"1.6 \times 10^{-19}", r"\boxed{9.1 \times 10^{-31}}"),
        ("41", r"\boxed{m+n = 46-5}"),
        ("41", r"\boxed{m = 12+29}"),
        *(("17", r"\boxed{17_8}"), ("12_3", r"\boxed{12_5}"), ("10_2", r"\boxed{10_{3}}")),
        ("10:00 am", r"\boxed{10:00 pm}"),
        ("10:00", r"\boxed{10:00 p.m.}"),
        ("2", r"\boxed{1 2/2}"),
    ],
)
def test_wrong_answers(answer: str, text: str) -> None:
    assert verify_math(prompt(answer), response(text)) == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Answer: 41", 1.0),
        ("**Answer:**\n\n41", 1.0),  # DAPO's own expression goes on to the next line, too
        ("Answer:\n\\[\n41\n\\]", 1.0),
        (r"Answer: \(41\).", 1.0),
        ("Answer: 41 dollars", 1.0),
        ("Answer:\nAnswer: 41", 1.0),
        ("Answer: 41\nAnswer:\n42", 0.0),
        ("Answer: 41\nAnswer:", 0.0),
        ("41", 0.0),
    ],
)
def test_the_answer_follows_the_last_marker(text: str, reward: float) -> None:
    assert verify_math(prompt("41"), response(text), marker="Answer:") == reward


@pytest.mark.parametrize("content", ["12+34-5", "46-5", "12+34-5=41", "41=46-5", "40+1", r"\frac{82}{1}-41"])
def test_the_question_is_no_answer(content: str) -> None:
    r"""All of these equal 41; a policy that boxes its prompt must not earn a reward for it."""
    assert verify_math(prompt("41"), response(rf"\boxed{{{content}}}")) == 0.0


@pytest.mark.parametrize(
    "content",
    [
        *(
            "12/2",
            "12 / 2",
            "x = 12/2",
            "12:2",
            r"12 \div 2",
            r"\frac{12}{2}",
            r"\dfrac{6}{1}",
            r"5\frac{2}{2}",
        ),
        *(r"\binom{4}{2}", r"{6 \choose 1}", r"\sum_{i=1}^{3} i", r"\prod_{i=1}^3 i", r"\int_0^6 1 dx"),
        *(r"\lim_{x \to 6} x", r"\max(3,6)", r"\gcd(12,18)", r"\operatorname{lcm}(2,3)"),
        r"\det\begin{pmatrix}3&0\\0&2\end{pmatrix}",
    ],
)
def test_an_operation_is_no_answer(content: str) -> None:
    """math-verify computes these when it reads them, so that only the number is left to look at."""
    assert verify_math(prompt("6"), response(rf"\boxed{{{content}}}")) == 0.0


@pytest.mark.parametrize(
    "content", [r"6\text{ m/s}", r"6\,\mathrm{m/s}", r"n = 6", r"\left(6\right)", r"S_{10} = 6", r"6_{10}"]
)
def test_a_number_beside_signs_is_an_answer(content: str) -> None:
    assert verify_math(prompt("6"), response(rf"\boxed{{{content}}}")) == 1.0


def test_format() -> None:
    good = [r"\boxed{41}", "12+34=46\n\\boxed{41}\n", r"\boxed{\frac{1}{2}}", r"\boxed{x"[:-1] + "y}"]
    bad = ["", "41", r"\boxed{41", r"\boxed{}", r"\boxed{41}.", r"\boxed{1}\boxed{2}", r"\boxed{\boxed{1}}"]
    assert [verify_format(prompt(), response(text)) for text in good] == [1.0] * len(good)
    assert [verify_format(prompt(), response(text)) for text in bad] == [0.0] * len(bad)
    pattern = r"<think>.*</think>\d+"
    assert verify_format(prompt(), response("<think>a\nb</think>41"), pattern) == 1.0
    assert verify_format(prompt(), response("so: <think>a</think>41"), pattern) == 0.0


USER_FUNCTIONS = '''
from __future__ import annotations
import os, subprocess, sys, time
from dataclasses import dataclass

@dataclass
class Settings:  # dataclasses look up the module that they are in
    scale: float = 1.0

def length(prompt, rollout, scale=1.0):
    return scale * len(rollout.text)

def level(prompt, rollout):
    return prompt.record["level"] + len(prompt.token_ids)

def as_told(prompt, rollout):
    """Does to its process what the response says."""
    match rollout.text:
        case "raise": raise KeyError("no such thing")
        case "leave": sys.exit(3)
        case "hang": time.sleep(3600)
        case "spawn": subprocess.run(["sleep", "3600"])
        case "crash": os._exit(7)
        case "nan": return float("nan")
        case "infinite": return float("inf")
        case "text": return "1.0"
        case "none": return None
        case "torch": return "torch" in sys.modules
        case "recursion": return as_told(prompt, rollout)
    return 1.0

def noted(prompt, rollout):
    with open(prompt.record["notes"], "a") as notes:
        print(os.getpid(), rollout.text, file=notes)
    return 1.0

class Judge:
    def __call__(self, prompt, rollout): return 0.25

judge = Judge()
number = 3
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "my_rewards.py"
    file.write_text(USER_FUNCTIONS)
    return str(file)


def config(*components: RewardConfig, timeout: float = 30.0, workers: int = 1) -> RewardsConfig:
    return RewardsConfig(components=components, timeout=timeout, workers=workers)


def user(file: str, function: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=function, function=f"{file}:{function}", **settings)


def score(rewards: RewardsConfig, *texts: str, of: Prompt | None = None) -> list[Rollout]:
    rollouts = [response(text, (i,)) for i, text in enumerate(texts)]
    with RewardPool(rewards) as pool:
        used("reward workers")
        pool.score([Group(of or prompt(), rollouts)])
    return rollouts


def test_components_are_named_and_weighed(functions: str) -> None:
    rewards = config(
        RewardConfig(name="math"),
        RewardConfig(name="format", weight=0.5),
        user(functions, "length", weight=-0.01, options={"scale": 2.0}),
    )
    right, shapeless, none = score(rewards, r"\boxed{41}", r"\boxed{41}!", "")
    assert right.rewards == {"math": 1.0, "format": 1.0, "length": 20.0}
    assert right.reward == pytest.approx(1.5 - 0.2)
    assert (shapeless.rewards["math"], shapeless.rewards["format"]) == (1.0, 0.0)
    assert none.rewards == {"math": 0.0, "format": 0.0, "length": 0.0}
    assert not any(rollout.reward_errors for rollout in (right, shapeless, none))


def test_a_run_may_have_no_reward_of_its_own() -> None:
    """A shaper, such as a judge of pairs, gives the reward."""
    with RewardPool(RewardsConfig(components=())) as pool:
        pool.score([group := Group(prompt(), [response("a"), response("b")])])
    assert group.rewards == [0.0, 0.0] and group.rollouts[0].rewards == {}


def test_a_reward_sees_the_whole_record(functions: str) -> None:
    (rollout,) = score(config(user(functions, "level")), "x", of=prompt(level=3))
    assert rollout.reward == 5.0


def test_a_function_of_a_module(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(functions).parent)
    (rollout,) = score(config(user("my_rewards", "length")), "four")
    assert rollout.reward == 4.0
    (rollout,) = score(config(user("my_rewards", "judge")), "any callable will do")
    assert rollout.reward == 0.25


def test_a_bad_reward_costs_its_rollout_only(functions: str) -> None:
    expected = {
        "fine": None,
        "raise": "KeyError: 'no such thing' (my_rewards.py, line 19)",
        "leave": "SystemExit: 3",
        "nan": "it returned nan",
        "infinite": "it returned inf",
        "text": "it returned str instead of a number",
        "none": "it returned NoneType instead of a number",
        "recursion": "RecursionError: ",
        "crash": "it ended its process (exit code 7)",
        "hang": "it took longer than rewards.timeout=8 seconds",
        "still fine": None,
    }
    rewards = config(user(functions, "as_told"), RewardConfig(name="format"), timeout=8.0)
    for rollout, error in zip(score(rewards, *expected), expected.values(), strict=True):
        assert rollout.rewards == {"as_told": 0.0 if error else 1.0, "format": 0.0}
        assert rollout.reward == rollout.rewards["as_told"]
        assert set(rollout.reward_errors) == ({"as_told"} if error else set())
        assert (error or "") in rollout.reward_errors.get("as_told", "")


def test_the_clock_is_of_one_rollout_not_of_all(functions: str) -> None:
    texts = ["fine", "hang", "crash", "hang", *map(str, range(100))]
    rollouts = score(config(user(functions, "as_told"), timeout=8.0, workers=2), *texts)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.0, 0.0] + [1.0] * 100


def test_a_pool_scores_again_after_a_crash(functions: str) -> None:
    with RewardPool(config(user(functions, "as_told"))) as pool:
        for text, reward in (("crash", 0.0), ("fine", 1.0)):
            group = Group(prompt(), [response(text)])
            pool.score([group])
            assert group.rewards == [reward]
        pool.score([])
        os.kill(children()[0], signal.SIGKILL)  # as the kernel does when memory runs out
        time.sleep(0.5)
        pool.score([group := Group(prompt(), [response("fine")])])
        assert group.rewards == [1.0] and not group.rollouts[0].reward_errors


def test_equal_responses_are_scored_once(functions: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    one, other = prompt(notes=str(notes)), prompt(notes=str(notes))
    rollouts = [response(text, tokens) for text, tokens in [("a", (1,)), ("b", (2,)), ("a", (1,))]]
    with RewardPool(config(user(functions, "noted"), workers=2)) as pool:
        pool.score([Group(one, rollouts), Group(other, [response("a")])])
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3
    assert sorted(line.split()[1] for line in notes.read_text().splitlines()) == ["a", "a", "b"]


def test_workers_do_not_load_torch(functions: str) -> None:
    rewards = config(user(functions, "as_told"), RewardConfig(name="math"))
    (rollout,) = score(rewards, "torch")
    assert rollout.rewards["as_told"] == 0.0 and not rollout.reward_errors


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"function": "my_rewards.py"}, "expected module:function or path/file.py:function"),
        ({"function": "nowhere.py:length"}, "there is no file nowhere.py"),
        ({"function": "no_such_module:f"}, "importing no_such_module failed: ModuleNotFoundError"),
        ({"function": "{file}:lenght"}, "has no function 'lenght'; it has: Judge, Settings, as_told, len"),
        ({"function": "{file}:number"}, "has no function 'number'"),
        ({"function": "{file}:length", "options": {"scales": 1}}, "unexpected keyword argument 'scales'"),
        ({"function": "{broken}:f"}, "failed: SyntaxError"),
        ({"function": "{deadly}:f"}, "ended the program (SystemExit: os._exit(5) (deadly.py, line 2))"),
    ],
)
def test_functions_that_cannot_be_loaded(functions: str, component: Any, message: str) -> None:
    broken, deadly = Path(functions).with_name("broken.py"), Path(functions).with_name("deadly.py")
    broken.write_text("def f(:\n")
    deadly.write_text("import os\nos._exit(5)\n")
    if "function" in component:
        path = component["function"].format(file=functions, broken=broken, deadly=deadly)
        component = component | {"function": path}
    with (
        pytest.raises(ConfigError) as error,
        RewardPool(config(RewardConfig(**{"name": "mine"} | component))),
    ):
        pass
    assert message in str(error.value)
    assert not children()


_earlier: set[int] = set()


@pytest.fixture(autouse=True)
def _note_earlier_processes() -> None:
    """Processes of earlier tests may still run, such as a server that tests share."""
    _earlier.clear()
    _earlier.update(children())


def children() -> list[int]:
    """The running processes that this one has started since the test began."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and b"multiprocessing.resource_tracker" not in command:
            pids.append(int(process.name))
    return [pid for pid in pids if pid not in _earlier]


def test_nothing_outlives_its_pool(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARKER", marker := f"reward-test-{os.getpid()}-{time.time()}")
    rollouts = score(config(user(functions, "as_told"), timeout=8.0, workers=2), "spawn", "fine")
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]
    assert not left_having(marker) and not children()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_its_run(functions: str, how: signal.Signals) -> None:
    """A run ends in mid-reward, gracefully or not: it is a script without a main guard, as users write."""
    marker = f"reward-test-{how}-{os.getpid()}-{time.time()}"
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, functions],
        env={**os.environ, "MARKER": marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A shell starts what it puts into the background with SIGINT ignored; so would what that starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    time.sleep(0.5)  # the reward hangs by now
    assert len(list(having(marker))) >= 2
    run.send_signal(how)
    run.wait(timeout=60)
    assert left_having(marker) == []


SCRIPT = """
import sys
from megatron_gvpo.settings.rewards import RewardConfig, RewardsConfig
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.groups import Group, Prompt, Rollout

component = RewardConfig(name="as_told", function=sys.argv[1] + ":as_told")
with RewardPool(RewardsConfig(components=(component,), timeout=3600)) as pool:
    print("ready", flush=True)
    pool.score([Group(Prompt("p", (1,), "?"), [Rollout([1], [0.0], "spawn", "stop")])])
"""
