"""Summarizes a plan: formats its numbers as JSON data and as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.console.format import duration, pool_blocks, printable, size
from batchinfer.console.table import SummaryLine
from batchinfer.engine.metrics import prefix_sharing
from batchinfer.engine.simulate.roofline import PERFECT, WELL_BUILT, Efficiency
from batchinfer.job.job import Job
from batchinfer.job.plan.row_counts import RowCounts, output_bytes
from batchinfer.job.plan.simulation import Simulation
from batchinfer.job.reuse.reuse import RowReuse

if TYPE_CHECKING:
    from batchinfer.builders.simulated_engine import SimulatedEngine


@dataclass(frozen=True)
class PlanSummary:
    job: Job
    context: SimulatedEngine
    counts: RowCounts
    simulation: Simulation
    complete: bool
    """True if all rows that were read were simulated."""
    reuse: RowReuse | None = None
    """Finds rows that need not run; the counts omit these rows."""
    patches_per_token: float = 0.0
    """Number of patches that the vision tower reads per image token."""

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON data, with counts scaled to the whole dataset."""
        counts, simulation = self.counts, self.simulation
        measured = simulation.measured.metrics()
        tokens, kv = measured["tokens"], measured["kv"]
        num_rows = self.job.source.num_rows
        scale = num_rows / self._num_read if self._num_read else 0.0
        prompt = counts.prompt_tokens - simulation.refused_prompt_tokens
        output = counts.output_tokens - simulation.refused_output_tokens
        step_scale = scale / self._simulated
        cached = tokens["prompt_cached"] if self.complete else prompt * kv["prefix_hit_rate"]
        errors = counts.errors + simulation.refused
        encode_s = self._encode_s(WELL_BUILT) * scale
        return {
            "rows": num_rows,
            # Counts samples, not rows, like ``num_running`` in a run's steps.
            "rows_in_flight": simulation.peak_running,
            "mean_rows_in_flight": simulation.mean_running,
            "prompt_tokens": round(prompt * scale),
            "prompt_computed": round((prompt - cached) * scale),
            "prompt_cached": round(cached * scale),
            "recomputed": round(tokens["recomputed"] * step_scale),
            "output_tokens": round(output * scale),
            "block_size": self.context.block_size,
            "bytes_per_block": self.context.bytes_per_block,
            "num_blocks": self.context.num_blocks,
            "blocks_per_state": self.context.slots_per_state,
            "peak_used_blocks": kv["peak_used_blocks"],
            "mean_utilization": kv["mean_utilization"] * self.context.simulated_share,
            "mean_waste": kv["mean_waste"],
            "contiguous_waste": kv["contiguous_waste"],
            "sharing_saving": kv["sharing_saving"],
            "prefix_hit_rate": kv["prefix_hit_rate"],
            "sharing": prefix_sharing(
                round(prompt * scale),
                round(counts.distinct_tokens * scale),
                round((prompt - cached) * scale),
                round(simulation.deduplicated * step_scale),
            ),
            "preemptions": round(kv["preemptions"] * step_scale),
            "num_host_blocks": self.context.num_host_blocks,
            "swap_preemptions": round(kv["swap_preemptions"] * step_scale),
            "swapped_blocks": round(kv["swapped_blocks"] * step_scale),
            "steps": round(simulation.steps * step_scale),
            "images": round(counts.images.total() * scale),
            "image_tokens": round(
                sum(size * count for size, count in counts.images.items()) * scale
            ),
            "encode_s": encode_s,
            "time_s": self.context.runner.seconds * step_scale + encode_s,
            "bound_s": self.context.runner.bound_s * step_scale + self._encode_s(PERFECT) * scale,
            "output_bytes": output_bytes(self.job.spec, self.job.source, self.job.table, counts),
            "token_histogram": counts.histogram(scale),
            "too_long": round(counts.too_long * scale),
            "truncated": round(counts.truncated * scale),
            "errors": {code: round(count * scale) for code, count in sorted(errors.items())},
            "control_text": round(counts.control_text * scale),
            "reused": None if self.reuse is None else round(self.reuse.num_reused * scale),
            "why_not_reused": list(self._why_not_reused()),
            "device": self.context.device,
            "model": dict(self.context.model_facts),
            "max_model_len": self.context.max_model_len,
            "expect_output_tokens": simulation.lengths.expected,
            "sampled": None
            if self.complete and self._num_read == num_rows
            else {
                "rows": num_rows,
                "rows_read": self._num_read,
                "steps": simulation.steps,
                "simulated": self._simulated,
            },
        }

    @property
    def _num_read(self) -> int:
        return self.counts.rows + (0 if self.reuse is None else self.reuse.num_reused)

    def _encode_s(self, efficiency: Efficiency) -> float:
        """Return the seconds needed to encode the distinct images of the rows that were read."""
        tower, images = self.context.tower, self.counts.images
        patches = {size * self.patches_per_token: count for size, count in images.items()}
        return 0.0 if tower is None else tower.seconds(patches, efficiency)

    def _why_not_reused(self) -> Iterator[str]:
        if self.job.spec.output.reuse and self.reuse is None:
            yield "not counted, because the plan cannot predict reuse for a job with accept"
        elif self.reuse is not None and not self.reuse.num_reused:
            yield from self.reuse.why_none(self.job.manifest.job, self._num_read)

    @property
    def _simulated(self) -> float:
        """Share of the expected tokens that the simulation drew before it ended."""
        expected = self.counts.drawn_tokens - self.simulation.refused_drawn_tokens
        drawn = self.context.runner.samples_drawn + self.simulation.deduplicated_drawn_tokens
        return 1.0 if self.complete else drawn / expected


