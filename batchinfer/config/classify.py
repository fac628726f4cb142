"""Settings of classification, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchinfer.config.types import Record, coerce_fields


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
