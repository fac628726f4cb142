"""Parameters of calls for vectors, labels and scores, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.config.types import coerce_fields
from batchinfer.llm.prompts import kind_of, listed

_ACTIVATES = ("use_activation", "normalize", "activation", "softmax")
"""The names of one setting."""


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What a call makes of hidden states; vLLM's names, earlier ones too.

    Raises:
        TypeError: naming the parameter, when it is of another type.
        ValueError: naming the parameter, when it is out of range or two say the opposite.
    """

    truncate_prompt_tokens: int | None = None
    """Cut a prompt to so many tokens, off its end, as vLLM cuts what is pooled; what the tokenizer
    puts around a text stays, and of a pair the longer text is cut. -1: as many as there is room
    for."""
    dimensions: int | None = None
    """Keep so many of an embedding's first numbers (Matryoshka)."""
    use_activation: bool | None = None
    """False: embeddings keep their length, labels and scores are logits."""
    normalize: bool | None = None
    """The same, by its earlier name for embeddings."""
    activation: bool | None = None
    """The same, by its earlier name for labels and scores."""
    softmax: bool | None = None
    """The same, by its first name."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for name in ("truncate_prompt_tokens", "dimensions"):
            value = getattr(self, name)
            if value is not None and value < 1 and (name, value) != ("truncate_prompt_tokens", -1):
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        asked = {name: getattr(self, name) for name in _ACTIVATES}
        given = {name: value for name, value in asked.items() if value is not None}
        if len(set(given.values())) > 1:
            one, other = (next(name for name in given if given[name] is v) for v in (True, False))
            raise ValueError(f"{one} is True and {other} is False, which mean the same; give one")

    @property
    def activates(self) -> bool:
        """Whether embeddings are normalised, and logits made into scores."""
        asked = (getattr(self, name) for name in _ACTIVATES)
        return next((value for value in asked if value is not None), True)


def params_of_each(
    params: PoolingParams | Sequence[PoolingParams] | None, count: int
) -> list[PoolingParams]:
    """The parameters of each of ``count`` prompts; None: the default ones.

    Raises:
        TypeError: they are something else.
        ValueError: they are not as many.
    """
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    given = listed(params, "pooling_params", "PoolingParams(...), or a list of one for each prompt")
    if len(given) != count:
        raise ValueError(f"{count} prompts, but {len(given)} pooling params")
    for at, one in enumerate(given):
        if not isinstance(one, PoolingParams):
            raise TypeError(f"pooling_params {at} is {kind_of(one)}; give PoolingParams(...)")
    return given


def params_of_all(params: object) -> PoolingParams:
    """The parameters of a call that takes one set for all; None: the default ones.

    Raises:
        TypeError: they are something else.
    """
    if params is None or isinstance(params, PoolingParams):
        return params or PoolingParams()
    raise TypeError(
        f"pooling_params is {kind_of(params)}; give one PoolingParams(...) for all pairs"
    )
