# SPDX-License-Identifier: Apache-2.0
"""Packed rows over a cache: random mixed batches, and what becomes of each of their sequences alone."""

from random import Random
from typing import Any

import torch
from torch import Tensor

import sinkattn

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def split_pages(
    num_pages: int, page_size: int, heads: int, dim: int, layout: str, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """k and v of a paged cache, all NaN: as one tensor that vLLM or SGLang keeps, or each for itself."""
    if layout == "vllm":  # [blocks, kv_heads, page, 2 * head_dim]
        both = torch.full((num_pages, heads, page_size, 2 * dim), NAN, dtype=dtype, device=device)
        return list(both.transpose(1, 2).split(dim, -1))
    if layout == "beside":  # [blocks, 2, page, kv_heads, head_dim]
        return list(torch.full((num_pages, 2, page_size, heads, dim), NAN, dtype=dtype, device=device).unbind(1))
    return [torch.full((num_pages, page_size, heads, dim), NAN, dtype=dtype, device=device) for _ in range(2)]


class Batch:
    """A random mix of chunks of prefill, prefix hits, decode and speculative rows, sequences without rows or keys."""

    def __init__(
        self, seed: str, dtype: torch.dtype | None = None, device: str = "cpu", dims: tuple[int, ...] = (8, 64, 64, 72),
        longer: int = 1,
    ) -> None:  # fmt: skip
        random = self.random = Random(seed)
        pick = random.choice
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        self.dtype, self.device = dtype or pick(DTYPES), device
        self.dim, self.kv_heads, group = pick(dims), pick((1, 2)), pick((1, 3, 8))
        count = random.randint(0, 6)
        self.q_lens = [pick((0, 1, 1, 1, random.randint(2, 5), random.randint(10, 70 * longer))) for _ in range(count)]
        self.k_lens = [
            pick((0, n, n + random.randint(1, 90 * longer), random.randint(1, 150 * longer))) for n in self.q_lens
        ]
        heads, total = group * self.kv_heads, sum(self.q_lens) + pick((0, 0, 3))

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        self.q = draw(total, heads, self.dim)
        self.keys = [(draw(n, self.kv_heads, self.dim), draw(n, self.kv_heads, self.dim)) for n in self.k_lens]
        left = pick((-1, -1, 0, 7, 40))
        self.options: dict[str, Any] = {
            "softmax_scale": pick((None, 0.3)),
            "window_size": (left, pick((0, 0, 0, -1, 5))),
            "num_sink_tokens": pick((0, 0, 2, 5)),
            "s_aux": pick((None, torch.randn(heads, generator=generator).to(device))),
            "return_lse": pick((True, "raw")),
        }
        self.cu_seqlens = torch.tensor([0, *torch.tensor(self.q_lens).cumsum(0)], dtype=torch.int32, device=device)
        self.seqused = torch.tensor(self.k_lens, dtype=torch.int32, device=device)

    def contiguous(self) -> tuple[Tensor, Tensor]:
        capacity = max([*self.k_lens, 1]) + self.random.randint(0, 3)
        shape = (2, len(self.k_lens), capacity, self.kv_heads, self.dim)
        k, v = torch.full(shape, NAN, dtype=self.dtype, device=self.device)
        for b, (keys, values) in enumerate(self.keys):
            k[b, : len(keys)], v[b, : len(keys)] = keys, values
        return k, v

    def paged(self, page_size: int, layout: str = "apart") -> tuple[Tensor, Tensor, Tensor]:
        """Shuffled pages, NaN in slots that hold no key, and a table whose other entries name no page."""
        counts = [-(-n // page_size) for n in self.k_lens]
        pages = list(range(sum(counts) + 2))
        self.random.shuffle(pages)
        k, v = split_pages(len(pages), page_size, self.kv_heads, self.dim, layout, self.dtype, self.device)
        table = torch.full((len(counts), max([*counts, 0]) + 1), self.random.choice((-1, 2**31 - 1)), dtype=torch.int32)
        for b, (keys, values) in enumerate(self.keys):
            for i in range(counts[b]):
                page, at = pages.pop(), slice(i * page_size, (i + 1) * page_size)
                table[b, i] = page
                k[page, : len(keys[at])], v[page, : len(keys[at])] = keys[at], values[at]
        return k, v, table.to(self.device)

    def run(
        self, k: Tensor, v: Tensor, table: Tensor | None = None, functions: Any = sinkattn
    ) -> tuple[Tensor, Tensor]:
        lengths = {"seqused_k": self.seqused, "max_seqlen_q": max([*self.q_lens, 0]), "max_seqlen_k": None}
        result = functions.flash_attn_varlen_func(
            self.q, k, v, self.cu_seqlens, block_table=table, **lengths, **self.options
        )
        assert isinstance(result, tuple)
        return result

    def alone(self) -> tuple[Tensor, Tensor]:
        """Each sequence by flash_attn_func; rows of none are 0, their LSE -inf."""
        out = torch.zeros_like(self.q)
        lse = torch.full((self.q.shape[1], self.q.shape[0]), -torch.inf, device=self.device)
        for (keys, values), begin, end in zip(
            self.keys, self.cu_seqlens.tolist(), self.cu_seqlens.tolist()[1:], strict=False
        ):
            rows = slice(begin, end)
            got, stats = sinkattn.flash_attn_func(self.q[None, rows], keys[None], values[None], **self.options)
            out[rows], lse[:, rows] = got[0], stats[0]
        return out, lse


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: object) -> None:
    assert all(map(torch.equal, got, want)), what
