# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests share: cases there against fp64, random ones, gpt-oss's shapes, a small model."""

import dataclasses
import os

import torch
from torch import Tensor

import sinkattn
from sinkattn._testing import (
    DTYPES,
    Case,
    Inputs,
    Outcome,
    compare_all,
    evaluate,
    make_inputs,
    random_case,
    restride,
    run_ops,
)

RANDOM_CASES = int(os.environ.get("SINKATTN_GPU_CASES", "500"))


def on_device(case: Case, t: Inputs) -> Inputs:
    """The same tensors there, in the same layout, and leaves of their own."""

    def move(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().cuda().requires_grad_(x.requires_grad)

    q, k, v = (
        restride(x.detach().cuda(), case.strides if i or case.strides != "expanded" else "plain").requires_grad_()
        for i, x in enumerate((t.q, t.k, t.v))
    )
    if case.latent:
        v = k.detach()[..., : v.shape[-1]].requires_grad_()
    dout = t.dout.cuda()
    if case.dout == "sum":
        dout = dout.new_ones(()).expand_as(dout)
    elif case.dout == "transposed":
        dout = restride(dout, "transposed")
    names = ("s_aux", "dlse", "cu_q", "cu_k", "cache_seqlens", "block_table")
    moved = {name: move(getattr(t, name)) for name in names}
    return dataclasses.replace(t, q=q, k=k, v=v, dout=dout, **moved)


def beside_empty(offsets: Tensor) -> Tensor:
    """With so many sequences without rows that kernels of larger tiles take the batch."""
    return torch.cat([offsets, offsets[-1:].expand(400)])


def assert_right_on_device(case: Case, t: Inputs | None = None, least_cosine: float | None = None) -> None:
    """Against fp64, and packed rows with the bits of larger tiles; least_cosine, of a case that is not packed, is the
    least cosine between the two outs.
    """
    t = make_inputs(case) if t is None else t
    there = on_device(case, t)
    on_gpu = run_ops(case, there, sinkattn)
    if case.layout == "varlen":
        crowd = {name: beside_empty(getattr(there, name)) for name in ("cu_q", "cu_k")}
        for name, x in run_ops(case, dataclasses.replace(there, **crowd), sinkattn, backward=False).items():
            assert torch.equal(x.view(torch.uint8), on_gpu[name].view(torch.uint8)), f"{name} in larger tiles: {case}"
    got = {name: x.cpu() for name, x in on_gpu.items()}
    ref = evaluate(case, t)
    outcome = Outcome(case, "cuda", compare_all(case, t, got, ref, evaluate(case, t, DTYPES[case.dtype])))
    assert not outcome.failures, str(outcome)
    if least_cosine is not None:
        cosine = torch.nn.functional.cosine_similarity(got["out"].double().flatten(), ref["out"].flatten(), 0)
        assert cosine >= least_cosine, f"cosine {cosine}: {outcome}"


def gpu_case(seed: str) -> Case:
    """random_case's, in a half format; caches become packed sequences, and most of those without s_aux get one."""
    case = random_case(seed)
    return dataclasses.replace(
        case,
        s_aux="rand" if case.s_aux == "none" and case.seed % 8 else case.s_aux,
        layout="dense" if case.layout == "dense" else "varlen",
        head_dim=min(case.head_dim, 256),
        head_dim_v=case.head_dim_v if case.head_dim_v < min(case.head_dim, 256) else 0,
        dtype=case.dtype if case.dtype in ("bf16", "fp16") else "bf16",
        page_size=0,
        shared=False,
        num_splits=0,
        invariant=False,
        latent=False,
    )


def gpt_oss_like(batch: int, length: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, length, 16, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, length, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    return q, k, v, 2 * torch.randn(16, device="cuda")


class Decoder(torch.nn.Module):
    """Two layers of attention, the first with a window, and nothing else: 10,000 steps of it take half a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 128)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(128, (4 + 2 + 2) * 64) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(4 * 64, 128) for _ in range(2))
        self.sinks = torch.nn.ParameterList(torch.randn(4) * 1.5 for _ in range(2))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """tokens [batch, length], or [total] with cu_seqlens; the mean cross-entropy of every next token."""
        x = self.embedding(tokens)
        for left, qkv, out, sinks in zip((63, -1), self.qkv, self.out, self.sinks, strict=True):
            q, k, v = qkv(x).unflatten(-1, (8, 64)).split((4, 2, 2), -2)
            options = {"causal": True, "window_size": (left, 0), "s_aux": sinks}
            if cu_seqlens is None:
                mixed = sinkattn.flash_attn_func(q, k, v, **options)
            else:
                mixed = sinkattn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 130, 130, **options)
            x = x + out(mixed.flatten(-2))
        logits = (x @ self.embedding.weight.t())[..., :-1, :].flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits.float(), tokens[..., 1:].flatten())
