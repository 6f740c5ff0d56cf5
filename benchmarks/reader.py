# SPDX-License-Identifier: Apache-2.0
"""What reading alone takes on this GPU: every byte of a cache once, in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words a step of a program, warps of it, programs a multiprocessor: the fastest tells the machine's read bandwidth.
SHAPES = ((2048, 4, 8), (4096, 8, 4), (8192, 8, 2))


@triton.jit
def _read_kernel(k, v, sums, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(program, steps, tl.num_programs(0)):
        at = step.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(k + at, eviction_policy="evict_first") ^ tl.load(v + at, eviction_policy="evict_first")
    tl.store(sums + program, tl.sum(total))


def readers(k: Tensor, v: Tensor) -> list[Callable[[], Tensor]]:
    """Calls that read all of k and v, a sum of words a program; checked against torch. Raises RuntimeError."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    words = [x.view(-1).view(torch.int32) for x in (k, v)]
    want = int((words[0] ^ words[1]).sum()) & 0xFFFFFFFF
    calls: list[Callable[[], Tensor]] = []
    for block, warps, programs in SHAPES:
        if words[0].numel() % block:
            raise ValueError(f"{words[0].numel()} words are no multiple of {block}")
        sums = torch.empty(programs * sms, dtype=torch.int32, device="cuda")

        def call(block: int = block, warps: int = warps, sums: Tensor = sums) -> Tensor:
            _read_kernel[(sums.numel(),)](*words, sums, words[0].numel() // block, BLOCK=block, num_warps=warps)
            return sums

        if int(call().sum()) & 0xFFFFFFFF != want:
            raise RuntimeError(f"the reader with steps of {block} words has not read them all")
        calls.append(call)
    return calls
