# SPDX-License-Identifier: Apache-2.0
"""What is measured, as data. An id such as w128-8192-d64-bf16 is window, length, head_dim, dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import sinkattn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLOPS_PER_PAIR = {
    "forward": 4,
    "backward": 10,
}  # times head_dim: two products of scores and values, five in the backward


@dataclass(frozen=True)
class Case:
    """Causal self-attention of `batch` sequences of one length."""

    length: int
    head_dim: int
    dtype: str
    window: int = 0  # keys that a row sees, itself among them; 0: all that come before
    batch: int = 1
    num_q_heads: int = 8
    num_kv_heads: int = 2

    @property
    def id(self) -> str:
        return f"{f'w{self.window}' if self.window else 'full'}-{self.length}-d{self.head_dim}-{self.dtype}"

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window - 1, 0

    def gflop(self, direction: str) -> float:
        """Work of the visible pairs, in 1e9 operations."""
        pairs = sinkattn.visible_pairs(self.length, self.length, self.window_size) * self.batch * self.num_q_heads
        return FLOPS_PER_PAIR[direction] * self.head_dim * pairs / 1e9


def _grid(lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> list[Case]:
    return [Case(n, d, t, w) for d in head_dims for t in DTYPES for w in (0, 128) for n in lengths]


CPU = _grid((512, 2048, 8192), (64,)) + _grid((2048, 8192), (128,))
CPU_QUICK = _grid((512,), (64,))
