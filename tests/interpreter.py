"""Speeds up Triton's interpreter by skipping work that has no effect.

Whenever a kernel calls a function, the interpreter searches all of `triton.language` for functions
to replace, although the launch has already replaced them. This takes half the time of kernels with
many small functions. It also checks each integer sum and product for overflow, but reports overflow
only in debug mode. These checks take a third of the remaining time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

INTERPRETER = "triton.runtime.interpreter"


class _Scope:
    """Undoes the replacements of a launch when it ends."""

    def __init__(self, replaced: set[int], undo: Callable[[], None]) -> None:
        self.replaced, self.undo = replaced, undo

    def restore(self) -> None:
        self.undo()
        self.replaced.clear()


def speed_up() -> None:
    """Patch the interpreter for the rest of the process, if a known version of it is imported."""
    interpreter: Any = sys.modules.get(INTERPRETER)
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter, "_is_sped_up"):
        return
    interpreter._is_sped_up = True
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
