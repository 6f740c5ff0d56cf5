# SPDX-License-Identifier: Apache-2.0
"""A paged cache in two tiers of memory, against the same cache in one. On the CPU both are plain memory."""

import pytest
import torch
from arguments import decode_args
from torch import Tensor

import sinkattn
from sinkattn import reference

ops = torch.ops.sinkattn


def split_pages(t: dict[str, Tensor | None], near: int) -> dict[str, Tensor]:
    k, v = t["k"], t["v"]
    assert k is not None
    assert v is not None
    return {
        "k": k[:near].clone(),
        "v": v[:near].clone(),
        "k_cache_host": k[near:].clone(),
        "v_cache_host": v[near:].clone(),
    }


def make_cache(page_size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """q, k, v, s_aux, cache_seqlens, block_table of sequences of 96, 0 and 37 keys; pages in shuffled order."""
    generator = torch.Generator().manual_seed(page_size)
    count = 3 * 96 // page_size
    k, v = torch.randn(2, count, page_size, 2, 32, generator=generator).to(dtype)
    q, s_aux = torch.randn(3, 2, 8, 32, generator=generator).to(dtype), torch.randn(8, generator=generator)
    lens = torch.tensor([96, 0, 37], dtype=torch.int32)
    table = torch.randperm(count, generator=generator).int().view(3, -1)
    return {"q": q, "k": k, "v": v, "s_aux": s_aux, "cache_seqlens": lens, "block_table": table}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("options", [(-1, 0, 0, False), (20, 3, 2, False), (-1, 0, 0, True)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_tiers_are_one_cache(level: str, page_size: int, options: tuple[object, ...], share: float) -> None:
    t = make_cache(page_size)
    assert t["k"] is not None
    tiers = split_pages(t, int(share * t["k"].shape[0]))
    host = {name: tiers.pop(name) for name in ("k_cache_host", "v_cache_host")}
    want = ops.flash_decode(*t.values(), None, *options)
    for got, there in zip(ops.flash_decode(*(t | tiers).values(), None, *options, **host), want, strict=True):
        assert torch.equal(got, there)


@pytest.mark.parametrize("near", [0, 1, 2])
def test_pages_may_have_their_heads_first(near: int) -> None:
    t = make_cache(16)
    want = ops.flash_decode(*t.values(), None, -1, 0, 0, False)
    tiers = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in split_pages(t, near).items()}
    host = {name: tiers.pop(name) for name in ("k_cache_host", "v_cache_host")}
    got = ops.flash_decode(*(t | tiers).values(), None, -1, 0, 0, False, **host)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_reference_and_the_public_function_have_them() -> None:
    t = make_cache(16)
    tiers = split_pages(t, 7)
    options = {name: t[name] for name in ("s_aux", "cache_seqlens", "block_table")}
    options |= {name: tiers[name] for name in ("k_cache_host", "v_cache_host")}
    call = (t["q"], tiers["k"], tiers["v"])
    got = sinkattn.flash_attn_with_kvcache(*call, causal=True, return_lse=True, **options)
    want = reference.flash_attn_with_kvcache(*call, causal=True, return_lse=True, **options)
    whole = {name: options[name] for name in ("s_aux", "cache_seqlens", "block_table")}
    one = reference.flash_attn_with_kvcache(t["q"], t["k"], t["v"], causal=True, return_lse=True, **whole)
    for a, b, c in zip(got, want, one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(b, c)


def test_pages_outside_both_raise() -> None:
    t = make_cache(16)
    table, tiers = t["block_table"], split_pages(t, 7)
    assert table is not None
    host = {name: tiers.pop(name) for name in ("k_cache_host", "v_cache_host")}
    for page in (-1, 18, -(2**31), 2**31 - 1):
        table[2, 1] = page
        with pytest.raises(ValueError, match=rf"block_table\[2\]\[1\] is {page}; it must be a page from 0 to 17"):
            ops.flash_decode(*(t | tiers).values(), None, -1, 0, 0, False, **host)
    with pytest.raises(ValueError, match="it must be a page from 0 to 6"):
        ops.flash_decode(*(t | tiers).values(), None, -1, 0, 0, False)


def test_what_is_refused() -> None:
    t = make_cache(16)
    tiers = split_pages(t, 7)
    k, v = tiers.pop("k_cache_host"), tiers.pop("v_cache_host")
    call = (*(t | tiers).values(), None, -1, 0, 0, False)

    def refused(match: str, **host: Tensor) -> None:
        with pytest.raises(ValueError, match=match):
            ops.flash_decode(*call, **host)

    refused("k_cache_host and v_cache_host go together, only v_cache_host was given", v_cache_host=v)
    refused("k_cache_host has shape", k_cache_host=k[:, :8], v_cache_host=v)
    refused("k_cache_host is BFloat16, it must be Float", k_cache_host=k.bfloat16(), v_cache_host=v)
    refused("v_cache_host is on meta", k_cache_host=k, v_cache_host=v.to("meta"))
    refused("v_cache_host has 10 pages, k_cache_host has 11", k_cache_host=k, v_cache_host=v[1:])
    refused(
        "host.v has strides .* they must be the cache's", k_cache_host=k, v_cache_host=torch.cat([v, v], -1)[..., :32]
    )
    refused("k_cache_host must have contiguous", k_cache_host=k.mT.contiguous().mT, v_cache_host=v)
    with pytest.raises(ValueError, match="without block_table"):
        ops.flash_decode(*decode_args(), k_cache_host=k[:, :8, :, :8], v_cache_host=v[:, :8, :, :8])
