"""A bucket whose parameters go different ways is cut into few tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cccl._pieces import CALL_BYTES, SMALL, cut

BITS = {"4": 4.125, "8": 8.125, "plain": 32.0, "auto": 33.0}
RANK = {"4": 4, "8": 8, "plain": 64}


def finer(one: str, other: str) -> bool:
    return one in RANK and other in RANK and RANK[one] > RANK[other]


parameters = st.lists(
    st.tuples(
        st.sampled_from([1, 64, 768, 3000, SMALL - 1, SMALL, 4 * SMALL, 10**6]),
        st.sampled_from(list(BITS)),
    ),
    min_size=1,
    max_size=30,
)


@given(parameters)
def test_every_parameter_goes_once_its_own_way_or_a_finer_one(found):
    counts, ways = [c for c, _ in found], [w for _, w in found]
    pieces = cut(counts, ways, BITS, finer)
    own = {}
    for way, piece in pieces:
        assert list(piece.parameters) == sorted(piece.parameters)
        for i in piece.parameters:
            if i in piece.apart:
                assert counts[i] < SMALL, "only what is small goes along as zeros"
                continue
            assert i not in own
            own[i] = way, piece
            assert way == ways[i] or finer(way, ways[i])
        if piece.in_place:
            first, last = piece.parameters[0], piece.parameters[-1]
            assert piece.parameters == tuple(range(first, last + 1)), "one stretch"
        assert sum(counts[i] for i in piece.apart) * BITS[way] / 8 <= CALL_BYTES * len(found)
    assert own.keys() == set(range(len(found)))
    lying = [i for _, piece in pieces if piece.in_place for i in piece.parameters]
    assert len(lying) == len(set(lying)), "stretches do not overlap"
    for _, piece in pieces:
        for i in piece.apart:
            assert not own[i][1].in_place, "it was copied before it is set to zero"


@given(parameters)
def test_a_way_costs_one_collective_and_one_for_each_large_parameter_at_most(found):
    counts, ways = [c for c, _ in found], [w for _, w in found]
    pieces = cut(counts, ways, BITS, finer)
    assert len(pieces) <= len(set(ways)) + sum(count >= SMALL for count in counts)
    extra = sum(
        counts[i] * (BITS[way] - BITS[ways[i]]) / 8
        for way, piece in pieces
        for i in piece.parameters
        if i not in piece.apart
    )
    assert extra <= CALL_BYTES * len(BITS), "what goes a finer way than it was asked to"


def test_a_transformers_layers_are_one_collective_for_each_way():
    layer = [("plain", 768), ("plain", 768), ("4", 3 * 768 * 768), ("plain", 3 * 768),
             ("4", 768 * 768), ("plain", 768), ("plain", 768), ("plain", 768),
             ("4", 4 * 768 * 768), ("plain", 4 * 768), ("4", 4 * 768 * 768),
             ("plain", 768)]  # fmt: skip
    found = cut([c for _, c in layer * 4], [w for w, _ in layer * 4], BITS, finer)
    assert sorted(way for way, _ in found) == ["4", "plain"]
    ((_, matrices),) = [p for p in found if p[0] == "4"]
    assert matrices.in_place and len(matrices.apart) == 8 * 4 - 3


def test_a_few_values_go_with_a_finer_way_rather_than_alone():
    few, many = 1000, 200_000
    assert len(cut([many, few], ["8", "4"], BITS, finer)) == 1
    assert len(cut([many, few], ["4", "8"], BITS, finer)) == 2, "never with a coarser one"
    assert len(cut([many, SMALL - 1], ["plain", "4"], BITS, finer)) == 2, "too many bytes"
