# SPDX-License-Identifier: Apache-2.0
"""The backward on a CUDA device. SINKATTN_GPU_REPEATS is the number of repeats that must agree."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from gpu_cases import assert_right_on_device, gpt_oss_like
from gpus import different_under_load, needs_gpus
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sinkattn
from sinkattn._testing import Case, make_inputs, restride

pytestmark = needs_gpus()


@pytest.mark.parametrize("ratio", [1, 5, 7, 8, 12, 16, 64])
@pytest.mark.parametrize("left", [0, 1, 63, 64, 126, 127, 128])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_gradients_of_local_windows(ratio: int, left: int, layout: str) -> None:
    """Chunks, rows before all keys, empty sequences, a tail, and what nobody sees not finite."""
    lens = "q290x2-k350x2" if layout == "dense" else "varlen-q290.0.7.101.1-k290.5.200.60.1-tail5"
    assert_right_on_device(Case.parse(f"d64-causal-w{left + 1}-g{ratio}-{lens}-poison-bf16-seed{ratio}"))


@pytest.mark.parametrize("head_dim", [8, 40, 64])
@pytest.mark.parametrize(
    ("s_dtype", "s_aux", "frozen"), [("bf16", "rand", False), ("fp32", "mix", True), ("fp32", "none", False)]
)
def test_gradients_of_a_local_window_in_fp16(head_dim: int, s_dtype: str, s_aux: str, frozen: bool) -> None:
    case = Case.parse(f"d{head_dim}-causal-w128-g8-h2-varlen-q130.300-k130.300-fp16-seed2")
    assert_right_on_device(dataclasses.replace(case, s_aux=s_aux, s_dtype=s_dtype, frozen=frozen))


@pytest.mark.parametrize("ratio", [1, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("left", [0, 90, 127, 128])
@pytest.mark.parametrize("widths", ["72", "128", "192-v128", "136-v40"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_gradients_of_local_windows_of_wide_heads(ratio: int, left: int, widths: str, layout: str) -> None:
    """As above. Ratios of which a tile sees at most 160 keys, and others."""
    lens = "q290x2-k350x2" if layout == "dense" else "varlen-q290.0.7.101.1-k290.5.200.60.1-tail5"
    dtype = "bf16" if left % 2 else "fp16"
    assert_right_on_device(Case.parse(f"d{widths}-causal-w{left + 1}-g{ratio}-{lens}-poison-{dtype}-seed{ratio}"))


@pytest.mark.parametrize("ratio", [1, 5, 7, 8, 16, 24])
@pytest.mark.parametrize("widths", ["40", "64", "88", "120", "128", "160-v96", "256"])
@pytest.mark.parametrize(
    ("left", "right", "num_sink_tokens"), [(-1, 0, 0), (299, 0, 0), (200, 90, 0), (-1, -1, 0), (299, 0, 140)]
)
def test_gradients_of_wide_masks(ratio: int, widths: str, left: int, right: int, num_sink_tokens: int) -> None:
    """Rows that meet one key block and many, ratios that do not divide a tile, empty sequences, rows without keys."""
    lens = "q420.0.300.90-k420.9.200.500-tail5"
    case = Case.parse(f"d{widths}-sink{num_sink_tokens}-g{ratio}-varlen-{lens}-poison-bf16-seed{ratio}")
    assert_right_on_device(dataclasses.replace(case, left=left, right=right))


@pytest.mark.parametrize(("left", "right"), [(127, 0), (-1, 0), (127, 40), (-1, -1)])
@pytest.mark.parametrize("num_sink_tokens", [0, 4, 200])
@pytest.mark.parametrize("widths", ["64", "128", "256", "192-v128"])
def test_gradients_of_sequences_of_many_tiles(left: int, right: int, num_sink_tokens: int, widths: str) -> None:
    lens = "q500.0.60-k450.9.300-tail5"
    case = Case.parse(f"d{widths}-sink{num_sink_tokens}-g3-varlen-{lens}-poison-bf16-seed{widths[:2]}")
    assert_right_on_device(dataclasses.replace(case, left=left, right=right))


@pytest.mark.parametrize("s", [-4.0, 0.0, 3.0])
@pytest.mark.parametrize("left", [127, -1])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ds_aux_is_exact_where_it_cancels(s: float, left: int, dtype: str) -> None:
    """Within 1e-5 of the sum of the absolute terms, at a length where a delta from the rounded out is far off."""
    case = Case(left=left, right=0, ratio=2, q_lens=(2048,), k_lens=(2048,), dlse=False, dtype=dtype, seed=3)
    t = make_inputs(case)
    assert_right_on_device(case, dataclasses.replace(t, s_aux=torch.full((2,), s, requires_grad=True)))


def gradients(
    q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, cu: Tensor | list[Tensor] | None = None, **options: object
) -> tuple[Tensor, ...]:
    """dO and dLSE are made of a row's own q, so that it is the same row anywhere."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
    options |= {"s_aux": leaves[3], "return_lse": True}
    if cu is None:
        out, lse = sinkattn.flash_attn_func(*leaves[:3], **options)
    else:
        out, lse = sinkattn.flash_attn_varlen_func(*leaves[:3], *(cu if isinstance(cu, list) else [cu, cu]), **options)
    dlse = q[..., 0].float().transpose(-1, -2).contiguous()
    return out.detach(), *torch.autograd.grad((out, lse), leaves, (q.roll(1, -1)[..., : v.shape[-1]], dlse))


