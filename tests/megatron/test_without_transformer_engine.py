"""A process without a GPU leaves Transformer Engine alone, even where that is installed.

megatron-core would call its kernels for the norm of gradients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT
from helpers.suite.real_parts import used

CODE = """
import megatron_gvpo.megatron.policy
from megatron_gvpo.megatron.cpu.bridge import import_bridge
import_bridge()
from megatron.core import utils
from megatron.core.optimizer import clip_grads
import megatron.core.models.mimo
assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm
"""


def test_an_installed_transformer_engine_is_not_imported(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('Transformer Engine was imported')")
    (tmp_path / "transformer_engine_torch.py").write_text("import transformer_engine")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    used("megatron-core and Megatron-Bridge, 1 rank")
