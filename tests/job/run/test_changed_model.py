"""Model files that change between a stopped run and the next one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode, LockedError
from batchinfer.job.fingerprint import digest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import ONE_PART, prompts, stop_at

HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
FILES = ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json")
ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def stopped(tmp_path: Path) -> Any:
    """Return a stopped job with a model and an adapter."""
    prompts(tmp_path)
    for folder in ("model", "adapter"):
        (tmp_path / folder).mkdir()
    for name in FILES:
        (tmp_path / "model" / name).write_bytes(WEIGHTS)
    (tmp_path / "adapter" / ADAPTER).write_bytes(WEIGHTS)
    model = {"name": str(tmp_path / "model"), "adapters": {"one": str(tmp_path / "adapter")}}
    spec = job(tmp_path, output=ONE_PART, model=model)
    build = FakeBuild(max_num_seqs=4)
    build.before_step = stop_at(40)
    assert run_job(spec, build=build, quiet=True) is ExitCode.INTERRUPTED
    return spec


def change(path: Path) -> None:
    """Change a file's content, but neither its size nor its modification time."""
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", [*FILES, ADAPTER])
def test_changed_model_file_is_named(stopped: Any, tmp_path: Path, name: str) -> None:
    change(tmp_path / ("adapter" if name == ADAPTER else "model") / name)
    owner = "adapter one" if name == ADAPTER else "model"
    what = rf"Differences: the file {name} of the {owner} has changed\nuse --update to "
    with pytest.raises(LockedError, match=what) as raised:
        run_job(stopped, build=FakeBuild(), quiet=True)
    assert raised.value.exit_code == ExitCode.LOCKED
    assert run_job(stopped, build=FakeBuild(), update=True, quiet=True) is ExitCode.OK
    assert verify(OutputDir(tmp_path / "out")).problems == []


def test_new_missing_and_several_model_files_are_named(stopped: Any, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(LockedError) as raised:
            run_job(stopped, build=FakeBuild(), quiet=True)
        return str(raised.value).partition("Differences: ")[2].partition("\n")[0]

    (tmp_path / "model" / "vocab.txt").write_text("a")
    assert refusal() == "the file vocab.txt of the model is new"
    (tmp_path / "model" / "vocab.txt").rename(tmp_path / "vocab.txt")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert refusal() == "the file tokenizer.json of the model is missing"
    change(tmp_path / "model" / "model.safetensors")
    both = "the file model.safetensors of the model, the file tokenizer.json of the model"
    assert refusal() == both


def test_rewritten_model_files_with_the_same_content_resume(stopped: Any, tmp_path: Path) -> None:
    for name in FILES:
        path = tmp_path / "model" / name
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (time.time() - 50,) * 2)
    assert run_job(stopped, build=FakeBuild(), quiet=True) is ExitCode.OK


def test_moved_model_resumes(stopped: Any, tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    moved = {
        "name": str(tmp_path / "moved-model"),
        "adapters": {"one": str(tmp_path / "moved-adapter")},
    }
    spec = job(tmp_path, output=ONE_PART, model=moved)
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK


def forget_content(path: Path) -> None:
    """Rewrite a manifest as earlier versions did; they did not hash weights."""
    plan = json.loads(path.read_bytes())
    model = plan["job"]["model_facts"]["model"]
    model["model.safetensors"] = model["model.safetensors"][:2]
    plan["fingerprint"] = digest(plan["job"])
    path.write_text(json.dumps(plan))


def test_job_of_an_older_version_resumes(stopped: Any, tmp_path: Path) -> None:
    out = OutputDir(tmp_path / "out")
    for path in (out.root / "_batchinfer").glob("manifest*.json"):
        forget_content(path)
    before = json.loads(out.manifest.read_bytes())["fingerprint"]
    assert run_job(stopped, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert json.loads(out.manifest.read_bytes())["fingerprint"] == before
    assert verify(out).problems == []
    assert run_job(stopped, build=FakeBuild(), quiet=True) is ExitCode.OK
    model = tmp_path / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes() + b"x")
    with pytest.raises(LockedError, match=r"the file model\.safetensors of the model has"):
        run_job(stopped, build=FakeBuild(), quiet=True)


def test_moved_branch_names_the_commit_to_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the revision to set."""
    first, second = "a" * 40, "b" * 40
    hub = {None: first}
    commit = "batchinfer.job.model_files.facts.hub_commit"
    monkeypatch.setattr(commit, lambda name, revision: hub.get(revision, revision))
    prompts(tmp_path)
    build = FakeBuild(max_num_seqs=4)
    build.before_step = stop_at(40)
    spec = job(tmp_path, output=ONE_PART, model={"name": "org/model"})
    assert run_job(spec, build=build, quiet=True) is ExitCode.INTERRUPTED

    hub[None] = second
    with pytest.raises(LockedError, match=rf"model\.commit was \"{first}\"") as raised:
        run_job(spec, build=FakeBuild(), quiet=True)
    assert f"model.revision: {first}" in str(raised.value)

    pinned = job(tmp_path, output=ONE_PART, model={"name": "org/model", "revision": first})
    assert run_job(pinned, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert verify(OutputDir(Path(spec.output.path))).problems == []
