"""Training scripts that name backend "cccl": DDP, ZeRO, what goes wrong, and many calls at once."""

from __future__ import annotations

import random
import re
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expect import assert_equal, gradient, parameters_digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 300), nn.ReLU(), nn.Linear(300, 7))


def _train(ddp, steps=5, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(gradient(dist.get_rank(), (8, 24), torch.float32, seed=step)).square().mean().backward()
        optimizer.step()
    return parameters_digest(ddp) if isinstance(ddp, DistributedDataParallel) else None


def _compressed_rows():
    return [row for row in cccl.stats()["rows"] if not row["plain"]]


def _script(backend, pg_options, settings):
    """A script's whole life: the group made, a model trained, the group destroyed."""
    cccl.configure({"attach_ddp": False, **settings})
    dist.init_process_group(backend, timeout=timedelta(seconds=30), pg_options=pg_options)
    try:
        assert dist.get_backend_config() == dist.get_backend_config(dist.new_group())
        digest = _train(DistributedDataParallel(_mlp()))
        group = weakref.ref(dist.group.WORLD.plain_group)
    finally:
        dist.destroy_process_group()
    assert group() is None, "nothing keeps a destroyed group"
    assert not dist.distributed_c10d._world.pg_group_ranks
    return digest, {row["codec"].split("(")[0] for row in _compressed_rows()}


def _mesh_script():
    dist.init_process_group("cpu:cccl", timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    assert {type(g) for g in mesh.get_all_groups()} == {type(dist.group.WORLD)}
    _train(fully_shard(_mlp(), mesh=mesh), 1)
    dist.destroy_process_group()
    return {row["collective"] for row in _compressed_rows()}


SCRIPTS = (
    ("cpu:cccl", None, {}, "block_float8"),
    ("cccl", None, {"compression_type": "cast_bf16"}, "cast_bf16"),
    ("cpu:cccl,cuda:cccl", {"compression_type": "block_float4"}, {}, "block_float4"),
    ("cpu:cccl", cccl.Config(), {"compression_type": "none"}, "block_float8"),
)


def test_one_string_compresses_a_training_script(own_ranks):
    """One after the other in the same processes."""
    pool = own_ranks(2, backend="")
    for *script, codec in SCRIPTS:
        found = pool(_script, *script)
        assert_equal(found)
        assert found[0][1] == {codec}
    assert pool(_mesh_script) == [{"reduce_scatter"}] * 2


def _refused(backend, pg_options=None):
    dist.init_process_group(backend, timeout=timedelta(seconds=5), pg_options=pg_options)


BAD = (
    ("xpu:cccl", None, cccl.ConfigError, "takes devices cpu and cuda, not 'xpu'"),
    ("cpu:cccl,cuda:mpi", None, cccl.ConfigError, "'mpi' does not go with cccl"),
    ("cpu:cccl", {"compression_typ": "none"}, cccl.ConfigError, "did you mean"),
    ("cpu:cccl", {"compression_type": "gzip"}, cccl.ConfigError, "allowed: none, auto"),
    ("cpu:cccl", "fast", cccl.ConfigError, "pg_options is a str"),
    ("cuda:cccl", None, cccl.UnsupportedError, "use 'cpu:cccl' for CPU tensors"),
    ("cpu:ccl", None, Exception, "(?i)unknown.*ccl"),  # torch's own
)


def test_a_string_or_config_that_cannot_work_is_refused_at_once(own_ranks):
    pool = own_ranks(1, backend="")
    for backend, pg_options, error, words in BAD:
        if backend == "cuda:cccl" and torch.cuda.is_available():
            continue
        (found,) = pool.outcomes(_refused, backend, pg_options)
        with pytest.raises(error, match=words):
            raise found


def _foreign_caller():
    options = dist.distributed_c10d._DistributedBackendOptions()
    with pytest.raises(cccl.UnsupportedError, match=f"torch {re.escape(torch.__version__)} makes"):
        dist.Backend._plugins["CCCL"].creator_fn(options, None)


def test_a_torch_that_makes_groups_in_another_way_is_named(ranks):
    ranks(2)(_foreign_caller)


def _ddp_beside_the_hook():
    """The same model on the backend, and under the hook on plain gloo."""
    cccl.configure({"attach_ddp": False})
    group = dist.new_group(backend="cpu:cccl")
    plain = _train(DistributedDataParallel(_mlp()), 1)
    ours = DistributedDataParallel(_mlp(), process_group=group)
    compressed = _train(ours, 20)
    assert _compressed_rows()[0]["label"] == "backend cccl"
    cccl.reset_stats()
    hooked = DistributedDataParallel(_mlp(), process_group=group)
    cccl.torch.compress(hooked, {"compression_type": "block_float4"})
    _train(hooked)
    assert {row["label"] for row in _compressed_rows()} == {"bucket 0"}, "not compressed twice"
    dist.destroy_process_group(group)
    return plain, compressed


def test_ddp_replicas_stay_bitwise_equal_on_the_backend(ranks):
    assert_equal(ranks(3)(_ddp_beside_the_hook))


def _off():
    cccl.configure({"compression_type": "none"})
    group = dist.new_group(backend="cpu:cccl")
    found = _train(DistributedDataParallel(_mlp(), process_group=group))
    expected = _train(DistributedDataParallel(_mlp()))
    dist.destroy_process_group(group)
    return found == expected


def test_ddp_with_compression_off_equals_plain_ddp_bitwise(ranks):
    assert ranks(2)(_off) == [True, True]


def _zero(on_backend):
    cccl.configure({"attach_ddp": False})
    group = dist.new_group(backend="cpu:cccl") if on_backend else dist.new_group()
    ddp = DistributedDataParallel(_mlp(), process_group=group)
    if not on_backend:
        cccl.torch.compress(ddp)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    digest = _train(ddp, 5, optimizer)
    optimizer.consolidate_state_dict(0)
    assert _compressed_rows()
    state = optimizer.state_dict() if dist.get_rank() == 0 else None
    assert state is None or len(state["state"]) == 4
    whole = DistributedDataParallel(_mlp(), process_group=group)
    if not on_backend:
        cccl.torch.compress(whole)
    expected = _train(whole, 5, torch.optim.Adam(whole.parameters(), lr=0.01))
    dist.destroy_process_group(group)
    return digest, expected


@pytest.mark.parametrize("on_backend", [True, False], ids=["backend", "hook"])
def test_zero_redundancy_optimizer_equals_the_whole_one(ranks, on_backend):
    found = ranks(2)(_zero, on_backend)
    assert_equal(found)
    assert found[0][0] == found[0][1]


def _disagree(how):
    group = dist.new_group(backend="cpu:cccl")
    ddp = DistributedDataParallel(_mlp(), process_group=group)
    codec = "block_float8" if dist.get_rank() else "block_float4"
    cccl.configure({"compression_type": codec, "attach_ddp": False})
    with pytest.raises(cccl.MismatchError, match="codecs") as caught:
        if how == "backward":
            ddp(torch.ones(3, 24)).sum().backward()
        elif how == "wait":
            dist.all_reduce(torch.ones(5000), group=group, async_op=True).wait()
        elif how == "call":
            dist.all_reduce(torch.ones(5000), group=group)
        else:
            funcol.wait_tensor(funcol.all_reduce(torch.ones(5000), "sum", group))
    if how == "backward":
        assert all(p.grad.isnan().all() for p in ddp.parameters())
    work = dist.all_reduce(torch.ones(5000), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="MismatchError"):
        work.get_future().then(lambda f: f.value()).wait()
    with pytest.raises(cccl.MismatchError):
        work.wait()
    assert isinstance(work.exception(), cccl.MismatchError)
    dist.destroy_process_group(group)
    return str(caught.value)


@pytest.mark.parametrize("how", ["backward", "wait", "call", "functional"])
def test_a_failure_has_its_type_wherever_it_comes_out(ranks, how):
    assert_equal(ranks(2)(_disagree, how))


def _late():
    cccl.configure({"attach_ddp": False})
    group = dist.new_group(backend="cpu:cccl", timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(5000), group=group)
    if dist.get_rank() == 1:
        time.sleep(3)
        return None
    begun = time.monotonic()
    work = dist.all_reduce(torch.ones(5000), group=group, async_op=True)
    with pytest.raises(cccl.DeadlineError, match=r"not done after 0\.2 s"):
        work.wait(timedelta(seconds=0.2))
    with pytest.raises(cccl.DeadlineError, match="waited 2 s for rank 1"):
        work.wait()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):  # plain, as gloo says it
        dist.all_reduce(torch.ones(5), group=group)
    return time.monotonic() - begun


def _options_timeout():
    cccl.configure({"attach_ddp": False})
    group = dist.new_group(backend="cpu:cccl")
    group.allreduce([torch.ones(5000)]).wait()
    if dist.get_rank() == 0:
        work = group.allreduce([torch.ones(5000)], dist.ReduceOp.SUM, timedelta(seconds=1))
        with pytest.raises(cccl.DeadlineError, match="waited 1 s"):
            work.wait()
    else:
        time.sleep(2)
    cccl.torch.recover(group)
    tensor = torch.ones(5000)
    dist.all_reduce(tensor, group=group)
    assert (tensor - 2).abs().max() < 0.02
    assert _compressed_rows()


def test_timeouts_are_the_groups_or_the_calls_own(own_ranks):
    pool = own_ranks(2)
    pool(_options_timeout, seconds=30)
    assert pool(_late, seconds=30)[0] < 6


class Stress:
    """Random calls, the same on all ranks, with some always under way; all results are checked."""

    def __init__(self, seed: int):
        self.random, self.rank, self.world = random.Random(seed), dist.get_rank(), 3
        self.groups = [
            dist.new_group(members, backend="cpu:cccl") for members in ([0, 1, 2], [0, 1], [1, 2])
        ]
        self.members = [[0, 1, 2], [0, 1], [1, 2]]
        self.under_way: list = []
        self.made = 0

    def step(self) -> None:
        index = self.random.choice((0, 0, 1, 2))
        kind = self.random.choice(self.KINDS)
        numel = self.random.choice((1, 60, 1000, 6000))
        later = self.random.random() < 0.4
        if self.rank in self.members[index]:
            kind(self, self.groups[index], self.members[index], numel, later)
            self.made += 1
        while len(self.under_way) > 6:
            self.finish()

    def finish(self) -> None:
        work, tensor, value = self.under_way.pop(0)
        if work is not None:
            work.wait()
        assert (tensor - value).abs().max() <= 0.01 * value

    def keep(self, work, tensor, value) -> None:
        self.under_way.append((work, tensor, value))

    def all_reduce(self, group, members, numel, later):
        tensor = torch.full((numel,), self.rank + 1.0)
        work = dist.all_reduce(tensor, group=group, async_op=later)
        self.keep(work, tensor, sum(members) + len(members))

    def coalesced(self, group, members, numel, later):
        tensors = [torch.full((n,), self.rank + 1.0) for n in (5, numel)]
        with dist._coalescing_manager(group, async_ops=later) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        if later:
            manager.wait()
        self.keep(None, tensors[1], sum(members) + len(members))

    def functional(self, group, members, numel, later):
        tensor = funcol.all_reduce(torch.full((numel,), self.rank + 1.0), "sum", group)
        self.keep(None, funcol.wait_tensor(tensor), sum(members) + len(members))

    def broadcast(self, group, members, numel, later):
        tensor = torch.full((numel,), self.rank + 1.0)
        work = dist.broadcast(tensor, members[-1], group=group, async_op=later)
        self.keep(work, tensor, members[-1] + 1)

    def reduce_scatter(self, group, members, numel, later):
        part, whole = torch.empty(numel), torch.full((numel * len(members),), self.rank + 1.0)
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = call(part, whole, group=group, async_op=later)
        self.keep(work, part, sum(members) + len(members))

    def all_gather(self, group, members, numel, later):
        parts = [torch.empty(numel) for _ in members]
        sent = torch.full((numel,), self.rank + 1.0)
        work = dist.all_gather(parts, sent, group=group, async_op=later)
        self.keep(work, parts[-1], members[-1] + 1)

    def ring(self, group, members, numel, later):
        place = members.index(self.rank)
        received = torch.empty(numel)
        sent = dist.isend(torch.ones(numel), members[(place + 1) % len(members)], group=group)
        dist.recv(received, members[place - 1], group=group)
        sent.wait()
        self.keep(None, received, 1)

    def future(self, group, members, numel, later):
        """What DDP does: only the future is kept."""
        tensor = torch.full((numel,), self.rank + 1.0)
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        self.keep(future.then(lambda f: f.value()), tensor, sum(members) + len(members))

    def barrier(self, group, members, numel, later):
        dist.barrier(group)

    KINDS = (all_reduce, all_reduce, coalesced, functional, broadcast, reduce_scatter, all_gather,
             ring, future, barrier)  # fmt: skip


def _stress(calls, seed=7):
    cccl.configure({"attach_ddp": False, "min_size": 2000, "deadline": 20})
    stress = Stress(seed)
    begun = time.monotonic()
    for _ in range(calls):
        stress.step()
    while stress.under_way:
        stress.finish()
    compressed = sum(row["calls"] for row in _compressed_rows())
    for group in stress.groups:
        dist.destroy_process_group(group)
    return stress.made, compressed, time.monotonic() - begun


def test_ten_thousand_mixed_calls_do_not_hang(own_ranks):
    found = own_ranks(3)(_stress, 10_000, seconds=120)
    assert max(made for made, *_ in found) > 9000
    assert all(compressed > 1000 for _, compressed, _ in found)
