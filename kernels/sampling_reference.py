"""Reference implementations of the sampling kernels in torch."""

from __future__ import annotations

import math

import torch

from batchinfer.kernels.penalties import EditedLogits

NONFINITE, NO_TOKEN_LEFT = 1, 2
_WORD = 0xFFFFFFFF


def sample(
    logits: torch.Tensor,  # [R, V]
    *,
    rows: torch.Tensor,  # [D] int32
    temperature: torch.Tensor,  # [D] float32
    min_p: torch.Tensor,  # [D] float32
    top_p: torch.Tensor,  # [D] float32
    top_k: torch.Tensor,  # [D] int32
    starts: torch.Tensor,  # [D + 1] int32
    samples: torch.Tensor,  # [k] int32
    seed: torch.Tensor,  # [K] int64
    stream: torch.Tensor,  # [K] int64
    sample_index: torch.Tensor,  # [K] int32
    position: torch.Tensor,  # [K] int32
    given: torch.Tensor | None = None,  # [K] int32
    edits: EditedLogits | None = None,
    draws: bool = True,
    filters: bool = True,
    maximum: torch.Tensor,  # [R] float32
    max_logprob: torch.Tensor,  # [R] float32
    token_ids: torch.Tensor,  # [K] int64
    logprobs: torch.Tensor,  # [K] float32
    failures: torch.Tensor,  # [K] int32
) -> None:
    """Apply top-k and top-p to each distribution, and draw from it by inverse transform sampling,
    in the order of token ids."""
    for d, row in enumerate(rows.tolist()):
        raw = logits[row].float()
        maximum[row] = raw.amax()
        max_logprob[row] = raw.double().log_softmax(0).amax()
        x = raw if edits is None else edited_row(raw, edits, d)
        failure = _failure(raw, x)
        weights = torch.zeros(len(x), dtype=torch.int64)
        if failure == 0 and temperature[d] > 0:
            weights = weigh(x, x.amax(), temperature[d], float(min_p[d]))
            _keep_most_likely(weights, x, int(top_k[d]), float(top_p[d]))
        for k in samples[starts[d] : starts[d + 1]].tolist():
            token = int(x.argmax())
            if failure == 0 and temperature[d] > 0:
                bits = random_bits(seed[k], stream[k], sample_index[k], position[k])
                target = (int(weights.sum()) * bits) >> 24
                token = int((weights.cumsum(0) <= target).sum())
            if given is not None and given[k] >= 0:
                token = int(given[k])
            token_ids[k] = 0 if failure else token
            logprobs[k] = 0.0 if failure else raw[token] - maximum[row] + max_logprob[row]
            failures[k] = failure


