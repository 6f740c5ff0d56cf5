# SPDX-License-Identifier: Apache-2.0
"""sinkattn as the attention of vLLM's engine; docs/vllm.md is the guide.

vLLM finds this plugin by its entry point in every process, and register() gives it a name; nothing else changes. Models
run on sinkattn where that name is asked for:

    vllm serve MODEL --attention-backend CUSTOM          or LLM(MODEL, attention_backend="CUSTOM")

A model or an option that sinkattn does not serve then raises, and never gets another attention.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sinkattn import flash_attn_varlen_func

SERVED_VLLM = ("0.32",)
"""Minor releases: what vLLM asks of a backend changes from one to the next."""

BACKEND = "sinkattn.vllm_backend.SinkAttentionBackend"
OWN = "leave attention_backend out, and vLLM takes its own attention"

_logger = logging.getLogger(__name__)


def check_version() -> None:
    """Raises ImportError for a vLLM that this plugin was not run with."""
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in SERVED_VLLM:
        raise ImportError(
            f"sinkattn: vLLM is {vllm.__version__}; served are {', '.join(SERVED_VLLM)}, each with its patch releases:"
            f" install one of them, or {OWN}"
        )


def register() -> None:
    """What the entry point calls: make sinkattn vLLM's backend CUSTOM; a second call changes nothing.

    The backend checks vLLM's version when it is chosen, so that others run undisturbed beside an installed sinkattn.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _logger.warning(
            "sinkattn is not available to vLLM: attention backend CUSTOM is %s; VLLM_PLUGINS=sinkattn loads no other",
            custom.get_path(),
        )
        return
    register_backend(custom, BACKEND)
    if current_platform.is_cpu():
        _let_cpu_choose(type(current_platform))


def _let_cpu_choose(platform: Any) -> None:
    """vLLM's CPU platform takes CPU_ATTN whatever it is asked for; from now on it takes CUSTOM where asked for that."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = platform.get_attn_backend_cls.__func__
    if hasattr(choose, "without_sinkattn"):
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        custom = AttentionBackendEnum.CUSTOM
        if selected_backend is not custom:
            return str(choose(cls, selected_backend, attn_selector_config, num_heads))
        reasons = custom.get_class().validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"sinkattn: attention_backend is CUSTOM, and {'; '.join(reasons)}")
        return str(custom.get_path())

    get_attn_backend_cls.without_sinkattn = choose  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def check_sinks(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> int:
    """That the sinks which vLLM's model computes with are those of weights, a trainer's state dict; how many layers.

    After a weight sync: llm.apply_model(lambda model: check_sinks(model, trainer.state_dict())). Layers are matched by
    the first number in their name. Raises ValueError where sinks are missing on one side, or have other values.
    """
    from vllm.model_executor.layers.attention import Attention

    used = {_index(x.layer_name): x.impl.sinks for x in model.modules() if isinstance(x, Attention) and x.has_sink}
    sent = {_index(name): x for name, x in weights.items() if name.endswith(".sinks")}
    for layer in sorted(used.keys() | sent.keys()):
        mine, theirs = used.get(layer), sent.get(layer)
        if mine is None or theirs is None:
            where = "vLLM's model" if mine is None else "the trainer's weights"
            raise ValueError(f"sinkattn: layer {layer} has sinks, and {where} none; sync them with the other weights")
        if not torch.equal(mine.detach().cpu(), theirs.detach().to("cpu", mine.dtype)):
            raise ValueError(
                f"sinkattn: layer {layer} of vLLM's model computes with other sinks than the trainer's; sync them with"
                " the other weights"
            )
    return len(used)


def _index(name: str) -> int:
    return int(next(part for part in name.split(".") if part.isdigit()))


def cache_pages(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views of vLLM's cache [blocks, num_kv_heads, block, 2 * head_size] as pages of keys and of values.

    Each is [blocks, block, num_kv_heads, head_size], in any layout that vLLM chose for the cache.
    """
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_size], pages[..., head_size:]


def write_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value [tokens, num_kv_heads, head_size] where slot_mapping [tokens] says; -1 is nowhere."""
    if key.shape[-1] != value.shape[-1]:
        raise NotImplementedError(
            f"sinkattn: values have head_dim {value.shape[-1]}, keys {key.shape[-1]}; they must be equal: {OWN}"
        )
    torch.ops.sinkattn.append_kv_slots(*cache_pages(kv_cache, key.shape[-1]), key, value, slot_mapping)


def attend(
    query: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of query [tokens, num_q_heads, head_size] to the cache, where all keys are by now; as query.

    Sequence b has rows query_start_loc[b] to query_start_loc[b + 1], at the end of its seq_lens[b] keys, in the pages
    of block_table[b]. sliding_window counts the row itself.
    """
    left = -1 if sliding_window is None else sliding_window - 1
    k_pages, v_pages = cache_pages(kv_cache, query.shape[-1])
    return flash_attn_varlen_func(
        query,
        k_pages,
        v_pages,
        query_start_loc,
        softmax_scale=scale,
        causal=True,
        window_size=(left, 0),
        block_table=block_table,
        seqused_k=seq_lens,
        s_aux=s_aux,
    )
