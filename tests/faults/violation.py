"""What tests against faults raise."""

from __future__ import annotations


class ViolationError(AssertionError):
    """Something was promised and is not so."""
