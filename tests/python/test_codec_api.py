"""`cccl.codec` for anyone: arrays in, payloads out, and back from bytes."""

from __future__ import annotations

import pickle
import weakref

import numpy as np
import pytest
from conformance.codec_cases import CASES, FLOATS, INTEGERS
from hypothesis import given
from hypothesis import strategies as st

import cccl
from cccl import _core

each_codec = pytest.mark.parametrize("case", CASES, ids=str)
NUMPY_FLOATS = [dtype for dtype in FLOATS if dtype != "bfloat16"]


def make(case) -> cccl.Codec:
    return cccl.codec(case.name, **case.options)


def test_every_alias_is_the_codec_of_its_name():
    for name, aliases in cccl.codec_names().items():
        for alias in (name, *aliases):
            assert cccl.codec(alias).name == name
    assert cccl.codec("block_fp16_to_8bit").name == "block_float8"
    assert cccl.codec("block_fp16_to_4bit").name == "block_float4"


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("block_float9", {}, "registered: .*block_float8"),
        ("", {}, "unknown codec"),
        ("identity", {"block_size": 64}, "no option 'block_size'; it takes: none"),
        ("block_float8", {"blocksize": 64}, "'blocksize'; it takes: block_size, level, rotation"),
        ("block_float8", {"block_size": 100}, "block_size = 100; allowed: a power of two"),
        ("block_float8", {"block_size": "big"}, "block_size = 'big'; allowed: an integer"),
        ("block_float8", {"block_size": True}, "block_size = true; allowed: an integer"),
        ("block_float8", {"rounding": "up"}, "rounding = 'up'; allowed: nearest or stochastic"),
        ("block_float4", {"level": 9}, "level = 9; allowed: fast or best"),
        (
            "sparse",
            {"inner": "sparse"},
            "inner = 'sparse'; allowed: a codec that holds every value",
        ),
        ("sparse", {"inner": 8}, "inner = 8; allowed: a codec's name"),
        ("sparse", {"inner": "zip"}, "unknown codec 'zip'"),
        ("sparse", {"block_size": 64}, "'identity' has no option 'block_size'"),
        ("sparse(block_float8)", {"inner": "identity"}, "leave the option 'inner' out"),
        ("sparse", {"sparsity_threshold": 1.5}, "sparsity_threshold = 1.5.*from 0 to 1"),
        ("sparse", {"sparsity_threshold": float("nan")}, "sparsity_threshold = nan"),
        ("sparse", {"sparsity_threshold": "half"}, "'half'; allowed: a number"),
        ("sparse", {"top_k": 0}, "top_k = 0; allowed: a share of the values, more than 0"),
        ("sparse", {"top_k": 1.01}, "top_k = 1.01"),
        ("sparse", {"threshold": -1.0}, "threshold = -1.0.*a finite magnitude"),
        ("sparse", {"threshold": 0.1, "top_k": 0.1}, "one of top_k and threshold"),
        ("sparse", {"rotation": "hadamard"}, "rotation = 'hadamard'; allowed: none"),
        ("block_float3", {"rotation": "dct"}, "rotation = 'dct'; allowed: none or hadamard"),
    ],
)
def test_an_impossible_codec_is_refused_by_option_value_and_what_is_allowed(name, options, text):
    with pytest.raises(cccl.ConfigError, match=text):
        cccl.codec(name, **options)


@pytest.mark.parametrize("dtype", NUMPY_FLOATS)
@each_codec
@given(shape=st.lists(st.integers(0, 7), max_size=4).map(tuple), seed=st.integers(0, 9))
def test_shape_and_dtype_are_kept(case, dtype, shape, seed):
    """F030: scalars and empty shapes as (1, 0, 2) too."""
    array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    codec = make(case)
    back = codec.decode(codec.encode(array))
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert (np.abs(back - array) <= codec.error_bound(array)).all()


