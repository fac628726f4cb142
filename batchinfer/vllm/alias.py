"""Makes ``import vllm`` import batchinfer, with a finder in ``sys.meta_path``.

A module of ``vllm`` imports a class from batchinfer only when a program first uses the class,
because importing the class imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from batchinfer.errors import UsageError
from batchinfer.process.process import bound_spinning
from batchinfer.vllm.names import MODULES, VERSION

_NAME = "vllm"
_ANY = DistributionFinder.Context()


class _Distribution(Distribution):
    """The metadata that ``importlib.metadata.version("vllm")`` reads."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {VERSION}\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return Path(__file__).parent / path


class _Loader(Loader):
    """Makes the modules of ``vllm`` look up their names in batchinfer."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES[module.__name__]
        vars(module).update(
            __all__=[name for name in names if not name.startswith("_")],
            __dir__=lambda: [*names],
            __file__=__file__,  # Python shows it in import errors
            __doc__=f"{module.__name__}, as batchinfer provides it.",
            __getattr__=partial(_value, module.__name__),
        )


class _Finder(DistributionFinder):
    """Finds ``vllm``, its modules and its version before Python looks for files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        # These packages have no search path, so their only submodules are those in ``MODULES``.
        return ModuleSpec(fullname, _Loader(), origin="batchinfer", is_package=True)

    def find_distributions(
        self, context: DistributionFinder.Context = _ANY
    ) -> Iterable[Distribution]:
        return [_Distribution()] if context.name in (None, _NAME) else []


def install(*, replace: bool = False) -> None:
    """Make ``import vllm`` import batchinfer in this process, and in processes forked from it.

    Args:
        replace: True to replace vLLM even if it is installed.

    Raises:
        UsageError: vLLM is installed and ``replace`` is False, or vLLM is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _NAME in sys.modules:
        raise UsageError(
            "vllm is imported already",
            hint="call batchinfer.vllm.install() before any import of vllm",
        )
    spec = find_spec(_NAME)
    if not replace and spec is not None and spec.origin is not None:
        raise UsageError(
            f"vllm is installed ({spec.origin})",
            hint="to use batchinfer in its place, give --replace (in Python: replace=True)",
        )
    bound_spinning()  # before the program imports torch
    sys.meta_path.insert(0, _Finder())


def _value(module: str, name: str) -> Any:
    """Return the object that a name in a module of ``vllm`` refers to.

    Raises:
        AttributeError: batchinfer has no such object.
    """
    place = MODULES[module].get(name)
    if place is None:
        raise AttributeError(f"batchinfer, which runs as vllm here, has no {module}.{name}")
    source, _, attribute = place.partition(":")
    return getattr(import_module(source), attribute)
