# SPDX-License-Identifier: Apache-2.0
"""Recorded steps of vLLM's engine: sequences, pages and slots, without the tensors.

A replay makes queries and keys of any sizes for them, on any device, and calls sinkattn.vllm as the engine would.
"""

import io
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sinkattn import vllm

PATH = Path(__file__).parent / "data" / "vllm_steps.npz.xz"
RUNS, KINDS, BLOCK = ("mixed", "drafts"), ("sliding", "full"), 16
"""Runs, kinds of layers, and tokens a block."""


BLOCKS, SEQUENCES, TOKENS, PAGES = 2304, 16, 1024, 128
"""What a replay needs room for: blocks of the cache; sequences, tokens and pages of a sequence of a step."""


@dataclass(frozen=True)
class Recorded:
    """vLLM's CommonAttentionMetadata, on the host. block_table and slot_mapping are of each kind of layer."""

    query_start_loc: Tensor  # int32 [sequences + 1]
    seq_lens: Tensor  # int32 [sequences]
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: dict[str, Tensor]  # int32 [sequences, most pages]
    slot_mapping: dict[str, Tensor]  # int64 [tokens]

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    def decodes(self, most: int) -> tuple[int, int]:
        """How many sequences in front have one number of rows, up to `most`, and the number: the backend's decodes."""
        rows = self.query_start_loc.diff().tolist()
        if not rows or rows[0] > most:
            return 0, 0
        return next((i for i, n in enumerate(rows) if n != rows[0]), len(rows)), rows[0]

    def step(self, kind: str, device: str, most: int) -> vllm.Step:
        """As the backend's builder makes it."""
        packed = vllm.Packed(*(x.to(device) for x in (self.query_start_loc, self.seq_lens, self.block_table[kind])))
        return vllm.Step.of(self.num_actual_tokens, packed, self.max_seq_len, *self.decodes(most))


def steps(run: str) -> Iterator[Recorded]:
    with np.load(io.BytesIO(lzma.decompress(PATH.read_bytes()))) as file:
        found = {name.removeprefix(f"{run}."): torch.from_numpy(file[name]) for name in file if name.startswith(run)}
    tables = {kind: found[f"{kind}.block_table"].cumsum(1).int() for kind in KINDS}
    new, lengths = found["query_start_loc"], found["seq_lens"]
    owner = torch.arange(len(new)).repeat_interleave(new)
    at = torch.arange(len(owner)) - (new.cumsum(0) - lengths)[owner]
    # The file has a slot's distance from the place of its key in the sequence's pages.
    places = {kind: tables[kind].long()[owner, at // BLOCK] * BLOCK + at % BLOCK for kind in KINDS}
    slots = {kind: places[kind] + found[f"{kind}.slot_mapping"] for kind in KINDS}
    sequence = token = 0
    for num_reqs, tokens, max_query_len, max_seq_len in found["numbers"].tolist():
        of, rows = slice(sequence, sequence + num_reqs), slice(token, token + tokens)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), found["query_start_loc"][of].cumsum(0).int()])
        yield Recorded(
            starts, found["seq_lens"][of], tokens, max_query_len, max_seq_len,
            {kind: tables[kind][of] for kind in KINDS}, {kind: slots[kind][rows] for kind in KINDS},
        )  # fmt: skip
        sequence, token = of.stop, rows.stop


class Layer:
    """A layer of gpt-oss's sizes: its cache as vLLM lays it out on GPUs, its sinks, and random rows for steps."""

    def __init__(
        self,
        kind: str,
        device: str,
        unwritten: float = 0.0,
        heads: tuple[int, int] = (64, 8),
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.kind, self.device, self.heads, self.head_dim, self.dtype = kind, device, heads, head_dim, dtype
        self.generator = torch.Generator(device).manual_seed(0)
        shape = BLOCKS, BLOCK, heads[1], 2 * head_dim
        self.kv_cache = torch.full(shape, unwritten, device=device, dtype=dtype).transpose(1, 2)
        s_aux = 2 * torch.randn(heads[0], device=device, generator=self.generator)
        self.options = {"scale": head_dim**-0.5, "sliding_window": 128 if kind == "sliding" else None, "s_aux": s_aux}

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        q_heads, kv_heads = self.heads
        shape = tokens, q_heads + 2 * kv_heads, self.head_dim
        rows = torch.randn(shape, device=self.device, generator=self.generator).to(self.dtype)
        q, k, v = rows.split([q_heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    def run(self, rows: tuple[Tensor, Tensor, Tensor], slots: Tensor, step: vllm.Step, output: Tensor) -> None:
        q, k, v = rows
        vllm.write_cache(k, v, self.kv_cache, slots)
        vllm.attend(q, self.kv_cache, step, output, **self.options)
