# SPDX-License-Identifier: Apache-2.0
"""What the vLLM plugin refuses, each in a sentence that names the way out; and when it is chosen."""

import importlib
import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not in this environment: make test-vllm makes one", allow_module_level=True)

import vllm
import vllm.envs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from sinkattn import vllm as plugin
from sinkattn import vllm_backend

if not current_platform.is_cpu():
    pytest.skip("this vLLM is for another device than the CPU, on which these tests choose", allow_module_level=True)

OWN = "leave attention_backend out, and vLLM takes its own attention"
LAYER: dict[str, Any] = {"num_heads": 8, "head_size": 32, "scale": 0.2, "num_kv_heads": 2}


def choose(name: str | None, **changes: Any) -> str:
    plugin.register()
    plugin.register()
    given = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16} | changes
    backend = None if name is None else AttentionBackendEnum[name]
    return current_platform.get_attn_backend_cls(backend, AttentionSelectorConfig(**given))


def test_it_is_chosen_by_name_alone() -> None:
    own = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert [choose(x) for x in (None, "CPU_ATTN", "FLASH_ATTN", "CUSTOM")] == [own, own, own, plugin.BACKEND]
    assert choose("CUSTOM", has_sink=True, has_sliding_window=True, use_batch_invariant=True) == plugin.BACKEND
    assert choose("CUSTOM", dtype=torch.float32, block_size=1, head_size=8) == plugin.BACKEND


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, 'the cache is quantized; kv_cache_dtype="auto" keeps it in the model\'s dtype'),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype is float16 and the model torch.bfloat16"),
        ({"use_mla": True}, "the model has MLA, keys and values in one latent"),
        ({"use_sparse": True}, "the model picks keys by an indexer"),
        ({"head_size": 264}, "head_size must be a multiple of 8 up to 256"),
        ({"head_size": 20}, "head_size must be a multiple of 8 up to 256"),
        ({"dtype": torch.float64}, "dtype must be bfloat16, float16 or, on a CPU, float32"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_non_causal": True}, "use_non_causal is set"),
        ({"use_mm_prefix": True}, "the model sees images from both sides"),
        ({"use_dcp": True}, "decode_context_parallel_size must be 1"),
        ({"use_pcp": True}, "prefill_context_parallel_size must be 1"),
        ({"use_rswa": True}, "R-SWA not supported"),
    ],
)
def test_models_and_options_that_are_not_served(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="attention_backend is CUSTOM, and") as raised:
        choose("CUSTOM", **changes)
    assert said in str(raised.value)
    assert str(raised.value).endswith(OWN)
    if not {"use_mla", "use_sparse"} & changes.keys():
        assert "CPUAttentionBackend" in choose(None, **changes), "vLLM's own attention is not disturbed"


def test_cuda_takes_halves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    assert choose("CUSTOM") == plugin.BACKEND
    with pytest.raises(ValueError, match=f"the model's dtype is float32, which has no CUDA kernel: {OWN}"):
        choose("CUSTOM", dtype=torch.float32)


def test_cuda_devices_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From compute capability 8.0; drafts that the device shortens only where no row goes to the decode kernels."""
    given = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    config = AttentionSelectorConfig(**given)._asdict()
    validate = vllm_backend.SinkAttentionBackend.validate_configuration
    assert validate(device_capability=DeviceCapability(8, 0), **config) == []
    [said] = validate(device_capability=DeviceCapability(7, 5), **config)
    assert said == f"the GPU's compute capability must be 8.0 or later: {OWN}"
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    [said] = validate(device_capability=DeviceCapability(9, 0), **config | {"use_adaptive_verification": True})
    assert said.startswith("adaptive verification shortens drafts on the device")
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert validate(device_capability=DeviceCapability(9, 0), **config | {"use_adaptive_verification": True}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alibi_slopes": [0.5] * 8}, "a layer has alibi_slopes; scores take no bias here"),
        ({"logits_soft_cap": 30.0}, "a layer has logits_soft_cap; it is 30.0, and scores are not capped here"),
        ({"attn_type": "encoder"}, "a layer has attn_type; it is encoder, and only decoders are served"),
        ({"attn_type": "encoder_decoder"}, "it is encoder_decoder, and only decoders are served"),
        ({"sinks": torch.zeros(4)}, r"sinks have shape \(4,\) and the layer 8 heads"),
    ],
)
def test_layers_that_are_not_served(changes: dict[str, Any], said: str) -> None:
    vllm_backend.SinkAttentionImpl(**LAYER, sinks=torch.zeros(8))
    with pytest.raises((NotImplementedError, ValueError), match=said):
        vllm_backend.SinkAttentionImpl(**LAYER | changes)


def test_steps_that_are_not_served() -> None:
    builder = vllm_backend.SinkAttentionMetadataBuilder(None, [], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="16 tokens are a prefix that all share, for cascade attention"):
        builder.build(16, SimpleNamespace(causal=True))
    for causal in (False, torch.ones(2, dtype=torch.bool)):
        with pytest.raises(NotImplementedError, match=f"causal is not True: {OWN}"):
            builder.build(0, SimpleNamespace(causal=causal))
    layer, x = vllm_backend.SinkAttentionImpl(**LAYER), torch.zeros(2, 8, 32)
    with pytest.raises(NotImplementedError, match="output is to be quantized by the attention; set fuse_attn_quant"):
        layer.forward(None, x, x, x, x, None, x, output_scale=torch.ones(1))
    measured = layer.forward(None, x, x, x, x, None, torch.full_like(x, torch.nan))
    assert measured.eq(0).all(), "without metadata vLLM measures memory"


def test_another_vllm_is_refused_once_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    assert "CPUAttentionBackend" in choose(None)
    with pytest.raises(ImportError, match=f"vLLM is 0.33.1; served are 0.32, .*or {OWN}"):
        importlib.reload(vllm_backend)


def test_a_backend_of_somebody_else_stays(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import register_backend

    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, "somewhere.Else")
    try:
        with caplog.at_level(logging.WARNING):
            plugin.register()
        assert custom.get_path() == "somewhere.Else"
        assert "attention backend CUSTOM is somewhere.Else; VLLM_PLUGINS=sinkattn loads no other" in caplog.text
    finally:
        custom.clear_override()
        plugin.register()
