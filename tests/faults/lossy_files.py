"""A file system in memory that may lose, tear or reorder writes that are not synced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from random import Random
from typing import BinaryIO

from batchinfer.job.storage.filesystem import FileStat


@dataclass
class File:
    data: bytes = b""
    synced: bytes = b""
    mtime_ns: int = 0


@dataclass
class Folder:
    """A folder: for each name, the nodes it has had since the folder's last sync, oldest first."""

    names: dict[str, list[Node | None]] = field(default_factory=dict)

    def now(self) -> dict[str, Node]:
        return {name: node for name, [*_, node] in self.names.items() if node is not None}

    def put(self, name: str, node: Node | None) -> None:
        self.names.setdefault(name, [None]).append(node)


Node = File | Folder


class LossyFiles:
    """Implements ``batchinfer.job.storage.filesystem.Files`` in memory, with absolute paths."""

    flush_every_s = 0.0
    parallel_requests = 1

    def __init__(self, root: Folder | None = None) -> None:
        self.root = root or Folder()
        self.after_change: Callable[[], None] = lambda: None
        """Called after every change, and after every sync."""
        self._clock = 0

    def write(self, path: Path, data: bytes) -> None:
        self._clock += 1
        node = self._folder(path.parent).now().get(path.name)
        if not isinstance(node, File):
            node = File()
            self._folder(path.parent).put(path.name, node)
        node.data, node.mtime_ns = data, self._clock
        self.after_change()

    def open(self, path: Path) -> BinaryIO:
        node = self._find(path)
        if not isinstance(node, File):
            raise FileNotFoundError(2, "No such file", str(path))
        return BytesIO(node.data)

    def sync(self, path: Path) -> None:
        node = self._find(path)
        if isinstance(node, File):
            node.synced = node.data
        elif isinstance(node, Folder):
            node.names = {name: [child] for name, child in node.now().items()}
        else:
            raise FileNotFoundError(2, "No such file", str(path))
        self.after_change()

    def rename(self, source: Path, target: Path) -> None:
        node = self._find(source)
        assert isinstance(node, File)
        self._folder(source.parent).put(source.name, None)
        self._folder(target.parent).put(target.name, node)
        self.after_change()

    def copy(self, source: Path, target: Path, staging: Path) -> None:
        node = self._find(source)
        if not isinstance(node, File):
            raise FileNotFoundError(2, "No such file", str(source))
        self._folder(target.parent).put(target.name, node)
        self.after_change()

    def delete(self, path: Path) -> None:
        if self._find(path) is not None:
            self._folder(path.parent).put(path.name, None)
            self.after_change()

    def make_directory(self, path: Path) -> None:
        if self._find(path) is None:
            self.make_directory(path.parent)
            self._folder(path.parent).put(path.name, Folder())
            self.after_change()
            self.sync(path.parent)

    def can_write(self, directory: Path) -> bool:
        return True

    def entries(self, directory: Path) -> list[Path]:
        node = self._find(directory)
        return [directory / name for name in sorted(node.now())] if isinstance(node, Folder) else []

    def stat(self, path: Path) -> FileStat | None:
        node = self._find(path)
        if node is None:
            return None
        return FileStat(len(node.data), node.mtime_ns) if isinstance(node, File) else FileStat(0, 0)

    def after_power_loss(self, random: Random) -> LossyFiles:
        """Return the file system as a power failure may leave it.

        A name refers to any of the nodes that it has referred to since its folder's last sync. A
        file holds its synced data, or part of its new data.
        """
        found = type(self)(_folder_found(self.root, random, random.random(), {}))
        found._clock = self._clock
        return found

    def _find(self, path: Path) -> Node | None:
        node: Node | None = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Folder):
                return None
            node = node.now().get(name)
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._find(path)
        if not isinstance(node, Folder):
            raise FileNotFoundError(2, "No such folder", str(path))
        return node


class NeverSynced(LossyFiles):
    """A file system whose syncs do nothing."""

    def sync(self, path: Path) -> None:
        self.after_change()


def _folder_found(folder: Folder, random: Random, loss: float, seen: dict[int, Node]) -> Folder:
    """Return a folder as a power failure may leave it.

    Args:
        folder: the folder before the failure.
        random: decides which changes are lost.
        loss: the probability that a change is lost.
        seen: files that other names refer to as well.
    """
    found = Folder()
    for name, history in folder.names.items():
        node = history[-1]
        if len(history) > 1 and random.random() < loss:
            node = random.choice(history[:-1])
        if node is None:
            continue
        if id(node) not in seen:
            seen[id(node)] = (
                _folder_found(node, random, loss, seen)
                if isinstance(node, Folder)
                else _file_found(node, random, loss)
            )
        found.names[name] = [seen[id(node)]]
    return found


def _file_found(file: File, random: Random, loss: float) -> File:
    data = file.data
    if data != file.synced and random.random() < loss:
        cut = random.randrange(len(data) + 1)
        zeroed = data[:cut] + bytes(len(data) - cut)
        data = random.choice([file.synced, data[:cut], zeroed])
    return File(data, data, file.mtime_ns)
