"""Draws a step's tokens from its logits.

Probabilities are held as integers in units of 2**-40 of the most likely token's, so that sums
over the vocabulary are exact and do not depend on the order of summation. A row therefore gets
the same token alone or in any batch, in any chunk, for any number of samples. Rounding cuts off
less than 1e-12 of the most likely token's probability.

K samples draw from R rows of logits; D = distinct distributions among them; V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.engine.step import SamplingBatch
from batchinfer.kernels.cpu import sampling as native_sampling
from batchinfer.worker.sampling.logits_processors import run_processors
from batchinfer.worker.sampling.on_cpu import draw_on_cpu
from batchinfer.worker.sampling.on_device import draw_on_device
from batchinfer.worker.sampling.on_device import workspace_bytes as device_workspace_bytes
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.sampling.reported import report

_WORKSPACE_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Most logits that torch processes at a time, or one row; the CPU's fit into a cache."""
_WORKSPACE_BYTES_EACH = 64
"""Measured: 24 for temperature, 28 for a small top-k, 51 for a top-k of nearly the vocabulary, 54
for top-p on flat rows; the rest is for a device's own sorting of alternatives."""


def workspace_bytes(rows: int, vocab: int, device_type: str) -> int:
    """Most bytes that sampling needs in addition to ``rows`` rows of ``vocab`` logits."""
    elements = min(rows * vocab, max(vocab, _WORKSPACE_ELEMENTS[device_type]))
    by_torch = elements * _WORKSPACE_BYTES_EACH
    if device_type == "cpu":
        return by_torch + native_sampling.draw_bytes(vocab)
    return max(by_torch, device_workspace_bytes(rows, vocab))  # alternatives, after the draws


def workspace_rows(vocab: int, device_type: str) -> int:
    """Rows of ``vocab`` logits to process at a time."""
    return max(1, _WORKSPACE_ELEMENTS[device_type] // vocab)


class Sampler:
    """Turns logits and sampling parameters into tokens. Holds no state.

    Follows vLLM's order: users' own functions; grammars' token masks; log-probabilities of the
    logits at this point, unless ``LogprobsMode`` asks for others; bias and bans, allowed ids,
    penalties; most likely token for temperature 0; else temperature, min-p, top-k, top-p, and the
    inverse of the cumulative distribution in id order at one uniform number per token from Philox
    keyed by (seed, stream, sample index, position).
    """

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SampleHandle:
        """Draw every sample's token, and start one copy from device to host without waiting.

        A sample is marked nonfinite if its raw row holds NaN or +inf or nothing but -inf. If its
        bans and allowed ids exclude all tokens, it is also marked as having no token left. Its
        token and log-probability are then 0. Other samples are not affected. A sample with a given
        token gets that token, with its log-probability. Equally likely tokens are ordered by id.

        Args:
            logits: [R, V] floating point, on any device; unchanged, except for rows that users'
                functions change, and tokens that masks forbid, which become -inf.
            batch: how to draw K samples.

        Returns:
            The samples, being copied to the host. ``ranks`` are 0, ``top_token_ids`` 0 and
            ``top_logprobs`` -inf for samples that requested none while others did; L is at most V.
        """
        if len(batch.logits_rows) == 0:
            return SampleHandle.nothing(logits.device)
        chunk = workspace_rows(logits.shape[1], logits.device.type)
        run_processors(logits, batch.processed)
        if logits.is_cuda:
            draws = draw_on_device(logits, batch)
        else:
            draws = draw_on_cpu(logits, batch, chunk)
        reported = report(logits, batch, draws, chunk)
        logprobs = draws.logprobs if reported is None else reported.values[:, 0]
        return SampleHandle(draws.token_ids, logprobs, draws.failures, reported)
