# SPDX-License-Identifier: Apache-2.0
"""What runs in the process of vLLM's worker: verl's extension, for a CPU, and a check of the attention there."""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.attention import Attention


class CPUWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Loads what verl sends by vLLM's reload_weights.

    verl calls the model's load_weights; but on a CPU vLLM keeps linear weights packed, and has no others to load into.
    """

    def _update_weights(self, weights: list[tuple[str, Any]], **_: Any) -> None:
        self.reload_weights(weights_iterator=iter(weights))


def check_attention(model: torch.nn.Module) -> None:
    found = [type(x.impl).__name__ for x in model.modules() if isinstance(x, Attention)]
    if found != ["SinkAttentionImpl"] * 2:
        raise ValueError(f"the attention of the model is {found}")
