# Rollout servers, on the engines' own images: docker/build.sh sglang, docker/build.sh vllm
# They hold compilers, which the engines use at run time; nothing here adds one.
ARG SGLANG_VERSION
ARG VLLM_VERSION
ARG SGLANG_IMAGE=lmsysorg/sglang:v${SGLANG_VERSION}
ARG VLLM_IMAGE=vllm/vllm-openai:v${VLLM_VERSION}

# What both get: this package, to run `serve`, and its receivers of weights, which the engines import; the one package that
# they lack for it; the trainer's NCCL, which refuses a group of two versions; `python`, as which `serve` starts the engine.
FROM scratch AS ours
COPY megatron_gvpo /megatron_gvpo
COPY docker/packages.sh /

FROM ${SGLANG_IMAGE} AS sglang
ARG REVISION
LABEL org.opencontainers.image.title="megatron_gvpo, SGLang rollouts" \
      org.opencontainers.image.description="SGLang servers that take weights from megatron_gvpo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=ours / /opt/megatron_gvpo/
ARG NCCL_VERSION
ARG MSGPACK_VERSION
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    sh /opt/megatron_gvpo/packages.sh "${NCCL_VERSION}" "msgpack==${MSGPACK_VERSION}" \
    && echo "${REVISION}" >/opt/megatron_gvpo/megatron_gvpo/commit.txt \
    && useradd --create-home --uid 10001 gvpo
ENV PYTHONPATH=/opt/megatron_gvpo:/opt/megatron_gvpo/megatron_gvpo/servers/plugins \
    HEALTH_URL=http://127.0.0.1:30000/health
USER 10001
WORKDIR /home/gvpo
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=5)"]
ENTRYPOINT ["python3", "-m", "megatron_gvpo", "serve"]

FROM ${VLLM_IMAGE} AS vllm
ARG REVISION
LABEL org.opencontainers.image.title="megatron_gvpo, vLLM rollouts" \
      org.opencontainers.image.description="vLLM servers that take weights from megatron_gvpo" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=ours / /opt/megatron_gvpo/
ARG NCCL_VERSION
ARG MSGPACK_VERSION
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    sh /opt/megatron_gvpo/packages.sh "${NCCL_VERSION}" "msgpack==${MSGPACK_VERSION}" \
    && echo "${REVISION}" >/opt/megatron_gvpo/megatron_gvpo/commit.txt \
    && useradd --create-home --uid 10001 gvpo
ENV PYTHONPATH=/opt/megatron_gvpo:/opt/megatron_gvpo/megatron_gvpo/servers/plugins \
    HEALTH_URL=http://127.0.0.1:30000/health
USER 10001
WORKDIR /home/gvpo
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=5)"]
ENTRYPOINT ["python3", "-m", "megatron_gvpo", "serve"]
