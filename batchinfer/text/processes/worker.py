"""A worker process: it makes prompts from rows, and a row that exceeds a limit kills it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from batchinfer.errors import JobError, RowError
from batchinfer.text.images.files import ImageMemoryError
from batchinfer.text.images.shared_arrays import SharedArrays
from batchinfer.text.processes.limits import Limits, bounded_time
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenizer import Tokenizer

_MAX_BUILDERS = 4

Result = Prompt | RowError


class Builder(Protocol):
    """Makes prompts from rows in two steps."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that ``render`` needs."""
        ...

    def render(self, rows: Sequence[Any]) -> list[Any]:
        """Return the texts to tokenize, or the rows' errors."""
        ...

    def tokenize(self, rendered: Sequence[Any]) -> list[Result]:
        """Return a prompt, arrays of pixels, or an error for each row."""
        ...


BuilderFactory = Callable[..., Builder]
"""Picklable function that makes a builder; takes ``tokenizer`` as a keyword argument."""


def serve(connection: Connection, tokenizer: Tokenizer, limits: Limits) -> None:
    """Answer requests until the other end is closed, or until a row exceeds a limit.

    A request is a pickled ``BuilderFactory``, pickled rows, and the seconds that the rows may take.
    A batch of rows gets less processor time than a single row. A request without rows asks for the
    builder's columns. The files of ``SharedArrays`` follow the results.

    Answers are tuples that begin with a word: ``columns`` (names), ``rendered`` (sent for a single
    row before it is tokenized), ``results`` (a list of ``Result``), ``refused`` (a ``JobError``
    that the factory raised), ``failed`` (``image``, ``memory``, ``recursion``, ``panic`` or
    ``bug``, and a text; the process then ends).
    """
    worker = _Worker(connection, tokenizer, limits)
    try:
        while True:
            worker.answer(*connection.recv())
    except (EOFError, ConnectionError):
        return
    except ImageMemoryError:
        failed = "image", ""
    except MemoryError:
        failed = "memory", ""
    except RecursionError as error:
        failed = "recursion", str(error)
    except Exception:
        failed = "bug", traceback.format_exc()
    except BaseException as error:  # a panic in Rust code is not an Exception
        failed = "panic", str(error)
    connection.send(("failed", *failed))


class _Worker:
    def __init__(self, connection: Connection, tokenizer: Tokenizer, limits: Limits) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._limits = limits
        self._builders: dict[bytes, Builder] = {}
        """The most recently used builders, keyed by pickled factory. A job uses only a few
        factories."""

    def answer(self, factory: bytes, rows: Sequence[bytes], seconds: float) -> None:
        try:
            builder = self._builder(factory, seconds)
        except JobError as error:
            self._connection.send(("refused", error))
            return
        if not rows:
            self._connection.send(("columns", builder.columns))
            return
        limits, is_alone = self._limits, len(rows) == 1
        cpu_seconds = limits.cpu_seconds if is_alone else limits.shared_cpu_seconds
        with bounded_time(cpu_seconds, seconds):
            rendered = builder.render(list(map(pickle.loads, rows)))
            if is_alone:
                self._connection.send(("rendered",))
            results = builder.tokenize(rendered)
        self._connection.send(("results", results))
        for result in results:
            if isinstance(result, SharedArrays):
                result.send(self._connection)

    def _builder(self, factory: bytes, seconds: float) -> Builder:
        builder = self._builders.pop(factory, None)
        if builder is None:
            with bounded_time(self._limits.cpu_seconds, seconds):
                make: BuilderFactory = pickle.loads(factory)
                builder = make(tokenizer=self._tokenizer)
        while len(self._builders) >= _MAX_BUILDERS:
            del self._builders[next(iter(self._builders))]
        self._builders[factory] = builder
        return builder
