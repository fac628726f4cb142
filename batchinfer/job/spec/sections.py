"""Sections of the job file that do not depend on other sections.

A URL or an argument in ``on_end`` may be a secret, for example a chat's webhook. Messages and
records therefore show only the host or the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from batchinfer.config import SamplingParams
from batchinfer.console.format import printable

_HOST_PORT = re.compile(r"[^\s/:]+:[0-9]+|\[[0-9a-fA-F:]+\]:[0-9]+")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smh])")

HIDDEN = "\N{HORIZONTAL ELLIPSIS}"
"""Placeholder for secrets."""

Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base class of sections, which are frozen and reject unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )


@dataclass(frozen=True)
class JobSampling(SamplingParams):
    """How the output tokens of a row are chosen. Names and meanings are the same as in vLLM."""

    max_tokens: int = field()
    """Maximum number of tokens in a sample."""
    seed: int = 0
    """Seed of the random numbers. Runs with the same seed draw the same tokens."""
    key: Literal["position", "id"] = "position"
    """What a row's random numbers depend on, in addition to the seed. position: the row's position
    in the input. id: the row's value in input.id_column, so a row that moves keeps its samples."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of rows that do not set their own."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(SamplingParams)}
        return SamplingParams(**values)


class ReasoningSpec(Section):
    """Markers around a model's reasoning."""

    start: Text
    """The start marker, like <think>. The chat template may write the marker into the prompt."""
    end: Text
    """The end marker, like </think>."""


class ErrorsSpec(Section):
    """Limits on failed rows."""

    max_error_rate: float = Field(default=0.01, ge=0.0, le=1.0)
    """Maximum fraction of rows that may fail. If more rows fail, the job ends with exit code 3."""
    min_rows: int | None = Field(default=None, ge=0)
    """Minimum number of rows without an error or, with ``accept``, of kept samples. Below this
    number, the job ends with exit code 3. null: no limit, but the job warns if the input has no
    rows, the filter selects no rows, or ``accept`` keeps no sample."""


class StatsSpec(Section):
    """What to record about the run."""

    every_steps: int = Field(default=1, ge=1)
    """Record every N-th step of the engine in stats/steps.parquet."""


class ScaleSpec(Section):
    """Number and location of the job's workers. A Ray cluster needs ``pip install '.[ray]'``."""

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Number of workers. Each worker has an engine and a device; without GPUs, workers share the
    CPU cores. auto: one worker per GPU."""
    min_workers: int = Field(default=1, ge=1)
    """Number of workers that must be ready before the job starts. Other workers join when the
    cluster has room."""
    cluster: Text = "local"
    """local: processes on this machine. auto: the Ray cluster in RAY_ADDRESS. Any other value:
    host:port of a Ray cluster."""
    start_timeout: Text = "10m"
    """How long to wait for min_workers workers to be ready, like 90s or 10m."""
    resources: Mapping[Text, Annotated[float, Field(gt=0)]] = {}
    """Ray resources to reserve per worker, like {"spot": 1}; may include num_cpus and num_gpus."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.start_timeout_s  # noqa: B018 - raises
        if self.cluster not in ("local", "auto") and not _HOST_PORT.fullmatch(self.cluster):
            raise ValueError("cluster must be local, auto or HOST:PORT")
        if self.workers != "auto" and self.min_workers > self.workers:
            raise ValueError("min_workers is more than workers; lower min_workers")
        if self.cluster != "local" and "workers" not in self.model_fields_set:
            raise ValueError("cluster needs workers; set workers to a number or auto")
        return self

    @property
    def start_timeout_s(self) -> float:
        match = _DURATION.fullmatch(self.start_timeout)
        if match is None:
            raise ValueError(f"start_timeout is {self.start_timeout!r}; write it like 90s or 10m")
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


class OnEndSpec(Section):
    """Notification to send when a run finishes, has too many errors, is stopped or fails. If the
    notification fails, the job warns and keeps its exit code. Set at most one of the two keys."""

    webhook: Text | None = None
    """An http:// or https:// URL that receives the outcome as a JSON POST."""
    command: tuple[Text, ...] | None = None
    """Program and arguments, run without a shell. The program receives the outcome as JSON on
    stdin."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.webhook is not None and self.command is not None:
            raise ValueError("webhook and command are both given; keep one")
        if self.command is not None and (not self.command or "\0" in "".join(self.command)):
            raise ValueError("command must be a program and its arguments, like [notify, done]")
        if self.webhook is not None and not _is_web_address(self.webhook):
            raise ValueError("webhook must be an http:// or https:// URL")
        return self

    @property
    def named(self) -> str:
        """The target of the notification, without secrets."""
        if self.webhook is not None:
            return f"on_end.webhook {_host_of(self.webhook)}"
        program = self.command[0] if self.command else ""
        return f"on_end.command {printable(program, 80)}"

    @field_serializer("webhook")
    def _hide_webhook(self, webhook: str | None) -> str | None:
        return None if webhook is None else _host_of(webhook)

    @field_serializer("command")
    def _hide_arguments(self, command: tuple[str, ...] | None) -> list[str] | None:
        if command is None:
            return None
        return [command[0], HIDDEN] if len(command) > 1 else list(command)


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # the port or host is invalid
        return False


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{printable(parts.hostname or '', 80)}{port}/{HIDDEN}"
