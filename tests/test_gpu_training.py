# SPDX-License-Identifier: Apache-2.0
"""Models on a CUDA device. SINKATTN_GPU_STEPS is the number of steps of the training that must not grow."""

import os
from typing import Any

import pytest
import torch
from gpu_cases import Decoder
from gpus import needs_gpus
from torch import Tensor

pytestmark = needs_gpus()
STEPS = int(os.environ.get("SINKATTN_GPU_STEPS", "1000"))


def small_gpt_oss(**changes: Any) -> Any:
    pytest.importorskip("transformers", "5.5.3", reason="runs where transformers 5.5.3 or later is installed")
    from tiny_gpt_oss import tiny_gpt_oss

    import sinkattn.hf

    sinkattn.hf.register()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 256}
    return tiny_gpt_oss(**sizes, sliding_window=64, initializer_range=0.02, pad_token_id=None, **changes).cuda()


def test_gpt_oss_prefill() -> None:
    model = small_gpt_oss()
    tokens = torch.randint(0, 256, (2, 400), device="cuda")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact = model(tokens).logits
        model.bfloat16()
        eager = (model(tokens).logits.float() - exact).abs().mean()
        model.set_attn_implementation("sinkattn")
        ours = (model(tokens).logits.float() - exact).abs().mean()
    assert ours <= 1.2 * eager


def test_gpt_oss_trains() -> None:
    """What bf16 costs against fp32 is what it costs eager. Every expert is used, so none is chosen differently."""

    def train(implementation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        model = small_gpt_oss(num_local_experts=2).to(dtype).train()
        model.set_attn_implementation(implementation)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        tokens = torch.randint(0, 256, (2, 400), generator=torch.Generator().manual_seed(1)).cuda()
        losses, all_grads, sink_grads = [], [], []
        for step in range(5):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            for name, x in model.named_parameters() if step == 0 else ():
                all_grads.append(x.grad.float().flatten())
                sink_grads += all_grads[-1:] if name.endswith("sinks") else []
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().float())
        return torch.cat(all_grads), torch.cat(sink_grads), torch.stack(losses)

    exact, eager, ours = (
        train(*how) for how in (("eager", torch.float32), ("eager", torch.bfloat16), ("sinkattn", torch.bfloat16))
    )
    for index, factor in ((0, 1.2), (1, 2.0)):
        assert (ours[index] - exact[index]).norm() <= factor * (eager[index] - exact[index]).norm()
    assert ours[2][-1] < ours[2][0]
    assert (ours[2] - exact[2]).abs().max() <= 2 * (eager[2] - exact[2]).abs().max() + 0.01


def test_a_long_training_neither_grows_nor_breaks() -> None:
    """Dense and packed rows in turn; a NaN that ever appeared would still be in the weights at the end."""
    torch.manual_seed(0)
    model = Decoder().cuda().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    text = ((torch.arange(200) + torch.arange(64)[:, None]) % 256).cuda()
    bounds = torch.tensor([0, 130, 131, 200], dtype=torch.int32, device="cuda")
    memory, losses = [], []
    for step in range(STEPS):
        rows = torch.randint(64, (2,), generator=generator)
        loss = model(text[rows], None) if step % 2 else model(text[rows[0]], bounds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 60 == 59:
            losses.append(loss.item())
            memory.append(torch.cuda.memory_allocated())
    assert all(x.isfinite().all() for x in model.parameters())
    assert len(set(memory[1:])) == 1
    assert losses[-1] < losses[0]
