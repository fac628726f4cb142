"""The group of commands: what it says of options that there are not, and of their values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

_OF_VALUES = (
    (re.compile(r"Value error, "), ""),
    (re.compile(r"Input should be a valid integer.*"), "it must be a whole number"),
    (re.compile(r"Input should be a valid number.*"), "it must be a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"it must be \1 or more"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"it must be \1 or less"),
)
"""Pydantic's words, in which Typer tells of a value, and those of the job file's errors."""


class Commands(TyperGroup):
    """Commands that name one near option, in the words in which Typer names a near command, and
    what a value must be in those of the job file's errors."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _in_own_words():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _in_own_words():
            return super().invoke(ctx)


@contextmanager
def _in_own_words() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # NoSuchOption, whichever copy of Click Typer brings.
        option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
        said: Any = error
        if option is not None and near:
            said.message = f"No such option '{option}'. Did you mean '{near[0]}'?"
            said.possibilities = None
        elif getattr(error, "param", None) is not None:  # BadParameter
            for theirs, own in _OF_VALUES:
                said.message = theirs.sub(own, said.message)
        raise
