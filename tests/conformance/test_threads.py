"""How many threads share a call changes no byte, no value and no error."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
from codec_cases import CASES_BY_DTYPE, DTYPES, decode, encode, storage
from inputs import make

import cccl
from cccl import _core

COUNT = 600_001  # several pieces, and a tail
THREADS = 5
ON_CPU = [(case, dtype) for case, dtype in CASES_BY_DTYPE if case.device == "cpu"]
each_codec_and_dtype = pytest.mark.parametrize(("case", "dtype"), ON_CPU, ids=str)


@pytest.fixture(autouse=True)
def usual_threads():
    usual = _core.codec_threads()
    yield
    _core.set_codec_threads(usual)


@functools.cache
def inputs(dtype: str) -> list[np.ndarray]:
    """Of two ranks; the first has its only Inf near the end."""
    rng = np.random.default_rng(3)
    first, second = (make(kind, COUNT, dtype, rng).copy() for kind in ("heavy", "sparse"))
    inf = np.array([np.inf], np.float32)
    is_bfloat = dtype == "bfloat16"
    first[COUNT - 30_000] = (inf.view(np.uint32) >> 16)[0] if is_bfloat else inf[0]
    return [first, second]


def sums(core, payload: bytes, dtype: str) -> tuple[bytes, bytes]:
    """Of a payload and itself: decoded, and encoded again."""
    number, _, _ = DTYPES[dtype]
    held = np.frombuffer(payload, np.uint8).copy()
    where = [held.ctypes.data] * 2, held.nbytes, 2
    total = np.empty(COUNT, storage(dtype))
    again = np.zeros(core.max_encoded_bytes(COUNT, number), np.uint8)
    core.reduce(*where, total.ctypes.data, COUNT, number)
    used = core.reduce_encode(*where, core, again.ctypes.data, again.nbytes, COUNT, number, 0, 7)
    return total.tobytes(), again[:used].tobytes()


@each_codec_and_dtype
def test_threads_change_no_byte(case, dtype):
    core, found = case.core, []
    for threads in (1, THREADS):
        _core.set_codec_threads(threads)
        payloads = [encode(core, raw, dtype, seed=7, position=128) for raw in inputs(dtype)]
        values = [decode(core, payload, COUNT, dtype).tobytes() for payload in payloads]
        found.append((payloads, values, sums(core, payloads[0], dtype)))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_change_no_factor_of_diff(dtype):
    rng, number = np.random.default_rng(5), DTYPES[dtype][0]
    known = rng.standard_normal(COUNT).astype(dtype)
    raw = (0.9 * known + 0.1 * rng.standard_normal(COUNT)).astype(dtype)
    core = _core.make_codec("diff", {}).with_prediction(known.ctypes.data, COUNT, number, 1)
    _core.set_codec_threads(1)
    payload = encode(core, raw, dtype)
    assert np.all(np.frombuffer(payload, np.int8, COUNT // 2048, 64 + 16) != 0)
    _core.set_codec_threads(THREADS)
    for _ in range(20):
        assert encode(core, raw, dtype) == payload


@each_codec_and_dtype
def test_threads_change_no_error(case, dtype):
    """Of a payload that is damaged in two places, the later one too."""
    core = case.core
    payload = bytearray(encode(core, inputs(dtype)[1], dtype))
    for place in (len(payload) // 3, len(payload) - 100):
        payload[place] ^= 0x55
    said = []
    for threads in (1, THREADS):
        _core.set_codec_threads(threads)
        with pytest.raises(cccl.CorruptPayloadError) as error:
            decode(core, bytes(payload), COUNT, dtype)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_threads_change_no_error_of_lossless_where_there_is_no_checksum():
    """Then the directory of the blocks is what finds the damage."""
    core, raw = _core.make_codec("lossless", {}), inputs("bfloat16")[0]
    payload = np.zeros(core.max_encoded_bytes(COUNT, DTYPES["bfloat16"][0]), np.uint8)
    size = core.encode(raw.ctypes.data, COUNT, DTYPES["bfloat16"][0], payload.ctypes.data,
                       payload.nbytes, 0, 0, False)  # fmt: skip
    for block in (40, 140):
        payload[64 + 4 * block + 3] ^= 0xFF
    said = []
    for threads in (1, THREADS):
        _core.set_codec_threads(threads)
        with pytest.raises(cccl.CorruptPayloadError, match="block 40 ends outside") as error:
            decode(core, payload[:size].tobytes(), COUNT, "bfloat16")
        said.append(str(error.value))
    assert said[0] == said[1]


def test_the_rounding_mode_of_the_caller_is_no_thread_s():
    """Threads are born with the caller's floating-point environment."""
    core = _core.make_codec("block_float4", {})
    raw = inputs("float32")[1]
    _core.set_codec_threads(1)
    alone = encode(core, raw, "float32")
    _core.set_codec_threads(THREADS)
    assert all(encode(core, raw, "float32") == alone for _ in range(20))


def test_a_child_that_was_forked_codes_alone():
    """The threads stay behind in a fork."""
    core = _core.make_codec("block_float8", {})
    raw = inputs("float32")[1]
    _core.set_codec_threads(THREADS)
    expected = encode(core, raw, "float32")
    child = os.fork()
    if child == 0:
        os._exit(0 if encode(core, raw, "float32") == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_WITHOUT_THREADS = """
import os, resource, threading, numpy as np
from cccl import _core
_core.set_codec_threads(5)
core, number = _core.make_codec("block_float8", {}), _core.dtypes()["float32"][0]
values = np.linspace(-1, 1, 600_001, dtype=np.float32)
out = np.zeros(core.max_encoded_bytes(values.size, number), np.uint8)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:  # whom the limit does not hold for
    os.setuid(65534)
try:
    threading.Thread(target=print).start()
except RuntimeError:
    core.encode(values.ctypes.data, values.size, number, out.ctypes.data, out.nbytes, 0, 0, True)
    print("coded")
"""


def test_where_the_system_has_no_thread_to_give_the_caller_codes_alone():
    """A limit, as containers have one."""
    found = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THREADS], capture_output=True, text=True, check=False
    )
    assert found.stdout == "coded\n", found.stderr


@pytest.mark.parametrize("threads", [65, 1000])
def test_too_many_threads_are_refused(threads):
    with pytest.raises(cccl.ConfigError, match="1 to 64"):
        _core.set_codec_threads(threads)


@pytest.mark.parametrize("said", ["0", "65", "many", "-1", "2.5", ""])
def test_a_wrong_number_in_the_environment_is_an_error_where_settings_are_read(said):
    code = "import cccl; cccl.Config.load(None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "CCCL_CODEC_THREADS": said})  # fmt: skip
    assert done.returncode != 0
    assert f"ConfigError: CCCL_CODEC_THREADS is {said!r}; allowed: auto, or 1 to 64" in done.stderr


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("auto", None)])
def test_the_environment_says_how_many(said, threads):
    code = "from cccl import _core; print(_core.codec_threads())"
    env = {**os.environ, "CCCL_CODEC_THREADS": said, "LOCAL_WORLD_SIZE": "1"}
    found = subprocess.check_output([sys.executable, "-c", code], text=True, env=env)
    cores = len(os.sched_getaffinity(0))
    assert int(found) == (threads or min(8, max(1, cores - 1)))
