# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, on a CUDA device. SINKATTN_GPU_CASES is the number of random configurations."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import Tensor

import sinkattn
from sinkattn._testing import (
    DTYPES,
    EDGES,
    Case,
    Inputs,
    Outcome,
    compare_all,
    evaluate,
    make_inputs,
    random_case,
    restride,
    run_ops,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a CUDA device of compute capability 8.0 or later; runs there with make test-gpu",
)
RANDOM_CASES = int(os.environ.get("SINKATTN_GPU_CASES", "500"))


def on_device(case: Case, t: Inputs) -> Inputs:
    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().cuda()

    q, k, v = (
        restride(x.detach().cuda(), case.strides if i or case.strides != "expanded" else "plain")
        for i, x in enumerate((t.q, t.k, t.v))
    )
    return dataclasses.replace(t, q=q, k=k, v=v, s_aux=move(t.s_aux), cu_q=move(t.cu_q), cu_k=move(t.cu_k))


def assert_right_on_device(case: Case) -> None:
    t = make_inputs(case)
    got = {name: x.cpu() for name, x in run_ops(case, on_device(case, t), sinkattn, backward=False).items()}
    found = compare_all(case, t, got, evaluate(case, t), evaluate(case, t, DTYPES[case.dtype]))
    outcome = Outcome(case, "cuda", found)
    assert not outcome.failures, str(outcome)


def gpu_case(seed: str) -> Case:
    """random_case's, as a forward in a half format; caches become packed sequences."""
    case = random_case(seed)
    return dataclasses.replace(
        case,
        layout="dense" if case.layout == "dense" else "varlen",
        head_dim=min(case.head_dim, 256),
        dtype=case.dtype if case.dtype in ("bf16", "fp16") else "bf16",
        page_size=0,
        shared=False,
        num_splits=0,
        invariant=False,
    )


def test_random_configurations_against_fp64(seed: int) -> None:
    for index in range(RANDOM_CASES):
        assert_right_on_device(gpu_case(f"{seed}-{index}"))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_head_dim(head_dim: int, dtype: str) -> None:
    assert_right_on_device(
        Case(head_dim=head_dim, left=127, right=0, ratio=8, q_lens=(300, 300), k_lens=(300, 300), dtype=dtype, seed=1)
    )


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_s_aux(edge: str) -> None:
    assert_right_on_device(
        Case(
            head_dim=64,
            left=63,
            right=0,
            ratio=8,
            q_lens=(200, 1),
            k_lens=(200, 0),
            layout="varlen",
            s_aux=edge,
            dtype="bf16",
            seed=1,
        )
    )


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (5, 5), (65, 13), (96, 8), (128, 2)])
def test_head_counts(num_q_heads: int, num_kv_heads: int) -> None:
    ratio = num_q_heads // num_kv_heads
    assert_right_on_device(
        Case(
            head_dim=64,
            left=100,
            right=0,
            ratio=ratio,
            kv_heads=num_kv_heads,
            q_lens=(70,),
            k_lens=(130,),
            dtype="bf16",
            seed=1,
        )
    )


@pytest.mark.parametrize("ratio", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("left", "right"), [(127, 0), (0, 0), (40, 30), (0, 79)])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_windows_of_one_key_tile(ratio: int, left: int, right: int, layout: str) -> None:
    q_lens, k_lens = ((290, 290), (350, 350)) if layout == "dense" else ((290, 0, 7, 101), (290, 5, 200, 100))
    case = Case(
        left=left, right=right, ratio=ratio, layout=layout, q_lens=q_lens, k_lens=k_lens, dtype="bf16", seed=ratio
    )
    assert_right_on_device(case)


