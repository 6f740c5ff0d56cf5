# SPDX-License-Identifier: Apache-2.0
"""Positional sink tokens beside a window, on a CUDA device: the windowed kernels of compute capability 9.0."""

from __future__ import annotations

import dataclasses

import pytest
from gpu_cases import assert_right_on_device
from gpus import needs_gpus

from sinkattn._testing import Case

pytestmark = needs_gpus()

LAYOUTS = {"dense": "q200x2-k260x2", "varlen": "varlen-q190.0.7.101.3.20-k190.5.200.60.3.12-tail5"}


@pytest.mark.parametrize("ratio", [2, 8, 64])
@pytest.mark.parametrize(("left", "right"), [(127, 0), (30, 0), (0, 0), (40, 30)])
@pytest.mark.parametrize("num_sink_tokens", [1, 4, 8, 9, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_against_fp64(ratio: int, left: int, right: int, num_sink_tokens: int, layout: str) -> None:
    """Out, LSE and gradients; chunks, sequences shorter than the sink tokens, rows before all keys, a tail."""
    case = Case.parse(f"d64-sink{num_sink_tokens}-g{ratio}-{LAYOUTS[layout]}-poison-bf16-seed{ratio}")
    assert_right_on_device(dataclasses.replace(case, left=left, right=right))


@pytest.mark.parametrize("head_dim", [8, 40, 64])
@pytest.mark.parametrize("num_sink_tokens", [5, 12])
@pytest.mark.parametrize(
    ("s_dtype", "s_aux", "frozen"), [("bf16", "rand", False), ("fp32", "mix", True), ("fp32", "none", False)]
)
def test_fp16_against_fp64(head_dim: int, num_sink_tokens: int, s_dtype: str, s_aux: str, frozen: bool) -> None:
    case = Case.parse(f"d{head_dim}-causal-w128-sink{num_sink_tokens}-g8-h2-varlen-q130.300-k130.300-fp16-seed2")
    assert_right_on_device(dataclasses.replace(case, s_aux=s_aux, s_dtype=s_dtype, frozen=frozen))
