"""A run of two ranks listens on loopback alone, and what it writes has no secret and honours the umask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.servers.real_servers import ENGINES, engine_python
from helpers.suite.real_parts import used
from helpers.tiny_run import SHORT

SECRET, LITERAL = "s3cr3t-of-the-judge", "l1teral-passw0rd"
# In the middle of a run its reward looks at the processes of the run, and at the machine's command lines.
REWARD = """
import json, os
from pathlib import Path
import psutil

def reward(prompt, rollout, seen="", api_key="", password=""):
    assert api_key == os.environ["JUDGE_KEY"] and password == os.environ["LITERAL"]
    if not Path(seen).exists() and rollout.weight_version > 0:
        above = psutil.Process().parents()
        trainer = [each for each in above if "megatron_gvpo" in each.cmdline()]
        run = {each.pid: each for each in (trainer[-1], *trainer[-1].children(recursive=True))}
        found = {"listening": [], "processes": len(run), "leaks": []}
        for pid, process in run.items():
            try:
                for each in process.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN:
                        found["listening"].append([process.name(), *each.laddr])
            except psutil.Error:
                pass
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = line.read_text(errors="replace")
            except OSError:
                continue
            found["leaks"] += [text] if api_key in text or password in text else []
        aside = Path(f"{seen}.{os.getpid()}")
        aside.write_text(json.dumps(found))
        aside.rename(seen)
    return rollout.token_ids[0] % 2
"""
SERVED = [pytest.param(engine, marks=pytest.mark.proof) for engine in ENGINES]


@pytest.mark.parametrize("engine", ["local", *SERVED])
def test_a_run_of_two_ranks_keeps_to_itself(engine: str, task: Path, tmp_path: Path):
    out, seen, functions = tmp_path / "run", tmp_path / "seen", tmp_path / "judge.py"
    functions.write_text(REWARD)
    options = f"{{seen: {seen}, api_key: {{env: JUDGE_KEY}}, password: {LITERAL}}}"
    judge = f"{{name: judge, function: '{functions}:reward', options: {options}}}"
    (tmp_path / "own.yaml").write_text(
        f"rewards: {{components: [{judge}]}}\n"
        "logging: {tensorboard: true, wandb_project: private}\n"
        f"rollout: {{engine: {engine}}}\n"
    )
    arguments = [
        str(task / "run.yaml"),
        str(tmp_path / "own.yaml"),
        f"output_dir={out}",
        "train.steps=3",
        *SHORT,
    ]
    if engine != "local":
        arguments += [f"rollout.servers.python={engine_python(engine)}", "rollout.servers.context_length=256"]
    own = {"JUDGE_KEY": SECRET, "LITERAL": LITERAL, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_gvpo", "train", *arguments, "--nproc", "2"],
        env={**os.environ, **own},
        umask=0o077,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used("megatron-core and Megatron-Bridge, 2 ranks")
    observations = json.loads(seen.read_text())
    assert observations["processes"] >= 5 and len(observations["listening"]) >= 3
    assert [each for each in observations["listening"] if not ip_address(each[1]).is_loopback] == []
    assert observations["leaks"] == []
    assert "options.password: a secret in a configuration file" in done.stderr
    written = [path for path in out.rglob("*") if path.is_file()]
    texts = [done.stdout.encode(), done.stderr.encode(), *(path.read_bytes() for path in written)]
    assert not any(secret.encode() in text for text in texts for secret in (SECRET, LITERAL))
    assert any(b"JUDGE_KEY" in path.read_bytes() for path in out.glob("tensorboard/*"))
    assert any(b"JUDGE_KEY" in path.read_bytes() for path in out.glob("wandb/*/*.wandb"))
    assert {path.stat().st_mode & 0o077 for path in (out, *out.rglob("*")) if not path.is_symlink()} == {0}