def edited_row(raw: torch.Tensor, edits: EditedLogits, d: int) -> torch.Tensor:
    """Return a copy of a row [V] of logits with the edits of distribution `d`."""
    ids = torch.arange(len(raw))
    present = (edits.present[d].cpu()[ids // 32] >> (ids % 32)) & 1 == 1
    unedited = torch.full_like(raw, -torch.inf) if edits.restricted[d] else raw
    return torch.where(present.to(raw.device), edits.logits[d], unedited)


def _failure(raw: torch.Tensor, x: torch.Tensor) -> int:
    if not raw.amax().isfinite():
        return NONFINITE
    if x.amax().isfinite():
        return 0
    return NO_TOKEN_LEFT if x.amax() == -torch.inf else NONFINITE


def _fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Return float32 a * b + c, rounded once, except in about one of 2^29 cases."""
    factor = b.double() if isinstance(b, torch.Tensor) else float(torch.tensor(b))
    term = c.double() if isinstance(c, torch.Tensor) else float(torch.tensor(c))
    return (a.double() * factor + term).float()


def weigh(
    x: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, min_p: float
) -> torch.Tensor:
    """Return int64 floor(2^40 exp((x - top) / temperature)), or 0 where exp is below `min_p`."""
    temperature = temperature.clamp(min=1e-30)
    y = (x - top).clamp(min=-88.0 * temperature) / temperature
    n = (y * torch.tensor(1.44269504)).round()
    r = _fma(n, -0.6931471805599453, y)
    p = torch.full_like(r, 1.9875691e-4)
    for term in (1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666665e-1, 5.0000001e-1, 1.0, 1.0):
        p = _fma(p, r, term)
    relative = p * ((n.int() + 127) << 23).view(torch.float32)
    return (relative * 2.0**40).long().masked_fill(relative < min_p, 0)


def _keep_most_likely(weights: torch.Tensor, x: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set the weights of tokens that top-k or top-p drop to 0."""
    limited = 0 < top_k < len(x)
    if not limited and top_p >= 1:
        return
    order = x.argsort(descending=True, stable=True)
    if limited:
        weights[order[top_k:]] = 0
    mass = weights[order].cumsum(0)
    enough = mass.double() >= top_p * mass[-1].double()
    weights[order[int(enough.int().argmax()) + 1 :]] = 0


def random_bits(
    seed: torch.Tensor, stream: torch.Tensor, sample_index: torch.Tensor, position: torch.Tensor
) -> int:
    """Return 24 random bits from Philox-4x32-10 (Salmon et al. 2011)."""
    key = [int(seed) & _WORD, int(seed) >> 32 & _WORD]
    c = [int(stream) & _WORD, int(stream) >> 32 & _WORD, int(sample_index), int(position)]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ key[0], q & _WORD, p >> 32 ^ c[3] ^ key[1], p & _WORD]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return c[0] >> 8


def apply_penalties(
    logits: torch.Tensor,  # [R, V]
    *,
    rows: torch.Tensor,  # [D] int32
    bias_starts: torch.Tensor,  # [D + 1] int32
    bias_ids: torch.Tensor,  # [B] int32
    bias_values: torch.Tensor,  # [B] float32
    allowed_starts: torch.Tensor,  # [D + 1] int32
    allowed_ids: torch.Tensor,  # [A] int32
    prompt_starts: torch.Tensor,  # [D + 1] int32
    prompt_ids: torch.Tensor,  # [P] int32
    output_starts: torch.Tensor,  # [D + 1] int32
    output_ids: torch.Tensor,  # [O] int32
    repetition: torch.Tensor,  # [D] float32
    presence: torch.Tensor,  # [D] float32
    frequency: torch.Tensor,  # [D] float32
) -> EditedLogits:
    vocab = logits.shape[1]
    words = torch.zeros(len(rows), math.ceil(vocab / 32), dtype=torch.int64)
    values = torch.full((len(rows), vocab), torch.nan)
    restricted = torch.zeros(len(rows), dtype=torch.int32)
    for d, row in enumerate(rows.tolist()):
        x = logits[row].cpu().to(torch.float32, copy=True)

        def part_of(ids: torch.Tensor, starts: torch.Tensor, d: int = d) -> list[int]:
            return ids[starts[d] : starts[d + 1]].tolist()

        bias, allowed = part_of(bias_ids, bias_starts), part_of(allowed_ids, allowed_starts)
        prompt, output = part_of(prompt_ids, prompt_starts), part_of(output_ids, output_starts)
        for token, value in zip(bias, part_of(bias_values, bias_starts), strict=True):
            x[token] += value
        restricted[d] = len(allowed) > 0
        if allowed:
            forbidden = torch.ones(vocab, dtype=torch.bool)
            forbidden[allowed] = False
            x[forbidden] = -torch.inf
        for token in {*prompt, *output}:
            positive = x[token] > 0
            x[token] = x[token] / repetition[d] if positive else x[token] * repetition[d]
        for token in set(output):
            x[token] = x[token] - frequency[d] * output.count(token) - presence[d]
        for token in {*bias, *allowed, *prompt, *output}:
            values[d, token] = x[token]
            words[d, token // 32] |= 1 << (token % 32)
    present = torch.where(words >= 2**31, words - 2**32, words).int()
    return EditedLogits(
        values.to(logits.device), present.to(logits.device), restricted.to(logits.device)
    )


def apply_token_bitmask(
    logits: torch.Tensor,  # [R, V], changed in place
    rows: torch.Tensor,  # [M] int32
    masks: torch.Tensor,  # [M, words] int32, bit i % 32 of word i // 32: token i is allowed
) -> None:
    for row, mask in zip(rows.tolist(), masks.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if token // 32 >= len(mask) or not mask[token // 32] >> (token % 32) & 1:
                logits[row, token] = -torch.inf
