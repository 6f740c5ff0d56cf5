# SPDX-License-Identifier: Apache-2.0
"""Configurations: a case is its id, and a random one its seed."""

import math
import random
import re
from dataclasses import dataclass
from typing import Any

import torch

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
    raw: bool = False  # return_lse="raw": the LSE is that over the keys alone, and so is its gradient
    frozen: bool = False  # s_aux asks for no gradient
    poison: bool = False  # NaN in keys and values that no row sees
    num_splits: int = 0
    invariant: bool = False
    dtype: str = "fp32"
    seed: int = 0
    head_dim_v: int = 0  # columns of v and out; 0: head_dim
    latent: bool = False  # of a cache: v is a view of the first columns of k

    @property
    def decode(self) -> bool:
        return self.layout in ("cache", "paged")

    @property
    def num_q_heads(self) -> int:
        return self.ratio * self.kv_heads

    @property
    def id(self) -> str:
        c, words = self, [f"d{self.head_dim}"] + [f"v{self.head_dim_v}"] * (self.head_dim_v > 0)

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
        say(c.scale is not None, f"scale{c.scale}".replace("-", "minus"))
        say(c.strides != "plain", c.strides)
        say(c.dout != "rand", f"dout{c.dout}")
        say(not c.dlse, "nodlse")
        say(c.raw, "raw")
        say(c.frozen, "frozen")
        say(c.poison, "poison")
        say(c.num_splits, f"splits{c.num_splits}")
        say(c.invariant, "invariant")
        say(c.latent, "latent")
        words.append(c.dtype)
        say(c.seed, f"seed{c.seed}")
        return "-".join(words)

    @staticmethod
    def parse(text: str) -> "Case":
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
    (r"v(\d+)", "head_dim_v", int),
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
    (r"scale((?:minus)?[\d.]+)", "scale", lambda s: float(s.replace("minus", "-"))),
    (r"(transposed|sliced|offset|lastdim|expanded)", "strides", str),
    (r"dout(sum|transposed)", "dout", str),
    (r"(nodlse)", "dlse", lambda _: False),
    (r"(raw)", "raw", bool),
    (r"(frozen)", "frozen", bool),
    (r"(poison)", "poison", bool),
    (r"splits(\d+)", "num_splits", int),
    (r"(invariant)", "invariant", bool),
    (r"(latent)", "latent", bool),
    (r"(bf16|fp16|fp32|fp64)", "dtype", str),
    (r"seed(\d+)", "seed", int),
]


def random_case(seed: str, work: int = 2_000_000) -> Case:
    """The case drawn from a seed; a product takes about `work` multiplications at most, one in twenty 16 times that."""
    rng = random.Random(seed)
    pick = rng.choice
    layout = pick(("dense", "dense", "dense", "varlen", "varlen", "varlen", "cache", "paged"))
    decode = layout in ("cache", "paged")
    head_dim = pick((*HEAD_DIMS, 64, 64, 128, pick((512, 576)) if decode else 128))
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
    narrow = head_dim > 8 and (head_dim > 512 or rng.random() < 0.2)
    head_dim_v = 8 * rng.randrange(1, 1 + min(head_dim - 8, 512) // 8) if narrow else 0
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
        scale=pick((None, None, None, 0.1, -0.1)),
        strides=strides,
        dout="rand" if decode else pick(("rand", "rand", "sum", "transposed")),
        dlse=decode or rng.random() < 0.5,
        raw=rng.random() < 0.2,
        frozen=not decode and rng.random() < 0.1,
        poison=rng.random() < 0.5,
        num_splits=0 if invariant or not decode else pick((0, 0, 1, 2, 3, 7)),
        invariant=invariant,
        dtype=dtype,
        seed=rng.randrange(1, 2**31),
        head_dim_v=head_dim_v,
        latent=decode and rng.random() < (0.7 if narrow else 0.1),
    )
