"""The keys of ``logit_bias`` as JSON and YAML write them: texts, each of which is a token id."""

from __future__ import annotations

import re
from collections.abc import Mapping

from batchinfer.job.messages import shown

_PLAIN = re.compile(r"0|[1-9][0-9]{0,17}")


def check_token_keys(biases: object) -> None:
    """Check that every key is the one plain spelling of a token id, so that two keys are two ids.

    What is no mapping is left to the record's own check.

    Raises:
        ValueError: naming the key.
    """
    for key in biases if isinstance(biases, Mapping) else ():
        if not _PLAIN.fullmatch(key):
            raise ValueError(
                f"logit_bias has the key {shown(key)}; its keys are token ids, "
                "written as plain whole numbers like 5"
            )
