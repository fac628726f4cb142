"""URLs of object stores, taken apart and put together as paths are."""

from __future__ import annotations

from pathlib import PurePosixPath


class StorePath(PurePosixPath):
    """``s3://bucket/folder/name``; equal ones are written alike, with no slash at their end."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    @property
    def bucket(self) -> str:
        """Scheme and bucket."""
        return f"{self.parts[0]}//{self.parts[1]}"

    @property
    def key(self) -> str:
        """What the bucket knows it as."""
        return "/".join(self.parts[2:])
