"""Draws samples of rows until enough samples pass or all tries are used up.

The filter ``accept`` checks samples, and so does a schema that no grammar can enforce
(``structured_outputs`` with ``unsupported: check``). Each round doubles the number of samples drawn
so far, or draws the missing number if that is larger. A sample's random numbers depend on its
index, and samples are checked in the order of their indices, so the number of rounds does not
change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from batchinfer.config import AcceptConfig, SamplingParams
from batchinfer.config.sampling import MAX_SAMPLES
from batchinfer.config.structured import checked_schema
from batchinfer.engine.request import Completion, Request, SampleOutput, combined_stats
from batchinfer.requests.requests import PromptRow, RequestMaker
from batchinfer.text.answers import AnswerReader
from batchinfer.text.sample_filter import RowVerdicts, SampleFilter, Tally, Verdict
from batchinfer.text.structured.json_validator import JsonValidator

CHECKED_TRIES = 8
"""Maximum number of samples to draw per requested sample if a schema is checked without ``accept``.
"""
_CODE = "invalid_structured_output"
_KEPT_VALIDATORS = 256
_NOT_JUDGED = Tally()


@dataclass(frozen=True, slots=True)
class _Goal:
    """When a row has enough samples: ``wanted`` samples passed, or ``max_tries`` were drawn."""

    wanted: int
    max_tries: int
    validator: JsonValidator | None


class Resampling:
    """Makes requests for samples, and keeps samples that pass, for one model.

    Args:
        accept: filter for the samples of every row; None to check only the row's schema.
    """

    def __init__(
        self, requests: RequestMaker, answers: AnswerReader, accept: AcceptConfig | None = None
    ) -> None:
        self._accept = accept
        self._filter = SampleFilter(accept or AcceptConfig())
        self._requests = requests
        self._answers = answers
        self._validator = lru_cache(_KEPT_VALIDATORS)(partial(JsonValidator, check_formats=True))

    def requests(self, row: PromptRow) -> list[Request]:
        """Return the requests for the first samples.

        Raises:
            GrammarError: the row's ``structured_outputs`` cannot be compiled.
        """
        goal = self._goal(row)
        if goal is None:
            return [self._requests.make(row)]
        return [self._request(row, goal, goal.wanted, tried=0, number=0)]

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> list[Request]:
        """Return a request for more samples if the row needs them and has tries left."""
        goal = self._goal(row)
        if goal is None:
            return []
        verdicts = self._verdicts(goal, completions)
        tried, has_failed = len(verdicts.verdicts), completions[-1].error_code is not None
        if verdicts.is_full or tried >= goal.max_tries or has_failed:
            return []
        missing = verdicts.wanted - verdicts.count(Verdict.ACCEPTED)
        return [self._request(row, goal, max(missing, tried), tried=tried, number=len(completions))]

    def result(self, row: PromptRow, completions: Sequence[Completion]) -> tuple[Completion, Tally]:
        """Return a completion with the samples that a row keeps, and counts of its samples by
        verdict.

        With ``accept``, a row may keep no samples. Without ``accept``, the kept samples are
        renumbered from 0, and a row with too few of them is an error.
        """
        goal = self._goal(row)
        if goal is None:
            return completions[0], _NOT_JUDGED
        verdicts = self._verdicts(goal, completions)
        samples = [output for one in completions for output in one.outputs]
        kept = [
            sample
            for sample, verdict in zip(samples, verdicts.verdicts, strict=True)
            if verdict is Verdict.ACCEPTED
        ]
        last = completions[-1]
        stats = combined_stats([one.stats for one in completions if one.stats.has_run])
        whole = Completion(last.request, kept, last.error_code, last.error_message)
        whole.stats = stats or whole.stats
        whole.prompt_logprobs = completions[0].prompt_logprobs
        if self._accept is None:
            whole.outputs = [replace(one, index=at) for at, one in enumerate(kept)]
            if whole.error_code is None and not verdicts.is_full:
                whole.error_code = _CODE
                whole.error_message = self._problem(goal, verdicts, completions)
        return whole, Tally(len(samples), *map(verdicts.count, Verdict))

    def _goal(self, row: PromptRow) -> _Goal | None:
        assert row.sampling is not None
        params = row.sampling.params
        schema = checked_schema(params.structured_outputs)
        validator = None if schema is None else self._validator(schema)
        if self._accept is not None:
            return _Goal(self._accept.wanted(params.n), self._accept.max_tries, validator)
        if validator is None:
            return None
        # All tries of a greedy sample give the same text.
        tries = 1 if params.temperature == 0 else CHECKED_TRIES
        return _Goal(params.n, min(tries * params.n, MAX_SAMPLES), validator)

    def _request(
        self, row: PromptRow, goal: _Goal, count: int, *, tried: int, number: int
    ) -> Request:
        assert row.sampling is not None
        params = replace(row.sampling.params, n=min(count, goal.max_tries - tried))
        if number:  # only the first request returns the prompt's log-probabilities
            params = replace(params, prompt_logprobs=None)
        sampling = replace(row.sampling, params=params)
        request = self._requests.make(replace(row, sampling=sampling))
        return replace(request, first_sample=tried, number=number)

    def _verdicts(self, goal: _Goal, completions: Sequence[Completion]) -> RowVerdicts:
        """Return the verdicts on a row's samples so far.

        Each sample is checked once; completions carry the verdicts to the writing thread.
        """
        verdicts = RowVerdicts(goal.wanted)
        for one in completions:
            if one.judged is None:
                self._filter.apply(verdicts, self._samples(goal, one))
                one.judged = verdicts
            assert isinstance(one.judged, RowVerdicts)
            verdicts = one.judged
        return verdicts

    def _samples(self, goal: _Goal, completion: Completion) -> Iterator[tuple[str, int, bool]]:
        """Yield each sample's text, its number of tokens, and whether the row's schema allows
        it."""
        request, validator = completion.request, goal.validator
        for output in completion.outputs:
            text = bare = self._text(request, output, request.params)
            if validator is not None and request.params.include_stop_str_in_output:
                bare = self._text(request, output, _without_stop(request.params))
            yield text, len(output.token_ids), validator is None or validator.allows(bare)

    def _text(self, request: Request, sample: SampleOutput, params: SamplingParams) -> str:
        return self._answers.read(request.prompt_token_ids, sample, params).text

    def _problem(
        self, goal: _Goal, verdicts: RowVerdicts, completions: Sequence[Completion]
    ) -> str:
        assert goal.validator is not None
        samples = [(output, one.request) for one in completions for output in one.outputs]
        last = max(at for at, one in enumerate(verdicts.verdicts) if one is Verdict.REJECTED)
        sample, request = samples[last]
        text = self._text(request, sample, _without_stop(request.params))
        why = goal.validator.problem(text)
        if sample.finish_reason == "length":
            why = f"it was cut off at {len(sample.token_ids)} tokens"
        drawn = len(samples)
        return (
            f"too few of {drawn} samples match the schema; problem in the last sample that does "
            f"not match: {why}"
        )


def _without_stop(params: SamplingParams) -> SamplingParams:
    return replace(params, include_stop_str_in_output=False)
