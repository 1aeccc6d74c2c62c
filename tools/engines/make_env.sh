#!/usr/bin/env bash
# Build the environment of a rollout engine for CPU, once, outside the repository; print its Python.
#   usage: tools/engines/make_env.sh sglang|vllm
# On a GPU cluster use the engines' own releases or images instead (docs/howto/rollout_servers.md).
# The CPU build of torch must be what pip finds for the version in megatron_gvpo/versions.txt; where it is not, name
# its index with PIP_EXTRA_INDEX_URL. ENGINE_PYTHON names the interpreter to build with (default: python3.11).
set -euo pipefail
engine=${1:?usage: make_env.sh sglang|vllm}
here=$(cd "$(dirname "$0")" && pwd)
case $engine in
  # Installed without their dependencies, which name the CUDA builds of torch and of the kernels.
  sglang) bare=(sglang sglang-router) ;;
  vllm) bare=() ;;
  *) echo "make_env.sh: there is no engine '$engine'; known: sglang, vllm" >&2; exit 2 ;;
esac

# The pins of the packages that are asked for here, and no others.
asked=$(printf '^%s==\n' $(cat "$here/$engine.txt") "${bare[@]}")
pins=$(grep -f <(echo "$asked") "$here/../../megatron_gvpo/versions.txt" | sed 's/ *#.*//')

# The name carries what the environment is made of, so that a change builds a new one, and a pin of another package does not.
key=$({ echo "$pins"; cat "$0" "$here/$engine.txt" "$here/sgl_kernel/__init__.py"; } | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/megatron_gvpo/engines/$engine-$key
if [ -e "$dir/.complete" ]; then
  echo "$dir/bin/python"
  exit
fi

find_python() {
  for candidate in ${ENGINE_PYTHON:-} python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "make_env.sh: no Python 3.11 found; name one with ENGINE_PYTHON" >&2
  exit 3
}

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9 # two builders: the second waits, then finds it done
if [ ! -e "$dir/.complete" ]; then
  rm -rf "$dir"
  "$(find_python)" -m venv "$dir"
  echo "$pins" >"$dir/pins.txt"
  pip=("$dir/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$dir/pins.txt")
  "${pip[@]}" torch >&2
  "${pip[@]}" -r "$here/$engine.txt" >&2
  site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  if [ "$engine" = sglang ]; then
    "${pip[@]}" --no-deps "${bare[@]}" >&2
    cp -r "$here/sgl_kernel" "$site/"
  else
    # Their CUDA builds break the import of transformers beside a CPU torch; text and images need none of them.
    "$dir/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec >&2
  fi
  # torchvision registers shapes of operators that its CUDA build alone has, at import; they are not used.
  : >"$site/torchvision/_meta_registrations.py"
  touch "$dir/.complete"
fi
echo "$dir/bin/python"
