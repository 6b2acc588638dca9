"""Parameters of a DDP model on GPUs that go different ways."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, parameters_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

EMBEDDING_AT_8 = {"name": "0.*", "compression_type": "block_float8"}
SMALL_PLAIN = {"max_ndim": 1, "compression_type": "none"}
SMALL_AT_8 = {"max_ndim": 1, "compression_type": "block_float8"}
RULES = {"plain": [EMBEDDING_AT_8, SMALL_PLAIN], "8 bits": [SMALL_AT_8]}


def _model(**options) -> DistributedDataParallel:
    """Matrices of 512 x 512 between norms and biases, behind an embedding of 200 KiB."""
    torch.manual_seed(1)
    block = [(nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU()) for _ in range(4)]
    layers = [layer for one in block for layer in one]
    model = nn.Sequential(nn.Embedding(100, 512), *layers, nn.Linear(512, 10)).cuda()
    device = torch.cuda.current_device()
    return DistributedDataParallel(model, device_ids=[device], bucket_cap_mb=2, **options)


def _backward(model: nn.Module, step: int = 0, amp: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 100, (64,), generator=generator).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        loss = nn.functional.cross_entropy(model(tokens), tokens % 10)
    loss.backward()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


def _train(rules, view, amp):
    model = _model(gradient_as_bucket_view=view)
    config = {"compression_type": "block_float4", "rules": RULES[rules], "strict": True}
    state = cccl.torch.compress(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(12):
        optimizer.zero_grad()
        _backward(model, step % 2, amp)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.cuda.synchronize()
    small = "none" if rules == "plain" else "block_float8"
    for decision in state.decisions():
        expected = small if len(decision.shape) == 1 else "block_float4"
        if rules == "plain" and decision.name == "0.weight":
            expected = "block_float8"
        assert decision.way == expected, decision
    return parameters_digest(model.cpu())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("view", "amp"), [(False, False), (True, False), (True, True)], ids=["copies", "views", "amp"]
)
def test_ranks_stay_bitwise_equal(gpu_ranks, world, rules, view, amp):
    """Backwards and optimizer steps follow each other without a wait of the host."""
    assert_equal(gpu_ranks(world)(_train, rules, view, amp))


def _exactness():
    exact, model = _model(), _model()
    cccl.torch.compress(model, {"compression_type": "block_float4", "rules": RULES["plain"]})
    found = []
    for step in range(4):
        for ddp in (exact, model):
            ddp.zero_grad()
            _backward(ddp, step)
        expected = _gradients(exact)
        for name, gradient in _gradients(model).items():
            if gradient.dim() == 1:
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
            else:
                most = 0.02 if name == "0.weight" else 0.5
                error = float((gradient - expected[name]).norm() / expected[name].norm())
                assert 0 < error < most, (name, error)
        found += [digest(gradient) for gradient in _gradients(model).values()]
    return found


def test_what_is_copied_and_set_to_zero_comes_back_whole(gpu_ranks):
    assert_equal(gpu_ranks(2)(_exactness))


def _on_cpu_and_gpu(kind):
    """Gradients are set by hooks to the same values on both."""
    model = _model()
    if kind == "cpu":
        model = DistributedDataParallel(model.module.cpu(), bucket_cap_mb=2)
    cccl.torch.compress(model, {"compression_type": "block_float4", "rules": RULES["8 bits"]})
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        fixed = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.register_hook(lambda _, fixed=fixed: fixed.clone())
    tokens = torch.arange(64) % 100
    model(tokens.cuda() if kind == "cuda" else tokens).sum().backward()
    return [digest(p.grad) for p in model.parameters()]


def test_a_cut_bucket_has_the_bits_that_it_has_on_a_cpu(gpu_ranks):
    pool = gpu_ranks(2)
    assert_equal([*pool(_on_cpu_and_gpu, "cuda"), *pool(_on_cpu_and_gpu, "cpu")])


def _steps():
    model = _model()
    late = {"max_ndim": 1, "compression_type": "block_float8", "schedule": [[4, "none"]]}
    config = {"compression_type": "block_float4", "start_step": 2, "rules": [late]}
    state = cccl.torch.compress(model, config)
    ways = []
    for step in range(6):
        _backward(model, step)
        ways.append(sorted({decision.way for decision in state.decisions()}))
    torch.cuda.synchronize()
    both = ["block_float4", "block_float8"]
    assert ways == [["none"]] * 2 + [both] * 2 + [["block_float4", "none"]] * 2
    return [digest(p.grad) for p in model.parameters()]


def test_steps_change_codecs(gpu_ranks):
    assert_equal(gpu_ranks(2)(_steps))


def _spike():
    model = _model()
    config = {"compression_type": "block_float4", "rules": RULES["8 bits"],
              "spike_factor": 20, "spike_steps": 2}  # fmt: skip
    state = cccl.torch.compress(model, config)
    parameter = model.module[0].weight
    ways = []
    for step in range(13):
        huge = step == 9 and dist.get_rank() == 1
        handle = parameter.register_hook(lambda grad, huge=huge: grad * (1e6 if huge else 1))
        model.zero_grad()
        _backward(model, step)
        handle.remove()
        ways.append(sorted({decision.way for decision in state.decisions()}))
    both = ["block_float4", "block_float8"]
    assert ways == [both] * 10 + [["none"]] * 2 + [both]
    return [digest(p.grad) for p in model.parameters()]


def test_steps_after_a_spike_go_plain_on_all_ranks(gpu_ranks):
    assert_equal(gpu_ranks(2)(_spike))


def _disagree():
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    model = DistributedDataParallel(
        nn.Linear(300, 300).cuda(), device_ids=[torch.cuda.current_device()], process_group=group
    )
    small = "none" if dist.get_rank() else "block_float8"
    rules = [{"max_ndim": 1, "compression_type": small}]
    cccl.torch.compress(model, {"compression_type": "block_float4", "rules": rules})
    with pytest.raises(cccl.MismatchError) as caught:
        model(torch.ones(4, 300, device="cuda")).sum().backward()
    return str(caught.value)


def test_ranks_with_other_rules_are_told(gpu_ranks):
    found = gpu_ranks(2)(_disagree)
    assert_equal(found)
    assert "rank 1 has" in found[0]


def _budget(kind, budget):
    """Gradients are set by hooks to the same values on both devices; backwards on a GPU are on
    streams in turn."""
    model = _model()
    if kind == "cpu":
        model = DistributedDataParallel(model.module.cpu(), bucket_cap_mb=2)
    config = {"compression_type": "block_float8", "rules": [SMALL_AT_8], "measure_every": 4}
    state = cccl.torch.compress(model, {**config, **budget, "strict": True})
    parameters = [*model.parameters()]
    step = 0

    def fixed(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * number + dist.get_rank())
        values = torch.randn(parameters[number].shape, generator=generator)
        bad = step == 8 and number == 0 and dist.get_rank() == 1
        values = values ** (1 + 2 * (step // 5)) * (float("nan") if bad else 1)
        return values.to(parameters[number].device)

    for number, parameter in enumerate(parameters):
        parameter.register_hook(lambda _, number=number: fixed(number))
    tokens = torch.arange(64) % 100
    tokens = tokens.cuda() if kind == "cuda" else tokens
    streams = [torch.cuda.Stream() for _ in range(2)]
    seen = []
    for step in range(12):
        model.zero_grad()
        with torch.cuda.stream(streams[step % 2]):
            model(tokens).sum().backward()
        torch.cuda.synchronize()
        seen.append([digest(p.grad) for p in parameters if torch.isfinite(p.grad).all()])
        seen.append([(d.name, d.way, d.error, d.noise) for d in state.decisions()])
    assert len({way for decided in seen[1::2] for _, way, *_ in decided}) > 1
    return seen


@pytest.mark.parametrize(
    "budget",
    [{"max_relative_error": 0.12}, {"target_bits": 4.5},
     {"max_noise_share": 0.05, "chunk_size": "512KiB"}],
)  # fmt: skip
def test_a_budget_chooses_as_on_a_cpu(gpu_ranks, budget):
    """On all ranks alike, through steps that are not finite."""
    pool = gpu_ranks(2)
    assert_equal([*pool(_budget, "cuda", budget), *pool(_budget, "cpu", budget)])
