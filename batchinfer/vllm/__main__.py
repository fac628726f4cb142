"""Runs a program in which ``import vllm`` imports batchinfer; see ``batchinfer.vllm``."""

from __future__ import annotations

import os
import runpy
import sys

from batchinfer.errors import UsageError
from batchinfer.vllm.alias import install

_USAGE = "usage: python -m batchinfer.vllm [--replace] (-m MODULE | SCRIPT) [ARGUMENT ...]"
_REPLACE = "--replace"


def main(arguments: list[str]) -> None:
    """Run a module or script as ``python`` does; ``arguments`` follow ``-m batchinfer.vllm``."""
    replace = arguments[:1] == [_REPLACE]
    program = arguments[replace:]
    is_module = program[:1] == ["-m"]
    program = program[is_module:]
    if not program or program[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        sys.exit(UsageError.exit_code)
    try:
        install(replace=replace)
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
