"""What is scored, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from batchinfer.config.sampling import SamplingParams
from batchinfer.typed import take_types

SCORING = SamplingParams(
    max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=0, prompt_logprobs=0
)
"""How the requests of a score job run: nothing is drawn, every token asked for is judged."""


@dataclass(frozen=True)
class ScoreConfig:
    """What ``task: score`` scores.

    Raises:
        TypeError: naming the field, when a value is of another type.
        ValueError: naming the field, when it is empty.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    completions_column: str | None = None
    """A column of completions of the prompt: string, list<string>, or list<list<int>> of token ids.
    null: the prompt's own text is scored."""

    def __post_init__(self) -> None:
        take_types(self)
        if self.completions_column == "":
            raise ValueError("completions_column is empty; name a column, or leave it out")
