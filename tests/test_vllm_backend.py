# SPDX-License-Identifier: Apache-2.0
"""The vLLM backend's builder and layer on metadata that vLLM's engine made, as on CUDA: which rows are decodes.

On a CUDA device where there is one. Elsewhere the tensors are on the CPU, whose kernels give all rows the same bits.
"""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.vllm_steps import RUNS, Layer, Recorded, steps

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not in this environment: make test-vllm makes one", allow_module_level=True)

from vllm import envs
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from sinkattn import vllm
from sinkattn.vllm_backend import SinkAttentionImpl, SinkAttentionMetadataBuilder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = (8, 2)


def make_builder(drafts: int = 0, heads: tuple[int, int] = HEADS, device: str = "cuda") -> SinkAttentionMetadataBuilder:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(get_num_attention_heads=lambda _: heads[0]),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None,
        use_v2_model_runner=False,
    )
    spec: Any = SimpleNamespace(num_kv_heads=heads[1])
    return SinkAttentionMetadataBuilder(spec, ["a layer"], config, torch.device(device))


def metadata(recorded: Recorded, kind: str) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=recorded.query_start_loc.to(DEVICE),
        query_start_loc_cpu=recorded.query_start_loc,
        seq_lens=recorded.seq_lens.to(DEVICE),
        num_reqs=recorded.num_reqs,
        num_actual_tokens=recorded.num_actual_tokens,
        max_query_len=recorded.max_query_len,
        max_seq_len=recorded.max_seq_len,
        block_table_tensor=recorded.block_table[kind].to(DEVICE),
        slot_mapping=recorded.slot_mapping[kind].to(DEVICE),
    )


def assert_same(got: vllm.Step, want: vllm.Step) -> None:
    assert got.num_tokens == want.num_tokens
    assert (got.apart is None) == (want.apart is None)
    pairs = list(zip(got.packed, want.packed, strict=True))
    if got.apart is not None and want.apart is not None:
        (rows, *mine), others = got.apart
        (expected, *theirs), their_others = want.apart
        assert rows == expected
        assert (others is None) == (their_others is None)
        pairs += [*zip(mine, theirs, strict=True), *zip(others or (), their_others or (), strict=True)]
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("run", "most", "invariant", "long", "expected"),
    [
        ("mixed", 1, False, vllm.LONG, 157),
        ("mixed", 1, False, 0, 505),
        ("mixed", 1, True, 0, 0),
        ("drafts", 4, False, vllm.LONG, 9),
        ("drafts", 4, False, 0, 45),
    ],
)
def test_steps(run: str, most: int, invariant: bool, long: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences in front with one number of rows are decodes: where all are, or some are long; else all are packed."""
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
    monkeypatch.setattr(vllm, "LONG", long)
    builder, decodes = make_builder(most - 1), 0
    assert builder.reorder_batch_threshold == (None if invariant else most)
    for recorded in steps(run):
        got = builder.build(0, metadata(recorded, "full"))
        assert_same(got, recorded.step("full", DEVICE, 0 if invariant else most))
        sliding = recorded.block_table["sliding"].to(DEVICE)
        other = builder.update_block_table(got, sliding, recorded.slot_mapping["sliding"])
        assert_same(other, recorded.step("sliding", DEVICE, 0 if invariant else most))
        decodes += 0 if got.apart is None else len(got.apart[0].seq_lens)
    assert decodes == expected


def test_graphs_take_what_the_backend_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for invariant, support in ((False, AttentionCGSupport.UNIFORM_BATCH), (True, AttentionCGSupport.ALWAYS)):
        monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
        assert make_builder().get_cudagraph_support(None, None) == support


def test_a_padded_batch_of_decodes() -> None:
    """As vLLM captures it: sequences past the last in use have no row and no key."""
    starts = torch.tensor([0, 4, 8, 8, 8], dtype=torch.int32)
    given = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([9, 5, 0, 0], dtype=torch.int32),
        num_reqs=4,
        num_actual_tokens=16,
        max_query_len=4,
        max_seq_len=9,
        block_table_tensor=torch.zeros(4, 8, dtype=torch.int32),
        slot_mapping=torch.full((16,), -1),
    )
    step = make_builder(3).build(0, given)
    assert step.apart is not None
    assert (step.apart[0].rows, len(step.apart[0].seq_lens), step.apart[1]) == (4, 4, None)
    assert make_builder(0).build(0, given).apart is None


@pytest.mark.parametrize(
    ("heads", "drafts", "most"),
    [((64, 8), 3, 4), ((64, 1), 3, 2), ((128, 1), 0, 1), ((256, 1), 0, None), (HEADS, 0, 1)],
)
def test_decodes_have_few_rows(heads: tuple[int, int], drafts: int, most: int | None) -> None:
    assert make_builder(drafts, heads).reorder_batch_threshold == most
    assert make_builder(drafts, heads, "cpu").reorder_batch_threshold is None


@pytest.mark.parametrize("run", RUNS)
def test_a_layer(run: str) -> None:
    mine, other = (Layer("sliding", DEVICE, torch.nan, HEADS, 32) for _ in range(2))
    builder, options = make_builder(3 if run == "drafts" else 0), mine.options
    impl = SinkAttentionImpl(
        HEADS[0], 32, options["scale"], HEADS[1], sliding_window=options["sliding_window"], sinks=options["s_aux"]
    )
    for index, recorded in enumerate(steps(run)):
        rows, slots = mine.rows(recorded.num_actual_tokens), recorded.slot_mapping["sliding"].to(DEVICE)
        got, want = (torch.full_like(rows[0], torch.nan) for _ in range(2))
        impl.do_kv_cache_update(None, rows[1], rows[2], mine.kv_cache, slots)
        impl.forward(None, *rows, mine.kv_cache, builder.build(0, metadata(recorded, "sliding")), got)
        step = recorded.step("sliding", DEVICE, builder.reorder_batch_threshold or 0)
        vllm.write_cache(rows[1], rows[2], other.kv_cache, slots)
        vllm.attend(rows[0], other.kv_cache, step, want, **options)
        assert torch.equal(got, want), index
        if index == 12:
            break
    assert torch.equal(mine.kv_cache.isnan(), other.kv_cache.isnan())
