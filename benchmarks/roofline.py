"""Computes the shortest time for a workload on a device that runs operators one after the other.

Each operator takes the longer of two times: the time for its FLOPs at the measured speed of matrix
products, and the time for its bytes at the measured copy bandwidth. The sum over all operators is
the time of an engine with perfect kernels and no gaps between kernels. The schedule prefills
prompts in chunks, runs decodes first, and reserves the blocks of a whole row at admission.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from gpu_workloads import Job


@dataclass(frozen=True)
class Ceilings:
    bytes_per_s: float
    """Copy bandwidth, bytes read plus bytes written."""
    flop_per_s: float
    """Rate of a large GEMM in the model's dtype."""
    memory_bytes: float


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated MLPs and grouped heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Elements per head."""
    inner: int
    vocab: int
    tied: bool
    element_bytes: int = 2

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of all layers."""
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        embeddings = self.head_weights * (1 if self.tied else 2)
        return (self.layer_weights + embeddings) * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per token, for all layers."""
        return 2 * self.layers * self.kv_heads * self.width * self.element_bytes

    @property
    def pair_flops(self) -> int:
        """FLOPs of attention from one query token to one key, for all layers and heads."""
        return 4 * self.layers * self.heads * self.width

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations read and written per token in all layers, if each operator between
        GEMMs reads its inputs and writes its outputs once."""
        query, key = self.heads * self.width, self.kv_heads * self.width
        elements = 10 * self.hidden + 3 * (query + 2 * key) + 3 * query + 6 * self.inner
        return self.layers * elements * self.element_bytes


class _Running:
    """Numbers of decoding sequences and of their context tokens."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self.repeated = 0
        """Tokens that are counted repeatedly, because samples of a row share the row's prompt."""
        self.ends: list[tuple[int, int, Job]] = []

    @property
    def stored(self) -> int:
        """Number of different tokens in all contexts: prompts count once for all samples of a row,
        and a prefix that rows share counts once for all rows."""
        shared = self.ends[0][2].shared_len if self.ends else 0
        return self.tokens - self.repeated - max(len(self.ends) - 1, 0) * shared

    def add(self, job: Job, step: int, order: int) -> None:
        self.count += job.samples
        self.tokens += job.samples * (job.prompt_len + 1)
        self.repeated += (job.samples - 1) * job.prompt_len
        heapq.heappush(self.ends, (step + job.output_len - 1, order, job))

    def advance(self, step: int) -> list[Job]:
        """Decode one token of each sequence, and return the jobs that finish."""
        self.tokens += self.count
        ended = []
        while self.ends and self.ends[0][0] <= step:
            job = heapq.heappop(self.ends)[2]
            self.count -= job.samples
            self.tokens -= job.samples * (job.prompt_len + job.output_len)
            self.repeated -= (job.samples - 1) * job.prompt_len
            ended.append(job)
        return ended


def sequential_seconds(
    shape: Shape,
    jobs: list[Job],
    device: Ceilings,
    *,
    max_num_seqs: int = 1024,
    token_budget: int = 16384,
    block_size: int = 16,
    memory_share: float = 0.92,
    reserved_bytes: float = 4e9,
) -> float:
    """Return seconds for all jobs.

    A shared prefix is computed and stored once. Each step reads a shared prefix once for all
    sequences, and a row's prompt once for all its samples.
    """

    def blocks(tokens: int) -> int:
        return math.ceil(tokens / block_size) * block_size

    def held(job: Job) -> int:
        return blocks(job.prompt_len - job.shared_len) + job.samples * blocks(job.output_len)

    def seconds(flops: float, num_bytes: float) -> float:
        return max(flops / device.flop_per_s, num_bytes / device.bytes_per_s)

    room = device.memory_bytes * memory_share - shape.weight_bytes - reserved_bytes
    room /= shape.kv_bytes
    waiting, prefilling, running = deque(jobs), deque[list[int]](), _Running()
    admitted: list[Job] = []
    first_of_prefix = True
    total, step, sequences = 0.0, 0, 0
    while waiting or prefilling or running.count:
        while waiting and sequences + waiting[0].samples <= max(max_num_seqs, waiting[0].samples):
            job = waiting[0]
            prefix = blocks(job.shared_len) if first_of_prefix else 0
            if held(job) + prefix > room and sequences:
                break
            waiting.popleft()
            room -= held(job) + prefix
            sequences += job.samples
            start = 0 if first_of_prefix else min(job.shared_len, job.prompt_len - 1)
            first_of_prefix = first_of_prefix and job.shared_len == 0
            prefilling.append([start, len(admitted)])
            admitted.append(job)
        budget = max(token_budget - running.count, 0)
        computed = pairs = read = 0
        ready: list[tuple[int, Job]] = []
        while prefilling and budget > 0:
            start, order = prefilling[0]
            job = admitted[order]
            chunk = min(budget, job.prompt_len - start)
            pairs += chunk * start + chunk * (chunk + 1) // 2
            read += start + chunk
            computed += chunk
            budget -= chunk
            prefilling[0][0] += chunk
            if start + chunk < job.prompt_len:
                break
            prefilling.popleft()
            ready.append((order, job))
        tokens = running.count + computed
        logits = running.count + sum(job.samples for _, job in ready)
        weights, head = shape.layer_weights, shape.head_weights if logits else 0
        passes = tokens * (shape.kv_bytes + shape.activation_bytes) + logits * shape.vocab * 4
        total += (
            seconds(2 * weights * tokens, weights * shape.element_bytes)
            + seconds(2 * head * logits, head * shape.element_bytes)
            + seconds(shape.pair_flops * running.tokens, shape.kv_bytes * running.stored)
            + seconds(shape.pair_flops * pairs, shape.kv_bytes * read)
            + passes / device.bytes_per_s
        )
        step += 1
        ended = running.advance(step)
        for order, job in ready:
            if job.output_len > 1:
                running.add(job, step, order)
            else:
                ended.append(job)
        room += sum(map(held, ended))
        sequences -= sum(job.samples for job in ended)
    return total
