"""Constrains the answers of rows that must call a tool, with a grammar of calls."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.errors import RowError
from batchinfer.requests.requests import RowSampling
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.structured.grammar_source import GrammarError
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.row_tools import RowTools
from batchinfer.text.tools.tool_format import ToolFormat

_KEPT = 1024
"""Maximum number of cached grammars, and of cached parameters. Rows often repeat grammars and
parameters."""


class ToolChoices:
    """Makes the sampling parameters of rows with tools, for one model."""

    def __init__(
        self, tool_format: ToolFormat, tokenizer: Tokenizer, grammars: GrammarCompiler
    ) -> None:
        self._format = tool_format
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._known: dict[str, str] = {}
        """Grammars, keyed by ``RowTools.key``."""
        self._made: dict[tuple[int, str], tuple[RowSampling, RowSampling]] = {}
        """Pairs (parameters, result), keyed by the id() of the parameters and the grammar. Keeping
        the parameters alive keeps their id() unique."""

    def applied(
        self, sampling: RowSampling | RowError | None, tools: RowTools | None
    ) -> RowSampling | RowError | None:
        """Return a row's parameters, with a grammar of calls if it must call a tool.

        Error codes: ``invalid_structured_output``, ``bad_sampling_params``.
        """
        if tools is None or tools.choice == "auto" or not isinstance(sampling, RowSampling):
            return sampling
        if sampling.params.structured_outputs is not None:
            problem = (
                "structured_outputs cannot be combined with a tool_choice that requires a call"
            )
            return RowError("bad_sampling_params", problem)
        if self._format.spans_thinking and sampling.params.max_reasoning_tokens is not None:
            problem = (
                "max_reasoning_tokens cannot be combined with a tool_choice that "
                "requires a call in this model's tool-call format"
            )
            return RowError("bad_sampling_params", problem)
        try:
            return self._with_grammar(sampling, self._grammar(tools))
        except GrammarError as error:
            return RowError("invalid_structured_output", f"tools: {error}")
        except ValueError as error:
            return RowError("bad_sampling_params", str(error))

    def _with_grammar(self, sampling: RowSampling, grammar: str) -> RowSampling:
        known = self._made.get((id(sampling), grammar))
        if known is None:
            params = replace(sampling.params, structured_outputs={"grammar": grammar})
            if len(self._made) >= _KEPT:
                self._made.clear()
            spans_thinking = self._format.spans_thinking
            known = sampling, replace(sampling, params=params, spans_thinking=spans_thinking)
            self._made[id(sampling), grammar] = known
        return known[1]

    def _grammar(self, tools: RowTools) -> str:
        known = self._known.get(tools.key)
        if known is None:
            known = tools.grammar(self._format, self._tokenizer)
            assert known is not None, "tool_choice requires a call"
            self._grammars.compile({"grammar": known})
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[tools.key] = known
        return known
