"""Reward functions that misbehave: each may cost its responses, never the run."""

from __future__ import annotations

from bad_input.case import TRAIN, Case, Expected, with_reward, with_text

WAIT = ("rewards.timeout=2",)


def reward(name: str, body: str, top: str = "", *says: str, expected: Expected = "runs") -> Case:
    """A reward function with this body; by default the run has to go on, and end well."""
    return Case(
        "user code", name, (*TRAIN, *WAIT, "train.prompts_per_step=2"), with_reward(body, top), expected, says
    )


SOMETIMES = "import random\nif random.random() < 0.3:\n    "
OTHERWISE = "\nreturn len(set(rollout.token_ids)) / 10"


def sometimes(name: str, statement: str, top: str = "") -> Case:
    """Misbehaves in about a third of the calls."""
    return reward(name, f"{SOMETIMES}{statement}{OTHERWISE}", top)


WRITE = """
import os

def write(descriptor):
    try:
        os.write(descriptor, b'{"x": 1}\\n' * 20)
    except OSError:
        pass
"""

USER_CODE = [
    reward("numpy float32", "import numpy\nreturn numpy.float32(len(rollout.token_ids))"),
    reward("numpy bool", "import numpy\nreturn numpy.bool_(len(rollout.token_ids) % 2)"),
    reward("numpy int64", "import numpy\nreturn numpy.int64(len(rollout.token_ids))"),
    reward("a numpy array of one number", "import numpy\nreturn numpy.array(0.5 + rollout.token_ids[0])"),
    reward("Decimal", "import decimal\nreturn decimal.Decimal(rollout.token_ids[0])"),
    reward("Fraction", "import fractions\nreturn fractions.Fraction(rollout.token_ids[0], 7)"),
    reward("a boolean", "return rollout.token_ids[0] % 2 == 0"),
    reward(
        "a tensor, torch imported in the call",
        "import torch\nreturn torch.tensor(float(rollout.token_ids[0]))",
    ),
    reward(
        "a tensor, torch imported at the top",
        "return torch.tensor(float(rollout.token_ids[0]))",
        "import torch",
    ),
    sometimes("NaN", "return float('nan')"),
    sometimes("infinity", "return float('-inf')"),
    sometimes("an integer beyond floats", "return 10**400"),
    sometimes("an integer of a million digits", "return 1 << 3_500_000"),
    sometimes("the largest float", "return 1.7e308"),
    sometimes("None", "return None"),
    sometimes("a word", "return '1'"),
    sometimes("a list", "return [1.0]"),
    sometimes("a complex number", "return 1j"),
    sometimes(
        "a class that lies", "return type('F', (float,), {'__float__': lambda s: 'x', '__add__': None})(1)"
    ),
    sometimes("an exception with five megabytes", "raise ValueError('x' * 5_000_000)"),
    sometimes(
        "an exception that cannot be shown",
        "raise type('E', (Exception,), {'__str__': lambda s: 1 / 0, '__repr__': lambda s: 1 / 0})()",
    ),
    sometimes("an exception with newlines and colours", "raise ValueError('a\\n\\x1b[31mb\\r\\n' * 50)"),
    sometimes("SystemExit", "raise SystemExit(0)"),
    sometimes("KeyboardInterrupt", "raise KeyboardInterrupt"),
    sometimes("GeneratorExit", "raise GeneratorExit"),
    sometimes("os._exit(0)", "__import__('os')._exit(0)"),
    sometimes("a segmentation fault", "__import__('ctypes').string_at(0)"),
    sometimes("abort", "__import__('os').abort()"),
    sometimes("kills itself", "__import__('os').kill(__import__('os').getpid(), 9)"),
    sometimes("stops itself", "__import__('os').kill(__import__('os').getpid(), 19)"),
    sometimes("endless recursion", "return reward(prompt, rollout)"),
    sometimes("an endless loop", "while True: pass"),
    sometimes("sleeps", "__import__('time').sleep(60)"),
    sometimes(
        "a deaf sleep", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    ),
    reward("prints ten megabytes", "print('y' * 10_000_000)" + OTHERWISE),
    reward("prints to stderr", "import sys\nsys.stderr.write('z' * 100_000)" + OTHERWISE),
    reward("writes to descriptor 1", "import os\nos.write(1, b'raw')" + OTHERWISE),
    sometimes(
        "writes to every descriptor",
        "[write(fd) for fd in range(3, 64)]",
        WRITE,
    ),
    sometimes("closes every descriptor", "__import__('os').closerange(0, 256)"),
    reward("closes stdout", "import sys\nsys.stdout.close()" + OTHERWISE),
    reward(
        "forks and forgets",
        "import os, time\nif os.fork() == 0:\n    time.sleep(30)\n    os._exit(0)" + OTHERWISE,
    ),
    sometimes("forks, and the child returns", "__import__('os').fork()"),
    reward(
        "starts a process",
        "import subprocess\nreturn float(subprocess.check_output(['echo', '1']))",
    ),
    reward(
        "starts threads",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()" + OTHERWISE,
    ),
    reward("changes the directory", "import os\nos.chdir('/')" + OTHERWISE),
    reward("empties the environment", "import os\nos.environ.clear()" + OTHERWISE),
    reward(
        "changes its arguments",
        "rollout.token_ids.clear() if hasattr(rollout.token_ids, 'clear') else None\nreturn 1.0",
        expected="runs",
    ),
    reward("replaces json", "import json\njson.dumps = json.loads = None" + OTHERWISE),
    reward("an alarm", "import signal\nsignal.alarm(1)" + OTHERWISE),
    sometimes("takes 100 GB", "x = bytearray(100 << 30)"),
    reward("slow to import", "return float(rollout.token_ids[0])", "import time\ntime.sleep(4)"),
    reward("a generator", "yield 1.0", "", expected="either"),
    Case(
        "user code",
        "async",
        TRAIN,
        with_text("reward.py", "async def reward(prompt, rollout):\n    return 1.0\n"),
        "either",
        (),
    ),
    Case(
        "user code",
        "no such function",
        TRAIN,
        with_text("reward.py", "def rewards(prompt, rollout):\n    return 1.0\n"),
        "refused",
        ("reward.py",),
    ),
    Case(
        "user code",
        "a syntax error",
        TRAIN,
        with_text("reward.py", "def reward(prompt, rollout)\n    return 1.0\n"),
        "refused",
        ("reward.py",),
    ),
    Case(
        "user code",
        "an error while it is imported",
        TRAIN,
        with_text("reward.py", "import nosuchmodule\ndef reward(p, r):\n    return 1.0\n"),
        "refused",
        ("nosuchmodule",),
    ),
    Case(
        "user code",
        "ends the process while it is imported",
        TRAIN,
        with_text("reward.py", "import os\nos._exit(3)\n"),
        "refused",
        ("reward.py",),
    ),
    Case(
        "user code",
        "sys.exit while it is imported",
        TRAIN,
        with_text("reward.py", "import sys\nsys.exit(0)\n"),
        "refused",
        ("reward.py",),
    ),
    Case(
        "user code",
        "one argument",
        TRAIN,
        with_text("reward.py", "def reward(rollout):\n    return 1.0\n"),
        "refused",
        ("reward.py", "argument"),
    ),
    Case(
        "user code",
        "not a function",
        TRAIN,
        with_text("reward.py", "reward = 3\n"),
        "refused",
        ("reward.py",),
    ),
    Case(
        "user code",
        "every response fails",
        (*TRAIN, "train.steps=30"),
        with_text("reward.py", "def reward(prompt, rollout):\n    return 1 / 0\n"),
        "refused",
        ("ZeroDivisionError", "division"),
    ),
    Case(
        "user code",
        "every reward equal",
        (*TRAIN, "train.steps=30"),
        with_text("reward.py", "def reward(prompt, rollout):\n    return 1.0\n"),
        "refused",
        ("signal", "equal", "same"),
    ),
]
