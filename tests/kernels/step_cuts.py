"""A Hypothesis strategy that cuts sequences into steps, for tests of recurrent kernels."""

from __future__ import annotations

from hypothesis import strategies as st

cuts_of_sequences = st.lists(
    st.sets(st.integers(1, 40), min_size=1, max_size=6).map(lambda ends: [0, *sorted(ends)]),
    min_size=1,
    max_size=4,
)
