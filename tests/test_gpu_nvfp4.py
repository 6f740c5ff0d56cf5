# SPDX-License-Identifier: Apache-2.0
"""A CUDA decode's out in NVFP4: the bits of the reference quantiser."""

import pytest
import torch
from gpu_caches import LENS, arguments, make_cache, no_host_pages
from gpus import launched, needs_gpus
from test_nvfp4 import assert_packed, edges, of_one_key

pytestmark = needs_gpus()
ops = torch.ops.sinkattn


@pytest.mark.parametrize("global_scale", [1.0, 0.3, 2e-38, 1e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_edges_of_the_formats(dtype: torch.dtype, global_scale: float) -> None:
    call = [x.cuda() if isinstance(x, torch.Tensor) else x for x in of_one_key(edges(dtype))]
    assert_packed(ops.flash_decode_nvfp4(*call, global_scale), ops.flash_decode(*call), global_scale)


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"left": 127, "num_sink_tokens": 4}])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("widths", [(16,), (48,), (64,), (128,), (192, 128), (208,), (256, 48), (256,), (512,)])
def test_it_is_the_quantiser_of_out(widths: tuple[int, ...], q_len: int, options: dict[str, int]) -> None:
    sizes = dict(zip(("head_dim", "head_dim_v"), widths, strict=False))
    for lens in (LENS, LENS[:1], [40] * 300):  # blocks of 4, 8 and 1 warps at head_dim 64
        t = make_cache(lens, 16, capacity=2048 if lens != [40] * 300 else 64, kv_heads=2, q_len=q_len, **sizes)
        call = arguments(t, **options)
        assert_packed(ops.flash_decode_nvfp4(*call, 2.0), ops.flash_decode(*call, **no_host_pages(t)), 2.0)


@pytest.mark.parametrize("lens", [[1900], [1500, 3, 0, 700] * 16], ids=["clusters", "pairs"])
def test_it_is_the_quantiser_of_eight_heads(lens: list[int]) -> None:
    call = arguments(make_cache(lens, 64, capacity=4096))
    assert_packed(ops.flash_decode_nvfp4(*call, 2.0), ops.flash_decode(*call), 2.0)


def test_it_is_one_launch() -> None:
    call = arguments(make_cache(LENS, 64))
    ops.flash_decode_nvfp4(*call)
    torch.cuda.synchronize()
    on_gpu = launched(lambda: ops.flash_decode_nvfp4(*call))
    assert len(on_gpu) == 1, on_gpu
    assert "decode_kernel" in on_gpu[0]


@pytest.mark.parametrize(("head_dim", "left"), [(64, 127), (64, -1), (128, -1)])
def test_invariant_has_it_too(head_dim: int, left: int) -> None:
    call = arguments(make_cache(LENS, 64, head_dim=head_dim, kv_heads=2), left=left)[:-1]
    assert_packed(ops.flash_decode_nvfp4(*call, True, 2.0), ops.flash_decode(*call, True), 2.0)


def test_invariant_has_none_above_head_dim_128() -> None:
    t = make_cache(LENS, head_dim=256, kv_heads=2)
    with pytest.raises(NotImplementedError, match="quantise out afterwards"):
        ops.flash_decode_nvfp4(*arguments(t)[:-1], True)
