#!/usr/bin/env bash
# Build an image of this project, with the versions of megatron_gvpo/versions.txt.
#   usage: docker/build.sh cpu|trainer|sglang|vllm [options of `docker build`]
# BUILDER is the program that builds, by default `docker build`; `buildah bud --format docker` will do too. The first tag
# is megatron_gvpo:NAME. An index of your own: --secret id=pip.conf,src=pip.conf
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: docker/build.sh cpu|trainer|sglang|vllm [options of docker build]}
shift

version_of() { sed -n "s/^$1==\([0-9.]*\).*/\1/p" megatron_gvpo/versions.txt; }

case $name in
  cpu) file=cpu arguments=(--build-arg "BASE_IMAGE=python:$(cat .python-version)-slim-bookworm") ;;
  trainer)
    file=trainer
    arguments=(--build-arg "CUDA_VERSION=$(version_of cuda-toolkit)" --build-arg "NCCL_VERSION=$(version_of nccl)")
    ;;
  sglang | vllm)
    file=rollout
    arguments=(--target "$name" --build-arg "SGLANG_VERSION=$(version_of sglang)" --build-arg "VLLM_VERSION=$(version_of vllm)"
               --build-arg "NCCL_VERSION=$(version_of nccl)"
               --build-arg "MSGPACK_VERSION=$(sed -n 's/^msgpack==//p' constraints.txt)")
    ;;
  *) echo "build.sh: there is no image '$name'; known: cpu, trainer, sglang, vllm" >&2; exit 2 ;;
esac
# What `megatron-gvpo --version` says: the commit, and whether tracked files differ from it.
revision=$(git rev-parse HEAD 2>/dev/null || true)
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || revision+=" changed"
# Options that are given come last, and win.
exec ${BUILDER:-docker build} --file "docker/$file.Dockerfile" "${arguments[@]}" --build-arg "REVISION=$revision" \
  --tag "megatron_gvpo:$name" "$@" .
