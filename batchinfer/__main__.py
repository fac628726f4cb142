"""The ``batchinfer`` program, in a process of its own; also ``python -m batchinfer``."""

from batchinfer.lean import leave_out_unused
from batchinfer.openmp import bound_spinning


def main() -> None:
    """Start the program without what it never uses, and with threads that wait in moderation."""
    leave_out_unused()
    bound_spinning()
    from batchinfer.cli import main as run_commands

    run_commands()


if __name__ == "__main__":
    main()
