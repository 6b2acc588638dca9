"""torch.compile and our Python: what C++ calls while compiled code runs is not for it to trace."""

from __future__ import annotations

import types
from typing import Any

try:
    from torch._C._dynamo import eval_frame

    _SKIP = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)  # and what it calls
except (ImportError, AttributeError):  # another torch: everything works but torch.compile
    eval_frame = None


def untraced(cls: type) -> Any:
    """Keeps the tracer out of a class's methods and what they call, without loading it as
    `torch.compiler.disable` does, which takes seconds."""
    for function in vars(cls).values():
        if eval_frame is not None and isinstance(function, types.FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return cls
