"""Writes the texts of a report: its headline, key figures and captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.console.format import counted, duration, pool_blocks, size, whole_percent
from batchinfer.job.run_ids import run_number
from batchinfer.report.lanes import Piece
from batchinfer.report.report_data import Price, ReportData
from batchinfer.report.units import money, percent, short

_MOST_WAITS = 3
_SHORT_S = 0.5
_AROUND_ROWS = {
    *("reading finished rows", "checking ids", "finding saved codes"),
    *("reading and planning rows", "merging statistics"),
}
"""Phases before the first row and after the last row, except loading."""
_NOTICEABLE = 0.01
"""The sentence on memory mentions sharing only if sharing saves more than this share of the memory.
"""


@dataclass(frozen=True)
class Outcome:
    """A headline, which begins with the outcome."""

    word: str
    """Outcome, such as ``Finished``."""
    rest: str
    tone: str
    """``good``, ``bad`` or ``used``."""
    advice: str = ""
    """Advice to the user, or more about the job's progress."""


@dataclass(frozen=True)
class Figure:
    """A key figure: a number with its name, and a note that puts it into context."""

    label: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True)
class Slice:
    """A part of a stacked bar."""

    label: str
    amount: float
    value: str
    color: str
    note: str = ""


def outcome(data: ReportData) -> Outcome:
    failed = f" {counted(data.rows_failed, 'row')} failed." if data.rows_failed else ""
    if data.state == "so far":
        took = f" in {duration(data.engine_s)}" if data.engine_s else ""
        return Outcome("So far", f": {counted(data.rows_done, 'prompt')}{took}", "used")
    if data.state == "running":
        return Outcome(
            "Running", f": {_done(data)}{_left(data)}", "used", f"{_work(data)}{failed}".lstrip()
        )
    if data.state in ("stopped", "failed"):
        left = counted(data.rows_total - data.rows_done, "row")
        subject = "The" if data.state == "stopped" else "Once the problem below is fixed, the"
        kept = "it keeps finished rows and drawn tokens" if data.draws else "it keeps finished rows"
        advice = f"{subject} same command continues with the remaining {left}; {kept}.{failed}"
        return Outcome(data.state.capitalize(), f" after {_done(data)}", "bad", advice)
    return _ended(data)


def progress(data: ReportData) -> list[Piece]:
    """Return the progress bar: the shares of answered, failed, running and remaining rows."""
    whole = max(1, data.rows_total)
    begun = max(0.0, (data.share or 0.0) - data.rows_done / whole)
    good, failed = data.rows_done - data.rows_failed, data.rows_failed
    left = data.rows_total - data.rows_done
    return [
        Piece("good", good / whole, f"{counted(good, 'row')} {_good(data)}"),
        Piece("bad", failed / whole, f"{counted(failed, 'row')} failed"),
        Piece("used", begun, "work on running rows, counted in tokens"),
        Piece("rule", 1 - data.rows_done / whole - begun, f"{left:,} not done"),
    ]


def _ended(data: ReportData) -> Outcome:
    rows, failed = counted(data.rows_total, "row"), data.rows_failed
    if not data.rows_total:
        return Outcome("Finished", ": there were no rows", "good")
    if not failed:
        numbers = {run_number(run.name) for run in data.runs}
        runs = f", in {len(numbers):,} runs" if len(numbers) > 1 else ""
        every = f"all {rows}" if data.rows_total > 1 else rows
        return Outcome("Finished", f": {every} in {duration(data.wall_s)}{runs}", "good")
    word = f"Finished with {counted(failed, 'error')}"
    if data.state == "finished":
        return Outcome(word, f": {data.rows_total - failed:,} of {rows} {_good(data)}", "good")
    share = percent(failed / data.rows_total)
    return Outcome(
        word,
        f": {share} of {rows}, more than the {100 * data.max_error_rate:g}% that the job allows",
        "bad",
        "All rows are written, but there is no _SUCCESS. Run the failed rows again "
        "with --retry-errors, or raise errors.max_error_rate (run-batch: "
        "--max-error-rate) and run again.",
    )


