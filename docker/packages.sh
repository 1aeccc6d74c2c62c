# Install into an image: sh packages.sh NCCL_VERSION [PACKAGE==VERSION ...]
# The NCCL that all images share, and packages that an engine's image lacks; and `python` beside `python3`. Fails, and the
# build with it, where torch does not load that NCCL.
set -eu
nccl=${1:?usage: packages.sh NCCL_VERSION [PACKAGE==VERSION ...]}
shift
set -- "nvidia-nccl-cu13==$nccl" "$@"
if python3 -m pip --version >/dev/null 2>&1; then
  python3 -m pip install --no-cache-dir --no-deps --break-system-packages "$@"
else
  uv pip install --no-cache --no-deps --break-system-packages --python "$(command -v python3)" "$@"
fi
python3 - "$nccl" <<'END'
import sys
import torch
loaded = ".".join(map(str, torch.cuda.nccl.version()))
sys.exit(None if loaded == sys.argv[1] else f"torch {torch.__version__} loads NCCL {loaded}, not {sys.argv[1]}")
END
command -v python >/dev/null || ln -s "$(command -v python3)" /usr/local/bin/python
