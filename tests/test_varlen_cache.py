# SPDX-License-Identifier: Apache-2.0
"""Packed rows over a cache: mixed batches, as engines call them, against the reference and each sequence alone."""

from typing import Any

import pytest
import torch
from arguments import Calls, ops, varlen_cache_args
from torch import Tensor
from varlen_cases import Batch, assert_same

import sinkattn
from sinkattn import reference


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("block", range(10))
def test_random_mixed_batches(block: int, seed: int) -> None:
    """200 batches: each row has the bits of its sequence alone, in pages of any size, and those of a plain cache."""
    for index in range(20 * block, 20 * block + 20):
        name = f"{seed}/{index}"
        batch = Batch(name)
        want = batch.alone()
        size, layout = batch.random.choice((1, 1, 3, 16, 64)), batch.random.choice(("apart", "vllm", "beside"))
        got = batch.run(*batch.paged(size, layout))
        assert_same(got, want, (name, size, layout))
        assert_same(batch.run(*batch.contiguous()), want, name)


def test_random_mixed_batches_against_the_reference(seed: int) -> None:
    for index in range(40):
        batch = Batch(f"{seed}/{index}/reference", torch.float32)
        cache = batch.contiguous() if index % 4 == 0 else batch.paged(batch.random.choice((1, 3, 16)))
        got, want = (batch.run(*cache, functions=functions) for functions in (sinkattn, reference))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, msg=f"{seed}/{index}")


def test_each_level(level: str, seed: int) -> None:
    for index in range(6):
        batch = Batch(f"{seed}/{index}/{level}")
        assert_same(batch.run(*batch.paged(16, "vllm")), batch.alone(), (seed, index))


def test_fp64(seed: int) -> None:
    batch = Batch(f"{seed}/fp64", torch.float64)
    got, want = (batch.run(*batch.paged(3), functions=functions) for functions in (sinkattn, reference))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got[1].dtype == torch.float64


@pytest.mark.usefixtures("threads")
def test_threads_leave_no_trace(seed: int) -> None:
    batch = Batch(f"{seed}/threads")
    cache, results = batch.paged(16), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(batch.run(*cache))
    assert_same(results[0], results[1], seed)
    assert_same(results[0], results[2], seed)


