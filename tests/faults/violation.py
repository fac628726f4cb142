"""The error that fault tests raise."""

from __future__ import annotations


class ViolationError(AssertionError):
    """A promise was broken."""
