"""The sampler draws tokens, reports log-probabilities and marks rows with NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchinfer.engine.step import StepResult
from batchinfer.kernels.cpu.sampling import draw_bytes
from batchinfer.worker.sampling import on_cpu
from batchinfer.worker.sampling import sampler as sampler_module
from batchinfer.worker.sampling.on_cpu import RANDOM_BITS, random_bits
from batchinfer.worker.sampling.sampler import Sampler, workspace_bytes
from tests.worker.sampling.sampling_batches import Sample, make_batch


def sample(logits: torch.Tensor, samples: Sequence[Sample]) -> StepResult:
    return Sampler()(logits, make_batch(samples)).result()


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_given_token_is_scored_and_others_are_drawn() -> None:
    logits = normal(3, 1003)
    logits[2, 5] = torch.nan
    samples = [Sample(row=row, temperature=0, logprobs=2) for row in (0, 1, 0, 2)]
    batch = make_batch(samples)
    given = np.array([77, -1, -1, 9], dtype=np.int32)
    result = Sampler()(logits, dataclasses.replace(batch, given_token_ids=given)).result()
    plain = Sampler()(logits, batch).result()
    assert result.token_ids.tolist() == [77, *plain.token_ids[1:].tolist()]
    own = logits[0].log_softmax(0)
    assert result.logprobs[0] == pytest.approx(float(own[77]), abs=1e-5)
    assert result.ranks[0] == 1 + int((own > own[77]).sum())
    assert result.logprobs[1:3].tolist() == plain.logprobs[1:3].tolist()
    assert result.nonfinite.tolist() == [False, False, False, True]


class TestGreedy:
    def test_takes_the_most_likely_token_of_its_row(self) -> None:
        logits = normal(5, 1003)
        rows = [4, 0, 0, 2]
        result = sample(logits, [Sample(row=row, temperature=0) for row in rows])
        assert result.token_ids.tolist() == logits[rows].argmax(1).tolist()
        assert result.token_ids.dtype == np.int32

    @pytest.mark.parametrize("bias", [{}, {0: -1.0}])
    def test_the_lowest_id_wins_a_tie(self, bias: dict[int, float]) -> None:
        logits = torch.zeros(1, 1003)
        logits[0, [17, 400, 1002]] = 5.0
        result = sample(logits, [Sample(temperature=0, bias=bias)])
        assert result.token_ids.tolist() == [17]

    def test_bans_penalties_and_allowed_ids_come_first(self) -> None:
        logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
        samples = [
            Sample(temperature=0),
            Sample(temperature=0, bias={0: -np.inf}),
            Sample(temperature=0, bias={3: 3.5}),
            Sample(temperature=0, allowed=[3, 2]),
            Sample(temperature=0, allowed=[3, 2], bias={2: -np.inf}),
            Sample(temperature=0, presence=1.5, output=[0]),
            Sample(temperature=0, repetition=2.0, prompt=[0, 1]),
        ]
        assert sample(logits, samples).token_ids.tolist() == [0, 1, 3, 2, 3, 1, 2]


class TestDistribution:
    DRAWS = 20_000

    def check(self, logits: torch.Tensor, probabilities: torch.Tensor, like: Sample) -> None:
        """Draw one token in each of many streams, and compare counts with probabilities."""
        samples = [dataclasses.replace(like, stream=stream) for stream in range(self.DRAWS)]
        counts = np.bincount(sample(logits, samples).token_ids, minlength=logits.shape[1])
        expected = probabilities.double().numpy()
        possible = expected > 0
        assert counts[~possible].sum() == 0
        if possible.sum() > 1:
            expected = expected[possible] / expected.sum() * self.DRAWS
            assert stats.chisquare(counts[possible], expected).pvalue > 0.001

    def test_the_check_sees_a_wrong_distribution(self) -> None:
        logits = torch.tensor([[0.1, 0.2, 0.05, 0.15, 0.5]]).log()
        with pytest.raises(AssertionError):
            self.check(logits, (logits[0] * 1.05).softmax(0), Sample())

    @pytest.mark.parametrize(
        "like",
        [
            Sample(temperature=0.7),
            Sample(temperature=1.5, top_k=7),
            Sample(top_p=0.8),
            Sample(min_p=0.1),
            Sample(temperature=1.3, top_k=9, top_p=0.7, min_p=0.02),
        ],
        ids=lambda like: f"t{like.temperature:g}-k{like.top_k}-p{like.top_p:g}-min{like.min_p:g}",
    )
    def test_filters_equal_transformers(self, like: Sample) -> None:
        logits = normal(1, 40, scale=1.5)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(like.temperature)])
        if like.min_p:
            warpers.append(MinPLogitsWarper(like.min_p))
        if like.top_k:
            warpers.append(TopKLogitsWarper(like.top_k))
        if like.top_p < 1:
            warpers.append(TopPLogitsWarper(like.top_p))
        warped = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone())
        self.check(logits, warped[0].softmax(0), like)

    @given(
        st.lists(st.floats(-20, 5, width=32), min_size=1, max_size=60),
        st.sampled_from([0.01, 0.5, 1.0, 4.0]),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**31 - 1),
    )
    def test_a_uniform_number_selects_its_token(
        self, logits: list[float], temperature: float, seed: int, position: int
    ) -> None:
        asked = Sample(temperature=temperature, seed=seed, position=position)
        batch = make_batch([asked])
        bits = random_bits(batch.seed, batch.stream, batch.sample_index, batch.position)
        uniform = int(bits[0]) / 2**RANDOM_BITS
        row = torch.tensor([logits])
        token_id = int(Sampler()(row, batch).token_ids[0])
        cumulative = (row[0].double() / temperature).softmax(0).cumsum(0)
        below = float(cumulative[token_id - 1]) if token_id else 0.0
        assert below - 1e-6 <= uniform <= float(cumulative[token_id]) + 1e-6

    @pytest.mark.parametrize("bits", [0, 2**RANDOM_BITS - 1])
    def test_extreme_draws_land_on_tokens_that_are_possible(
        self, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(on_cpu, "_random_bits", lambda *_, **__: np.array([bits]))
        logits = torch.full((1, 1003), -torch.inf)
        logits[0, 500:510] = 0.0
        token_id = int(sample(logits, [Sample()]).token_ids[0])
        assert token_id == (500 if bits == 0 else 509)


@pytest.mark.parametrize(
    "change",
    [
        {"row": 1},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"allowed": [4, 5, 6]},
        {"bias": {3: 9.0}},
        {"presence": 2.0, "output": list(range(40))},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("usual", [Sample(), Sample(top_k=50)], ids=["plain", "filtered"])
def test_samples_that_differ_in_one_parameter_share_no_distribution(
    change: dict[str, Any], usual: Sample
) -> None:
    logits = normal(2, 67, scale=1.0)
    kinds = (usual, dataclasses.replace(usual, **change))
    samples = [dataclasses.replace(kinds[i // 2 % 2], index=i) for i in range(60)]
    alone = [int(sample(logits, [asked]).token_ids[0]) for asked in samples]
    assert sample(logits, samples).token_ids.tolist() == alone


MIXED = [
    Sample(row=0, temperature=0, logprobs=3),
    Sample(row=1, stream=1, logprobs=0),
    Sample(row=2, stream=2, top_p=0.9),
    Sample(row=2, stream=2, index=1, top_p=0.9),
    Sample(row=2, stream=2, index=2, top_p=0.9, top_k=20),
    Sample(row=3, stream=3, top_k=50, logprobs=2),
    Sample(row=4, stream=4, min_p=0.05, temperature=0.6),
    Sample(row=5, stream=5, bias={7: 4.0, 8: -np.inf}, top_p=0.99),
    Sample(row=6, stream=6, presence=1.0, repetition=1.2, prompt=[1, 2, 3], output=[4, 4]),
    Sample(row=6, stream=6, index=1, frequency=0.5, prompt=[1], output=[9, 9, 8]),
    Sample(row=7, stream=7, allowed=[5, 100, 900], logprobs=1),
    Sample(row=8, temperature=0, allowed=[5, 100, 900]),
    Sample(row=9, stream=9, temperature=1.8),
]


def facts(result: StepResult, at: int, alternatives: int) -> tuple[object, ...]:
    """Return all results of a sample, with the exact bits of floats."""
    own: tuple[object, ...] = (int(result.token_ids[at]), result.logprobs[at].tobytes())
    if alternatives >= 0:
        own += (
            int(result.ranks[at]),
            result.top_token_ids[at, :alternatives].tolist(),
            result.top_logprobs[at, :alternatives].tobytes(),
        )
    return own


class TestOtherSamples:
    logits = normal(10, 5003, seed=3, scale=3.0)

    @pytest.fixture
    def alone(self) -> list[tuple[object, ...]]:
        results = []
        for asked in MIXED:
            row = self.logits[asked.row : asked.row + 1].clone()
            result = sample(row, [dataclasses.replace(asked, row=0)])
            results.append(facts(result, 0, asked.logprobs))
        return results

    def check(
        self, logits: torch.Tensor, samples: list[Sample], expected: list[tuple[object, ...]]
    ) -> None:
        result = sample(logits, samples)
        got = [facts(result, at, asked.logprobs) for at, asked in enumerate(samples)]
        assert got == expected

    def test_together(self, alone: list[tuple[object, ...]]) -> None:
        self.check(self.logits, MIXED, alone)

    def test_permuted(self, alone: list[tuple[object, ...]]) -> None:
        order = np.random.default_rng(0).permutation(len(MIXED))
        rows = np.random.default_rng(1).permutation(10)
        samples = [
            dataclasses.replace(MIXED[i], row=int(np.flatnonzero(rows == MIXED[i].row)[0]))
            for i in order
        ]
        self.check(self.logits[torch.from_numpy(rows)], samples, [alone[i] for i in order])

    @pytest.mark.parametrize("rows_at_a_time", [1, 3])
    def test_in_small_chunks(
        self, rows_at_a_time: int, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elements = {"cpu": rows_at_a_time * self.logits.shape[1]}
        monkeypatch.setattr(sampler_module, "_WORKSPACE_ELEMENTS", elements)
        self.check(self.logits, MIXED * 2, alone * 2)

    def test_with_a_row_that_is_not_finite(self, alone: list[tuple[object, ...]]) -> None:
        logits = torch.cat((self.logits, torch.full((1, 5003), torch.nan)))
        bad = [Sample(row=10, top_p=0.5), Sample(row=10, temperature=0, allowed=[3])]
        result = sample(logits, bad + MIXED)
        assert result.nonfinite.tolist() == [True, True] + [False] * len(MIXED)
        got = [facts(result, at + 2, asked.logprobs) for at, asked in enumerate(MIXED)]
        assert got == alone

    def test_the_logits_are_unchanged(self) -> None:
        logits = self.logits.clone()
        sample(logits, MIXED)
        assert logits.equal(self.logits)


class TestLogprobs:
    def test_are_of_the_raw_logits(self) -> None:
        logits = normal(3, 1003)
        samples = [
            Sample(row=0, temperature=0.5, top_k=3),
            Sample(row=1, bias={5: 50.0}),
            Sample(row=2, temperature=0, repetition=3.0, prompt=list(range(1000))),
        ]
        result = sample(logits, samples)
        expected = logits.log_softmax(1)[range(3), result.token_ids.tolist()]
        np.testing.assert_allclose(result.logprobs, expected, rtol=1e-6)
        assert result.token_ids[1] == 5
        assert (result.ranks, result.top_token_ids, result.top_logprobs) == (None, None, None)

    def test_ranks_and_alternatives(self) -> None:
        logits = normal(2, 1003)
        samples = [
            Sample(row=1, logprobs=2, bias={9: 100.0}),
            Sample(row=0, temperature=0, logprobs=4),
            Sample(row=0, temperature=0),
            Sample(row=1, logprobs=0, stream=7),
        ]
        result = sample(logits, samples)
        raw = logits.log_softmax(1)
        assert result.token_ids[0] == 9
        assert result.ranks[:3].tolist() == [1 + int((logits[1] > logits[1, 9]).sum()), 1, 0]
        drawn = logits[1, result.token_ids[3]]
        assert result.ranks[3] == 1 + int((logits[1] > drawn).sum())
        assert result.top_token_ids.shape == result.top_logprobs.shape == (4, 4)
        for at, row in ((0, 1), (1, 0)):
            top = raw[row].topk(4)
            count = samples[at].logprobs
            assert result.top_token_ids[at, :count].tolist() == top.indices[:count].tolist()
            np.testing.assert_allclose(result.top_logprobs[at, :count], top.values[:count])
        assert (result.top_logprobs[2] == -np.inf).all()

    def test_equal_logits_share_a_rank_and_are_listed_by_id(self) -> None:
        logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]])
        result = sample(logits, [Sample(logprobs=4, bias={4: 100.0})])
        assert result.ranks.tolist() == [3]
        assert result.top_token_ids.tolist() == [[1, 3, 2, 4]]

    def test_more_alternatives_than_tokens(self) -> None:
        result = sample(normal(1, 9), [Sample(logprobs=20)])
        assert sorted(result.top_token_ids[0].tolist()) == list(range(9))


class TestNonfinite:
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize(
        "like",
        [
            Sample(temperature=0),
            Sample(logprobs=2),
            Sample(top_p=0.5),
            Sample(top_k=2),
            Sample(bias={4: -np.inf}),
            Sample(temperature=0, allowed=[1, 2]),
        ],
        ids=["greedy", "plain", "top-p", "top-k", "banned", "allowed"],
    )
    def test_one_bad_logit_marks_its_row_only(self, bad: float, like: Sample) -> None:
        logits = normal(3, 11)
        logits[1, 4] = bad
        samples = [dataclasses.replace(like, row=row) for row in range(3)]
        result = sample(logits, samples)
        assert result.nonfinite.tolist() == [False, True, False]
        assert (result.token_ids[1], result.logprobs[1]) == (0, 0.0)
        assert np.isfinite(result.logprobs).all()

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_some_minus_infinity_is_legal(self, temperature: float) -> None:
        logits = torch.full((1, 11), -torch.inf)
        logits[0, 6] = 0.0
        result = sample(logits, [Sample(temperature=temperature, top_p=0.9)])
        assert (result.token_ids[0], result.logprobs[0]) == (6, 0.0)
        assert not result.nonfinite.any()

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_sample_left_without_any_token_is_marked(self, temperature: float) -> None:
        samples = [
            Sample(temperature=temperature, allowed=[3, 4], bias={3: -np.inf, 4: -np.inf}),
            Sample(temperature=temperature, allowed=[3, 4], bias={3: -np.inf}),
        ]
        result = sample(normal(1, 11), samples)
        assert result.nonfinite.tolist() == [True, False]
        assert [result.lacks_token(at) for at in range(2)] == [True, False]
        assert result.token_ids.tolist() == [0, 4]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_with_nan_is_not_blamed_on_banned_tokens(self, temperature: float) -> None:
        logits = normal(4, 11)
        logits[0, 5], logits[1, 3], logits[2, :] = torch.nan, torch.inf, -torch.inf
        samples = [
            Sample(row=row, temperature=temperature, allowed=[3], bias={3: -np.inf})
            for row in range(4)
        ]
        result = sample(logits, samples)
        assert result.nonfinite.all()
        assert [result.lacks_token(at) for at in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_count_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = normal(10, 1003).to(dtype)
    samples = [dataclasses.replace(asked, logprobs=3) for asked in MIXED]
    result, expected = sample(logits, samples), sample(logits.float(), samples)
    assert [facts(result, at, 3) for at in range(len(samples))] == [
        facts(expected, at, 3) for at in range(len(samples))
    ]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0, "logprobs": 20},
        {"top_p": 0.9, "temperature": 1e4, "repetition": 1.2, "prompt": [1], "output": [2]},
        {"top_k": 4999, "bias": {1: 1.0}},
    ],
)
def test_sampling_takes_no_more_memory_than_planned(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setitem(sampler_module._WORKSPACE_ELEMENTS, "cpu", 2**17)
    logits = normal(64, 5003).to(torch.bfloat16)
    samples = [Sample(row=row, **asked) for row in range(64)]
    with torch.profiler.profile(profile_memory=True) as profile:
        sample(logits, samples)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = np.cumsum([event.nbytes() for event in events])
    in_tensors = workspace_bytes(64, 5003, "cpu") - draw_bytes(5003)
    assert 4 * 2**17 < held.max() <= in_tensors == 64 * 2**17


def test_an_empty_batch_gives_empty_arrays() -> None:
    result = sample(torch.zeros(0, 11), [])
    assert [len(result.token_ids), len(result.logprobs), len(result.nonfinite)] == [0, 0, 0]
    assert result.token_ids.dtype == np.int32
    assert result.logprobs.dtype == np.float32
    assert result.nonfinite.dtype == np.bool_
    assert result.ranks is None
