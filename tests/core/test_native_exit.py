"""A library that calls C's exit() ends the command with exit code 1, and not with 0 as if it were done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = "#include <stdlib.h>\n#include <unistd.h>\nvoid leave(void) { exit(0); }\n"
PROGRAM = """
import ctypes, os, sys, threading
from megatron_gvpo.core.native_exit import refusing_native_exit
from megatron_gvpo.core.user_functions import refusing_exit

leave = ctypes.CDLL(sys.argv[1]).leave
def in_child():
    child = os.fork()
    if child == 0:
        leave()
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def in_thread():
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
for _ in range(2):
    with refusing_native_exit(), refusing_exit():
        {}
print("done")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "leave.c").write_text(LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "leave.so", "leave.c"], cwd=folder, check=True)
    return folder / "leave.so"


@pytest.mark.parametrize(
    ("body", "code", "output", "errors"),
    [
        ("leave()", 1, "", "before its work was done, by a call of exit() in a library"),
        ("in_thread()", 1, "", "before its work was done"),
        ("in_child()", 0, "child 0\nchild 0\ndone\n", ""),
        ("pass", 0, "done\n", ""),
        ("sys.exit(3)", 3, "", ""),
    ],
)
def test_the_exit_code_of_a_library_is_not_the_commands(library, body, code, output, errors):
    command = [sys.executable, "-c", PROGRAM.format(body), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (code, output)
    assert errors in done.stderr if errors else not done.stderr
