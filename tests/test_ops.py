# SPDX-License-Identifier: Apache-2.0
"""The torch surface: registration, derivatives, compilation, layouts, in-place variants. Refusals are a file apart."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import (
    DENSE_ARGS,
    FORWARDS,
    STRIDES,
    Arguments,
    Calls,
    append_args,
    backward_args,
    cache,
    decode_args,
    dense,
    narrow_decode_args,
    ops,
    out_args,
    packed,
    partials,
    put_at,
    slots_args,
    varlen_cache_args,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import sinkattn
from sinkattn import reference

OPCHECKS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    **{f"fwd-{name}": ("flash_attn_fwd", lambda make=make: make(True)) for name, make in FORWARDS.items()},
    **{
        f"bwd-{name}": ("flash_attn_bwd", lambda make=make: backward_args(make(False)))
        for name, make in FORWARDS.items()
    },
    "bwd-frozen": ("flash_attn_bwd", lambda: backward_args(FORWARDS["dense"](False), frozen=True)),
    "bwd-no-dlse": ("flash_attn_bwd", lambda: backward_args(FORWARDS["packed"](False), lse_used=False)),
    "decode": ("flash_decode", decode_args),
    "decode-paged": ("flash_decode", lambda: decode_args(paged=True)),
    "decode-narrow": ("flash_decode", narrow_decode_args),
    "decode-out": ("flash_decode_out", lambda: out_args(decode_args())),
    "decode-varlen": ("flash_decode_varlen", varlen_cache_args),
    "decode-varlen-raw": ("flash_decode_varlen_raw", lambda: put_at(varlen_cache_args(), 3, lambda _: None)),
    "append": ("append_kv", append_args),
    "append-slots": ("append_kv_slots", slots_args),
    "append-paged": ("append_kv", lambda: append_args(paged=True)),
    "merge": ("merge_attn_states", partials),
    "apply-sink": ("apply_sink", lambda: (*partials()[:2], torch.randn(4, dtype=torch.float64, requires_grad=True))),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str) -> None:
    op, make = OPCHECKS[name]
    results = torch.library.opcheck(getattr(ops, op).default, make())
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("name", OPCHECKS)
def test_fake_outputs_are_as_real_ones(name: str) -> None:
    op, make = OPCHECKS[name]
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in make()]
    real = getattr(ops, op)(*arguments)
    with FakeTensorMode() as mode:
        fake = getattr(ops, op)(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    real, fake = ((x,) if isinstance(x, Tensor) else x or () for x in (real, fake))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_the_page_of_operators_has_their_schemas() -> None:
    page = (Path(__file__).parent.parent / "docs" / "operators.md").read_text()
    shown = {
        " ".join(block.split()) for block in re.findall(r"^```text\n(\w+\(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    }
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("sinkattn::")}
    names.discard("sequence_bounds")  # of sinkattn.hf, where another test has imported it
    schemas = {name: str(getattr(ops, name).default._schema).partition("::")[2] for name in names}
    for name in ("flash_attn_fwd", "flash_decode", "flash_decode_varlen"):
        raw = schemas.pop(f"{name}_raw")
        assert raw == schemas[name].replace(name, f"{name}_raw", 1).removesuffix(")") + ", Tensor lse_raw)"
    assert shown == {*schemas.values()}


def test_what_is_optional_may_be_left_out() -> None:
    q, k, v, _ = dense()
    out, lse = ops.flash_attn_fwd(q, k, v)
    assert all(map(torch.equal, (out, lse), ops.flash_attn_fwd(q, k, v, *(None,) * 6, -1, -1, 0)))
    grads = ops.flash_attn_bwd(out, None, q, k, v, out, lse)
    assert all(map(torch.equal, grads, ops.flash_attn_bwd(out, None, q, k, v, out, lse, *(None,) * 6, -1, -1, 0)))
    q, k, v, *_ = cache()
    decoded = ops.flash_decode(q, k, v)
    assert all(map(torch.equal, decoded, ops.flash_decode(q, k, v, *(None,) * 4, -1, 0, 0, False)))


def test_outputs_are_contiguous_whatever_the_strides() -> None:
    q, k, v, s_aux = dense()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out, lse = ops.flash_attn_fwd(*strided, s_aux, *DENSE_ARGS)
    grads = ops.flash_attn_bwd(*backward_args((*strided, s_aux, *DENSE_ARGS)))
    assert all(x.is_contiguous() for x in (out, lse, *grads))


MASKS = {
    "full": (-1, -1, 0),
    "causal": (-1, 0, 0),
    "window": (2, 0, 0),
    "two-sided": (1, 1, 0),
    "sink-tokens": (1, 0, 2),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["dense", "packed", "packed-no-sink"])
def test_gradcheck(layout: str, mask: str) -> None:
    torch.set_num_threads(1)  # thousands of calls of microseconds
    if layout == "dense":
        q, k, v, s_aux, cu_q, cu_k = *dense(3, 5, torch.float64, grad=True), None, None
    else:
        q, k, v, s_aux, cu_q, cu_k = packed(torch.float64, grad=True)
    inputs = (q, k, v) if layout == "packed-no-sink" else (q, k, v, s_aux)

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        sinks = tensors[3] if len(tensors) == 4 else None
        out, lse = ops.flash_attn_fwd(*tensors[:3], sinks, cu_q, cu_k, None, None, 0.7, *MASKS[mask])
        return out, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_an_output_without_gradient_counts_as_zero(used: str) -> None:
    inputs = dense(dtype=torch.float64, grad=True)
    ours, theirs = (f(*inputs[:3], s_aux=inputs[3], causal=True, return_lse=True) for f in (
        sinkattn.flash_attn_func, reference.flash_attn_func))  # fmt: skip
    index = ("out", "lse").index(used)
    got = torch.autograd.grad(ours[index].square().sum(), inputs, allow_unused=True)
    want = torch.autograd.grad(theirs[index].square().sum(), inputs, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_sink_stays_out_of_the_backward(frozen: bool) -> None:
    *qkv, s_aux = dense(grad=True)
    s_aux.requires_grad_(not frozen)
    with Calls() as calls:
        out = sinkattn.flash_attn_func(*qkv, s_aux=s_aux)
        grads = torch.autograd.grad(out.sum(), qkv)
    (arguments,) = calls.seen["flash_attn_bwd"]
    assert (arguments[7] is None) == frozen
    want = torch.autograd.grad(reference.flash_attn_func(*qkv, s_aux=s_aux).sum(), qkv)
    torch.testing.assert_close(grads, want)


def test_a_frozen_sink_has_an_empty_gradient() -> None:
    *_, ds_aux = ops.flash_attn_bwd(*backward_args(FORWARDS["dense"](False), frozen=True))
    assert ds_aux.shape == (0,)
    assert ds_aux.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_s_aux_has_its_dtype(dtype: torch.dtype) -> None:
    q, k, v, s_aux = dense()
    s_aux = s_aux.to(dtype).requires_grad_()
    sinkattn.flash_attn_func(q, k, v, s_aux=s_aux).square().sum().backward()
    assert s_aux.grad is not None
    assert s_aux.grad.dtype == dtype
    assert s_aux.grad.abs().min() > 0


def test_double_backward_is_refused() -> None:
    inputs = dense(grad=True)
    out = sinkattn.flash_attn_func(*inputs[:3], s_aux=inputs[3])
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dq.sum().backward()


@pytest.mark.parametrize("position", range(4))
def test_forward_mode_is_refused(position: int) -> None:
    inputs = dense()
    with forward_ad.dual_level():
        inputs[position] = forward_ad.make_dual(inputs[position], torch.ones_like(inputs[position]))
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
            sinkattn.flash_attn_func(*inputs[:3], s_aux=inputs[3])


def test_decode_has_no_backward() -> None:
    q, k, v, s_aux, lens = cache()
    out = sinkattn.flash_attn_with_kvcache(q.requires_grad_(), k, v, cache_seqlens=lens, s_aux=s_aux, causal=True)
    with pytest.raises(NotImplementedError, match="flash_decode has no backward"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="flash_decode has no backward"):
        ops.flash_decode_out(*out_args((q, *decode_args()[1:])))


def test_no_graph_without_gradients() -> None:
    inputs = dense(grad=True)
    with torch.no_grad():
        assert sinkattn.flash_attn_func(*inputs[:3], s_aux=inputs[3]).grad_fn is None
    assert sinkattn.flash_attn_func(*dense()[:3]).grad_fn is None


def test_nothing_but_the_inputs_and_two_outputs_is_saved() -> None:
    *qkv, s_aux = dense(grad=True)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = sinkattn.flash_attn_func(*qkv, s_aux=s_aux, return_lse=True)
    assert sorted(x.data_ptr() for x in saved) == sorted(x.data_ptr() for x in (*qkv, out, lse, s_aux))
    got = torch.autograd.grad(out.sum(), (*qkv, s_aux))
    want = torch.autograd.grad(sinkattn.flash_attn_func(*qkv, s_aux=s_aux).sum(), (*qkv, s_aux))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"])
def test_what_is_changed_before_the_backward_is_noticed(name: str) -> None:
    q, k, v, s_aux, cu_q, cu_k = packed(grad=True)
    out, lse = sinkattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, s_aux=s_aux, return_lse=True)
    total = out.sum()
    named = {"q": q, "k": k, "v": v, "s_aux": s_aux, "out": out, "lse": lse, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    with torch.no_grad():
        named[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_checkpointing_gives_the_same_bits_in_two_calls(layout: str) -> None:
    *inputs, cu_q, cu_k = packed(grad=True) if layout == "packed" else (*dense(grad=True), None, None)

    def attend(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        out, _ = ops.flash_attn_fwd(q, k, v, s_aux, cu_q, cu_k, None, None, None, 3, 0, 0)
        return out

    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    with Calls() as calls:
        out = checkpoint(attend, *inputs, use_reentrant=False)
        got = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert {name: len(seen) for name, seen in calls.seen.items()} == {"flash_attn_fwd": 2, "flash_attn_bwd": 1}


def everything(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
    out, lse = sinkattn.flash_attn_func(q * 1.5, k, v, causal=True, window_size=(3, None), s_aux=s_aux, return_lse=True)
    raw_out, raw_lse = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, return_lse="raw")
    merged, merged_lse = sinkattn.merge_attn_states(out, lse, raw_out, raw_lse)
    return merged.square().sum() + merged_lse.sum()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compile_fullgraph_forward_and_backward(backend: str) -> None:
    torch.compiler.reset()
    inputs = dense(grad=True)
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    want = torch.autograd.grad(everything(*inputs), inputs)
    torch.testing.assert_close(got, want)


def test_compile_packed_with_dynamic_shapes_compiles_once() -> None:
    torch.compiler.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    def attend(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        out = sinkattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, s_aux=s_aux, causal=True)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for rows in (6, 5, 4):  # of which none is a head_dim: equal sizes would be guarded as one
        q, k, v, s_aux, cu_q, cu_k = packed()
        leaves = [x.clone().requires_grad_() for x in (q[:rows], k[: rows + 3], v[: rows + 3], s_aux)]
        lengths = (cu_q.clamp(max=rows), cu_k.clamp(max=rows))
        got, want = (torch.autograd.grad(f(*leaves, *lengths).square().sum(), leaves) for f in (compiled, attend))
        torch.testing.assert_close(got, want)
    assert graphs == 1


def test_compile_decode_with_appending() -> None:
    torch.compiler.reset()
    q, k, v, s_aux, lens = cache()
    new = torch.randn(2, 1, 2, 8)

    def step(k_cache: Tensor, v_cache: Tensor, lens: Tensor) -> Tensor:
        out = sinkattn.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=lens, causal=True, s_aux=s_aux
        )
        assert isinstance(out, Tensor)
        return out

    mine, theirs = (k.clone(), v.clone()), (k.clone(), v.clone())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*mine, lens - 2), step(*theirs, lens - 2))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("layout", STRIDES)
def test_any_strides_give_the_same_bits(layout: str) -> None:
    q, k, v, s_aux = dense()
    contiguous = (q, k, v, s_aux, *DENSE_ARGS)
    strided = (*(STRIDES[layout](x) for x in (q, k, v)), torch.stack([s_aux, s_aux], 1)[:, 0], *DENSE_ARGS)
    for op, make in ((ops.flash_attn_fwd, lambda x: x), (ops.flash_attn_bwd, backward_args)):
        assert all(torch.equal(a, b) for a, b in zip(op(*make(strided)), op(*make(contiguous)), strict=True))


INDEX_STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "every-other": lambda x: torch.stack([x, torch.full_like(x, 7)], -1).flatten(-2)[..., ::2],
    "transposed": lambda x: torch.stack([x, torch.full_like(x, 7)], -1)[..., 0],
    "wider-rows": lambda x: torch.cat([torch.full_like(x, 7), x, torch.full_like(x, 7)], -1)[
        ..., x.shape[-1] : 2 * x.shape[-1]
    ],
}


@pytest.mark.parametrize("layout", INDEX_STRIDES)
def test_lengths_and_tables_have_any_strides(layout: str) -> None:
    change = INDEX_STRIDES[layout]
    q, k, v, s_aux, *lens = packed()
    rest = (3, 4, None, 3, 0, 1)
    strided = [change(x) for x in lens]
    assert all(x.data_ptr() % 4 == 0 and torch.equal(x, y) for x, y in zip(strided, lens, strict=True))
    want, got = ((q, k, v, s_aux, *x, *rest) for x in (lens, strided))
    for op, make in ((ops.flash_attn_fwd, lambda x: x), (ops.flash_attn_bwd, backward_args)):
        assert all(torch.equal(a, b) for a, b in zip(op(*make(got)), op(*make(want)), strict=True))
    arguments = decode_args(paged=True)
    decoded = ops.flash_decode(*arguments[:4], change(arguments[4]), change(arguments[5]), *arguments[6:])
    assert all(map(torch.equal, decoded, ops.flash_decode(*arguments)))
    k_cache, v_cache, k, v, lens, table = append_args(paged=True)
    results = []
    for these in ((lens, table), (change(lens), change(table))):
        caches = k_cache.clone(), v_cache.clone()
        results.append((ops.append_kv(*caches, k, v, *these), *caches))
    assert all(map(torch.equal, *results))


def test_expanded_gradients_and_keys() -> None:
    q, k, v, s_aux = dense(grad=True)
    shared = (k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
    got, want = (
        torch.autograd.grad(f(q, *shared, s_aux=s_aux, causal=True).sum(), (q, k, v, s_aux))
        for f in (sinkattn.flash_attn_func, reference.flash_attn_func)
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_lse_dtype(dtype: torch.dtype) -> None:
    q, k, v, _ = dense(dtype=dtype)
    out, lse = sinkattn.flash_attn_func(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("other", [-math.inf, -1e4, 0.0, 1e4, math.inf])
@pytest.mark.parametrize("one", [-math.inf, 0.5, math.inf])
def test_merge_at_the_edges(one: float, other: float) -> None:
    """No NaN in values, and none in gradients where the merged LSE is finite or the output alone is used."""
    lse_a, lse_b = (torch.full((1, 2, 3), x, requires_grad=True) for x in (one, other))
    empty = [0.0 if x == -math.inf else y for x, y in ((one, 1.0), (other, 3.0))]
    out_a, out_b = (torch.full((1, 3, 2, 8), x, requires_grad=True) for x in empty)
    out, lse = sinkattn.merge_attn_states(out_a, lse_a, out_b, lse_b)
    weight = 0.5 if one == other else 1 / (1 + math.exp(min(max(other - one, -700), 700)))
    torch.testing.assert_close(out, torch.full_like(out, weight * empty[0] + (1 - weight) * empty[1]))
    torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))
    grads = torch.autograd.grad(out.sum() + lse.sum(), (out_a, lse_a, out_b, lse_b))
    assert all(torch.isfinite(x).all() for x in grads)
    sunk, sunk_lse = sinkattn.apply_sink(out_a, lse_a, torch.full((2,), other))
    torch.testing.assert_close(sunk, torch.full_like(sunk, weight * empty[0]))
    assert torch.equal(sunk_lse, lse)


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_merge_and_sink_gradcheck(layout: str) -> None:
    out_a, lse_a, out_b, lse_b = partials()
    s_aux = torch.randn(4, dtype=torch.float64, requires_grad=True)
    if layout == "packed":
        out_a, lse_a, out_b, lse_b = (x[0].detach().requires_grad_() for x in (out_a, lse_a, out_b, lse_b))
    finite = lse_a.isfinite() & lse_b.isfinite()
    lse_a, lse_b = (torch.where(finite, x, 0.25).detach().requires_grad_() for x in (lse_a, lse_b))

    def merged(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return sinkattn.apply_sink(*sinkattn.merge_attn_states(*tensors[:4]), tensors[4])

    assert torch.autograd.gradcheck(merged, (out_a, lse_a, out_b, lse_b, s_aux))
