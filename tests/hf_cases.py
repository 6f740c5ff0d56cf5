# SPDX-License-Identifier: Apache-2.0
"""What the tests of sinkattn.hf share: inputs, a loss, comparisons, and the ops that ran.

Tests that import this are skipped where transformers is not installed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed: pip install --no-build-isolation '.[hf]'")
LENGTHS = [5, 1, 1, 14, 3, 1]  # of packed sequences: length-1 neighbours, one longer than the window


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def one_by_one(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)


def loss(logits: Tensor) -> Tensor:
    weight = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)).view_as(logits)
    return (logits.float() * weight).sum() / logits.numel()


def gradients(model: torch.nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Tensor, want: Tensor, tolerance: float, name: str = "logits") -> None:
    assert got.shape == want.shape
    worst = (got - want).abs().max() / want.abs().max().clamp(min=1e-30)
    assert worst <= tolerance, f"{name}: {worst:.2e} of the largest, allowed {tolerance:.0e}"


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert sum("sinks" in name for name in want) in (0, 2)
    for name in want:
        assert_close(got[name], want[name], 1e-4, name)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "sinkattn":
            names = [argument.name for argument in func._schema.arguments]
            self.seen.append(
                (func._schema.name.split("::")[1], dict(zip(names, args, strict=False)) | (kwargs or {}), result)
            )
        return result

    def named(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        return [(arguments, result) for op, arguments, result in self.seen if op == name]