def test_gradients_of_a_long_sequence_are_the_same_packed() -> None:
    """More tiles than there are slots: dK and dV are summed in rounds."""
    torch.manual_seed(0)
    q = torch.randn(1, 19500, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 19500, 1, 64, device="cuda", dtype=torch.bfloat16)
    s_aux = torch.randn(8, device="cuda")
    cu = torch.tensor([0, 300, 19500], dtype=torch.int32, device="cuda")
    packed = gradients(*(x[0] for x in (q, k, v)), s_aux, cu, causal=True)
    for begin, end in ((0, 300), (300, 19500)):
        alone = gradients(*(x[:, begin:end] for x in (q, k, v)), s_aux, causal=True)
        assert all(torch.equal(x[begin:end], y[0]) for x, y in zip(packed[:4], alone[:4], strict=True))


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (511, 0)])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 1), (64, 8), (128, 1)])
def test_packed_sequences_side_by_side_have_their_own_bits(window: tuple[int, int], head_dim: int, heads: int) -> None:
    """Their items are taken in turn, so that all end together."""
    torch.manual_seed(0)
    bounds = (0, 190, 1290, 2280, 2280, 3310, 3438, 4438, 4439, 4568, 5538)
    q = torch.randn(bounds[-1], heads * 8, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, bounds[-1], heads, head_dim, device="cuda", dtype=torch.bfloat16)
    s_aux = torch.randn(heads * 8, device="cuda")
    packed = gradients(q, k, v, s_aux, torch.tensor(bounds, dtype=torch.int32, device="cuda"), window_size=window)
    for begin, end in pairwise(bounds):
        if begin < end:
            alone = gradients(*(x[None, begin:end] for x in (q, k, v)), s_aux, window_size=window)
            assert all(torch.equal(x[begin:end], y[0]) for x, y in zip(packed[:4], alone[:4], strict=True))


