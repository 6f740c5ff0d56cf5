# SPDX-License-Identifier: Apache-2.0
"""test_raw_lse.py on a CUDA device, for every kernel. SINKATTN_GPU_CASES is the number of random cases and of joins."""

import dataclasses

import pytest
import torch
from gpu_cases import RANDOM_CASES, assert_right_on_device, gpu_case
from gpus import needs_gpus

import sinkattn
from sinkattn._testing import DTYPES, Case, make_inputs, random_join

pytestmark = needs_gpus()


@pytest.mark.parametrize("part", range(8))
def test_random_cases(seed: int, part: int) -> None:
    for index in range(part, RANDOM_CASES, 8):
        assert_right_on_device(dataclasses.replace(gpu_case(f"{seed}-raw-{index}"), raw=True))


@pytest.mark.parametrize("part", range(4))
def test_random_joins(seed: int, part: int) -> None:
    joins = (random_join(f"{seed}/{index}", "cuda") for index in range(part, RANDOM_CASES, 4))
    failures = [f for found in joins for f in found if not f.ratio <= 1]
    assert not failures, failures[:10]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, 0), (127, 0)])
def test_out_and_raw_lse_have_one_bit_pattern(window: tuple[int, int], head_dim: int, dtype: str) -> None:
    t = make_inputs(Case(head_dim=head_dim, ratio=8, q_lens=(300, 300), k_lens=(300, 300), s_aux="mix", dtype=dtype))
    q, k, v, s_aux = (x.detach().cuda() for x in (t.q, t.k, t.v, t.s_aux))
    out, raw = sinkattn.flash_attn_func(q, k, v, window_size=window, s_aux=s_aux, return_lse="raw")
    assert torch.equal(raw, sinkattn.flash_attn_func(q, k, v, window_size=window, return_lse=True)[1])
    want = sinkattn.flash_attn_func(q, k, v, window_size=window, s_aux=s_aux)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("num_splits", [0, 1, 5, -5])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("keys", [0, 3, 900, 5000])
def test_decode(keys: int, head_dim: int, num_splits: int, invariant: bool) -> None:
    if invariant and (num_splits or head_dim > 256):
        num_splits, head_dim = 0, 256
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(2, n, heads, head_dim, generator=generator).to(DTYPES["bf16"]).cuda()
        for n, heads in ((1, 16), (5000, 2), (5000, 2))
    )
    s_aux = torch.tensor([-1e4, -3.0, 0.0, 3.0, 20.0, 100.0, 1e4, 5.0] * 2).cuda()
    options = {"cache_seqlens": torch.tensor([keys, keys // 2], dtype=torch.int32).cuda()}
    options |= {"num_splits": num_splits, "invariant": invariant}
    out, raw = sinkattn.flash_attn_with_kvcache(q, k, v, s_aux=s_aux, return_lse="raw", **options)
    assert torch.equal(raw, sinkattn.flash_attn_with_kvcache(q, k, v, return_lse=True, **options)[1])
    want, lse = sinkattn.flash_attn_with_kvcache(q, k, v, s_aux=s_aux, return_lse=True, **options)
    assert torch.equal(out, want)
    joined = torch.logaddexp(raw.double(), s_aux.double()[None, :, None].expand_as(raw))
    torch.testing.assert_close(lse.double(), joined, rtol=1e-6, atol=2e-6)
