"""Copies results, as a few files, off a machine that may be taken away at any time.

Also packs the kernels that Triton has compiled, so that the next run does not compile them again.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

RESULTS, LOGS, CACHE = "results.json", "logs.tgz", "triton-cache.tgz"
MOST_BYTES = 15 * 2**20  # larger files than 16 MiB may not leave the machine
_MOST_LOG_BYTES = 2**20  # of one log; the middle of a longer log is left out


class Outbox:
    """Copies the results to a folder every few seconds, and for the last time on ``close``.

    Args:
        work: folder of results, with ``results.json``, ``cells.jsonl`` and ``logs``.
        out: folder that receives the files; each is replaced as a whole.
        cache: folder of Triton's cache, which is copied too, as an archive.
        page: returns names and contents of further text files, given the number of compiled kernels
            that do not fit into the cache's archive.
    """

    def __init__(
        self,
        work: Path,
        out: Path,
        *,
        cache: Path | None = None,
        page: Callable[[int], dict[str, str]] = lambda left_out: {},
        every_s: float = 15.0,
    ) -> None:
        self._work, self._out, self._cache, self._page = work, out, cache, page
        self._every_s = every_s
        self._num_packed = 0
        self._left_out = 0
        self._ends = Event()
        self.error = ""
        """Why the last copy failed; empty after a success."""
        out.mkdir(parents=True, exist_ok=True)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> bool:
        """Copy everything once more. Return True if the copy succeeded within the limit."""
        self._ends.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self.error = f"copying the results took longer than {limit_s:.0f} s"
        return not self.error

    def _run(self) -> None:
        while not self._ends.wait(self._every_s):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        try:
            results = self._work / RESULTS
            if results.exists():
                _replace(self._out / RESULTS, results.read_bytes())
            _replace(self._out / LOGS, _pack_logs(self._work))
            if self._cache is not None:
                self._copy_cache(self._cache)
            for name, text in self._page(self._left_out).items():
                _replace(self._out / name, text.encode())
            self.error = ""
        except Exception as error:  # a full disk, for example; the benchmark goes on
            traceback.print_exc()
            self.error = f"the results were not copied to {self._out}: {error}"

    def _copy_cache(self, cache: Path) -> None:
        folders = complete_folders(cache)
        if len(folders) > self._num_packed:
            content, self._left_out = pack_cache(folders)
            _replace(self._out / CACHE, content)
            self._num_packed = len(folders)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.tmp")
    new.write_bytes(content)
    new.replace(path)


def _pack_logs(work: Path) -> bytes:
    """Pack the logs, and the cells in the order in which they were measured."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for path in sorted([*work.glob("cells.jsonl"), *work.glob("logs/*")]):
            content = path.read_bytes()
            if len(content) > _MOST_LOG_BYTES and path.suffix == ".log":
                half = _MOST_LOG_BYTES // 2
                content = content[:half] + b"\n[...]\n" + content[-half:]
            entry = tarfile.TarInfo(str(path.relative_to(work)))
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def complete_folders(cache: Path) -> list[Path]:
    """Return the folders of a Triton cache whose files are all written, the oldest first."""
    found = []
    for folder in cache.iterdir() if cache.exists() else ():
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        is_kernel = any(name.startswith("__grp__") for name in names)  # written last
        is_launcher = bool(names) and all(name.endswith(".so") for name in names)
        if is_kernel or is_launcher:
            found.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(found)]


def pack_cache(folders: list[Path], most_bytes: int = MOST_BYTES) -> tuple[bytes, int]:
    """Pack folders of a Triton cache in order, until the archive has ``most_bytes`` bytes.

    Returns:
        The archive, and the number of folders that were left out. The oldest folders come first,
        because the first stages of the next run need their kernels.
    """
    packed, left_out = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for folder in folders:
            size = sum(path.stat().st_size for path in folder.iterdir())
            if packed.tell() + size > most_bytes:
                left_out += 1
            else:
                archive.add(folder, folder.name)
    return packed.getvalue(), left_out


def unpack_cache(packed: Path, cache: Path) -> int:
    """Unpack an archive of ``pack_cache``, and return the number of its folders.

    The folder must have the same path as when it was packed, because Triton stores absolute paths.
    """
    try:
        with tarfile.open(packed, "r:gz") as archive:
            archive.extractall(cache, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        shutil.rmtree(cache, ignore_errors=True)
        raise ValueError(f"{packed} cannot be unpacked ({error}); delete it") from error
    return len(complete_folders(cache))
