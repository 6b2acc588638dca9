"""Any tensor: strides, dtypes, groups and ways to wait."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, allowed, assert_equal, check, digest, gradient, rows_of

import cccl
import cccl.torch

BLOCK8 = {"compression_type": "block_float8", "collective_filter": EVERYTHING}


def _strided():
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    views = {
        "transposed": lambda t: t.transpose(0, 2),
        "sliced": lambda t: t[1::2, :, 3:],
        "reordered": lambda t: t.permute(1, 2, 0),
        "channels_last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
        "offset": lambda t: t.reshape(-1)[3:],
        "scalar": lambda t: t[0, 0, 0],
    }
    for name, view in views.items():
        parts = [view(gradient(r, (6, 8, 33), torch.float32)) for r in range(world)]
        mine = parts[rank].clone(memory_format=torch.preserve_format)
        held = view(gradient(rank, (6, 8, 33), torch.float32)) if name != "channels_last" else mine
        strides, base = held.stride(), held._base
        cccl.torch.all_reduce(held, config=BLOCK8)
        exact = sum(p.double() for p in parts) / world
        whole = [p.contiguous().reshape(-1) for p in parts]
        check(
            held.contiguous().reshape(-1), exact.reshape(-1), allowed("block_float8", whole), name
        )
        assert held.stride() == strides
        found.append(digest(held))
        if name == "sliced":  # what lies between the values is not touched
            untouched = gradient(rank, (6, 8, 33), torch.float32)
            untouched[1::2, :, 3:] = held
            assert torch.equal(base, untouched)
    whole, part = torch.empty(5, 2 * world).t(), gradient(rank, (4, 5), torch.float32)[::2]
    cccl.torch.all_gather(whole, part, config=BLOCK8)
    found.append(digest(whole))
    out = torch.empty(2, 5).t()
    cccl.torch.reduce_scatter(out, whole.repeat(1, 1), config=BLOCK8)
    return found


def test_strided_tensors_are_reduced_in_place_with_their_strides(ranks):
    """F031, F032"""
    assert_equal(ranks(2)(_strided))


def _refused():
    base = torch.randn(3, 4)
    cases = [
        (
            lambda: cccl.torch.all_reduce(torch.randn(1, 4).expand(3, 4), config=BLOCK8),
            "contiguous",
        ),
        (lambda: cccl.torch.all_reduce(torch.zeros(3, device="meta"), config=BLOCK8), "on meta"),
        (lambda: cccl.torch.all_reduce(base, op="median", config=BLOCK8), "'avg', 'sum'"),
        (lambda: cccl.torch.reduce_scatter(base, base.double(), config=BLOCK8), "must be the same"),
        (lambda: cccl.torch.reduce_scatter(base, base, config=BLOCK8), "must have 24"),
        (lambda: cccl.torch.all_gather(base, base, config=BLOCK8), "must have 24"),
        (lambda: cccl.torch.all_reduce(base, config={"levle": "best"}), "did you mean 'level'"),
        (lambda: cccl.torch.all_reduce(base, "avg", config=3), "allowed: dict"),
    ]
    for call, text in cases:
        with pytest.raises((cccl.UnsupportedError, cccl.ConfigError), match=text):
            call()
    strict = BLOCK8 | {"strict": True}
    sparse = torch.eye(3).to_sparse()
    for call in (lambda: cccl.torch.all_reduce(base, dist.ReduceOp.MAX, config=strict),
                 lambda: cccl.torch.all_reduce(sparse, config=strict)):  # fmt: skip
        with pytest.raises(cccl.NotCompressedError):
            call()
    assert cccl.stats()["rows"] == [], "nothing was sent"
    cccl.torch.all_reduce(base, config=BLOCK8)


def test_what_cannot_be_sent_right_is_refused_before_anything_is_sent(ranks):
    """F031, F081, F086: an expanded output, another device, sizes that do not fit; strict mode."""
    ranks(2)(_refused)


def _overlapping():
    rank = dist.get_rank()
    for view in (lambda t: t.unfold(0, 4, 2), lambda t: t.as_strided((3, 3), (1, 2))):
        held = gradient(rank, 40, torch.float32)
        with pytest.raises(cccl.UnsupportedError, match="share memory"):
            cccl.torch.all_reduce(view(held), config=BLOCK8)
        assert torch.equal(held, gradient(rank, 40, torch.float32))


def test_an_output_whose_elements_overlap_is_refused(ranks):
    """F031: windows over one another too, not only expanded tensors."""
    ranks(2)(_overlapping)


def _inference():
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.inference_mode():
        for view in (lambda t: t, lambda t: t.t()):
            mine = view(gradient(rank, (30, 40), torch.float32).clone())
            cccl.torch.all_reduce(mine, config=BLOCK8)
            parts = [view(gradient(r, (30, 40), torch.float32)) for r in range(world)]
            flat = [p.contiguous().reshape(-1) for p in parts]
            exact = sum(p.double() for p in flat) / world
            check(mine.contiguous().reshape(-1), exact, allowed("block_float8", flat), "inference")


def test_tensors_of_inference_mode_are_reduced(ranks):
    """F031: strided ones too, which another thread fills."""
    ranks(2)(_inference)


def _temporaries():
    world, rank = dist.get_world_size(), dist.get_rank()
    works, checks = [], []
    for i in range(20):
        parts = [gradient(r, (2 * world, 500), torch.float32, seed=i) for r in range(world)]
        strided = parts[rank].t().contiguous().t()
        mine = torch.empty(1000)
        works.append(cccl.torch.reduce_scatter(mine, strided, async_op=True, config=BLOCK8))
        del strided
        torch.full((2 * world, 500), 1e9)  # takes the memory that a copy of the input had
        checks.append((mine, [p[2 * rank : 2 * rank + 2].reshape(-1) for p in parts]))
    for work, (mine, parts) in zip(works, checks, strict=True):
        work.wait()
        exact = sum(p.double() for p in parts) / world
        check(mine, exact, allowed("block_float8", parts), "strided input")


def test_the_copy_of_a_strided_input_lives_until_it_is_sent(ranks):
    """F031"""
    ranks(2)(_temporaries)


def _expanded_input():
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = [gradient(r, (1, 300), torch.float32).expand(2 * world, 300) for r in range(world)]
    mine = torch.empty(2, 300)
    cccl.torch.reduce_scatter(mine, parts[rank], config=BLOCK8)
    flat = [p[:2].contiguous().reshape(-1) for p in parts]
    exact = sum(p.double() for p in flat) / world
    check(mine.reshape(-1), exact, allowed("block_float8", flat), "expanded")


def test_an_expanded_input_is_read_right(ranks):
    """F031"""
    ranks(3)(_expanded_input)


def _integers():
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    strict = cccl.Config(compression_type="block_float4", strict=True, collective_filter=EVERYTHING)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool):
        parts = [gradient(r, 1000, dtype) for r in range(world)]
        mine = parts[rank].clone()
        cccl.torch.all_reduce(mine, "sum", config=strict)
        exact = sum(p.long() for p in parts)
        assert torch.equal(mine, exact.bool() if dtype is torch.bool else exact.to(dtype))
        whole, first = torch.empty(1000 * world, dtype=dtype), parts[rank].clone()
        cccl.torch.all_gather(whole, parts[rank], config=strict)
        cccl.torch.broadcast(first, 0, config=strict)
        assert torch.equal(whole, torch.cat(parts)) and torch.equal(first, parts[0])
        assert rows_of("all_reduce", dtype)[0]["reason"] == "integers are never lossy"
        found.append(digest(mine))
    return found


def test_integers_and_bools_arrive_exactly(ranks):
    """F040: plain, counted as plain, and no complaint in strict mode."""
    assert_equal(ranks(3)(_integers))


DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool,
)  # fmt: skip
OPS = ("avg", "sum", "AVG", "SUM", "MIN", "MAX", "PRODUCT")


def _reference(parts, op):
    stack = torch.stack(parts)
    if op in ("MIN", "MAX"):
        wide = stack.to(torch.int64) if not stack.is_floating_point() else stack.double()
        return wide.amin(0) if op == "MIN" else wide.amax(0)
    wide = stack.to(torch.complex128 if stack.is_complex() else torch.float64)
    if op == "PRODUCT":
        return wide.prod(0)
    return wide.sum(0) if op.lower() == "sum" else wide.mean(0)


def _table(collective):
    world, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for dtype in DTYPES:
        for name in OPS if "reduce" in collective else ("sum",):
            op = name if name.islower() else getattr(dist.ReduceOp, name)
            parts = [gradient(r, 4 * world, dtype, seed=3) for r in range(world)]
            mine, out = parts[rank].clone(), parts[rank][:4].clone()
            exact, what = None, f"{collective} {name} {dtype}"
            try:
                if collective == "all_reduce":
                    exact, out = _reference(parts, name), mine
                    cccl.torch.all_reduce(mine, op, config=BLOCK8)
                elif collective == "reduce_scatter":
                    exact = _reference(parts, name)[4 * rank : 4 * rank + 4]
                    cccl.torch.reduce_scatter(out, mine, op, config=BLOCK8)
                elif collective == "all_gather":
                    exact, out = torch.cat(parts), torch.empty(4 * world * world, dtype=dtype)
                    cccl.torch.all_gather(out, mine, config=BLOCK8)
                else:
                    exact, out = parts[0], mine
                    cccl.torch.broadcast(mine, 0, config=BLOCK8)
            except (cccl.Error, TypeError, ValueError):
                if not torch.equal(mine, parts[rank]):
                    wrong.append(f"{what}: refused, but the tensor was changed")
                continue
            except Exception as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            if dtype is torch.bool and name.lower() == "sum":
                exact = exact != 0
            if not torch.allclose(out.to(exact.dtype), exact, rtol=0.02, atol=0.05):
                wrong.append(f"{what}: {out.tolist()} instead of {exact.tolist()}")
    return wrong


@pytest.mark.parametrize("collective", EVERYTHING)
def test_every_op_and_dtype_gives_the_reference_result_or_a_typed_error(ranks, collective):
    """F037, F089: no third outcome, and a refused tensor is as it was."""
    assert ranks(2)(_table, collective) == [[], []]


def _complex():
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = [gradient(r, (40, 33), torch.complex64) for r in range(world)]
    mine = parts[rank].t().clone().t()
    cccl.torch.all_reduce(mine, config=BLOCK8)
    exact = sum(torch.view_as_real(p).double() for p in parts) / world
    flat = [torch.view_as_real(p).reshape(-1) for p in parts]
    check(torch.view_as_real(mine.contiguous()).reshape(-1), exact.reshape(-1),
          allowed("block_float8", flat), "complex")  # fmt: skip
    conjugate = parts[rank].clone().conj()
    try:
        cccl.torch.all_reduce(conjugate, config=BLOCK8)
        assert torch.allclose(conjugate.resolve_conj(), mine.conj().resolve_conj(), atol=0.05)
    except cccl.UnsupportedError:
        assert torch.equal(conjugate, parts[rank].conj())
    return digest(mine)


def test_complex_values_are_pairs_of_real_ones(ranks):
    """F037: conjugated views too, or they are refused."""
    assert_equal(ranks(2)(_complex))


def _subgroups():
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    shared = gradient(rank, 3000, torch.float32)
    cccl.torch.all_reduce(shared, group=row, config=BLOCK8)
    cccl.torch.all_reduce(shared, group=column, config=BLOCK8)
    exact = sum(gradient(r, 3000, torch.float32).double() for r in range(4)) / 4
    assert (shared.double() - exact).abs().max() < 0.1
    other = gradient(rank, 100, torch.float32)
    outside = cccl.torch.all_reduce(other, group=rows[1 - rank // 2], config=BLOCK8)
    assert outside is None
    assert torch.equal(other, gradient(rank, 100, torch.float32)), "not ours to change"
    sent = gradient(rank, 500, torch.float32)
    source = 2 * (rank // 2) + 1  # a global rank
    cccl.torch.broadcast(sent, source, group=row, config=BLOCK8)
    assert (sent - gradient(source, 500, torch.float32)).abs().max() < 0.1
    for group in (*rows, *columns):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return digest(shared)


def test_a_grid_of_groups_reduces_over_both_dimensions(ranks):
    """F073: and a group's other ranks take no part."""
    found = ranks(4)(_subgroups)
    # Each pair agrees in its own last reduction; the two columns reduce different row means.
    assert found[0] == found[2] and found[1] == found[3]


