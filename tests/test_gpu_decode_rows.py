# SPDX-License-Identifier: Apache-2.0
"""The decodes of many rows of a kv head on compute capability 9.0: against the CPU, and that without swapped operands
bit for bit against the decode of 16 rows a tile, which SINKATTN_CUDA_ARCH=80 selects."""

from typing import Any

import pytest
import torch
from gpu_caches import assert_same, decode_op, no_host_pages
from gpus import launched, needs_gpus

import sinkattn
from sinkattn import _C

pytestmark = [
    needs_gpus(),
    pytest.mark.skipif(
        torch.cuda.device_count() > 0 and torch.cuda.get_device_capability() != (9, 0),
        reason="is for compute capability 9.0",
    ),
]
LENS = [1500, 0, 700, 33, 2048, 1, 90, 64]
ENOUGH = 32 << 20  # bytes of a contiguous cache, with which the planner chooses these decodes; of pages, 8 times
WIDTHS = [
    "64",
    "40",
    "128",
    "96",
    "192-128",
    "160-64",
    "256",
    "200-72",
    "512",
    "512-latent",
    "576-512",
    "576-512-latent",
]
WIDTHS += ["520-456-latent"]


def make(
    widths: str, lens: list[int], ratio: int = 128, q_len: int = 1, page_size: int = 64, kv_heads: int = 1,
    dtype: torch.dtype = torch.bfloat16, spread: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Slots past a sequence's end, and pages that no sequence has, hold NaN. The capacity is large, pages are few."""
    latent = widths.endswith("latent")
    sizes = [int(x) for x in widths.removesuffix("-latent").split("-")]
    head_dim, head_dim_v = sizes[0], sizes[-1]
    generator = torch.Generator("cuda").manual_seed(len(lens) + head_dim)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    enough = 8 * ENOUGH if page_size else ENOUGH
    capacity = enough // (len(lens) * kv_heads * (head_dim + head_dim_v) * 2) // 64 * 64 + 64
    used = torch.tensor(lens, dtype=torch.int32, device="cuda")
    stored = -(-max(*lens, 1) // page_size) * page_size if page_size else max(capacity, *lens)
    k, v = (rand(len(lens), stored, kv_heads, columns).to(dtype) for columns in sizes[:1] + sizes[-1:])
    unseen = (torch.arange(stored, device="cuda") >= used[:, None])[..., None, None]
    k.masked_fill_(unseen, torch.nan)
    v.masked_fill_(unseen, torch.nan)
    table = None
    if page_size:
        count = len(lens) * stored // page_size
        order = torch.randperm(count + 3, device="cuda", generator=generator)
        pages = []
        for x in (k, v):
            pages.append(x.new_full((count + 3, page_size, *x.shape[2:]), torch.nan))
            pages[-1][order[:count]] = x.view(count, page_size, *x.shape[2:])
        k, v = pages
        table = torch.full((len(lens), max(capacity, stored) // page_size + 1), -1, dtype=torch.int32, device="cuda")
        table[:, : stored // page_size] = order[:count].int().view(len(lens), -1)
    if latent:
        v = k[..., :head_dim_v]
    q = (spread * rand(len(lens), q_len, ratio * kv_heads, head_dim)).to(dtype)
    return {"q": q, "k": k, "v": v, "s_aux": 2 * rand(ratio * kv_heads), "cache_seqlens": used, "block_table": table}


def decode(t: dict[str, Any], left: int = -1, num_sink_tokens: int = 0, num_splits: int = 0, scale: Any = None) -> Any:
    host = no_host_pages(t) if t["block_table"] is not None and t["q"].is_cuda else {}
    return decode_op(*t.values(), scale, left, num_sink_tokens, num_splits, False, **host)


def on_cpu(t: dict[str, Any], **options: Any) -> Any:
    pages = int(t["cache_seqlens"].max()) // t["k"].shape[1] + 1
    there = {
        name: None if x is None else x.float().cpu() if x.is_floating_point() else x.cpu() for name, x in t.items()
    }
    if t["block_table"] is not None:
        there["block_table"] = there["block_table"][:, :pages].clamp(min=0)
    return decode(there, **options)


def assert_right(t: dict[str, Any], **options: Any) -> None:
    (out, lse), (want, want_lse) = decode(t, **options), on_cpu(t, **options)
    torch.testing.assert_close(out.float().cpu(), want, rtol=8e-3, atol=2e-3)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-4)
    sinkattn.check_errors()


def is_swapped(t: dict[str, Any], num_splits: int = 0) -> bool:
    rows, head_dim = t["q"].shape[1] * t["q"].shape[2] // t["k"].shape[2], t["q"].shape[3]
    few, most = (17, rows) if head_dim <= 128 else (17, 32) if head_dim <= 256 else (9, 16)
    if t["block_table"] is not None and t["k"].shape[1] % 16:
        few, most = 1, rows if head_dim <= 256 else 16
    return t["v"].shape[3] == head_dim and not num_splits and few <= rows <= most


def assert_runs_here(t: dict[str, Any], num_splits: int = 0, **options: Any) -> None:
    """Of few rows with few keys the general decode is faster."""
    if options and t["q"].shape[1] * t["q"].shape[2] // t["k"].shape[2] <= 32:
        return
    names = launched(lambda: decode(t, num_splits=num_splits, **options))
    kernel = "decode_swapped_kernel" if is_swapped(t, num_splits) else "decode_rows_kernel"
    assert any(kernel in name for name in names), names


MASKS: dict[str, dict[str, int]] = {
    "causal": {}, "window": {"left": 900}, "sink": {"left": 800, "num_sink_tokens": 4},
    "prefix": {"left": 64, "num_sink_tokens": 700},
}  # fmt: skip
ROWS = {"128x4": (128, 4), "16x4": (16, 4), "33x1": (33, 1), "17x3": (17, 3), "5x13": (5, 13)}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("page_size", [0, 16, 48, 256])
@pytest.mark.parametrize("widths", WIDTHS)
def test_rows_are_the_cpus(widths: str, page_size: int, rows: str) -> None:
    ratio, q_len = ROWS[rows]
    t = make(widths, LENS, ratio, q_len, page_size)
    assert_runs_here(t)
    assert_right(t)


@pytest.mark.parametrize("rows", [(8, 1), (5, 3), (16, 4)])
@pytest.mark.parametrize("page_size", [1, 3, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", ["64", "40", "128", "200", "512"])
def test_small_pages(widths: str, dtype: torch.dtype, page_size: int, rows: tuple[int, int]) -> None:
    for mask in MASKS.values():
        t = make(widths, LENS * 12, *rows, page_size, kv_heads=4, dtype=dtype)
        if widths != "512" or rows[0] != 16:  # which are too many
            assert_runs_here(t, **mask)
        assert_right(t, **mask)


@pytest.mark.parametrize("rows", [(16, 1), (3, 4)])
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_wide_rows(dtype: torch.dtype, page_size: int, rows: tuple[int, int]) -> None:
    for mask in MASKS.values():
        t = make("512", LENS * 8, *rows, page_size, dtype=dtype)
        assert_runs_here(t, **mask)
        assert_right(t, **mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", ["64", "128", "192-128", "256", "576-512", "576-512-latent"])
def test_masks(widths: str, dtype: torch.dtype, mask: str) -> None:
    for ratio, q_len in ((128, 1), (16, 4), (40, 7), *(((8, 3),) if "-" not in widths else ())):
        t = make(widths, LENS * 8, ratio, q_len, dtype=dtype, kv_heads=4)
        assert_runs_here(t, **MASKS[mask])
        assert_right(t, **MASKS[mask])


@pytest.mark.parametrize("widths", ["64", "128", "256", "576-512-latent"])
@pytest.mark.parametrize("scale", [-0.3, 3.0])
def test_pivots_that_move(widths: str, scale: float) -> None:
    t = make(widths, LENS, spread=3.0)
    t["s_aux"][:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e4, -1e4])
    (out, lse), (want, want_lse) = decode(t, scale=scale), on_cpu(t, scale=scale)
    torch.testing.assert_close(out.float().cpu(), want, rtol=2e-2, atol=1e-2, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-4, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("num_splits", [1, 3, 40])
@pytest.mark.parametrize("ratio", [33, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", ["64", "40", "128", "192-128", "256", "200-72", "512", "264", "512-latent"])
def test_num_splits_has_the_bits_of_tiles_of_16_rows(
    widths: str, dtype: torch.dtype, ratio: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several: list[tuple[int, int, dict[str, int]]] = [(0, 1, {}), (64, 1, {}), (16, 4, {"left": 900})]
    for page_size, kv_heads, options in [*several, (64, 4, {"left": 700, "num_sink_tokens": 70})]:
        t = make(widths, LENS * (12 if options else 2), ratio, 1, page_size, kv_heads, dtype, spread=2.0)
        monkeypatch.delenv("SINKATTN_CUDA_ARCH", raising=False)
        assert_runs_here(t, num_splits=num_splits, **options)
        got = decode(t, num_splits=num_splits, **options)
        monkeypatch.setenv("SINKATTN_CUDA_ARCH", "80")
        assert_same(got, decode(t, num_splits=num_splits, **options))


@pytest.mark.parametrize("widths", ["512", "512-latent"])
def test_a_part_of_several_tokens_has_the_bits_of_tiles_of_16_rows(
    widths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one team a row's bits do not depend on where its tile of rows begins to see keys."""
    t = make(widths, [200, 0, 150, 33, 300, 1] * 64, 16, 4, 64)
    monkeypatch.delenv("SINKATTN_CUDA_ARCH", raising=False)
    assert_runs_here(t, left=120)
    got = decode(t, left=120)
    monkeypatch.setenv("SINKATTN_CUDA_ARCH", "80")
    assert_same(got, decode(t, left=120))


NONFINITE = [(widths, 64, q_len) for widths in ("64", "128", "256", "576-512") for q_len in (1, 4)]
NONFINITE += [("128", 6, 4), ("256", 6, 4), ("64", 16, 4), ("512", 4, 4)]


@pytest.mark.parametrize(("widths", "ratio", "q_len"), NONFINITE)
def test_values_that_are_not_finite(widths: str, ratio: int, q_len: int) -> None:
    """In keys of a tile that only some rows see, and in one that all see; slots past the end hold NaN."""
    t = make(widths, [1000, 700], ratio, q_len, 0, kv_heads=4)
    assert_runs_here(t)
    t["v"][0, 998, :, 3], t["v"][1, 100, :, 40] = torch.inf, torch.nan
    (out, lse), (want, _) = decode(t), on_cpu(t)
    torch.testing.assert_close(out.float().cpu(), want, rtol=8e-3, atol=2e-3, equal_nan=True)
    assert lse.isfinite().all()


@pytest.mark.parametrize("lengths", ["equal", "any", "few"])
@pytest.mark.parametrize("widths", ["64", "128", "256", "512", "576-512-latent"])
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 16, 40, 67, 150, 400])
def test_parts_and_shares(widths: str, lengths: str, batch: int, seed: int) -> None:
    """Few streams have their parts in clusters: several a stream, or with parts of several streams."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 1500, (batch,), generator=generator)
    lens[batch // 2], lens[-1], lens[0] = 0, 3, 1500
    if lengths == "equal":
        lens[:] = 1500
    if lengths == "few":
        lens[torch.rand(batch, generator=generator) < 0.9] = 0
    ratio = 8 if widths == "512" else 37 if batch in (3, 5) else 32 if batch > 100 else 128
    t = make(widths, lens.tolist(), ratio, 2, kv_heads=3 if batch == 2 else 1)
    assert_runs_here(t)
    got = decode(t)
    assert_right(t)
    for _ in range(20):
        assert_same(decode(t), got)
    sinkattn.check_errors()


@pytest.mark.parametrize("widths", ["128", "576-512-latent"])
def test_hostile_lengths_and_tables(widths: str) -> None:
    t = make(widths, LENS)
    t["cache_seqlens"] = torch.tensor([-5, 2**31 - 1, 700, 33, 2048, 1, 90, 64], dtype=torch.int32, device="cuda")
    t["block_table"][2, :3] = torch.tensor([2**31 - 1, -7, 10**6])
    decode(t)
    with pytest.raises(ValueError, match=r"cache_seqlens .*block_table"):
        sinkattn.check_errors()


@pytest.mark.parametrize("widths", ["64", "128", "576-512-latent"])
def test_a_graph_follows_the_lengths(widths: str) -> None:
    t = make(widths, [2048] * 4, kv_heads=2)
    assert_runs_here(t)
    decode(t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(t)
    for lens in ([2048, 3, 0, 500], [1, 1, 1, 2048], [700, 800, 900, 1000]):
        t["cache_seqlens"].copy_(torch.tensor(lens))
        graph.replay()
        assert_same(captured, decode(t))


@pytest.mark.parametrize(("widths", "page_size"), [("64", 1), ("64", 64), ("128", 64), ("576-512-latent", 64)])
def test_pages_in_host_memory(widths: str, page_size: int) -> None:
    t = make(widths, [900, 40], 64, page_size=page_size, kv_heads=4)
    assert_runs_here(t)
    want = decode(t)
    host = {name: x.cpu().pin_memory() for name, x in (("k", t["k"]), ("v", t["v"]))}
    if widths.endswith("latent"):
        host["v"] = host["k"][..., :512]
    options: dict[str, Any] = {
        "cache_seqlens": t["cache_seqlens"],
        "causal": True,
        "s_aux": t["s_aux"],
        "return_lse": True,
    }
    table = torch.where(t["block_table"] % 2 == 1, t["block_table"] + len(t["k"]), t["block_table"])
    table = torch.where(t["block_table"] < 0, t["block_table"], table)
    got = sinkattn.flash_attn_with_kvcache(
        t["q"], t["k"], t["v"], block_table=table, k_cache_host=host["k"], v_cache_host=host["v"], **options
    )
    assert_same(got, want)


def test_the_plan_names_it() -> None:
    device = _C.query_cuda(0)
    sizes: dict[str, Any] = {"dtype": "bf16", "batch": 16, "num_q_heads": 128, "num_kv_heads": 1, "q_len": 1}
    found = {
        (head_dim, k_len): sinkattn.plan("decode", device, head_dim=head_dim, k_len=k_len, **sizes)["variant"]
        for head_dim in (64, 128) for k_len in (64, 32768)
    }  # fmt: skip
    assert found == {
        (64, 64): "sa_decode_cuda_sm80_d64", (64, 32768): "sa_decode_cuda_sm90_swapped_d64",
        (128, 64): "sa_decode_cuda_sm80_d128", (128, 32768): "sa_decode_cuda_sm90_swapped_d128",
    }  # fmt: skip
