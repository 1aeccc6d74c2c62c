# The trainer on NVIDIA GPUs (CUDA 13, Transformer Engine with FP8): docker/build.sh trainer
ARG CUDA_VERSION
ARG BUILD_IMAGE=nvidia/cuda:${CUDA_VERSION}-cudnn-devel-ubuntu24.04
ARG BASE_IMAGE=nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04
ARG APEX=without
ARG DEEPEP=without

FROM ${BUILD_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008  # what a release of the distribution holds changes only in its patches
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential cmake git ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/megatron_gvpo/bin:$PATH
# Compiled are Transformer Engine's torch extension, flash-attn and Apex: for A100 and A800 (8.0), H100, H200 and H800 (9.0),
# B200 (10.0). The first two would otherwise take wheels of their own releases, where those exist for this torch. NCCL's expert
# parallelism, which nothing here uses, needs headers that this base may lack.
ENV TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0" NVTE_CUDA_ARCHS="80;90;100" FLASH_ATTN_CUDA_ARCHS="80;90;100" \
    NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 FLASH_ATTENTION_FORCE_BUILD=TRUE
COPY constraints.txt /tmp/source/
COPY megatron_gvpo/versions.txt /tmp/source/megatron_gvpo/
# pip's own cache, and a pip.conf where packages come from an index of your own: neither stays in the image.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3.12 -m venv /opt/megatron_gvpo \
    && pip install --constraint /tmp/source/constraints.txt torch setuptools wheel pybind11 packaging psutil \
    && pip install --constraint /tmp/source/constraints.txt --no-build-isolation "transformer-engine[core-cu13,pytorch]"
# The longest part of the build, about an hour on 16 cores; MAX_JOBS bounds its memory, several GiB a job.
ARG MAX_JOBS=4
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --constraint /tmp/source/constraints.txt --no-build-isolation flash-attn
COPY pyproject.toml README.md LICENSE /tmp/source/
COPY megatron_gvpo /tmp/source/megatron_gvpo
ARG REVISION
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    echo "${REVISION}" >/tmp/source/megatron_gvpo/commit.txt \
    && pip install --constraint /tmp/source/constraints.txt /tmp/source flash-linear-attention \
    && pip install --constraint /tmp/source/constraints.txt --no-deps megatron-bridge
# The servers' NCCL, which is newer than what torch asks for: NCCL refuses a group of two versions.
ARG NCCL_VERSION
COPY docker/packages.sh docker/compile_triton.py /tmp/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf sh /tmp/packages.sh "${NCCL_VERSION}"
# The CUDA toolkit's stand-in for the driver, which comes with the GPU.
RUN mkdir /tmp/driver && ln -s /usr/local/cuda/lib64/stubs/libcuda.so /tmp/driver/libcuda.so.1 \
    && TRITON_CACHE_DIR=/opt/triton TRITON_LIBCUDA_PATH=/tmp/driver LD_LIBRARY_PATH=/tmp/driver \
       python /tmp/compile_triton.py

FROM build AS without-apex

# NVIDIA's Apex, from its source: docker/build.sh trainer --build-arg APEX=with
FROM build AS with-apex
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=8 \
    pip install --constraint /tmp/source/constraints.txt --no-build-isolation apex

FROM ${APEX}-apex AS compiled

FROM compiled AS without-deepep

# DeepEP, from its source: docker/build.sh trainer --build-arg DEEPEP=with. Its kernels that leave the machine are for Hopper and later,
# and need the headers of InfiniBand's verbs. NVSHMEM comes with torch.
FROM compiled AS with-deepep
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs-dev \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    TORCH_CUDA_ARCH_LIST="9.0;10.0" CPLUS_INCLUDE_PATH=/usr/local/cuda/include/cccl \
    pip install --constraint /tmp/source/constraints.txt --no-build-isolation --no-deps deep_ep

FROM ${DEEPEP}-deepep AS built

FROM ${BASE_IMAGE}
ARG REVISION
LABEL org.opencontainers.image.title="megatron_gvpo, trainer" \
      org.opencontainers.image.description="RL post-training with GVPO and GPG on megatron-core" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
# Python, and the user-space drivers of InfiniBand, by which NCCL leaves the node.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ibverbs-providers libibverbs1 librdmacm1 python3.12 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 gvpo
COPY --from=built /opt/megatron_gvpo /opt/megatron_gvpo
COPY --from=built --chown=gvpo /opt/triton /opt/triton
COPY examples /opt/megatron_gvpo/examples
ENV PATH=/opt/megatron_gvpo/bin:$PATH TRITON_CACHE_DIR=/opt/triton
RUN ! command -v cc gcc g++ clang nvcc
USER 10001
WORKDIR /home/gvpo
HEALTHCHECK --interval=5m --timeout=1m --start-period=1m CMD ["megatron-gvpo", "doctor"]
CMD ["megatron-gvpo", "doctor"]
