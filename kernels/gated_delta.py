"""Gated DeltaNet over recurrent states in pool slots: arguments, and a reference in plain torch.

Yang et al. 2024, https://arxiv.org/abs/2412.06464.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Weights and constants of a layer, float32 and contiguous."""

    conv: torch.Tensor
    """[conv_width, channels]; channels are the queries and keys of all key heads, then values."""
    decay_rate: torch.Tensor
    """[Hv], positive."""
    dt_bias: torch.Tensor
    """[Hv]"""
    norm: torch.Tensor
    """[Dv]"""
    norm_eps: float
    max_beta: float
    """Largest strength with which a value is written: 1, or 2 where states may change sign."""
    num_key_heads: int
    key_width: int


@dataclass(frozen=True)
class StatePlaces:
    """Place of a layer's state in the slots of a sequence.

    A head's matrix [Dk, Dv] is cut by columns into pieces [Dk, columns]; the last inputs of the
    convolution are cut by channels into pieces [conv_width - 1, channels]. Piece number i is in
    slot ``i // per_slot`` of the sequence's state, at ``i % per_slot`` pieces.
    """

    columns: int
    per_slot: int
    first: int
    """Number of the layer's first piece."""
    channels: int
    conv_per_slot: int
    conv_first: int
    """Number of the layer's first piece of a convolution, counted from ``conv_slot``."""
    conv_slot: int
    """First slot of a state with pieces of convolutions."""


def gated_delta(
    qkv: torch.Tensor,  # [T, channels]
    gate: torch.Tensor,  # [T, Hv * Dv]
    decay: torch.Tensor,  # [T, Hv]
    beta: torch.Tensor,  # [T, Hv]
    *,
    weights: GatedDeltaWeights,
    states: torch.Tensor,  # [num_slots, elements of a slot] float32
    places: StatePlaces,
    state_tables: torch.Tensor,  # [S, slots of a state] int32
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    out: torch.Tensor,  # [T, Hv * Dv]
) -> None:
    """Run packed sequences through a layer, from the convolution to the gated norm, and update
    their states in place. A sequence's first token starts from zeros.

    For each value head, with a state M [Dk, Dv], unit query q and key k, value v:
    ``M = g M; M += k (beta (v - k^T M)); out = norm(q^T M) * silu(gate)``.
    """
    starts, lens = query_starts.tolist(), context_lens.tolist()
    for at, table in enumerate(state_tables.tolist()):
        rows = slice(starts[at], starts[at + 1])
        matrices, inputs = _read(states, table, places, weights, beta.shape[1])
        if lens[at] == rows.stop - rows.start:
            matrices, inputs = torch.zeros_like(matrices), torch.zeros_like(inputs)
        with_past = torch.cat([inputs, qkv[rows].double()])
        mixed = functional.silu(
            functional.conv1d(
                with_past.T[None],
                weights.conv.double().T[:, None],
                groups=with_past.shape[1],
            )[0].T
        )
        out[rows] = _recur(mixed, gate[rows], decay[rows], beta[rows], matrices, weights)
        past = with_past[len(with_past) - len(inputs) :]
        _write(states, table, places, matrices, past)


def _recur(
    mixed: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    matrices: torch.Tensor,  # [Hv, Dk, Dv] updated in place
    weights: GatedDeltaWeights,
) -> torch.Tensor:
    num_keys = weights.num_key_heads * weights.key_width
    num_heads, key_width, value_width = matrices.shape
    query, key, value = torch.split(mixed, [num_keys, num_keys, num_heads * value_width], dim=1)
    per_key = num_heads // weights.num_key_heads
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(per_key, dim=1)
        for x in (part.reshape(len(part), -1, key_width) for part in (query, key))
    )
    query, value = query * key_width**-0.5, value.reshape(len(value), num_heads, value_width)
    step = functional.softplus(decay.double() + weights.dt_bias.double())
    kept = torch.exp(-weights.decay_rate.double() * step)
    strength = torch.sigmoid(beta.double()) * weights.max_beta
    outs = []
    for t in range(len(mixed)):
        matrices *= kept[t, :, None, None]
        recalled = torch.einsum("hk,hkv->hv", key[t], matrices)
        delta = (value[t] - recalled) * strength[t, :, None]
        matrices += key[t, :, :, None] * delta[:, None]
        outs.append(torch.einsum("hk,hkv->hv", query[t], matrices))
    result = torch.stack(outs)
    result = result / (result.square().mean(-1, keepdim=True) + weights.norm_eps).sqrt()
    return ((result * weights.norm.double()).flatten(1) * functional.silu(gate.double())).to(
        gate.dtype
    )


def _pieces(
    states: torch.Tensor, slots: list[int], first: int, count: int, per_slot: int, size: int
) -> list[torch.Tensor]:
    """Views of a sequence's pieces ``first`` to ``first + count``, of ``size`` elements each."""
    places = (divmod(first + at, per_slot) for at in range(count))
    return [states[slots[slot], size * within : size * (within + 1)] for slot, within in places]


def _matrix_pieces(
    states: torch.Tensor, slots: list[int], places: StatePlaces, key_width: int, num_values: int
) -> list[torch.Tensor]:
    count, size = num_values // places.columns, key_width * places.columns
    return _pieces(states, slots, places.first, count, places.per_slot, size)


def _conv_pieces(
    states: torch.Tensor, slots: list[int], places: StatePlaces, weights: GatedDeltaWeights
) -> list[torch.Tensor]:
    conv_width, channels = weights.conv.shape
    count, size = channels // places.channels, (conv_width - 1) * places.channels
    slots = slots[places.conv_slot :]
    return _pieces(states, slots, places.conv_first, count, places.conv_per_slot, size)


def _read(
    states: torch.Tensor,
    slots: list[int],
    places: StatePlaces,
    weights: GatedDeltaWeights,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's matrices [Hv, Dk, Dv] and last inputs [conv_width - 1, channels], float64."""
    key_width, value_width = weights.key_width, len(weights.norm)
    pieces = _matrix_pieces(states, slots, places, key_width, num_heads * value_width)
    matrices = torch.stack(pieces).double().view(num_heads, -1, key_width, places.columns)
    inputs = torch.stack(_conv_pieces(states, slots, places, weights)).double()
    inputs = inputs.view(len(inputs), -1, places.channels).transpose(0, 1).flatten(1)
    return matrices.transpose(1, 2).flatten(2).contiguous(), inputs


def _write(
    states: torch.Tensor,
    slots: list[int],
    places: StatePlaces,
    matrices: torch.Tensor,
    inputs: torch.Tensor,
) -> None:
    num_heads, key_width, value_width = matrices.shape
    columns = matrices.view(num_heads, key_width, -1, places.columns).transpose(1, 2).flatten(0, 1)
    for to, piece in zip(
        _matrix_pieces(states, slots, places, key_width, num_heads * value_width),
        columns,
        strict=True,
    ):
        to.copy_(piece.flatten())
    channels = inputs.reshape(len(inputs), -1, places.channels).transpose(0, 1)
    slots, size = slots[places.conv_slot :], channels[0].numel()
    for to, piece in zip(
        _pieces(states, slots, places.conv_first, len(channels), places.conv_per_slot, size),
        channels,
        strict=True,
    ):
        to.copy_(piece.flatten())
