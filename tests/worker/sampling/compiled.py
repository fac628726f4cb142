"""Records the variants of sampling kernels that a GPU would compile and launch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from batchinfer.builders.context import EngineContext
from batchinfer.builders.engine import build_engine
from batchinfer.config import SamplingParams
from batchinfer.engine.request import Request
from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.worker.sampling.kernel_variants import SamplingVariants
from batchinfer.worker.sampling.on_device import draw_on_device
from tests.engine.fake import make_engine, run_all

VOCAB = 1024
"""Number of logits per row if no model is loaded."""
Variant = tuple[Any, ...]
"""A kernel, and what it is compiled for: the dtypes of tensors and the values of other
arguments."""
_JUDGES: Variant = ("row_stats",)
"""The kernel that computes log-probabilities of prompts."""


class Compiled:
    """Records the variants that launches need, without launching kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.vocab = VOCAB
        self._variants: set[Variant] = set()
        monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **named: self._note(*args))

    def _note(self, kernel: Any, *arguments: Any) -> None:
        signature = map(_signature, arguments)
        self._variants.add((kernel.fn.__name__, *signature))

    def ahead(self, *params: SamplingParams, **facts: Any) -> set[Variant]:
        """Return the variants of all kinds of steps that these parameters lead to."""
        kinds = SamplingVariants.of(params, self.vocab, **facts)
        judges = {_JUDGES} if kinds.scores else set()
        return judges.union(*map(self.drawing, kinds.batches()))

    def in_steps(self, requests: list[Request]) -> set[Variant]:
        """Return the variants that the steps of requests need."""
        engine, runner = make_engine(32)
        run_all(engine, requests)
        return set[Variant]().union(*map(self.of_step, runner.steps))

    def of_step(self, step: Step) -> set[Variant]:
        """Return the variants that one step needs."""
        variants = {_JUDGES} if step.scored is not None else set()
        if step.num_samples:
            variants |= self.drawing(step.sampling, len(step.logits_indices))
        return variants

    def drawing(self, batch: SamplingBatch, num_rows: int = 1) -> set[Variant]:
        """Return the variants that draw the samples of a batch."""
        self._variants = set()
        draw_on_device(torch.zeros(num_rows, self.vocab), batch)
        return self._variants


class WatchedEngines:
    """Builds engines on a CPU, and records the variants that their warm-up and steps need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._compiled = Compiled(monkeypatch)
        self._monkeypatch = monkeypatch
        self._ahead: set[Variant] = set()
        self.in_steps: set[Variant] = set()
        """Variants that steps needed."""
        self.late: set[Variant] = set()
        """Variants that a step needed before they were compiled."""

    def build(self, *arguments: Any, **named: Any) -> EngineContext:
        """Build an engine like ``build_engine``."""
        context = build_engine(*arguments, **named)
        runner: Any = context.engine._runner
        submit, self._compiled.vocab = runner.submit, context.vocab_size

        def note(step: Step) -> Any:
            needed = self._compiled.of_step(step)
            self.in_steps |= needed
            self.late |= needed - self._ahead
            return submit(step)

        self._monkeypatch.setattr(runner, "submit", note)
        return replace(context, warm_up=self._warm_up)

    def _warm_up(
        self,
        params: Iterable[SamplingParams],
        *,
        own: Collection[str] = (),
        forced_tokens: bool = False,
    ) -> None:
        self._ahead |= self._compiled.ahead(*params, own=own, forced_tokens=forced_tokens)


def _signature(argument: Any) -> Any:
    """Return the dtype of a tensor, or the value of another argument."""
    if isinstance(argument, tuple):
        return tuple(map(_signature, argument))
    return argument.dtype if isinstance(argument, torch.Tensor) else argument
