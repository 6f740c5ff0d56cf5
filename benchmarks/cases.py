# SPDX-License-Identifier: Apache-2.0
"""What is measured, as data. An id such as w128-8192-d64-bf16 is window, length, head_dim, dtype."""

import random
from dataclasses import dataclass, replace

import torch

import sinkattn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Times head_dim: two products of scores and values, five in the backward.
FLOPS_PER_PAIR = {"forward": 4, "backward": 10, "both": 14}


@dataclass(frozen=True)
class Case:
    """Causal self-attention of `batch` sequences of one length, or of one packed row of sequences.

    The last three fields make it a chunk, not causal, or give it sink tokens; of the peers only FA4 knows them.
    """

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
    k_length: int = 0  # keys of a sequence whose last rows are a chunk of `length`; 0: as many as rows
    right: int = 0  # keys after the row that it sees; -1: all
    num_sink_tokens: int = 0  # first keys that stay visible behind a window

    @property
    def id(self) -> str:
        if self.name:
            return self.name
        return f"{f'w{self.window}' if self.window else 'full'}-{self.length}-d{self.head_dim}-{self.dtype}"

    @property
    def window_size(self) -> tuple[int, int]:
        return self.window - 1, self.right

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.packed or (self.length,) * self.batch

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.num_q_heads // self.num_kv_heads

    def gflop(self, direction: str) -> float:
        """Work of the visible pairs, in 1e9 operations."""
        mask = self.window_size, self.num_sink_tokens
        pairs = sum(sinkattn.visible_pairs(n, self.k_length or n, *mask) for n in self.lengths)
        return FLOPS_PER_PAIR[direction] * self.head_dim * pairs * self.num_q_heads / 1e9


def _grid(lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> list[Case]:
    return [Case(n, d, t, w) for d in head_dims for t in ("fp32", "bf16") for w in (0, 128) for n in lengths]


CPU = _grid((2048, 8192), (64, 128))
CPU_QUICK = _grid((512,), (64,))

# Prefill on a GPU: gpt-oss's heads at head_dim 64, half as many at 128.


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
# Of growing length: what the picture shows, its ids, head_dim, window.
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

# Shapes: more than those that the kernels were tuned for.

PACKS = {
    "packed76": packed_lengths(),
    "packed32x2048": (2048,) * 32,
    "packed32x512": (512,) * 32,
    "packed128x512": (512,) * 128,
    "packed1024x64": (64,) * 1024,
    "packed32768+128x256": (32768, *(256,) * 128),
}


def _shape(
    length: int | str, head_dim: int, num_q_heads: int, num_kv_heads: int, window: int = 0, **rest: int | str
) -> Case:
    """length: a number, or a name in PACKS. The id says everything: mask, sizes, head_dim, heads, and fp16."""
    packed = PACKS[length] if isinstance(length, str) else ()
    base = Case(sum(packed) if packed else int(length), head_dim, "bf16", window, packed=packed, device="cuda")
    case = replace(base, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, **rest)  # type: ignore[arg-type]
    mask = f"w{window}" if window else "full" if case.right == 0 else "noncausal"
    mask += f"+{case.right}" if case.right > 0 else ""
    mask += f"-sink{case.num_sink_tokens}" if case.num_sink_tokens else ""
    sizes = f"{case.batch}x{length}" if case.batch > 1 else f"{length}of{case.k_length}" if case.k_length else length
    dtype = "" if case.dtype == "bf16" else f"-{case.dtype}"
    return replace(case, name=f"{mask}-{sizes}-d{head_dim}-{num_q_heads}:{num_kv_heads}{dtype}")


# FA4 compiles for seconds per head_dim, group, dtype and kind of mask, so shapes share these where they can.
SHAPES = [
    # causal, of growing length, and batches
    *(_shape(n, 64, 64, 8) for n in (512, 2000, 4096, 16384, 65536)),
    *(_shape(n, 128, 32, 8) for n in (4096, 16384, 32768)), _shape(1024, 64, 64, 8, batch=16),
    _shape(2048, 128, 32, 8, batch=4), _shape(512, 128, 32, 8, batch=8),
    # heads: from MHA to MQA, groups of 3 to 16
    _shape(16384, 64, 16, 16), _shape(1024, 64, 16, 16, batch=8), _shape(8192, 128, 32, 32), _shape(8192, 128, 24, 8),
    _shape(8192, 128, 40, 8), _shape(8192, 128, 28, 4), _shape(8192, 64, 64, 4), _shape(8192, 64, 16, 1),
    # one kv head, as tensor parallelism leaves
    *(_shape(n, 64, 8, 1) for n in (512, 2048, 8192)), *(_shape(n, 128, 8, 1) for n in (1024, 4096)),
    _shape(4096, 64, 8, 1, 128), _shape(4096, 64, 8, 1, 512), _shape("packed32x512", 64, 8, 1),
    # other head_dims
    _shape(8192, 40, 16, 4), _shape(4096, 72, 16, 16, right=-1), _shape(2048, 80, 32, 32, batch=4),
    _shape(8192, 96, 16, 4), _shape(8192, 256, 16, 4),
    # not causal
    _shape(8192, 64, 64, 8, right=-1), _shape(8192, 128, 32, 8, right=-1), _shape(512, 64, 64, 8, right=-1, batch=8),
    # windows, causal and two-sided
    _shape(16384, 64, 64, 8, 128), _shape(16384, 64, 64, 8, 512), _shape(16384, 64, 64, 8, 1024),
    _shape(16384, 128, 48, 8, 128), _shape(16384, 128, 32, 8, 1024), _shape(32768, 128, 32, 8, 2048),
    _shape(16384, 128, 32, 8, 4096), _shape(16384, 64, 64, 8, 128, right=127), _shape(8192, 128, 32, 8, 512, right=511),
    # chunks: few rows against many keys
    _shape(512, 64, 64, 8, k_length=16384), _shape(64, 128, 32, 8, k_length=8192),
    _shape(4096, 128, 32, 8, k_length=16384), _shape(2048, 64, 64, 8, 128, k_length=32768),
    # packed: log-normal, equal, one long and many short, many tiny
    _shape("packed76", 64, 64, 8), _shape("packed76", 128, 32, 8), _shape("packed76", 64, 64, 8, 128),
    _shape("packed32x2048", 128, 32, 8), _shape("packed32768+128x256", 64, 64, 8), _shape("packed1024x64", 64, 64, 8),
    _shape("packed1024x64", 64, 64, 8, 128), _shape("packed128x512", 64, 64, 8, 128, right=127),
    # fp16
    _shape(8192, 128, 32, 8, dtype="fp16"),
    # positional sink tokens, each beside its window above
    _shape(16384, 64, 64, 8, 128, num_sink_tokens=4), _shape(16384, 64, 64, 8, 128, num_sink_tokens=128),
    _shape(16384, 64, 64, 8, 1024, num_sink_tokens=4), _shape("packed76", 64, 64, 8, 128, num_sink_tokens=4),
    _shape(2048, 64, 64, 8, 128, k_length=32768, num_sink_tokens=64), _shape(16384, 128, 48, 8, 128, num_sink_tokens=4),
    _shape(16384, 128, 32, 8, 1024, num_sink_tokens=1),
]  # fmt: skip
