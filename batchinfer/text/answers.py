"""What a sample says: its answer, its thinking, the tools that it calls."""

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
    """A sample's text, taken apart."""

    text: str
    reasoning: str | None = None
    """None where the model did not think, or nobody asks."""
    num_reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of the row's tools; ``text`` is what is said beside them."""


class AnswerReader:
    """Reads what samples say.

    Args:
        reasoning: how the model marks its thinking; None: it is part of the answer.
        tool_format: how it writes calls of tools; None: they are part of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None = None,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_format = tool_format
        self._reasoning = reasoning

    def read(
        self,
        prompt_token_ids: TokenIds,
        sample: FinishedSample,
        params: SamplingParams,
        tools: Tools | None = None,
    ) -> Answer:
        """A sample of a prompt, taken apart.

        Args:
            tools: what it may have called; None: nothing.
        """
        answer = self._without_calls(prompt_token_ids, sample, params)
        if tools is None or self.tool_format is None:
            return answer
        whole = SampleText(self.tokenizer, sample, params, keeps_special=True)
        written = whole.text
        if self._reasoning is not None:
            written = self._reasoning.without_reasoning(prompt_token_ids, whole)
        found = calls_in(written, self.tool_format, tools)
        if found is None:
            return answer
        content = found.content
        if params.skip_special_tokens:
            content = self.tokenizer.control.pattern.sub("", content).strip()
        return replace(answer, text=content, tool_calls=found.calls)

    def _without_calls(
        self, prompt_token_ids: TokenIds, sample: FinishedSample, params: SamplingParams
    ) -> Answer:
        if self._reasoning is None:
            return Answer(output_text(self.tokenizer, sample, params))
        text = SampleText(self.tokenizer, sample, params)
        split = self._reasoning.split(prompt_token_ids, text)
        return Answer(split.text, split.reasoning, split.num_reasoning_tokens)
