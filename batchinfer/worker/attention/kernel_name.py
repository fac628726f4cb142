"""What attends, by a name for people and records: it decides the last bits of a row's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.kernels.cpu import library
from batchinfer.worker.attention.native_cpu import instructions_for
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel

ATTENTION = "attention"
"""Its key among the kernels of a run."""


@dataclass(frozen=True)
class AttentionKernel:
    """What attends over a pool, and where the C kernels do not, why."""

    name: str
    why: str = ""

    def line(self, before: Mapping[str, str]) -> str:
        """For the log of a run.

        Args:
            before: the kernels of the runs that it goes on with, this one under ``ATTENTION``.
        """
        earlier = before.get(ATTENTION, self.name)
        changed = (
            "" if earlier == self.name else f"; runs before had {earlier}, and bits may differ"
        )
        return f"attention by {self.name}{self.why and f': {self.why}'}{changed}"


def attention_kernel(cache: KVCache, like: LinearKernel | None = None) -> AttentionKernel:
    """What ``make_backend`` has for a pool's attention.

    Args:
        like: what multiplies by the model's weights.
    """
    pool = cache.pool
    if pool.is_cuda:
        is_batch_invariant = like is not None and like.is_batch_invariant
        return AttentionKernel("Triton in a fixed order" if is_batch_invariant else "Triton")
    if cache.is_native:
        return AttentionKernel(f"own {instructions_for(pool.dtype, like)}")
    if library.why_not():
        return AttentionKernel("torch (no C kernels)", library.why_not())
    kind = f"{'latents' if cache.layout.latent else 'a cache'} of {pool.dtype}".replace(
        "torch.", ""
    )
    return AttentionKernel("torch", f"there is no C kernel for {kind}")
