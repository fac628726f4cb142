"""A report's words: key figures and captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.console.format import duration, size
from batchinfer.report.report_data import Findings, Price
from batchinfer.report.units import counted, money, percent, short

_MOST_WAITS = 3
_SHORT_S = 0.5
_AROUND_ROWS = {
    *("reading finished rows", "checking ids", "finding saved codes"),
    *("reading and planning rows", "merging statistics"),
}
"""Waits before the first row and after the last."""
_WORTH_SAYING = 0.01
"""A share below which nothing is claimed."""


@dataclass(frozen=True)
class Figure:
    """A number with its name, and what to compare it with."""

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
    colour: str
    note: str = ""


def memory(found: Findings) -> str:
    """What paging and sharing did to memory, in one sentence; "" where nothing ran."""
    peak = found.timeline.peak
    if not (found.has_pool and peak.running and peak.pool_bytes):
        return ""
    running, by = counted(peak.running, found.unit), _by_what(found)
    at_once = f"{running} at once{_on_a_worker(found)}"
    if peak.contiguous_bytes > peak.pool_bytes:
        fits = int(peak.running * peak.pool_bytes / peak.contiguous_bytes)
        would = f"would have fit {fits:,}" if fits else "would not have fit one"
        return f"{by} ran {at_once} where contiguous allocation {would}."
    if peak.contiguous_bytes > 1.15 * peak.used_bytes:
        return (
            f"{by} ran {at_once} in {size(peak.used_bytes)} where contiguous allocation "
            f"would have taken {size(peak.contiguous_bytes)}."
        )
    return (
        f"At most {running} ran at once{_on_a_worker(found)}, in {size(peak.used_bytes)} of a "
        f"{size(peak.pool_bytes)} pool."
    )


def pool(found: Findings) -> str:
    """The size of the KV pool, in words."""
    if not found.kv:
        return ""
    blocks, block_bytes = found.kv["num_blocks"], found.kv["bytes_per_block"]
    if not blocks:
        return "no KV pool: the model reads texts whole"
    return (
        f"a pool of {size(blocks * block_bytes)}{_on_a_worker(found)}: {blocks:,} blocks of "
        f"{found.kv['block_size']} tokens, {size(block_bytes)} each"
    )


def figures(found: Findings, price: Price | None) -> Iterator[Figure]:
    """Key figures, shown before any chart."""
    totals, sums = found.timeline.totals, found.lengths.sums
    left = f"of {found.rows_total:,}, " if found.rows_done < found.rows_total else ""
    failed = f"{found.rows_failed:,} failed" if found.rows_failed else "none failed"
    reused = f", {found.rows_reused:,} reused" if found.rows_reused else ""
    yield Figure("Rows done", f"{found.rows_done:,}", "", f"{left}{failed}{reused}")
    load = f"{duration(found.load_s)} of it to load the model"
    if found.wall_s < found.total_s:
        load = f"{duration(found.total_s)} of all workers together, {load}"
    yield Figure("Time", *_number_and_unit(duration(found.wall_s)), load)
    if price is not None:
        cost = price.per_hour * found.total_s / 3600
        each = f"at {money(price.per_hour, price.currency)} an hour"
        kind = "output" if found.draws else "prompt"
        if tokens := sums[f"{kind}_tokens"]:
            each += f"; {money(cost / tokens * 1e6, price.currency)} per million {kind} tokens"
        yield Figure("Cost", *_number_and_unit(money(cost, price.currency)), each)
    if totals.steps or found.lengths.rows:
        yield from _speed(found)
    if totals.steps and found.has_pool:
        yield Figure(
            "Pool in use",
            *(percent(totals.mean("mean_utilization")), ""),
            f"{_of_a_worker(found)}on average, {percent(found.timeline.peak_utilization)} at most",
        )
        yield Figure(
            "Waste",
            *(percent(totals.mean("mean_waste")), ""),
            f"of what is used; {percent(totals.mean('contiguous_waste'))} if reserved"
            if found.draws
            else "of what is used",
        )
        yield Figure(
            "Saved by sharing",
            *(percent(totals.mean("sharing_saving")), ""),
            f"of the memory; {percent(found.prefix_hit_rate)} of prompt tokens found"
            if found.lengths.rows
            else "of the memory",
        )


def _speed(found: Findings) -> Iterator[Figure]:
    """Output tokens per second; rows and input tokens where none are drawn."""
    sums, seconds = found.lengths.sums, found.engine_s
    if found.draws:
        drawn = f"{short(found.output_tokens)} tokens in {duration(seconds)}"
        yield Figure("Output", short(found.output_tokens_per_s), "tokens/s", drawn)
        return
    rows, read = found.lengths.rows, sums["prompt_tokens"]
    per_s = 1 / seconds if seconds else 0.0
    yield Figure("Speed", short(rows * per_s), "rows/s", f"{short(rows)} in {duration(seconds)}")
    yield Figure("Input", short(read * per_s), "tokens/s", f"{short(read)} tokens")


def _number_and_unit(text: str) -> tuple[str, str]:
    """``7.3 s`` as a number and a unit; what has several units stays whole."""
    number, _, unit = text.partition(" ")
    return (text, "") if " " in unit else (number, unit)


def time_slices(found: Findings) -> list[Slice]:
    """Engine time by activity, in seconds."""
    totals, span = found.timeline.totals, found.timeline.span_s
    prompt, answer = totals.prompt_ms / 1e3, totals.answer_ms / 1e3
    between = max(span - prompt - answer, 0.0)
    rest = max(found.total_s - found.load_s - max(span, prompt + answer), 0.0)
    steps = [
        ("Steps with prompts in them", prompt, "shared", "answers go on beside them"),
        ("Steps of answers alone", answer, "used", ""),
    ]
    parts = [
        ("Loading the model", found.load_s, "idle", _waits(found, found.load_s)),
        *(steps if found.draws else [("Steps", prompt + answer, "shared", "")]),
        ("Between steps", between, "waste", "waiting for rows, or for this program itself"),
        ("Before and after", rest, "rest", _waits(found, rest, around=True)),
    ]
    return [Slice(label, s, duration(s), colour, note) for label, s, colour, note in parts if s]


def _waits(found: Findings, within_s: float, *, around: bool = False) -> str:
    """The longest waits that have a name, but for short ones, and those of before the run.

    Args:
        within_s: what they are part of.
        around: those before the first row and after the last, not those of loading.
    """
    names = [name for name in found.phases if (name in _AROUND_ROWS) == around]
    longest = sorted(names, key=lambda name: -found.phases[name])[:_MOST_WAITS]
    told = [(name, found.phases[name]) for name in longest]
    return ", ".join(f"{name} {duration(s)}" for name, s in told if _SHORT_S <= s <= within_s)


def prompt_slices(found: Findings) -> list[Slice]:
    """Prompt tokens computed, and found in the pool."""
    sums = found.lengths.sums
    cached = sums["cached_tokens"]
    parts = [
        ("Computed", sums["prompt_tokens"] - cached, "used", ""),
        ("Found in the pool", cached, "shared", "another row had computed them"),
    ]
    return [Slice(label, n, f"{n:,}", colour, note) for label, n, colour, note in parts]


def memory_slices(found: Findings) -> list[Slice]:
    """Memory held, and saved by sharing, in bytes."""
    states = found.timeline.states
    used = float(states("kv_blocks_used").mean())
    saved = max(float(states("kv_logical_blocks").mean()) - used, 0.0)
    parts = [("Held", used, "used", ""), ("Not needed", saved, "saved", "held once for several")]
    return [Slice(label, n, size(n), colour, note) for label, n, colour, note in parts]


def sharing_caption(found: Findings) -> str:
    """Prefix reuse in words: of what could be shared, how much was."""
    if not found.lengths.sums["prompt_tokens"]:
        return "No prompt has been computed yet."
    caption = f"{percent(found.prefix_hit_rate)} of the prompt tokens did not have to be computed"
    if found.planned_rate > found.prefix_hit_rate:  # else all that they have in common was found
        caption += f", of {percent(found.planned_rate)} that rows have in common"
    if equal := found.lengths.sums["deduplicated"]:
        caption += f". {counted(equal, 'rows')} took what equal ones came to"
    copies = found.timeline.totals.cow_copies
    caption += ". Rows that begin alike, and the samples of a row, hold the same blocks"
    return caption + (
        f"; {counted(copies, 'blocks')} had to be copied when they parted." if copies else "."
    )


def pressure_caption(found: Findings) -> str:
    """Preemption in words: what happened when memory was short."""
    sums = found.lengths.sums
    caption = (
        f"On average {found.timeline.totals.mean('mean_running'):,.0f} ran side by side"
        f"{_on_a_worker(found)}, at most {found.timeline.peak.running:,}."
    )
    caption += together(found)
    if not sums["preemptions"]:
        caption += " None had to give up its memory." if found.has_pool else ""
    else:
        then = [
            f"{counted(sums[name], unit)} {what}"
            for name, unit, what in (
                ("swapped_blocks", "blocks", "came back from the host"),
                ("recomputed_tokens", "tokens", "computed again"),
            )
            if sums[name]
        ]
        caption += (
            f" {counted(sums['preemptions'], 'times')} one gave up its memory to let others end"
        )
        caption += f": {', '.join(then)}." if then else "."
    if found.out_of_memory:
        caption += (
            f" In {counted(found.out_of_memory, 'steps')} the device had no memory left, and the "
            "step was cut smaller."
        )
    return caption


def lanes_caption(found: Findings) -> str:
    """Workers in words: how many there were, and over what time their lanes go."""
    died = sum("died" in lane.state for lane in found.lanes)
    caption = (
        f"{counted(len(found.lanes), 'workers')} over {duration(found.timeline.span_s)}, from the "
        "first engine's start to the last step; times in which none ran are left out"
    )
    return caption + (f". {died:,} died, and others went on with their rows." if died else ".")


def waits(found: Findings) -> list[tuple[str, ...]]:
    """Latency by phase: name, median, 95th percentile, maximum."""
    names = {
        "queue_ms": "In the queue",
        "prefill_ms": "Prompt",
        **({"decode_ms": "Answer"} if found.draws else {}),
        "latency_ms": "All in all",
    }
    shares = (0.5, 0.95, 1.0)
    return [
        (label, *(_moment(found.lengths.time_s(name, share)) for share in shares))
        for name, label in names.items()
    ]


def _moment(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else duration(seconds)


def _on_a_worker(found: Findings) -> str:
    """What a number of one step is of, where several workers have steps at a time."""
    return " on one worker" if found.lanes else ""


def together(found: Findings) -> str:
    """What a chart is of, where several workers have steps at a time."""
    return " The chart adds up all workers." if found.lanes else ""


def _of_a_worker(found: Findings) -> str:
    """What a share of a pool is of, where several workers have one each."""
    return "of each worker's, " if found.lanes else ""


def _by_what(found: Findings) -> str:
    shares = found.timeline.totals.mean("sharing_saving") > _WORTH_SAYING
    return "Sharing and paging" if shares else "Paging"
