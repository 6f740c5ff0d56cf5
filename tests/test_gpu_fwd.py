# SPDX-License-Identifier: Apache-2.0
"""The forward on a CUDA device; a case that is compared with fp64 has its gradients compared too. SINKATTN_GPU_CASES is
the number of random ones, of which one in 32 has no s_aux, SINKATTN_GPU_REPEATS of repeats that must agree."""

import dataclasses

import pytest
import torch
from gpu_cases import RANDOM_CASES, assert_right_on_device, gpt_oss_like, gpu_case
from gpus import different_under_load, needs_gpus

import sinkattn
from sinkattn import _C
from sinkattn._testing import EDGES, Case

pytestmark = needs_gpus()

WIDTHS = [(64, 64), (128, 128), (192, 128), (256, 256)]  # of keys and values: the kernels for every mask on 9.0


@pytest.mark.parametrize("part", range(8))
def test_random_configurations_against_fp64(seed: int, part: int) -> None:
    for index in range(part, RANDOM_CASES, 8):
        assert_right_on_device(gpu_case(f"{seed}-{index}"))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_head_dim(head_dim: int, dtype: str) -> None:
    assert_right_on_device(Case.parse(f"d{head_dim}-causal-w128-g8-q300x2-k300x2-{dtype}-seed1"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_rows_without_keys(head_dim: int) -> None:
    """Their out is zero, whatever lies where it is put together."""
    q, k, v = (torch.randn(8, n, 16, head_dim, device="cuda", dtype=torch.bfloat16) for n in (600, 1, 1))
    for _ in range(20):
        out, lse = sinkattn.flash_attn_func(q, k, v, causal=True, return_lse=True)
        assert not out[:, :-1].any()
        assert (lse[:, :, :-1] == -torch.inf).all()
        assert torch.equal(out[:, -1:], v)


@pytest.mark.parametrize(("head_dim", "length"), [(128, 192), (128, 1000), (64, 384), (64, 700), (256, 700)])
@pytest.mark.parametrize("left", [30, 48, 192, 200, 384])
@pytest.mark.parametrize("num_sink_tokens", [3, 140])
def test_sink_tokens_that_only_later_rows_of_a_tile_need(
    head_dim: int, length: int, left: int, num_sink_tokens: int
) -> None:
    """The first rows of the tile see the first keys through their window."""
    mask = f"causal-w{left + 1}-sink{num_sink_tokens}"
    assert_right_on_device(Case.parse(f"d{head_dim}-{mask}-varlen-q{length}.1-k{length}.333-bf16-seed1"))


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_s_aux(edge: str) -> None:
    case = Case.parse("d64-causal-w64-g8-varlen-q200.1-k200.0-bf16-seed1")
    assert_right_on_device(dataclasses.replace(case, s_aux=edge))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (5, 5), (65, 13), (96, 8), (128, 2)])
def test_head_counts(num_q_heads: int, num_kv_heads: int) -> None:
    ratio = num_q_heads // num_kv_heads
    assert_right_on_device(Case.parse(f"d64-causal-w101-g{ratio}-h{num_kv_heads}-q70-k130-bf16-seed1"))


@pytest.mark.parametrize("ratio", [2, 4, 6, 7, 8, 16, 32, 64])
@pytest.mark.parametrize(("left", "right"), [(127, 0), (0, 0), (40, 30), (0, 79)])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_windows_of_one_key_tile(ratio: int, left: int, right: int, layout: str) -> None:
    lens = "q290x2-k350x2" if layout == "dense" else "varlen-q290.0.7.101-k290.5.200.100"
    assert_right_on_device(Case.parse(f"d64-r{right}-w{left + 1}-g{ratio}-{lens}-bf16-seed{ratio}"))