def _good(data: ReportData) -> str:
    return "answered" if data.draws else "ok"


def _done(data: ReportData) -> str:
    """Say how many rows are done, for example ``5 of 10 rows (50%)``."""
    share = data.rows_done / data.rows_total if data.rows_total else 0.0
    rows = counted(data.rows_total, "row")
    return f"{data.rows_done:,} of {rows} ({whole_percent(share)})"


def _work(data: ReportData) -> str:
    """Return the finished share of the work if it differs from the share of finished rows."""
    done = data.rows_done / data.rows_total if data.rows_total else 0.0
    if data.share is None or whole_percent(data.share) == whole_percent(done):
        return ""
    return f"{whole_percent(data.share)} of the work is done, unfinished rows included."


def _left(data: ReportData) -> str:
    if data.phase:
        return f", {data.phase}"
    if data.eta_s is None:
        return ""
    return f", {'at most' if data.eta_is_most else 'about'} {duration(data.eta_s)} left"


def memory(data: ReportData) -> str:
    """Say in one sentence how the memory in use compares with contiguous allocation; "" if nothing
    ran."""
    peak = data.timeline.peak
    if not (data.has_pool and peak.running and peak.pool_bytes):
        return ""
    running = counted(peak.running, data.unit)
    at_once = f"{running} at once{_on_one_worker(data)}"
    shares = data.timeline.totals.mean("sharing_saving") > _NOTICEABLE
    subject = "Sharing and paging" if shares else "Paging"
    if peak.contiguous_bytes > peak.pool_bytes:
        fits = int(peak.running * peak.pool_bytes / peak.contiguous_bytes)
        would = f"would have fit {fits:,}" if fits else "would not have fit even one"
        return f"{subject} ran {at_once}, where contiguous allocation {would}."
    if peak.contiguous_bytes > 1.15 * peak.used_bytes:
        return (
            f"{subject} ran {at_once} in {size(peak.used_bytes)}, where contiguous "
            f"allocation would have taken {size(peak.contiguous_bytes)}."
        )
    return (
        f"At most {running} ran at once{_on_one_worker(data)}, in {size(peak.used_bytes)} of a "
        f"{size(peak.pool_bytes)} pool."
    )


def pool(data: ReportData) -> str:
    if not data.kv:
        return ""
    blocks, block_bytes = data.kv["num_blocks"], data.kv["bytes_per_block"]
    if not blocks:
        return "no KV pool, because the model reads each text in one pass"
    return (
        f"a pool of {size(blocks * block_bytes)}{_on_one_worker(data)}: "
        f"{pool_blocks(blocks, data.kv['block_size'])}, {size(block_bytes)} each"
    )


def figures(data: ReportData, price: Price | None) -> Iterator[Figure]:
    totals, sums = data.timeline.totals, data.lengths.sums
    left = f"of {data.rows_total:,}, " if data.rows_done < data.rows_total else ""
    failed = f"{data.rows_failed:,} failed" if data.rows_failed else "none failed"
    reused = f", {data.rows_reused:,} reused" if data.rows_reused else ""
    yield Figure("Rows done", f"{data.rows_done:,}", "", f"{left}{failed}{reused}")
    if data.replaced_cells:
        note = "have bytes that are not valid in input.encoding, read as U+FFFD"
        yield Figure("Damaged texts", f"{data.replaced_cells:,}", "input cells", note)
    load = f"including {duration(data.load_s)} to load the model"
    if data.wall_s < data.total_s:
        load = f"{duration(data.total_s)} for all workers together, {load}"
    yield Figure("Time", *_number_and_unit(duration(data.wall_s)), load)
    if price is not None:
        cost = price.per_hour * data.total_s / 3600
        each = f"at {money(price.per_hour, price.currency)} an hour"
        kind = "output" if data.draws else "prompt"
        if tokens := sums[f"{kind}_tokens"]:
            each += f"; {money(cost / tokens * 1e6, price.currency)} per million {kind} tokens"
        yield Figure("Cost", *_number_and_unit(money(cost, price.currency)), each)
    if totals.steps or data.lengths.rows:
        yield from _speed(data)
    if totals.steps and data.has_pool:
        each = "of each worker's, " if data.lanes else ""
        most = percent(data.timeline.peak_utilization)
        used = percent(totals.mean("mean_utilization"))
        yield Figure("Pool in use", used, "", f"{each}on average, {most} at most")
        reserved = (
            f"; {percent(totals.mean('contiguous_waste'))} with contiguous allocation"
            if data.draws
            else ""
        )
        waste = percent(totals.mean("mean_waste"))
        yield Figure("Waste", waste, "", f"of the used memory{reserved}")
        hits = f"; {percent(data.prefix_hit_rate)} of the prompt tokens were found in the pool"
        saved = percent(totals.mean("sharing_saving"))
        note = f"of the memory{hits if data.lengths.rows else ''}"
        yield Figure("Saved by sharing", saved, "", note)


