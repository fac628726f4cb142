"""A runner without a model: it stores tokens instead of keys and values, and checks them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.runner import Ready
from batchinfer.engine.scheduler.preemption import Preemption, PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.stats import StepStats
from batchinfer.engine.step import Step, StepResult
from tests.engine.invariants import check_scheduler

NextToken = Callable[[bytes, int, int, int], int]
"""Maps (context tokens as bytes, random stream, sample index, position) to a token id."""

MakeEngine = Callable[..., tuple[Engine, "FakeRunner"]]
"""``make_engine`` with a fixed value of ``runs_ahead``."""

EOS = 0
EMPTY = -1
SPOILED = 40
"""A prompt token whose score comes from NaN logits."""
BEAM_VOCAB = 12


def hashed(context: bytes, stream: int, sample: int, position: int) -> int:
    """Return a token that depends on exactly the arguments that a real token may depend on."""
    return 1 + zlib.crc32(context + bytes(f"{stream}/{sample}/{position}", "ascii")) % 999


def candidates(context: bytes) -> list[tuple[int, np.float32]]:
    """Return all tokens of a small vocabulary with their log-probabilities, best first."""
    values = [
        -np.float32(zlib.crc32(context + bytes([token, 7])) / 2**30) for token in range(BEAM_VOCAB)
    ]
    return sorted(enumerate(values), key=lambda entry: -entry[1])


def likelihood(context: bytes, token: int) -> float:
    """Return a log-probability that depends on the context and the token."""
    return -(zlib.crc32(context + bytes(f"={token}", "ascii")) % 2**20) / 2**10


class FakeRunner:
    """A runner that stores each token in its slot, and reads contexts through the block tables."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        next_token: NextToken = hashed,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        slots_per_state: int = 0,
    ) -> None:
        self.slots_per_state = slots_per_state
        self.windows = windows
        self.block_size = block_size
        self.host = np.full((num_host_blocks, 3, block_size), EMPTY, dtype=np.int32)
        self.kv = np.full((num_blocks, block_size), EMPTY, dtype=np.int32)
        self.kv_positions = np.full((num_blocks, block_size), EMPTY, dtype=np.int32)
        self.kv_adapters = np.zeros((num_blocks, block_size), dtype=np.int32)
        self.states = [b""] * num_blocks
        self.host_states = [b""] * num_host_blocks
        self.next_token = next_token
        self.steps: list[Step] = []
        self._previous = np.full(1, EMPTY, dtype=np.int32)

    def submit(self, step: Step) -> Ready:
        """Run a step at once; tokens that the host does not know yet come from the previous
        step."""
        known = step.previous_sample < 0
        step = replace(
            step, token_ids=np.where(known, step.token_ids, self._previous[step.previous_sample])
        )
        result = self.run(step)
        self._previous = np.append(result.token_ids, EMPTY)  # index -1 must exist, but is not used
        return Ready(result)

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        for slot, host_slot in step.swap_outs:
            self.host[host_slot] = [kept[slot] for kept in self._kept]
            self.host_states[host_slot] = self.states[slot]
        for host_slot, slot in step.swap_ins:
            for kept, values in zip(self._kept, self.host[host_slot], strict=True):
                kept[slot] = values
            self.states[slot] = self.host_states[host_slot]
        copied = step.block_copies.ravel().tolist()
        assert not set(copied[::2]) & set(copied[1::2]), (
            "a block is both source and destination of a copy"
        )
        for source, destination in step.block_copies:
            for kept in self._kept:
                kept[destination] = kept[source]
            self.states[destination] = self.states[source]
        places = np.concatenate([step.slot_mapping, step.other_slots.ravel()])
        if not self.windows:
            assert (places < 0).all(), "a slot for tokens that no layer attends to"
            places = places[:0]
        assert len(set(places.tolist())) == len(places), "two tokens have the same slot"
        for slot in places // self.block_size:
            self.states[slot] = b""
        for slots in (step.slot_mapping, *step.other_slots)[: len(self.windows)]:
            self.kv.ravel()[slots] = step.token_ids
            self.kv_positions.ravel()[slots] = step.positions
            self.kv_adapters.ravel()[slots] = np.repeat(
                adapters_of(step), np.diff(step.query_starts)
            )
        contexts = [self._context(step, at) for at in range(step.num_sequences)]
        if self.slots_per_state:
            contexts = self._update_states(step, contexts)
        ends = {int(end) - 1: at for at, end in enumerate(step.query_starts[1:])}
        of_logits = [contexts[ends[int(index)]] for index in step.logits_indices]
        batch = step.sampling
        top_token_ids, top_logprobs = self._alternatives(step, of_logits)
        given = batch.given_token_ids
        tokens = [
            self.next_token(of_logits[row], int(stream), int(sample), int(position))
            for row, stream, sample, position in zip(
                batch.logits_rows, batch.stream, batch.sample_index, batch.position, strict=True
            )
        ]
        if given is not None:
            tokens = np.where(given >= 0, given, tokens).tolist()
        tokens = [_allowed(step, k, token) for k, token in enumerate(tokens)]
        return StepResult(
            token_ids=np.asarray(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -1.0, dtype=np.float32),
            nonfinite=np.zeros(len(tokens), dtype=np.bool_),
            ranks=None,
            top_token_ids=top_token_ids,
            top_logprobs=top_logprobs,
            scored=self._scored(step, contexts),
        )

    def _update_states(self, step: Step, contexts: list[bytes]) -> list[bytes]:
        """Store all tokens of each sequence in all slots of its state; return the tokens.

        Windows shorten contexts but not states.
        """
        slots = step.state_tables
        assert len(set(slots.ravel().tolist())) == slots.size, "two sequences have the same state"
        whole = []
        for at, context in enumerate(contexts):
            start, stop = step.query_starts[at : at + 2]
            computed = int(step.context_lens[at] - (stop - start))
            before = {self.states[slot] for slot in slots[at]} if computed else {b""}
            assert [len(state) for state in before] == [4 * computed], (
                "the state has the wrong length"
            )
            whole.append(before.pop() + step.token_ids[start:stop].astype(np.int32).tobytes())
            assert whole[-1].endswith(context), "the state belongs to another context"
            for slot in slots[at]:
                self.states[slot] = whole[-1]
                self.kv_positions[slot] = EMPTY
        return whole

    def _scored(self, step: Step, contexts: list[bytes]) -> StepResult | None:
        """Return a score for each token, which depends on the token and its context."""
        if step.scored is None:
            return None
        tokens, judged_by = step.scored.token_ids, []
        for packed in step.scored.rows.tolist():
            at = int(np.searchsorted(step.query_starts, packed, side="right")) - 1
            after = int(step.query_starts[at + 1]) - 1 - packed
            judged_by.append(contexts[at][: len(contexts[at]) - 4 * after])
        values = np.array(list(map(likelihood, judged_by, tokens.tolist())), dtype=np.float32)
        top = np.arange(int(step.scored.num_logprobs.max()), dtype=np.int32)
        return StepResult(
            token_ids=tokens,
            logprobs=values,
            nonfinite=tokens == SPOILED,
            ranks=tokens + 1,
            top_token_ids=tokens[:, None] + top,
            top_logprobs=values[:, None] - top.astype(np.float32),
        )

    @property
    def _kept(self) -> tuple[np.ndarray, ...]:
        """The arrays with the contents of the slots."""
        return self.kv, self.kv_positions, self.kv_adapters

    def _alternatives(
        self, step: Step, of_logits: list[bytes]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the best of ``BEAM_VOCAB`` tokens for samples that ask for log-probabilities."""
        wanted = step.sampling.num_logprobs
        if wanted.max(initial=-1) < 0:
            return None, None
        shape = len(wanted), min(int(wanted.max()), BEAM_VOCAB)
        token_ids, logprobs = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        for at in np.flatnonzero(wanted > 0):
            best = candidates(of_logits[step.sampling.logits_rows[at]])
            allowed = _mask(step, at)
            best = [one for one in best if allowed is None or one[0] in allowed][: wanted[at]]
            token_ids[at, : len(best)] = [token for token, _ in best]
            logprobs[at, : len(best)] = [logprob for _, logprob in best]
        return token_ids, logprobs

    def _context(self, step: Step, at: int) -> bytes:
        length = int(step.context_lens[at])
        tokens = np.full(length, EMPTY, dtype=np.int32)
        computed = length - int(np.diff(step.query_starts)[at])
        for group, window in enumerate(self.windows):
            slots = step.tables_of(group)[at, : -(-length // self.block_size)]
            seen = slice(max(computed - window + 1, 0) if window else 0, length)
            positions = self.kv_positions[slots].ravel()[seen]
            assert positions.tolist() == list(range(length))[seen], (
                "the block table has the wrong positions"
            )
            adapters = self.kv_adapters[slots].ravel()[seen]
            assert (adapters == adapters_of(step)[at]).all(), "another adapter computed the tokens"
            read = self.kv[slots].ravel()[seen]
            known = tokens[seen] != EMPTY
            assert (tokens[seen] == read)[known].all(), "layer groups hold different tokens"
            tokens[seen] = read
        if not self.windows:
            return b""
        return tokens[0 if 0 in self.windows else -max(self.windows) :].tobytes()


def adapters_of(step: Step) -> np.ndarray:
    """Return the adapter of each sequence, [S]."""
    none = np.zeros(step.num_sequences, dtype=np.int32)
    return none if step.adapters is None else step.adapters


def _mask(step: Step, sample: int) -> np.ndarray | None:
    """Return the tokens that the mask of the sample's row allows, or None without a mask."""
    batch = step.sampling
    found = np.flatnonzero(batch.masked_rows == batch.logits_rows[sample])
    if len(found) == 0:
        return None
    mask = batch.masks[found[0]].view(np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def _allowed(step: Step, sample: int, token: int) -> int:
    """Return ``token``, or if the sample's row has a mask, a token that the mask allows."""
    allowed = _mask(step, sample)
    return token if allowed is None else int(allowed[token % len(allowed)])


def expected(
    request: Request, sample: int, next_token: NextToken = hashed, window: int = 0
) -> list[int]:
    """Return the tokens that a sample must have, regardless of other rows.

    Args:
        window: the number of tokens that a model sees if all its layers have windows; 0: all.
    """
    tokens = request.prompt_token_ids.tolist()
    output: list[int] = []
    while len(output) < request.params.max_tokens:
        context = np.asarray((tokens + output)[-window:], dtype=np.int32).tobytes()
        output.append(next_token(context, request.rng_key[1], sample, len(output)))
        if output[-1] in request.stop_token_ids:
            break
    return output


def make_request(row_id: int, prompt: list[int], **params: object) -> Request:
    """Return a request whose stream is its row id and whose end-of-sequence id is ``EOS``."""
    return Request(
        row_id=row_id,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        rng_key=(0, row_id),
        eos_token_ids=frozenset({EOS}),
        key=b"row %12d" % row_id,
    )


def make_engine(
    num_blocks: int,
    block_size: int = 4,
    *,
    max_num_seqs: int = 64,
    max_tokens: int = 64,
    max_model_len: int = 4096,
    caching: bool = True,
    next_token: NextToken = hashed,
    runs_ahead: bool = False,
    host_blocks: int = 0,
    windows: tuple[int, ...] = (0,),
    slots_per_state: int = 0,
    preemption: Preemption = "recompute",
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Engine, FakeRunner]:
    """Return an engine, and the ``FakeRunner`` that it uses."""
    pool = BlockPool(
        num_blocks,
        block_size,
        enable_prefix_caching=caching,
        num_host_blocks=host_blocks,
        windows=windows,
        slots_per_state=slots_per_state,
    )
    table = SequenceTable(max_num_seqs, max_model_len, block_size, windows, slots_per_state)
    runner = FakeRunner(num_blocks, block_size, next_token, host_blocks, windows, slots_per_state)
    scheduler = Scheduler(pool, table, max_tokens, PreemptionPolicy(preemption, block_copy_s=1e-6))
    return Engine(scheduler, runner, clock, runs_ahead=runs_ahead), runner


def run_all(
    engine: Engine, requests: list[Request], *, most_steps: int = 100_000
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run requests to their ends, checking invariants after each step."""
    for request in requests:
        engine.add_request(request)
    completions: dict[int, Completion] = {}
    steps: list[StepStats] = []
    for _ in range(most_steps):
        if not engine.num_unfinished:
            break
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        for completion in outcome.completions:
            assert completion.request.row_id not in completions
            completions[completion.request.row_id] = completion
        if outcome.stats is not None:
            steps.append(outcome.stats)
    assert not engine.num_unfinished, "a row never ended"
    assert engine.scheduler.pool.num_used == 0
    return completions, steps
