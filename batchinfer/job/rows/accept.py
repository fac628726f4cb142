"""``accept``: samples of a row are drawn until enough of them pass, or all tries are used up.

They are drawn a few at a time, each time as many as before or as are still wanted. Random numbers
are keyed by sample index, and samples are judged in that order, so what is kept is what would be
kept if all had been drawn at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.config import AcceptConfig
from batchinfer.engine.request import Completion, Request, combined_stats
from batchinfer.job.rows.finished_row import FinishedRow, RowFinisher
from batchinfer.requests import PromptRow, RequestMaker
from batchinfer.text.detokenize import output_text
from batchinfer.text.sample_filter import Judge, RowVerdicts, Tally, Verdict
from batchinfer.text.tokenizer import Tokenizer


class AcceptedGeneration:
    """``task: generate`` with ``accept`` (see ``LoadedTask``)."""

    def __init__(
        self,
        config: AcceptConfig,
        requests: RequestMaker,
        finisher: RowFinisher,
        tokenizer: Tokenizer,
    ) -> None:
        self._config = config
        self._judge = Judge(config)
        self._requests = requests
        self._finisher = finisher
        self._tokenizer = tokenizer

    def requests(self, row: PromptRow) -> list[Request]:
        """The first samples: as many as are wanted."""
        return [self._request(row, self._wanted(row), tried=0, part=0)]

    def follow_up_requests(
        self, row: PromptRow, completions: Sequence[Completion]
    ) -> list[Request]:
        """A request for more samples, if they are needed and may be tried."""
        if completions[-1].error_code is not None:
            return []
        verdicts = self._verdicts(row, completions)
        tried = len(verdicts.verdicts)
        if verdicts.is_full or tried >= self._config.max_tries:
            return []
        missing = verdicts.wanted - verdicts.count(Verdict.ACCEPTED)
        return [self._request(row, max(missing, tried), tried=tried, part=len(completions))]

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        """The row with the samples that are kept, which may be none."""
        verdicts = self._verdicts(row, completions)
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
        tally = Tally(len(samples), *map(verdicts.count, Verdict))
        return replace(self._finisher.finish(row, whole), tally=tally)

    def _wanted(self, row: PromptRow) -> int:
        assert row.sampling is not None
        return self._config.wanted(row.sampling.params.n)

    def _request(self, row: PromptRow, count: int, *, tried: int, part: int) -> Request:
        assert row.sampling is not None
        count = min(count, self._config.max_tries - tried)
        sampling = replace(row.sampling, params=replace(row.sampling.params, n=count))
        request = self._requests.make(replace(row, sampling=sampling))
        return replace(request, first_sample=tried, part=part)

    def _verdicts(self, row: PromptRow, completions: Sequence[Completion]) -> RowVerdicts:
        samples = (
            (output_text(self._tokenizer, output, one.request.params), len(output.token_ids))
            for one in completions
            for output in one.outputs
        )
        return self._judge.judge(samples, self._wanted(row))
