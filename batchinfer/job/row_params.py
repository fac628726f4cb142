"""A row's own sampling parameters, from the input column ``sampling_params``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from batchinfer.config import SAMPLING_ALIASES, SamplingParams
from batchinfer.errors import RowError, UsageError
from batchinfer.job.messages import printable

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

        Null fields keep the job's value. Error code: ``bad_sampling_params``.
        """
        if value is None:
            return self._default
        try:
            return self._parsed(_text_of(value))
        except UnicodeDecodeError:
            return RowError(_CODE, f"{COLUMN} is not valid UTF-8")
        except RecursionError:
            return RowError(_CODE, f"{COLUMN} is nested too deeply")
        except TypeError as error:
            return RowError(_CODE, f"{COLUMN}: {error}")

    def _parse(self, text: str) -> RowSampling | RowError:
        try:
            fields = json.loads(text)
        except ValueError as error:
            return RowError(_CODE, f"{COLUMN} is not JSON: {error}")
        if not isinstance(fields, Mapping):
            return RowError(_CODE, f"{COLUMN} must be an object of parameters, not {text[:60]}")
        fields = {
            SAMPLING_ALIASES.get(name, name): value
            for name, value in fields.items()
            if value is not None
        }
        for name in ("stop", "bad_words"):
            if isinstance(fields.get(name), str):
                fields[name] = [fields[name]]
        try:
            params = _PARAMS.validate_json(json.dumps({**self._job, **fields}), strict=True)
            params.check_token_ids(self._vocab_size)
        except ValidationError as error:
            first = error.errors()[0]
            what = first["msg"].removeprefix("Value error, ")
            return RowError(
                _CODE, printable(" ".join([f"{COLUMN}:", *map(str, first["loc"][:1]), what]))
            )
        except ValueError as error:
            return RowError(_CODE, f"{COLUMN}: {error}")
        return RowSampling(params, own_seed="seed" in fields)


def _text_of(value: object) -> str:
    """A cell as JSON.

    Raises:
        UnicodeDecodeError: it holds text that is not UTF-8.
        TypeError: it holds a value that JSON cannot, such as a time.
    """
    if isinstance(value, bytes):
        return value.decode()
    return json.dumps(_plain(value), default=_refuse)


def _refuse(value: object) -> None:
    raise TypeError(f"a {type(value).__name__} is no value for a parameter")


def _plain(value: Any) -> Any:
    """Arrow's structs as JSON data: texts decoded, decimals as floats, null fields left out, maps
    as objects."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: _plain(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return {str(key): _plain(field) for key, field in value}
        return [_plain(item) for item in value]
    return value
