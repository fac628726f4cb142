"""What every format of quantized checkpoints does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from batchinfer.worker.model.quantized.stored import Quantized, Stored


class Format(Protocol):
    """A way to save weights quantized. Which weights are is told by the tensors in the files, so
    that lists of modules left out need not be read."""

    @property
    def name(self) -> str:
        """For people and records, such as ``awq``."""
        ...

    @property
    def ends(self) -> Mapping[str, str]:
        """Ends of the names of tensors that stand for a weight or say something of it, and what
        stands there in the weight's own name."""
        ...

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        """The weight that some tensors stand for; None: there is none, they are not needed.

        Args:
            name: the weight's.
            parts: by the end of their names, one of ``ends``, or "" for the tensor of that name.

        Raises:
            ModelError: a tensor is missing, or of another shape or dtype than the others and
                config.json say.
        """
        ...
