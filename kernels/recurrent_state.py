"""Describes recurrent states in pool slots to kernels, and reads and writes states in torch for the
reference kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from batchinfer.kernels.chunk_scan import ScanWork


@dataclass(frozen=True)
class StatePlaces:
    """The place of one layer's state within the slots of a sequence's state.

    A head's matrix [key width, value width] is cut by columns into pieces [key width, columns]. The
    last inputs of the convolution are cut by channels into pieces [conv_width - 1, channels]. Piece
    i is in slot ``i // per_slot`` of the sequence's state, after ``i % per_slot`` other pieces.
    """

    columns: int
    per_slot: int
    first: int
    """Index of the first piece of the layer's matrices."""
    channels: int
    conv_per_slot: int
    conv_first: int
    """Index of the first piece of the layer's convolution, counted from the beginning of
    ``conv_slot``."""
    conv_slot: int
    """Index, among a state's slots, of the first slot with pieces of convolutions."""


@dataclass(frozen=True)
class PagedStates:
    """States of one layer for the packed sequences of a step, which have T tokens in total.

    The state of a sequence whose context has only the step's tokens starts from zeros.
    """

    slots: torch.Tensor
    """[num_slots, elements of a slot] float32: the pool."""
    places: StatePlaces
    tables: torch.Tensor
    """[S, slots of a state] int32, contiguous: slots of each sequence's state."""
    query_starts: torch.Tensor
    """[S + 1] int32: first packed token of each sequence, then T."""
    context_lens: torch.Tensor
    """[S] int32: number of tokens of each sequence, including the step's tokens."""
    scan_work: ScanWork | None = None
    """Sequences to compute in chunks on a CUDA device; None: compute token by token."""

    def sequences(self) -> list[tuple[list[int], slice, bool]]:
        """Return each sequence's slots, its packed tokens, and True if its state starts from
        zeros."""
        starts, lens = self.query_starts.tolist(), self.context_lens.tolist()
        return [
            (table, slice(starts[at], starts[at + 1]), lens[at] == starts[at + 1] - starts[at])
            for at, table in enumerate(self.tables.tolist())
        ]

    def matrices(self, table: list[int], shape: tuple[int, int, int], zeros: bool) -> torch.Tensor:
        """Return a sequence's matrices in float64. ``shape`` is (heads, key width, value width)."""
        if zeros:
            return torch.zeros(shape, dtype=torch.float64)
        pieces = torch.stack(self._matrix_pieces(table, shape)).double()
        pieces = pieces.view(shape[0], -1, shape[1], self.places.columns)
        return pieces.transpose(1, 2).flatten(2).contiguous()

    def write_matrices(self, table: list[int], matrices: torch.Tensor) -> None:
        """Store a sequence's matrices [heads, key width, value width]."""
        heads, key_width, value_width = matrices.shape
        columns = matrices.view(heads, key_width, -1, self.places.columns)
        new = columns.transpose(1, 2).flatten(0, 1)
        for piece, values in zip(
            self._matrix_pieces(table, (heads, key_width, value_width)), new, strict=True
        ):
            piece.copy_(values.flatten())

    def convolve(
        self,
        table: list[int],
        inputs: torch.Tensor,  # [tokens of the sequence, channels]
        weight: torch.Tensor,  # [conv_width, channels]
        bias: torch.Tensor | None,  # [channels]
        zeros: bool,
    ) -> torch.Tensor:
        """Convolve a sequence's tokens, preceded by the inputs in its state, and store the last
        inputs. Return [tokens, channels] float64."""
        conv_width, num_channels = weight.shape
        pieces = self._conv_pieces(table, conv_width, num_channels)
        past = torch.stack(pieces).double().view(len(pieces), -1, self.places.channels)
        past = past.transpose(0, 1).flatten(1)
        with_past = torch.cat([torch.zeros_like(past) if zeros else past, inputs.double()])
        channels = with_past[len(with_past) - len(past) :]
        channels = channels.reshape(len(past), -1, self.places.channels).transpose(0, 1)
        for piece, values in zip(pieces, channels, strict=True):
            piece.copy_(values.flatten())
        return functional.conv1d(
            with_past.T[None],
            weight.double().T[:, None],
            None if bias is None else bias.double(),
            groups=num_channels,
        )[0].T

    def _matrix_pieces(self, table: list[int], shape: tuple[int, int, int]) -> list[torch.Tensor]:
        heads, key_width, value_width = shape
        places = self.places
        count, size = heads * value_width // places.columns, key_width * places.columns
        return self._pieces(table, places.first, count, places.per_slot, size)

    def _conv_pieces(
        self, table: list[int], conv_width: int, num_channels: int
    ) -> list[torch.Tensor]:
        places = self.places
        count, size = num_channels // places.channels, (conv_width - 1) * places.channels
        slots = table[places.conv_slot :]
        return self._pieces(slots, places.conv_first, count, places.conv_per_slot, size)

    def _pieces(
        self, table: list[int], first: int, count: int, per_slot: int, size: int
    ) -> list[torch.Tensor]:
        """Return views of the pieces [first, first + count), which have ``size`` elements each."""
        at = (divmod(first + number, per_slot) for number in range(count))
        return [self.slots[table[slot], size * n : size * (n + 1)] for slot, n in at]
