# SPDX-License-Identifier: Apache-2.0
"""Cases, inputs, an explicit fp64 evaluation with its backward, and the tolerance that results are held to.

`python -m sinkattn._testing --cases 100000 --seed 1` runs random configurations on the CPU, `--case ID` runs one again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkattn import reference

LEVEL_VARIABLE = "SINKATTN_CPU_LEVEL"
LEVELS = ("oracle", "scalar", "avx2", "avx512", "avx512_bf16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
HEAD_DIMS = (8, 40, 64, 72, 80, 96, 112, 128, 192, 256)
RATIOS = (1, 2, 3, 5, 7, 8, 16, 64)
UNBOUNDED = 2**31 - 1
EDGES = {"neginf": -math.inf, "posinf": math.inf, "nan": math.nan, "100": 100.0, "1e4": 1e4, "-1e4": -1e4, "0": 0.0}


def _lens_text(lens: tuple[int, ...]) -> str:
    return f"{lens[0]}x{len(lens)}" if len(set(lens)) == 1 and len(lens) > 1 else ".".join(map(str, lens))


def _lens_value(text: str) -> tuple[int, ...]:
    first, times, count = text.partition("x")
    return (int(first),) * int(count) if times else tuple(map(int, text.split(".")))


@dataclass(frozen=True)
class Case:
    """One configuration. Its id, such as d64-causal-w128-sink4-g8-varlen-bf16, leaves defaults out and parses back."""

    head_dim: int = 64
    left: int = -1  # the id's w128 is left 127: it counts the row itself
    right: int = -1
    num_sink_tokens: int = 0
    ratio: int = 1  # query heads a kv head
    kv_heads: int = 1
    layout: str = "dense"  # or varlen, cache, paged
    q_lens: tuple[int, ...] = (129, 129)
    k_lens: tuple[int, ...] = (129, 129)
    page_size: int = 0
    shared: bool = False  # sequences 0 and 1 share their leading pages
    tail: int = 0  # packed rows past the last sequence; cache slots past the longest
    s_aux: str = "rand"  # or none, mix, an edge's name
    s_dtype: str = "fp32"
    scale: float | None = None
    strides: str = "plain"  # or transposed, sliced, offset, lastdim, expanded
    dout: str = "rand"  # or sum (one expanded 1), transposed
    dlse: bool = True
    frozen: bool = False  # s_aux asks for no gradient
    poison: bool = False  # NaN in keys and values that no row sees
    num_splits: int = 0
    invariant: bool = False
    dtype: str = "fp32"
    seed: int = 0

    @property
    def decode(self) -> bool:
        return self.layout in ("cache", "paged")

    @property
    def num_q_heads(self) -> int:
        return self.ratio * self.kv_heads

    @property
    def id(self) -> str:
        c, words = self, [f"d{self.head_dim}"]

        def say(when: object, word: str) -> None:
            if when:
                words.append(word)

        say(c.right == 0, "causal")
        say(c.right > 0, f"r{c.right}")
        say(c.left >= 0, f"w{c.left + 1}")
        say(c.num_sink_tokens, f"sink{c.num_sink_tokens}")
        say(c.ratio != 1, f"g{c.ratio}")
        say(c.kv_heads != 1, f"h{c.kv_heads}")
        say(c.layout != "dense", c.layout + (str(c.page_size) if c.page_size else ""))
        say(c.shared, "shared")
        say(c.q_lens != Case.q_lens, f"q{_lens_text(c.q_lens)}")
        say(c.k_lens != Case.k_lens, f"k{_lens_text(c.k_lens)}")
        say(c.tail, f"tail{c.tail}")
        say(c.s_aux != "rand", "aux" + c.s_aux.replace("-", "minus"))
        say(c.s_dtype != "fp32", f"aux{c.s_dtype}")
        say(c.scale is not None, f"scale{c.scale}")
        say(c.strides != "plain", c.strides)
        say(c.dout != "rand", f"dout{c.dout}")
        say(not c.dlse, "nodlse")
        say(c.frozen, "frozen")
        say(c.poison, "poison")
        say(c.num_splits, f"splits{c.num_splits}")
        say(c.invariant, "invariant")
        words.append(c.dtype)
        say(c.seed, f"seed{c.seed}")
        return "-".join(words)

    @staticmethod
    def parse(text: str) -> Case:
        """The case of an id. Raises ValueError on a word that is none."""
        found: dict[str, Any] = {}
        for word in text.split("-"):
            for pattern, name, value in _WORDS:
                if match := re.fullmatch(pattern, word):
                    found[name] = value(match[1])
                    if name == "layout" and match[1].startswith("paged"):
                        found |= {"layout": "paged", "page_size": int(match[1].removeprefix("paged"))}
                    break
            else:
                raise ValueError(f"{word!r} in case id {text!r} is not a word of one")
        return Case(**found)


_WORDS: list[tuple[str, str, Any]] = [
    (r"d(\d+)", "head_dim", int),
    (r"(causal)", "right", lambda _: 0),
    (r"r(\d+)", "right", int),
    (r"w(\d+)", "left", lambda w: int(w) - 1),
    (r"sink(\d+)", "num_sink_tokens", int),
    (r"g(\d+)", "ratio", int),
    (r"h(\d+)", "kv_heads", int),
    (r"(varlen|cache|paged\d+)", "layout", str),
    (r"(shared)", "shared", bool),
    (r"q([\d.x]+)", "q_lens", _lens_value),
    (r"k([\d.x]+)", "k_lens", _lens_value),
    (r"tail(\d+)", "tail", int),
    (r"aux(fp64|fp32|fp16|bf16)", "s_dtype", str),
    (r"aux(none|mix|neginf|posinf|nan|100|1e4|minus1e4|0)", "s_aux", lambda s: s.replace("minus", "-")),
    (r"scale([\d.]+)", "scale", float),
    (r"(transposed|sliced|offset|lastdim|expanded)", "strides", str),
    (r"dout(sum|transposed)", "dout", str),
    (r"(nodlse)", "dlse", lambda _: False),
    (r"(frozen)", "frozen", bool),
    (r"(poison)", "poison", bool),
    (r"splits(\d+)", "num_splits", int),
    (r"(invariant)", "invariant", bool),
    (r"(bf16|fp16|fp32|fp64)", "dtype", str),
    (r"seed(\d+)", "seed", int),
]


def random_case(seed: str, work: int = 2_000_000) -> Case:
    """The case drawn from a seed; a product takes about `work` multiplications at most, one in twenty 16 times that."""
    rng = random.Random(seed)
    pick = rng.choice
    layout = pick(("dense", "dense", "dense", "varlen", "varlen", "varlen", "cache", "paged"))
    decode = layout in ("cache", "paged")
    head_dim = pick((*HEAD_DIMS, 64, 64, 128, 512 if decode else 128))
    ratio, kv_heads = pick(RATIOS), pick((1, 1, 2, 3))
    batch = pick((1, 1, 2, 3, 4, 7))
    top = pick((3, 17, 40, 70, 140, 300))
    long = rng.random() < 0.005
    if long:
        head_dim, ratio, kv_heads, batch, top, work = pick((8, 16)), pick((1, 2)), 1, pick((1, 2)), 2600, 100 * work

    def lens(low: int, high: int) -> tuple[int, ...]:
        if layout == "varlen":
            return tuple(pick((0, 1, rng.randint(low, high), rng.randint(low, high))) for _ in range(batch))
        return (rng.randint(low, high),) * batch

    q_lens = (pick((1, 1, 1, 2, 4, 9)),) * batch if decode else lens(top // 2 if long else 0, top)
    k_lens = pick((q_lens, lens(0, top), lens(0, top)))
    if decode:
        k_lens = tuple(rng.randint(0, top) for _ in range(batch))
    budget = work * (16 if rng.random() < 0.05 else 1) // (ratio * kv_heads * head_dim)
    while batch * max(q_lens) * max(k_lens) > budget:
        if max(k_lens) >= max(q_lens):
            k_lens = tuple(k * 2 // 3 for k in k_lens)
        else:
            q_lens = tuple(q * 2 // 3 for q in q_lens)
    k_len = max(k_lens)
    edge = rng.randint(1, k_len + 1)
    window = pick((0, 0, 0, 1, 2, 127, 128, 129, max(k_len - 1, 1), max(k_len, 1), UNBOUNDED, edge))
    right = 0 if decode else pick((0, 0, 0, -1, UNBOUNDED, rng.randint(0, k_len + 1)))
    dtype = pick(("bf16", "bf16", "bf16", "fp16", "fp32", "fp32", "fp64"))
    invariant = decode and rng.random() < 0.3
    strides = pick(("plain",) * 5 + ("transposed", "sliced", "offset", "lastdim", "expanded"))
    return Case(
        head_dim=head_dim,
        left=window - 1,
        right=right,
        num_sink_tokens=pick((0, 0, 0, 1, 4, 64, k_len + 3)),
        ratio=ratio,
        kv_heads=kv_heads,
        layout=layout,
        q_lens=q_lens,
        k_lens=k_lens,
        page_size=pick((1, 16, 64, 128, 256)) if layout == "paged" else 0,
        shared=layout == "paged" and batch > 1 and rng.random() < 0.5,
        tail=pick((0, 0, 3)) if layout != "dense" else 0,
        s_aux=pick(("rand", "rand", "rand", "rand", "none", "none", "mix", pick(tuple(EDGES)))),
        s_dtype=pick(("fp32", "fp32", "fp32", "bf16", "fp16")),
        scale=pick((None, None, None, 0.1)),
        strides=strides,
        dout="rand" if decode else pick(("rand", "rand", "sum", "transposed")),
        dlse=decode or rng.random() < 0.5,
        frozen=not decode and rng.random() < 0.1,
        poison=rng.random() < 0.5,
        num_splits=0 if invariant or not decode else pick((0, 0, 1, 2, 3, 7)),
        invariant=invariant,
        dtype=dtype,
        seed=rng.randrange(1, 2**31),
    )


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
    padded: dict[str, Tensor]  # q, k, v, dout [batch, longest, heads, head_dim], dlse [batch, num_q_heads, longest]
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
    return Inputs(
        q, k.requires_grad_(), v.requires_grad_(), s_aux, dout, out_grad, cu_q, cu_k, cache_seqlens, table,
        padded, seen, q_valid, k_valid,
    )  # fmt: skip


def evaluate(case: Case, t: Inputs, low: torch.dtype | None = None) -> dict[str, Tensor]:
    """Forward and backward by the contract's formulas, padded: out, lse, dq, dk, dv, ds_aux, sums of absolute terms.

    In fp64; or, with `low`, as eager PyTorch computes in that dtype: products summed in fp32, every tensor rounded.
    """
    wide = torch.float64 if low in (None, torch.float64) else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x if low is None else x.to(low).to(wide)

    batch, longest_q, longest_k = t.seen.shape
    kv, group, dim = case.kv_heads, case.ratio, case.head_dim
    rows = (batch, kv, group * longest_q)

    def fold(x: Tensor) -> Tensor:  # [batch, longest_q, num_q_heads, dim] -> [batch, kv, group * longest_q, dim]
        return x.to(wide).view(batch, longest_q, kv, group, dim).permute(0, 2, 3, 1, 4).reshape(*rows, dim)

    def unfold(x: Tensor) -> Tensor:
        x = x.view(batch, kv, group, longest_q, dim).permute(0, 3, 1, 2, 4)
        return x.reshape(batch, longest_q, kv * group, dim)

    scale = case.scale if case.scale is not None else dim**-0.5
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
    total = torch.where(total == 0, 1.0, total)
    probs = rounded((weights / total).masked_fill(~seen, 0.0))
    sink_prob = torch.where(sink == math.inf, 1.0, sink_weight / total)
    out = rounded(probs @ v).masked_fill(torch.isnan(lse), math.nan)

    dlse = t.padded.get("dlse")
    g = torch.zeros(*rows, 1, dtype=wide) if dlse is None else dlse.to(wide).reshape(*rows, 1)
    dprobs = rounded(dout @ v.mT).masked_fill(~seen, 0.0)
    delta = (probs * dprobs).sum(-1, keepdim=True)
    dscores = rounded((probs * (dprobs - delta + g)).masked_fill(~seen, 0.0))
    result = {
        "out": unfold(out),
        "lse": lse.view(batch, kv * group, longest_q),
        "dq": unfold(rounded(scale * (dscores @ k))),
        "dk": rounded(scale * (dscores.mT @ q)).transpose(1, 2),
        "dv": rounded(probs.mT @ dout).transpose(1, 2),
    }
    if low is None:
        # What rounding leaves where dP - delta cancels: of the dtype in out, of the arithmetic in the products of dP.
        products = dout.abs() @ v.abs().mT  # [batch, kv, group * longest_q, longest_k]
        unit, fine = torch.finfo(DTYPES[case.dtype]).eps / 2, 2.0**-53 if case.dtype == "fp64" else 2.0**-24
        noise = probs.square() * (unit * (dout * out).norm(dim=-1, keepdim=True)).square()
        noise += (probs * products * fine).square()
        noise = torch.nan_to_num(noise, 0.0, 0.0, 0.0).masked_fill_(~seen, 0.0)
        result["dq_noise"] = unfold(scale * torch.nan_to_num(noise @ k.square()).sqrt())
        result["dk_noise"] = scale * (noise.mT @ q.square()).sqrt().transpose(1, 2)
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


def compare(
    name: str, got: Tensor, ref: Tensor, low: Tensor, dtype: torch.dtype, noise: Tensor | None = None
) -> list[Finding]:
    """Holds `got` to what eager PyTorch loses in dtype: 1.5 times its largest error and 1.1 times its mean error.

    The largest has room for rounding the result itself, 2 max|ref + 0.3 - 0.3 - ref| in a half format and 2e-6 of the
    largest value in fp32; fp64 is held to 1e-12. Eager's loss is one draw of what rounding does, too few where few
    pairs are visible: so a mean over n rows has 3 / sqrt(n) more, counted from the rounding of ref if that is larger,
    and `noise`, the standard deviation of a gradient's rounding, says how large a draw may be.
    """
    if misplaced := _misplaced(name, got, ref):
        return [misplaced]
    fine = torch.isfinite(ref)
    head_dim = ref.shape[-1]
    got, ref, low = (x.to(torch.float64)[fine] for x in (got, ref, low))
    if not ref.numel():
        return []
    error, loss = (got - ref).abs(), torch.nan_to_num((low - ref).abs(), nan=0.0, posinf=0.0)
    size, spread = ref.abs(), 3 / math.sqrt(ref.numel() / head_dim)
    sigma = torch.zeros(1) if noise is None else noise[fine]
    sigma_max, sigma_mean = sigma.max().item(), sigma.mean().item()
    tiny = torch.finfo(torch.float32).smallest_normal  # what fp32 cannot tell from 0
    rounding = mean_atol = 0.0
    if dtype in (torch.float32, torch.float64):
        relative = 2e-6 if dtype == torch.float32 else 1e-12
        atol, mean_atol = relative * size.max().item(), relative * size.mean().item()
    else:
        near = ref.to(dtype)
        atol = 2 * (near + 0.3 - 0.3 - near).abs().max().item()
        rounding = (near.to(torch.float64) - ref).abs().mean().item()
    mean_loss = max(loss.mean().item(), rounding, sigma_mean)
    found = []
    for kind, e, allowed in (
        ("max", error.max().item(), 1.5 * max(loss.max().item(), 2 * sigma_max) + atol + tiny),
        ("mean", error.mean().item(), (1.1 + spread) * mean_loss + mean_atol + tiny),
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


def run_ops(case: Case, t: Inputs, ops: ModuleType, backward: bool = True) -> dict[str, Tensor]:
    """out and lse, and the gradients unless the case decodes, by the functions of `ops`."""
    common: dict[str, Any] = {"softmax_scale": case.scale, "s_aux": t.s_aux, "num_sink_tokens": case.num_sink_tokens}
    common |= {"window_size": (case.left, case.right), "return_lse": True}
    if case.decode:
        if case.num_splits or case.invariant:
            out, lse = torch.ops.sinkattn.flash_decode(
                t.q, t.k, t.v, t.s_aux, t.cache_seqlens, t.block_table, case.scale, case.left, case.num_sink_tokens,
                case.num_splits, case.invariant,
            )  # fmt: skip
        else:
            common |= {"cache_seqlens": t.cache_seqlens, "block_table": t.block_table, "causal": True}
            out, lse = ops.flash_attn_with_kvcache(t.q, t.k, t.v, **common)
        return {"out": out.detach(), "lse": lse.detach()}
    if case.layout == "varlen":
        lengths = (t.cu_q, t.cu_k, max(case.q_lens), max(case.k_lens))
        out, lse = ops.flash_attn_varlen_func(t.q, t.k, t.v, *lengths, **common)
    else:
        out, lse = ops.flash_attn_func(t.q, t.k, t.v, **common)
    if not backward:
        return {"out": out.detach(), "lse": lse.detach()}
    wanted = {"dq": t.q, "dk": t.k, "dv": t.v}
    if t.s_aux is not None and not case.frozen:
        wanted["ds_aux"] = t.s_aux
    outputs, seeds = ((out,), (t.dout,)) if t.dlse is None else ((out, lse), (t.dout, t.dlse))
    grads = torch.autograd.grad(outputs, tuple(wanted.values()), seeds)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def compare_all(
    case: Case, t: Inputs, got: dict[str, Tensor], ref: dict[str, Tensor], low: dict[str, Tensor]
) -> list[Finding]:
    """Every output of run_ops against the evaluations in fp64 and in the case's dtype."""
    dtype = DTYPES[case.dtype]
    lse_dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    found: list[Finding] = []
    for name, result in got.items():
        want = lse_dtype if name == "lse" else DTYPES[case.s_dtype] if name == "ds_aux" else dtype
        if result.dtype != want:
            found.append(Finding(name, math.inf, f"dtype {result.dtype}, not {want}"))
        if name == "ds_aux":
            found.append(compare_ds_aux(result, ref[name], ref["ds_aux_terms"], ref["ds_aux_products"]))
            continue
        both = [x for x in (ref[name], low[name], ref.get(name + "_noise")) if x is not None]
        if case.layout == "varlen":
            if name == "lse":
                both = [_pack(x.transpose(1, 2), t.q_valid, case.tail, -math.inf).T for x in both]
            else:
                both = [_pack(x, t.k_valid if name in ("dk", "dv") else t.q_valid, case.tail, 0.0) for x in both]
        if name == "lse":
            found.append(compare_lse(result, both[0]))
        else:
            found += compare(name, result, both[0], both[1], dtype, *both[2:])
    return found


