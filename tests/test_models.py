# SPDX-License-Identifier: Apache-2.0
"""The other models of transformers that have sinks, tiny and random, against their own eager attention."""

import copy
from typing import Any

import pytest
import torch
from gpus import needs_gpus
from hf_cases import tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sinkattn.hf as hf

hf.register()
WINDOW = 8
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpus())]
SIZES = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE = {"head_dim": 16, "layer_rope_theta": [0, 10000.0], "attention_multiplier": 0.2}  # no rotation on full layers
MIMO = {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4, "head_dim": 24, "v_head_dim": 16, **EXPERTS}
# model type -> the first transformers that has it, and what its configuration wants beside SIZES
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_swa": ("5.15", GRANITE),
    "granitemoe_swa": ("5.15", GRANITE | {"num_local_experts": 4}),
    "flint": ("5.21", {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS}),
    "mimo_v2_flash": ("5.13", MIMO),  # values of 16 beside keys of 24
}
LATENT = {
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    **EXPERTS,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mimo_v2_flash": ("5.13", MIMO | {"v_head_dim": 32}, "value has head_dim 32, query 24"),
    "hy_v4": (
        "5.17",
        {"num_key_value_heads": 8, "layer_types": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
        | {"qk_rope_head_dim": 8, **LATENT},
        "HYV4Config has index_topk",
    ),
    "deepseek_v4": (
        "5.8",
        {"num_key_value_heads": 1, "layer_types": None, "head_dim": 16, "o_groups": 2, "o_lora_rank": 8, **LATENT},
        "DeepseekV4Config has index_topk",
    ),
}


def make_model(name: str, since: str, config: dict[str, Any]) -> PreTrainedModel:
    try:
        made = AutoConfig.for_model(name, **SIZES | config)
    except ValueError:
        pytest.skip(f"transformers {hf.transformers.__version__} has no {name}; it came with {since}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    sinks = [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]
    assert sinks
    for parameter in sinks:
        torch.nn.init.normal_(parameter, std=1.5)
    return model


def step(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of the tokens that mask shows, and all gradients, in fp32."""
    logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
    weight = torch.sin(torch.arange(logits.numel(), device=ids.device)).view_as(logits)
    model.zero_grad()
    (logits * weight).mean().backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert any(name.endswith("sinks") for name in gradients)
    return {"logits": logits.detach(), **gradients}


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], name: str) -> float:
    return float((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-30))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SERVED)
def test_other_models_train_as_with_eager(name: str, device: str, padded: bool) -> None:
    """In fp32 on a CPU; on a GPU in bf16, where eager's distance to fp32 is the measure."""
    exact = make_model(name, *SERVED[name]).to(device)
    ids, mask = tokens(2, 29).to(device), torch.ones(2, 29, dtype=torch.int64, device=device)
    mask[0, : 11 if padded else 0] = 0
    want = step(exact, ids, mask)
    eager = exact if device == "cpu" else copy.deepcopy(exact).bfloat16()
    model = copy.deepcopy(eager)
    model.set_attn_implementation("sinkattn")
    got, low = step(model, ids, mask), step(eager, ids, mask)
    assert got.keys() == want.keys()
    for key in want:
        allowed = 1e-4 if device == "cpu" else 2 * distance(low, want, key) + 0.02
        assert distance(got, want, key) <= allowed, key


@pytest.mark.parametrize("name", SERVED)
def test_other_models_generate_as_with_eager(name: str) -> None:
    model = make_model(name, *SERVED[name])
    ids, mask = tokens(2, 29)[:, :12], torch.ones(2, 12, dtype=torch.int64)
    mask[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    want = model.generate(ids, **options)
    model.set_attn_implementation("sinkattn")
    assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.parametrize("name", REFUSED)
def test_models_it_cannot_serve_are_refused(name: str) -> None:
    since, config, sentence = REFUSED[name]
    model = make_model(name, since, config)
    model(tokens(2, 29), use_cache=False)
    model.set_attn_implementation("sinkattn")
    with pytest.raises(NotImplementedError, match=f"sinkattn: {sentence}.*use eager"):
        model(tokens(2, 29), use_cache=False)
