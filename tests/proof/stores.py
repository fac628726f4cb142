"""An S3 server, and a proxy before it that answers one of three requests with 503.

``python -m tests.proof.stores`` prints the addresses of both and ends with its standard input. It
is a program of its own because a process with threads must not fork.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.job.stores import Request, between, s3_server


@contextmanager
def stores() -> Iterator[list[str]]:
    """Start the program; yield the addresses of the server and of the proxy."""
    command = [sys.executable, "-m", "tests.proof.stores"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            yield program.stdout.readline().split()
        finally:
            program.stdin.close()
            program.wait()


def main() -> None:
    times: Counter[tuple[str, str]] = Counter()

    def answer(request: Request) -> int | None:
        times[request.method, request.path] += 1
        return 503 if times[request.method, request.path] % 3 == 1 else None

    with s3_server() as server, between(server, answer) as proxy:
        print(server, proxy, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
