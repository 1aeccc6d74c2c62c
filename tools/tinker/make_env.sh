#!/usr/bin/env bash
# Build an environment with the Tinker SDK and tinker-cookbook, once, outside the repository; print its Python.
#   usage: tools/tinker/make_env.sh
# TINKER_PYTHON names the interpreter to build with (default: python3.12). The CPU build of torch must be what pip
# finds for the version in megatron_gvpo/versions.txt; where it is not, name its index with PIP_EXTRA_INDEX_URL.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pins=$(grep -E '^(tinker|tinker-cookbook|torch|transformers|math-verify|datasets)==' "$here/../../megatron_gvpo/versions.txt" | sed 's/ *#.*//')

# The name carries what the environment is made of, so that a change builds a new one.
key=$({ echo "$pins"; cat "$0" "$here/requirements.txt"; } | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/megatron_gvpo/tinker-$key
if [ ! -e "$dir/.complete" ]; then
  mkdir -p "$(dirname "$dir")"
  exec 9>"$dir.lock"
  flock 9 # two builders: the second waits, then finds it done
fi
if [ ! -e "$dir/.complete" ]; then
  rm -rf "$dir"
  "${TINKER_PYTHON:-python3.12}" -m venv "$dir"
  echo "$pins" >"$dir/pins.txt"
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check uv
  # uv takes what the package's own environment has, torch for one, from its cache.
  pip=("$dir/bin/uv" pip install --quiet --python "$dir/bin/python" --constraint "$dir/pins.txt")
  "${pip[@]}" -r "$here/requirements.txt" >&2
  # Without its dependencies: one of them, tml-renderers>=0.4.1, is not on PyPI, and the recipes here do without it.
  "${pip[@]}" --no-deps tinker-cookbook >&2
  touch "$dir/.complete"
fi
echo "$dir/bin/python"
