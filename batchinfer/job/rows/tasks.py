"""All tasks, keyed by their names in the job file."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.job.rows.generate import GENERATE_TASK
from batchinfer.job.rows.pooling.classify import CLASSIFY_TASK
from batchinfer.job.rows.pooling.embed import EMBED_TASK
from batchinfer.job.rows.score import SCORE_TASK
from batchinfer.job.rows.task import Task

TASKS: Mapping[str, Task] = {
    task.spec.name: task for task in (GENERATE_TASK, SCORE_TASK, EMBED_TASK, CLASSIFY_TASK)
}