def check(case: Case, ops: ModuleType | None = None, backward: bool = True) -> list[Finding]:
    """Runs a case and compares every output with fp64; ops stands in for sinkattn's own functions."""
    if ops is None:
        import sinkattn as ops
    assert ops is not None
    t = make_inputs(case)
    return compare_all(
        case, t, run_ops(case, t, ops, backward), evaluate(case, t), evaluate(case, t, DTYPES[case.dtype])
    )


def assert_right(case: Case, ops: ModuleType | None = None, backward: bool = True) -> None:
    """Raises AssertionError, with what is wrong and how to run it alone, when check() finds a failure."""
    outcome = Outcome(case, os.environ.get(LEVEL_VARIABLE, "default"), check(case, ops, backward))
    assert not outcome.failures, str(outcome)


def available_levels() -> tuple[str, ...]:
    """The CPU levels of this machine, lowest first."""
    from sinkattn import _C

    with at_level(None):
        return LEVELS[: _C.query_cpu()["arch"] + 1]


@contextmanager
def at_level(level: str | None) -> Iterator[None]:
    """The CPU level inside the block; None is the machine's own."""
    before = os.environ.pop(LEVEL_VARIABLE, None)
    if level is not None:
        os.environ[LEVEL_VARIABLE] = level
    try:
        yield
    finally:
        os.environ.pop(LEVEL_VARIABLE, None)
        if before is not None:
            os.environ[LEVEL_VARIABLE] = before


