# SPDX-License-Identifier: Apache-2.0
"""naive.cu as a peer: compiled by NVRTC through torch when it is first asked for, so that it needs no nvcc."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from . import studies
from .cases import Case
from .peers import Absent, Attention, Peer, on_rows, row_bounds

SOURCE = Path(__file__).with_suffix(".cu")
ROWS, THREADS = 16, 256


STATIC, OPT_IN = 48 << 10, 227 << 10  # bytes of shared memory a block has by itself, and on 9.0 where it asks
LENGTHS, HEAD_DIMS = (60, 64, 128, 256, 512, 1024, 2048, 4096), (64, 128, 256)


def tile_bytes(head_dim: int, keys: int) -> int:
    """Of a tile's rows of q, and their scores against so many keys, in fp32."""
    return 4 * ROWS * (head_dim + keys)


def longest(head_dim: int, limit: int) -> int:
    """Keys whose scores fit a block's shared memory."""
    return limit // (4 * ROWS) - head_dim


def shared_bytes(case: Case) -> int:
    """What a block needs for all keys that one of its rows may see."""
    keys = max(case.packed)
    return tile_bytes(case.head_dim, min(keys, case.window + ROWS - 1) if case.window else keys)


def computed() -> list[str]:
    """What a naive tile takes of shared memory, and where that ends."""

    def fits(size: int) -> str:
        where = "" if size <= STATIC else ", opt-in" if size <= OPT_IN else ", does not fit"
        return f"{size / 1024:g}{where}"

    lines = [[str(n), *(fits(tile_bytes(d, n)) for d in HEAD_DIMS)] for n in LENGTHS]
    for name, limit in (("at most, 48 KiB", STATIC), ("at most, 227 KiB", OPT_IN)):
        lines.append([name, *(f"{longest(d, limit)} keys" for d in HEAD_DIMS)])
    return [
        f"Shared memory of a naive tile of {ROWS} rows, computed: KiB. A block has 48 by itself, and on 9.0 up to "
        "227 where it asks.",
        studies.table(["keys seen", *(f"head_dim {d}" for d in HEAD_DIMS)], lines),
    ]


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


def build(case: Case, direction: str, with_sink: bool = True, by_tiles: bool = True) -> Attention:
    """A block a tile of rows, or one for all rows of a sequence and head."""
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
    grid = (-(-max(case.packed) // ROWS) if by_tiles else 1, case.num_q_heads, len(case.packed))
    none = torch.full((case.num_q_heads,), -torch.inf, device=case.device)

    def attention(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        out = torch.empty_like(q)
        arguments = [q, k, v, s_aux if with_sink else none, bounds, out, case.num_q_heads, case.num_kv_heads, window]
        kernel(grid, (THREADS, 1, 1), arguments, shared)
        return out

    return on_rows(attention)


NAIVE = Peer("naive", build, has_sink=True, heads_first=False)
NAIVE_BLOCKS = Peer(
    "naive-blocks", lambda case, direction: build(case, direction, by_tiles=False), has_sink=True, heads_first=False
)
NAIVE_WITHOUT = Peer("naive-no-sink", lambda case, direction: build(case, direction, False), heads_first=False)
