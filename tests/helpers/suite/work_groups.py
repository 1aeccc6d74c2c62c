"""Divides the tests over the workers of pytest-xdist (`-n 2 --dist loadscope --no-loadscope-reorder`).

One worker runs a group's tests one after the other. A group is a file, so that its fixtures are made once;
the tests of an engine's shared server are a group, too, and so are the files whose ranks have emulated GPUs:
the process that forks them imports for long. The longest groups begin first, so that all workers
end at about the same time.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

SHARED_SERVERS = (
    *("servers/test_engines", "servers/test_waits", "servers/test_push_watch", "servers/test_served_stops"),
    *("conversations/test_conversation_engines", "conversations/test_program_engines"),
    *("rewards/test_teacher_engines", "weights/test_new_transport"),
)
# By how long they take. Tests of servers come after some that need only a CPU: on a new machine the engines'
# environments are built meanwhile.
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


def group_of(nodeid: str) -> str:
    """The group of a test: the engine or the GPU that its file shares with others, or else the file."""
    file, _, name = nodeid.partition("::")
    file = file.removeprefix("tests/").removesuffix(".py")
    engine = re.search(r"\[(sglang|vllm)", name)
    if file.startswith("emulation/test_emulated_"):
        return "emulated GPUs"
    return engine[1] if engine and file in SHARED_SERVERS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """On the controller: hand out groups, where xdist's loadscope would hand out files."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In each worker: put the longest groups first.

    Without workers, and in a limited time (`--seconds`), the files' order stays.
    """
    if hasattr(config, "workerinput") and config.getoption("seconds") is None:
        order = {group: i for i, group in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))
