"""Every collective and point-to-point call of torch.distributed, as PyTorch's own tests make them.

Each function makes its calls on a group and returns what they wrote, to be compared between groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expect import gradient

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN,
       dist.ReduceOp.MAX)  # fmt: skip
BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
COUNT = 1000
Found = list[torch.Tensor]
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def mine(group: Any, dtype: torch.dtype = torch.float32, count: int = COUNT) -> torch.Tensor:
    """This rank's values."""
    return gradient(dist.get_rank(group), count, dtype)


def all_reduce(group: Any) -> Found:
    found = []
    for dtype in (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.complex64):
        for op in OPS:
            if dtype.is_complex and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                continue
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            found.append(mine(group, dtype))
            dist.all_reduce(found[-1], op, group=group)
    for op in BITS:
        found.append(mine(group, torch.int32))
        dist.all_reduce(found[-1], op, group=group)
    return found


def all_reduce_by_method(group: Any) -> Found:
    found = [mine(group) for _ in range(4)]
    group.allreduce(found[0]).wait()
    group.allreduce([found[1]]).wait()
    group.allreduce([found[2]], dist.ReduceOp.MAX).wait()
    group.allreduce(found[3], op=dist.ReduceOp.SUM).wait()
    return found


def all_reduce_of_odd_layouts(group: Any) -> Found:
    found = [torch.tensor(float(dist.get_rank(group))), torch.empty(0), mine(group)[::1]]
    found.append(mine(group, count=12).reshape(3, 4).t())
    parameter = torch.nn.Parameter(mine(group), requires_grad=False)
    for tensor in (*found, parameter):
        dist.all_reduce(tensor, group=group)
    return [*found, parameter.detach()]


def sparse_all_reduce(group: Any) -> Found:
    rank = dist.get_rank(group)
    tensor = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (8,))
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def broadcast(group: Any) -> Found:
    found = []
    for source in dist.get_process_group_ranks(group):
        for dtype in (*FLOATS, torch.int64, torch.bool):
            found.append(mine(group, dtype))
            dist.broadcast(found[-1], source, group=group)
    found.append(mine(group))
    group.broadcast(found[-1], 1).wait()
    return found


def reduce(group: Any) -> Found:
    found = []
    for target in dist.get_process_group_ranks(group):
        tensor = mine(group)
        dist.reduce(tensor, target, group=group)
        found += [tensor] if dist.get_rank() == target else []
    return found


def all_gather(group: Any) -> Found:
    found = []
    for dtype in (*FLOATS, torch.int64, torch.bool):
        parts = [torch.empty(COUNT, dtype=dtype) for _ in range(group.size())]
        dist.all_gather(parts, mine(group, dtype), group=group)
        whole = torch.empty(COUNT * group.size(), dtype=dtype)
        _all_gather(whole, mine(group, dtype), group=group)
        found += [*parts, whole]
    return found


def gather_and_scatter(group: Any) -> Found:
    found = []
    for root in dist.get_process_group_ranks(group):
        is_root = dist.get_rank() == root
        parts = [torch.empty(COUNT) for _ in range(group.size())] if is_root else None
        dist.gather(mine(group), parts, root, group=group)
        part = torch.empty(COUNT)
        sent = [gradient(i, COUNT, part.dtype) for i in range(group.size())] if is_root else None
        dist.scatter(part, sent, root, group=group)
        found += [*(parts or []), part]
    return found


def reduce_scatter(group: Any) -> Found:
    found = []
    for dtype in FLOATS:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            part = torch.empty(COUNT, dtype=dtype)
            _reduce_scatter(part, mine(group, dtype, COUNT * group.size()), op, group)
            found.append(part)
        whole = mine(group, dtype, COUNT * group.size())
        part = torch.empty(COUNT, dtype=dtype)
        dist.reduce_scatter(part, [c.clone() for c in whole.chunk(group.size())], group=group)
        found.append(part)
    return found


def all_to_all(group: Any) -> Found:
    size, rank = group.size(), dist.get_rank(group)
    even, uneven = torch.empty(COUNT * size), torch.empty(sum(i + rank + 1 for i in range(size)))
    dist.all_to_all_single(even, mine(group, count=COUNT * size), group=group)
    counts = [i + rank + 1 for i in range(size)]
    dist.all_to_all_single(uneven, mine(group, count=sum(counts)), counts, counts, group=group)
    return [even, uneven]


def point_to_point(group: Any) -> Found:
    members, rank, size = dist.get_process_group_ranks(group), dist.get_rank(group), group.size()
    following, previous = members[(rank + 1) % size], members[rank - 1]
    received = [torch.empty(COUNT) for _ in range(4)]
    work = dist.isend(mine(group), following, group=group)
    dist.recv(received[0], previous, group=group)
    work.wait()
    work = dist.isend(mine(group), following, group=group, tag=7)
    assert dist.irecv(received[1], previous, group=group, tag=7).wait() is not False
    work.wait()
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine(group), following, group),
        dist.P2POp(dist.irecv, received[2], previous, group),
    ]):  # fmt: skip
        work.wait()
    if rank == 0:
        assert dist.recv(received[3], group=group) == members[1]
    elif rank == 1:
        dist.send(mine(group), members[0], group=group)
    return received if rank == 0 else received[:3]


