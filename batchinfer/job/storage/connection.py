"""Connections to object stores (S3, Google Cloud Storage) through obstore.

Credentials, region and endpoint come from the environment (``AWS_*``, ``GOOGLE_*``) or the
machine's role, never from a job. obstore retries failed requests after increasing delays.
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
    "PreconditionError",  # the object has changed
)
"""Names of the obstore errors for requests that the store refused."""
_MISSING = re.compile(r"status code: 404\b")
_REFUSED = re.compile(r"status code: 4\d\d")
_ROLE_REQUEST = re.compile("/latest/(api/token|meta-data)|/computeMetadata/")
"""Paths of a cloud's metadata service, which obstore asks for a role if it has no credentials."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set (to print the keys of a "
    "profile, run: aws configure export-credentials --format env)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS is not set",
}


@cache
def connect(bucket: str, *, impatient: bool = False) -> Connection:
    """Connect to a bucket, or return the existing connection.

    Args:
        bucket: ``s3://name`` or ``gs://name``.
        impatient: True to fail after half a minute instead of several minutes.

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
    """Turn obstore's errors into short errors that name ``url``.

    Args:
        verb: ``read`` or ``write``.

    Raises:
        FileNotFoundError: there is no such object, or no such bucket.
        OSError: the store refuses the request.
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
        if _ROLE_REQUEST.search(reason):
            missing = _CREDENTIALS[url.partition(":")[0]]
            reason = f"no credentials: {missing}, and this machine has no role: {reason}"
        elif _MISSING.search(reason):  # obstore has no error type for this when it lists objects
            raise FileNotFoundError("there is no such bucket") from None
        if kind.__name__ in _REFUSALS or _REFUSED.search(reason):
            raise OSError(reason) from None
        raise StorageError(
            f"cannot {verb} {printable(url)}: {reason}",
            hint="check the store and the network, then run again; finished rows are kept",
        ) from None
