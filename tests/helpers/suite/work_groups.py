"""Divides the tests over the workers of pytest-xdist (`-n 2 --dist loadscope --no-loadscope-reorder`).

One worker runs a group's tests one after the other. A group is a file, so that its fixtures are made once;
the tests of an engine's shared server are a group, too, and so are the files whose ranks have emulated GPUs:
the process that forks them takes long to import. The longest groups begin first, so that all workers
end at about the same time.

On a new machine the engines' environments and Transformer Engine's extension are built during the tests, in
up to half an hour. A group that needs one of them is handed out when it is built, or when no other group is
left.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Any

import pytest

SHARED_SERVERS = (
    *("servers/test_engines", "servers/test_waits", "servers/test_push_watch", "servers/test_served_stops"),
    *("conversations/test_conversation_engines", "conversations/test_program_engines"),
    *("rewards/test_teacher_engines", "weights/test_new_transport"),
)
# The groups that take longest, the longest first.
LONGEST = (
    "megatron/test_gradient_invariance",
    "emulated GPUs",
    "shipping/test_images",
    "servers/test_long_runs",
    "docs/test_commands",
    "cluster/test_slurm",
    "vllm",
    "sglang",
    "megatron/test_conversations",
    "megatron/test_adapters",
    "cluster/test_scaling",
    "runs/test_recipe_runs",
    "servers/test_faults",
    "runs/test_stopping",
    "checkpoint/test_resharding",
    "checkpoint/test_resume",
    "servers/test_router_replay",
    "rewards/test_reward_servers",
    "servers/test_colocated",
    "weights/test_adapter_pushes",
    "servers/test_speculation",
    "servers/test_partial_rollouts",
    "cluster/test_checkup",
    "conversations/test_mcp",
    "cli/test_private_run",
    "cli/test_cli",
    "megatron/test_critic",
    "megatron/test_methods_invariance",
    "kernels/test_triton_head",
    "weights/test_fp8",
    "algorithms/test_trl",
)

# {beginning of a group's name: the lock files in the cache that are locked while its needs are being built}
BUILDERS = {
    **dict.fromkeys(("emulat", "rehearsal/", "shipping/test_device_check"), "rehearsal/*.lock"),
    **dict.fromkeys(("sglang", "vllm", "servers/"), "engines/*.lock"),
    **dict.fromkeys(SHARED_SERVERS, "engines/*.lock"),
    **dict.fromkeys(("conversations/test_openenv", "conversations/test_nemo_gym"), "environments/*.lock"),
    "tinker/": "tinker-*.lock",
}


def group_of(nodeid: str) -> str:
    """The group of a test: the engine or the GPU that its file shares with others, or else the file."""
    file, _, name = nodeid.partition("::")
    file = file.removeprefix("tests/").removesuffix(".py")
    engine = re.search(r"\[(sglang|vllm)", name)
    if file.startswith("emulation/test_emulated_"):
        return "emulated GPUs"
    return engine[1] if engine and file in SHARED_SERVERS else file


def is_waiting(group: str) -> bool:
    """Return True while something that the group needs is being built, in this process or another one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_gvpo"
    patterns = {pattern for beginning, pattern in BUILDERS.items() if group.startswith(beginning)}
    return any(_is_locked(lock) for pattern in patterns for lock in cache.glob(pattern))


def _is_locked(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """On the controller: hand out groups, where xdist's loadscope would hand out files."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if (group := next((g for g in self.workqueue if not is_waiting(g)), None)) is not None:
                self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In each worker: put the longest groups first.

    Without workers, or with a time limit (`--seconds`), files keep their order.
    """
    if hasattr(config, "workerinput") and config.getoption("seconds") is None:
        order = {group: i for i, group in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))
