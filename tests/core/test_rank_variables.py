"""Variables of a launcher that another job has left in the environment."""

from __future__ import annotations

import pytest

from megatron_gvpo.cli import main
from megatron_gvpo.core.environment import check_network_name, check_rank_variables
from megatron_gvpo.core.errors import ConfigError

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("name", [None, "LOCAL_RANK"])
def test_what_torchrun_sets_is_accepted(name):
    check_rank_variables(0, {key: value for key, value in WHOLE.items() if key != name})
    check_rank_variables(2, WHOLE)
    check_rank_variables(4, {"RANK": "0", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"RANK": "1"}, r"RANK=1 and no WORLD_SIZE"),
        ({"LOCAL_RANK": "3"}, r"LOCAL_RANK=3 and no WORLD_SIZE"),
        ({"MASTER_ADDR": "node7"}, r"MASTER_ADDR=node7 and no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 and no RANK"),
        ({**WHOLE, "WORLD_SIZE": "1"}, r"RANK=1 of WORLD_SIZE=1"),
        ({**WHOLE, "LOCAL_WORLD_SIZE": "1"}, r"LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1"),
        ({**WHOLE, "WORLD_SIZE": "two"}, r"WORLD_SIZE='two', which is not a number"),
        ({**WHOLE, "RANK": "-1"}, r"RANK='-1', which is not a number"),
        ({**WHOLE, "RANK": ""}, r"RANK='', which is not a number"),
        ({**WHOLE, "MASTER_PORT": "tcp://x"}, r"MASTER_PORT='tcp://x', which is not a number"),
        (
            {**WHOLE, "MASTER_ADDR": "no-such-host.invalid"},
            r"MASTER_ADDR='no-such-host\.invalid', which is not a known host",
        ),
        ({**WHOLE, "MASTER_ADDR": "a" * 70}, r"not a known host"),
        ({key: value for key, value in WHOLE.items() if key != "MASTER_PORT"}, r"and no MASTER_PORT"),
    ],
)
def test_what_no_launcher_sets_is_named_with_what_to_do(environment, problem):
    with pytest.raises(
        ConfigError, match=rf"^the environment has .*{problem}.*torchrun or --nproc, or `unset RANK"
    ):
        check_rank_variables(0, environment)


def test_a_network_interface_that_is_not_there_is_named():
    check_network_name({"GLOO_SOCKET_IFNAME": "lo"})
    check_network_name({})
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=lo,eth77, and this machine has .*\blo\b"):
        check_network_name({"GLOO_SOCKET_IFNAME": "lo,eth77"})


def test_a_stale_world_size_does_not_hide_nproc():
    with pytest.raises(ConfigError, match=r"^--nproc 4, and the environment has WORLD_SIZE=2: "):
        check_rank_variables(4, WHOLE)


def test_a_stale_rank_ends_each_command_before_anything_is_loaded(good, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    for command in (["train"], ["eval"], ["export", "--out", "x"]):
        assert main([command[0], str(good), *command[1:]]) == 2
        assert "RANK=1 and no WORLD_SIZE" in capsys.readouterr().err
