# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin without vLLM: its functions on tensors as the engine hands them over, and what it checks at load."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks.vllm_steps import BLOCKS as RECORDED_BLOCKS
from benchmarks.vllm_steps import KINDS, PAGES, RUNS, TOKENS, steps
from sinkattn import flash_attn_func, vllm

BLOCKS, BLOCK, HEAD_DIM, HEADS = 40, 16, 32, (8, 2)
STEP = [(1, 33), (1, 1), (4, 41), (19, 19), (5, 70)]
"""(rows, keys): a token, a prompt of one token, three drafts behind a token, a prompt, and a chunk of a prompt."""


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    """vLLM's cache [blocks, num_kv_heads, block, 2 * head_dim], zeros, in the layouts that it may choose."""
    shape = BLOCKS, HEADS[1], BLOCK, 2 * HEAD_DIM
    between_layers = torch.zeros(BLOCKS, 3, *shape[1:], dtype=dtype)
    return {
        "heads outside": torch.zeros(shape, dtype=dtype),
        "tokens outside": torch.zeros(BLOCKS, BLOCK, HEADS[1], 2 * HEAD_DIM, dtype=dtype).transpose(1, 2),
        "between the layers' blocks": between_layers[:, 1],
    }


@pytest.mark.parametrize("decodes", [0, 2])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("layout", ["heads outside", "tokens outside", "between the layers' blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mixed_step_has_the_bits_of_dense_sequences(
    dtype: torch.dtype, layout: str, window: int | None, decodes: int
) -> None:
    """Pages in any order, padding rows and slots, NaN where nothing was written: row by row the bits of dense calls."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    kv_cache = layouts(dtype)[layout]
    kv_cache.fill_(torch.nan)
    s_aux = 2 * torch.randn(HEADS[0], generator=generator)
    pages = iter(torch.randperm(BLOCKS - 1, generator=generator) + 1)  # block 0 is nobody's
    table = torch.zeros(len(STEP), 8, dtype=torch.int32)
    keys, values, slots = [], [], []
    for b, (_, n) in enumerate(STEP):
        used = torch.stack([next(pages) for _ in range(-(-n // BLOCK))])
        table[b, : len(used)] = used
        keys.append(random(n, HEADS[1], HEAD_DIM))
        values.append(random(n, HEADS[1], HEAD_DIM))
        slots.append((used[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:n])
    padding = random(3, HEADS[1], HEAD_DIM)
    nowhere = torch.full((3,), -1)
    vllm.write_cache(torch.cat([*keys, padding]), torch.cat([*values, padding]), kv_cache, torch.cat([*slots, nowhere]))
    assert kv_cache[0].isnan().all(), "padding was written"

    rows, lens = (torch.tensor(x, dtype=torch.int32) for x in zip(*STEP, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), rows.cumsum(0).int()])
    query = random(int(rows.sum()) + 2, HEADS[0], HEAD_DIM)
    out = torch.full_like(query, -3)
    packed = vllm.Packed(starts, lens, table[:, :2])
    step = vllm.Step.of(int(rows.sum()), packed, vllm.LONG, decodes, 1).with_block_table(table)
    assert (step.apart is None) == (decodes == 0)
    vllm.attend(query, kv_cache, step, out, scale=0.3, sliding_window=window, s_aux=s_aux)
    left = -1 if window is None else window - 1
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        mine = slice(int(starts[b]), int(starts[b + 1]))
        expected = flash_attn_func(
            query[None, mine], k[None], v[None], softmax_scale=0.3, causal=True, window_size=(left, 0), s_aux=s_aux
        )
        assert torch.equal(out[mine], expected[0]), f"sequence {b}"
    assert out[len(query) - 2 :].eq(-3).all()


@pytest.mark.parametrize("run", RUNS)
def test_the_recorded_steps_are_an_engines(run: str) -> None:
    """Each row's slot is that of its key in the sequence's pages; steps are of all the kinds that they are kept for."""
    recorded = list(steps(run))
    assert len(recorded) == {"mixed": 53, "drafts": 24}[run]
    for step in recorded:
        rows = step.query_start_loc.diff()
        assert step.num_actual_tokens == rows.sum() <= TOKENS
        assert step.max_query_len == rows.max()
        assert step.max_seq_len == step.seq_lens.max()
        for kind in KINDS:
            table, slots = step.block_table[kind], step.slot_mapping[kind].split(rows.tolist())
            assert table.shape == (step.num_reqs, PAGES)
            assert table.max() < RECORDED_BLOCKS
            for b, mine in enumerate(slots):
                at = torch.arange(int(step.seq_lens[b]) - len(mine), int(step.seq_lens[b]))
                assert torch.equal(mine, table[b].long()[at // BLOCK] * BLOCK + at % BLOCK)
    mixed = [step for step in recorded if 0 < step.decodes(4)[0] < step.num_reqs]
    assert len(mixed) > 15
    if run == "mixed":
        first = recorded[0].block_table["full"][0, :20]
        found = [step for step in recorded if (step.block_table["full"][1:, :20] == first).all(1).any()]
        assert len(found) > 20, "20 pages are a prefix of several sequences"
        assert sum(given_back(step.block_table["sliding"], step.seq_lens) for step in recorded) > 20


def given_back(table: Tensor, seq_lens: Tensor) -> bool:
    """A page that has left one sequence's window and holds other keys of another sequence by now."""
    column = torch.arange(table.shape[1]).expand_as(table)
    used = column * BLOCK < seq_lens[:, None]
    places = torch.stack([table[used], column[used]]).unique(dim=1)
    return len(places[0]) > len(places[0].unique())


def test_pages_are_views() -> None:
    for kv_cache in layouts(torch.bfloat16).values():
        for pages in vllm.cache_pages(kv_cache, HEAD_DIM):
            assert pages.shape == (BLOCKS, BLOCK, HEADS[1], HEAD_DIM)
            assert pages.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("version", "served"), [("0.32.0", True), ("0.32.4", True), ("0.31.9", False), ("0.33", False)]
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, served: bool) -> None:
    stand_in = ModuleType("vllm")
    stand_in.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    if served:
        vllm.check_version()
    else:
        with pytest.raises(ImportError, match=rf"vLLM is {version}; served are 0\.32, each with its patch releases"):
            vllm.check_version()


def test_values_of_another_width_are_refused() -> None:
    key, slots = torch.zeros(3, HEADS[1], HEAD_DIM), torch.arange(3)
    with pytest.raises(NotImplementedError, match="values have head_dim 16, keys 32; they must be equal: leave att"):
        vllm.write_cache(key, key[..., :16], layouts(torch.float32)["heads outside"], slots)
