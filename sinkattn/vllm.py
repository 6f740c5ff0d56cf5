# SPDX-License-Identifier: Apache-2.0
"""sinkattn as the attention of vLLM's engine; docs/vllm.md is the guide.

vLLM finds this plugin by its entry point in every process, and register() gives it a name; nothing else changes. Models
run on sinkattn where that name is asked for:

    vllm serve MODEL --attention-backend CUSTOM          or LLM(MODEL, attention_backend="CUSTOM")

A model or an option that sinkattn does not serve then raises, and never gets another attention.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkattn import _C  # noqa: F401  registers torch.ops.sinkattn
from sinkattn.hf_decode import MAX_ROWS

# Straight to the operators: the engine calls them once a layer, and the host is what a step waits for.
_append = torch.ops.sinkattn.append_kv_slots.default
_decode = torch.ops.sinkattn.flash_decode.default
_decode_varlen = torch.ops.sinkattn.flash_decode_varlen.default

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
    k_pages, v_pages = torch.split(kv_cache.transpose(1, 2), head_size, -1)
    return k_pages, v_pages


def write_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value [tokens, num_kv_heads, head_size] where slot_mapping [tokens] says; -1 is nowhere."""
    if key.shape[-1] != value.shape[-1]:
        raise NotImplementedError(
            f"sinkattn: values have head_dim {value.shape[-1]}, keys {key.shape[-1]}; they must be equal: {OWN}"
        )
    _append(*cache_pages(kv_cache, key.shape[-1]), key, value, slot_mapping)


def most_decode_rows(num_q_heads: int, num_kv_heads: int) -> int:
    """Rows that a sequence may have, to be one of a step's decodes; 0: with so many q heads none is."""
    return MAX_ROWS // (num_q_heads // num_kv_heads)


LONG = 2048
"""Keys from which decodes beside other rows are a call of their own. Among packed rows each walks its keys alone: up to
here that is hidden behind a prompt's chunk. On an H200 12 decodes of up to 1800 keys beside 1012 rows take 75 us, and
74 in two calls; 18 rows of 8 sequences with drafts, all short, 21 and 33."""


class Packed(NamedTuple):
    """Sequences for the operator for packed rows; int32 tensors, read on the device."""

    query_start_loc: Tensor  # [sequences + 1]
    seq_lens: Tensor  # [sequences], keys with this step's
    block_table: Tensor  # [sequences, most pages]


class Decodes(NamedTuple):
    """Sequences for flash_decode, the first of a step, with as many rows each."""

    rows: int
    seq_lens: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class Step:
    """The sequences of one step, the same for all layers that share a block table.

    apart: decodes in front, and the others, None where all are decodes.
    """

    num_tokens: int
    packed: Packed
    apart: tuple[Decodes, Packed | None] | None = None

    @classmethod
    def of(cls, num_tokens: int, packed: Packed, max_seq_len: int, decodes: int, rows: int) -> "Step":
        """The first `decodes` sequences have `rows` rows each, and go apart where that is faster."""
        starts, lens, table = packed
        if decodes == 0 or (decodes < len(lens) and max_seq_len < LONG):
            return cls(num_tokens, packed)
        others = None
        if decodes < len(lens):
            others = Packed(starts[decodes:] - decodes * rows, lens[decodes:], table[decodes:])
        return cls(num_tokens, packed, (Decodes(rows, lens[:decodes], table[:decodes]), others))

    def with_block_table(self, table: Tensor) -> "Step":
        """The same sequences in other pages."""
        apart = self.apart
        if apart is not None:
            decodes, others = apart
            count = len(decodes.seq_lens)
            apart = (decodes._replace(block_table=table[:count]), others and others._replace(block_table=table[count:]))
        return replace(self, packed=self.packed._replace(block_table=table), apart=apart)


def attend(
    query: Tensor,
    kv_cache: Tensor,
    step: Step,
    output: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    s_aux: Tensor | None,
) -> None:
    """Attention of query [tokens, num_q_heads, head_size] to the cache, where all keys are by now, into output.

    The rows of a sequence stand at the end of its keys. sliding_window counts the row itself. Rows of query beyond the
    step's may be there, and are left alone.
    """
    pages = cache_pages(kv_cache, query.shape[-1])
    left = -1 if sliding_window is None else sliding_window - 1
    first, packed = 0, step.packed
    if step.apart is not None and (step.apart[1] is None or sliding_window is None):
        (rows, lens, table), others = step.apart
        first = rows * len(lens)
        few = _rows(query, 0, first).view(len(lens), rows, *query.shape[1:])
        out, _ = _decode(few, *pages, s_aux, lens, table, scale, left)
        _rows(output, 0, first).copy_(out.view(first, *query.shape[1:]))
        if others is None:
            return
        packed = others
    rest = _rows(query, first, step.num_tokens)
    out, _ = _decode_varlen(rest, *pages, s_aux, *packed, None, None, scale, left, 0)
    _rows(output, first, step.num_tokens).copy_(out)


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    return x if first == 0 and last == len(x) else x[first:last]
