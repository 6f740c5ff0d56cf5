# SPDX-License-Identifier: Apache-2.0
"""Which tests need a GPU, what a call launches there, its graph, and whether it repeats."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

REPEATS = int(os.environ.get("SINKATTN_GPU_REPEATS", "500"))


def needs_gpus(devices: int = 1) -> pytest.MarkDecorator:
    """Skips where there are fewer, or the first is too old."""
    which = "a CUDA device" if devices == 1 else f"{devices} CUDA devices"
    return pytest.mark.skipif(
        torch.cuda.device_count() < devices or torch.cuda.get_device_capability() < (8, 0),
        reason=f"needs {which} of compute capability 8.0 or later; runs there with make test-gpu",
    )


def launched(call: Callable[[], object]) -> list[str]:
    """What the call puts on the device; it must not wait for that, neither by torch nor in the library."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.record_function("the call"):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    on_host, on_gpu = ([e for e in profile.events() if e.device_type == getattr(torch.autograd.DeviceType, name)]
                       for name in ("CPU", "CUDA"))  # fmt: skip
    (within,) = (e.time_range for e in on_host if e.name == "the call")
    runtime = [e.name for e in on_host if within.start <= e.time_range.start <= within.end and e.name.startswith("cu")]
    assert any("Launch" in name for name in runtime), runtime
    assert not [name for name in runtime if "Synchronize" in name or name == "cudaMemcpy"]
    return [e.name for e in on_gpu if e.name != "the call"]


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def different_under_load(call: Callable[[], tuple[Tensor, ...]]) -> int:
    """Elements that differ from the first call's in REPEATS more, while another stream multiplies matrices."""
    first = call()
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        for got, want in zip(call(), first, strict=True):
            different += (got != want).sum()
    return int(different)
