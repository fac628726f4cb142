"""A recurrent layer with random inputs and states in a shuffled pool, for tests of its kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.kv.state_layout import min_slot_bytes, state_layout
from batchinfer.kernels.recurrent_state import PagedStates
from batchinfer.worker.recurrent.paged_states import places_of

if TYPE_CHECKING:
    from batchinfer.kernels.chunk_scan import ScanWork

Cuts = list[list[int]]
"""For each sequence: 0, then the end of each of its steps."""


def at_once(lengths: list[int]) -> Cuts:
    """Return cuts with which each sequence is computed in one step."""
    return [[0, length] for length in lengths]


class RecurrentLayer:
    """The second of three recurrent layers, and its inputs for some sequences.

    Args:
        text: text config of a model whose layers are all recurrent.
        lengths: number of tokens of each sequence.
        slot_bytes: minimum size of a slot in bytes.
    """

    def __init__(
        self,
        text: dict[str, Any],
        lengths: list[int],
        *,
        slot_bytes: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        slot_bytes = max(slot_bytes, min_slot_bytes(text))
        layout = state_layout(text, slot_bytes)
        assert layout is not None
        self.layout, self.shape = layout, layout.shape
        self.lengths, self.dtype = lengths, dtype
        self.random = torch.Generator().manual_seed(seed)
        num_slots = layout.num_slots * len(lengths)
        self.slots = torch.full((num_slots, slot_bytes // 4), torch.nan)
        order = torch.randperm(num_slots, generator=self.random).int()
        self.tables = order.view(len(lengths), layout.num_slots)
        self.inputs: list[torch.Tensor] = []
        self.weights: Any = None
        self.output_width = self.shape.num_values
        self.in_chunks = False
        """Whether sequences that compute several tokens are scanned in chunks."""

    def draw(self, *shape: int) -> torch.Tensor:
        """Return random numbers in the model's dtype."""
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def draw_inputs(self, *widths: int) -> None:
        """Draw the inputs of all tokens, [T, width] each."""
        self.inputs = [self.draw(sum(self.lengths), width) for width in widths]

    def run(self, kernel: Any, cuts: Cuts | None = None, device: str = "cpu") -> torch.Tensor:
        """Return the outputs [T, width], with each sequence computed in steps that end at its
        ``cuts``."""
        cuts = cuts or at_once(self.lengths)
        starts = [sum(self.lengths[:at]) for at in range(len(self.lengths))]
        out = torch.empty(sum(self.lengths), self.output_width, dtype=self.dtype)
        slots = self.slots.to(device, copy=True)
        weights = _on(self.weights, device)
        for step in range(max(map(len, cuts)) - 1):
            spans = {
                at: (ends[step], ends[step + 1])
                for at, ends in enumerate(cuts)
                if step + 1 < len(ends)
            }
            rows = torch.cat(
                [torch.arange(starts[at] + a, starts[at] + b) for at, (a, b) in spans.items()]
            )
            counts = torch.tensor([0, *(b - a for a, b in spans.values())])
            query_starts = counts.cumsum(0).int().to(device)
            states = PagedStates(
                slots=slots,
                places=places_of(self.layout, 1),
                tables=self.tables[list(spans)].contiguous().to(device),
                query_starts=query_starts,
                context_lens=torch.tensor([b for _, b in spans.values()]).int().to(device),
                scan_work=self._scan_work(query_starts),
            )
            step_out = torch.empty(len(rows), self.output_width, dtype=self.dtype, device=device)
            inputs = (part[rows].to(device) for part in self.inputs)
            kernel(*inputs, weights=weights, states=states, out=step_out)
            out[rows] = step_out.cpu()
        return out

    def _scan_work(self, query_starts: torch.Tensor) -> ScanWork | None:
        if not self.in_chunks:
            return None
        from batchinfer.kernels.chunk_scan import plan_scan

        num_sequences = len(query_starts) - 1
        return plan_scan(query_starts, num_tokens=int(query_starts[-1]), max_chunks=num_sequences)

    def assert_equal(
        self, kernel: Any, reference: Any, device: str = "cpu", cuts: Cuts | None = None
    ) -> None:
        """Compare a kernel, in steps that end at ``cuts``, with its reference."""
        expected, actual = self.run(reference).float(), self.run(kernel, cuts, device).float()
        tolerance = 1e-4 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    def assert_same_bits(self, kernel: Any, cuts: Cuts, device: str = "cpu") -> None:
        """Check that cutting sequences into steps, and running each alone, changes no bits."""
        whole = self.run(kernel, device=device)
        assert torch.equal(self.run(kernel, cuts, device), whole)
        inputs, lengths, tables = self.inputs, self.lengths, self.tables
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for at, (start, stop) in enumerate(pairwise(starts)):
            self.inputs = [part[start:stop] for part in inputs]
            self.lengths, self.tables = [lengths[at]], tables[at : at + 1]
            assert torch.equal(self.run(kernel, device=device), whole[start:stop])


def _on(weights: Any, device: str) -> Any:
    """Return a copy of the weights with all tensors on a device."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return replace(
        weights, **{name: x.to(device) for name, x in values.items() if torch.is_tensor(x)}
    )
