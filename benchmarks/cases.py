# SPDX-License-Identifier: Apache-2.0
"""What is measured, as data. An id such as w128-8192-d64-bf16 is window, length, head_dim, dtype."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import sinkattn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOPS_PER_PAIR = {
    "forward": 4,
    "backward": 10,
    "both": 14,
}  # times head_dim: two products of scores and values, five in the backward


@dataclass(frozen=True)
class Case:
    """Causal self-attention of `batch` sequences of one length, or of one packed row of sequences."""

    length: int
    head_dim: int
    dtype: str
    window: int = 0  # keys that a row sees, itself among them; 0: all that come before
    batch: int = 1
    num_q_heads: int = 8
    num_kv_heads: int = 2
    packed: tuple[int, ...] = ()  # lengths of the sequences, length in all
    device: str = "cpu"
    name: str = ""  # the id, where it is not made of the sizes

    @property
    def id(self) -> str:
        if self.name:
            return self.name
        return f"{f'w{self.window}' if self.window else 'full'}-{self.length}-d{self.head_dim}-{self.dtype}"

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window - 1, 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.packed or (self.length,) * self.batch

    def gflop(self, direction: str) -> float:
        """Work of the visible pairs, in 1e9 operations."""
        pairs = sum(sinkattn.visible_pairs(n, n, self.window_size) for n in self.lengths) * self.num_q_heads
        return FLOPS_PER_PAIR[direction] * self.head_dim * pairs / 1e9


def _grid(lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> list[Case]:
    return [Case(n, d, t, w) for d in head_dims for t in ("fp32", "bf16") for w in (0, 128) for n in lengths]


CPU = _grid((512, 2048, 8192), (64,)) + _grid((2048, 8192), (128,))
CPU_QUICK = _grid((512,), (64,))

# ---- prefill on a GPU: gpt-oss's heads at head_dim 64, half as many at 128 ----


def packed_lengths(total: int = 65536) -> tuple[int, ...]:
    """Sequences as a training batch has them: 76, the longest of 3213."""
    rng, lengths = random.Random(1), list[int]()
    while sum(lengths) < total:
        lengths.append(max(16, min(8192, int(rng.lognormvariate(6.6, 0.8)))))
    return *lengths[:-1], lengths[-1] - sum(lengths) + total


def _gpu(name: str, length: int, head_dim: int, window: int = 0, packed: tuple[int, ...] = ()) -> Case:
    heads = {"num_q_heads": 4096 // head_dim, "num_kv_heads": 8}
    return Case(length, head_dim, "bf16", window, packed=packed, device="cuda", name=name, **heads)


# The time we require on one H200, in ms, by case and direction.
TARGETS = {
    "w128-16384": {"forward": 0.160, "backward": 0.450},
    "w128-65536": {"forward": 0.64, "backward": 1.80},
    "w128-packed": {"forward": 0.75, "backward": 2.0},
    "full-packed": {"forward": 1.9, "backward": 5.2},
    "full-16384-d64": {"forward": 4.5, "backward": 11.7},
    "full-16384-d128": {"forward": 3.66, "backward": 10.6},
    "w4096-d128": {"forward": 1.72, "backward": 5.1},
    "w1024-d128": {"forward": 0.54, "backward": 1.75},
    "host": {"forward": 0.025, "both": 0.090},
}
# Of growing length: what a plot shows, its ids, head_dim, window.
SWEEPS = (
    ("window 128, head_dim 64", "w128-{}", 64, 128),
    ("full causal, head_dim 64", "full-{}-d64", 64, 0),
    ("full causal, head_dim 128", "full-{}-d128", 128, 0),
)
SWEEP_LENGTHS = tuple(512 << i for i in range(8))

_PREFILL = [
    *(_gpu(name.format(n), n, head_dim, window) for _, name, head_dim, window in SWEEPS for n in SWEEP_LENGTHS),
    _gpu("w128-packed", 65536, 64, 128, packed_lengths()),
    _gpu("full-packed", 65536, 64, 0, packed_lengths()),
    _gpu("w4096-d128", 16384, 128, 4096),
    _gpu("w1024-d128", 16384, 128, 1024),
]
# Cases with a target come first.
PREFILL_QUICK = [case for name in TARGETS for case in _PREFILL if case.id == name]
PREFILL = PREFILL_QUICK + sorted((case for case in _PREFILL if case.id not in TARGETS), key=lambda case: case.length)
HOST = _gpu("host", 16, 64, 128)  # so small that the kernel waits for the host