@each_codec
def test_a_payload_survives_bytes(case):
    array = np.linspace(-1, 1, 1001, dtype=np.float32).reshape(7, 143)
    codec = make(case)
    payload = codec.encode(array)
    again = cccl.Payload.from_bytes(bytes(payload))
    assert bytes(again) == bytes(payload)
    assert (again.codec, again.dtype, again.count) == (case.name, "float32", 1001)
    for data in (again, bytes(payload), bytearray(bytes(payload)), memoryview(bytes(payload))):
        assert codec.decode(data).tobytes() == codec.decode(payload).tobytes()
    assert codec.decode(again).shape == (1001,), "the header holds the count alone"
    restored = pickle.loads(pickle.dumps(payload))
    assert codec.decode(restored).tobytes() == codec.decode(payload).tobytes()


def test_a_payload_says_what_it_is():
    """F020"""
    payload = cccl.codec("block_float8").encode(np.zeros((1024, 1024), np.float32))
    assert payload.nbytes == len(bytes(payload)) == 64 + 2**20 + 2 * 2**13
    assert payload.bits_per_element == pytest.approx(8.125, abs=1e-3)
    assert "block_float8" in repr(payload) and "[1024, 1024]" in repr(payload)
    assert np.isnan(cccl.codec("identity").encode(np.zeros(0)).bits_per_element)


@each_codec
def test_non_contiguous_arrays_are_read_in_their_own_order(case):
    """F031: transposed, strided, reversed, expanded and Fortran-ordered."""
    base = np.random.default_rng(1).standard_normal((40, 50)).astype(np.float32)
    codec = make(case)
    for view in (base.T, base[::2, 1::3], base[::-1], np.broadcast_to(base[0], (5, 50)),
                 np.asfortranarray(base)):  # fmt: skip
        wanted = codec.encode(np.ascontiguousarray(view))
        assert bytes(codec.encode(view)) == bytes(wanted)
        assert codec.decode(codec.encode(view)).shape == view.shape


def test_read_only_arrays_can_be_encoded():
    array = np.ones(10, np.float32)
    array.flags.writeable = False
    assert cccl.codec("block_float8").encode(array).count == 10


@each_codec
def test_out_is_filled_and_returned(case):
    array = np.linspace(-1, 1, 300, dtype=np.float32)
    codec = make(case)
    payload, out = codec.encode(array), np.empty((30, 10), np.float32)
    assert codec.decode(payload, out) is out
    assert out.tobytes() == codec.decode(payload).tobytes()


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (np.empty(299, np.float32), "300 values of float32, the output has 299"),
        (np.empty(300, np.float64), "has 300 of float64"),
        (np.empty(600, np.float32)[::2], "contiguous"),
        ([0.0] * 300, "is no array"),
    ],
    ids=["count", "dtype", "strided", "list"],
)
def test_an_output_that_does_not_fit_is_refused_untouched(out, text):
    payload = cccl.codec("block_float8").encode(np.ones(300, np.float32))
    with pytest.raises(cccl.UnsupportedError, match=text):
        cccl.decode(payload, out)


def test_a_read_only_output_is_refused():
    out = np.zeros(300, np.float32)
    out.flags.writeable = False
    with pytest.raises(cccl.UnsupportedError, match="writable"):
        cccl.decode(cccl.codec("block_float8").encode(np.ones(300, np.float32)), out)
    assert not out.any()


