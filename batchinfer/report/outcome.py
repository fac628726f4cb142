"""How a job came out: the headline, and what it means."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.console.format import duration, whole_percent
from batchinfer.job.run_ids import run_number
from batchinfer.report.report_data import Findings
from batchinfer.report.units import counted, percent


@dataclass(frozen=True)
class Outcome:
    """A headline, begun by the outcome."""

    word: str
    """Such as ``Finished``."""
    rest: str
    """How the sentence goes on."""
    tone: str
    """``good``, ``bad`` or ``used``."""
    then: str = ""
    """What to do, or what happens next."""


def outcome(found: Findings) -> Outcome:
    """How a job came out, or how far it is."""
    if found.state == "so far":
        took = f" in {duration(found.engine_s)}" if found.engine_s else ""
        return Outcome("So far", f": {counted(found.rows_done, 'prompts')}{took}", "used")
    if found.state == "running":
        then = f"{_work(found)}{_errors_so_far(found)}".lstrip()
        return Outcome("Running", f": {_done(found)}{_left(found)}", "used", then)
    if found.state in ("stopped", "failed"):
        return _cut_short(found)
    return _ended(found)


def progress(found: Findings) -> list[tuple[str, float, str]]:
    """Shares of the rows by what became of them: colour, share, what it is."""
    whole = max(1, found.rows_total)
    begun = max(0.0, (found.share or 0.0) - found.rows_done / whole)
    good, failed = found.rows_done - found.rows_failed, found.rows_failed
    left = found.rows_total - found.rows_done
    return [
        ("good", good / whole, f"{counted(good, 'rows')} {'answered' if found.draws else 'ok'}"),
        ("bad", failed / whole, f"{counted(failed, 'rows')} failed"),
        ("used", begun, "running rows, by their tokens"),
        ("rule", 1 - found.rows_done / whole - begun, f"{left:,} not done"),
    ]


def _cut_short(found: Findings) -> Outcome:
    left = found.rows_total - found.rows_done
    stays = "finished rows and drawn tokens stay" if found.draws else "finished rows stay"
    mended = "Once what is said below is mended, the" if found.state == "failed" else "The"
    kept = f"{mended} same command goes on with the {counted(left, 'rows')} left; {stays}."
    word = found.state.capitalize()
    return Outcome(word, f" after {_done(found)}", "bad", f"{kept}{_errors_so_far(found)}")


def _ended(found: Findings) -> Outcome:
    rows, failed = counted(found.rows_total, "rows"), found.rows_failed
    errors = counted(failed, "errors")
    if not found.rows_total:
        return Outcome("Finished", ": there were no rows", "good")
    if not failed:
        every = f"all {rows}" if found.rows_total > 1 else rows
        return Outcome("Finished", f": {every} in {duration(found.wall_s)}{_runs(found)}", "good")
    if found.state == "finished":
        kept = found.rows_total - failed
        done = f": {kept:,} of {rows} {'answered' if found.draws else 'ok'}"
        return Outcome(f"Finished with {errors}", done, "good")
    share = percent(failed / found.rows_total)
    allowed = f"more than the {100 * found.max_error_rate:g}% that the job allows"
    return Outcome(
        f"Finished with {errors}",
        f": {share} of {rows}, {allowed}",
        "bad",
        "All rows are written, but there is no _SUCCESS. Run the failed ones again with "
        "--retry-errors, or raise errors.max_error_rate (run-batch: --max-error-rate) and run "
        "again.",
    )


def _done(found: Findings) -> str:
    """Such as ``5 of 10 rows (50%)``."""
    whole = found.rows_total
    done = whole_percent(found.rows_done / whole if whole else 0.0)
    return f"{found.rows_done:,} of {counted(whole, 'rows')} ({done})"


def _work(found: Findings) -> str:
    """How much is done with what unfinished rows have drawn; "" where that is no more."""
    done = found.rows_done / found.rows_total if found.rows_total else 0.0
    if found.share is None or whole_percent(found.share) == whole_percent(done):
        return ""
    share = whole_percent(found.share)
    return f"{share} of the work is done, with what was done for rows that are not finished."


def _left(found: Findings) -> str:
    if found.phase:
        return f", {found.phase}"
    if found.eta_s is None:
        return ""
    return f", {'at most' if found.eta_is_most else 'about'} {duration(found.eta_s)} left"


def _runs(found: Findings) -> str:
    """How many runs it took; workers beside each other are one."""
    numbers = {run_number(run.name) for run in found.runs}
    return f", in {len(numbers):,} runs" if len(numbers) > 1 else ""


def _errors_so_far(found: Findings) -> str:
    return f" {counted(found.rows_failed, 'rows')} failed." if found.rows_failed else ""
