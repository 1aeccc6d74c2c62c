#!/usr/bin/env bash
# Write locks/cpu.txt and locks/gpu.txt: every package of an installation, with its version and hashes.
#   usage: tools/lock.sh [DIR]
# Versions that are there already stay, where pyproject.toml and constraints.txt allow them. The hashes of the GPU's
# packages that are compiled at installation are those of their sources.
# There is no uv.lock: for every package it names the index of whoever wrote it.
set -euo pipefail
dir=$(realpath "${1:-$(dirname "$0")/../locks}")
cd "$(dirname "$0")/.."
uv=$(command -v .venv/bin/uv || command -v uv)

lock() { # NAME [options of `uv pip compile`]
  "$uv" pip compile --quiet --universal --generate-hashes --no-annotate --python-version "$(cat .python-version)" \
    --custom-compile-command tools/lock.sh --constraints constraints.txt --group bridge --output-file "$dir/$1.txt" \
    "${@:2}" pyproject.toml >/dev/null
}
lock cpu
lock gpu --extra gpu - <<<flash-attn
