"""Messages that packages print when they are imported stay off the screen."""

from __future__ import annotations

import logging

import pytest

import batchinfer.worker


@pytest.mark.parametrize("name", ["torchao", "torch.utils._pytree"])
def test_warnings_on_import_are_not_shown(name: str) -> None:
    assert batchinfer.worker.__doc__
    assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
    assert logging.getLogger(name).isEnabledFor(logging.ERROR)
