"""Settings of embeddings, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchinfer.config.sampling import SamplingParams
from batchinfer.config.types import Record, coerce_fields

EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
"""Sampling of an embed job's requests: the one token that is drawn means nothing."""


Pooling = Literal["auto", "lasttoken", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"]


@dataclass(frozen=True)
class EmbedConfig(Record):
    """What ``task: embed`` makes of a prompt's hidden states."""

    pooling: Pooling = "auto"
    """How hidden states make the embedding. auto: as the model folder's 1_Pooling/config.json says,
    else mean for a model that attends both ways and lasttoken for one that does not; with any other
    its texts are computed whole and share no prefixes. cls: that of the first token; the others as
    sentence-transformers has them."""
    prompt_name: str | None = None
    """Name of the prompt that is put before each text, by the model's
    config_sentence_transformers.json. null: the one that it names as its default, if it does and
    prompt.template is not given; "": none."""
    normalize: bool = True
    """Make every embedding of length 1."""
    dimensions: int | None = None
    """Keep so many of the first numbers, then normalise (Matryoshka); null: all."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers that are written."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.dimensions is not None:
            self._require("dimensions", self.dimensions >= 1, "1 or more")
