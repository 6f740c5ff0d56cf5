# SPDX-License-Identifier: Apache-2.0
"""What is installed here, what it can run, why the planner chose what it chose, and what went wrong on a device."""

import platform
from typing import Any

import torch

from . import _C
from .ops import _window

_OF_THIS_CPU = {"aarch64": ("neon", "neon_bf16")}.get(platform.machine(), ("avx2", "avx512", "avx512_bf16", "amx_bf16"))
CPU_LEVELS = ("oracle", "scalar", *_OF_THIS_CPU)
"""sinkattn_cpu_level by number, of this kind of CPU.

The environment variable SINKATTN_CPU_LEVEL names the highest that is to be used.
"""


def variants() -> list[dict[str, Any]]:
    """Every kernel: name, op, backend, arch (the least that runs it), dtypes, max_head_dim, tile_q, tile_k, compiled.

    Without nvcc those for CUDA are not compiled: they can be planned for and not run.
    """
    return _C.variants()


def plan(op: str, device: dict[str, Any] | None = None, **sizes: Any) -> dict[str, Any]:
    """Which kernel serves these sizes, how, and why.

    Returns variant, whether it is compiled here, its tile_q and tile_k, workers, num_splits, num_items, workspace_bytes
    and reason, which also has the one thing that each better row of the table does not serve.

    op is "fwd", "bwd" or "decode". sizes are dtype ("bf16", "fp16", "fp32" or "fp64"), batch, num_q_heads,
    num_kv_heads, head_dim, q_len and k_len; packed: the rows of the whole tensors; decode: k_len is the capacity of a
    sequence, max_pages * page_size when paged. Optional are s_aux_dtype, head_dim_v (0: head_dim), packed, page_size,
    num_pages, window_size_left, window_size_right, num_sink_tokens, num_splits, invariant and extras (a decode is given
    host pages, or writes NVFP4). device is a dict as `_C.query_cpu` returns it, this CPU with torch's threads if left
    out; no such device has to be there.

    plan("decode", ...)["workspace_bytes"] is the size of the scratch that torch.ops.sinkattn.flash_decode_out takes.
    Raises ValueError for sizes that break a rule, NotImplementedError when no kernel serves them.
    """
    return _C.plan(op, _C.query_cpu(torch.get_num_threads()) if device is None else device, **sizes)


def visible_pairs(
    q_len: int, k_len: int, window_size: tuple[int | None, int | None] = (-1, -1), num_sink_tokens: int = 0
) -> int:
    """(query, key) pairs of one sequence and head that a score is computed for: what FLOP counts are made of.

    q_len and k_len are rows and keys; the rest is as in flash_attn_func, causal being a right side of 0. Raises
    ValueError for negative sizes, sides below -1 and lengths from 2^31 on.
    """
    left, right = _window(window_size, causal=False)
    return _C.visible_pairs(q_len, k_len, left, right, num_sink_tokens)


def check_errors() -> None:
    """Raise ValueError for wrong cu_seqlens, cache_seqlens and block_table that CUDA kernels met since the last call.

    Waits for the devices. The CPU raises at the call that is wrong, so nothing of its is ever pending. With the
    environment's SINKATTN_CHECK=1 each call on a CUDA tensor is followed by this check.
    """
    for ordinal in range(torch.cuda.device_count()):
        _C.check_cuda_errors(ordinal)


def _cuda_line() -> str:
    try:
        device = _C.query_cuda(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    except (NotImplementedError, RuntimeError) as error:
        return f"none: {str(error).removeprefix('sinkattn: ')}"
    return f"{device['name']}, sm_{device['arch']}, {device['workers']} multiprocessors"


def check() -> str:
    """A few lines: version, compilers, backends, torch, devices and compiled kernels.

    Raises ValueError when SINKATTN_CPU_LEVEL names no level, NotImplementedError when it names one above this CPU's.
    """
    cpu = _C.query_cpu(torch.get_num_threads())
    lines = {
        "sinkattn": _C.version,
        "build": f"{_C.build_info()}; torch {', '.join(_C.bindings())}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "cpu": f"{cpu['name']}, level {CPU_LEVELS[cpu['arch']]}",
        "cuda": _cuda_line(),
    }
    for variant in variants():
        if not variant["compiled"]:
            continue
        served = f"{', '.join(variant['dtypes'])}; head_dim up to {variant['max_head_dim']}"
        tiles = f"; tiles of {variant['tile_q']} rows x {variant['tile_k']} keys" if variant["tile_q"] else ""
        lines[variant["name"]] = served + tiles
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())
