"""How large a job's output will be: an estimate, right to about a factor of two.

Kept columns take what they take in the input; text of answers is taken to be like that of prompts
and to compress to half.
"""

from __future__ import annotations

from batchinfer.job.input.dataset import Source
from batchinfer.job.plan_rows import Census
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.table import OutputTable

_CHARACTERS_PER_TOKEN = 4.0  # where no prompt's text is known
_COMPRESSED = 0.5
_BYTES_PER_PART = 5000  # the footer: schema, and what made the file
_BYTES_PER_ROW = 16
_BYTES_PER_SAMPLE = 16
_TOKEN_ID_BYTES = 2
_LOGPROB_BYTES = 8  # of a token or of an alternative to it


def output_bytes(spec: JobSpec, source: Source, table: OutputTable, census: Census) -> int:
    """Bytes of ``data/``.

    Args:
        spec: the job.
        source: its input.
        table: its output.
        census: of the rows read; the others are taken to be like them.
    """
    if not census.rows:
        return 0
    include = spec.output.include
    per_character = census.prompt_characters / max(census.prompt_tokens, 1)
    text = (per_character or _CHARACTERS_PER_TOKEN) * _COMPRESSED  # bytes per token
    ran = census.rows - census.errors.total()
    # ``outputs`` has the text of all samples, ``generated_text`` that of the first.
    per_token = text * (1 + ran / max(census.samples, 1))
    if "token_ids" in include:
        per_token += _TOKEN_ID_BYTES
    if "logprobs" in include:
        per_token += _LOGPROB_BYTES * (1 + (spec.sampling.logprobs or 0))
    generated = census.output_tokens * per_token + census.samples * _BYTES_PER_SAMPLE
    if spec.task == "score":
        per_token = _TOKEN_ID_BYTES * ("token_ids" in include)
        per_token += _LOGPROB_BYTES / 2 * ("logprobs" in include)
        generated = census.scored_tokens * per_token + census.samples * _BYTES_PER_SAMPLE
    generated += census.rows * _BYTES_PER_ROW
    if "prompt_logprobs" in include:
        each = _LOGPROB_BYTES * (1 + (spec.sampling.prompt_logprobs or 0))
        generated += census.prompt_tokens * each
    if "prompt" in include:
        generated += census.prompt_characters * _COMPRESSED
    scale = source.num_rows / census.rows
    footers = -(-source.num_rows // spec.output.rows_per_part) * _BYTES_PER_PART
    return kept_bytes(source, table) + round(generated * scale) + footers


def kept_bytes(source: Source, table: OutputTable) -> int:
    """Compressed bytes of the kept columns in the input files, of as many rows as are selected."""
    total = sum(source.format.stored_bytes(file, table.kept) for file in source.files)
    rows = sum(file.num_rows for file in source.files)
    return total * source.num_rows // rows if rows else 0