class Outcome(NamedTuple):
    case: Case
    level: str
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if not f.ratio <= 1]

    def __str__(self) -> str:
        lines = [f"{LEVEL_VARIABLE}={self.level} python -m sinkattn._testing --case {self.case.id}"]
        return "\n    ".join(lines + [f"{f.name}: {f.text}" for f in self.failures])


def check_at(case: Case, level: str) -> Outcome:
    """check() with the CPU level forced; what it raises is a finding."""
    with at_level(level):
        try:
            return Outcome(case, level, check(case))
        except Exception as error:
            return Outcome(case, level, [Finding("raised", math.inf, f"{type(error).__name__}: {error}")])


def random_outcome(seed: int, index: int, levels: tuple[str, ...]) -> Outcome:
    """The index-th random configuration of a seed."""
    case = random_case(f"{seed}/{index}")
    return check_at(case, random.Random(f"{seed}/{index}/level").choice(levels))


class Summary:
    """What a run of many cases found."""

    def __init__(self) -> None:
        self.failed: list[Outcome] = []
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, tuple[float, str]] = {}  # the largest error over allowed, and its case

    def add(self, outcome: Outcome) -> None:
        case = outcome.case
        kind = "decode" if case.decode else "forward and backward"
        self.counts.update((kind, case.dtype, case.layout, outcome.level, f"head_dim {case.head_dim}"))
        if outcome.failures:
            self.failed.append(outcome)
        for f in outcome.findings:
            name = f"{case.dtype} {f.name}"
            if f.ratio > self.worst.get(name, (-1.0, ""))[0]:
                self.worst[name] = (f.ratio, f"{outcome.level} {case.id}")


