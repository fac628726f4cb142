"""What a job does with a row: the engine's requests of it, and its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from batchinfer.engine.request import Completion, Request
from batchinfer.job.rows.accept import AcceptedGeneration
from batchinfer.job.rows.generate import FinishedRow, RequestMaker, RowFinisher
from batchinfer.job.rows.prompt_row import PromptRow
from batchinfer.job.rows.score import Scoring
from batchinfer.job.spec.spec import JobSpec
from batchinfer.text.grammar import GrammarCompiler
from batchinfer.text.prompts import Prompt

if TYPE_CHECKING:
    from batchinfer.build import EngineContext


class Task(Protocol):
    """A row's way to the engine and back."""

    def requests(self, row: PromptRow) -> Sequence[Request]:
        """The requests of a row that can run, at least one; ``Request.part`` counts them."""
        ...

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> Sequence[Request]:
        """The requests that follow from what came of a row's requests so far; most often none."""
        ...

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        """The finished row.

        Args:
            row: it.
            completions: of its requests, in their order; none for a row that could not run.
        """
        ...


class Generation:
    """``task: generate``: one request a row.

    Args:
        requests: makes them.
        finisher: makes columns of what comes of them.
    """

    def __init__(self, requests: RequestMaker, finisher: RowFinisher) -> None:
        self._requests = requests
        self._finisher = finisher

    def requests(self, row: PromptRow) -> list[Request]:
        """See ``Task``."""
        assert isinstance(row.prompt, Prompt)
        assert row.sampling is not None
        facts = row.row_id, row.prompt, row.sampling, row.reused_prefix_len, row.adapter
        return [self._requests.make(*facts)]

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> list[Request]:
        """None."""
        return []

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        """See ``Task``."""
        return self._finisher.finish(row, completions[0] if completions else None)


def make_task(spec: JobSpec, built: EngineContext, grammars: GrammarCompiler) -> Task:
    """The task of a job on its model; ``grammars`` has been asked for those of its rows."""
    if spec.task == "score":
        return Scoring(built.tokenizer, spec.output.include)
    requests = RequestMaker(built.tokenizer, built.eos_token_ids, grammars)
    finisher = RowFinisher(built.tokenizer, spec.output.written)
    if spec.accept is not None:
        return AcceptedGeneration(spec.accept, requests, finisher, built.tokenizer)
    return Generation(requests, finisher)
