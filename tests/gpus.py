# SPDX-License-Identifier: Apache-2.0
"""Which tests need a GPU."""

import pytest
import torch


def needs_gpus(devices: int = 1) -> pytest.MarkDecorator:
    """Skips where there are fewer, or the first is too old."""
    which = "a CUDA device" if devices == 1 else f"{devices} CUDA devices"
    return pytest.mark.skipif(
        torch.cuda.device_count() < devices or torch.cuda.get_device_capability() < (8, 0),
        reason=f"needs {which} of compute capability 8.0 or later; runs there with make test-gpu",
    )
