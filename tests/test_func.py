# SPDX-License-Identifier: Apache-2.0
"""torch.func: gradients, one sample's gradients, vmap; what it cannot have is refused in our words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from arguments import DENSE_ARGS, cache, dense, narrow, ops, packed
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import sinkattn
from sinkattn import reference

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls once a sample

ALL = (0, 1, 2, 3)


def loss(module: Any, packing: bool = False, **options: Any) -> Callable[..., Tensor]:
    def computed(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, *offsets: Tensor) -> Tensor:
        attend = module.flash_attn_varlen_func if packing else module.flash_attn_func
        arguments = {"causal": True, "window_size": (3, 0), "num_sink_tokens": 1, "return_lse": True} | options
        out, lse = attend(q, k, v, *offsets, s_aux=s_aux, **arguments)
        return out.square().sum() + lse.nan_to_num(neginf=0.0).sin().sum()

    return computed


def assert_same(transform: Callable[[Callable[..., Tensor]], Any], *arguments: Tensor, **options: Any) -> None:
    got, want = (transform(loss(module, **options))(*arguments) for module in (sinkattn, reference))
    torch.testing.assert_close(got, want)


def samples(n: int = 3) -> list[Tensor]:
    """q, k, v of n samples, each of a batch of two; s_aux, one and n."""
    q, k, v, s_aux = dense(dtype=torch.float64)
    return [*(torch.stack([x * (i + 1) / n for i in range(n)]) for x in (q, k, v)), s_aux]


@pytest.mark.parametrize("make", [dense, narrow])
@pytest.mark.parametrize("lse", [True, "raw"])
def test_grad(lse: bool | str, make: Callable[..., list[Tensor]]) -> None:
    assert_same(lambda f: grad(f, ALL), *make(dtype=torch.float64), return_lse=lse)


@pytest.mark.parametrize("position", ALL)
def test_grad_of_one_argument(position: int) -> None:
    assert_same(lambda f: grad(f, position), *dense(dtype=torch.float64))


def test_grad_of_packed_rows() -> None:
    assert_same(lambda f: grad(f, ALL), *packed(torch.float64), packing=True)


def test_vjp_and_jacrev() -> None:
    inputs = dense(dtype=torch.float64)
    seed = torch.tensor(2.0, dtype=torch.float64)
    assert_same(lambda f: lambda *x: vjp(f, *x)[1](seed), *inputs)
    assert_same(lambda f: jacrev(f, ALL), *inputs)


def test_gradients_of_each_sample() -> None:
    q, k, v, s_aux = samples()
    transform = lambda f: vmap(grad(f, ALL), (0, 0, 0, None))  # noqa: E731
    got = transform(loss(sinkattn))(q, k, v, s_aux)
    alone = [grad(loss(reference), ALL)(*x, s_aux) for x in zip(q, k, v, strict=True)]
    torch.testing.assert_close(got, tuple(torch.stack(x) for x in zip(*alone, strict=True)))


def test_gradients_of_each_sink() -> None:
    inputs, many = dense(dtype=torch.float64)[:3], torch.randn(3, 4, dtype=torch.float64)
    got = vmap(grad(loss(sinkattn), 3), (None, None, None, 0))(*inputs, many)
    torch.testing.assert_close(got, torch.stack([grad(loss(reference), 3)(*inputs, s_aux) for s_aux in many]))


def test_vmap_and_its_gradient() -> None:
    q, k, v, s_aux = samples()
    each = lambda f: vmap(f, (0, 0, 0, None))  # noqa: E731
    want = torch.stack([loss(reference)(*x, s_aux) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(each(loss(sinkattn))(q, k, v, s_aux), want)
    got = grad(lambda *x: each(loss(sinkattn))(*x).sum(), ALL)(q, k, v, s_aux)
    total = lambda *x: sum(loss(reference)(*y, x[3]) for y in zip(*x[:3], strict=True))  # noqa: E731
    torch.testing.assert_close(got, grad(total, ALL)(q, k, v, s_aux))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, s_aux)]
    torch.testing.assert_close(torch.autograd.grad(each(loss(sinkattn))(*leaves).sum(), leaves), got)


@pytest.mark.parametrize("name", ["jvp", "jacfwd", "hessian", "grad of grad", "decode"])
def test_what_is_not_served_is_refused(name: str) -> None:
    q, k, v, s_aux = dense(dtype=torch.float64)
    f = loss(sinkattn)
    rows, k_cache, v_cache, _, lens = cache()
    decode = lambda q: sinkattn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, causal=True)  # noqa: E731
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "jvp": (lambda: jvp(lambda q: f(q, k, v, s_aux), (q,), (q,)), "forward-mode differentiation"),
        "jacfwd": (lambda: jacfwd(f)(q, k, v, s_aux), "forward-mode differentiation"),
        "hessian": (lambda: hessian(f)(q, k, v, s_aux), "forward-mode differentiation"),
        "grad of grad": (lambda: grad(lambda q: grad(f)(q, k, v, s_aux).sum())(q), "double backward is not supported"),
        "decode": (lambda: grad(lambda q: decode(q).sum())(rows), "flash_decode has no backward"),
    }
    call, message = calls[name]
    with pytest.raises(NotImplementedError, match=f"^sinkattn: {message}"):
        call()


def test_operators_are_refused() -> None:
    q, k, v, s_aux = dense(dtype=torch.float64)
    with pytest.raises(
        NotImplementedError, match=r"^sinkattn: a torch.func transform meets an operator; call flash_at"
    ):
        grad(lambda q: ops.flash_attn_fwd(q, k, v, s_aux, *DENSE_ARGS)[0].sum())(q)


def test_a_compiled_transform_leaves_the_call_to_eager() -> None:
    torch.compiler.reset()
    inputs = dense(dtype=torch.float64)
    compiled = torch.compile(grad(loss(sinkattn), ALL), backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), grad(loss(reference), ALL)(*inputs))
    with pytest.raises(RuntimeError, match=r"a torch.func transform meets an operator"):
        torch.compile(grad(loss(sinkattn)), backend="aot_eager", fullgraph=True)(*inputs)
