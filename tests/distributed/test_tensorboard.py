"""Scalars for TensorBoard."""

from __future__ import annotations

import pytest

import cccl

pytest.importorskip("tensorboard", reason="the callback's own writer needs tensorboard")


def train(folder: str) -> list[tuple[str, int, float]]:
    """Twelve steps; what rank 0 wrote."""
    import torch
    import torch.distributed as dist
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    import cccl.torch
    from cccl.torch.tensorboard import Callback

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    cccl.torch.compress(model, {"compression_type": "block_float8"})
    callback = Callback(f"{folder}/{dist.get_rank()}", every=5)
    for step in range(1, 13):
        model(torch.randn(8, 64)).sum().backward()
        callback(step)
    callback.writer.close()
    events = EventAccumulator(f"{folder}/{dist.get_rank()}")
    events.Reload()
    return [
        (tag, event.step, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]


def test_scalars_are_of_the_steps_since_the_last_ones(ranks, tmp_path):
    for found in ranks(2)(train, str(tmp_path)):
        tags = {tag for tag, _, _ in found}
        names = ("ratio", "ms_per_call", "relative_error", "waiting", "encode_ms", "decode_ms")
        assert tags >= {f"cccl/bucket 0/all_reduce/{name}" for name in names}
        assert {step for tag, step, _ in found if tag == "cccl/sent_mb"} == {5, 10}
        value = {(tag, step): value for tag, step, value in found}
        assert value["cccl/bucket 0/all_reduce/ratio", 10] > 3
        # 64 x 64 weights and 64 biases of 8 bits and a little, half of them to the other rank twice
        assert value["cccl/sent_mb", 5] == pytest.approx(4160 / 1e6, rel=0.1)
        assert value["cccl/sent_mb", 10] == pytest.approx(value["cccl/sent_mb", 5])


def test_every_is_a_number_of_steps():
    from cccl.torch.tensorboard import Callback

    with pytest.raises(cccl.ConfigError, match="every = 0"):
        Callback("unused", every=0)
