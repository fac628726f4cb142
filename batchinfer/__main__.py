"""The ``batchinfer`` program, in a process of its own; also ``python -m batchinfer``.

It starts without what no command of it uses.
"""

from __future__ import annotations

import sys

from batchinfer.process import bound_spinning

UNUSED = ("accelerate", "scipy")
"""Packages that transformers imports for every model wherever they are installed: for models spread
over devices, and for training object detectors. A start of 4.5 s takes 0.3 s less without them."""


def skip_optional_imports() -> None:
    """Have imports in this process find ``UNUSED`` missing, as where they are not installed.

    For a process that is ours alone: a notebook may use transformers for more.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: not to be found


def main() -> None:
    """Start the program without what it never uses, and with threads that wait in moderation."""
    skip_optional_imports()
    bound_spinning()
    from batchinfer.cli import main as run_commands

    run_commands()


if __name__ == "__main__":
    main()
