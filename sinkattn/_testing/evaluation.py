# SPDX-License-Identifier: Apache-2.0
"""A case's inputs, an explicit fp64 evaluation with its backward, and the tolerance that results are held to."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sinkattn import reference

from .cases import DTYPES, EDGES, UNBOUNDED, Case


@dataclass
class Inputs:
    """A case's tensors: as the ops get them, and padded to [batch, longest, ..] for the evaluation."""

    q: Tensor
    k: Tensor
    v: Tensor
    s_aux: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    cache_seqlens: Tensor | None
    block_table: Tensor | None
    # q, k, v, dout [batch, longest, heads, head_dim], v and dout head_dim_v, dlse [batch, num_q_heads, longest]
    padded: dict[str, Tensor]
    seen: Tensor  # bool [batch, longest q, longest k]
    q_valid: Tensor  # bool [batch, longest q]
    k_valid: Tensor  # bool [batch, longest k]


def restride(x: Tensor, strides: str) -> Tensor:
    """The values of x [.., rows, heads, head_dim] in another memory layout, with NaN in what lies between."""
    if strides == "transposed":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if strides == "sliced":
        wide = x.new_full((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 16), math.nan)
        inner = wide[..., 1 : 1 + x.shape[-2], 8 : 8 + x.shape[-1]]
        return inner.copy_(x)
    if strides == "offset":
        return x.new_full((x.numel() + 1,), math.nan)[1:].view(x.shape).copy_(x)
    if strides == "lastdim":
        return x.mT.contiguous().mT
    if strides == "expanded":
        return x[..., :1, :].clone().expand_as(x)
    return x.contiguous()


def _pack(x: Tensor, valid: Tensor, tail: int, fill: float) -> Tensor:
    return torch.cat([x[valid], x.new_full((tail, *x.shape[2:]), fill)])


