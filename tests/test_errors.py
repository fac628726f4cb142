"""Messages about packages that are not installed, and what is logged if there is a bug."""

from __future__ import annotations

import tomllib
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

from batchinfer import errors
from batchinfer.cli.program import crash_directory, write_crash_log
from batchinfer.errors import install_command

ROOT = Path(__file__).parents[1]


def distribution(summary: str | None) -> Message:
    made = Message()
    made["Version"] = "3.2.1"
    if summary is not None:
        made["Summary"] = summary
    return made


def test_install_command_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    monkeypatch.setattr(metadata, "metadata", lambda _: distribution(summary))
    assert install_command("s3") == "pip install '.[s3]' in a checkout of this project"


def test_install_command_of_a_checkout_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Message:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", nothing)
    assert install_command("s3").startswith("pip install")


@pytest.mark.parametrize("summary", [None, "Batches of inference requests"])
def test_install_command_names_another_project(
    summary: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "metadata", lambda _: distribution(summary))
    assert install_command("s3").startswith(
        "pip uninstall batchinfer (version 3.2.1, which is another project's), then pip install"
    )


def test_no_message_suggests_pip_install_batchinfer() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("jobs/**/*.md")]
    code = (ROOT / "batchinfer").rglob("*.py")
    for path in [*pages, *code, Path(errors.__file__)]:
        assert "pip install batchinfer" not in path.read_text(), path
        assert "pip install 'batchinfer" not in path.read_text(), path


@pytest.mark.parametrize("exists", [True, False])
def test_crash_log_is_written_to_an_existing_output_directory(tmp_path: Path, exists: bool) -> None:
    directory = tmp_path if exists else tmp_path / "missing"
    with pytest.raises(ZeroDivisionError) as caught, crash_directory(directory):
        raise ZeroDivisionError("oh \udcff no")
    log = write_crash_log(caught.value)
    assert "ZeroDivisionError: oh \\udcff no" in log.read_text()
    assert (log.parent == directory) == exists
    assert directory.exists() == exists
    log.unlink()
