"""Divides the tests over the workers of pytest-xdist (`-n 2 --dist loadgroup`).

One worker runs a group's tests one after the other. A group is a file, so that its fixtures are made once;
tests of a shared server are a group of their own for each engine. A file may name another group with
`@pytest.mark.xdist_group`. The longest groups begin first, so that all workers end at about the same time.
"""

from __future__ import annotations

import pytest

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
    "rollout/test_engines",
    "runs/test_recipe_runs",
    "algorithms/test_trl",
    "rollout/test_partial_rollouts",
    "megatron/test_critic",
    "cli/test_cli",
    "checkpoint/test_resharding",
    "megatron/test_methods_invariance",
)


def group_of(item: pytest.Item) -> str:
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    engine = getattr(item, "callspec", None) and item.callspec.params.get("served")
    return engine or item.nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # one process runs all: the order of the files
        return
    place = {group: i for i, group in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(group_of(item), len(place)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