@pytest.mark.parametrize("window", [(-1, 0), (127, 0), (100, 30)])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_gradients_are_the_same_packed_and_one_by_one(window: tuple[int, int], head_dim: int, head_dim_v: int) -> None:
    q, k, v, s_aux = gpt_oss_like(1, 4000, head_dim)  # wide windows: whole blocks of keys packed, halves alone
    v = v[..., :head_dim_v]
    bounds = (0, 333, 334, 4000)
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    packed = gradients(q[0], k[0], v[0], s_aux, cu, window_size=window)
    alone = [gradients(*(x[:, a:b] for x in (q, k, v)), s_aux, window_size=window) for a, b in pairwise(bounds)]
    for got, *want in zip(packed[:4], *(x[:4] for x in alone), strict=True):
        assert torch.equal(got, torch.cat(want, 1)[0])
    torch.testing.assert_close(packed[4], sum(x[4] for x in alone), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("window", [(-1, 0), (127, 0)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_dq_of_a_chunk_is_that_of_the_whole(window: tuple[int, int], head_dim: int) -> None:
    q, k, v, s_aux = gpt_oss_like(1, 700, head_dim)
    dq = gradients(q, k, v, s_aux, window_size=window)[1]
    chunk = gradients(q[:, 300:500], k[:, :500], v[:, :500], s_aux, window_size=window)[1]
    assert torch.equal(chunk, dq[:, 300:500])


@pytest.mark.parametrize(("left", "right", "num_sink_tokens"), [(-1, 0, 0), (-1, 0, 3), (-1, -1, 0), (99, 40, 130)])
@pytest.mark.parametrize("lens", ["q150.0.140.70-k150.9.100.260-tail5", "q140x2-k140x2", "q250-k130", "q140-k300"])
@pytest.mark.parametrize("widths", ["64", "128", "256", "192-v128"])
def test_gradients_in_rounds(left: int, right: int, num_sink_tokens: int, lens: str, widths: str) -> None:
    """One kv head of 64 query heads: few key blocks of many row tiles, whose items are rounds of them."""
    layout = "varlen-" if "tail" in lens else ""
    case = Case.parse(f"d{widths}-sink{num_sink_tokens}-g64-{layout}{lens}-poison-bf16-seed{widths[:2]}")
    assert_right_on_device(dataclasses.replace(case, left=left, right=right))


@pytest.mark.parametrize("lens", ["varlen-q290.0.7.101.1-k290.5.200.60.1-tail5", "q250x2-k250x2"])
@pytest.mark.parametrize("mask", ["causal", "causal-w128", "causal-w128-sink3", "sink0"])
@pytest.mark.parametrize(
    "heads", ["d64-g71", "d128-g128", "d64-g96", "d128-g71", "d128-g72-h2", "d256-g71", "d192-v128-g96"]
)
def test_gradients_of_many_query_heads(heads: str, mask: str, lens: str) -> None:
    """Slices of 8 heads, the last of 71 with 7."""
    assert_right_on_device(Case.parse(f"{heads}-{mask}-{lens}-poison-bf16-seed1"))


@pytest.mark.parametrize(
    ("window", "num_sink_tokens"),
    [((-1, 0), 0), ((-1, -1), 0), ((9300, 0), 0), ((255, 0), 0), ((300, 0), 140), ((130, 20), 1)],
)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "ratio", "heads"),
    [
        *((64, 64, 8, 8), (64, 64, 5, 8), (96, 96, 4, 8), (128, 128, 8, 8), (128, 128, 12, 8), (256, 256, 8, 8)),
        *((192, 128, 8, 8), (64, 64, 8, 1), (128, 128, 8, 1), (128, 128, 24, 1), (64, 64, 71, 1), (128, 128, 96, 1)),
    ],
)
def test_rounds_are_the_same_alone_and_in_whole_items(
    window: tuple[int, int], num_sink_tokens: int, head_dim: int, head_dim_v: int, ratio: int, heads: int
) -> None:
    """Alone an item is a round; in a batch of many key blocks it is a whole block, and adds its rounds itself."""
    mask = {"window_size": window, "num_sink_tokens": num_sink_tokens}
    torch.manual_seed(0)
    q = torch.randn(9, 1030, heads * ratio, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 9, 1030, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    v, s_aux = v[..., :head_dim_v], torch.randn(heads * ratio, device="cuda")
    whole = gradients(q, k, v, s_aux, **mask)
    cu = torch.arange(10, dtype=torch.int32, device="cuda") * 1030
    packed = gradients(*(x.flatten(0, 1) for x in (q, k, v)), s_aux, cu, **mask)
    for b in (0, 8):
        alone = gradients(*(x[b : b + 1] for x in (q, k, v)), s_aux, **mask)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(whole[:4], alone[:4], strict=True))
    assert all(torch.equal(x, y.flatten(0, 1)) for x, y in zip(packed[:4], whole[:4], strict=True))


@pytest.mark.parametrize("length", [480, 516])
@pytest.mark.parametrize(
    ("head_dim", "ratio", "window"), [(64, 8, (-1, 0)), (64, 48, (0, -1)), (128, 8, (-1, 0)), (256, 8, (300, 0))]
)
def test_few_key_blocks_have_their_bits_among_many(
    length: int, head_dim: int, ratio: int, window: tuple[int, int]
) -> None:
    """Alone they leave dQ apart, among many they add it in turn; keys that no row sees are items among the others."""
    torch.manual_seed(0)
    q = torch.randn(6, length, ratio, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 6, length + 128, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    s_aux = torch.randn(ratio, device="cuda")
    cu = [torch.arange(7, dtype=torch.int32, device="cuda") * x.shape[1] for x in (q, k)]
    packed = gradients(*(x.flatten(0, 1) for x in (q, k, v)), s_aux, cu, window_size=window)
    for b in range(6):
        alone = gradients(*(x[b : b + 1] for x in (q, k, v)), s_aux, window_size=window)
        for x, y in zip(packed[:4], alone[:4], strict=True):
            assert torch.equal(x.unflatten(0, (6, -1))[b], y[0])


@pytest.mark.parametrize("left", [15, 128])
@pytest.mark.parametrize("ratio", [1, 3, 6, 8, 64])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(96, 96), (128, 128), (192, 128)])
def test_a_window_of_wide_heads_has_the_general_kernel_s_gradients(
    head_dim: int, head_dim_v: int, ratio: int, left: int
) -> None:
    """With a positional sink token that has no weight anywhere the general kernel serves the same function."""
    torch.manual_seed(ratio)
    q = torch.randn(2, 700, 2 * ratio, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 700, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    q[..., 0], k[:, 0], v = 4.0, 0.0, v[..., :head_dim_v]
    k[:, 0, :, 0] = -3e4
    s_aux = torch.randn(2 * ratio, device="cuda")
    own = gradients(q, k, v, s_aux, window_size=(left, 0))
    general = gradients(q, k, v, s_aux, window_size=(left, 0), num_sink_tokens=1)
    for x, y in zip(own, general, strict=True):
        assert (x.double() - y.double()).norm() <= 5e-3 * y.double().norm()
    chunk = gradients(q[:, 333:], k, v, s_aux, window_size=(left, 0))
    assert torch.equal(chunk[1], own[1][:, 333:])
    one = gradients(q[1:], k[1:], v[1:], s_aux, window_size=(left, 0))
    assert all(torch.equal(x[0], y[1]) for x, y in zip(one[:4], own[:4], strict=True))


@pytest.mark.parametrize(("length", "left", "heads"), [(300, 99, 16), (16500, 511, 2)])
def test_gradients_of_a_batch_are_one_by_one(length: int, left: int, heads: int) -> None:
    """Also of single heads that are side by side, whose windows reach over several key blocks."""
    q, k, v, s_aux = gpt_oss_like(3, length)
    q, s_aux = q[:, :, :heads], s_aux[:heads]
    whole = gradients(q, k, v, s_aux, window_size=(left, 0))
    for b in range(3):
        alone = gradients(*(x[b : b + 1] for x in (q, k, v)), s_aux, window_size=(left, 0))
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(whole[:4], alone[:4], strict=True))


