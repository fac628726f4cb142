"""What a job does with its rows (``task`` in the job file); ``tasks.TASKS`` has all there is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.config import PromptConfig, Runner
from batchinfer.engine.request import Completion, Request
from batchinfer.job.input.dataset import Source
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.tasks import TaskSpec
from batchinfer.requests.requests import PromptRow
from batchinfer.text.grammar import GrammarCompiler
from batchinfer.text.processes.worker import BuilderFactory

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext


@dataclass(frozen=True)
class Task:
    """A task, whatever the job and its model."""

    spec: TaskSpec
    result_types: Callable[[JobSpec], Mapping[str, pa.DataType]]
    """Types of the output columns that not every task has."""
    prompt_builder: Callable[[JobSpec], BuilderFactory]
    """What makes a job's prompts: called as ``PromptBuilder`` is."""
    load: Callable[[JobSpec, EngineContext, GrammarCompiler], LoadedTask]
    """The task of a job on its model; the compiler has been asked for the grammars of all rows."""
    summarise: Callable[[Mapping[str, Any]], tuple[str | None, str]]
    """The result of an output row and facts about it, for a report; given its ``num_prompt_tokens``
    and the columns ``summarised``."""
    summarised: Sequence[str]
    """Columns of its own, nested ones by their Parquet paths."""
    failed_results: Mapping[str, Any]
    """Values of the columns that not every task has, in a row that the engine does not run."""
    check_columns: Callable[[JobSpec, Source], None] = lambda job, source: None
    """Raises DataError where an input column that it reads beside the prompt's cannot be used."""
    prompt_config: Callable[[JobSpec], PromptConfig] = lambda job: job.prompt
    """Where a job's prompts come from, with what its own section says of that."""
    runner: Callable[[JobSpec], Runner] = lambda job: job.task_spec.runner
    """What its model is run for."""


class LoadedTask(ABC):
    """A row's way to the engine and back."""

    result_bytes: int = 0
    """Bytes of a row's numbers that do not compress: vectors and scores."""

    @abstractmethod
    def requests(self, row: PromptRow) -> Sequence[Request]:
        """The requests of a row that can run, at least one; ``Request.number`` counts them."""

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> Sequence[Request]:
        """The requests that follow from what came of a row's requests so far; most often none."""
        return ()

    @abstractmethod
    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        """The output of a row that ran; its requests' completions are in their order."""
