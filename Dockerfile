# Builds an image for CPUs or for NVIDIA GPUs:
#
#   docker build --target cpu --tag batchinfer:cpu .
#   docker build --target cuda --tag batchinfer:cuda .
#   docker run --rm --volume "$PWD:/work" --volume models:/models batchinfer:cpu run job.yaml
#
# The container's user id is 10001. Make mounted folders writable for it, or run the container with
# --user "$(id -u)".
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
# A C compiler, for the CPU kernels and Triton's launchers, which are compiled at run time.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home batchinfer \
 && install --directory --owner=batchinfer --mode=0777 /models /work
# A volume holds downloaded models, compiled kernels and hashes of weights.
ENV HF_HOME=/models/huggingface \
    XDG_CACHE_HOME=/models/cache \
    TRITON_CACHE_DIR=/models/triton
COPY constraints.txt /
COPY --from=wheel /wheels /wheels

# On Linux, torch from the package index is the CUDA build with all its libraries.
FROM base AS cuda
ARG EXTRAS=s3,structured,ray,metrics
RUN pip install --no-cache-dir --constraint /constraints.txt torch \
 && pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[${EXTRAS}]"
USER batchinfer
VOLUME /models
WORKDIR /work
ENTRYPOINT ["batchinfer"]
CMD ["--help"]

# Set TORCH_INDEX to the index of PyTorch's CPU builds to save some gigabytes.
FROM base AS cpu
ARG EXTRAS=s3,structured,quantization,ray,metrics
ARG TORCH_INDEX=
RUN pip install --no-cache-dir --constraint /constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[${EXTRAS}]"
USER batchinfer
VOLUME /models
WORKDIR /work
ENTRYPOINT ["batchinfer"]
CMD ["--help"]