def _speed(data: ReportData) -> Iterator[Figure]:
    """Yield output tokens per second, or rows and input tokens if the job draws no tokens."""
    seconds = data.engine_s
    if data.draws:
        drawn = f"{short(data.output_tokens)} tokens in {duration(seconds)}"
        yield Figure("Output", short(data.output_tokens_per_s), "tokens/s", drawn)
        return
    rows, read = data.lengths.rows, data.lengths.sums["prompt_tokens"]
    per_s = 1 / seconds if seconds else 0.0
    yield Figure("Speed", short(rows * per_s), "rows/s", f"{short(rows)} in {duration(seconds)}")
    yield Figure("Input", short(read * per_s), "tokens/s", f"{short(read)} tokens")


def _number_and_unit(text: str) -> tuple[str, str]:
    """Split ``7.3 s`` into number and unit; a text with several units stays whole."""
    number, _, unit = text.partition(" ")
    return (text, "") if " " in unit else (number, unit)


def time_slices(data: ReportData) -> list[Slice]:
    """Return the time of all runs by activity, in seconds."""
    totals, span = data.timeline.totals, data.timeline.span_s
    prompt, answer = totals.prompt_ms / 1e3, totals.answer_ms / 1e3
    between = max(span - prompt - answer, 0.0)
    rest = max(data.total_s - data.load_s - max(span, prompt + answer), 0.0)
    images = totals.encode_ms / 1e3
    steps = [
        ("Encoding images", images, "contiguous", f"{totals.images_encoded:,} images"),
        (
            "Steps with prompts",
            prompt - images,
            "shared",
            "answers of other rows continue in the same steps",
        ),
        ("Steps with answers only", answer, "used", ""),
    ]
    parts = [
        ("Loading the model", data.load_s, "idle", _waits(data, data.load_s)),
        *(steps if data.draws else [("Steps", prompt + answer, "shared", "")]),
        ("Between steps", between, "waste", "waiting for rows, or doing other work"),
        ("Before and after", rest, "rest", _waits(data, rest, around=True)),
    ]
    return [Slice(label, s, duration(s), color, note) for label, s, color, note in parts if s]


def _waits(data: ReportData, within_s: float, *, around: bool = False) -> str:
    """Name the longest phases of loading, or, if ``around``, of the time before and after the rows.

    Args:
        within_s: seconds of the period that contains the phases. A phase longer than that cannot
            lie in the period, so it is omitted.
    """
    names = [name for name in data.phases if (name in _AROUND_ROWS) == around]
    longest = sorted(names, key=lambda name: -data.phases[name])[:_MOST_WAITS]
    waits = [(name, data.phases[name]) for name in longest]
    return ", ".join(f"{name} {duration(s)}" for name, s in waits if _SHORT_S <= s <= within_s)


