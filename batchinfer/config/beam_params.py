"""vLLM's ``BeamSearchParams``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchinfer.config.call_params import SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``; names as vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Ignored."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in the ``tokens`` of vLLM's ``sequences``."""
    structured_outputs: Any = None
    """What the text must look like, as ``SamplingParams`` have it."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the ``text`` of vLLM's ``sequences``."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only None."""

    def sampling(self) -> SamplingParams:
        """Sampling parameters of a row that gets all of its beams.

        Raises:
            TypeError, ValueError: naming the field, when a value is not what it must be.
        """
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            structured_outputs=self.structured_outputs,
            allowed_token_ids=self.allowed_token_ids,
        )