@pytest.mark.parametrize(("left", "num_sink_tokens"), [(127, 0), (127, 3), (40, 0), (0, 0), (1024, 0)])
@pytest.mark.parametrize("group", [1, 8])
def test_gradients_of_chunks_are_one_by_one(left: int, num_sink_tokens: int, group: int) -> None:
    """Several chunks of few rows and many keys a thread block; most keys are in no window, and have gradients of 0."""
    torch.manual_seed(group)
    q = torch.randn(30, 70, 24 * group, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 30, 1500, 24, 64, device="cuda", dtype=torch.bfloat16)
    s_aux, mask = torch.randn(24 * group, device="cuda"), {"window_size": (left, 0), "num_sink_tokens": num_sink_tokens}
    whole = gradients(q, k, v, s_aux, **mask)
    cu = [torch.arange(31, dtype=torch.int32, device="cuda") * x.shape[1] for x in (q, k)]
    packed = gradients(*(x.flatten(0, 1) for x in (q, k, v)), s_aux, cu, **mask)
    assert all(torch.equal(x, y.flatten(0, 1)) for x, y in zip(packed[:4], whole[:4], strict=True))
    for x in whole[2:4]:
        assert not x[:, num_sink_tokens : 1430 - left].any()
        assert x[:, 1430 - left :].any(-1).all()
    for b in (0, 17, 29):
        alone = gradients(*(x[b : b + 1] for x in (q, k, v)), s_aux, **mask)
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(whole[:4], alone[:4], strict=True))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "window", "num_sink_tokens"),
    [
        (64, 64, (-1, 0), 0),
        (64, 64, (-1, -1), 0),
        (64, 64, (127, 0), 0),
        (128, 128, (-1, 0), 0),
        (128, 128, (127, 0), 130),
        (256, 256, (-1, 0), 0),
        (128, 128, (127, 0), 0),
        (192, 128, (127, 0), 0),
    ],
)
def test_gradients_repeat_bitwise_under_load(
    head_dim: int, head_dim_v: int, window: tuple[int, int], num_sink_tokens: int
) -> None:
    q, k, v, s_aux = gpt_oss_like(1, 1000, head_dim)
    v = v[..., :head_dim_v]
    mask = {"window_size": window, "num_sink_tokens": num_sink_tokens}
    assert different_under_load(lambda: gradients(q, k, v, s_aux, **mask)) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_that_are_not_finite_stay_where_they_belong(value: float, head_dim: int) -> None:
    """Under a window of 64: NaN in key 300 and row 200, `value` in the value of key 301 and the dO of row 201."""
    q, k, v, s_aux = gpt_oss_like(1, 500, head_dim)
    clean = [q, k, v, torch.randn_like(q)]
    bad_q, bad_k, bad_v, bad_dout = bad = [x.clone() for x in clean]
    bad_q[0, 200, 0, 1], bad_k[0, 300, :, 3] = torch.nan, torch.nan
    bad_dout[0, 201, 0, 2], bad_v[0, 301, :, 5] = value, value

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out = sinkattn.flash_attn_func(*leaves, window_size=(63, 0), s_aux=s_aux)
        return tuple(x.cpu() for x in torch.autograd.grad(out, leaves, inputs[3]))

    dq, dk, dv = touched = [torch.zeros(x[0].shape, dtype=torch.bool) for x in clean[:3]]
    dq[200:202, 0] = dq[300:365] = True
    dk[137:202, 0] = dk[237:365] = True
    dv[137:201, 0] = dv[237:364] = dv[201, 0, 2] = True  # P is fine where only dO or a value is not
    for got, want, where in zip(run(*bad), run(*clean), touched, strict=True):
        assert not torch.isfinite(got[0][where]).any()
        assert torch.equal(got[0][~where], want[0][~where])


