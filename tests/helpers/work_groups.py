"""Divides the tests over the workers of pytest-xdist (`-n 2 --dist loadscope --no-loadscope-reorder`).

One worker runs a group's tests one after the other. A group is a file, so that its fixtures are made once;
the tests of an engine's shared server are a group, too. The longest groups begin first, so that all workers
end at about the same time.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

SHARED_SERVERS = (
    *("rollout/test_engines", "rollout/test_waits"),
    *("conversations/test_conversation_engines", "conversations/test_program_engines"),
)
# By how long they take. Tests of servers come after some that need only a CPU: on a new machine the engines'
# environments are built meanwhile.
LONGEST = (
    "megatron/test_gradient_invariance",
    "shipping/test_images",
    "cluster/test_slurm",
    "sglang",
    "vllm",
    "rollout/test_colocated",
    "rollout/test_faults",
    "weights/test_fp8",
    "rollout/test_router_replay",
    "runs/test_recipe_runs",
    "algorithms/test_trl",
    "rollout/test_partial_rollouts",
    "megatron/test_critic",
    "cli/test_cli",
    "checkpoint/test_resharding",
    "megatron/test_methods_invariance",
)


def group_of(nodeid: str) -> str:
    """The group of a test: the engine, for the files that share a server, or else the file."""
    file, _, name = nodeid.partition("::")
    file = file.removeprefix("tests/").removesuffix(".py")
    engine = re.search(r"\[(sglang|vllm)", name)
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
    """In each worker: put the longest groups first. Without workers the files' order stays."""
    if hasattr(config, "workerinput"):
        place = {group: i for i, group in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(group_of(item.nodeid), len(place)))
