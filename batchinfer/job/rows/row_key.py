"""Row keys: 128-bit hashes of everything that affects a row's answer.

The facts that all rows of a job share (model, task, output columns: ``fingerprint.answer_facts``)
are hashed once. A row's key adds the token ids of its prompt, its images, its parameters, its token
limit, the content of its adapter, and, only if the row samples, the seed and stream of its random
numbers. The key does not depend on other input columns. The key depends on the row's position only
if the position selects the stream.

The hash is BLAKE2b (RFC 7693) with 16 bytes. Among 10**12 different rows, the probability that any
two have the same key is about 10**-15.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.config import SamplingParams
from batchinfer.engine.request import TokenIds
from batchinfer.errors import RowError
from batchinfer.job.fingerprint import adapter_digests, answer_facts, digest
from batchinfer.requests.requests import BASE_MODEL, PromptRow
from batchinfer.text.prompts import Prompt
from batchinfer.text.scoring_prompts import ScoredPrompt

KEY_COLUMN = "key"
KEY_BYTES = 16
KEY_TYPE = pa.binary(KEY_BYTES)
KEYS_SCHEMA = pa.schema([("row_id", pa.int64()), (KEY_COLUMN, KEY_TYPE)])
"""Columns of a file that holds the keys of a finished part."""
NO_KEYS = KEYS_SCHEMA.empty_table()

_VERSION = b"batchinfer row 1"
_HEAD = struct.Struct("<iiQQ??")
"""Packs the maximum number of output tokens, the number of prompt tokens, the seed, the stream, and
two flags: whether the row samples, and whether its prompt was truncated.
"""
_INT = np.dtype("<i4")
_IMAGE = -1
"""Replaces the ids of image tokens, because these ids differ between runs."""
_LENGTH = struct.Struct("<i")
_MOST_KEPT = 1024
"""Maximum number of cached hashes of sampling parameters; rows often have equal parameters."""

_NOT_IN_TEXT = ("seed", "max_tokens")
_OF_DRAWS = ("top_p", "top_k", "min_p")
_DEFAULTS = {
    entry.name: entry.default for entry in fields(SamplingParams) if entry.name not in _NOT_IN_TEXT
}
_SETS = ("stop_token_ids", "allowed_token_ids")


def canonical_params(params: SamplingParams) -> str:
    """Return a text that is the same for parameters with the same meaning.

    The text omits ``seed``, ``max_tokens`` and, at temperature 0, parameters that affect only
    sampling. The text also omits default values, so that a parameter that a later version adds does
    not change the text of existing jobs.
    """
    values = {
        name: _canonical(name, getattr(params, name))
        for name in _DEFAULTS
        if params.temperature > 0 or name not in _OF_DRAWS
    }
    return repr([(name, value) for name, value in values.items() if value != _DEFAULTS[name]])


def _canonical(name: str, value: Any) -> Any:
    if name in _SETS and value is not None:
        return sorted(set(value))
    if name == "logit_bias" and value is not None:
        return sorted(value.items())
    return 0 if name == "top_k" and value == -1 else value


class RowKeys:
    """Makes the keys of a job's rows.

    Args:
        facts: the job's ``fingerprint_facts``.
        max_model_len: maximum number of tokens of prompt and output together.
        adapters: maps each adapter's name to its number.
        chosen_by_length: True if the model's answers depend on ``max_model_len`` (LongRoPE).
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        max_model_len: int,
        adapters: Mapping[str, int],
        *,
        chosen_by_length: bool = False,
    ) -> None:
        common = answer_facts(facts)
        if chosen_by_length:
            common["max_model_len"] = max_model_len
        self._common = bytes.fromhex(digest(common))
        self._max_model_len = max_model_len
        digests = adapter_digests(facts)
        self._adapters = {number: digests[name] for name, number in adapters.items()}
        self._adapters[BASE_MODEL] = b""
        self._writes_prompt = "prompt" in common["output"]["include"]
        self._begun: dict[tuple[int, int], tuple[SamplingParams | None, blake2b]] = {}
        """Hash states before a row's own data is added, keyed by ``id()`` of the parameters and by
        adapter. Each value keeps its parameters alive, so that no other object can get the same
        ``id()``."""

    def with_keys(self, batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
        """Set the keys of rows; a row that cannot run has no key."""
        for batch in batches:
            for row in batch:
                row.key = self.of(row)
            yield batch

    def of(self, row: PromptRow) -> bytes | None:
        """Return the key of a row, 16 bytes; None if the row cannot run."""
        prompt = row.prompt
        if isinstance(prompt, RowError):
            return None
        key = self._begin(row)
        key.update(self._head(row, prompt))
        key.update(_data(np.maximum(prompt.token_ids, _IMAGE)))
        for image in prompt.images:
            key.update(image.key)
        if prompt.images:
            key.update(b"images")
        if prompt.first_segment is not None:
            key.update(_LENGTH.pack(prompt.first_segment))
            key.update(b"pair")
        if prompt.unpooled:
            key.update(_LENGTH.pack(prompt.unpooled))
            key.update(b"unpooled")
        if isinstance(prompt, ScoredPrompt):
            _add_completions(key, prompt)
        if row.tools is not None:  # tools determine how an answer is parsed
            key.update(row.tools.key.encode("utf-8", "surrogatepass"))
            key.update(b"tools")
        # A truncated prompt's text is decoded from its token ids, which are in the key already.
        if self._writes_prompt and prompt.text is not None and not prompt.truncated:
            key.update(prompt.text.encode("utf-8", "surrogatepass"))
            key.update(b"text")
        return key.digest()

    def _begin(self, row: PromptRow) -> blake2b:
        params = None if row.sampling is None else row.sampling.params
        known = self._begun.get((id(params), row.adapter))
        if known is None:
            text = "" if params is None else canonical_params(params)
            parts = [self._common, self._adapters[row.adapter], text.encode()]
            begun = blake2b(_VERSION, digest_size=KEY_BYTES)
            for part in parts:
                begun.update(_LENGTH.pack(len(part)))
                begun.update(part)
            if len(self._begun) >= _MOST_KEPT:
                self._begun.clear()
            known = self._begun[id(params), row.adapter] = params, begun
        return known[1].copy()

    def _head(self, row: PromptRow, prompt: Prompt) -> bytes:
        num_tokens = len(prompt.token_ids)
        if row.sampling is None:
            return _HEAD.pack(0, num_tokens, 0, 0, False, prompt.truncated)
        params = row.sampling.params
        draws = params.temperature > 0
        seed, stream = row.rng_key if draws else (0, 0)
        most = min(params.max_tokens, self._max_model_len - num_tokens)
        return _HEAD.pack(most, num_tokens, seed, stream, draws, prompt.truncated)


def _add_completions(key: blake2b, prompt: ScoredPrompt) -> None:
    lengths = [len(prompt.completions), *map(len, prompt.completions)]
    key.update(np.array(lengths, _INT).data)
    for completion in prompt.completions:
        key.update(_data(completion))


def _data(token_ids: TokenIds) -> memoryview:
    return np.ascontiguousarray(token_ids, _INT).data
