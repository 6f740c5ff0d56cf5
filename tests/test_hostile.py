# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: each raises a clean Python exception, none crashes. They run in child processes, many to a child."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

import sinkattn

INT32 = (-(2**31), -1, 2**31 - 1)
Call = Callable[[], object]
OPS = torch.ops.sinkattn


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def varlen(cu_q: Tensor, cu_k: Tensor, dtype: torch.dtype = torch.float32) -> object:
    q, k = rows(12, 4, 64, dtype=dtype), rows(12, 2, 64, dtype=dtype)
    return sinkattn.flash_attn_varlen_func(q, k, k, cu_q, cu_k, causal=True, window_size=(3, 0))


def varlen_bwd(cu_q: Tensor, cu_k: Tensor, dtype: torch.dtype = torch.float32) -> object:
    q, k = rows(12, 4, 64, dtype=dtype), rows(12, 2, 64, dtype=dtype)
    return OPS.flash_attn_bwd(q, None, q, k, k, q, rows(4, 12), None, cu_q, cu_k, None, None, None, -1, 0, 0)


def hostile_offsets() -> Iterator[tuple[str, Call]]:
    good = (0, 4, 8, 12)
    for place, value in [
        *((0, value) for value in (1, 5, *INT32)),
        *((1, value) for value in (9, 13, *INT32)),
        *((2, value) for value in (3, 13, *INT32)),
        *((3, value) for value in (7, 13, 2**20, *INT32)),
    ]:
        bad = ints(*(value if i == place else n for i, n in enumerate(good)))
        for function in (varlen, varlen_bwd):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{function.__name__} {str(dtype)[6:]} cu_seqlens_{{}}[{place}]={value}"
                yield name.format("q"), partial(function, bad, ints(*good), dtype)
                yield name.format("k"), partial(function, ints(*good), bad, dtype)


def decode(
    lens: Tensor | None = None, table: Tensor | None = None, q_len: int = 1, page_size: int = 8, splits: int = 0,
    invariant: bool = False, left: int = -1,
) -> object:  # fmt: skip
    cache = rows(3, 32, 2, 64) if table is None else rows(12, page_size, 2, 64)
    return OPS.flash_decode(rows(3, q_len, 4, 64), cache, cache, None, lens, table, None, left, 0, splits, invariant)


def append(lens: Tensor, table: Tensor | None = None) -> object:
    """Two new keys a sequence."""
    cache = rows(3, 32, 2, 64) if table is None else rows(12, 8, 2, 64)
    return OPS.append_kv(cache, cache.clone(), rows(3, 2, 2, 64), rows(3, 2, 2, 64), lens, table)


def hostile_caches() -> Iterator[tuple[str, Call]]:
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    for place in range(3):
        for value in (33, 2**20, *INT32):
            lens = ints(*(value if i == place else 32 for i in range(3)))
            for q_len in (1, 3):
                yield f"decode {q_len} rows cache_seqlens[{place}]={value}", partial(decode, lens, q_len=q_len)
                yield f"paged decode {q_len} rows cache_seqlens[{place}]={value}", partial(decode, lens, table, q_len)
    for place in ((0, 0), (1, 3), (2, 2)):
        for value in (12, 2**20, *INT32):
            bad = table.clone()
            bad[place] = value
            name = f"block_table[{place[0]}][{place[1]}]={value}"
            yield name, partial(decode, None, bad)
            yield f"{name} in 3 splits", partial(decode, None, bad, splits=3)
            yield f"{name} invariant", partial(decode, None, bad, invariant=True)
            yield f"append with {name}", partial(append, ints(8 * place[1], 8 * place[1], 8 * place[1]), bad)
    for place in range(3):
        for value in (31, 2**20, *INT32):
            lens = ints(*(value if i == place else 0 for i in range(3)))
            yield f"append with cache_seqlens[{place}]={value}", partial(append, lens)
            yield f"paged append with cache_seqlens[{place}]={value}", partial(append, lens, table)


