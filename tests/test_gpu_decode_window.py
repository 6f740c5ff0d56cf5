# SPDX-License-Identifier: Apache-2.0
"""Invariant decodes under windows that fit one key tile: a row has the bits of the prefill's."""

import pytest
import torch
from gpu_caches import assert_same
from gpus import captured, launched, needs_gpus
from torch import Tensor

import sinkattn
from sinkattn import _C

pytestmark = needs_gpus()
ops = torch.ops.sinkattn
# tokens, q heads, kv heads, head_dim, left, sink tokens, factor of q
SHAPES = {
    "gpt-oss": (1500, 64, 8, 64, 127, 0, 1),
    "large scores": (1500, 64, 8, 64, 127, 0, 40),
    "group of 4": (700, 16, 4, 64, 100, 0, 1),
    "head_dim 40": (900, 16, 2, 40, 127, 0, 3),
    "group of 2": (600, 8, 4, 64, 112, 0, 1),
    "head_dim 8": (300, 8, 1, 8, 5, 0, 1),
    "144 keys": (1500, 64, 8, 64, 136, 0, 1),
    "itself": (400, 8, 1, 64, 0, 0, 1),
    "group of 16": (500, 32, 2, 64, 127, 0, 1),
    "group of 64": (300, 64, 1, 64, 90, 3, 1),
    "sink tokens": (1500, 64, 8, 64, 127, 4, 1),
    "16 sink tokens": (900, 16, 2, 56, 136, 16, 20),
}


def served() -> bool:
    return _C.query_cuda(0)["arch"] == 90


class Sequence:
    def __init__(self, shape: str, dtype: torch.dtype, s_aux: bool = True) -> None:
        self.tokens, self.heads, self.kv_heads, self.head_dim, self.left, self.num_sink, factor = SHAPES[shape]
        generator = torch.Generator("cuda").manual_seed(self.tokens)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device="cuda")

        self.q = (draw(1, self.tokens, self.heads, self.head_dim) * factor).to(dtype)
        self.k, self.v = (draw(1, self.tokens, self.kv_heads, self.head_dim).to(dtype) for _ in range(2))
        self.s_aux = draw(self.heads) if s_aux else None
        self.want = ops.flash_attn_fwd_raw(
            self.q, self.k, self.v, self.s_aux, None, None, None, None, None, self.left, 0, self.num_sink
        )

    def pages(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V in shuffled pages, NaN after the last key, and a row of the block table."""
        count = -(-self.tokens // size)
        order = torch.randperm(count, device="cuda")
        caches = []
        for x in (self.k, self.v):
            cache = torch.full((count * size, *x.shape[2:]), torch.nan, device="cuda", dtype=x.dtype)
            cache[: self.tokens] = x[0]
            caches.append(torch.empty_like(cache.view(count, size, *x.shape[2:])))
            caches[-1][order] = cache.view(count, size, *x.shape[2:])
        return caches[0], caches[1], order.int()

    def check(self, ends: list[int], rows: int, page_size: int) -> None:
        batch, table = len(ends), None
        k, v = (x.expand(batch, -1, -1, -1) for x in (self.k, self.v))
        if page_size:
            k, v, order = self.pages(page_size)
            table = order.repeat(batch, 1)
        picked = torch.stack([torch.arange(end - rows, end) for end in ends])
        got = ops.flash_decode_raw(
            self.q[0, picked], k, v, self.s_aux, torch.tensor(ends, dtype=torch.int32, device="cuda"), table, None,
            self.left, self.num_sink, 0, True,
        )  # fmt: skip
        out, *stats = self.want
        assert_same(got, (out[0, picked], *(x[0, :, picked].movedim(1, 0) for x in stats)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_is_the_prefills_row(shape: str, dtype: torch.dtype) -> None:
    """Of few sequences by four warps each, of many by one."""
    if not served():
        pytest.skip("the kernel is for 9.0")
    sequence = Sequence(shape, dtype, s_aux=shape != "group of 4")
    generator = torch.Generator().manual_seed(1)
    for page_size in (0, 1, 16, 24, 64):
        for rows in (1, 3, 9):
            for batch in (3, 500):
                ends = torch.randint(rows, sequence.tokens + 1, (batch - 2,), generator=generator).tolist()
                sequence.check([rows, *ends, sequence.tokens], rows, page_size)
    sinkattn.check_errors()


def test_the_plan_takes_it() -> None:
    if not served():
        pytest.skip("the kernel is for 9.0")
    sizes = {"dtype": "bf16", "batch": 1, "num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "k_len": 4096}
    window = sizes | {"window_size_left": 127, "window_size_right": 0}
    cases = [(1, False, "sm80_d64"), (1, True, "sm90_window"), (2, False, "sm80_d64"), (2, True, "sm90_window")]
    for q_len, invariant, name in cases:
        plan = sinkattn.plan("decode", _C.query_cuda(0), q_len=q_len, invariant=invariant, **window)
        assert plan["variant"] == f"sa_decode_cuda_{name}"


@pytest.mark.parametrize("batch", [2, 300])
def test_lengths_and_pages_change_between_replays(batch: int) -> None:
    """Also right before the decode, which reads them before the kernel in front ends."""
    sequence = Sequence("gpt-oss", torch.bfloat16)
    k, v, order = (torch.nan_to_num(x) for x in sequence.pages(16))
    q = torch.randn(batch, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    lens = torch.ones(batch, dtype=torch.int32, device="cuda")
    table = order.repeat(batch, 1)
    new_lens, new_table = lens.clone(), table.clone()
    found: list[Tensor] = []

    def step() -> None:
        lens.copy_(new_lens)
        table.copy_(new_table)
        found[:] = ops.flash_decode(q, k, v, None, lens, table, None, 127, 0, 0, True)

    graph = captured(step)
    generator = torch.Generator().manual_seed(batch)
    for top in (1500, 1, 200, 0, 1500):
        new_lens.copy_(torch.randint(0, top + 1, (batch,), generator=generator))
        new_table.copy_(order.repeat(batch, 1).roll(top % 7, 1))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(tuple(found), ops.flash_decode(q, k, v, None, new_lens, new_table, None, 127, 0, 0, True))


def test_it_is_one_launch() -> None:
    sequence = Sequence("gpt-oss", torch.bfloat16)
    length = torch.full((1,), 900, dtype=torch.int32, device="cuda")

    def call() -> None:
        ops.flash_decode(sequence.q[:, :1], sequence.k, sequence.v, None, length, None, None, 127, 0, 0, True)

    call()
    on_gpu = launched(call)
    assert len(on_gpu) == 1, on_gpu
    assert "decode_kernel" in on_gpu[0]


def test_pages_outside_the_cache() -> None:
    sequence = Sequence("gpt-oss", torch.bfloat16)
    k, v, order = sequence.pages(16)
    table, length = order[None].clone(), torch.full((1,), 900, dtype=torch.int32, device="cuda")

    def decode() -> tuple[Tensor, ...]:
        return ops.flash_decode(sequence.q[:, :1], k, v, None, length, table, None, 127, 0, 0, True)

    want = decode()
    table[0, :48] = -1  # before the window of keys 772 to 899
    assert_same(decode(), want)
    sinkattn.check_errors()
    table[0, 50] = 2**31 - 1
    decode()
    with pytest.raises(ValueError, match="block_table named a page outside"):
        sinkattn.check_errors()
    length.fill_(2**31 - 1)
    decode()
    with pytest.raises(ValueError, match="cache_seqlens was negative"):
        sinkattn.check_errors()
