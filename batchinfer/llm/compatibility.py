"""What becomes of vLLM's arguments and methods that are not here, by the tables in ``vllm.names``.

An argument without effect is taken with a warning that names it, one that is not built is refused
unless it is given with its default, and one that is had in another way is refused with that way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, NoReturn, TypeVar

from batchinfer.console.format import did_you_mean
from batchinfer.errors import NotYetError
from batchinfer.llm.vllm.names import (
    ELSEWHERE,
    METHODS,
    METHODS_NOT_YET,
    NO_EFFECT,
    NO_EFFECT_PREFIXES,
    NOT_YET,
    NOT_YET_OVER_ONE,
    ONLY_VALUES,
    QUIET,
    VALUES_ELSEWHERE,
)

_Record = TypeVar("_Record")


def settle(
    call: str, given: Mapping[str, object], known: Sequence[str], *, stacklevel: int = 3
) -> None:
    """Warn once of the arguments that have no effect, and refuse those that ``call`` does not have.

    Args:
        given: by name; None is as if left out.
        known: names that may have been meant.
        stacklevel: of the warnings; 3 is the line that called what calls this.

    Raises:
        NotYetError: one is not built.
        TypeError: one is had in another way, or unknown.
        ValueError: a value is had in another way.
    """
    ignored = []
    for name, value in given.items():
        if name in NOT_YET or name in NOT_YET_OVER_ONE:
            default = int(name in NOT_YET_OVER_ONE)
            if value is not None and not (isinstance(value, int | float) and value == default):
                raise NotYetError(f"{call}({name}=...)")
        elif name in ELSEWHERE:
            if value is not None and value is not False:
                raise TypeError(f"{call} has no argument {name}; {ELSEWHERE[name]}")
        elif name in ONLY_VALUES or name in NO_EFFECT or name.startswith(NO_EFFECT_PREFIXES):
            if value is None or (name in QUIET and value == QUIET[name]):
                continue
            instead = VALUES_ELSEWHERE.get((name, value)) if isinstance(value, str) else None
            if instead is not None:
                raise ValueError(f"{call}({name}={value!r}) is not there; {instead}")
            if name in ONLY_VALUES and value not in ONLY_VALUES[name]:
                raise NotYetError(f"{call}({name}={value!r})")
            ignored.append(name)
        else:
            raise TypeError(f"{call} has no argument {name}{did_you_mean(name, known)}")
    if ignored:
        has = "has" if len(ignored) == 1 else "have"
        warnings.warn(f"{call}: {', '.join(ignored)} {has} no effect here", stacklevel=stacklevel)


def missing_attribute(name: str) -> Callable[..., NoReturn]:
    """A method of vLLM's ``LLM`` that is not built: calling it raises ``NotYetError``.

    Raises:
        AttributeError: of another name; with what to use in its place, where that is known.
    """
    if name in METHODS_NOT_YET:

        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotYetError(f"LLM.{name}")

        return refuse
    if name in METHODS:
        raise AttributeError(f"LLM has no {name}: {METHODS[name]}")
    raise AttributeError(f"LLM has no attribute {name}")


def takes_unknown_fields(record: type[_Record]) -> type[_Record]:
    """A dataclass that warns of arguments that it has no fields for, and drops them."""
    made: Any = record
    make, known = made.__init__, {entry.name for entry in fields(made)}

    @wraps(make)
    def init(self: _Record, *args: Any, **given: Any) -> None:
        for name in given.keys() - known:
            warnings.warn(f"{record.__name__}: {name} has no effect here", stacklevel=2)
            del given[name]
        make(self, *args, **given)

    made.__init__ = init
    return record
