# SPDX-License-Identifier: Apache-2.0
"""Which tokens each rank holds, and where the sequences of a packed row lie in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[int, int]  # [begin, end)


@dataclass(frozen=True)
class Shards:
    """The tokens of each rank, as ascending ranges of the whole: together they hold every token once.

    Build one a step and hand it to every layer. Raises ValueError when a token is held twice or by nobody.
    """

    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        end = 0
        for begin, next_end in sorted(x for held in self.ranges for x in held):
            if begin != end or next_end <= begin:
                raise ValueError(
                    f"sinkattn: shards have a range [{begin}, {next_end}) behind token {end}; each token is held once"
                )
            end = next_end
        if any(list(held) != sorted(held) for held in self.ranges):
            raise ValueError(f"sinkattn: shards are {self.ranges}; the ranges of a rank must ascend")

    @staticmethod
    def contiguous(lengths: Sequence[int]) -> "Shards":
        """Rank r holds the lengths[r] tokens that follow those of rank r - 1."""
        ends = [sum(lengths[: r + 1]) for r in range(len(lengths))]
        return Shards(tuple(((end - n, end),) if n else () for n, end in zip(lengths, ends, strict=True)))

    @staticmethod
    def zigzag(total: int, ranks: int) -> "Shards":
        """Rank r holds parts r and 2 * ranks - 1 - r of 2 * ranks, so that causal rows cost every rank the same."""
        cuts = [i * total // (2 * ranks) for i in range(2 * ranks + 1)]

        def held(*parts: int) -> tuple[Range, ...]:
            pairs = [(cuts[i], cuts[i + 1]) for i in parts if cuts[i] < cuts[i + 1]]
            if len(pairs) == 2 and pairs[0][1] == pairs[1][0]:
                return ((pairs[0][0], pairs[1][1]),)
            return tuple(pairs)

        return Shards(tuple(held(r, 2 * ranks - 1 - r) for r in range(ranks)))

    @staticmethod
    def gathered(length: int, group: dist.ProcessGroup | None, device: torch.device) -> "Shards":
        """Contiguous shards of the lengths that the ranks tell each other: a collective, for which the host waits."""
        lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lengths, torch.tensor([length], device=device), group=group)
        return Shards.contiguous([int(x) for x in torch.cat(lengths).tolist()])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sum(end - begin for begin, end in held) for held in self.ranges)

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def take(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part of the whole, a view where it is one range."""
        held = [whole.narrow(dim, begin, end - begin) for begin, end in self.ranges[rank]]
        return torch.cat(held, dim) if len(held) > 1 else held[0] if held else whole.narrow(dim, 0, 0)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        pieces: list[tuple[int, Tensor]] = []
        for held, part in zip(self.ranges, parts, strict=True):
            split = torch.split(part, [end - begin for begin, end in held], dim) if held else ()
            pieces += [(begin, x) for (begin, _), x in zip(held, split, strict=True)]
        return torch.cat([x for _, x in sorted(pieces, key=lambda piece: piece[0])] or [parts[0]], dim)


@dataclass(frozen=True)
class Call:
    """What a call says beside its tensors, which are [batch, tokens, heads, head_dim] below this."""

    shards: Shards
    group: dist.ProcessGroup | None
    max_seqlen: int | None
    softmax_scale: float | None
    window_size: tuple[int, int]
    num_sink_tokens: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)


def local_offsets(cu_seqlens: Tensor, ranges: Sequence[Range], at: int = 0) -> Tensor:
    """cu_seqlens within ranges that lie behind each other from `at` on: sequences are cut, and empty where outside."""
    begin, end = ranges[0]
    offsets = cu_seqlens.clamp(begin, end) - (begin - at)
    for begin, end in ranges[1:]:
        offsets = offsets + cu_seqlens.clamp(begin, end) - begin
    return offsets
