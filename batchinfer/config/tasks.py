"""Settings of tasks that draw no samples: scoring, embedding, classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchinfer.config.sampling import SamplingParams
from batchinfer.config.types import Record, coerce_fields

SCORING = SamplingParams(
    max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0, prompt_logprobs=0
)
"""Sampling parameters of a score job, whose requests score tokens and draw none."""
EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
"""Sampling parameters of an embed or classify job; the drawn token is not used."""


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
    """How hidden states become the embedding. auto: as in the model's 1_Pooling/config.json, else
    mean for a bidirectional model and lasttoken for a causal one. With any other than lasttoken,
    texts are computed whole and share no prefixes. cls: the first token's; the others are those of
    sentence-transformers."""
    prompt_name: str | None = None
    """Name of a prompt in the model's config_sentence_transformers.json, put before each text.
    null: the default prompt there, if any and unless prompt.template is given; "": none."""
    normalize: bool = True
    """Scale every embedding to length 1."""
    dimensions: int | None = None
    """Keep this many of the first numbers, then normalize (Matryoshka); null: all."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers in the output."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.dimensions is not None:
            self._require("dimensions", self.dimensions >= 1, "1 or more")


@dataclass(frozen=True)
class ClassifyConfig(Record):
    """What ``task: classify`` classifies, and how."""

    query_column: str | None = None
    """A column of queries for a reranker, each scored with its row's document. null: the prompt is
    classified."""
    document_column: str | None = None
    """The column of documents for query_column."""
    instruction: str | None = None
    """Instruction for a Qwen3-Reranker: what a document must do for its query. null: the one it was
    trained with, about passages that answer a web search query."""
    tokens: tuple[str, ...] | None = None
    """Use these tokens as labels, by their logits after the prompt, like [no, yes]; for a query and
    a document two tokens, and the score is the probability of the second. null: the model's own
    head, or the labels in a Qwen3-Reranker's folder."""
    activation: Literal["auto", "softmax", "sigmoid", "none"] = "auto"
    """How logits become scores. auto: as in the model's config (problem_type, or
    sentence-transformers' activation), else sigmoid for one label and softmax for several. none:
    the logits."""

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
        """True if rows are pairs of a query and a document instead of prompts."""
        return self.query_column is not None
