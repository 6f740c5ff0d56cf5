# SPDX-License-Identifier: Apache-2.0
"""Attention of tokens that lie on two GPUs, by NCCL, and on one what the ring relies on."""

import pytest
from distributed_cases import DTENSORS, check_parts_of_the_keys, gpu_cases, outcomes
from gpus import needs_gpus

RANKS = 2


@needs_gpus()
def test_parts_of_the_keys() -> None:
    check_parts_of_the_keys("cuda")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes(RANKS, tmp_path_factory.mktemp("ranks"), "nccl")


@needs_gpus(RANKS)
@pytest.mark.parametrize("name", [*(case.id for case in gpu_cases()), *DTENSORS])
def test_ranks_agree_with_one_gpu(name: str, found: list[dict[str, str]]) -> None:
    for of_rank in found:
        assert not of_rank[name], of_rank[name]
