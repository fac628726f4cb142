"""Prompts that share prefixes, and the branch points that are planned for them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from batchinfer.requests.branch_points import BranchPoints, plan_branch_points


def common(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


def planned(prompts: list[list[int]], run: list[int]) -> dict[int, BranchPoints]:
    """Return the branch points of prompts that run in the order ``run``."""
    order = sorted(range(len(prompts)), key=lambda at: prompts[at])
    with_next = [common(prompts[a], prompts[b]) for a, b in pairwise(order)]
    return plan_branch_points(order, [*with_next, 0], run, [len(one) for one in prompts])


def tree(fan_out: tuple[int, int, int], lengths: tuple[int, int, int, int]) -> list[list[int]]:
    """Return the prompts of a prefix tree with three levels.

    Args:
        lengths: number of tokens of each level, and of the leaves.
    """
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(1, 30_000, count).tolist()

    root = tokens(lengths[0])
    prompts = []
    for _ in range(fan_out[0]):
        second = [*root, *tokens(lengths[1])]
        for _ in range(fan_out[1]):
            third = [*second, *tokens(lengths[2])]
            prompts += [[*third, *tokens(lengths[3])] for _ in range(fan_out[2])]
    return prompts
