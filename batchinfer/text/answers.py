"""Splits a sample into its answer, its reasoning, and its tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.config import SamplingParams
from batchinfer.protocols import FinishedSample
from batchinfer.text.detokenize import output_text
from batchinfer.text.reasoning.reasoning_format import ReasoningFormat, SampleText
from batchinfer.text.tokenizer import TokenIds, Tokenizer
from batchinfer.text.tools.tool_format import ToolCall, ToolFormat, Tools, calls_in


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    reasoning: str | None = None
    """The model's reasoning; None if the model did not reason, or ``text`` holds the reasoning."""
    num_reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls to the row's tools; ``text`` does not contain them."""


@dataclass(frozen=True)
class AnswerReader:
    """Separates the parts of samples.

    Args:
        reasoning: format of the model's reasoning; None if reasoning stays in the answer.
        tool_format: format of the model's tool calls; None if calls stay in the answer.
    """

    tokenizer: Tokenizer
    reasoning: ReasoningFormat | None = None
    tool_format: ToolFormat | None = None

    def read(
        self,
        prompt_token_ids: TokenIds,
        sample: FinishedSample,
        params: SamplingParams,
        tools: Tools | None = None,
    ) -> Answer:
        """Return the parts of a sample; ``tools`` are the tools that the sample may call."""
        answer = self._without_calls(prompt_token_ids, sample, params)
        if tools is None or self.tool_format is None:
            return answer
        whole = SampleText(self.tokenizer, sample, params, keeps_special=True)
        written = whole.text
        if self.reasoning is not None:
            written = self.reasoning.without_reasoning(prompt_token_ids, whole)
        parsed = calls_in(written, self.tool_format, tools)
        if parsed is None:
            return answer
        content = parsed.content
        if params.skip_special_tokens:
            content = self.tokenizer.control.pattern.sub("", content).strip()
        return replace(answer, text=content, tool_calls=parsed.calls)

    def _without_calls(
        self, prompt_token_ids: TokenIds, sample: FinishedSample, params: SamplingParams
    ) -> Answer:
        if self.reasoning is None:
            return Answer(output_text(self.tokenizer, sample, params))
        text = SampleText(self.tokenizer, sample, params)
        split = self.reasoning.split(prompt_token_ids, text)
        return Answer(split.text, split.reasoning, split.num_reasoning_tokens)
