#!/usr/bin/env bash
# Build the Python environment of another library's environments, once, outside the repository; print its Python.
#   usage: tools/environments/make_env.sh openenv|nemo_gym
# ENVIRONMENT_PYTHON names the interpreter to build with (default: python3.12).
set -euo pipefail
library=${1:?usage: make_env.sh openenv|nemo_gym}
here=$(cd "$(dirname "$0")" && pwd)
case $library in
  openenv | nemo_gym) ;;
  *) echo "make_env.sh: there is no library '$library'; known: openenv, nemo_gym" >&2; exit 2 ;;
esac
pins=$here/../../locks/$library.txt

# The name carries what the environment is made of, so that a change builds a new one.
key=$(cat "$pins" "$0" | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/megatron_gvpo/environments/$library-$key
if [ ! -e "$dir/.complete" ]; then
  mkdir -p "$(dirname "$dir")"
  exec 9>"$dir.lock"
  flock 9 # two builders: the second waits, then finds it done
fi
if [ ! -e "$dir/.complete" ]; then
  rm -rf "$dir"
  "${ENVIRONMENT_PYTHON:-python3.12}" -m venv "$dir"
  "$dir/bin/python" -m pip install --quiet --disable-pip-version-check uv >&2
  "$dir/bin/uv" pip install --quiet --compile-bytecode --python "$dir/bin/python" -r "$pins" >&2
  touch "$dir/.complete"
fi
echo "$dir/bin/python"
