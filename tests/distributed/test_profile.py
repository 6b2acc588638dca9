"""`python -m cccl profile` and its functions, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from output import printed

import cccl
from cccl.__main__ import main

ENTRY = """
import torch
from torch.nn.parallel import DistributedDataParallel

def make_step():
    layers = [torch.nn.Linear(128, 128) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    return lambda: model(torch.randn(64, 128)).square().sum().backward()
"""


def make_step():
    scope: dict = {}
    exec(ENTRY, scope)
    return scope["make_step"]()


def make_compressed_step():
    import torch

    import cccl.torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    cccl.torch.compress(model, {"compression_type": "block_float8"})
    return lambda: model(torch.randn(4, 8)).sum().backward()


def compared(folder: str) -> dict:
    from cccl.torch.profile import compare

    before = cccl.current_config()
    found = compare(make_step, {"compression_type": "block_float4"}, steps=2, output=folder)
    assert cccl.current_config() is before
    return found


def test_both_ways_are_measured_alike_on_all_ranks(ranks, tmp_path):
    first, second = ranks(2)(compared, str(tmp_path))
    assert first == second and first["compressed"]
    for way in first["none"], first["block_float4"]:
        parts = way["parts"]
        assert parts["compute"] > 0 and parts["communication"] > 0
        assert parts["step"] >= parts["compute"]
        assert parts["unrecorded"] > 0
        both = parts["communication_exposed"] + parts["communication_hidden"]
        assert both == pytest.approx(parts["communication"])
        assert way["overlap_share"] == pytest.approx(parts["communication_hidden"] / both)
    assert first["none"]["parts"]["codec"] == 0 < first["block_float4"]["parts"]["codec"]
    assert first["change"]["memory_added_bytes"] > 0


def test_rank_0_writes_a_picture_and_traces_with_a_range_per_collective(ranks, tmp_path):
    ranks(2)(compared, str(tmp_path))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    for way, name in ("none", "gloo:all_reduce"), ("block_float4", "cccl:all_reduce"):
        trace = json.loads((tmp_path / f"trace-{way}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert name in names and "cccl_step" in names


def refused() -> str:
    from cccl.torch.profile import compare, profile

    texts = []
    for call in (
        lambda: compare(make_compressed_step, {"compression_type": "block_float8"}, steps=1),
        lambda: compare(make_step, {"compression_type": "none"}),
        lambda: profile(lambda: None, steps=0),
        lambda: compare(make_step, {"compression_type": "block_float8"}, output="/dev/null/x"),
    ):
        with pytest.raises(cccl.ConfigError) as error:
            call()
        texts.append(str(error.value))
    return "\n".join(texts)


def test_what_cannot_be_compared_is_refused(ranks):
    for text in ranks(2)(refused):
        first, second, third, fourth = text.splitlines()
        assert "cannot make the folder" in fourth
        assert "leave configuration to the profiler" in first
        assert "name one" in second and "steps = 0" in third


def test_kernels_of_a_gpu_are_told_apart_by_name():
    from cccl.torch.profile import kernel_kind, read

    names = {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)": "communication",
        "void cccl::cuda::encode_kernel<__nv_bfloat16, cccl::Encoder>(...)": "codec",
        "void cccl::cuda::(anonymous namespace)::reduce_encode_kernel<...>": "codec",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(...)": "compute",
        "ampere_sgemm_128x64_tn": "compute",
        "Memcpy DtoD (Device -> Device)": "compute",
    }  # fmt: skip
    assert {name: kernel_kind(name) for name in names} == names

    def event(name: str, begin: float, end: float, kind: str, stream: int = 0) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=begin, end=end), thread=1,
            device_type=SimpleNamespace(name=kind), device_resource_id=stream,
            is_user_annotation=name == "cccl_step",
        )  # fmt: skip

    trace = [event("cccl_step", 0, 9e6, "CPU"), event("cccl_step", 1e6, 8e6, "CUDA"),
             event("aten::mm", 0, 1e6, "CPU")]  # fmt: skip
    trace += [event(name, 2e6, 3e6, "CUDA", at) for at, name in enumerate(names)]
    events, steps = read(trace, on_gpu=True)
    assert steps == [(0.0, 9.0)]
    assert [one.kind for one in events] == list(names.values())
    assert [one.row for one in events] == [f"stream {at}" for at in range(len(names))]


def test_the_command_prints_both_ways_and_writes_its_report(tmp_path):
    (tmp_path / "train.py").write_text(ENTRY)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "cccl", "profile", f"{tmp_path}/train.py:make_step", "--steps", "2",
         "--output", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = printed(done.stdout).splitlines()
    assert lines[0].split() == ["ms", "per", "step", "plain", "block_float8"]
    assert any(line.startswith("overlap: hidden share") for line in lines)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["compressed"] and report["change"]["speed_up"] > 0


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("train.py", "FILE.py:FUNCTION"),
        ("missing.py:f", "missing.py"),
        ("no_such_module:f", "no_such_module"),
        ("json:nothing", "no function nothing"),
    ],
)
def test_an_entry_that_is_not_there_ends_with_status_2(entry, part, capsys):
    assert main(["profile", entry]) == 2
    assert part in capsys.readouterr().err


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["profile", "json:loads"]) == 2
    assert "torchrun" in capsys.readouterr().err
