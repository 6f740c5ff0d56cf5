# SPDX-License-Identifier: Apache-2.0
"""A gpt-oss small enough for tests: a sliding and a full layer, weights large enough for attention to matter."""

from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

WINDOW = 8
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def tiny_gpt_oss(attention: str = "sinkattn", **changes: Any) -> GptOssForCausalLM:
    """The same at each call, with sinks that stand out; in eval mode."""
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(GptOssConfig(**SIZES | changes), attn_implementation=attention)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    return model.eval()
