"""Reads a row's sampling parameters from the input column ``sampling_params``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from batchinfer.config import SAMPLING_ALIASES, SamplingParams, field_names
from batchinfer.console.format import did_you_mean, format_value, printable
from batchinfer.errors import RowError, UsageError
from batchinfer.job.input.format import SAMPLING_COLUMN
from batchinfer.job.spec.errors import expectation, is_unknown_key
from batchinfer.job.spec.load import check_token_keys
from batchinfer.job.spec.yaml import dotted
from batchinfer.requests.requests import RowSampling
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.structured.grammar_source import GrammarError

_PARAMS = TypeAdapter(SamplingParams)
_KNOWN = (*field_names(SamplingParams), *SAMPLING_ALIASES)
_CODE = "bad_sampling_params"
_GRAMMAR_CODE = "invalid_structured_output"
_GRAMMAR = "structured_outputs"


def check_token_ids(job: SamplingParams, vocab_size: int) -> None:
    """Raise UsageError if a job's sampling parameters name a token id outside the vocabulary."""
    try:
        job.check_token_ids(vocab_size)
    except ValueError as error:
        raise UsageError(printable(f"sampling.{error}")) from None


class RowParams:
    """The job's sampling parameters, and each row's changes to them.

    Args:
        where: name of the column or request in error messages.
        keeps_logprobs: True if rows may request log-probabilities even if the job does not.
        check: raises ValueError if a row's parameters contradict the job.

    Raises:
        UsageError: the job's parameters have a token id outside the model's vocabulary, or a
            grammar that cannot be compiled.
    """

    def __init__(
        self,
        job: SamplingParams,
        vocab_size: int,
        grammars: GrammarCompiler,
        where: str = SAMPLING_COLUMN,
        *,
        keeps_logprobs: bool = False,
        check: Callable[[SamplingParams], None] | None = None,
    ) -> None:
        self._where = where
        self._kept = {
            "logprobs": keeps_logprobs or job.logprobs is not None,
            "prompt_logprobs": keeps_logprobs or job.prompt_logprobs is not None,
        }
        self._job = _PARAMS.dump_python(job, mode="json")
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._check = check
        check_token_ids(job, vocab_size)
        try:
            self._check_grammar(job)
        except ValueError as error:
            raise UsageError(printable(f"sampling.{error}")) from None
        self._default = RowSampling(job, own_seed=False)
        self._parsed = lru_cache(maxsize=1024)(self._parse)  # many rows have the same parameters

    def of(self, value: object) -> RowSampling | RowError:
        """Read a row's parameters from its cell: null, a JSON object, or a struct.

        Null fields keep the job's value. Error codes: ``bad_sampling_params``,
        ``invalid_structured_output``.
        """
        if value is None:
            return self._default
        if isinstance(value, RowError):
            return RowError(_CODE, value.message)
        try:
            return self._parsed(_text_of(value))
        except UnicodeDecodeError:
            return RowError(_CODE, f"{self._where} is not valid UTF-8")
        except RecursionError:
            return RowError(_CODE, f"{self._where} is nested too deeply")
        except (TypeError, _GivenTwiceError) as error:
            return RowError(_CODE, printable(f"{self._where}: {error}"))

    def _parse(self, text: str) -> RowSampling | RowError:
        try:
            fields = json.loads(text, object_pairs_hook=_object)
        except ValueError as error:
            return RowError(_CODE, f"{self._where} is not JSON: {error}")
        if not isinstance(fields, Mapping):
            what = printable(text, 60)
            return RowError(_CODE, f"{self._where} must be a JSON object of parameters, not {what}")
        fields = {name: _whole(value) for name, value in _without_aliases(fields).items()}
        for name, is_kept in self._kept.items():
            if name in fields and not is_kept:
                need = f"sampling.{name} and output.include: [{name}] in the job file"
                return RowError(_CODE, f"{self._where}: {name} is given, but needs {need}")
        for name in ("stop", "bad_words"):
            if isinstance(fields.get(name), str):
                fields[name] = [fields[name]]
        try:
            check_token_keys(fields.get("logit_bias"))
            params = _PARAMS.validate_json(json.dumps({**self._job, **fields}), strict=True)
            params.check_token_ids(self._vocab_size)
            self._check_grammar(params)
            if self._check is not None:
                self._check(params)
        except ValidationError as error:
            return self._row_error(_problem(error.errors()[0]))
        except ValueError as error:
            return self._row_error(str(error))
        return RowSampling(params, own_seed="seed" in fields)

    def _check_grammar(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            try:
                self._grammars.compile(params.structured_outputs)
            except GrammarError as error:
                raise ValueError(f"{_GRAMMAR}: {error}") from None

    def _row_error(self, problem: str) -> RowError:
        code = _GRAMMAR_CODE if problem.startswith(_GRAMMAR) else _CODE
        return RowError(code, printable(f"{self._where}: {problem}"))


class _GivenTwiceError(Exception):
    """A parameter has two values."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _GivenTwiceError(f"{twice} is given twice; keep one")
    return fields


def _without_aliases(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rename aliases to the field names of ``SamplingParams``, and drop null parameters."""
    spellings: dict[str, str] = {}
    for written, value in fields.items():
        name = SAMPLING_ALIASES.get(written, written)
        if value is not None and spellings.setdefault(name, written) != written:
            raise _GivenTwiceError(f"{spellings[name]} and {written} mean the same; keep one")
    return {name: fields[written] for name, written in spellings.items()}


def _whole(value: Any) -> Any:
    """Turn 5.0 into 5, because columns with nulls or fractions hold integers as floats."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


def _problem(detail: ErrorDetails) -> str:
    """Return a message for a pydantic error, worded like the messages about job files."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "json_invalid":
        return "the value contains NaN, an infinite number or invalid Unicode"
    name = dotted(detail["loc"])
    if is_unknown_key(detail):
        return f"unknown parameter {name}{did_you_mean(name, _KNOWN)}"
    return f"{name} is {format_value(detail['input'])}; it must be {expectation(detail)}"


def _text_of(value: object) -> str:
    """Format a cell as JSON.

    Raises:
        UnicodeDecodeError: the cell holds text that is not UTF-8.
        TypeError: the cell holds a value that JSON cannot represent, such as a time.
        _GivenTwiceError: a map holds a key twice.
    """
    if isinstance(value, str | bytes):
        return value.decode() if isinstance(value, bytes) else value
    return json.dumps(_plain(value), default=_refuse)


def _refuse(value: object) -> None:
    raise TypeError(f"a parameter cannot be a {type(value).__name__}")


def _plain(value: Any) -> Any:
    """Convert an Arrow value to JSON data: text to str, decimals to float, maps to objects; drop
    null fields."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: _plain(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return _object([(str(_plain(key)), _plain(field)) for key, field in value])
        return [_plain(item) for item in value]
    return value
