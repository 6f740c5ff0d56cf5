# SPDX-License-Identifier: Apache-2.0
"""naive.cu as a peer: compiled by NVRTC through torch when it is first asked for, so that it needs no nvcc."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from .cases import Case
from .peers import Absent, Attention, Peer, on_rows, row_bounds

SOURCE = Path(__file__).with_suffix(".cu")
ROWS, THREADS = 16, 256


def shared_bytes(case: Case) -> int:
    """What a block needs: its rows of q, and their scores in fp32 against all keys that one of them may see."""
    longest = max(case.packed)
    keys = min(longest, case.window + ROWS - 1) if case.window else longest
    return 4 * ROWS * (case.head_dim + keys)


@cache
def source(head_dim: int, dtype: str) -> str:
    defines = {"HEAD_DIM": head_dim, "ROWS": ROWS, "THREADS": THREADS, "IS_BF16": int(dtype == "bf16")}
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + SOURCE.read_text()


@cache
def _kernel(head_dim: int, dtype: str, limit: int) -> Any:
    # torch names a toolkit's include folder, and raises where there is none; naive.cu includes nothing.
    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or str(SOURCE.parent)
    kernel = torch.cuda._compile_kernel(source(head_dim, dtype), "naive_forward")
    kernel.set_shared_memory_config(limit)
    return kernel


def build(case: Case, direction: str, with_sink: bool = True) -> Attention:
    if case.device == "cpu":
        raise Absent("not supported: it is a CUDA kernel")
    if direction != "forward" or not case.packed:
        raise Absent("not supported: it computes packed forwards alone")
    shared, limit = shared_bytes(case), torch.cuda.get_device_properties(0).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared > limit:
        raise Absent(
            f"not supported: the scores of {ROWS} rows take {shared} bytes of shared memory, a block has {limit}"
        )
    kernel = _kernel(case.head_dim, case.dtype, limit)
    bounds, window = row_bounds(case), case.window or case.length
    grid = (-(-max(case.packed) // ROWS), case.num_q_heads, len(case.packed))
    none = torch.full((case.num_q_heads,), -torch.inf, device=case.device)

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        out = torch.empty_like(q)
        arguments = [q, k, v, s_aux if with_sink else none, bounds, out, case.num_q_heads, case.num_kv_heads, window]
        kernel(grid, (THREADS, 1, 1), arguments, shared)
        return out

    return on_rows(attention)


NAIVE = Peer("naive", build, has_sink=True, heads_first=False)
NAIVE_WITHOUT = Peer("naive-no-sink", lambda case, direction: build(case, direction, False), heads_first=False)
