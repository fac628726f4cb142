"""Clusters that do not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from batchinfer.errors import DeviceError
from batchinfer.job.fleet.reach import is_reached

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place() -> Iterator[socket.socket]:
    """A port of this machine that nothing listens at."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def address(place: socket.socket) -> str:
    """The place as a cluster's."""
    host, port = place.getsockname()
    return f"{host}:{port}"


def test_a_place_where_nothing_listens(place: socket.socket) -> None:
    with pytest.raises(DeviceError, match=rf"{address(place)} cannot be reached.*start_timeout"):
        is_reached(address(place), 0.5, Event())


def test_the_clusters_place_as_the_environment_names_it(
    place: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address(place))
    with pytest.raises(DeviceError, match=rf"{address(place)} cannot be reached"):
        is_reached("auto", 0.5, Event())
