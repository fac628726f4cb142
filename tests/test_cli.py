"""The command line: its output, its imports and its exit codes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from batchinfer.cli import commands as cli
from batchinfer.errors import (
    DataError,
    DeviceError,
    ExitCode,
    JobError,
    LockedError,
    ModelError,
    StorageError,
)
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.process.process import UNUSED
from batchinfer.report.write import report_at_end
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.job_files import MINIMAL, write_job

HEAVY = ("torch", "transformers", "polars", "pyarrow", "tokenizers", "triton", "rich")


@dataclass
class Finished:
    code: int
    out: str
    err: str


Run = Callable[..., Finished]


@pytest.fixture
def batchinfer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the program in this process."""

    def run(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["batchinfer", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        return Finished(int(caught.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., ExitCode]], None]:
    """Return a function that replaces ``run_job``."""

    def install(function: Callable[..., ExitCode]) -> None:
        module = ModuleType("batchinfer.job.run.run_job")
        module.run_job = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "batchinfer.job.run.run_job", module)

    return install


# Fast responses


def in_new_process(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the program in a new process; also return the heavy modules that it imported."""
    code = (
        "import sys\n"
        "sys.argv[0] = 'batchinfer'\n"
        "from batchinfer.cli.commands import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('IMPORTED', *sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    imported = done.stderr.rpartition("IMPORTED")[2].split()
    return done, {name for name in imported if name.partition(".")[0] in HEAVY}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["schema"], 0),
        (["bench"], 2),
        (["run", "no-such-job.yaml"], 2),
        (["validate", "{job}"], 0),
        (["run", "{job}", "--set", "sampling.top_p=2.0"], 2),
    ],
)
def test_help_and_usage_errors_import_nothing_heavy(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    job = str(write_job(tmp_path, MINIMAL + "prompt: {template: '{{ text }}'}"))
    done, heavy = in_new_process(*(argument.format(job=job) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert heavy == set()


@pytest.mark.parametrize(
    ("typed", "found"), [("pl", {"plan"}), ("run --retry", {"--retry-errors"}), ("nothing", set())]
)
def test_shell_completion_of_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, typed: str, found: set[str]
) -> None:
    words = f"batchinfer {typed}"
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    monkeypatch.setenv("_BATCHINFER_COMPLETE", "complete_bash")
    done, heavy = in_new_process()
    assert set(done.stdout.split()) == found
    assert heavy == set()


def test_help_alone_does_not_load_the_job_plane() -> None:
    done, _ = in_new_process("--help")
    assert "pydantic" not in done.stderr
    for command in ("run", "validate", "schema", "bench", "plan", "status", "verify", "report"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("end", ["| true", ">&-"], ids=["reader left", "closed"])
def test_closed_stdout_exits_0(end: str) -> None:
    program = f"{sys.executable} -c 'from batchinfer.cli.commands import main; main()'"
    command = f"set -o pipefail; {program} schema {end}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["schema"], ["validate", "{job}"], ["--help"]])
def test_full_disk_under_stdout_exits_8(tmp_path: Path, arguments: list[str]) -> None:
    job = str(write_job(tmp_path))
    command = [sys.executable, "-m", "batchinfer", *(a.format(job=job) for a in arguments)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == ExitCode.STORAGE
    [line] = done.stderr.splitlines()
    assert line.startswith("cannot write to stdout: its disk is full")


def test_python_m_batchinfer_shows_the_version() -> None:
    command = [sys.executable, "-m", "batchinfer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("batchinfer 0.")


# Commands


@pytest.mark.long
def test_run_does_not_import_unused_packages(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "start.py"
    command = [sys.executable, "-X", "importtime", script, "--child", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0, "stdout has the age of the process"
    imported = {line.split()[-1].partition(".")[0] for line in done.stderr.splitlines() if line}
    assert {"torch", "transformers"} <= imported
    assert not imported & set(UNUSED)


def test_validate_says_ok_in_one_line(batchinfer: Run, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    done = batchinfer("validate", str(job))
    assert (done.code, done.out, done.err) == (0, f"{job}: OK\n", "")


def test_run_passes_its_options_to_run_job(batchinfer: Run, fake_run: Any, tmp_path: Path) -> None:
    calls: list[tuple[JobSpec, dict[str, Any]]] = []

    def run_job(spec: JobSpec, **options: Any) -> ExitCode:
        calls.append((spec, options))
        return ExitCode.OK

    fake_run(run_job)
    job = write_job(tmp_path, MINIMAL + "vars: {ds: null}")
    arguments = ["--set", "sampling.n=2", "--set", "sampling.top_k=3", "--var", "ds=x"]
    arguments += ["--output", str(tmp_path / "o"), "--limit", "4", "--overwrite", "--quiet"]
    assert batchinfer("run", str(job), *arguments).code == 0
    [(spec, options)] = calls
    assert (spec.sampling.n, spec.sampling.top_k, spec.vars) == (2, 3, {"ds": "x"})
    assert (spec.output.path, spec.input.limit) == (str(tmp_path / "o"), 4)
    assert options.pop("report") is report_at_end
    wanted = {"overwrite": True, "retry_errors": False, "update": False, "role": None}
    wanted |= {"quiet": True, "as_json": False, "fleet": None, "display": None}
    wanted["metrics"] = None
    assert options == wanted
    assert batchinfer("run", str(job), "--var", "ds=x", "--no-report").code == 0
    assert calls[1][1]["report"] is None
    assert not logging.getLogger("batchinfer.kernels").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.TOO_MANY_ROW_ERRORS])
def test_run_exits_with_the_code_of_the_job(
    batchinfer: Run, fake_run: Any, tmp_path: Path, code: ExitCode
) -> None:
    fake_run(lambda spec, **options: code)
    assert batchinfer("run", str(write_job(tmp_path))).code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError, 4), (ModelError, 5), (DeviceError, 6), (LockedError, 7), (StorageError, 8)],
)
def test_job_error_prints_message_and_sets_exit_code(
    batchinfer: Run, fake_run: Any, tmp_path: Path, error: type[JobError], code: int
) -> None:
    def run_job(spec: JobSpec, **options: bool) -> ExitCode:
        raise error("\n".join(f"[bold]line {i}" for i in range(20)))

    fake_run(run_job)
    done = batchinfer("run", str(write_job(tmp_path)))
    assert done.code == code
    assert done.err.splitlines() == [f"[bold]line {i}" for i in range(12)]


def test_bug_prints_one_line_and_writes_crash_log(
    batchinfer: Run, fake_run: Any, tmp_path: Path
) -> None:
    def run_job(spec: JobSpec, **options: bool) -> ExitCode:
        (Path(spec.output.path) / "_batchinfer").mkdir(parents=True)
        raise ZeroDivisionError("in the engine")

    fake_run(run_job)
    done = batchinfer("run", str(write_job(tmp_path)))
    assert done.code == ExitCode.BUG
    [line] = done.err.splitlines()
    log = Path(line.split()[-1])
    assert log.parent == tmp_path / "out" / "_batchinfer"
    assert "ZeroDivisionError: in the engine" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rum"], "No such command 'rum'"),
        (["run"], "Missing argument"),
        (["run", "x.yaml", "--limit", "-1"], "--limit"),
        (["paln", "x.yaml"], "Did you mean 'plan'?"),
        (
            ["plan", "x.yaml", "--devise", "cpu"],
            "No such option '--devise'. Did you mean '--device'?",
        ),
        (["status", "out", "--every", "1"], "--every needs --watch"),
        (["run-batch", "-i", "a", "-o", "a", "--model", "m"], "the output file is the input"),
        (
            [
                *["run-batch", "-i", "a", "-o", "b", "--model", "m"],
                "--default-chat-template-kwargs",
                "[1]",
            ],
            "must be an object",
        ),
        (["bench", "--model", "m", "--dtype", "int3"], "--dtype int3: must be one of auto"),
        (["bench", "--model", "m", "--n", "0"], "'--n': it must be 1 or more"),
        (["run", "x.yaml", "--limit", "x"], "'--limit': it must be a whole number"),
        (["report", "o", "--price-per-hour", "x"], "'--price-per-hour': it must be a number"),
        (["run", "x.yaml", "--log-format", "xml"], "'--log-format': 'xml' is not one of"),
    ],
)
def test_usage_errors_exit_2(
    batchinfer: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = batchinfer(*arguments)
    assert done.code == ExitCode.USAGE
    assert says in done.err
    assert done.out == ""
    assert len(done.err.splitlines()) <= 12


@pytest.mark.parametrize(
    ("path", "says"), [(".", "is a folder"), ("no/r.json", "is in a folder that does not exist")]
)
def test_bench_checks_output_json_before_it_runs(
    batchinfer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = batchinfer("bench", "--model", "m", "--output-json", path)
    assert done.code == ExitCode.STORAGE
    assert done.err == f"--output-json {path} {says}\n"
    assert list(tmp_path.iterdir()) == []


def test_status_and_verify_of_a_folder(batchinfer: Run, tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a", "b", ""]})
    spec = job(tmp_path, errors={"max_error_rate": 1})
    run_job(spec, build=FakeBuild(), quiet=True)
    out = spec.output.path
    done = batchinfer("status", out)
    assert (done.code, done.out.splitlines()[1]) == (0, "rows     3 of 3 (100%), 1 failed")
    assert json.loads(batchinfer("status", out, "--json").out)["state"] == "finished"
    done = batchinfer("verify", out)
    assert (done.code, done.out) == (
        0,
        "finished: 1 of 1 parts, 3 rows; everything matches its record\n",
    )
    (Path(out) / "summary.json").unlink()
    assert batchinfer("verify", out).code == ExitCode.DATA
    found = json.loads(batchinfer("verify", out, "--json").out)
    assert (found["ok"], len(found["problems"])) == (False, 1)


def test_a_missing_path_suggests_a_similar_one(batchinfer: Run, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    near = batchinfer("validate", str(job.with_name("jbo.yaml"))).err
    assert f"No such file or directory; did you mean {job}?" in near
    (tmp_path / "prompts").mkdir()
    misspelled = tmp_path / "promts"
    done = batchinfer("run", str(job), "--set", f"input.path={misspelled}")
    assert f"{misspelled} does not exist; did you mean {tmp_path / 'prompts'}?" in done.err


@pytest.mark.parametrize("command", ["run", "run-batch", "plan", "init", "bench"])
def test_help_shows_metavars(batchinfer: Run, command: str) -> None:
    assert " range>" not in batchinfer(command, "-h").out


def test_help_shows_whole_descriptions_of_commands(batchinfer: Run) -> None:
    assert "..." not in batchinfer("-h").out.partition("Commands:")[2]
