"""What `import cccl` needs: NumPy, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run(code: str, blocked: tuple[str, ...] = ()) -> str:
    """In a fresh interpreter; returns what it printed."""
    source = BLOCK.format(blocked=set(blocked)) if blocked else ""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", source + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("CCCL_")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_cccl_works_without_torch_cupy_or_ml_dtypes():
    """F085, F090, F094"""
    printed = run(
        """
        import numpy as np, cccl
        cccl.configure({"compression_type": "block_float4"})
        codec = cccl.codec("block_float8")
        array = np.linspace(-1, 1, 1000, dtype=np.float32)
        assert abs(codec.decode(codec.encode(array)) - array).max() < 0.01
        print(cccl.report(), cccl.__version__)
        """,
        blocked=("torch", "cupy", "ml_dtypes", "nvidia", "cuda"),
    )
    assert "0 collectives" in printed


def test_importing_cccl_imports_no_framework_and_opens_no_driver():
    """F085, F090"""
    printed = run(
        """
        import sys, cccl
        loaded = {name.split(".")[0] for name in sys.modules}
        assert not loaded & {"torch", "cupy", "nvidia", "ml_dtypes"}, loaded
        maps = open("/proc/self/maps").read()
        assert not any(lib in maps for lib in ("libcuda", "libnccl", "libcudart", "libtorch"))
        print("fine")
        """
    )
    assert "fine" in printed


def test_importing_the_torch_frontend_without_torch_names_what_is_missing():
    printed = run(
        """
        import cccl
        try:
            import cccl.torch
        except ImportError as error:
            print("ImportError:", error)
        """,
        blocked=("torch",),
    )
    assert "ImportError" in printed and "torch" in printed


def test_the_cupy_frontend_needs_neither_torch_nor_for_numpy_arrays_cupy(tmp_path):
    """F085"""
    printed = run(
        f"""
        import sys, numpy as np, cccl.cupy
        with cccl.cupy.Communicator(0, 1, "file://{tmp_path}/meeting") as comm:
            print(comm.all_reduce(np.ones(3)))
        assert not {{name.split(".")[0] for name in sys.modules}} & {{"torch", "cupy", "mpi4py"}}
        """,
        blocked=("torch", "cupy", "mpi4py"),
    )
    assert "[1. 1. 1.]" in printed


def test_the_cupy_frontend_takes_cupy_arrays_without_torch(tmp_path):
    """On a machine without a GPU, CuPy itself says so; torch is not asked for either way."""
    pytest.importorskip("cupy", reason="its arrays")
    printed = run(
        f"""
        import sys, cccl.cupy, cupy
        with cccl.cupy.Communicator(0, 1, "file://{tmp_path}/meeting") as comm:
            try:
                print(comm.all_reduce(cupy.ones(3)))
            except cupy.cuda.runtime.CUDARuntimeError as error:
                print("no GPU:", error)
        assert "torch" not in sys.modules
        """,
        blocked=("torch",),
    )
    assert "[1. 1. 1.]" in printed or "no GPU" in printed


def test_bfloat16_without_a_numpy_type_for_it_needs_an_output():
    """F094"""
    printed = run(
        """
        import cccl, numpy as np
        from cccl import _core, _arrays
        core, raw = _core.make_codec("identity", {}), np.zeros(10, np.uint16)
        out = np.empty(core.max_encoded_bytes(10, _arrays.DTYPES["bfloat16"].number), np.uint8)
        core.encode(raw.ctypes.data, 10, _arrays.DTYPES["bfloat16"].number, out.ctypes.data,
                    out.nbytes, 0, 0, True)
        try:
            cccl.decode(out.tobytes())
        except cccl.UnsupportedError as error:
            print(error)
        """,
        blocked=("ml_dtypes",),
    )
    assert "out=" in printed


WITHOUT_DISTRIBUTED = """
    import importlib.machinery as machinery, sys
    class Built(machinery.PathFinder):
        # torch as built with USE_DISTRIBUTED=0: its extension lacks the entry points
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            spec = super().find_spec(name, path, target) if name == "torch._C" else None
            if spec:
                load = spec.loader.exec_module
                def exec_module(module):
                    load(module)
                    for entry in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                        vars(module).pop(entry, None)
                spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Built)
    import torch
    assert not torch.distributed.is_available()
"""


@pytest.fixture(scope="module")
def _torch():
    pytest.importorskip("torch", reason="simulates a torch without torch.distributed")


@pytest.mark.usefixtures("_torch")
def test_codecs_work_with_a_torch_that_has_no_distributed():
    """F092"""
    printed = run(
        WITHOUT_DISTRIBUTED
        + """
    import cccl
    codec = cccl.codec("block_float8")
    print(codec.decode(codec.encode(torch.ones(10))).tolist() == [1.0] * 10)
    """
    )
    assert "True" in printed


@pytest.mark.usefixtures("_torch")
def test_the_frontend_imports_without_distributed_and_its_collectives_say_so():
    """F092: also `cccl.configure`, which looks for a framework to tell."""
    printed = run(
        WITHOUT_DISTRIBUTED
        + """
    import cccl, cccl.torch
    cccl.configure({"compression_type": "block_float8"})
    tensor = torch.ones(10)
    for call in (lambda: cccl.torch.all_reduce(tensor), lambda: cccl.torch.broadcast(tensor),
                 lambda: cccl.torch.all_gather(tensor, tensor),
                 lambda: cccl.torch.reduce_scatter(tensor, tensor)):
        try:
            call()
        except cccl.UnsupportedError as error:
            print(error)
    """
    )
    assert printed.count("without distributed support") == 4


def test_configuring_without_compressing_anything_warns_at_exit_with_the_line_to_add():
    """The article's script, when torch comes after configure and no hook is registered."""
    pytest.importorskip("torch", reason="the warning concerns scripts that use torch")
    printed = run(
        """
        import cccl
        cccl.configure({"compression_type": "block_float8"})
        import torch
        """
    )
    assert "nothing was compressed" in printed
    assert "ddp.register_comm_hook(None, cccl.torch.compression_hook)" in printed