def test_a_sequence_in_steps_is_one_prefill() -> None:
    """A prompt in chunks, then single and speculative rows, beside a neighbour that decodes: the bits of one call."""
    torch.manual_seed(0)
    length, dim = 90, 64
    q, k, v = (torch.randn(length, heads, dim, dtype=torch.bfloat16) for heads in (8, 2, 2))
    options = {"causal": True, "window_size": (40, 0), "num_sink_tokens": 3, "s_aux": torch.randn(8)}
    whole = sinkattn.flash_attn_func(q[None], k[None], v[None], **options)[0]
    k_pages, v_pages = torch.zeros(2, 20, 16, 2, dim, dtype=torch.bfloat16)
    table = torch.arange(20, dtype=torch.int32).flip(0).view(2, 10)
    slots = table[0, torch.arange(length) // 16].long() * 16 + torch.arange(length) % 16
    done = 0
    for rows in (33, 20, 1, 1, 4, 30, 1):
        new = slice(done, done := done + rows)
        k_pages.flatten(0, 1)[slots[new]], v_pages.flatten(0, 1)[slots[new]] = k[new], v[new]
        out = sinkattn.flash_attn_varlen_func(
            torch.cat([q[:1], q[new]]), k_pages, v_pages, int32(0, 1, 1 + rows),
            seqused_k=int32(7, done), block_table=table.flip(0), max_seqlen_q=rows, **options,
        )  # fmt: skip
        assert torch.equal(out[1:], whole[new])
    assert done == length


def test_the_call_of_an_engine() -> None:
    """The keywords of vLLM's backend, in its layout; a table that is a slice of a larger one."""
    batch = Batch("engine")
    batch.options |= {"return_lse": True}
    k, v, table = batch.paged(16, "vllm")
    assert not k.is_contiguous()
    wide = torch.full((len(table) + 2, table.shape[1] + 9), -1, dtype=torch.int32)
    wide[: len(table), : table.shape[1]] = table
    with Calls() as calls:
        out = sinkattn.flash_attn_varlen_func(
            q=batch.q, k=k, v=v, cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=70, seqused_k=batch.seqused,
            max_seqlen_k=160, softmax_scale=batch.options["softmax_scale"], alibi_slopes=None,
            window_size=list(batch.options["window_size"]), block_table=wide[: len(table), : table.shape[1]],
            softcap=0.0, s_aux=batch.options["s_aux"], num_sink_tokens=batch.options["num_sink_tokens"],
        )  # fmt: skip
    (seen,) = calls.seen["flash_decode_varlen"]
    assert seen[1].data_ptr() == k.data_ptr()  # read where it lies
    assert torch.equal(out, batch.alone()[0])


@pytest.mark.parametrize("paged", [False, True])
def test_nothing_at_all(paged: bool) -> None:
    table = torch.zeros(0, 3, dtype=torch.int32) if paged else None
    cu, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    q, cache = torch.randn(4, 2, 8), torch.zeros(0, 16, 1, 8)
    out, lse = sinkattn.flash_attn_varlen_func(
        q, cache, cache, cu, seqused_k=none, block_table=table, s_aux=torch.zeros(2), return_lse=True
    )
    assert not out.any()
    assert torch.equal(lse, torch.full((2, 4), -torch.inf))
    empty = sinkattn.flash_attn_varlen_func(q[:0], cache, cache, cu, seqused_k=none, block_table=table)
    assert empty.shape == (0, 2, 8)


def test_a_compiled_call_is_one_graph() -> None:
    compiled = torch.compile(sinkattn.flash_attn_varlen_func, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in ("one", "two", "three"):
        batch = Batch(f"compiled/{seed}", torch.float32)
        k, v, table = batch.paged(4)
        options = {"seqused_k": batch.seqused, "block_table": table, **batch.options}
        assert_same(compiled(batch.q, k, v, batch.cu_seqlens, **options), batch.alone(), seed)


def call(**changes: Any) -> Any:
    names = ("q", "k", "v", "s_aux", "cu_seqlens_q", "seqused_k", "block_table")
    return sinkattn.flash_attn_varlen_func(**dict(zip(names, varlen_cache_args(), strict=False)) | changes)


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux"])
@pytest.mark.parametrize("return_lse", [False, "raw"])
def test_gradients_are_refused(name: str, return_lse: Any) -> None:
    arguments = dict(zip(("q", "k", "v", "s_aux"), varlen_cache_args(), strict=False))
    asks = arguments[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="packed rows over a cache have no backward"):
        call(**{name: asks}, return_lse=return_lse)
    with torch.no_grad():
        call(**{name: asks}, return_lse=return_lse)


def test_transforms_are_refused() -> None:
    q, *rest = varlen_cache_args()
    with pytest.raises(NotImplementedError, match=r"torch\.func transform meets an operator"):
        torch.func.grad(lambda x: ops.flash_decode_varlen(x, *rest)[0].sum())(q)
    k, v, _, cu, seqused, table = rest[:6]
    with pytest.raises(NotImplementedError, match="flash_decode_varlen has no backward"):
        torch.func.grad(
            lambda x: sinkattn.flash_attn_varlen_func(x, k, v, cu, seqused_k=seqused, block_table=table).sum()
        )(q)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no lengths": (
        {"seqused_k": None},
        r"block_table is given without seqused_k; it must be int32 \[batch\] keys in use",
    ),
    "flash-attention 2's lengths": (
        {"seqused_k": None, "cu_seqlens_k": int32(0, 0, 0, 0)},
        r"block_table is given without seqused_k; it must be cu_seqlens_k.diff\(\), and cu_seqlens_k=None",
    ),
    "both lengths": ({"cu_seqlens_k": int32(0, 0, 0, 0)}, "cu_seqlens_k and seqused_k are both given"),
    "no keys": ({"seqused_k": None, "block_table": None}, "cu_seqlens_k is None; .* or give seqused_k to read a cache"),
    "packed keys": ({"k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8)}, "k has 3 dimensions, it must be"),
    "dense rows": ({"q": torch.zeros(2, 3, 4, 8)}, r"q has 4 dimensions, it must be \[total"),
    "batch": ({"seqused_k": int32(0, 0)}, r"seqused_k has shape \[2\], cu_seqlens_q has shape \[4\]; they"),
    "dtype": ({"seqused_k": torch.zeros(3, dtype=torch.int64)}, r"seqused_k is Long, it must be Int \(torch.int32\)"),
    "table": ({"block_table": int32([0, 0], [0, 0])}, r"block_table has shape \[2, 2\], it must be \[3, 2\]"),
    "cache rows": ({"block_table": None}, "k has batch 4, cu_seqlens_q has 3; with pages give a block_table"),
    "other sizes": ({"v": torch.zeros(4, 4, 1, 8)}, "k has shape .*, v has shape"),
    "head_dim": ({"q": torch.zeros(6, 4, 16)}, "k has head_dim 8, q has 16"),
    "device": ({"seqused_k": int32(0, 0, 0).to("meta")}, "seqused_k is on meta, q is on cpu"),
    "first offset": ({"cu_seqlens_q": int32(1, 3, 3, 5)}, r"cu_seqlens_q\[0\] is 1; it must be 0"),
    "offsets fall": ({"cu_seqlens_q": int32(0, 4, 3, 5)}, r"cu_seqlens_q\[2\] is 3; it must be at"),
    "offsets end": ({"cu_seqlens_q": int32(0, 3, 3, 7)}, r"cu_seqlens_q\[3\] is 7; it must be at"),
    "too many keys": (
        {"seqused_k": int32(4, 9, 2)},
        r"cache_seqlens\[1\] \(seqused_k\) is 9; it must be from 0 to 8, the capacity",
    ),
    "negative keys": ({"seqused_k": int32(4, -1, 2)}, r"\(seqused_k\) is -1; it must be from 0"),
    "page": (
        {"block_table": int32([4, 0], [0, 0], [0, 0])},
        r"block_table\[0\]\[0\] is 4; it must be a page from 0 to 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_and_hostile_lengths_are_refused(name: str) -> None:
    call()
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_pages_that_no_row_sees_may_be_unmapped() -> None:
    table = int32([3, -1], [7, 7], [-5, 2])  # sequence 1 has no rows, sequence 2 a window
    call(block_table=table, seqused_k=int32(4, 8, 8), window_size=(1, 0))
    with pytest.raises(ValueError, match=r"block_table\[2\]\[0\] is -5"):
        call(block_table=table, seqused_k=int32(4, 8, 8), window_size=(3, 0))


SIZES: dict[str, Any] = {
    "dtype": "bf16", "batch": 3, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "q_len": 40, "k_len": 64,
    "packed": True, "page_size": 16, "num_pages": 9, "window_size_right": 0,
}  # fmt: skip


def test_a_plan_has_no_splits() -> None:
    assert sinkattn.plan("decode", **SIZES)["num_splits"] == 1


def test_a_gpu_has_a_largest_head_dim() -> None:
    gpu = {"backend": "cuda", "arch": 90, "workers": 132}
    with pytest.raises(NotImplementedError, match="have head_dim 512; on CUDA it must be at most 256, or sequences"):
        sinkattn.plan("decode", gpu, **SIZES | {"head_dim": 512})


def test_operators_and_functions_agree() -> None:
    arguments = varlen_cache_args()
    out, lse, lse_raw = ops.flash_decode_varlen_raw(*arguments)
    assert_same((out, lse), ops.flash_decode_varlen(*arguments), "raw")
    assert torch.equal(call(return_lse="raw", **OPTIONS)[1], lse_raw)
    assert torch.equal(call(return_lse=True, **OPTIONS)[1], lse)
    assert not torch.equal(lse, lse_raw)


OPTIONS: dict[str, Any] = {"softmax_scale": 0.4, "window_size": (3, 0), "num_sink_tokens": 1}