def _asynchronous():
    rank = dist.get_rank()
    large = torch.ones(1 << 24) * (rank + 1)
    cccl.torch.all_reduce(large[:1000], config=BLOCK8)
    quickest, unfinished = 1.0, False
    for _ in range(4):
        large.fill_(rank + 1)
        dist.barrier()
        begun = time.perf_counter()
        work = cccl.torch.all_reduce(large, async_op=True, config=BLOCK8)
        quickest = min(quickest, time.perf_counter() - begun)
        unfinished |= not work.is_completed()
        assert work.wait() is True
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert (large - 1.5).abs().max() <= 0.02
    assert unfinished, "a call that returns at once is not done at once"
    return quickest


def test_an_asynchronous_call_returns_at_once_and_its_result_is_there_after_wait(ranks):
    """F068: 64 MiB, under 5 ms; the quickest of four, since the machine is shared."""
    assert max(ranks(2)(_asynchronous)) < 0.005


def _four_calls(config):
    tensor, out = torch.ones(400), torch.empty(800)
    part = torch.empty(200)
    return [
        lambda later: cccl.torch.all_reduce(tensor, async_op=later, config=config),
        lambda later: cccl.torch.reduce_scatter(part, tensor, async_op=later, config=config),
        lambda later: cccl.torch.all_gather(out, tensor, async_op=later, config=config),
        lambda later: cccl.torch.broadcast(tensor, 0, async_op=later, config=config),
    ]


