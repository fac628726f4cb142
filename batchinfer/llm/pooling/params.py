"""Parameters and results of calls for embeddings, labels and scores, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from batchinfer.config.settings_base import coerce_fields
from batchinfer.errors import RowError

if TYPE_CHECKING:
    import torch

_ACTIVATES = ("use_activation", "normalize", "activation", "softmax")
"""All names that vLLM has used for one setting."""


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of pooling. vLLM's earlier names are accepted too.

    Raises:
        TypeError: a parameter has the wrong type.
        ValueError: a parameter is out of range, or two parameters contradict each other.
    """

    truncate_prompt_tokens: int | None = None
    """Truncate longer prompts to this many tokens by dropping tokens at the end, as vLLM does for
    pooling; -1 means the model's limit. Special tokens around a text are kept. If the prompt is a
    pair of texts, the longer text is truncated."""
    dimensions: int | None = None
    """Keep only the first dimensions of an embedding (Matryoshka)."""
    use_activation: bool | None = None
    """False: embeddings are not normalized, and logits are returned instead of scores. None: scores
    are returned, and embeddings are normalized unless the model's folder says otherwise."""
    normalize: bool | None = None
    """The earlier name of ``use_activation`` for embeddings."""
    activation: bool | None = None
    """The earlier name of ``use_activation`` for labels and scores."""
    softmax: bool | None = None
    """vLLM's first name for ``use_activation``."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for name in ("truncate_prompt_tokens", "dimensions"):
            value = getattr(self, name)
            if value is not None and value < 1 and (name, value) != ("truncate_prompt_tokens", -1):
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        values = self._given()
        if len(set(values.values())) > 1:
            one, other = (next(name for name in values if values[name] is v) for v in (True, False))
            raise ValueError(
                f"{one} is True and {other} is False, but both mean the same; give only one"
            )

    @property
    def activates(self) -> bool | None:
        """True if embeddings are normalized and logits become scores; None for the default."""
        return next(iter(self._given().values()), None)

    def _given(self) -> dict[str, bool]:
        values = {name: getattr(self, name) for name in _ACTIVATES}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions of the embedding."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of a prompt."""

    probs: list[float]
    """Scores of the labels, in the order of their ids."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The similarity of two texts."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of ``encode`` for a prompt."""

    data: torch.Tensor
    """The embedding [D], or the scores of the labels [L], float32."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and its result, or the ``error`` of a prompt that could not be run."""

    request_id: str
    outputs: T | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: RowError | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its embedding."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and the scores of its labels."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and its score."""

    __slots__ = ()
