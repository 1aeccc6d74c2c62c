"""Reward functions that do what they should not: it costs their response, never the run.

All cases run in real worker processes. A case names what the function does (the response's text says so) and
the reward, or the beginning of the error.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from helpers.machine.processes import left_having
from helpers.suite.real_parts import used

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.rewards import RewardConfig, RewardsConfig

FUNCTIONS = '''
import asyncio, ctypes, os, pathlib, resource, signal, subprocess, sys, threading, time
from decimal import Decimal
from fractions import Fraction

import msgpack
import numpy as np

class Odd(float):
    def __float__(self): raise KeyboardInterrupt
    def __repr__(self): raise SystemExit

class Loud(BaseException):
    def __str__(self): return "very " * 1_000_000 + "\\n" * 10

class Mute(Exception):
    def __str__(self): raise ValueError

def returns(prompt, rollout):
    return eval(rollout.text)

async def later(prompt, rollout):
    await asyncio.sleep(0.01)
    return len(rollout.text)

def sockets():
    """The descriptors of this process that are sockets."""
    links = {int(link.name): link for link in pathlib.Path("/proc/self/fd").iterdir()}
    return [n for n, link in links.items() if link.is_symlink() and str(link.readlink()).startswith("socket")]

def write(*packets):
    for descriptor in sockets():
        for packet in packets:
            os.write(descriptor, packet)

def does(prompt, rollout):
    match rollout.text:
        case "junk": write(b"hello")
        case "packed": write(msgpack.packb(["CallResult", "x", None, {}, None]))
        case "forged": write(*(msgpack.packb(["CallResult", n, 1.0, {}, None]) for n in range(100, 200)))
        case "pickle": write(b"\\x80\\x04\\x95" + b"cos\\nsystem\\n(S'touch /tmp/pwned'\\ntR.")
        case "long": write(b"x" * 100_000)
        case "flood":
            while True: write(b"x")
        case "close": os.closerange(3, 4096)
        case "everything":
            for descriptor in range(3, 4096):
                try: os.write(descriptor, b"x")
                except OSError: pass
        case "segfault": ctypes.string_at(0)
        case "group": os.killpg(0, signal.SIGKILL)
        case "base": raise Loud
        case "mute": raise Mute
        case "interrupt": raise KeyboardInterrupt
        case "child":
            if os.fork() == 0: return 2.0
        case "child raises":
            if os.fork() == 0: raise ValueError
        case "signals":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        case "thread":
            threading.Thread(target=time.sleep, args=(3600,)).start()
        case "mutate":
            rollout.token_ids.clear(); rollout.rewards["x"] = 1.0; prompt.record.clear()
        case "elsewhere":
            os.chdir("/"); os.environ.clear(); sys.path.clear(); sys.stdout.close(); sys.stderr = None
        case "kernel": resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33)); bytearray(100 << 30)
    return 1.0

def leaves(prompt, rollout):
    """Starts a process that leaves the session, and whose parent ends."""
    subprocess.run(["setsid", "sh", "-c", "sleep 3600 & sleep 3600 &"], env=os.environ)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    if rollout.text == "crash":
        os._exit(9)
    return 1.0

def prints(prompt, rollout):
    print("said", rollout.text)
    os.write(2, b"from C\\x1b[2J\\n")
    subprocess.run(["echo", "from a process"])
    if rollout.text == "much":
        for _ in range(30_000): print("x" * 100)
    if rollout.text == "wide":
        os.write(1, b"y" * 1_000_000)
    return 0.5

def quiet(prompt, rollout):
    print("quiet?")
    return 0.0

def imports(prompt, rollout):
    import very_slow
    return 1.0

def sees(prompt, rollout):
    return float(repr(prompt.record) == rollout.text)
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "hostile.py"
    file.write_text(FUNCTIONS)
    return str(file)


def score(file: str, function: str, *texts: str, record: Any = None, timeout: float = 30.0) -> list[Rollout]:
    component = RewardConfig(name=function, function=f"{file}:{function}")
    rollouts = [Rollout([i], [-0.5], text, "stop") for i, text in enumerate(texts)]
    with RewardPool(RewardsConfig(components=(component,), timeout=timeout)) as pool:
        used("reward workers")
        pool.score([Group(Prompt("p", (1,), "?", record=record or {}), rollouts)])
    return rollouts


def assert_scored(rollouts: list[Rollout], name: str, wanted: dict[str, float | str]) -> None:
    outcomes = {r.text: r.reward_errors.get(name, r.rewards[name]) for r in rollouts}
    for text, value in wanted.items():
        if isinstance(value, str):
            assert str(outcomes[text]).startswith(value) and len(str(outcomes[text])) < 700, (
                text,
                outcomes[text],
            )
        else:
            assert outcomes[text] == value, (text, outcomes[text])


def test_every_type_of_number_is_a_number_and_nothing_else(functions):
    wanted: dict[str, float | str] = {
        "True": 1.0,
        "np.bool_(True)": 1.0,
        "np.float32(0.5)": 0.5,
        "np.float16(0.5)": 0.5,
        "np.longdouble(0.5)": 0.5,
        "np.int8(-3)": -3.0,
        "np.array(0.25)": 0.25,
        "np.array(True)": 1.0,
        "Decimal('0.5')": 0.5,
        "Fraction(1, 4)": 0.25,
        "-3.4e38": -3.4e38,
        "np.array([0.5])": "it returned ndarray of shape (1,) instead of a number",
        "np.ma.masked": "it returned MaskedConstant, a masked value, instead of a number",
        "np.ma.masked_array(1.0, mask=False)": 1.0,
        "np.array('1.0')": "it returned ndarray instead of a number",
        "np.complex64(1)": "it returned complex64 instead of a number",
        "1j": "it returned complex instead of a number",
        "'1.0'": "it returned str instead of a number",
        "None": "it returned NoneType instead of a number",
        "[1.0]": "it returned list instead of a number",
        "1e400": "it returned inf",
        "Decimal('1e400')": "it returned inf",
        "Decimal('NaN')": "it returned nan",
        "Decimal('sNaN')": "ValueError: ",
        "np.float64('nan')": "it returned nan",
        "-np.inf": "it returned -inf",
        "1e39": "it returned 1e+39, beyond 3.4e+38, the largest reward",
        "10 ** 400": "it returned int beyond 3.4e+38, the largest reward",
        "1 << 4_000_000": "it returned int beyond 3.4e+38, the largest reward",
        "Fraction(10 ** 400, 3)": "it returned Fraction beyond 3.4e+38, the largest reward",
        "Odd(1)": "KeyboardInterrupt: ",
        "returns": "it returned function instead of a number",
    }
    assert_scored(score(functions, "returns", *wanted), "returns", wanted)


def test_a_function_that_harms_its_process_costs_its_response(functions):
    alien = "its process sent a message that is none of the worker's"
    wanted: dict[str, float | str] = {
        "fine": 1.0,
        "junk": alien,
        "packed": alien,
        "forged": alien,
        "pickle": alien,
        "long": alien,
        "flood": alien,
        "close": "it closed, or read from, a descriptor",
        "everything": alien,
        "segfault": "it ended its process (signal 11, Segmentation fault)",
        "group": "it ended its process (signal 9, Killed)",
        "signals": "it ended its process (signal 15, Terminated)",
        "base": "Loud: very very",
        "mute": "Mute: (its message cannot be shown)",
        "interrupt": "KeyboardInterrupt: ",
        "kernel": "MemoryError: ",
        "child": 1.0,
        "child raises": 1.0,
        "thread": 1.0,
        "mutate": 1.0,
        "elsewhere": 1.0,
        "still fine": 1.0,
    }
    rollouts = score(functions, "does", *wanted, record={"a": 1})
    assert_scored(rollouts, "does", wanted)
    assert [r.token_ids for r in rollouts] == [[i] for i in range(len(wanted))]


def test_a_function_that_closes_standard_output_does_no_harm_to_the_next(functions):
    """The next responses of this worker had no reward where their function prints."""
    wanted = {
        "sys.stdout.close() or 1.0": 1.0,
        "print('x') or 2.0": 2.0,
        "setattr(sys, 'stdout', None) or 3.0": 3.0,
    }
    wanted |= {"print('y') or sys.stdout.write('z')": 1.0}
    assert_scored(score(functions, "returns", *wanted), "returns", wanted)


def test_an_async_function_is_run(functions):
    assert_scored(score(functions, "later", "four"), "later", {"four": 4.0})


@pytest.mark.parametrize("text", ["fine", "crash"])
def test_what_a_function_leaves_behind_ends_with_the_run(functions, monkeypatch, text):
    """Orphans in sessions of their own, started by a process that is gone."""
    monkeypatch.setenv("MARKER", marker := f"hostile-{os.getpid()}-{time.time()}")
    [rollout] = score(functions, "leaves", text)
    assert rollout.reward == (1.0 if text == "fine" else 0.0)
    assert left_having(marker) == []


def test_what_functions_print_has_their_names_and_an_end(functions, capfd):
    components = tuple(RewardConfig(name=n, function=f"{functions}:{n}") for n in ("prints", "quiet"))
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["a", "much", "wide"])]
    with RewardPool(RewardsConfig(components=components)) as pool:
        pool.score([Group(Prompt("p", (1,), "?"), rollouts)])
        out, shown = capfd.readouterr()
        pool.score([Group(Prompt("p", (1,), "?"), [Rollout([1], [0.0], "b", "stop")])])
    assert [rollout.reward for rollout in rollouts] == [0.5] * 3 and out == ""
    lines = shown.splitlines()
    assert lines[:4] == [
        "[prints] said a",
        "[prints] from C\N{REPLACEMENT CHARACTER}[2J",
        "[prints] from a process",
        "[quiet] quiet?",
    ]
    assert lines.count("[quiet] quiet?") == 3 and max(map(len, lines)) < 520
    assert sum(line.startswith("[prints]") for line in lines) == 21
    assert lines[-1] == "[prints] ... and 29,990 more lines (20 a step are shown)"
    assert capfd.readouterr().err.splitlines() == ["[prints] said b", *lines[1:4]]


def test_importing_is_no_time_of_the_functions(functions, monkeypatch):
    """The module takes longer than the time limit to import, in a worker that has just started."""
    Path(functions).with_name("very_slow.py").write_text("import time\ntime.sleep(7)\n")
    monkeypatch.syspath_prepend(Path(functions).parent)
    [rollout] = score(functions, "imports", "x", timeout=5.0)
    assert rollout.reward == 1.0, rollout.reward_errors


def test_a_function_sees_the_records_values(functions):
    """Parquet files and hub data sets hold more types than JSON."""
    record: dict[str, Any] = {
        "digits": 10**40,
        "price": Decimal("1.10"),
        "day": date(2026, 1, 2),
        "moment": datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        "length": timedelta(days=-1, seconds=2),
        "bytes": b"\xff",
        "half": "\ud83d",
        "none": None,
        "deep": {"1": [True, 2.5, {"x": []}]},
        3: "a key that is a number",
    }
    assert_scored(score(functions, "sees", repr(record), record=record), "sees", {repr(record): 1.0})
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    problem = "its data record cannot be sent to a worker: "
    assert_scored(score(functions, "sees", "x", record={"deep": deep}), "sees", {"x": problem})


def test_a_sum_that_overflows_costs_its_response(functions):
    component = RewardConfig(name="returns", function=f"{functions}:returns", weight=1e12)
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["3e38", "1.0"])]
    with RewardPool(RewardsConfig(components=(component,))) as pool:
        pool.score([Group(Prompt("p", (1,), "?"), rollouts)])
    assert rollouts[0].reward_errors == {"returns": "3e+38 times its weight 1e+12 is beyond 3.4e+38"}
    assert [rollout.reward for rollout in rollouts] == [0.0, 1e12]