def _work(seed: int, first: int, count: int, step: int, current: Any, slot: int, results: Any) -> None:
    torch.set_num_threads(1)
    levels = available_levels()
    for index in range(first, count, step):
        current[slot] = index
        results.put((slot, random_outcome(seed, index, levels)))
    results.put((slot, None))


def run_random(seed: int, count: int, workers: int) -> Summary:
    """Runs cases 0 to count of a seed in processes of one thread; one that dies is a failure of the case it was at."""
    context = mp.get_context("spawn")
    current, results, summary = context.Array("q", workers), context.Queue(), Summary()
    levels = available_levels()

    def start(slot: int, first: int) -> Any:
        current[slot] = first
        process = context.Process(target=_work, args=(seed, first, count, workers, current, slot, results), daemon=True)
        process.start()
        return process

    running = {slot: start(slot, slot) for slot in range(workers)}
    begun = told = time.monotonic()
    done = 0
    while running:
        try:
            slot, outcome = results.get(timeout=1)
            if outcome is None:
                running.pop(slot).join()
                continue
            done += 1
            summary.add(outcome)
            if outcome.failures:
                print(f"FAILED {outcome}", flush=True)
        except Empty:
            for slot, process in list(running.items()):
                if process.exitcode is not None:
                    index = current[slot]
                    level = random.Random(f"{seed}/{index}/level").choice(levels)
                    died = Finding("died", math.inf, f"the process ended with code {process.exitcode}")
                    outcome = Outcome(random_case(f"{seed}/{index}"), level, [died])
                    print(f"FAILED {outcome}", flush=True)
                    summary.add(outcome)
                    running[slot] = start(slot, index + workers)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            rate = done / (told - begun)
            print(f"{done} of {count} cases, {rate:.0f} a second, {len(summary.failed)} failed", flush=True)
    return summary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sinkattn._testing", description=__doc__)
    parser.add_argument("--case", help="run the case of this id alone, at the level in SINKATTN_CPU_LEVEL")
    parser.add_argument("--cases", type=int, default=2000, help="random configurations to run")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
    parser.add_argument("--json", help="write the summary here")
    args = parser.parse_args(arguments)
    if args.case:
        outcome = check_at(Case.parse(args.case), os.environ.get(LEVEL_VARIABLE, available_levels()[-1]))
        for f in outcome.findings:
            print(f"{f.name:10} {f.ratio:8.3f} of what is allowed: {f.text}")
        return 1 if outcome.failures else 0
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.cases} cases, levels {' '.join(available_levels())}", flush=True)
    begun = time.monotonic()
    summary = run_random(seed, args.cases, args.workers)
    seconds = time.monotonic() - begun
    for name, (ratio, where) in sorted(summary.worst.items()):
        print(f"worst {name:14} {ratio:8.3f} of what is allowed, {where}")
    print(f"seed {seed}: {args.cases} cases, {len(summary.failed)} failed, {seconds:.0f} s")
    if args.json:
        from sinkattn import _C

        report = {
            "seed": seed, "cases": args.cases, "failed": [str(outcome) for outcome in summary.failed],
            "seconds": round(seconds), "workers": args.workers, "build": _C.build_info(), "torch": torch.__version__,
            "levels": available_levels(), "counts": dict(sorted(summary.counts.items())),
            "worst_error_over_allowed": {name: [round(r, 4), w] for name, (r, w) in sorted(summary.worst.items())},
        }  # fmt: skip
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
