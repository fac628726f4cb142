"""The error that fault tests raise."""

from __future__ import annotations


class ViolationError(AssertionError):
    """The program broke a promise."""
