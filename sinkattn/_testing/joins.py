# SPDX-License-Identifier: Apache-2.0
"""Random partials, joined by merge_attn_states and apply_sink: results and gradients against the formulas in fp64."""

import math
import random

import torch
from torch import Tensor

from .cases import DTYPES, EDGES
from .evaluation import Finding, _misplaced

Partial = tuple[Tensor, Tensor]


def _rows(x: Tensor) -> Tensor:
    """A statistic [.., heads, len] beside rows [.., len, heads, head_dim]."""
    return x.transpose(-1, -2)[..., None]


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The merged LSE, and the weights of both sides, exact where one of them rounds to 1."""
    same = torch.isinf(lse_a) & (lse_a == lse_b)
    x = torch.where(same, 0.0, lse_a - lse_b)
    weight_a, weight_b = (torch.exp(torch.nn.functional.logsigmoid(y)) for y in (x, -x))
    lse = torch.where(same, lse_a, torch.logaddexp(lse_a, lse_b))
    return lse, weight_a.masked_fill(lse_a == -math.inf, 0.0), weight_b.masked_fill(lse_b == -math.inf, 0.0)


def _finding(name: str, got: Tensor, ref: Tensor, terms: Tensor) -> Finding:
    """1e-5 of the absolute terms (fp64: 1e-12), and half a unit in the last place of the result's dtype."""
    if misplaced := _misplaced(name, got, ref):
        return misplaced
    fine = torch.isfinite(ref)
    if not fine.any():
        return Finding(name, 0.0, "nothing finite")
    info = torch.finfo(got.dtype)
    allowed = (1e-12 if got.dtype == torch.float64 else 1e-5) * terms.expand_as(ref)[fine]
    allowed = allowed + 0.51 * info.eps * ref[fine].abs() + max(1e-30, info.smallest_normal * info.eps)
    ratio = ((got.double()[fine] - ref[fine]).abs() / allowed).max().item()
    return Finding(name, ratio, f"error {ratio:.3g} of what is allowed")


def random_join(seed: str, device: str = "cpu") -> list[Finding]:
    """The join drawn from a seed: two partials merged, or one with a sink, both dense or packed, and all gradients."""
    import sinkattn

    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    dtype = DTYPES[rng.choice(("bf16", "fp16", "fp32", "fp32", "fp64"))]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    length, heads, dim = rng.choice((1, 7, 40, 200)), rng.choice((1, 2, 5)), rng.choice((8, 64, 72))
    batch = rng.choice(((), (1,), (3,)))
    spread = rng.choice((1.0, 5.0, 60.0))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def partial() -> Partial:
        lse = (spread * draw(*batch, heads, length)).to(wide)
        lse[draw(*lse.shape) > 1.5] = -math.inf
        out = draw(*batch, length, heads, dim).to(dtype)
        return out.masked_fill(_rows(lse) == -math.inf, 0.0), lse

    sink = rng.random() < 0.6
    out_a, lse_a = partial()
    dout, dlse = draw(*out_a.shape).to(dtype), draw(*lse_a.shape).to(wide)
    if sink:
        edges = torch.tensor([x for x in EDGES.values() if not math.isnan(x)] + [-20.0, -40.0])
        s_aux = torch.where(
            draw(heads) > 0, edges[torch.randint(len(edges), (heads,), generator=generator)], draw(heads)
        )
        s_aux = s_aux.to(rng.choice((torch.float32, torch.bfloat16, torch.float16, wide)))
        given: tuple[Tensor, ...] = (out_a, lse_a, s_aux)
        out_b, lse_b = torch.zeros_like(out_a), s_aux.to(wide)[:, None].expand_as(lse_a)
    else:
        out_b, lse_b = partial()
        given = (out_a, lse_a, out_b, lse_b)

    leaves = [x.detach().to(device).requires_grad_() for x in given]
    result = (sinkattn.apply_sink if sink else sinkattn.merge_attn_states)(*leaves)
    got = [*result, *torch.autograd.grad(result, leaves, (dout.to(device), dlse.to(device)))]

    a, la, b, lb, g, gl = (x.double() for x in (out_a, lse_a, out_b, lse_b, dout, dlse))
    lse, weight_a, weight_b = _weights(la, lb)
    dot_a, dot_b = ((g * x).sum(-1).transpose(-1, -2) for x in (a, b))
    size_a, size_b = ((g * x).abs().sum(-1).transpose(-1, -2) for x in (a, b))
    both = torch.where((weight_a == 0) | (weight_b == 0), 0.0, weight_a * weight_b)
    # Of two equal infinities each has half of the gradient, and none where both are -inf.
    tie = torch.isinf(la) & (la == lb)
    share_a, share_b = (torch.where(tie, 0.5, w) for w in (weight_a, weight_b))
    dla, dlb = both * (dot_a - dot_b) + gl * share_a, both * (dot_b - dot_a) + gl * share_b
    terms = both * (size_a + size_b)
    refs = [a * _rows(weight_a) + b * _rows(weight_b), lse, g * _rows(weight_a), dla]
    sizes = [a.abs() * _rows(weight_a) + b.abs() * _rows(weight_b), 1 + lse.abs(), g.abs() * _rows(weight_a)]
    sizes.append(terms + (gl * share_a).abs())
    names = ["out", "lse", "dout_a", "dlse_a"]
    if sink:
        over = [d for d in range(dlb.ndim) if d != dlb.ndim - 2]
        refs.append(dlb.sum(over))
        sizes.append((terms + (gl * share_b).abs()).sum(over))
        names.append("ds_aux")
    else:
        refs += [g * _rows(weight_b), dlb]
        sizes += [g.abs() * _rows(weight_b), terms + (gl * share_b).abs()]
        names += ["dout_b", "dlse_b"]
    kind = "sink" if sink else "merge"
    return [
        _finding(f"{kind} {name} of join {seed}", x.detach().cpu(), ref, size)
        for name, x, ref, size in zip(names, got, refs, sizes, strict=True)
    ]
