"""Settings of tasks that draw no samples: scoring, embedding, classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchinfer.config.sampling import SamplingParams
from batchinfer.config.types import Record, coerce_fields

SCORING = SamplingParams(
    max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0, prompt_logprobs=0
)
"""Sampling of a score job's requests: nothing is drawn, every token asked for is judged."""
EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
"""Sampling of an embed job's requests: the one token that is drawn means nothing."""


@dataclass(frozen=True)
class ScoreConfig(Record):
    """What ``task: score`` scores."""

    completions_column: str | None = None
    """A column of completions of the prompt: string, list<string>, or list<list<int>> of token ids.
    null: the prompt's own text is scored."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.completions_column == "":
            raise ValueError("completions_column is empty; name a column, or leave it out")


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


@dataclass(frozen=True)
class ClassifyConfig(Record):
    """What ``task: classify`` classifies, and by what."""

    query_column: str | None = None
    """A column of queries, for a reranker: each is scored with the document of its row. null: the
    prompt is classified."""
    document_column: str | None = None
    """The column of documents that belongs to query_column."""
    instruction: str | None = None
    """What a document must do for its query, told to a Qwen3-Reranker; null: what it was trained
    with, about passages that answer a web search query."""
    tokens: tuple[str, ...] | None = None
    """Take these tokens for labels, by their logits after the prompt, like [no, yes]; with a query
    and a document, two of them, and the score is the probability of the second. null: by the
    model's own head, or as a Qwen3-Reranker's folder says."""
    activation: Literal["auto", "softmax", "sigmoid", "none"] = "auto"
    """Logits to scores. auto: as the model's config says (problem_type, or sentence-transformers'
    activation), else sigmoid for one label and softmax for several. none: the logits."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if (self.query_column is None) != (self.document_column is None):
            given, other = "query_column", "document_column"
            if self.query_column is None:
                given, other = other, given
            raise ValueError(f"{given} needs {other}; name both, or neither")
        for name in ("query_column", "document_column"):
            self._require(name, getattr(self, name) != "", "the name of a column")
        if self.instruction is not None and not self.has_pairs:
            raise ValueError("instruction needs query_column and document_column")
        if self.tokens is not None:
            fits = len(self.tokens) == 2 if self.has_pairs else len(self.tokens) >= 2
            self._require("tokens", fits, "two tokens" if self.has_pairs else "two or more tokens")
            self._require("tokens", len(set(self.tokens)) == len(self.tokens), "different tokens")

    @property
    def has_pairs(self) -> bool:
        """Whether a query and a document are scored, not a prompt."""
        return self.query_column is not None
