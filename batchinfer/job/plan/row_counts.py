"""Counts the rows of a plan: chooses the rows to read, and estimates the size of their output.

The estimate is accurate to about a factor of two. The estimate assumes that kept columns are as
large as in the input, and that answers have as many bytes per token as the prompts and compress to
half their size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from batchinfer.errors import RowError
from batchinfer.job.input.dataset import Source
from batchinfer.job.output.schema import OutputTable
from batchinfer.job.plan.simulation import ExpectedLengths
from batchinfer.job.row_ranges import Part
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow
from batchinfer.text.prompts import PromptTooLongError

MAX_ROWS = 2**17
"""Approximate maximum number of rows to read. From a larger dataset, the plan reads whole windows
that are evenly spread.
"""
MAX_PROMPT_TOKENS = 2**25
"""Number of prompt tokens after which reading stops."""

_CHARACTERS_PER_TOKEN = 4.0  # used if no prompt's text is known
_COMPRESSED = 0.5
_BYTES_PER_PART = 5000  # size of a Parquet footer
_BYTES_PER_ROW = 16
_BYTES_PER_SAMPLE = 16
_TOKEN_ID_BYTES = 2
_LOGPROB_BYTES = 8  # for each token, and for each alternative


def sampled_parts(parts: Sequence[Part], window_rows: int, most_rows: int) -> list[Part]:
    """Return the parts to read: all, or evenly spread windows with about ``most_rows`` rows.

    Rows share prefixes only within a window of ``window_rows`` rows, so only whole windows show how
    much the rows share.
    """
    if sum(part.num_rows for part in parts) <= most_rows:
        return list(parts)
    per_window = max(1, window_rows // max(1, parts[0].num_rows))
    windows = [parts[at : at + per_window] for at in range(0, len(parts), per_window)]
    count = min(len(windows), max(1, most_rows // (per_window * parts[0].num_rows)))
    evenly_spread = [windows[at * len(windows) // count] for at in range(count)]
    return [part for window in evenly_spread for part in window]


@dataclass
class RowCounts:
    """Counts the rows read, their errors, and the samples and tokens of rows that can run."""

    lengths: ExpectedLengths
    result_bytes: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    distinct_tokens: int = 0
    """Number of prompt tokens, counting a prefix that rows of a window share only once."""
    samples: int = 0
    output_tokens: int = 0
    drawn_tokens: int = 0
    """Output tokens, including tokens of beams that are not written."""
    scored_tokens: int = 0
    """Number of tokens that get log-probabilities with ``task: score``."""
    prompt_characters: int = 0
    images: Counter[int] = field(default_factory=Counter)
    """Number of different images, keyed by the number of tokens of an image."""
    truncated: int = 0
    control_text: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Number of rows that cannot run, keyed by error code."""
    by_length: Counter[int] = field(default_factory=Counter)
    """Number of rows by prompt length: key k counts prompts of 2**(k-1) to 2**k - 1 tokens."""

    def count(
        self, batches: Iterator[list[PromptRow]], most_rows: int, most_tokens: int
    ) -> Iterator[list[PromptRow]]:
        """Count and yield ``batches`` until ``most_rows`` or ``most_tokens`` is reached."""
        for batch in batches:
            for row in batch:
                self._add(row)
            yield batch
            if self.rows >= most_rows or self.prompt_tokens >= most_tokens:
                return

    def count_distinct(self, batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
        """Count the distinct prompt tokens of ``batches``, and yield the batches."""
        for batch in batches:
            self.distinct_tokens += sum(row.distinct_tokens for row in batch)
            yield batch

    def __post_init__(self) -> None:
        self._seen: set[int] = set()

    @property
    def too_long(self) -> int:
        """Number of rows whose prompt leaves no room for output: refused and truncated rows."""
        return self.errors["prompt_too_long"] + self.truncated

    def histogram(self, scale: float) -> list[dict[str, int]]:
        """Return the bounds of each bin of prompt lengths, and its row count times ``scale``."""
        return [
            {
                "min_tokens": 2 ** (at - 1) if at else 0,
                "max_tokens": 2**at - 1,
                "rows": round(self.by_length[at] * scale),
            }
            for at in range(min(self.by_length, default=0), max(self.by_length, default=-1) + 1)
        ]

    def _add(self, row: PromptRow) -> None:
        self.rows += 1
        prompt = row.prompt
        if isinstance(prompt, RowError):
            self.errors[prompt.code] += 1
            if isinstance(prompt, PromptTooLongError):
                self.by_length[prompt.num_tokens.bit_length()] += 1
            return
        num_tokens = len(prompt.token_ids)
        self.by_length[num_tokens.bit_length()] += 1
        for request in self.lengths.requests(row):
            length, params = request.num_prompt_tokens, request.params
            self.prompt_tokens += length
            self.samples += params.n
            if request.given_token is not None:
                self.scored_tokens += length - request.scored_from + 1
            self.output_tokens += self.lengths.output_tokens(length, params)
            self.drawn_tokens += self.lengths.drawn_tokens(length, params)
        for image in prompt.images:
            if image.number not in self._seen:
                self._seen.add(image.number)
                self.images[image.num_tokens] += 1
        self.prompt_characters += len(prompt.text or "")
        self.truncated += prompt.truncated
        self.control_text += prompt.has_control_text


def output_bytes(spec: JobSpec, source: Source, table: OutputTable, counts: RowCounts) -> int:
    """Estimate the size of ``data/`` in bytes, assuming that the counts represent all rows."""
    if not counts.rows:
        return 0
    include = spec.output.include
    per_character = counts.prompt_characters / max(counts.prompt_tokens, 1)
    text = (per_character or _CHARACTERS_PER_TOKEN) * _COMPRESSED  # bytes per token
    ran = counts.rows - counts.errors.total()
    # ``outputs`` has the text of all samples; ``generated_text`` repeats the first sample's text.
    per_token = text * (1 + ran / max(counts.samples, 1))
    if "token_ids" in include:
        per_token += _TOKEN_ID_BYTES
    if "logprobs" in include:
        per_token += _LOGPROB_BYTES * (1 + (spec.sampling.logprobs or 0))
    generated = counts.output_tokens * per_token
    if spec.task_spec.draws:
        generated += counts.samples * _BYTES_PER_SAMPLE
    if counts.scored_tokens:
        per_token = _TOKEN_ID_BYTES * ("token_ids" in include)
        per_token += _LOGPROB_BYTES / 2 * ("logprobs" in include)
        generated += counts.scored_tokens * per_token
    generated += ran * counts.result_bytes + counts.rows * _BYTES_PER_ROW
    if "prompt_logprobs" in include:
        each = _LOGPROB_BYTES * (1 + (spec.sampling.prompt_logprobs or 0))
        generated += counts.prompt_tokens * each
    if "prompt" in include:
        generated += counts.prompt_characters * _COMPRESSED
    scale = source.num_rows / counts.rows
    footers = -(-source.num_rows // spec.output.rows_per_part) * _BYTES_PER_PART
    stored = sum(source.format.stored_bytes(file, table.kept) for file in source.files)
    stored_rows = sum(file.num_rows for file in source.files)
    kept = stored * source.num_rows // stored_rows if stored_rows else 0
    return kept + round(generated * scale) + footers
