"""Limits the time of calls that wait for other machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NoReturn, TypeVar

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function in a thread, and return its result.

    If the call takes too long, the thread keeps running, because nothing can stop it. A socket's
    own timeout is not enough: it limits neither name resolution nor a server that sends one byte
    at a time.

    Raises:
        TimeoutError: the call takes longer than ``seconds``.
        OSError: no thread can be started.
        Exception: what ``function`` raises.
    """
    answer: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def call() -> None:
        try:
            result = function()
        except Exception as error:
            answer.put(partial(_raise, error))
        else:
            answer.put(lambda: result)

    try:
        Thread(target=call, daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    try:
        told = answer.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    return told()


def _raise(error: Exception) -> NoReturn:
    raise error