def prompt_slices(data: ReportData) -> list[Slice]:
    """Return the number of computed prompt tokens, and of prompt tokens found in the KV cache."""
    cached = data.lengths.sums["cached_tokens"]
    computed = data.lengths.sums["prompt_tokens"] - cached
    return [
        Slice("Computed", computed, f"{computed:,}", "used"),
        Slice("Found in the pool", cached, f"{cached:,}", "shared", "computed for another row"),
    ]


def memory_slices(data: ReportData) -> list[Slice]:
    """Return the bytes of memory that are held, and the bytes that sharing saves."""
    used = float(data.timeline.mean("kv_blocks_used").mean())
    saved = max(float(data.timeline.mean("kv_logical_blocks").mean()) - used, 0.0)
    return [
        Slice("Held", used, size(used), "used"),
        Slice("Not needed", saved, size(saved), "saved", "one copy serves several rows"),
    ]


def sharing_caption(data: ReportData) -> str:
    """Say how many prompt tokens were reused, and how many tokens rows have in common."""
    if not data.lengths.sums["prompt_tokens"]:
        return "No prompt has been computed yet."
    caption = f"{percent(data.prefix_hit_rate)} of the prompt tokens were found in the pool"
    if data.planned_rate > data.prefix_hit_rate:  # otherwise, all planned prefixes were found
        caption += f"; rows share {percent(data.planned_rate)} of their tokens"
    if equal := data.lengths.sums["deduplicated"]:
        caption += f". {counted(equal, 'row')} copied the answers of equal rows"
    caption += ". Rows with a common beginning, and the samples of a row, share blocks"
    copies = data.timeline.totals.cow_copies
    copied = f"; {counted(copies, 'block')} were copied where texts diverged" if copies else ""
    return f"{caption}{copied}."


def pressure_caption(data: ReportData) -> str:
    """Say how many rows ran at a time, and how often memory ran short."""
    sums = data.lengths.sums
    caption = (
        "On average "
        f"{counted(round(data.timeline.totals.mean('mean_running')), data.unit)} "
        f"ran at a time{_on_one_worker(data)}, and at most "
        f"{data.timeline.peak.running:,}.{together(data)}"
    )
    if sums["preemptions"]:
        costs = [
            f"{counted(sums[name], unit)} {what}"
            for name, unit, what in (
                ("swapped_blocks", "block", "came back from the host"),
                ("recomputed_tokens", "token", "computed again"),
            )
            if sums[name]
        ]
        times = counted(sums["preemptions"], "time")
        caption += f" {times} a running row gave up its memory so that other rows could finish"
        caption += f": {', '.join(costs)}." if costs else "."
    elif data.has_pool:
        caption += " No row had to give up its memory."
    if data.out_of_memory:
        caption += (
            " The device ran out of memory in "
            f"{counted(data.out_of_memory, 'step')}, which then ran again in "
            "smaller steps."
        )
    return caption


def lanes_caption(data: ReportData) -> str:
    died = sum("died" in lane.state for lane in data.lanes)
    caption = (
        f"{counted(len(data.lanes), 'worker')} over {duration(data.timeline.span_s)}, from the "
        "first engine's start to the last step; times without a worker are omitted"
    )
    return caption + (f". {died:,} died, and other workers continued their rows." if died else ".")


def latencies(data: ReportData) -> list[tuple[str, ...]]:
    """Return for each phase of a row: name, median, 95th percentile, maximum."""
    names = {
        "queue_ms": "In the queue",
        "prefill_ms": "Prompt",
        **({"decode_ms": "Answer"} if data.draws else {}),
        "latency_ms": "Total",
    }
    return [
        (label, *(_latency(data.lengths.time_s(name, share)) for share in (0.5, 0.95, 1.0)))
        for name, label in names.items()
    ]


def _latency(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else duration(seconds)


def together(data: ReportData) -> str:
    """Say that a chart adds up all workers; return "" if there is only one worker."""
    return " The chart adds up all workers." if data.lanes else ""


def _on_one_worker(data: ReportData) -> str:
    return " on one worker" if data.lanes else ""
