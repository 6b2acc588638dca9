"""Ctrl-C ends a wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

import cccl.torch


def _interrupt_a_wait_for_a_late_rank():
    if dist.get_rank() == 1:
        time.sleep(3)
        try:
            cccl.torch.all_reduce(torch.ones(1000), config={"deadline": 20.0})
        except cccl.Error:
            return None
        return None
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    try:
        cccl.torch.all_reduce(torch.ones(1000), config={"deadline": 20.0})
    except KeyboardInterrupt:
        return time.monotonic() - begun


def test_ctrl_c_ends_a_wait(own_ranks):
    seconds, _ = own_ranks(2).outcomes(_interrupt_a_wait_for_a_late_rank, seconds=60)
    assert 0.5 < seconds < 2.5