def gpt_oss_like(batch: int, length: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, length, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, length, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    return q, k, v, 2 * torch.randn(16, device="cuda")


@pytest.mark.parametrize("window", [(-1, 0), (127, 0), (100, 30)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_of_a_row_are_its_own(window: tuple[int, int], head_dim: int) -> None:
    """A row alone, in a chunked prefill, in a batch and packed."""
    q, k, v, s_aux = gpt_oss_like(3, 700, head_dim)
    options = {"window_size": window, "s_aux": s_aux}
    whole = sinkattn.flash_attn_func(q, k, v, **options)
    for b in range(3):
        assert torch.equal(sinkattn.flash_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options)[0], whole[b])
    if window[1] == 0:
        chunk = sinkattn.flash_attn_func(q[:, 300:500], k[:, :500], v[:, :500], **options)
        assert torch.equal(chunk, whole[:, 300:500])
        assert torch.equal(
            sinkattn.flash_attn_func(q[:, 499:500], k[:, :500], v[:, :500], **options), whole[:, 499:500]
        )
    bounds = torch.arange(0, 2101, 700, dtype=torch.int32, device="cuda")
    packed = sinkattn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, **options)
    assert torch.equal(packed, whole.flatten(0, 1))


def test_repeats_are_bitwise_equal_under_load() -> None:
    q, k, v, s_aux = gpt_oss_like(1, 1000)
    first = sinkattn.flash_attn_func(q, k, v, causal=True, s_aux=s_aux)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(int(os.environ.get("SINKATTN_GPU_REPEATS", "500"))):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        different += (sinkattn.flash_attn_func(q, k, v, causal=True, s_aux=s_aux) != first).sum()
    assert different.item() == 0


def test_unseen_nan_has_no_effect_and_a_seen_one_stays_in_its_rows() -> None:
    q, k, v, s_aux = gpt_oss_like(1, 500)
    options = {"window_size": (63, 0), "s_aux": s_aux}
    clean = sinkattn.flash_attn_func(q, k, v, **options)
    poisoned_k, poisoned_v = k.clone(), v.clone()
    poisoned_k[:, 200], poisoned_v[:, 210] = torch.nan, torch.inf
    got = sinkattn.flash_attn_func(q, poisoned_k, poisoned_v, **options)
    assert not torch.isfinite(got[:, 200:274]).any()
    assert torch.equal(got[:, :200], clean[:, :200])
    assert torch.equal(got[:, 274:], clean[:, 274:])
    late = sinkattn.flash_attn_func(q[:, 300:], poisoned_k, poisoned_v, **options)
    assert torch.equal(late, clean[:, 300:])


def test_hostile_cu_seqlens_are_contained_and_reported(seed: int) -> None:
    q, k, v, s_aux = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 300))
    good = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    want = sinkattn.flash_attn_varlen_func(q, k, v, good, good, causal=True, s_aux=s_aux)
    sinkattn.check_errors()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        bad = torch.randint(-(2**31), 2**31, (6,), generator=generator, dtype=torch.int64).to(torch.int32).cuda()
        bad = bad % 400 if torch.rand((), generator=generator) < 0.5 else bad
        sinkattn.flash_attn_varlen_func(q, k, v, bad, bad.flip(0), causal=True, window_size=(127, 0), s_aux=s_aux)
    with pytest.raises(ValueError, match="cu_seqlens did not start at 0"):
        sinkattn.check_errors()
    sinkattn.check_errors()
    assert torch.equal(sinkattn.flash_attn_varlen_func(q, k, v, good, good, causal=True, s_aux=s_aux), want)


def test_sinkattn_check_raises_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKATTN_CHECK", "1")
    q, k, v, _ = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 300))
    bad = torch.tensor([0, 200, 100], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="decreased"):
        sinkattn.flash_attn_varlen_func(q, k, v, bad, bad, causal=True)


def test_graph_replay_follows_its_inputs() -> None:
    q, k, v, s_aux = gpt_oss_like(2, 300)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = torch.tensor([0, 100, 600], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    sinkattn.flash_attn_varlen_func(*packed, bounds, bounds, causal=True, s_aux=s_aux)
    with torch.cuda.graph(graph):
        out = sinkattn.flash_attn_varlen_func(*packed, bounds, bounds, causal=True, s_aux=s_aux)
    bounds.copy_(torch.tensor([0, 450, 590], dtype=torch.int32))
    packed[0].mul_(0.5)
    graph.replay()
    assert torch.equal(out, sinkattn.flash_attn_varlen_func(*packed, bounds, bounds, causal=True, s_aux=s_aux))
    assert not out[590:].any()


def test_more_than_2_31_elements() -> None:
    q = torch.randn(1, 40000, 64, 1024, device="cuda", dtype=torch.bfloat16)[..., :128]  # strides reach past 2^31
    k, v = torch.randn(2, 1, 40000, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = sinkattn.flash_attn_func(q, k, v, window_size=(127, 0))
    tail = sinkattn.flash_attn_func(q[:, -50:].contiguous(), k, v, window_size=(127, 0))
    assert torch.equal(out[:, -50:], tail)


def test_what_is_not_compiled_raises() -> None:
    q, k, v, s_aux = gpt_oss_like(1, 64)
    with pytest.raises(NotImplementedError, match="no fwd kernel serves fp32"):
        sinkattn.flash_attn_func(q.float(), k.float(), v.float())
    out = sinkattn.flash_attn_func(q.requires_grad_(), k, v, s_aux=s_aux)
    with pytest.raises(NotImplementedError, match="no bwd kernel"):
        out.sum().backward()


def test_gpt_oss_prefill() -> None:
    transformers = pytest.importorskip(
        "transformers", "5.5.3", reason="runs where transformers 5.5.3 or later is installed"
    )
    import sinkattn.hf

    sinkattn.hf.register()
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        max_position_embeddings=1024,
    )
    model = transformers.GptOssForCausalLM(config).cuda().eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    tokens = torch.randint(0, 256, (2, 400), device="cuda")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact = model(tokens).logits
        model.bfloat16()
        eager = (model(tokens).logits.float() - exact).abs().mean()
        model.set_attn_implementation("sinkattn")
        ours = (model(tokens).logits.float() - exact).abs().mean()
    assert ours <= 1.2 * eager
