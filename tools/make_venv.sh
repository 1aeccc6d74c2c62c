#!/usr/bin/env bash
# Create the environment: Python 3.12, the versions of constraints.txt, this package in development mode.
#   usage: tools/make_venv.sh DIR
set -euo pipefail
dir=${1:?usage: tools/make_venv.sh DIR}
cd "$(dirname "$0")/.."

# A Python 3.12 that is already here is preferred; uv fetches one only where there is none.
if [ ! -x "$dir/bin/python" ]; then
  if python3.12 -c 'import ensurepip' 2>/dev/null; then
    python3.12 -m venv "$dir"
  else
    uv=$(command -v uv || true)
    if [ -z "$uv" ]; then
      python3 -m pip install --quiet --user uv
      uv=$(python3 -m site --user-base)/bin/uv
    fi
    "$uv" venv --seed --python 3.12 "$dir"
  fi
fi

"$dir/bin/python" -m pip install --quiet uv
"$dir/bin/uv" pip install --python "$dir/bin/python" --quiet \
  --editable . --group bridge --group dev --constraints constraints.txt
# The imports of a run, which also writes their bytecode. uv writes none, and where PYTHONDONTWRITEBYTECODE is set, as in many
# images, every start would compile 5,700 modules again, for 14 s.
PYTHONDONTWRITEBYTECODE="" "$dir/bin/python" -W ignore -c '
import matplotlib.figure, pandas, torch
import megatron_gvpo.rewards.math_answer, megatron_gvpo.training.trainer
from megatron_gvpo.megatron.cpu.bridge import import_bridge
import_bridge()
print("environment ready: torch", torch.__version__)'
