"""Hidden states made into embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.config import EmbedConfig
from batchinfer.pooling.embedding_modules import EmbeddingModules
from batchinfer.pooling.tensors import Float32


@dataclass(frozen=True, slots=True)
class Embedder:
    """What makes embeddings of a model's hidden states."""

    modules: EmbeddingModules
    config: EmbedConfig

    @property
    def pooling(self) -> tuple[str, ...]:
        """How the hidden state is made of a prompt's."""
        asked = self.config.pooling
        return self.modules.pooling if asked == "auto" else (asked,)

    @property
    def reads_whole_texts(self) -> bool:
        """Whether a text is computed at once: its last token's state alone needs no others."""
        return self.modules.attends_both_ways or self.pooling != ("lasttoken",)

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        return self.config.dimensions or self.modules.width

    def __call__(self, hidden_state: Float32) -> npt.NDArray[Any]:
        """A hidden state [H] through the model's modules, cut, then normalised: [dimensions]."""
        values = hidden_state
        for dense in self.modules.dense:
            values = dense(values)
        values = values[: self.config.dimensions]
        if self.config.normalize:
            length = float(np.linalg.norm(values.astype(np.float64)))
            values = values / np.float32(max(length, 1e-12))  # as torch.nn.functional.normalize
        return values.astype(self.config.dtype)