def dense(q: object = None, k: object = None, v: object = None, **options: object) -> object:
    q = rows(2, 5, 4, 64) if q is None else q
    k = rows(2, 7, 2, 64) if k is None else k
    return sinkattn.flash_attn_func(q, k, k if v is None else v, **options)  # type: ignore[arg-type]


def bwd(**changes: object) -> object:
    q, k = rows(2, 5, 4, 64), rows(2, 7, 2, 64)
    given: dict[str, object] = {"dout": q, "dlse": None, "q": q, "k": k, "v": k, "out": q}
    given |= {"lse": rows(2, 4, 5), "s_aux": None}
    return OPS.flash_attn_bwd(*(given | changes).values(), None, None, None, None, None, -1, 0, 0)


def decode_out(**changes: object) -> object:
    q, cache = rows(2, 1, 4, 64), rows(2, 32, 2, 64)
    given: dict[str, object] = {"out": rows(2, 1, 4, 64), "lse": rows(2, 4, 1)}
    given["scratch"] = torch.zeros(2**20, dtype=torch.uint8)
    return OPS.flash_decode_out(q, cache, cache, None, None, None, None, -1, 0, 4, False, *(given | changes).values())


def malformed() -> Iterator[tuple[str, Call]]:
    """Beside what test_malformed.py gives the functions: shapes that do not fit each other, and the operators."""
    good, packed, k_packed = ints(0, 4, 8, 12), rows(12, 4, 64), rows(12, 2, 64)
    call = sinkattn.flash_attn_varlen_func
    for name, cu in {"too short": ints(0, 12), "too long": ints(0, 4, 8, 12, 12)}.items():
        yield f"cu_seqlens_q is {name}", partial(call, packed, k_packed, k_packed, cu, good)
        yield f"cu_seqlens_k is {name}", partial(call, packed, k_packed, k_packed, good, cu)
    yield "varlen on dense tensors", partial(call, packed[None], k_packed[None], k_packed[None], good, good)
    yield "dense on packed tensors", partial(dense, packed, k_packed)
    yield "decode window left=-2", partial(decode, left=-2)
    for dim in (0, 4, 7, 12, 63, 257, 264, 512, 1024):
        yield f"head_dim={dim}", partial(dense, rows(2, 5, 4, dim), rows(2, 7, 2, dim))
    cached = partial(sinkattn.flash_attn_with_kvcache, s_aux=None)
    yield "decode head_dim=520", partial(cached, *[rows(1, 1, 1, 520)] * 3)
    for name, shape in {
        "another batch": (3, 7, 2, 64),
        "another head_dim": (2, 7, 2, 72),
        "heads that do not divide": (2, 7, 3, 64),
        "more heads than q": (2, 7, 8, 64),
        "no heads": (2, 7, 0, 64),
        "three dimensions": (7, 2, 64),
        "five dimensions": (1, 2, 7, 2, 64),
        "no dimension": (),
    }.items():
        yield f"k with {name}", partial(dense, k=rows(*shape))
        yield f"k and v with {name}", partial(dense, k=rows(*shape), v=rows(*shape))
        yield f"cache with {name}", partial(cached, rows(2, 1, 4, 64), rows(*shape), rows(*shape))
    yield "q without heads", partial(dense, rows(2, 5, 0, 64), rows(2, 7, 0, 64))
    row = rows(1, 1, 1, 8)
    yield "q of 2^57 rows", partial(dense, row.expand(1, 2**57, 1, 8), row)
    yield "k of 2^57 rows", partial(dense, row, row.expand(1, 2**57, 1, 8))
    lens, table = ints(1, 2, 3), torch.arange(12, dtype=torch.int32).view(3, 4)
    for name, bad in {"too short": lens[:2], "a matrix": lens[None], "elsewhere": lens.to("meta")}.items():
        yield f"cache_seqlens {name}", partial(decode, bad)
    for name, bad in {"int64": table.long(), "a vector": table[0], "of another batch": table[:2]}.items():
        yield f"block_table {name}", partial(decode, None, bad)
    yield "pages of no size", partial(decode, ints(1, 1, 1), table, page_size=0)
    yield "invariant in 3 splits", partial(decode, splits=3, invariant=True)
    yield "invariant in two passes", partial(decode, splits=-1, invariant=True)
    for name in ("dout", "out"):
        yield f"{name} of another shape", partial(bwd, **{name: rows(2, 6, 4, 64)})
        yield f"{name} of another dtype", partial(bwd, **{name: rows(2, 5, 4, 64).bfloat16()})
    for name in ("lse", "dlse"):
        yield f"{name} on another device", partial(bwd, **{name: rows(2, 4, 5).to("meta")})
        yield f"{name} transposed", partial(bwd, **{name: rows(2, 5, 4)})
        yield f"{name} of another dtype", partial(bwd, **{name: rows(2, 4, 5).bfloat16()})
    yield "s_aux of the backward too short", partial(bwd, s_aux=rows(3))
    for name, changes in {
        "out of another shape": {"out": rows(2, 1, 4, 72)},
        "out of another dtype": {"out": rows(2, 1, 4, 64).half()},
        "out expanded": {"out": rows(1, 1, 1, 64).expand(2, 1, 4, 64)},
        "out unaligned": {"out": rows(513)[1:].view(2, 1, 4, 64)},
        "lse of another shape": {"lse": rows(2, 4, 2)},
        "lse strided": {"lse": rows(4, 2, 1).transpose(0, 1)},
        "scratch too small": {"scratch": torch.zeros(1, dtype=torch.uint8)},
        "scratch of another dtype": {"scratch": rows(2**20)},
    }.items():
        yield f"flash_decode_out {name}", partial(decode_out, **changes)


