"""Runs the ranks of a vLLM server on machines without its HTTP interface, as `vllm serve --headless` does.

`vllm serve` needs a distribution called vllm, and the CPU build's has another name.
"""

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":  # vLLM's workers import this file, too
    cli_env_setup()
    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(options)
    options.api_server_count = 0
    run_headless(options)
