"""A row's own sampling parameters, from the input column ``sampling_params``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from batchinfer.config import SAMPLING_ALIASES, SamplingParams
from batchinfer.errors import RowError, UsageError

COLUMN = "sampling_params"
_PARAMS = TypeAdapter(SamplingParams)
_CODE = "bad_sampling_params"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row is sampled."""

    params: SamplingParams
    own_seed: bool
    """The row brought a seed: its samples depend on that seed alone, not on the row id."""

    def rng_key(self, row_id: int) -> tuple[int, int]:
        """Seed and random stream of the row."""
        assert self.params.seed is not None, "a job has a seed"
        return self.params.seed, 0 if self.own_seed else row_id


class RowParams:
    """The job's sampling parameters, and each row's changes to them.

    Args:
        job: the parameters of the job file.
        vocab_size: token ids are below it.

    Raises:
        UsageError: the job's own parameters name a token id the model does not have.
    """

    def __init__(self, job: SamplingParams, vocab_size: int) -> None:
        self._job = _PARAMS.dump_python(job, mode="json")
        self._vocab_size = vocab_size
        try:
            job.check_token_ids(vocab_size)
        except ValueError as error:
            raise UsageError(f"sampling.{error}") from None
        self._default = RowSampling(job, own_seed=False)
        self._parsed = lru_cache(maxsize=1024)(self._parse)  # rows often repeat each other

    def of(self, value: object) -> RowSampling | RowError:
        """A row's parameters, from its cell: null, a JSON object, or a struct.

        Null fields of a struct keep the job's value. Error code: ``bad_sampling_params``.
        """
        if value is None:
            return self._default
        try:
            text = value.decode() if isinstance(value, bytes) else json.dumps(_plain(value))
            return self._parsed(text)
        except UnicodeDecodeError:
            return RowError(_CODE, f"{COLUMN} is not valid UTF-8")
        except RecursionError:
            return RowError(_CODE, f"{COLUMN} is nested too deeply")

    def _parse(self, text: str) -> RowSampling | RowError:
        try:
            fields = json.loads(text)
        except ValueError as error:
            return RowError(_CODE, f"{COLUMN} is not JSON: {error}")
        if not isinstance(fields, Mapping):
            return RowError(_CODE, f"{COLUMN} must be an object of parameters, not {text[:60]}")
        fields = {SAMPLING_ALIASES.get(name, name): value for name, value in fields.items()}
        for name in ("stop", "bad_words"):
            if isinstance(fields.get(name), str):
                fields[name] = [fields[name]]
        try:
            params = _PARAMS.validate_json(json.dumps({**self._job, **fields}), strict=True)
            params.check_token_ids(self._vocab_size)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][:1])
            return RowError(_CODE, f"{COLUMN}: {where} {first['msg']}".replace("Value error, ", ""))
        except ValueError as error:
            return RowError(_CODE, f"{COLUMN}: {error}")
        return RowSampling(params, own_seed=fields.get("seed") is not None)


def _plain(value: Any) -> Any:
    """Arrow's structs as JSON data: texts decoded, null fields left out, maps as objects."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping):
        return {name: _plain(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return {str(key): _plain(field) for key, field in value}
        return [_plain(item) for item in value]
    return value
