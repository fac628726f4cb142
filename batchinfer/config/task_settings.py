"""Settings of tasks that draw no samples: scoring, embedding, classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchinfer.config.sampling import SamplingParams
from batchinfer.config.settings_base import Record, coerce_fields

SCORING = SamplingParams(
    max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0, prompt_logprobs=0
)
"""Sampling parameters of a score job, whose requests score tokens and draw none."""
EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
"""Sampling parameters of an embed or classify job; the drawn token is not used."""


@dataclass(frozen=True)
class ScoreConfig(Record):
    """Input of ``task: score``."""

    completions_column: str | None = None
    """A column of completions of the prompt: string, list<string>, or list<list<int>> of token ids.
    null: score the prompt itself."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.completions_column == "":
            raise ValueError("completions_column is empty; name a column, or leave it out")


Pooling = Literal["auto", "lasttoken", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"]


@dataclass(frozen=True)
class EmbedConfig(Record):
    """How ``task: embed`` makes an embedding from the hidden states of a prompt."""

    pooling: Pooling = "auto"
    """Pooling method, with sentence-transformers' names. auto: the method in the model's
    1_Pooling/config.json, or else mean for a bidirectional model and lasttoken for a causal one.
    cls: the hidden state of the first token. Rows share prefixes only with lasttoken."""
    prompt_name: str | None = None
    """Name of a prompt in the model's config_sentence_transformers.json. Each text then starts with
    this prompt. null: the file's default prompt, unless prompt.template is set. "": no prompt."""
    normalize: bool | None = None
    """Scale every embedding to length 1. null: only if the model's modules.json lists a Normalize
    module, or if the model has no modules.json."""
    dimensions: int | None = None
    """Keep only this many leading numbers of every embedding, before normalizing (Matryoshka).
    null: keep as many as truncate_dim in the model's config_sentence_transformers.json, or all."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers in the output."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.dimensions is not None:
            self._require("dimensions", self.dimensions >= 1, "1 or more")


@dataclass(frozen=True)
class ClassifyConfig(Record):
    """Input and labels of ``task: classify``."""

    query_column: str | None = None
    """A column of queries. A reranker scores each query with the document of its row. null:
    classify the prompt."""
    document_column: str | None = None
    """The column of documents for query_column."""
    instruction: str | None = None
    """Instruction that tells a Qwen3-Reranker when a document matches a query. null: the
    instruction in the model card, which asks for passages that answer a web search query."""
    tokens: tuple[str, ...] | None = None
    """Tokens to use as labels, like [no, yes]. Scores come from their logits after the prompt. For
    a query and a document, give two tokens; the score is the probability of the second token. null:
    use the model's own head, or the labels in a Qwen3-Reranker's folder."""
    activation: Literal["auto", "softmax", "sigmoid", "none"] = "auto"
    """Function that turns logits into scores. auto: as in the model's config (problem_type, or
    sentence-transformers' activation), or else sigmoid for one label and softmax for several. none:
    scores are the logits."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if (self.query_column is None) != (self.document_column is None):
            given, other = "query_column", "document_column"
            if self.query_column is None:
                given, other = other, given
            raise ValueError(f"{given} needs {other}; name both columns, or neither")
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
