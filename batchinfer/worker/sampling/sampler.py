"""Draws a step's tokens from its logits.

Probabilities are integers in units of 2**-40 of the most likely token's probability, so sums over
the vocabulary are exact and do not depend on their order. A row therefore gets the same token
alone, in any batch and in any chunk, with any number of samples. Rounding cuts off less than 1e-12
of the most likely token's probability.

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
"""Most logits that torch processes at a time, but at least one row. On a CPU, they fit into a
cache."""
_WORKSPACE_BYTES_EACH = 64
"""Bytes of workspace per logit. Measured: 24 for temperature, 28 for a small top-k, 51 for a top-k
of nearly the vocabulary, 54 for top-p on flat rows. The remainder is for sorting alternatives on a
device."""


def workspace_bytes(rows: int, vocab: int, device_type: str) -> int:
    """Return the most bytes that sampling needs in addition to ``rows`` rows of ``vocab``
    logits."""
    elements = min(rows * vocab, max(vocab, _WORKSPACE_ELEMENTS[device_type]))
    by_torch = elements * _WORKSPACE_BYTES_EACH
    if device_type == "cpu":
        return by_torch + native_sampling.draw_bytes(vocab)
    # Torch finds alternatives after the draws.
    return max(by_torch, device_workspace_bytes(rows, vocab))


def workspace_rows(vocab: int, device_type: str) -> int:
    """Return the number of rows of ``vocab`` logits to process at a time."""
    return max(1, _WORKSPACE_ELEMENTS[device_type] // vocab)


class Sampler:
    """Turns logits and sampling parameters into tokens. Holds no state.

    The order of operations is vLLM's. Users' functions and token masks of grammars come first.
    Log-probabilities are taken from these logits, unless ``LogprobsMode`` selects others. Then bias
    and bans, allowed ids and penalties are applied. At temperature 0, the most likely token is
    chosen. Otherwise, temperature, min-p, top-k and top-p are applied, and a uniform number selects
    a token by cumulative probability in id order. The number is from Philox, keyed by (seed,
    stream, sample index, position).
    """

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SampleHandle:
        """Draw a token for every sample, and start one copy from device to host without waiting.

        A sample is marked nonfinite if its unedited row contains NaN or +inf, or only -inf. If its
        bans and allowed ids exclude all tokens, it is also marked as having no token left. Its
        token and log-probability are then 0. Other samples are not affected. A sample with a given
        token gets that token, with its log-probability. Equally likely tokens are ordered by id.

        Args:
            logits: [R, V] floating point, on any device; unchanged, except for rows that users'
                functions change, and tokens that masks forbid, which become -inf.
            batch: parameters of the K samples.

        Returns:
            The samples, whose copy to the host has started. If only some samples requested
            log-probabilities, the other samples have ``ranks`` 0, ``top_token_ids`` 0 and
            ``top_logprobs`` -inf. L is at most V.
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
