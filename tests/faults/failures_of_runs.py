"""Failures with exit codes 3 to 8: data, model, device, lock and storage."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from batchinfer.builders import engine as build
from batchinfer.job.run import run_job as run_module
from batchinfer.job.storage import local_lock
from batchinfer.job.storage.filesystem import LocalFiles
from tests.faults.failures import JOB, Failure, Place
from tests.job.datasets import rot

RUN = ["run", "job.yaml", "--quiet", "--no-report"]


def _data(change: Callable[[Path], object] = lambda path: None, **columns: object) -> Failure:
    """Return a failure of a job with these columns, whose file is first modified by ``change``."""

    def failure(place: Place) -> list[str]:
        place.job()
        change(place.data(**columns))
        return RUN

    return failure


def _job(old: str, new: str, **columns: object) -> Failure:
    def failure(place: Place) -> list[str]:
        place.job(JOB.replace(old, new))
        place.data(**columns)
        return RUN

    return failure


def _two_files(place: Place) -> list[str]:
    place.job(JOB.replace("in.parquet", "in"))
    place.data("in/a.parquet", prompt=["a"], n=[1])
    place.data("in/b.parquet", prompt=["a"], n=["1"])
    return RUN


def _later(change: Callable[[Place], object], command: list[str] = RUN) -> Failure:
    """Return a failure of a job whose files ``change`` modifies after the job has finished."""

    def failure(place: Place) -> list[str]:
        place.finished()
        change(place)
        return command

    return failure


def _unfinished(place: Place) -> None:
    (place.folder / "out" / "_SUCCESS").unlink()
    (place.folder / "out" / "_batchinfer" / "parts" / "part-00000.json").unlink()


def _written_again(place: Place) -> None:
    place.data(prompt=["a", "b", "d"])


def _manifests(place: Place) -> None:
    for name in ("manifest.json", "manifest-copy.json"):
        (place.folder / "out" / "_batchinfer" / name).write_text("{}")


def _overwritten(place: Place) -> None:
    rot(place.folder / "out" / "data" / "part-00000.parquet")


def _too_many_errors(place: Place) -> list[str]:
    place.job()
    place.data(prompt=["a", "", None])
    return RUN


def _model(change: Callable[[Path], object], old: str = "", new: str = "") -> Failure:
    """Return a failure with a copy of the tiny model's folder that ``change`` has modified."""

    def failure(place: Place) -> list[str]:
        folder = place.folder / "tiny"
        shutil.copytree(place.model, folder)
        change(folder)
        return _on_tiny(place, old, new)

    return failure


def _on_tiny(place: Place, old: str, new: str) -> list[str]:
    place.patch.setattr(run_module, "_default_builder", lambda: build.build_engine)
    place.patch.setattr(torch.cuda, "is_available", lambda: False)
    place.patch.setenv("HF_HUB_OFFLINE", "1")
    place.job(JOB.replace("NAME", "./tiny").replace(old, new))
    place.data()
    return RUN


