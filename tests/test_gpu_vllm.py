# SPDX-License-Identifier: Apache-2.0
"""Steps that vLLM's engine took, recorded, on a CUDA device: what the backend computes for them, eagerly and in graphs.

In chunks of prompts beside decoding sequences, prefixes that several sequences share, drafts, and blocks that a window
has given back.
"""

import pytest
import torch
from gpus import captured, launched, needs_gpus
from torch import Tensor

import sinkattn
from benchmarks.vllm_steps import BLOCK, KINDS, PAGES, RUNS, SEQUENCES, TOKENS, Layer, Recorded, steps
from sinkattn import vllm

pytestmark = needs_gpus()

MOST = 4
"""Rows of a sequence that may be a decode: a token and three drafts."""


class Keys:
    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        shape = (layer.kv_cache.shape[0] * BLOCK, layer.heads[1], layer.head_dim)
        self.k, self.v = (torch.zeros(shape, device="cuda", dtype=layer.dtype) for _ in range(2))

    def write(self, rows: tuple[Tensor, Tensor, Tensor], slots: Tensor) -> None:
        self.k[slots], self.v[slots] = rows[1:]

    def expected(self, q: Tensor, recorded: Recorded, dtype: torch.dtype) -> Tensor:
        """Sequence by sequence: the dense forward's bits, or those of eager attention in fp64."""
        options = {"softmax_scale": self.layer.options["scale"], "s_aux": self.layer.options["s_aux"], "causal": True}
        window = self.layer.options["sliding_window"]
        options["window_size"] = (-1 if window is None else window - 1, 0)
        func = sinkattn.reference.flash_attn_func if dtype == torch.float64 else sinkattn.flash_attn_func
        found, starts = [], recorded.query_start_loc.tolist()
        for b, keys in enumerate(recorded.seq_lens.tolist()):
            at = torch.arange(keys)
            slots = recorded.block_table[self.layer.kind][b].long()[at // BLOCK] * BLOCK + at % BLOCK
            x = (q[starts[b] : starts[b + 1]], self.k[slots.cuda()], self.v[slots.cuda()])
            found.append(func(*(y[None].to(dtype) for y in x), **options)[0])
        return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_steps_of_the_engine(run: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows have the dense forward's bits, step by step; decodes in the decode kernels are as near to fp64."""
    monkeypatch.setattr(vllm, "LONG", 0)
    layer = Layer(kind, "cuda", torch.nan)
    keys, decodes = Keys(layer), 0
    for index, recorded in enumerate(steps(run)):
        rows, slots = layer.rows(recorded.num_actual_tokens), recorded.slot_mapping[kind].cuda()
        keys.write(rows, slots)
        want = keys.expected(rows[0], recorded, layer.dtype)
        packed, split = (torch.full_like(want, torch.nan) for _ in range(2))
        layer.run(rows, slots, recorded.step(kind, "cuda", 0), packed)
        assert torch.equal(packed, want), index
        vllm.attend(rows[0], layer.kv_cache, recorded.step(kind, "cuda", MOST), split, **layer.options)
        count, each = recorded.decodes(MOST)
        assert torch.equal(split[count * each :], want[count * each :]), index
        if count and (kind == "full" or count == recorded.num_reqs):
            exact = keys.expected(rows[0], recorded, torch.float64)
            lost, allowed = ((x - exact).abs().max().item() for x in (split, packed))
            assert lost <= 1.5 * allowed + 1e-4, (index, lost, allowed)
            decodes += count
        else:
            assert torch.equal(split, want), index
    assert decodes > 5
    sinkattn.check_errors()


class Buffers:
    """The engine's, which a captured graph reads; what a step does not fill is padding."""

    def __init__(self, layer: Layer, tokens: int, sequences: int) -> None:
        self.layer = layer
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.starts, self.lens = torch.zeros(sequences + 1, **int32), torch.zeros(sequences, **int32)
        self.table = torch.zeros(sequences, PAGES, **int32)
        self.slots = torch.full((tokens,), -1, device="cuda")
        self.rows = tuple(x.clone() for x in layer.rows(tokens))
        self.output = torch.full_like(self.rows[0], torch.nan)

    def fill(self, recorded: Recorded) -> None:
        n, tokens = recorded.num_reqs, recorded.num_actual_tokens
        self.starts.fill_(tokens)
        self.starts[: n + 1] = recorded.query_start_loc
        self.lens.zero_()
        self.lens[:n] = recorded.seq_lens
        self.table.zero_()
        self.table[:n] = recorded.block_table[self.layer.kind]
        self.slots.fill_(-1)
        self.slots[:tokens] = recorded.slot_mapping[self.layer.kind]
        for to, x in zip(self.rows, self.layer.rows(tokens), strict=True):
            to[:tokens] = x
        self.output.fill_(torch.nan)

    def step(self, rows: int) -> vllm.Step:
        decodes = len(self.lens) if rows else 0
        return vllm.Step.of(len(self.slots), vllm.Packed(self.starts, self.lens, self.table), 0, decodes, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_takes_every_step(kind: str) -> None:
    """One graph of packed rows, captured on padding alone, for 53 steps of 1 to 16 sequences and 1 to 1024 tokens."""
    layer, eager = Layer(kind, "cuda", torch.nan), Layer(kind, "cuda", torch.nan)
    eager.options = layer.options
    buffers = Buffers(layer, TOKENS, SEQUENCES)
    graph = captured(lambda: layer.run(buffers.rows, buffers.slots, buffers.step(0), buffers.output))
    for index, recorded in enumerate(steps("mixed")):
        buffers.fill(recorded)
        graph.replay()
        n = recorded.num_actual_tokens
        want = torch.full_like(buffers.output[:n], torch.nan)
        rows = tuple(x[:n] for x in buffers.rows)
        eager.run(rows, recorded.slot_mapping[kind].cuda(), recorded.step(kind, "cuda", 0), want)
        assert torch.equal(buffers.output[:n], want), index
        assert torch.equal(layer.kv_cache.isnan(), eager.kv_cache.isnan()), index
    sinkattn.check_errors()


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_decodes_takes_every_step_of_decodes(kind: str) -> None:
    """With 1 to 16 of its 16 sequences in use: the bits of an eager call, and near to the packed rows' everywhere."""
    layer, replayed = Layer(kind, "cuda", torch.nan), 0
    buffers = Buffers(layer, SEQUENCES, SEQUENCES)
    graph = captured(lambda: layer.run(buffers.rows, buffers.slots, buffers.step(1), buffers.output))
    for recorded in steps("mixed"):
        if recorded.max_query_len > 1:
            rows = layer.rows(recorded.num_actual_tokens)
            vllm.write_cache(*rows[1:], layer.kv_cache, recorded.slot_mapping[kind].cuda())
            continue
        buffers.fill(recorded)
        graph.replay()
        n, replayed = recorded.num_actual_tokens, replayed + 1
        got, eager, packed = buffers.output.clone(), buffers.output.clone(), buffers.output.clone()
        vllm.attend(buffers.rows[0], layer.kv_cache, buffers.step(1), eager, **layer.options)
        assert torch.equal(got, eager)
        assert got[n:].eq(0).all()
        vllm.attend(buffers.rows[0][:n], layer.kv_cache, recorded.step(kind, "cuda", 0), packed, **layer.options)
        torch.testing.assert_close(got[:n], packed[:n], rtol=2e-2, atol=2e-3)
    assert replayed > 15
    sinkattn.check_errors()


def test_a_step_does_not_wait_for_the_device() -> None:
    layer = Layer("full", "cuda")
    for recorded in list(steps("mixed"))[9:13]:
        rows, slots = layer.rows(recorded.num_actual_tokens), recorded.slot_mapping["full"].cuda()
        step, output = recorded.step("full", "cuda", MOST), torch.empty_like(rows[0])
        layer.run(rows, slots, step, output)
        torch.cuda.synchronize()
        names = launched(lambda: layer.run(rows, slots, step, output))  # noqa: B023
        assert 2 <= len(names) <= 6, names
