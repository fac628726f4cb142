"""Hidden states made into embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.config import EmbedConfig
from batchinfer.pooling.embedding_modules import EmbeddingModules


def embedding(
    hidden_state: npt.NDArray[np.float32], modules: EmbeddingModules, config: EmbedConfig
) -> npt.NDArray[Any]:
    """A hidden state [H] through the model's modules, cut, then normalised: [dimensions]."""
    values = hidden_state
    for dense in modules.dense:
        values = dense(values)
    values = values[: config.dimensions]
    if config.normalize:
        length = float(np.linalg.norm(values.astype(np.float64)))
        values = values / np.float32(max(length, 1e-12))  # as torch.nn.functional.normalize
    return values.astype(config.dtype)
