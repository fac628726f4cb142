"""Which commit of a repository on the Hugging Face Hub a revision is."""

from __future__ import annotations

import os
import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0
_YES = {"1", "ON", "YES", "TRUE"}


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit by the hub; offline, the one that was downloaded last; None where nobody knows.

    Args:
        name: of a model's repository.
        revision: a branch, a tag or a commit; None: ``main``.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in _YES:
        from huggingface_hub import HfApi

        try:
            return HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S).sha
        except Exception:  # of several libraries; whether the model is there is seen later
            pass
    return _downloaded(name, revision or "main")


def _downloaded(name: str, revision: str) -> str | None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None