@pytest.mark.parametrize("ratio", [1, 5, 7, 96])
@pytest.mark.parametrize(("left", "right"), [(-1, 0), (299, 0), (-1, -1), (150, 80)])
@pytest.mark.parametrize("widths", WIDTHS)
def test_wide_windows(widths: tuple[int, int], left: int, right: int, ratio: int) -> None:
    head_dim, values = widths[0], f"-v{widths[1]}" * (widths[1] < widths[0])
    case = Case.parse(f"d{head_dim}{values}-g{ratio}-q400x2-k530x2-expanded-bf16-seed{ratio}")
    assert_right_on_device(dataclasses.replace(case, left=left, right=right))


def test_a_lowered_arch_plans_the_older_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SINKATTN_CUDA_ARCH", raising=False)
    own = _C.query_cuda(0)["arch"]
    monkeypatch.setenv("SINKATTN_CUDA_ARCH", "80")
    device = _C.query_cuda(0)
    assert device["arch"] == 80
    sizes = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "q_len": 512, "k_len": 512}
    assert sinkattn.plan("fwd", device, dtype="bf16", batch=1, **sizes)["variant"] == "sa_fwd_cuda_sm80_d64"
    for wrong in ("79", str(own + 1), "sm80", ""):
        monkeypatch.setenv("SINKATTN_CUDA_ARCH", wrong)
        with pytest.raises(ValueError, match=f"SINKATTN_CUDA_ARCH is {wrong}; it must be from 80 to"):
            _C.query_cuda(0)


def test_what_is_not_compiled_raises() -> None:
    q, k, v, _ = (x.float() for x in gpt_oss_like(1, 64))
    with pytest.raises(NotImplementedError, match="no fwd kernel serves fp32"):
        sinkattn.flash_attn_func(q, k, v)
    lse = q[..., 0].transpose(1, 2).contiguous()
    with pytest.raises(NotImplementedError, match="no bwd kernel serves fp32"):
        torch.ops.sinkattn.flash_attn_bwd(q, None, q, k, v, q, lse, None, None, None, None, None, None, -1, 0, 0)


@pytest.mark.parametrize("window", [(-1, 0), (127, 0), (100, 30), (250, 0)])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("sharp", [1.0, 12.0])
def test_bits_of_a_row_are_its_own(window: tuple[int, int], widths: tuple[int, int], sharp: float) -> None:
    """A row alone, in a chunked prefill, in a batch and packed; sharp rows outgrow the maximum of their first keys."""
    q, k, v, s_aux = gpt_oss_like(3, 700, widths[0])
    v = v[..., : widths[1]]
    q *= sharp
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