def plan_facts(plan: dict[str, Any], currency: str = "USD") -> Iterator[SummaryLine]:
    """Yield the lines of a plan, in the format of a job's summary; costs are in ``currency``."""
    rows, errors = plan["rows"], plan["errors"]
    failing = sum(errors.values())
    yield SummaryLine("rows", f"{rows:,}", f", of which {failing:,} would fail")
    if errors:
        counts = ", ".join(f"{code} {n:,}" for code, n in errors.items())
        yield SummaryLine("errors", counts, tone="bad")
    if plan["reused"]:
        yield SummaryLine("reused", f"{plan['reused']:,} rows", ", copied instead of computed")
    for line in plan["why_not_reused"]:
        yield SummaryLine("reused", printable(line), tone="bad")
    ends = plan["expect_output_tokens"]
    answers = "at most" if ends is None else f"with {ends:,} tokens per answer,"
    yield SummaryLine(
        "tokens",
        f"{plan['prompt_tokens']:,} in prompts",
        f", {plan['prompt_computed']:,} of them to compute"
        + (f"; {answers} {plan['output_tokens']:,} in answers" if plan["output_tokens"] else ""),
    )
    if plan["images"]:
        yield SummaryLine(
            "images",
            f"{plan['images']:,} different images",
            f" with {plan['image_tokens']:,} tokens; encoding takes about "
            f"{duration(plan['encode_s'])} of the run time",
        )
    weight_bytes = plan["model"]["weight_bytes"] + plan["model"]["adapter_bytes"]
    quantization = plan["model"]["quantization"]
    weights = f"weights {size(weight_bytes)}" + (f" ({quantization})" if quantization else "")
    pool, swap = (
        size(plan[name] * plan["bytes_per_block"]) for name in ("num_blocks", "num_host_blocks")
    )
    if not plan["num_blocks"]:
        about = f" {weights}; no KV pool, because the model reads each text in one pass"
        yield SummaryLine("device", f"{plan['device']}:", about)
        yield from _costs(plan, currency)
        return
    yield SummaryLine(
        "device",
        f"{plan['device']}:",
        f" {weights}, pool {pool}; "
        + (f"at most {swap} of swap space on the host" if plan["num_host_blocks"] else "no swap"),
    )
    yield SummaryLine(
        "pool",
        pool_blocks(plan["num_blocks"], plan["block_size"]),
        f", at most {plan['peak_used_blocks']:,} used; {plan['rows_in_flight']:,} "
        f"rows in flight, {plan['preemptions']:,} preemptions, "
        f"{plan['swapped_blocks']:,} blocks swapped in",
    )
    if plan["blocks_per_state"]:
        state_bytes = plan["blocks_per_state"] * plan["bytes_per_block"]
        share = plan["rows_in_flight"] * plan["blocks_per_state"] / plan["num_blocks"]
        rest = "keys and values" if plan["block_size"] else "the states of shared prefixes"
        yield SummaryLine(
            "state",
            f"{plan['blocks_per_state']:,} blocks ({size(state_bytes)}) for each row in flight",
            f", at most {min(share, 1):.0%} of the pool; the rest holds {rest}",
        )
    yield SummaryLine(
        "waste",
        f"{plan['mean_waste']:.1%} of the used blocks",
        f" (reserving the longest answers would waste {plan['contiguous_waste']:.1%})",
    )
    yield SummaryLine(
        "sharing",
        f"saves {plan['sharing_saving']:.1%} of the blocks",
        f"; {plan['prefix_hit_rate']:.1%} of the prompt tokens are cached "
        f"(rows share {plan['sharing']['planned_rate']:.1%})",
    )
    yield from _costs(plan, currency)


def _costs(plan: dict[str, Any], currency: str) -> Iterator[SummaryLine]:
    """Yield lines about the time, cost and output size of a run, followed by notes."""
    yield SummaryLine(
        "time",
        f"about {duration(plan['time_s'])}",
        f", or {duration(plan['bound_s'])} at the device's limits; loading not included",
    )
    if plan["workers"] > 1:
        yield SummaryLine(
            "workers",
            f"about {duration(plan['wall_s'])}",
            f", on {plan['workers']:,} devices like this one",
        )
    if plan.get("max_rows_per_part") is not None:
        yield SummaryLine(
            "note",
            f"set output.rows_per_part to at most {plan['max_rows_per_part']:,}",
            " to keep all workers busy until the end",
        )
    if plan["cost"] is not None:
        yield SummaryLine(
            "cost",
            f"about {plan['cost']:,.2f} {currency}",
            ", counting only the devices' compute time",
        )
    yield SummaryLine("output", f"about {size(plan['output_bytes'])}")
    if plan["control_text"]:
        where = f", in {plan['control_text']:,} rows"
        yield SummaryLine(
            "note", "prompts contain control tokens, which are treated as plain text", where
        )
    if plan["truncated"]:
        yield SummaryLine(
            "note", "prompts are truncated to max_model_len", f", in {plan['truncated']:,} rows"
        )
    equal = plan["sharing"]["deduplicated_rows"]
    if equal:
        yield SummaryLine(
            "note", f"{equal:,} rows are copies of other rows", " and are not computed again"
        )
    sampled = plan["sampled"]
    if sampled:
        yield SummaryLine(
            "note",
            f"estimated from a sample: {sampled['rows_read']:,} of {sampled['rows']:,} rows read",
            f", {sampled['simulated']:.0%} of their output simulated",
        )