def test_layouts_of_dout() -> None:
    """.sum() hands back an expanded gradient, a transpose after the attention a transposed one."""
    q, k, v, s_aux = gpt_oss_like(2, 200)
    for seed in (torch.ones_like(q), torch.randn_like(q)):
        results = []
        for dout in (seed, seed.new_ones(()).expand_as(q) if seed.min() == 1 else restride(seed, "transposed")):
            leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
            out = sinkattn.flash_attn_func(*leaves[:3], causal=True, s_aux=leaves[3])
            results.append(torch.autograd.grad(out, leaves, dout))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_inputs_and_checkpoint() -> None:
    tensors = gpt_oss_like(1, 300)

    def run(checkpointed: bool, learns: Sequence[bool]) -> list[Tensor | None]:
        leaves = [x.detach().requires_grad_(yes) for x, yes in zip(tensors, learns, strict=True)]

        def attend(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
            return sinkattn.flash_attn_func(q, k, v, window_size=(127, 0), s_aux=s_aux)

        out = checkpoint(attend, *leaves, use_reentrant=False) if checkpointed else attend(*leaves)
        out.sum().backward()
        return [x.grad for x in leaves]

    plain = run(False, [True] * 4)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(True, [True] * 4), strict=True))
    for learns in product((True, False), repeat=4):
        if any(learns):
            grads = run(False, learns)
            assert [grad is not None for grad in grads] == list(learns)
            assert all(a is None or torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


@pytest.mark.parametrize(("q_len", "k_len", "batch"), [(0, 100, 1), (100, 0, 2), (0, 0, 1), (50, 50, 0)])
@pytest.mark.parametrize("window", [(-1, -1), (127, 0)])
def test_gradients_of_nothing(window: tuple[int, int], q_len: int, k_len: int, batch: int) -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(batch, n, h, 64, **options) for n, h in ((q_len, 16), (k_len, 2), (k_len, 2)))
    s_aux = torch.randn(16, device="cuda", requires_grad=True)
    out, lse = sinkattn.flash_attn_func(q, k, v, s_aux=s_aux, window_size=window, return_lse=True)
    *grads, ds_aux = torch.autograd.grad((out, lse), (q, k, v, s_aux), (torch.ones_like(out), torch.ones_like(lse)))
    assert not any(x.any() for x in grads)
    assert torch.equal(ds_aux, torch.full_like(ds_aux, batch * q_len))  # a row without keys adds g