def _works():
    for config, plain in ((BLOCK8, False), ({"compression_type": "none"}, True)):
        for call in _four_calls(config):
            assert call(False) is None
            work = call(True)
            assert work.wait()
            if plain:  # the rest is gloo's own, which lacks futures of some collectives
                continue
            assert work.is_completed() and work.is_success()
            assert isinstance(call(True).get_future().wait(), torch.Tensor)
    seen = []
    work = cccl.torch.all_reduce(torch.ones(400), async_op=True, config=BLOCK8)
    then = work.get_future().then(lambda future: seen.append(future.value().sum().item()))
    then.wait()
    assert seen == [400.0] and torch.equal(work.result()[0], torch.ones(400))
    assert work.wait(timedelta(seconds=5)) and work.wait(5.0)


def test_works_have_the_semantics_of_c10d(ranks):
    """F070: all four collectives, compressed and plain, waiting and not."""
    ranks(2)(_works)


def _many_in_flight():
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [gradient(rank, 100 * (i + 1), torch.float32, seed=i) for i in range(20)]
    works = [cccl.torch.all_reduce(t, async_op=True, config=BLOCK8) for t in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        parts = [gradient(r, 100 * (i + 1), torch.float32, seed=i) for r in range(world)]
        exact = sum(p.double() for p in parts) / world
        check(tensor, exact, allowed("block_float8", parts), f"number {i}")
    return [digest(t) for t in tensors]


def test_many_collectives_in_flight_do_not_mix(ranks):
    assert_equal(ranks(3)(_many_in_flight))


def _beside_the_callers_own():
    """Ours has connections of its own: the caller's messages are not its."""
    rank = dist.get_rank()
    ours = [gradient(rank, 5000, torch.float32, seed=i) for i in range(5)]
    works = []
    for tensor in ours:
        works.append(cccl.torch.all_reduce(tensor, async_op=True, config=BLOCK8))
        theirs = torch.tensor([rank + 1.0])
        dist.all_reduce(theirs)
        assert theirs.item() == 3.0
    for work in works:
        work.wait()
    return [digest(t) for t in ours]


def test_the_callers_own_collectives_may_run_in_between(ranks):
    assert_equal(ranks(2)(_beside_the_callers_own))


def _ops():
    """An operation as a name, as the enum's value, and as an object made of it."""
    found = {}
    strict = cccl.Config(**BLOCK8, strict=True)
    for name in ("avg", "sum"):
        kind = getattr(dist.ReduceOp, name.upper())
        for op in (name, kind, dist.ReduceOp(kind)):
            tensor = gradient(dist.get_rank(), 10_000, torch.float32)
            cccl.torch.all_reduce(tensor, op, config=strict)
            found.setdefault(name, set()).add(digest(tensor))
    assert [len(digests) for digests in found.values()] == [1, 1]
    return found


def test_an_operation_means_the_same_in_every_form(ranks):
    assert_equal(ranks(2)(_ops))
