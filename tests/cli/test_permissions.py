"""Places that the user of a command may not enter, as on a cluster's shared disks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Root may enter every place unless it gives these rights up.
RIGHTS = "=-dac_override,-dac_read_search"
AS_A_USER = ["setpriv", f"--bounding-set{RIGHTS}", f"--inh-caps{RIGHTS}"] if os.geteuid() == 0 else []


@pytest.mark.parametrize("closed", ["model", "model/config.json"])
def test_a_place_without_permission_is_named_in_one_line(closed: str, task: Path, tmp_path: Path) -> None:
    shutil.copytree(task / "model", tmp_path / "model")
    (tmp_path / closed).chmod(0o000)
    arguments = [task / "run.yaml", f"model.path={tmp_path / 'model'}", f"output_dir={tmp_path / 'run'}"]
    command = [*AS_A_USER, sys.executable, "-m", "megatron_gvpo", "train", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {tmp_path / 'model' / 'config.json'}: Permission denied")
    assert run.stderr.count("\n") == 1
