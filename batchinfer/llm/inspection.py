"""What an ``LLM`` says of itself and of its calls: facts, numbers, a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.builders.context import EngineContext
from batchinfer.llm.calls import Calls, OneCall
from batchinfer.llm.outputs import Stats
from batchinfer.llm.vllm.engine_view import EngineView, ModelView
from batchinfer.llm.vllm.metrics import Metric, read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Inspection:
    """Facts and statistics of an ``LLM``."""

    _calls: Calls
    _context: EngineContext
    _has_tokenizer: bool
    _one_call: OneCall
    _settings: dict[str, Any]
    _source: tuple[str, str | None]
    _view: EngineView

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix that is kept for later prompts; waits for the call that runs."""
        with self._one_call("reset_prefix_cache"):
            self._context.engine.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loads it.

        Raises:
            ValueError: ``skip_tokenizer_init`` was given.
        """
        if not self._has_tokenizer:
            raise ValueError("there is no tokenizer; leave skip_tokenizer_init out")
        from transformers import AutoTokenizer

        name, revision = self._source
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
        return tokenizer

    @property
    def llm_engine(self) -> EngineView:
        """Sizes and settings of the engine under vLLM's names, to read."""
        return self._view

    @property
    def model_config(self) -> ModelView:
        """``llm_engine.model_config``."""
        return self._view.model_config

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self._context.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._context.vocab_size

    def stats(self) -> Stats:
        """``tokens``, ``throughput`` and ``kv`` of all calls so far, as in ``summary.json``.

        A dict, which a notebook shows as a table. Never waits: of a call that runs, the steps that
        it is done with count.
        """
        return self._calls.stats()

    def get_metrics(self) -> list[Metric]:
        """Tokens, hits of the prefix cache and preemptions of all calls so far, and what runs now,
        under vLLM's names; never waits. ``stats`` has more."""
        return read_metrics(
            self.stats(),
            str(self._settings["model"]["name"]),
            num_running=self._context.engine.num_running,
            num_waiting=self._context.engine.num_waiting,
        )

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        price_per_hour: float | None = None,
        currency: str = "USD",
    ) -> Path:
        """Write an HTML page about all calls so far: memory, speed, lengths. Never waits.

        Args:
            path: where to write it.
            price_per_hour: of the machine, to say what the calls cost.
            currency: of the price, as its code.

        Raises:
            OSError: it cannot be written.
        """
        from batchinfer.report.page import page
        from batchinfer.report.report_data import Price

        price = None if price_per_hour is None else Price(price_per_hour, currency)
        data = self._calls.report_data(str(self._settings["model"]["name"]), self._settings)
        Path(path).write_bytes(page(data, price).encode())
        return Path(path)

    def reset_stats(self) -> None:
        """Begin ``stats`` anew. Never waits: of a call that runs, the steps to come count."""
        self._calls.reset()
