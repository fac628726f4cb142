"""Run many cases in worker processes, which a case may kill, and collect the results.

A case is a function of its number, the seed and a folder. It returns a word for the result, and
raises an error if a promise is broken. Workers report each case when it ends, so the case that
kills a worker or never ends is known, and the other cases still run.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.faults.violation import ViolationError

MOST_S = 5.0
"""Maximum number of seconds that a case may take."""
_DEAD_S = 60.0
"""A worker that stays silent for this many seconds beyond ``most_s`` is killed."""

Case = Callable[[int, int, Path], str]
"""Runs a case, given its number, the seed and a folder; returns a word for the result."""


@dataclass
class Found:
    """Results of many cases."""

    words: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def take(self, number: int, word: str | None, trouble: str) -> None:
        """Count a case by its word; a case without a word is a violation."""
        if word is None:
            self.violations.append(f"case {number}: {trouble}")
        else:
            self.words[word] += 1


def run_cases(
    case: Case, count: int, seed: int, folder: Path, jobs: int, most_s: float = MOST_S
) -> Found:
    """Run ``count`` cases in ``jobs`` processes; each case may take ``most_s`` seconds."""
    shares = [range(job, count, jobs) for job in range(jobs)]
    worker = partial(_run_worker, case, seed, folder, most_s)
    found = Found()
    with ThreadPoolExecutor(jobs) as pool:
        for share in pool.map(partial(_run_share, worker), shares):
            found.words += share.words
            found.violations += share.violations
    return found


def _run_share(worker: Callable[[range, Found], int], numbers: range) -> Found:
    found = Found()
    while numbers:
        numbers = numbers[worker(numbers, found) :]
    return found


def _run_worker(
    case: Case, seed: int, folder: Path, most_s: float, numbers: range, found: Found
) -> int:
    """Run cases in a process until it dies; return how many ran, including one that killed it."""
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    place = folder / f"worker-{numbers[0]}"
    place.mkdir(exist_ok=True)
    arguments = (case, numbers, seed, place, most_s, sender)
    worker = get_context("spawn").Process(target=_work, args=arguments)
    worker.start()
    sender.close()
    done = 0
    try:
        while done < len(numbers):
            if not receiver.poll(most_s + _DEAD_S):
                found.take(numbers[done], None, f"nothing for {most_s + _DEAD_S:.0f} s")
                return done + 1
            found.take(*receiver.recv())
            done += 1
    except EOFError:
        found.take(numbers[done], None, f"it killed the process ({_death_of(worker)})")
        done += 1
    finally:
        worker.kill()
        worker.join()
        receiver.close()
    return done


def _death_of(worker: BaseProcess) -> str:
    worker.join(10)
    return f"exit code {worker.exitcode}"


def _work(
    case: Case, numbers: range, seed: int, folder: Path, most_s: float, sender: Connection
) -> None:
    signal.signal(signal.SIGALRM, _late)
    for number in numbers:
        word, trouble = None, ""
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, most_s)
        try:
            word = case(number, seed, folder)
        except BaseException:
            trouble = traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if word is not None and time.monotonic() - began > most_s:
            word, trouble = None, f"took {time.monotonic() - began:.1f} s"
        sender.send((number, word, trouble))


def _late(_number: int, _frame: object) -> None:
    raise ViolationError("took too long")
