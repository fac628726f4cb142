"""Triton's interpreter without the work that leads to nothing.

Whenever a kernel calls a function, the interpreter looks through all of `triton.language` for what
it has to replace, though the launch of the kernel has replaced it: half the time of a kernel that
is made of many small functions. Of each sum and product of integers it computes whether it
overflows, and tells nobody unless it is made to debug: a third of the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

INTERPRETER = "triton.runtime.interpreter"


class _Scope:
    """What a launch undoes when it ends."""

    def __init__(self, replaced: set[int], undo: Callable[[], None]) -> None:
        self.replaced, self.undo = replaced, undo

    def restore(self) -> None:
        self.undo()
        self.replaced.clear()


def hasten() -> None:
    """Make it so for the rest of the process, where an interpreter as we know it is imported."""
    interpreter: Any = sys.modules.get(INTERPRETER)
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter, "_hastened"):
        return
    interpreter._hastened = True
    interpreter._patch_lang = _replacing_once(interpreter)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _replacing_once(interpreter: Any) -> Callable[[Any], _Scope]:
    replace_all, language = interpreter._patch_lang, interpreter.tl
    modules = frozenset({id(language), id(language.core)})
    replaced: set[int] = set()

    @cache
    def seen_by(function: Any) -> frozenset[int]:
        return modules.intersection(map(id, function.__globals__.values()))

    def replace_what_is_left(function: Any) -> _Scope:
        seen = seen_by(function)
        if seen and seen <= replaced:
            return _Scope(replaced, lambda: None)
        scope = replace_all(function)
        replaced.update(seen)
        return _Scope(replaced, scope.restore)

    return replace_what_is_left
