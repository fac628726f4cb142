"""The error that tests against faults raise."""

from __future__ import annotations


class ViolationError(AssertionError):
    """A promise was broken."""