@pytest.mark.parametrize("slope", [60.0, 300.0, -60.0])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_grow_or_fall_with_the_key(slope: float, widths: tuple[int, int], dtype: torch.dtype) -> None:
    """By far more than fp32's range: each row's weights outgrow any pivot it had."""
    head_dim, head_dim_v = widths
    q, k, v, s_aux = gpt_oss_like(1, 500, head_dim)
    v = v[..., :head_dim_v]
    q[..., 0] = 4
    k[..., 0] = torch.linspace(0, slope * head_dim**0.5, 500, device="cuda")[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, lse = sinkattn.flash_attn_func(q, k, v, window_size=(-1, 0), s_aux=s_aux, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(8, 2)) * head_dim**-0.5
    scores.masked_fill_(torch.ones(500, 500, dtype=torch.bool, device="cuda").triu(1), float("-inf"))
    weights = torch.cat([scores, s_aux.double()[None, :, None, None].expand(1, -1, 500, 1)], -1)
    want = torch.einsum("bhij,bjhd->bihd", weights.softmax(-1)[..., :-1], v.double().repeat_interleave(8, 2))
    assert (out.double() - want).square().mean().sqrt() < 4e-3 * want.square().mean().sqrt()
    torch.testing.assert_close(lse.double(), weights.logsumexp(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("group", "k_len", "count", "length"), [(16, 12, 33, 120), (8, 8, 64, 1000), (8, 40, 200, 4000)]
)
@pytest.mark.parametrize("unseen", [0.0, float("nan")])
def test_sequences_without_queries(group: int, k_len: int, count: int, length: int, unseen: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(length, 8 * group, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, count * k_len + length, 8, 64, device="cuda", dtype=torch.bfloat16)
    k[: count * k_len] += unseen
    v[: count * k_len] += unseen
    s_aux = torch.randn(8 * group, device="cuda")
    cu_q = torch.tensor([0] * (count + 1) + [length], device="cuda", dtype=torch.int32)
    cu_k = torch.tensor(
        [*range(0, (count + 1) * k_len, k_len), count * k_len + length], device="cuda", dtype=torch.int32
    )
    options = {"window_size": (127, 0), "s_aux": s_aux, "return_lse": True}
    want, want_lse = sinkattn.flash_attn_func(*(x[None, -length:] for x in (q, k, v)), **options)
    for _ in range(20):
        out, lse = sinkattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, **options)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want_lse[0])


@pytest.mark.parametrize("slope", [0.0, 60.0, -60.0])
@pytest.mark.parametrize("sink", [None, 0.0, 30.0, 80.0, -30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_a_window_far_from_the_sink(slope: float, sink: float | None, dtype: torch.dtype) -> None:
    """Above it and below it, some rows of a tile and all of them: what makes a sink a poor pivot."""
    q, k, v, s_aux = gpt_oss_like(1, 500, 64)
    q[:, ::3, :, 0] = 4
    k[..., 0] = torch.linspace(0, slope * 8, 500, device="cuda")[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    s_aux = None if sink is None else s_aux + sink
    out, lse = sinkattn.flash_attn_func(q, k, v, window_size=(127, 0), s_aux=s_aux, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(8, 2)) / 8
    near = torch.ones(500, 500, dtype=torch.bool, device="cuda").tril().triu(-127)
    scores.masked_fill_(~near, float("-inf"))
    logits = torch.full((16,), float("-inf"), device="cuda") if s_aux is None else s_aux
    weights = torch.cat([scores, logits.double()[None, :, None, None].expand(1, -1, 500, 1)], -1)
    want = torch.einsum("bhij,bjhd->bihd", weights.softmax(-1)[..., :-1], v.double().repeat_interleave(8, 2))
    assert (out.double() - want).square().mean().sqrt() < 4e-3 * want.square().mean().sqrt() + 1e-6
    torch.testing.assert_close(lse.double(), weights.logsumexp(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("head_dim", "window"), [(64, (-1, 0)), (64, (127, 0)), (128, (-1, 0)), (256, (-1, 0))])
def test_repeats_are_bitwise_equal_under_load(head_dim: int, window: tuple[int, int]) -> None:
    q, k, v, s_aux = gpt_oss_like(1, 1000, head_dim)
    options = {"window_size": window, "s_aux": s_aux, "return_lse": True}
    assert different_under_load(lambda: sinkattn.flash_attn_func(q, k, v, **options)) == 0


@pytest.mark.parametrize("window", [64, 200])
@pytest.mark.parametrize("widths", WIDTHS)
def test_unseen_nan_has_no_effect_and_a_seen_one_stays_in_its_rows(widths: tuple[int, int], window: int) -> None:
    q, k, v, s_aux = gpt_oss_like(1, 600, widths[0])
    v = v[..., : widths[1]]
    options = {"window_size": (window - 1, 0), "s_aux": s_aux}
    clean = sinkattn.flash_attn_func(q, k, v, **options)
    poisoned_k, poisoned_v = k.clone(), v.clone()
    poisoned_k[:, 200], poisoned_v[:, 210] = torch.nan, torch.inf
    got = sinkattn.flash_attn_func(q, poisoned_k, poisoned_v, **options)
    end = 210 + window
    assert not torch.isfinite(got[:, 200:end]).any()
    assert torch.equal(got[:, :200], clean[:, :200])
    assert torch.equal(got[:, end:], clean[:, end:])
    late = sinkattn.flash_attn_func(q[:, end:], poisoned_k, poisoned_v, **options)
    assert torch.equal(late, clean[:, end:])