@pytest.mark.parametrize(
    "dtype", [*INTEGERS, "complex64", "complex128", "S4", "O", "datetime64[s]"]
)
def test_a_lossy_codec_refuses_other_dtypes_by_name(dtype):
    """F040"""
    with pytest.raises(cccl.UnsupportedError, match=r"dtype (\|?[a-zA-Z]\w*)"):
        cccl.codec("block_float8").encode(np.zeros(4, dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_identity_takes_integers_and_bools(dtype):
    """F040"""
    array = np.arange(100).astype(dtype)
    codec = cccl.codec("identity")
    assert (codec.decode(codec.encode(array)) == array).all()


@pytest.mark.parametrize("thing", [[1.0, 2.0], 3.0, "text", None, {"a": 1}])
def test_what_is_no_array_is_refused(thing):
    with pytest.raises(cccl.UnsupportedError, match="is no array"):
        cccl.codec("block_float8").encode(thing)


def test_foreign_byte_order_is_refused():
    with pytest.raises(cccl.UnsupportedError, match="native byte order"):
        cccl.codec("identity").encode(np.zeros(3, ">f4"))


def test_another_codecs_payload_is_refused_with_the_way_out():
    payload = cccl.codec("block_float4").encode(np.ones(10, np.float32))
    with pytest.raises(cccl.ConfigError, match=r"cccl\.decode"):
        cccl.codec("block_float8").decode(payload)
    assert cccl.decode(payload).shape == (10,)


@each_codec
def test_pieces_know_their_position(case):
    """F018"""
    array = np.random.default_rng(2).standard_normal(8192).astype(np.float32)
    codec = make(case)
    whole = codec.decode(codec.encode(array, seed=3))
    pieces = [
        codec.decode(codec.encode(array[a : a + 2048], seed=3, position=a))
        for a in range(0, array.size, 2048)
    ]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


class TestTorch:
    """Tensors through DLPack: in, out, and back as tensors."""

    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch", reason="the frontend's tensors")

    @pytest.mark.parametrize("dtype", FLOATS)
    @each_codec
    def test_a_tensor_comes_back_as_a_tensor(self, case, dtype):
        """F034: bfloat16 too."""
        tensor = self.torch.randn(7, 33).to(getattr(self.torch, dtype))
        codec = make(case)
        back = codec.decode(codec.encode(tensor))
        assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
        error = (back.double() - tensor.double()).abs().numpy()
        assert (error <= codec.error_bound(tensor)).all()

    def test_tensors_and_arrays_of_equal_values_make_equal_bytes(self):
        """F109"""
        array = np.random.default_rng(3).standard_normal(500).astype(np.float32)
        for name in cccl.codec_names():
            codec = cccl.codec(name)
            assert bytes(codec.encode(self.torch.from_numpy(array))) == bytes(codec.encode(array))

    def test_views_parameters_and_outputs(self):
        """F031, F032: transposed, strided, expanded, channels_last, requiring grad."""
        torch, codec = self.torch, cccl.codec("block_float8")
        base = torch.randn(4, 6, 5, 3)
        last = base.contiguous(memory_format=torch.channels_last)
        for view in (base.transpose(0, 3), base[::2, 1:], base[0, 0].expand(3, 5, 3), last,
                     torch.nn.Parameter(base)):  # fmt: skip
            payload = codec.encode(view)
            assert bytes(payload) == bytes(codec.encode(view.detach().contiguous()))
            assert codec.decode(payload).shape == view.shape
        out = torch.empty(360)
        assert codec.decode(codec.encode(base), out) is out
        with pytest.raises(cccl.UnsupportedError, match="contiguous"):
            codec.decode(codec.encode(base), torch.empty(720)[::2])

    def test_a_tensor_of_another_dtype_device_or_layout_is_refused(self):
        """F040, F085"""
        torch, codec = self.torch, cccl.codec("block_float8")
        others = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
        for tensor in (
            *(torch.zeros(3, dtype=dtype) for dtype in others),
            torch.zeros(3, device="meta"),
            torch.zeros(3, 3).to_sparse(),
        ):
            with pytest.raises(cccl.UnsupportedError):
                codec.encode(tensor)


class FreshCopies:
    """An exporter that makes the memory it hands out for each call, and keeps none of it."""

    def __init__(self, values):
        self._values, self.made = values, []

    def __dlpack__(self, **options):
        copy = self._values.copy()
        self.made.append(weakref.ref(copy))
        return copy.__dlpack__()

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


def test_memory_that_an_exporter_makes_for_the_call_is_kept():
    values = np.arange(1 << 18, dtype=np.float32)
    exporter = FreshCopies(values)
    described = _core.describe(exporter)
    assert exporter.made[0]() is not None
    del described
    assert exporter.made[0]() is None
    payload = cccl.codec("identity").encode(exporter)
    assert np.array_equal(cccl.decode(payload), values)


def test_bytes_behind_a_payload_are_not_part_of_it():
    payload = cccl.codec("block_float8").encode(np.ones(100, np.float32))
    assert bytes(cccl.Payload.from_bytes(bytes(payload) + b"more")) == bytes(payload)
