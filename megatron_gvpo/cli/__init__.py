"""The command line. `megatron-gvpo --help` lists the commands; `main` runs one."""

from megatron_gvpo.cli.main import main as main
