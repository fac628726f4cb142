"""Defines which job-file keys each ``task`` allows, and which output columns it writes.

``batchinfer.job.rows.task`` defines how a task processes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from batchinfer.config import EMBEDDING, SCORING, Runner, SamplingParams

if TYPE_CHECKING:
    from batchinfer.job.spec.spec import JobSpec

TaskName = Literal["generate", "score", "embed", "classify"]

_WRITTEN_WITH: Mapping[str, str] = {
    "reasoning": "reasoning",
    "num_reasoning_tokens": "reasoning",
    "tool_calls": "tool_calls",
    "prompt_logprobs": "prompt_logprobs",
}
"""Maps each optional column to the entry of ``JobSpec.written`` that adds it."""
_NOT_OF_PAIRS = ("column", "template", "messages", "system", "token_ids_column", "tools_column")


@dataclass(frozen=True)
class TaskSpec:
    name: TaskName
    results: tuple[str, ...]
    """Output columns of the task in order, including optional columns."""
    check: Callable[[JobSpec], None]
    """Raises ValueError if other keys conflict with the task."""
    sampling: SamplingParams | None = None
    """Sampling parameters of all requests; None if the task requires the section ``sampling``."""
    section: str | None = None
    """Section of the job file that is allowed only for this task."""
    runner: Runner = "generate"

    @property
    def draws(self) -> bool:
        """True if the task draws tokens with the job file's ``sampling``."""
        return self.sampling is None

    def columns(self, include: Collection[str]) -> tuple[str, ...]:
        """Return a job's generated output columns in order; ``include`` is ``JobSpec.written``."""
        prompt = ("prompt",) if "prompt" in include else ()
        results = (name for name in self.results if _WRITTEN_WITH.get(name) in (None, *include))
        return ("row_id", *prompt, *results, "status", "error")


def _check_generate(job: JobSpec) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(job.sampling, name) is not None
        if name in job.output.include and not asked:
            raise ValueError(f"output.include names {name}, but sampling.{name} is not set")
        if asked and name not in job.output.written:
            raise ValueError(
                f"sampling.{name} is set, but {name} are not written; add include: "
                f"[{name}] to the output section"
            )
    if job.sampling.max_reasoning_tokens is not None and job.output.reasoning == "none":
        raise ValueError("sampling.max_reasoning_tokens needs output.reasoning; set it to auto")
    if job.prompt.tool_choice not in ("auto", "none") and job.sampling.structured_outputs:
        raise ValueError("sampling.structured_outputs cannot be combined with prompt.tool_choice")
    if (job.sampling.beam_width or 1) > job.engine.max_num_batched_tokens:
        raise ValueError(
            "sampling.beam_width is more than engine.max_num_batched_tokens; lower "
            "sampling.beam_width"
        )


def _check_score(job: JobSpec) -> None:
    if job.input.format == "openai-batch":
        raise ValueError("task: score cannot be used with input.format: openai-batch")
    _check_draws_nothing(job)
    if "prompt_logprobs" in job.output.include:
        raise ValueError(
            "output.include: prompt_logprobs needs task: generate; with task: "
            "score, output.include: logprobs covers the scored tokens"
        )


def _check_classify(job: JobSpec) -> None:
    _check_pools(job)
    if job.classify is None or not job.classify.has_pairs:
        return
    for name in _NOT_OF_PAIRS:
        if getattr(job.prompt, name) is not None:
            raise ValueError(
                f"prompt.{name} cannot be combined with classify.query_column, "
                "because the query and the document are the prompt; leave it out"
            )
    if job.prompt.on_too_long == "truncate_left":
        raise ValueError(
            "prompt.on_too_long: truncate_left would cut off the query; set it to error or "
            "truncate_right"
        )


def _check_pools(job: JobSpec) -> None:
    _check_draws_nothing(job)
    if others := [name for name in job.output.include if name != "prompt"]:
        raise ValueError(
            f"output.include: {others[0]} cannot be used with task: {job.task}; leave it out"
        )


def _check_draws_nothing(job: JobSpec) -> None:
    if job.accept is not None:
        raise ValueError(f"accept cannot be used with task: {job.task}, which draws no samples")
    if job.prompt.images is not None:
        raise ValueError("prompt.images needs task: generate; leave it out")
    if job.output.explode:
        raise ValueError("output.explode needs task: generate; leave it out")
    if job.tool_parser != "none":
        raise ValueError(
            "prompt.tools, prompt.tools_column and output.tool_parser need task: generate; "
            "leave them out"
        )
    if job.output.reasoning != "none":
        raise ValueError("output.reasoning needs task: generate; leave it out")


GENERATE = TaskSpec(
    "generate",
    (
        *("generated_text", "reasoning", "tool_calls", "outputs", "prompt_logprobs"),
        *("num_prompt_tokens", "num_output_tokens", "num_reasoning_tokens", "truncated"),
    ),
    _check_generate,
)
SCORE = TaskSpec(
    "score",
    ("score", "perplexity", "num_prompt_tokens", "truncated"),
    _check_score,
    sampling=SCORING,
    section="score",
)
EMBED = TaskSpec(
    "embed",
    ("embedding", "num_prompt_tokens", "truncated"),
    _check_pools,
    sampling=EMBEDDING,
    section="embed",
    runner="pooling",
)
CLASSIFY = TaskSpec(
    "classify",
    ("label", "score", "scores", "num_prompt_tokens", "truncated"),
    _check_classify,
    sampling=EMBEDDING,
    section="classify",
    runner="pooling",
)
TASK_SPECS: Mapping[str, TaskSpec] = {
    task.name: task for task in (GENERATE, SCORE, EMBED, CLASSIFY)
}


def check_task(job: JobSpec) -> None:
    """Check a job's keys against its task; raise ValueError that names the wrong key."""
    task = TASK_SPECS[job.task]
    for other in TASK_SPECS.values():
        if other is not task and other.section and getattr(job, other.section) is not None:
            section = other.section
            raise ValueError(
                f"{section} needs task: {other.name}; set this task, or leave {section} out"
            )
    if task.sampling is not None and job.sampling.params != task.sampling:
        raise ValueError(f"sampling cannot be used with task: {task.name}; leave it out")
    task.check(job)
