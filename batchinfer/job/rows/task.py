"""The interface of tasks, which process a job's rows. ``tasks.TASKS`` lists all tasks."""

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
from batchinfer.job.spec.task_keys import TaskSpec
from batchinfer.requests.requests import PromptRow
from batchinfer.text.processes.worker import BuilderFactory
from batchinfer.text.structured.compiled_grammar import GrammarCompiler

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext


@dataclass(frozen=True)
class Task:
    """A task, such as ``generate``; one object serves all jobs and models."""

    spec: TaskSpec
    result_types: Callable[[JobSpec], Mapping[str, pa.DataType]]
    """Types of the output columns that the task adds."""
    prompt_builder: Callable[[JobSpec], BuilderFactory]
    """Returns a factory of prompt builders, which takes the arguments of ``PromptBuilder``."""
    load: Callable[[JobSpec, EngineContext, GrammarCompiler], LoadedTask]
    """Loads the task for a job and its model. The compiler caches grammars for all rows."""
    summarize: Callable[[Mapping[str, Any]], tuple[str | None, str]]
    """Returns an output row's result and a line of facts about it, for a report. The argument holds
    ``num_prompt_tokens`` and the columns that ``summarized`` lists."""
    summarized: Sequence[str]
    """Columns that ``summarize`` needs; nested columns by their Parquet paths."""
    failed_results: Mapping[str, Any]
    """Values of the task's columns for a row that the engine does not run."""
    check_columns: Callable[[JobSpec, Source], None] = lambda job, source: None
    """Raises DataError if an input column that only this task reads cannot be used."""
    prompt_config: Callable[[JobSpec], PromptConfig] = lambda job: job.prompt
    """Returns the job's prompt section, with the changes that the task's own section requires."""
    with_defaults: Callable[[JobSpec], JobSpec] = lambda job: job
    """Returns the job with the defaults that the model's folder gives to the task's section."""
    runner: Callable[[JobSpec], Runner] = lambda job: job.task_spec.runner
    """Returns the mode in which the model runs."""


class LoadedTask(ABC):
    """Makes a row's requests, and turns their completions into the row's output."""

    result_bytes: int = 0
    """Size of a row's vectors and scores in the output, in bytes; they do not compress."""

    @abstractmethod
    def requests(self, row: PromptRow) -> Sequence[Request]:
        """Return one or more requests for a row that can run, numbered from 0."""

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> Sequence[Request]:
        """Return further requests that depend on the completions so far; most tasks have none."""
        return ()

    @abstractmethod
    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        """Return the output of a row that ran; completions are in the order of the requests."""
