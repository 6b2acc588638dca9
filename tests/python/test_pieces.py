"""A bucket whose parameters go different ways is cut into few tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cccl._pieces import CALL_BYTES, SMALL, cut

BITS = {"4": 4.125, "8": 8.125, "plain": 32.0}

parameters = st.lists(
    st.tuples(
        st.sampled_from([1, 64, 768, 3000, SMALL - 1, SMALL, 4 * SMALL, 10**6]),
        st.sampled_from(list(BITS)),
    ),
    min_size=1,
    max_size=30,
)


@given(parameters)
def test_every_parameter_goes_once_and_its_own_way(found):
    counts, ways = [c for c, _ in found], [w for _, w in found]
    stretches, small = cut(counts, ways, BITS)
    seen = list(small)
    for stretch in stretches:
        inside = range(stretch.first, stretch.last)
        assert {*stretch.apart} < {*inside}
        own = [i for i in inside if i not in stretch.apart]
        assert {ways[i] for i in own} == {stretch.way}
        assert {*stretch.apart} <= {*small}, "it was copied before it is set to zero"
        assert all(counts[i] < SMALL for i in stretch.apart)
        seen += own
    assert sorted(seen) == list(range(len(found)))
    edges = [edge for s in stretches for edge in (s.first, s.last)]
    assert edges == sorted(edges), "stretches do not overlap"


@given(parameters)
def test_a_stretch_has_a_large_run_and_gaps_that_cost_less_than_a_collective(found):
    counts, ways = [c for c, _ in found], [w for _, w in found]
    stretches, small = cut(counts, ways, BITS)
    if len(set(ways)) == 1:
        assert (len(stretches), small) == (1, [])
        return
    assert all(counts[i] < SMALL for i in small)
    for stretch in stretches:
        run = largest = gap = 0
        for i in range(stretch.first, stretch.last):
            apart = i in stretch.apart
            run, gap = (0, gap + counts[i]) if apart else (run + counts[i], 0)
            largest = max(largest, run)
            assert gap * BITS[stretch.way] / 8 <= CALL_BYTES
        assert largest >= SMALL


def test_a_transformers_layers_are_one_stretch_of_matrices():
    layer = [("plain", 768), ("plain", 768), ("4", 3 * 768 * 768), ("plain", 3 * 768),
             ("4", 768 * 768), ("plain", 768), ("plain", 768), ("plain", 768),
             ("4", 4 * 768 * 768), ("plain", 4 * 768), ("4", 4 * 768 * 768),
             ("plain", 768)]  # fmt: skip
    ((way, first, last, apart),), small = cut(
        [c for _, c in layer * 4], [w for w, _ in layer * 4], BITS
    )
    assert (way, first, last) == ("4", 2, 4 * 12 - 1)
    assert len(small) == 8 * 4
    assert len(apart) == 8 * 4 - 3, "what lies at an end is no gap"


def test_a_large_run_of_another_way_splits_a_stretch():
    stretches, small = cut([10**6, SMALL, 10**6, 5], ["4", "8", "4", "8"], BITS)
    assert [(s.way, s.first, s.last) for s in stretches] == [("4", 0, 1), ("8", 1, 2), ("4", 2, 3)]
    assert small == [3]


def test_a_gap_that_costs_more_than_a_collective_splits_a_stretch():
    values = 8 * CALL_BYTES // 32
    for more, expected in ((0, 1), (1, 2)):
        stretches, small = cut([10**6, values + more, 10**6], ["plain", "4", "plain"], BITS)
        assert (len(stretches), small) == (expected, [1])
