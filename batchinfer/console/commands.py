"""The group of commands: what it says of an option that there is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup


class Commands(TyperGroup):
    """Commands that name one near option, in the words in which Typer names a near command."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _near_option():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _near_option():
            return super().invoke(ctx)


@contextmanager
def _near_option() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # NoSuchOption, whichever copy of Click Typer brings.
        option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
        if option is not None and near:
            said: Any = error
            said.message = f"No such option '{option}'. Did you mean '{near[0]}'?"
            said.possibilities = None
        raise