def _pages(case: Case, x: Tensor, table: Tensor, num_pages: int) -> Tensor:
    """Padded keys [batch, longest, heads, head_dim] in their pages; every slot not in use is NaN."""
    pages = x.new_full((num_pages, case.page_size, *x.shape[2:]), math.nan)
    for b, k_len in enumerate(case.k_lens):
        at = torch.arange(k_len)
        pages[table[b, at // case.page_size].long(), at % case.page_size] = x[b, :k_len]
    return pages


def make_inputs(case: Case) -> Inputs:
    """The tensors of a case; the same ones at every call."""
    dtype, batch, heads = DTYPES[case.dtype], len(case.q_lens), case.num_q_heads
    longest_q, longest_k = max(case.q_lens), max(case.k_lens)
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q_lens, k_lens = torch.tensor(case.q_lens), torch.tensor(case.k_lens)
    q_valid, k_valid = torch.arange(longest_q) < q_lens[:, None], torch.arange(longest_k) < k_lens[:, None]
    q = draw(batch, longest_q, heads, case.head_dim).to(dtype)
    k, v = draw(2, batch, longest_k, case.kv_heads, case.head_dim).to(dtype).unbind()
    dout = draw(batch, longest_q, heads, case.head_dim).to(dtype)
    if case.latent:
        v = k.clone()
    if case.head_dim_v:
        v, dout = v[..., : case.head_dim_v], dout[..., : case.head_dim_v]
    dlse = draw(batch, heads, longest_q).to(torch.float64 if case.dtype == "fp64" else torch.float32)
    if case.strides == "expanded":
        k, v = (x[:, :, :1].expand_as(x).clone() for x in (k, v))
    seen = reference.visible(q_lens, k_lens, longest_q, longest_k, case.left, case.right, case.num_sink_tokens)

    s_aux = None
    if case.s_aux != "none":
        s_aux = 2.0 + 3.0 * draw(heads)
        if case.s_aux == "mix":
            edges = torch.tensor([*EDGES.values(), 1.0])
            s_aux = torch.where(draw(heads) > 0, edges[torch.randint(len(edges), (heads,), generator=generator)], s_aux)
        elif case.s_aux != "rand":
            s_aux = torch.full((heads,), EDGES[case.s_aux])
        s_aux = s_aux.to(DTYPES[case.s_dtype]).requires_grad_(not case.frozen)

    table = None
    if case.layout == "paged":
        counts = [-(-n // case.page_size) for n in case.k_lens]
        num_pages = sum(counts) + 2
        order = torch.split(torch.randperm(num_pages, generator=generator).int(), [*counts, 2])
        # Entries past a sequence's last page are never read: they hold numbers that would be out of range.
        table = torch.full((batch, max(counts) + 1), UNBOUNDED, dtype=torch.int32)
        for b, n in enumerate(counts):
            table[b, :n] = order[b]
        if case.shared:
            both = min(case.k_lens[0], case.k_lens[1]) // case.page_size
            table[1, :both] = table[0, :both]
            for x in (k, v):
                x[1, : both * case.page_size] = x[0, : both * case.page_size]
    if case.dout == "sum":
        dout = torch.ones_like(dout)
    padded = {"q": q, "k": k, "v": v, "dout": dout}
    if case.dlse and not case.decode:
        padded["dlse"] = dlse.masked_fill(~q_valid[:, None], 0.0)
    if case.poison and not case.shared:
        unseen = ~seen.any(1)[:, :, None, None]
        padded |= {"k": k.masked_fill(unseen, 0.0), "v": v.masked_fill(unseen, 0.0)}
        k, v = (x.masked_fill(unseen, math.nan) for x in (k, v))

    cu_q = cu_k = cache_seqlens = None
    out_grad: Tensor | None = padded.get("dlse")
    if case.layout == "varlen":
        cu_q, cu_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (q_lens, k_lens))
        q, dout = (_pack(x, q_valid, case.tail, math.nan) for x in (q, dout))
        k, v = (_pack(x, k_valid, case.tail, math.nan) for x in (k, v))
        if out_grad is not None:
            out_grad = _pack(out_grad.transpose(1, 2), q_valid, case.tail, math.nan).T.contiguous()
    elif case.decode:
        cache_seqlens = k_lens.int()
        if table is not None:
            k, v = (_pages(case, x, table, num_pages) for x in (k, v))
        else:
            dead = ~k_valid[:, :, None, None]
            k, v = (
                torch.nn.functional.pad(x.masked_fill(dead, math.nan), (0, 0) * 2 + (0, case.tail), value=math.nan)
                for x in (k, v)
            )
    if case.dout == "sum":
        dout = dout.new_ones(()).expand_as(dout)
    elif case.dout == "transposed":
        dout = restride(dout, "transposed")
    q = restride(q, "plain" if case.strides == "expanded" else case.strides).requires_grad_()
    k, v = (restride(x, "plain" if table is not None and case.strides == "expanded" else case.strides) for x in (k, v))
    if case.latent:
        v = k[..., : v.shape[-1]]
    return Inputs(
        q, k.requires_grad_(), v.detach().requires_grad_(), s_aux, dout, out_grad, cu_q, cu_k, cache_seqlens, table,
        padded, seen, q_valid, k_valid,
    )  # fmt: skip


HALVES = (torch.bfloat16, torch.float16)


def _unit(dtype: torch.dtype) -> float:
    """Root mean square of a rounding, relative and over all mantissas: eps / sqrt(12) at 1, half of that at 2."""
    return torch.finfo(dtype).eps / math.sqrt(32 * math.log(2))


def _noise(
    dtype: torch.dtype,
    scores: Tensor,
    products: Tensor,
    dout_out: Tensor,
    probs: Tensor,
    dprobs: Tensor,
    dscores: Tensor,
) -> tuple[Tensor, Tensor]:
    """The variances of P and dS under rounding, of the sizes that a score's terms and those of dP sum up to.

    The arithmetic rounds scores and dP, the dtype the out that delta is taken from; a half format also P and dS.
    """
    fine, own = 2.0**-53 if dtype == torch.float64 else 2.0**-24, _unit(dtype) ** 2 if dtype in HALVES else 0.0
    relative = (fine * scores).square() + own
    in_probs = probs.square() * relative
    in_delta = (_unit(dtype) * dout_out).square().sum(-1, keepdim=True)
    in_delta = in_delta + (in_probs * dprobs.square()).sum(-1, keepdim=True)
    in_dscores = probs.square() * (in_delta + (fine * products).square()) + dscores.square() * (relative + own)
    return torch.nan_to_num(in_probs, 0.0, 0.0, 0.0), torch.nan_to_num(in_dscores, 0.0, 0.0, 0.0)


def evaluate(case: Case, t: Inputs, low: torch.dtype | None = None) -> dict[str, Tensor]:
    """Forward and backward by the contract's formulas, padded: out, lse, dq, dk, dv, ds_aux, sums of absolute terms.

    In fp64; or, with `low`, as eager PyTorch computes in that dtype: products summed in fp32, every tensor rounded.
    """
    wide = torch.float64 if low in (None, torch.float64) else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x if low is None else x.to(low).to(wide)

    batch, longest_q, longest_k = t.seen.shape
    kv, group = case.kv_heads, case.ratio
    rows = (batch, kv, group * longest_q)

    def fold(x: Tensor) -> Tensor:  # [batch, longest_q, num_q_heads, dim] -> [batch, kv, group * longest_q, dim]
        dim = x.shape[-1]
        return x.to(wide).reshape(batch, longest_q, kv, group, dim).permute(0, 2, 3, 1, 4).reshape(*rows, dim)

    def unfold(x: Tensor) -> Tensor:
        dim = x.shape[-1]
        x = x.view(batch, kv, group, longest_q, dim).permute(0, 3, 1, 2, 4)
        return x.reshape(batch, longest_q, kv * group, dim)

    scale = case.scale if case.scale is not None else case.head_dim**-0.5
    q, dout = fold(t.padded["q"]), fold(t.padded["dout"])
    k, v = (t.padded[name].to(wide).transpose(1, 2) for name in ("k", "v"))  # [batch, kv, longest_k, dim]
    seen = t.seen[:, None, None].expand(batch, 1, group, longest_q, longest_k).reshape(batch, 1, rows[2], longest_k)
    sink = torch.full((kv * group,), -math.inf, dtype=wide) if t.s_aux is None else t.s_aux.detach().to(wide)
    sink = sink.view(1, kv, group, 1).expand(batch, kv, group, longest_q).reshape(*rows, 1)

    scores = rounded(scale * (q @ k.mT)).masked_fill(~seen, -math.inf)
    top = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
    pivot = torch.where(torch.isinf(top), 0.0, top)
    weights, sink_weight = torch.exp(scores - pivot), torch.exp(sink - pivot)
    total = weights.sum(-1, keepdim=True) + sink_weight
    lse = pivot + torch.log(total)
    lse_raw = torch.logsumexp(torch.cat([scores, torch.full_like(sink, -math.inf)], -1), -1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    probs = rounded((weights / total).masked_fill(~seen, 0.0))
    sink_prob = torch.where(sink == math.inf, 1.0, sink_weight / total)
    out = rounded(probs @ v).masked_fill(torch.isnan(lse), math.nan)

    dlse = t.padded.get("dlse")
    g = torch.zeros(*rows, 1, dtype=wide) if dlse is None else dlse.to(wide).reshape(*rows, 1)
    g, g_raw = (torch.zeros_like(g), g) if case.raw else (g, torch.zeros_like(g))
    dprobs = rounded(dout @ v.mT).masked_fill(~seen, 0.0)
    delta = (probs * dprobs).sum(-1, keepdim=True)
    dscores = rounded((probs * (dprobs - delta + g)).masked_fill(~seen, 0.0))
    raw_probs = torch.exp(scores - torch.where(lse_raw == -math.inf, 0.0, lse_raw))
    raw_dscores = rounded((raw_probs * g_raw).masked_fill(~seen, 0.0))
    parts = [scale * (ds @ k) for ds in (dscores, raw_dscores)], [scale * (ds.mT @ q) for ds in (dscores, raw_dscores)]
    dq, dk = (rounded(rounded(own) + rounded(raw)) for own, raw in parts)
    result = {
        "out": unfold(out),
        "lse": (lse_raw if case.raw else lse).view(batch, kv * group, longest_q),
        "dq": unfold(dq),
        "dk": dk.transpose(1, 2),
        "dv": rounded(probs.mT @ dout).transpose(1, 2),
    }
    if low is None:
        products = dout.abs() @ v.abs().mT  # [batch, kv, group * longest_q, longest_k]
        scores_size = abs(scale) * (q.abs() @ k.abs().mT)
        in_probs, in_dscores = _noise(DTYPES[case.dtype], scores_size, products, dout * out, probs, dprobs, dscores)
        result["out_noise"] = unfold((in_probs @ v.square()).sqrt())
        result["dq_noise"] = unfold(abs(scale) * (in_dscores @ k.square()).sqrt())
        result["dk_noise"] = abs(scale) * (in_dscores.mT @ q.square()).sqrt().transpose(1, 2)
        if case.raw:  # two gradients, each rounded before they are added
            own = _unit(DTYPES[case.dtype]) ** 2 if DTYPES[case.dtype] in HALVES else 0.0
            in_raw = raw_dscores.square() * ((2.0**-24 * scores_size).square() + 2 * own)
            rounding_q, rounding_k = (own * (a.square() + b.square()) for a, b in parts)
            result["dq_noise"] = result["dq_noise"].hypot(
                unfold((scale**2 * (in_raw @ k.square()) + rounding_q).sqrt())
            )
            more = (scale**2 * (in_raw.mT @ q.square()) + rounding_k).sqrt().transpose(1, 2)
            result["dk_noise"] = result["dk_noise"].hypot(more)
        result["dv_noise"] = (in_probs.mT @ dout.square()).sqrt().transpose(1, 2)
        heads = (batch, kv, group, -1)
        terms, g_terms = (sink_prob * probs * dprobs).view(heads), (sink_prob * g).view(heads)
        result["ds_aux"] = (g_terms.sum((0, 3)) - terms.sum((0, 3))).flatten()
        result["ds_aux_terms"] = (g_terms.abs().sum((0, 3)) + terms.abs().sum((0, 3))).flatten()
        result["ds_aux_products"] = (sink_prob * probs * products).view(heads).sum((0, 3)).flatten()
    return result


class Finding(NamedTuple):
    """A quantity and its error over what is allowed: a failure above 1."""

    name: str
    ratio: float
    text: str


def _misplaced(name: str, got: Tensor, ref: Tensor) -> Finding | None:
    if got.shape != ref.shape:
        return Finding(name, math.inf, f"shape {tuple(got.shape)}, not {tuple(ref.shape)}")
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (kind(got) != kind(ref)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            text = f"{kind.__name__} differs at {len(wrong)} places, first {at}: {got[at].item()}, not {ref[at].item()}"
            return Finding(name, math.inf, text)
    return None


def compare(name: str, got: Tensor, ref: Tensor, low: Tensor, noise: Tensor, dtype: torch.dtype) -> list[Finding]:
    """Holds `got` to what eager PyTorch loses in dtype: 1.5 times its largest error and 1.1 times its mean error.

    The largest has room for rounding the result itself, 2 max|ref + 0.3 - 0.3 - ref| in a half format and 2e-6 of the
    largest value in fp32; fp64 is held to 1e-12. Eager's loss is one draw of what rounding does, a lucky one now and
    then where few pairs are visible. `noise`, the standard deviation of rounding, says what a draw may be: the largest
    of n is about noise * sqrt(2 log n), and at least 4 * noise, for what one P or dS was rounded by is in a whole row;
    the mean is noise * sqrt(2 / pi), and over n rows strays by 4 / sqrt(n) of itself. Rows count by their share of the
    noise, for those that hold nothing make no draw.
    """
    if misplaced := _misplaced(name, got, ref):
        return [misplaced]
    fine = torch.isfinite(ref)
    if dtype in HALVES:  # the result is rounded too
        noise = noise.hypot(_unit(dtype) * ref)
    row_noise = noise.where(fine, 0.0).sum(-1)
    got, ref, low, noise = (x.to(torch.float64)[fine] for x in (got, ref, low, noise))
    if not ref.numel():
        return []
    error, loss = (got - ref).abs(), torch.nan_to_num((low - ref).abs(), nan=0.0, posinf=0.0)
    size, tiny = ref.abs(), torch.finfo(torch.float32).smallest_normal  # what fp32 cannot tell from 0
    rows = (row_noise.sum().square() / row_noise.square().sum().clamp(min=torch.finfo(torch.float64).tiny)).item()
    # The k noisiest elements alone have a largest draw of about the k-th noise * sqrt(2 log k).
    ranks = torch.arange(1, noise.numel() + 1, dtype=torch.float64)
    largest = (noise.sort(descending=True).values * (2 * ranks.log()).sqrt().clamp(min=4.0)).max().item()
    mean_atol = 0.0
    if dtype not in HALVES:
        relative = 2e-6 if dtype == torch.float32 else 1e-12
        atol, mean_atol = relative * size.max().item(), relative * size.mean().item()
    else:
        near = ref.to(dtype)
        atol = 2 * (near + 0.3 - 0.3 - near).abs().max().item()
    mean = max(loss.mean().item(), math.sqrt(2 / math.pi) * noise.mean().item())
    found = []
    for kind, e, allowed in (
        ("max", error.max().item(), 1.5 * max(loss.max().item(), largest) + atol + tiny),
        ("mean", error.mean().item(), (1.1 + 4 / math.sqrt(max(rows, 1.0))) * mean + mean_atol + tiny),
    ):
        ratio = e / allowed if allowed else (math.inf if e else 0.0)
        found.append(Finding(f"{name} {kind}", ratio, f"error {e:.3g}, allowed {allowed:.3g}"))
    return found


def compare_lse(got: Tensor, ref: Tensor) -> Finding:
    """1e-5 absolute below 100, and in proportion above; 1e-12 for fp64."""
    if misplaced := _misplaced("lse", got, ref):
        return misplaced
    fine = torch.isfinite(ref)
    ref = ref[fine]
    unit = 1e-12 if got.dtype == torch.float64 else 1e-5
    if not len(ref):
        return Finding("lse", 0.0, "nothing finite")
    ratio = ((got.double()[fine] - ref).abs() / (unit * (ref.abs() / 100).clamp(min=1))).max().item()
    return Finding("lse", ratio, f"error {ratio * unit:.3g}, allowed {unit:.3g}")


def compare_ds_aux(got: Tensor, ref: Tensor, terms: Tensor, products: Tensor) -> Finding:
    """1e-5 of a head's sum of absolute terms p_sink P dP and p_sink g, and the rounding to the gradient's own dtype.

    dP is a product of head_dim numbers in fp32: 2^-22 of the sum of theirs is what a dP near 0 cannot do without.
    """
    if misplaced := _misplaced("ds_aux", got, ref):
        return misplaced
    fine = torch.isfinite(ref)
    if not fine.any():
        return Finding("ds_aux", 0.0, "nothing finite")
    info = torch.finfo(got.dtype)
    own = 0.0 if got.dtype == torch.float32 else info.eps / 2
    # Sums that underflow fp32 have no digits to be right in.
    allowed = 1e-5 * terms[fine] + 2.0**-22 * products[fine] + own * ref[fine].abs()
    allowed += max(1e-30, info.smallest_normal * info.eps)
    ratio = ((got.double()[fine] - ref[fine]).abs() / allowed).max().item()
    return Finding("ds_aux", ratio, f"error {ratio * 1e-5:.3g} of the absolute terms, allowed 1e-5")


def compare_all(
    case: Case, t: Inputs, got: dict[str, Tensor], ref: dict[str, Tensor], low: dict[str, Tensor]
) -> list[Finding]:
    dtype = DTYPES[case.dtype]
    lse_dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    found: list[Finding] = []
    for name, result in got.items():
        due = lse_dtype if name == "lse" else DTYPES[case.s_dtype] if name == "ds_aux" else dtype
        if result.dtype != due:
            found.append(Finding(name, math.inf, f"dtype {result.dtype}, not {due}"))
        if name == "ds_aux":
            found.append(compare_ds_aux(result, ref[name], ref["ds_aux_terms"], ref["ds_aux_products"]))
            continue
        if name == "lse":
            want = ref[name]
            if case.layout == "varlen":
                want = _pack(want.transpose(1, 2), t.q_valid, case.tail, -math.inf).T
            found.append(compare_lse(result, want))
            continue
        exact, lossy, noise = ref[name], low[name], ref[name + "_noise"]
        if case.layout == "varlen":
            valid = t.k_valid if name in ("dk", "dv") else t.q_valid
            exact, lossy, noise = (_pack(x, valid, case.tail, 0.0) for x in (exact, lossy, noise))
        found += compare(name, result, exact, lossy, noise, dtype)
    return found
