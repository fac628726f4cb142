"""A child: makes prompts of the rows it is sent, and dies of those that are too much for it."""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batchinfer.errors import JobError, RowError
from batchinfer.text.children import messages
from batchinfer.text.children.limits import Limits, bounded_time
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import Tokenizer

_MAX_BUILDERS = 4


class Builder(Protocol):
    """Makes prompts of rows, in two halves."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that ``render`` needs."""
        ...

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """What of the rows is to be tokenized, or their errors."""
        ...

    def tokenize(self, rendered: Sequence[Any]) -> list[Prompt | RowError]:
        """A prompt or an error for each row."""
        ...


Recipe = Callable[..., Builder]
"""Makes a builder, given a ``tokenizer`` by name; can be pickled."""


def serve(connection: socket.socket, tokenizer: Tokenizer, limits: Limits) -> None:
    """Answer requests until nobody asks any more, or until one is too much.

    A request is a pickled recipe, rows (each pickled; none asks for the builder's columns), whether
    each is to be done alone, and how many seconds each, or all together, may take. Answers are
    tuples that begin with what they are: ``columns`` (names), ``rendered`` (nothing; before a row
    that is done alone is tokenized), ``results`` (of ``messages.packed``: of one row alone, or of
    all), ``refused`` (name of a ``JobError``, its text), ``failed`` (what of: ``memory``,
    ``recursion``, ``panic`` or ``bug``, and a text; the process then ends).
    """
    child = _Child(connection, tokenizer, limits)
    try:
        while True:
            child.answer(*messages.receive(connection))
    except EOFError:
        return
    except MemoryError:
        failed = "memory", ""
    except RecursionError as error:
        failed = "recursion", str(error)
    except Exception:
        failed = "bug", traceback.format_exc()
    except BaseException as error:  # a panic of Rust code is none of Exception
        failed = "panic", str(error)
    messages.send(connection, ("failed", *failed))


class _Child:
    def __init__(self, connection: socket.socket, tokenizer: Tokenizer, limits: Limits) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._limits = limits
        self._builders: dict[bytes, Builder] = {}
        """By recipe, those used last; each call of a job's may have one of a few."""

    def answer(self, recipe: bytes, rows: Sequence[bytes], alone: bool, seconds: float) -> None:
        try:
            builder = self._made(recipe, seconds)
        except JobError as error:
            messages.send(self._connection, ("refused", type(error).__name__, str(error)))
            return
        if not rows:
            messages.send(self._connection, ("columns", builder.columns))
        elif alone:
            for row in rows:
                self._answer_row(builder, row, seconds)
        else:
            with bounded_time(self._limits.shared_cpu_seconds, seconds):
                rendered = builder.render(list(map(pickle.loads, rows)))
                results = builder.tokenize(rendered)
            self._send(results)

    def _made(self, recipe: bytes, seconds: float) -> Builder:
        builder = self._builders.pop(recipe, None)
        if builder is None:
            with bounded_time(self._limits.cpu_seconds, seconds):
                make: Recipe = pickle.loads(recipe)
                builder = make(tokenizer=self._tokenizer)
        while len(self._builders) >= _MAX_BUILDERS:
            del self._builders[next(iter(self._builders))]
        self._builders[recipe] = builder
        return builder

    def _answer_row(self, builder: Builder, row: bytes, seconds: float) -> None:
        with bounded_time(self._limits.cpu_seconds, seconds):
            rendered = builder.render([pickle.loads(row)])
            messages.send(self._connection, ("rendered",))
            results = builder.tokenize(rendered)
        self._send(results)

    def _send(self, results: Sequence[messages.Result]) -> None:
        messages.send(self._connection, ("results", *messages.packed(results)))
