"""Rewrites Typer's messages about unknown options and invalid values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

_WORDINGS = (
    (re.compile(r"Value error, "), ""),
    (re.compile(r"Input should be a valid integer.*"), "it must be a whole number"),
    (re.compile(r"Input should be a valid number.*"), "it must be a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"it must be \1 or more"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"it must be \1 or less"),
)
"""Pydantic's messages about invalid values, which Typer shows, with their replacements."""


class Commands(TyperGroup):
    """A command group whose errors about options read like the errors of job files."""

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
    except Exception as caught:
        error: Any = caught
        # Check attributes instead of types: Typer may bring its own copy of Click's error types.
        option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
        if option is not None and near:  # a NoSuchOption error
            error.message = f"No such option '{option}'. Did you mean '{near[0]}'?"
            error.possibilities = None
        elif getattr(error, "param", None) is not None:  # a BadParameter error
            for theirs, own in _WORDINGS:
                error.message = theirs.sub(own, error.message)
        raise
