# SPDX-License-Identifier: Apache-2.0
from typing import Any

version: str
torch_version: str

def build_info() -> str: ...
def query_cpu(workers: int = 1) -> dict[str, Any]: ...
def query_cuda(ordinal: int) -> dict[str, Any]: ...
def check_cuda_errors(ordinal: int) -> None: ...
def variants() -> list[dict[str, Any]]: ...
def plan(
    op: str,
    device: dict[str, Any],
    *,
    dtype: str,
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_len: int,
    k_len: int,
    s_aux_dtype: str | None = None,
    packed: bool = False,
    page_size: int = 0,
    num_pages: int = 0,
    window_size_left: int = -1,
    window_size_right: int = -1,
    num_sink_tokens: int = 0,
    num_splits: int = 0,
    invariant: bool = False,
) -> dict[str, Any]: ...
def visible_pairs(
    q_len: int, k_len: int, window_size_left: int = -1, window_size_right: int = -1, num_sink_tokens: int = 0
) -> int: ...
