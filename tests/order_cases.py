# SPDX-License-Identifier: Apache-2.0
"""Rows of one sequence, each computed in every way: a row has one bit pattern.

A walk draws a sequence and its mask, computes its rows in one prefill, and some of them again in all other ways.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ops = torch.ops.sinkattn
Row = tuple[Tensor, ...]  # out, lse, lse_raw of some neighbouring rows, [rows, heads, ..]

HEAD_DIMS = (8, 40, 64, 80, 128, 256)
HEADS = ((1, 1), (4, 1), (4, 2), (6, 2), (8, 1), (3, 3))
PAGE_SIZES = (0, 1, 16, 64, 256)
DECODE_ROWS = (1, 2, 4, 8)


@dataclass
class Walk:
    seed: int
    dtype: torch.dtype
    device: str = "cpu"
    invariant: bool = False  # what decodes are asked for
    workers: tuple[int, ...] = (1, 1, 1, 2, 3)
    most_keys: int = 2100
    chunks: bool = False  # a sequence of several of CUDA's chunks, mostly without a window

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        rng, generator = self.rng, torch.Generator().manual_seed(self.seed)
        self.heads, self.kv_heads = rng.choice(HEADS)
        self.length = min(
            self.most_keys, rng.choice((rng.randint(9, 300), rng.randint(300, 1100), rng.randint(1000, 2100)))
        )
        self.left = rng.choice((-1, -1, 0, rng.randint(1, 160), 127, rng.randint(100, 1200)))
        self.sinks = rng.choice((0, 0, 1, 4, rng.randint(100, 600)))
        head_dim = rng.choice(HEAD_DIMS)
        if self.chunks:
            self.length = rng.choice((8192, 8193, 20481, rng.randint(8000, 34000)))
            self.left, head_dim = rng.choice((-1, -1, -1, 9000)), rng.choice((40, 64, 80, 128))

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tensors = [draw(self.length, heads, head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        tensors[0] *= rng.choice((1, 1, 6))  # the pivot moves
        if self.chunks:
            tensors[1][rng.randrange(self.length) :] *= rng.choice((0.1, 1, 4))  # and from chunk to chunk
        self.q, self.k, self.v = (x.to(self.dtype).to(self.device) for x in tensors)
        self.s_aux = (2 + 3 * draw(self.heads)).to(self.device) if rng.random() < 0.8 else None
        if self.device == "cpu" and head_dim > 8 and rng.random() < 0.25:
            self.v = self.v[..., : 8 * rng.randrange(1, head_dim // 8)].contiguous()

    def __str__(self) -> str:
        widths = f"{self.q.shape[-1]} columns, {self.v.shape[-1]} of values"
        return (
            f"seed {self.seed}: {self.length} keys, {self.heads}:{self.kv_heads} heads, {widths}, "
            f"left {self.left}, {self.sinks} sink tokens, {'no ' if self.s_aux is None else ''}s_aux"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor, Tensor] | None = None) -> Row:
        bounds = (None, None) if cu is None else cu
        found = ops.flash_attn_fwd_raw(q, k, v, self.s_aux, *bounds, None, None, None, self.left, 0, self.sinks)
        out, *stats = found
        return (out, *(x.mT for x in stats))

    def whole(self) -> Row:
        out, lse, raw = self.forward(self.q[None], self.k[None], self.v[None])
        return out[0], lse[0], raw[0]

    def in_chunks(self) -> Iterator[tuple[int, Row]]:
        """First row and rows of a prefill in chunks, against the keys so far."""
        count = self.rng.randint(1, min(4, self.length - 1))
        cuts = [0, *sorted(self.rng.sample(range(1, self.length), count)), self.length]
        for begin, end in pairwise(cuts):
            out, lse, raw = self.forward(self.q[None, begin:end], self.k[None, :end], self.v[None, :end])
            yield begin, (out[0], lse[0], raw[0])

    def packed(self) -> tuple[int, Row]:
        """The last rows of a shorter sequence, between rows of others."""
        end = self.rng.randint(1, self.length)
        rows = self.rng.randint(1, end)
        lens = [(self.rng.randint(0, 40), self.rng.randint(0, 90)), (rows, end), (7, 30)]
        q = torch.cat([*(self.q.flip(0)[: n[0]] for n in lens[:1]), self.q[end - rows : end], self.q[:7]])
        k, v = (torch.cat([x.flip(0)[: lens[0][1]], x[:end], x[:30]]) for x in (self.k, self.v))
        lens[0], lens[2] = (min(lens[0][0], self.length), min(lens[0][1], self.length)), (7, min(30, self.length))
        cu = tuple(torch.tensor([0, *(n[i] for n in lens)]).cumsum(0).int().to(self.device) for i in range(2))
        found = self.forward(q, k, v, cu)  # type: ignore[arg-type]
        begin = lens[0][0]
        return end - rows, tuple(x[begin : begin + rows] for x in found)

    def decoded(self, rows: int, page_size: int, must_end: int) -> Iterator[tuple[int, Row]]:
        """A batch of decodes of `rows` rows, one of which ends at key must_end."""
        batch = self.rng.choice((1, 3, 20, 60) if self.chunks else (1, 2, 3, self.rng.randint(4, 9)))
        ends = [self.rng.randint(rows, self.length) for _ in range(batch)]
        ends[self.rng.randrange(batch)] = max(must_end, rows)
        q = torch.stack([self.q[end - rows : end] for end in ends])
        capacity = max(ends) + self.rng.randint(0, 40)
        size = page_size or capacity
        pages = -(-capacity // size)
        table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(self.seed)).view(batch, pages)
        caches = []
        for x in (self.k, self.v):
            cache = torch.full((batch * pages, size, *x.shape[1:]), torch.nan, dtype=self.dtype, device=self.device)
            for b, end in enumerate(ends):
                padded = torch.full((pages * size, *x.shape[1:]), torch.nan, dtype=self.dtype, device=self.device)
                padded[:end] = x[:end]
                cache[table[b] if page_size else slice(b, b + 1)] = padded.view(pages, size, *x.shape[1:])
            caches.append(cache)
        splits = 0 if self.invariant else self.rng.choice((0, 0, 1, 2, 3, 7))
        torch.set_num_threads(self.rng.choice(self.workers))
        lens = torch.tensor(ends, dtype=torch.int32, device=self.device)
        found = ops.flash_decode_raw(
            q, *caches, self.s_aux, lens, table.int().to(self.device) if page_size else None, None,
            self.left, self.sinks, splits, self.invariant,
        )  # fmt: skip
        out, *stats = found
        for b, end in enumerate(ends):
            yield end - rows, (out[b], *(x[b].mT for x in stats))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def check(walk: Walk, rows: int) -> int:
    """Compares so many rows' bits in all forms; returns how many comparisons those were."""
    want, compared = [bits(x) for x in walk.whole()], 0

    def same(found: Row, begin: int, what: str) -> None:
        nonlocal compared
        for name, x, y in zip(("out", "lse", "lse_raw"), found, want, strict=True):
            got = bits(x)
            expected = y[begin : begin + len(got)]
            differ = got != expected
            rows_apart = [begin + i for i in differ.flatten(1).any(1).nonzero().flatten().tolist()]
            bits_apart = torch.stack([got[differ], expected[differ]], 1)[:5].tolist()
            assert not rows_apart, f"{walk}: {name} of rows {rows_apart[:5]} by {what}: {bits_apart}"
        compared += len(found[0])

    for begin, found in walk.in_chunks():
        same(found, begin, "a prefill in chunks")
    begin, found = walk.packed()
    same(found, begin, "a packed prefill")
    for _ in range(rows):
        end = walk.rng.randint(1, walk.length)
        for page_size in PAGE_SIZES:
            count = walk.rng.choice(DECODE_ROWS)
            for begin, found in walk.decoded(count, page_size, end):
                same(found, begin, f"a decode of {count} rows from pages of {page_size}")
    return compared
