# The program in an image, for a CPU or for NVIDIA GPUs:
#
#   docker build --target cpu --tag batchinfer:cpu .
#   docker build --target cuda --tag batchinfer:cuda .
#   docker run --rm --volume "$PWD:/work" --volume models:/models batchinfer:cpu run job.yaml
#
# The container's user has the number 10001: what it writes to must be writable for that, or the
# container run with --user "$(id -u)".
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
# Kernels are compiled where they run: those for a CPU, and what launches Triton's.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home batchinfer \
 && install --directory --owner=batchinfer --mode=0777 /models /work
# Models that are fetched by name stay in a volume, not in the container; compiled kernels and
# hashes of weights go beside them.
ENV HF_HOME=/models/huggingface \
    XDG_CACHE_HOME=/models/cache \
    TRITON_CACHE_DIR=/models/triton
COPY constraints.txt /
COPY --from=wheel /wheels /wheels

# On Linux, torch from the package index is the one for CUDA, with all libraries it needs.
FROM base AS cuda
ARG EXTRAS=s3,structured,ray,metrics
RUN pip install --no-cache-dir --constraint /constraints.txt torch \
 && pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[${EXTRAS}]"
USER batchinfer
VOLUME /models
WORKDIR /work
ENTRYPOINT ["batchinfer"]
CMD ["--help"]

# Give the index of PyTorch's CPU builds as TORCH_INDEX: some gigabytes less.
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