def objects(group: Any) -> Found:
    members, rank, size = dist.get_process_group_ranks(group), dist.get_rank(group), group.size()
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank}, group=group)
    assert everybody == [{"rank": i} for i in range(size)]
    told = [("root", rank)]
    dist.broadcast_object_list(told, members[1], group=group)
    assert told == [("root", 1)]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, members[0], group=group)
    assert rank or gathered == list(range(size))
    got: list[Any] = [None]
    dist.scatter_object_list(got, list("abcdefgh"[:size]), members[0], group=group)
    if rank == 0:
        dist.send_object_list(["hello", 1], members[1], group=group)
    elif rank == 1:
        heard: list[Any] = [None, None]
        dist.recv_object_list(heard, members[0], group=group)
        assert heard == ["hello", 1]
    return [torch.tensor([ord(got[0])])]


def barriers(group: Any) -> Found:
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()
    group.barrier().wait()
    group.monitored_barrier()
    return []


def async_works(group: Any) -> Found:
    """All under way at once; by `wait()` and by the future."""
    size = group.size()
    a, b, c = mine(group), mine(group), torch.empty(COUNT * size)
    d, e = torch.empty(COUNT), mine(group, torch.int64)
    works = [
        dist.all_reduce(a, group=group, async_op=True),
        dist.broadcast(b, dist.get_process_group_ranks(group)[0], group=group, async_op=True),
        _all_gather(c, mine(group), group=group, async_op=True),
        _reduce_scatter(d, mine(group, count=COUNT * size), group=group, async_op=True),
        dist.all_reduce(e, group=group, async_op=True),
    ]
    assert all(work.wait() for work in works[:4])
    if a.is_cuda:  # there wait() returns before the work is done
        torch.cuda.synchronize()
    assert all(work.is_completed() for work in works[:3])
    tripled = works[4].get_future().then(lambda f: f.value()[0] * 3)
    return [a, b, c, d, e, tripled.wait()]


def coalesced(group: Any) -> Found:
    found, size = [mine(group) for _ in range(3)] + [mine(group, count=3)], group.size()
    with dist._coalescing_manager(group):
        for tensor in found:
            dist.all_reduce(tensor, group=group)
    later = mine(group)
    with dist._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(later, group=group)
    manager.wait()
    wholes = [torch.empty(COUNT * size), torch.empty(2 * size)]
    with dist._coalescing_manager(group):
        _all_gather(wholes[0], mine(group), group=group)
        _all_gather(wholes[1], mine(group, count=2), group=group)
    parts = [torch.empty(COUNT), torch.empty(2)]
    with dist._coalescing_manager(group):
        _reduce_scatter(parts[0], mine(group, count=COUNT * size), group=group)
        _reduce_scatter(parts[1], mine(group, count=2 * size), group=group)
    return [*found, later, *wholes, *parts]


def functional(group: Any) -> Found:
    """What DTensor and torch.compile use."""
    size = group.size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            funcol.all_reduce(mine(group), "sum", group),
            funcol.all_reduce(mine(group), "avg", group),
            funcol.all_reduce(mine(group), "max", group),
            funcol.all_gather_tensor(mine(group), 0, group),
            funcol.reduce_scatter_tensor(mine(group, count=COUNT * size), "sum", 0, group),
            funcol.broadcast(mine(group), 0, group),
            funcol.all_to_all_single(mine(group, count=COUNT * size), None, None, group),
            *funcol.all_reduce_coalesced([mine(group), mine(group)], "sum", group),
            *funcol.all_gather_into_tensor_coalesced([mine(group), mine(group)], group),
            *funcol.reduce_scatter_tensor_coalesced(
                [mine(group, count=COUNT * size)], "sum", [0], group
            ),
        ]
    return [funcol.wait_tensor(tensor).clone() for tensor in found]


def refused(group: Any) -> Found:
    """What the plain backend does not take is refused in the same words, and nothing is sent."""
    texts = []
    for call in (
        lambda: dist.all_reduce(torch.ones(COUNT, dtype=torch.bool), dist.ReduceOp.AVG, group),
        lambda: dist.all_reduce(mine(group).to(torch.complex64), dist.ReduceOp.MAX, group),
        lambda: dist.broadcast(mine(group), 99, group=group),
        lambda: dist.all_gather([torch.empty(3)], torch.empty(4), group=group),
        lambda: dist.all_reduce(torch.empty(COUNT, device="meta"), group=group),
    ):
        try:
            call()
            texts.append("nothing")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}".replace(repr(group), "G"))
    return [torch.tensor(list("\n".join(texts).encode()))]


EVERY: tuple[Callable[[Any], Found], ...] = (
    all_reduce, all_reduce_by_method, all_reduce_of_odd_layouts, sparse_all_reduce, broadcast,
    reduce, all_gather, gather_and_scatter, reduce_scatter, all_to_all, point_to_point, objects,
    barriers, async_works, coalesced, functional, refused,
)  # fmt: skip
