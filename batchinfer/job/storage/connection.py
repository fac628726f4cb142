"""Connections to object stores (S3, Google Cloud Storage), by way of obstore.

Credentials, region and endpoint come from the environment (``AWS_*``, ``GOOGLE_*``) or the
machine's role, never from a job. What a store does not answer is asked for again, with growing
pauses, by obstore.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from batchinfer.console.format import first_line, printable
from batchinfer.errors import StorageError, UsageError, install_command

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Connection

RETRY: Mapping[str, Any] = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}
IMPATIENT: Mapping[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=10)}
_LAST_TRY = timedelta(seconds=20)
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_REFUSALS = (
    *("PermissionDeniedError", "UnauthenticatedError", "InvalidPathError"),
    "PreconditionError",  # it was written again
)
_MISSING = re.compile(r"status code: 404\b")
_REFUSED = re.compile(r"status code: 4\d\d")
"""Errors of obstore, and words in others, of a store that answers and refuses."""
_ASKED_FOR_ROLE = re.compile("/latest/(api/token|meta-data)|/computeMetadata/")
"""Paths at which a cloud's machine tells its role; asked for where no credentials are given."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set (a profile's are printed by: "
    "aws configure export-credentials --format env)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS is not set",
}


@cache
def connect(bucket: str, *, impatient: bool = False) -> Connection:
    """The connection to a bucket, ``s3://name`` or ``gs://name``, made once.

    Args:
        bucket: scheme and name.
        impatient: give up within half a minute, in place of some minutes.

    Raises:
        UsageError: obstore is not installed.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        raise UsageError(
            f"{printable(bucket)} needs the package obstore: {install_command('s3')}"
        ) from None
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    client: dict[str, Any] = {"allow_http": plain, **({"timeout": _LAST_TRY} if impatient else {})}
    options: Any = {"client_options": client, "retry_config": IMPATIENT if impatient else RETRY}
    with errors(bucket, "read"):
        return from_url(bucket, **options)


@contextmanager
def errors(url: str, verb: str) -> Iterator[None]:
    """Turn obstore's errors into short ones that name ``url``.

    Args:
        url: the object or bucket.
        verb: ``read`` or ``write``.

    Raises:
        FileNotFoundError: there is no such object, or no such bucket.
        OSError: the store refuses.
        StorageError: the store does not answer.
    """
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError("there is no such object") from None
    except Exception as error:
        kind = type(error)
        if not kind.__module__.startswith("obstore"):
            raise
        reason = first_line(error)
        if _ASKED_FOR_ROLE.search(reason):
            missing = _CREDENTIALS[url.partition(":")[0]]
            reason = f"no credentials: {missing}, and this machine tells no role: {reason}"
        elif _MISSING.search(reason):  # of a list, obstore has no kind of its own for that
            raise FileNotFoundError("there is no such bucket") from None
        if kind.__name__ in _REFUSALS or _REFUSED.search(reason):
            raise OSError(reason) from None
        raise StorageError(
            f"cannot {verb} {printable(url)}: {reason}",
            hint="see to the store, then run again: finished rows are kept",
        ) from None
