# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and torch.compile around forwards and backwards."""

import torch
from gpu_cases import gpt_oss_like
from gpus import needs_gpus
from torch import Tensor

import sinkattn

pytestmark = needs_gpus()


def test_graph_replay_follows_its_inputs() -> None:
    q, k, v, s_aux = gpt_oss_like(2, 300)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = torch.tensor([0, 100, 600], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    sinkattn.flash_attn_varlen_func(*packed, bounds, bounds, causal=True, s_aux=s_aux)
    with torch.cuda.graph(graph):
        out = sinkattn.flash_attn_varlen_func(*packed, bounds, bounds, causal=True, s_aux=s_aux)
    bounds.copy_(torch.tensor([0, 450, 590], dtype=torch.int32))
    packed[0].mul_(0.5)
    graph.replay()
    assert torch.equal(out, sinkattn.flash_attn_varlen_func(*packed, bounds, bounds, causal=True, s_aux=s_aux))
    assert not out[590:].any()


def test_a_packed_forward_repeats_in_a_graph_and_on_two_streams() -> None:
    """Blocks take tiles by a counter in the workspace: replays find it at its start, and streams have one each."""
    q, k, v, s_aux = (x[0] if x.ndim == 4 else x for x in gpt_oss_like(1, 4000, 128))
    cu = torch.tensor([0, 10, 1500, 1501, 3900, 4000], dtype=torch.int32, device="cuda")

    def run() -> Tensor:
        return sinkattn.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, s_aux=s_aux)

    want = run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for _ in range(20):
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, want)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_graph_of_forward_and_backward() -> None:
    q, k, v, s_aux = gpt_oss_like(2, 300)
    leaves = [x.flatten(0, 1).requires_grad_() for x in (q, k, v)] + [s_aux.requires_grad_()]
    bounds = torch.tensor([0, 100, 600], dtype=torch.int32, device="cuda")
    dout = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        out = sinkattn.flash_attn_varlen_func(*leaves[:3], bounds, bounds, causal=True, s_aux=leaves[3])
        return out, *torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    bounds.copy_(torch.tensor([0, 450, 590], dtype=torch.int32))
    dout.mul_(0.5)
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip(captured, step(), strict=True))
    assert not captured[1][590:].any()
    assert not captured[2][590:].any()


def test_compiled_training_step() -> None:
    q, k, v, s_aux = (x.requires_grad_() for x in gpt_oss_like(1, 300))

    def step(*leaves: Tensor) -> Tensor:
        q, k, v, s_aux = leaves
        return (
            sinkattn.flash_attn_func(q * 2, k, v, causal=True, window_size=(127, 0), s_aux=s_aux).float() ** 2
        ).sum()

    compiled, plain = (
        torch.autograd.grad(f(q, k, v, s_aux), (q, k, v, s_aux)) for f in (torch.compile(step, fullgraph=True), step)
    )
    for got, want in zip(compiled, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
