"""Outputs of a beam search, with vLLM's ``sequences`` beside the ``outputs`` of every call."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from batchinfer.config.beam_params import BeamSearchParams
from batchinfer.llm.logprobs import Logprob
from batchinfer.llm.lora import LoRARequest
from batchinfer.llm.outputs import CompletionOutput, RequestOutput
from batchinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A beam as vLLM returns it: with its prompt."""

    tokens: list[int]
    """The prompt's and the beam's, without the end-of-sequence token that ended it unless
    ``include_stop_str_in_output`` keeps it."""
    cum_logprob: float
    """Of all of the beam's tokens, that one among them."""
    text: str | None
    """Of ``tokens``; None without a tokenizer."""
    finish_reason: str | None
    stop_reason: int | str | None
    lora_request: LoRARequest | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Empty: log-probabilities of each token are not kept."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput(RequestOutput):
    """A prompt and its beams, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    """The same as ``outputs``, as vLLM returns them."""


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """The output of a search with ``sequences``."""
    values = {entry.name: getattr(output, entry.name) for entry in fields(RequestOutput)}
    sequences = [_sequence(output, beam, params, tokenizer) for beam in output.outputs]
    return BeamSearchOutput(**values, sequences=sequences)


def _sequence(
    output: RequestOutput,
    beam: CompletionOutput,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchSequence:
    assert beam.cumulative_logprob is not None
    ends = beam.finish_reason == "stop" and not params.include_stop_str_in_output
    tokens = output.prompt_token_ids + (beam.token_ids[:-1] if ends else beam.token_ids)
    text = (
        None
        if tokenizer is None
        else tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
    )
    return BeamSearchSequence(
        tokens=tokens,
        cum_logprob=beam.cumulative_logprob,
        text=text,
        finish_reason=beam.finish_reason,
        stop_reason=beam.token_ids[-1] if beam.finish_reason == "stop" else beam.stop_reason,
        lora_request=output.lora_request,
    )
