"""Which samples are worth keeping, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from batchinfer.config.sampling import MAX_SAMPLES, SamplingParams
from batchinfer.config.search import has_match
from batchinfer.config.structured import schema_text
from batchinfer.config.values import shown
from batchinfer.typed import take_types


@dataclass(frozen=True)
class AcceptConfig:
    """Draw samples of a row until enough of them pass, or as many as may be were tried.

    Samples are judged in the order of their indices, and the first that pass are kept: which these
    are depends on nothing that ran beside them.

    Raises:
        TypeError: naming the field, when a value is of another type.
        ValueError: naming the field, when a value is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    regex: str | None = None
    """RE2's, without look-around and back-references: the text must have a match in it; ^ and $
    tie it to the ends."""
    schema: Mapping[str, Any] | str | None = None
    """A JSON schema, or its JSON text: the text must be JSON that it allows."""
    min_tokens: int = 0
    """The sample must have so many tokens, the one that ends it included."""
    k: int | None = None
    """How many to keep; null: the row's sampling.n. A row's own n wins."""
    max_tries: int = 16
    """Most samples drawn of a row."""
    dedup: bool = False
    """Keep one of several samples of a row with the same text, the first."""

    def __post_init__(self) -> None:
        if isinstance(self.schema, Mapping):
            object.__setattr__(self, "schema", schema_text("schema", self.schema))
        take_types(self)
        if isinstance(self.schema, str):
            object.__setattr__(self, "schema", schema_text("schema", self.schema))
        if self.regex is not None:
            try:
                has_match(self.regex, "")
            except ValueError as error:
                raise ValueError(f"regex is wrong: {error}") from None
        self._require("min_tokens", 0 <= self.min_tokens < 2**31, "0 to 2**31 - 1")
        most = f"1 to {MAX_SAMPLES}"
        self._require("k", self.k is None or 1 <= self.k <= MAX_SAMPLES, most)
        self._require("max_tries", 1 <= self.max_tries <= MAX_SAMPLES, most)
        if self.k is not None and self.k > self.max_tries:
            raise ValueError(f"k is {self.k}, more than max_tries, which is {self.max_tries}")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {shown(getattr(self, name))}; it must be {what}")

    def check(self, params: SamplingParams) -> None:
        """Check that a row's own parameters go with this.

        Raises:
            ValueError: naming the parameter.
        """
        if params.beam_width is not None:
            raise ValueError("beam_width does not go with accept")
        if params.n > self.max_tries:
            raise ValueError(f"n is {params.n}, more than accept.max_tries, {self.max_tries}")

    def wanted(self, n: int) -> int:
        """How many samples of a row to keep that asks for ``n``."""
        return n if n > 1 or self.k is None else self.k