def _config(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _cut(path: Path, share: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def _bin_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _one_tensor_less(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _hub(place: Place) -> list[str]:
    return _on_tiny(place, "./tiny", "somebody/some-model")


def _engine(line: str) -> Failure:
    return _model(lambda folder: None, "sampling:", f"engine: {line}\nsampling:")


def _held(place: Place) -> list[str]:
    place.finished()
    _unfinished(place)
    state = place.folder / "out" / "_batchinfer"
    held = FileLock(state / local_lock.LOCK)
    held.acquire()
    ask = local_lock.LocalLock._living_holder
    place.patch.setattr(
        local_lock.LocalLock, "_living_holder", lambda lock: _and_release(held, ask, lock)
    )
    (state / local_lock.HOLDER).write_text(json.dumps(local_lock.this_process()))
    return RUN


def _and_release(
    held: FileLock, ask: Callable[[local_lock.LocalLock], object], lock: local_lock.LocalLock
) -> object:
    try:
        return ask(lock)
    finally:
        held.release()


def _keeping(number: int, name: str) -> Failure:
    """Return a failure on a file system that cannot delete files with the prefix ``name``."""

    def failure(place: Place) -> list[str]:
        delete = LocalFiles.delete

        def refuse(self: LocalFiles, path: Path) -> None:
            if path.name.startswith(name):
                raise OSError(number, os.strerror(number), str(path))
            delete(self, path)

        place.patch.setattr(LocalFiles, "delete", refuse)
        return _data()(place)

    return failure


def _refusing(number: int, folder: str) -> Failure:
    """Return a failure on a file system that cannot write files under ``folder``."""

    def failure(place: Place) -> list[str]:
        write = LocalFiles.write

        def refuse(self: LocalFiles, path: Path, data: bytes) -> None:
            if path.name.startswith(folder):
                raise OSError(number, os.strerror(number), str(path))
            write(self, path, data)

        place.patch.setattr(LocalFiles, "write", refuse)
        return _data()(place)

    return failure


def _in_the_way(name: str) -> Failure:
    def failure(place: Place) -> list[str]:
        path = place.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        return _data()(place)

    return failure


def _not_writable(place: Place) -> list[str]:
    place.patch.setattr(LocalFiles, "can_write", lambda self, directory: False)
    return _data()(place)


def _text(prompt: str) -> Callable[[Place], object]:
    return lambda place: place.job(JOB.replace("max_tokens: 8", prompt))


def _empty_folder(place: Place) -> list[str]:
    (place.folder / "in").mkdir()
    place.job(JOB.replace("in.parquet", "in"))
    return RUN


def _text_file(name: str, content: bytes) -> Failure:
    """Return a failure of a job that reads a text file."""

    def failure(place: Place) -> list[str]:
        place.job(JOB.replace("in.parquet", name))
        (place.folder / name).write_bytes(content)
        return RUN

    return failure


RUNS: dict[str, Failure] = {
    "3 more row errors than allowed": _too_many_errors,
    "4 no input file": lambda place: place.job() and RUN,
    "4 a folder without Parquet": _empty_folder,
    "4 an empty file": _data(lambda path: path.write_bytes(b"")),
    "4 no Parquet file": _data(lambda path: path.write_text("a,b\n1,2\n")),
    "4 a truncated file": _data(_cut),
    "4 a flipped bit": _data(rot),
    "4 a missing prompt column": _job("column: prompt", "column: text"),
    "4 a missing id column": _job("in.parquet", "in.parquet, id_column: key"),
    "4 a missing column to keep": _job("in.parquet", "in.parquet, keep_columns: [prompt, n]"),
    "4 an id that is a list": _job("in.parquet", "in.parquet, id_column: k", prompt=["a"], k=[[1]]),
    "4 a prompt that is a number": _data(prompt=[1, 2]),
    "4 a prompt that is a list view": _job(
        "column: prompt", "token_ids_column: ids", ids=pa.array([[1, 2]], pa.list_view(pa.int64()))
    ),
    "4 an unknown sampling parameter": _data(prompt=["a"], sampling_params=[{"temprature": 1.0}]),
    "4 files that differ": _two_files,
    "4 a text file in UTF-16": _text_file("in.jsonl", '{"prompt": "a"}'.encode("utf-16")),
    "4 CSV in Latin-1": _text_file("in.csv", "prompt,\xe9\na,b\n".encode("latin-1")),
    "4 CSV with a quote left open": _text_file("in.csv", b'prompt,b\n"a,b\nc,d\n'),
    "4 CSV with two columns of a name": _text_file("in.csv", b"prompt,b,b\na,b,c\n"),
    "4 CSV of which no record is right": _text_file("in.csv", b"prompt,b\na\nb\n"),
    "4 an Arrow file cut short": _text_file("in.arrow", b"ARROW1\0\0abc"),
    "4 a folder that is no table": lambda place: (
        place.job(JOB.replace("in.parquet", "in.parquet, format: delta")) and place.data() and RUN
    ),
    "4 more partitions than folders": _job(
        "path: out", "path: out, partition_by: [n]", prompt=["a"] * 1100, n=list(range(1100))
    ),
    "4 a file that was written again": _later(_written_again),
    "4 a damaged plan": _later(_manifests),
    "4 verify of a flipped bit": _later(_overwritten, ["verify", "out"]),
    "4 verify of a folder of another kind": lambda place: ["verify", "."],
    "4 status of a missing folder": lambda place: ["status", "nowhere"],
    "5 no model folder": lambda place: _on_tiny(place, "./tiny", "./tiyn"),
    "5 no such model on the hub": _hub,
    "5 no config": _model(_without("config.json")),
    "5 a config that is no JSON": _model(lambda folder: _cut(folder / "config.json")),
    "5 code in the model folder": _model(_config(auto_map={"AutoModel": "x.Y"})),
    "5 quantized weights": _model(_config(quantization_config={"bits": 4})),
    "5 an unknown family": _model(_config(model_type="llamma")),
    "5 no tokenizer": _model(_without("tokenizer.json")),
    "5 no weights": _model(_without("model.safetensors")),
    "5 weights only as .bin": _model(_bin_only),
    "5 truncated weights": _model(lambda folder: _cut(folder / "model.safetensors")),
    "5 a tensor missing": _model(_one_tensor_less),
    "5 a model longer than it can be": _model(
        lambda folder: None, "name: ./tiny", "name: ./tiny, max_model_len: 100000"
    ),
    "6 no CUDA device": _engine("{device: cuda}"),
    "6 a pool that does not fit": _engine("{kv_cache_memory: 100TiB}"),
    "6 a pool of no block": _engine("{kv_cache_memory: 1KiB}"),
    "7 another run has the lock": _held,
    "7 another key": _later(_text("max_tokens: 9")),
    "7 several other keys": _later(_text("max_tokens: 9, top_p: 0.5, stop: [x]")),
    "7 another input": _later(
        lambda place: (
            place.job(JOB.replace("in.parquet", "b.parquet"))
            and place.data("b.parquet", prompt=["c"])
        )
    ),
    "7 output there, and if_exists is error": _later(
        lambda place: place.job(JOB.replace("path: out", "path: out, if_exists: error"))
    ),
    "7 a stray part": _later(
        lambda place: shutil.copy(
            place.folder / "in.parquet", place.folder / "out" / "data" / "x.parquet"
        )
    ),
    "7 a folder of another program": _in_the_way("out/data/notes.txt"),
    "8 a disk that is full": _refusing(errno.ENOSPC, "part-00000.parquet"),
    "8 a disk that is full before the model is loaded": _refusing(errno.ENOSPC, "manifest"),
    "8 a disk that fails": _refusing(errno.EIO, "run-"),
    "8 a quota that is used up": _refusing(errno.EDQUOT, "part-00000.json"),
    "8 a log of rows in flight that cannot be deleted": _keeping(errno.EPERM, "run-00001"),
    "8 a folder that may not be written to": _not_writable,
    "8 a file where the output goes": _in_the_way("out"),
    "8 an output where no folder can be made": _job("path: out", "path: /proc/x", prompt=["a"]),
    "8 a file where a folder of the output goes": _in_the_way("out/_batchinfer"),
}
"""Failures, keyed by exit code and title."""
