# The quickstart in an image, for a machine without GPUs: docker/build.sh cpu
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS build
# pip's own cache, and a pip.conf where packages come from an index of your own: neither stays in the image.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,target=/source \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    cp -r /source /tmp/source && python3.12 -m venv /opt/megatron_gvpo \
    && /opt/megatron_gvpo/bin/pip install --no-compile --constraint /tmp/source/constraints.txt /tmp/source \
    && /opt/megatron_gvpo/bin/pip install --no-compile --no-deps --constraint /tmp/source/constraints.txt megatron-bridge

FROM ${BASE_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="megatron_gvpo, CPU" \
      org.opencontainers.image.description="The quickstart of megatron_gvpo on a machine without GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
RUN useradd --create-home --uid 10001 gvpo
COPY --from=build /opt/megatron_gvpo /opt/megatron_gvpo
COPY examples /opt/megatron_gvpo/examples
ENV PATH=/opt/megatron_gvpo/bin:$PATH
USER 10001
WORKDIR /home/gvpo
HEALTHCHECK --interval=5m --timeout=1m --start-period=1m CMD ["megatron-gvpo", "doctor"]
CMD ["python", "/opt/megatron_gvpo/examples/quickstart/run.py"]
