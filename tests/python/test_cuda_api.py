"""`cccl.codec` on arrays of torch and CuPy that lie on a CUDA device."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import cccl
from cccl import _core

pytestmark = pytest.mark.skipif(
    not _core.cuda_device_count(),
    reason="no CUDA device" if _core.cuda_built() else "a build without CUDA",
)


def _parameter(name):
    """Skipped, with the reason, where there is no CUDA code."""
    try:
        _core.codec_on_cuda(_core.make_codec(name, {}))
    except cccl.UnsupportedError as error:
        return pytest.param(name, marks=pytest.mark.skip(reason=str(error)))
    return name


NAMES = [_parameter(name) for name in cccl.codec_names()]
ROTATED = ("block_float8", "block_float4", "block_float3")


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch", reason="its tensors")

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_payload_has_the_bytes_of_the_cpu_and_moves_both_ways(self, name, dtype):
        tensor = self.torch.randn(37, 129, device="cuda").to(getattr(self.torch, dtype))
        codec = cccl.codec(name)
        there, here = codec.encode(tensor), codec.encode(tensor.cpu())
        assert (there.device, here.device) == ("cuda:0", "cpu")
        assert bytes(there) == bytes(here) and there.nbytes == here.nbytes
        back = codec.decode(there)
        assert (back.device, back.shape, back.dtype) == (tensor.device, tensor.shape, tensor.dtype)
        expected = codec.decode(here)
        for moved in (
            back.cpu(),
            codec.decode(there.to("cpu")),
            codec.decode(here.to("cuda")).cpu(),
        ):
            assert self.torch.equal(moved, expected)
        again = cccl.Payload.from_bytes(bytes(there)).to("cuda:0")
        assert self.torch.equal(cccl.decode(again).cpu(), expected.ravel())
        assert bytes(pickle.loads(pickle.dumps(there))) == bytes(here)

    @pytest.mark.parametrize("level", ["fast", "best"])
    @pytest.mark.parametrize("name", ROTATED)
    def test_a_rotated_payload_has_the_bytes_of_the_cpu(self, name, level):
        """Its seed, which decoding needs, is in the header on the device."""
        tensor = self.torch.randn(3, 1000, device="cuda")
        codec = cccl.codec(name, rotation="hadamard", level=level)
        there, here = (codec.encode(where, seed=77) for where in (tensor, tensor.cpu()))
        assert bytes(there) == bytes(here)
        assert self.torch.equal(cccl.decode(there).cpu(), codec.decode(here))

    def test_work_runs_on_the_callers_stream(self):
        """Encoding must see what the stream before it wrote, and nothing may wait for another."""
        torch, codec = self.torch, cccl.codec("block_float8")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 22, device="cuda")
            for _ in range(50):
                tensor += 1
            payload = codec.encode(tensor)
            back = codec.decode(payload)
        assert _core.cuda_queue(0, stream.cuda_stream).device == 0
        assert (back == 50).all()

    def test_views_and_outputs(self):
        torch, codec = self.torch, cccl.codec("block_float8")
        base = torch.randn(40, 50, device="cuda")
        for view in (base.T, base[::2, 1::3], base[0].expand(5, 50), base.ravel()[1:],
                     torch.nn.Parameter(base)):  # fmt: skip
            assert bytes(codec.encode(view)) == bytes(codec.encode(view.detach().cpu()))
        out = torch.empty(2000, device="cuda")
        assert codec.decode(codec.encode(base), out) is out
        assert torch.equal(out, codec.decode(codec.encode(base)).ravel())
        with pytest.raises(cccl.UnsupportedError, match="contiguous"):
            codec.decode(codec.encode(base), torch.empty(4000, device="cuda")[::2])

    def test_what_is_elsewhere_or_of_another_kind_is_refused(self):
        torch, codec = self.torch, cccl.codec("block_float8")
        tensor = torch.ones(300, device="cuda")
        payload = codec.encode(tensor)
        with pytest.raises(cccl.UnsupportedError, match=r"payload is on cuda:0, the output on cpu"):
            codec.decode(payload, np.empty(300, np.float32))
        with pytest.raises(cccl.UnsupportedError, match=r"payload.to\('cuda:0'\)"):
            codec.decode(payload.to("cpu"), torch.empty(300, device="cuda"))
        with pytest.raises(cccl.UnsupportedError, match="300 values"):
            codec.decode(payload, torch.empty(299, device="cuda"))
        for other in (tensor.long(), tensor.bool(), tensor.to(torch.complex64),
                      torch.eye(3, device="cuda").to_sparse()):  # fmt: skip
            with pytest.raises(cccl.UnsupportedError):
                codec.encode(other)
        for device in ("cuda:x", "tpu", "cuda:99"):
            with pytest.raises((cccl.Error, RuntimeError)):
                payload.to(device)
        with pytest.raises(cccl.UnsupportedError, match="CPU"):
            codec.error_bound(tensor)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_damaged_payload_is_refused(self, name):
        """The header by the host, before a kernel sees it; the body by the kernel."""
        codec = cccl.codec(name)
        payload = codec.encode(self.torch.linspace(-1, 1, 5000, device="cuda"))
        for at in (0, 4, 9, 60, 64, 1000, payload.nbytes - 1):
            damaged = payload._data.clone()
            damaged[at] ^= 16
            fields = payload._fields()
            with pytest.raises(cccl.CorruptPayloadError):
                cccl.decode(cccl.Payload(damaged, payload.shape, "torch", fields))
        codec.decode(payload)

    def test_a_call_can_be_captured_in_a_graph(self):
        torch = self.torch
        core = _core.codec_on_cuda(_core.make_codec("block_float4", {}))
        source = torch.randn(5000, device="cuda")
        out = torch.zeros(core.max_encoded_bytes(5000, 1), dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        queue = _core.cuda_queue(0, stream.cuda_stream)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            core.encode(source.data_ptr(), 5000, 1, out.data_ptr(), out.numel(), 0, 0, True, queue)
        for _ in range(3):
            source.normal_()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert bytes(out.cpu().numpy()) == bytes(cccl.codec("block_float4").encode(source))


class TestCupy:
    @pytest.fixture(autouse=True)
    def _cupy(self):
        self.cupy = pytest.importorskip("cupy", reason="its arrays")

    @pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_payload_has_the_bytes_of_the_cpu(self, name, dtype):
        array = np.random.default_rng(1).standard_normal((37, 129)).astype(dtype)
        codec = cccl.codec(name)
        with self.cupy.cuda.Stream(non_blocking=True):
            payload = codec.encode(self.cupy.asarray(array))
            back = codec.decode(payload)
        assert bytes(payload) == bytes(codec.encode(array))
        assert isinstance(back, self.cupy.ndarray) and back.shape == array.shape
        assert back.get().tobytes() == codec.decode(codec.encode(array)).tobytes()
        assert codec.decode(payload.to("cpu")).tobytes() == back.get().tobytes()

    def test_strided_arrays(self):
        array = self.cupy.arange(6000, dtype="float32").reshape(60, 100)
        codec = cccl.codec("block_float8")
        assert bytes(codec.encode(array.T)) == bytes(codec.encode(array.get().T))
