# SPDX-License-Identifier: Apache-2.0
"""Attention of tokens that lie on two GPUs, by NCCL, and on one what the ring relies on."""

from __future__ import annotations

import pytest
import torch
from distributed_cases import DTENSORS, check_parts_of_the_keys, gpu_cases, outcomes

RANKS = 2


def needs(devices: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        torch.cuda.device_count() < devices or torch.cuda.get_device_capability() < (8, 0),
        reason=f"needs {devices} CUDA devices of compute capability 8.0 or later; runs there with make test-gpu",
    )


@needs(1)
def test_parts_of_the_keys() -> None:
    check_parts_of_the_keys("cuda")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found, by case."""
    return outcomes(RANKS, tmp_path_factory.mktemp("ranks"), "nccl")


@needs(RANKS)
@pytest.mark.parametrize("name", [*(case.id for case in gpu_cases()), *DTENSORS])
def test_ranks_agree_with_one_gpu(name: str, found: list[dict[str, str]]) -> None:
    for of_rank in found:
        assert not of_rank[name], of_rank[name]
