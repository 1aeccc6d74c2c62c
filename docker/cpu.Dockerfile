# The quickstart in an image, for a machine without GPUs: docker/build.sh cpu
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN useradd --create-home --uid 10001 gvpo
# The dependencies are a layer of their own, which another version of this package's code leaves as it is.
# pip's own cache, and a pip.conf where packages come from an index of your own: neither stays in the image.
COPY constraints.txt pyproject.toml /tmp/source/
COPY megatron_gvpo/__init__.py megatron_gvpo/versions.txt /tmp/source/megatron_gvpo/
COPY megatron_gvpo/core/versions.py /tmp/source/megatron_gvpo/core/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    touch /tmp/source/README.md /tmp/source/LICENSE && python3.12 -m venv /opt/megatron_gvpo \
    && /opt/megatron_gvpo/bin/pip install --constraint /tmp/source/constraints.txt setuptools /tmp/source \
    && /opt/megatron_gvpo/bin/pip install --no-deps --constraint /tmp/source/constraints.txt megatron-bridge \
    && /opt/megatron_gvpo/bin/pip uninstall --yes megatron-gvpo \
    && rm -r /tmp/source
COPY constraints.txt pyproject.toml README.md LICENSE /tmp/source/
COPY megatron_gvpo /tmp/source/megatron_gvpo
ARG REVISION
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    echo "${REVISION}" >/tmp/source/megatron_gvpo/commit.txt \
    && /opt/megatron_gvpo/bin/pip install --no-deps --no-build-isolation /tmp/source && rm -r /tmp/source
COPY examples /opt/megatron_gvpo/examples
LABEL org.opencontainers.image.title="megatron_gvpo, CPU" \
      org.opencontainers.image.description="The quickstart of megatron_gvpo on a machine without GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/megatron_gvpo/bin:$PATH
USER 10001
WORKDIR /home/gvpo
HEALTHCHECK --interval=5m --timeout=1m --start-period=1m CMD ["megatron-gvpo", "doctor"]
CMD ["python", "/opt/megatron_gvpo/examples/quickstart/run.py"]
