"""What goes between this process and its children: length-prefixed pickles over a socket.

What comes *from* a child may be the work of a hostile template, so it is read by an unpickler that
makes plain values only (numbers, texts, bytes, tuples, lists, dicts) and imports nothing.
"""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from batchinfer.errors import RowError
from batchinfer.text.prompts import Prompt, PromptTooLongError
from batchinfer.text.scoring_prompts import ScoredPrompt

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20
GREETING = b"batchinfer: makes prompts\n"
"""What a spawner sends first. Another program that was started in place of a Python does not."""

Result = Prompt | RowError

Wait = Callable[[int], None]
"""Returns once a connection may be ready for one of the events, of ``poll``; it may raise."""


def _wait_in_call(events: int) -> None:
    """Wait where it is sent or received: of a connection that blocks."""


def framed(message: object) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def send(connection: socket.socket, message: object, wait: Wait = _wait_in_call) -> None:
    """Send a message, and wait until that is done.

    Args:
        wait: called before each attempt to send a piece.

    Raises:
        OSError: nobody reads it any more.
    """
    data, sent = memoryview(framed(message)), 0
    while sent < len(data):
        wait(select.POLLOUT)
        with suppress(BlockingIOError):
            sent += connection.send(data[sent:])


def receive(connection: socket.socket, wait: Wait = _wait_in_call) -> Any:
    """The next message of somebody who is trusted, waited for.

    Args:
        wait: called before each attempt to receive a piece.

    Raises:
        EOFError: there is none: the other end is closed.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, wait))
    return pickle.loads(receive_exactly(connection, length, wait))


def receive_exactly(connection: socket.socket, length: int, wait: Wait = _wait_in_call) -> bytes:
    """So many bytes, waited for like ``receive``."""
    data = bytearray()
    while len(data) < length:
        wait(select.POLLIN)
        try:
            piece = connection.recv(min(length - len(data), _CHUNK_BYTES))
        except BlockingIOError:
            continue
        except ConnectionError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


class Inbox:
    """Messages of a child, as they come in."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take_from(self, connection: socket.socket) -> list[Any]:
        """The messages that are complete with what can be read now.

        Raises:
            EOFError: nothing will come any more.
            pickle.UnpicklingError: one is more than plain values.
        """
        try:
            piece = connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        self._data += piece
        return list(self._complete())

    def _complete(self) -> Iterator[Any]:
        begin = 0
        while len(self._data) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, begin)
            end = begin + _LENGTH.size + length
            if len(self._data) < end:
                break
            yield _PlainUnpickler(io.BytesIO(self._data[begin + _LENGTH.size : end])).load()
            begin = end
        del self._data[:begin]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a child sent {module}.{name}")


def packed(results: Sequence[Result]) -> tuple[list[tuple[Any, ...]], bytes]:
    """Results as plain values: a tuple for each, and the token ids of all one after another."""
    entries: list[tuple[Any, ...]] = []
    ids: list[bytes] = []
    for result in results:
        if isinstance(result, PromptTooLongError):
            entries.append((result.num_tokens, result.most, result.what))
        elif isinstance(result, RowError):
            entries.append((result.code, result.message))
        else:
            completions = result.completions if isinstance(result, ScoredPrompt) else ()
            ids.append(result.token_ids.tobytes())
            ids += [completion.tobytes() for completion in completions]
            entries.append(
                (
                    len(result.token_ids),
                    result.text,
                    result.truncated,
                    result.has_control_text,
                    list(map(len, completions)) if isinstance(result, ScoredPrompt) else None,
                    result.first_segment,
                    result.unpooled,
                )
            )
    return entries, b"".join(ids)


def unpacked(entries: Sequence[tuple[Any, ...]], ids: bytes) -> list[Result]:
    """What ``packed`` was given."""
    all_ids = np.frombuffer(ids, dtype=np.int32)
    results: list[Result] = []
    at = 0
    for entry in entries:
        if len(entry) == 2:
            results.append(RowError(*entry))
        elif len(entry) == 3:
            results.append(PromptTooLongError(*entry))
        else:
            length, text, truncated, has_control_text, completion_lengths, *more = entry
            # Copies: a view would keep the token ids of all in memory.
            prompt = all_ids[at : at + length].copy(), text, truncated, has_control_text
            at += length
            if completion_lengths is None:
                results.append(Prompt(*prompt, first_segment=more[0], unpooled=more[1]))
                continue
            completions = []
            for length in completion_lengths:
                completions.append(all_ids[at : at + length].copy())
                at += length
            results.append(ScoredPrompt(*prompt, tuple(completions)))
    return results
