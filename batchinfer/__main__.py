"""Entry point of the ``batchinfer`` program and of ``python -m batchinfer``."""

from __future__ import annotations

from batchinfer.cli.program import leave_as_asked
from batchinfer.process.process import bound_spinning, leaves_at_once, skip_optional_imports


def main() -> None:
    """Run the program. Skip imports that it never uses, and let idle threads sleep early."""
    leave_as_asked()  # first, because the user may press Ctrl-C during the slow imports
    skip_optional_imports()
    bound_spinning()
    from batchinfer.cli.commands import main as run_commands

    with leaves_at_once():
        run_commands()


if __name__ == "__main__":
    main()
