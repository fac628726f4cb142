"""Where the output of a killed job goes, and what is found there: read without the code that is
tested, and without its threads, which do not outlive a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import boto3

from tests.job.stores import BUCKET, LAKE


class Output(Protocol):
    """An output directory for one job after another."""

    def begin(self, place: Path) -> None:
        """Take a new one; ``place`` is a folder for what belongs to its job."""
        ...

    @property
    def path(self) -> str:
        """For ``output.path``."""
        ...

    def files(self) -> dict[str, bytes]:
        """All files by their paths below it, in the order of names."""
        ...


class InFolder:
    """On this machine."""

    def begin(self, place: Path) -> None:
        self._root = place / "out"

    @property
    def path(self) -> str:
        return str(self._root)

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in self._root.rglob("*") if path.is_file())
        return {str(path.relative_to(self._root)): path.read_bytes() for path in found}


class InBucket:
    """In a store; the environment says where."""

    def __init__(self, address: str) -> None:
        self._client = boto3.client("s3", endpoint_url=address)
        self._count = 0

    def begin(self, place: Path) -> None:
        self._count += 1
        self._key = f"killed/{self._count}/"

    @property
    def path(self) -> str:
        return f"{LAKE}/{self._key}"

    def files(self) -> dict[str, bytes]:
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=self._key).get("Contents", [])
        return {entry["Key"].removeprefix(self._key): self._read(entry["Key"]) for entry in found}

    def _read(self, key: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