CALLS = dict([*hostile_offsets(), *hostile_caches(), *malformed()])
CLEAN = {"ValueError", "NotImplementedError", "TypeError", "RuntimeError", "OverflowError"}


def child(first: int) -> None:
    """Runs the calls from the first on, saying which before each, so that a crash has a name."""
    for index, call in list(enumerate(CALLS.values()))[first:]:
        print(f"begin {index}", flush=True)
        try:
            call()
        except Exception as error:
            print(f"raised {type(error).__name__} {' '.join(str(error).split())}", flush=True)
        else:
            print("returned", flush=True)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each call: "raised Type message", "returned" or "crashed"."""
    names, found = list(CALLS), {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    while len(found) < len(names):
        command = [sys.executable, __file__, str(len(found))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        for line in run.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word == "begin":
                at = names[int(rest)]
                found[at] = f"crashed with code {run.returncode}: {run.stderr[-500:]}"
            else:
                found[at] = line
        assert run.stdout, run.stderr
    return found


@pytest.mark.parametrize("name", CALLS)
def test_malformed_call_raises(outcomes: dict[str, str], name: str) -> None:
    word, _, rest = outcomes[name].partition(" ")
    error, _, message = rest.partition(" ")
    assert word == "raised", outcomes[name]
    assert error in CLEAN, outcomes[name]
    assert "INTERNAL ASSERT" not in message, message


def test_there_are_enough() -> None:
    assert len(CALLS) >= 200


@pytest.mark.parametrize("name", [name for name, _ in [*hostile_offsets(), *hostile_caches()]])
def test_hostile_integers_are_named(outcomes: dict[str, str], name: str) -> None:
    """The sentence says which entry was wrong, and that it is a ValueError."""
    assert outcomes[name].startswith("raised ValueError sinkattn: "), outcomes[name]
    assert any(word in outcomes[name] for word in ("cu_seqlens", "cache_seqlens", "block_table"))


def test_valid_neighbours_of_the_malformed_calls_work() -> None:
    good = ints(0, 4, 8, 12)
    for call in (dense, bwd, decode, decode_out, partial(varlen, good, good), partial(varlen_bwd, good, good)):
        call()
    decode(ints(0, 5, 32), torch.arange(12, dtype=torch.int32).view(3, 4), q_len=3)


if __name__ == "__main__":
    child(int(sys.argv[1]))
