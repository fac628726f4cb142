"""Results of calls for vectors, labels and scores, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from batchinfer.errors import RowError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A prompt's scores."""

    probs: list[float]
    """Of each label, by its id."""

    @property
    def num_classes(self) -> int:
        """Labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What ``encode`` gives of a prompt."""

    data: torch.Tensor
    """float32: the embedding [D], or the scores of the labels [L]."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and what was made of its hidden state; one that could not be run has an ``error``
    in its place."""

    request_id: str
    outputs: T | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: RowError | None = None

    @classmethod
    def of(cls, other: PoolingRequestOutput[T]) -> Self:
        """``other`` as one of this class."""
        return cls(**{entry.name: getattr(other, entry.name) for entry in fields(other)})


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What ``LLM.embed`` gives of a prompt."""


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What ``LLM.classify`` gives of a prompt."""


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What ``LLM.score`` gives of a pair of texts."""
