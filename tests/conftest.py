# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the CPU level a test runs at, a seed that is printed and can be set, and a tiny gpt-oss."""

import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sinkattn._testing import LEVEL_VARIABLE, available_levels

# In the environment, so that the workers of pytest-xdist have the one that is printed.
SEED = int(os.environ.setdefault("SINKATTN_SEED", str(random.SystemRandom().randrange(2**31))))


def pytest_report_header() -> str:
    return f"SINKATTN_SEED={SEED}, CPU levels {' '.join(available_levels())}"


@pytest.fixture(scope="session")
def seed() -> int:
    return SEED


@pytest.fixture(params=available_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test once at every CPU level this machine has."""
    monkeypatch.setenv(LEVEL_VARIABLE, request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives back the number of threads that the test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Any:
    from tiny_gpt_oss import tiny_gpt_oss  # transformers may be missing

    return tiny_gpt_oss()


@pytest.fixture
def eager(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin
