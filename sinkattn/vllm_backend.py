# SPDX-License-Identifier: Apache-2.0
"""The backend that sinkattn.vllm registers: what vLLM asks of one, in terms of that module's functions.

Imported by vLLM when the backend is chosen, and then refuses the versions that it was not run with.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkattn import vllm as plugin

plugin.check_version()

from vllm import envs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import (  # noqa: E402
    get_num_attention_heads_from_layers,
    split_decodes_and_prefills,
)

# vLLM's reasons, and the way out.
WAYS_OUT = {
    "head_size not supported": "head_size must be a multiple of 8 up to 256",
    "dtype not supported": "dtype must be bfloat16, float16 or, on a CPU, float32",
    "kv_cache_dtype not supported": 'the cache is quantized; kv_cache_dtype="auto" keeps it in the model\'s dtype',
    "MLA not supported": "the model has MLA, keys and values in one latent",
    "sparse not supported": "the model picks keys by an indexer",
    "partial multimodal token full attention not supported": "the model sees images from both sides",
    "non-causal attention not supported": "use_non_causal is set",
    "PCP not supported": "prefill_context_parallel_size must be 1",
    "DCP not supported": "decode_context_parallel_size must be 1",
    "compute capability not supported": "the GPU's compute capability must be 8.0 or later",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": "adaptive verification"
    " shortens drafts on the device, where decodes have the rows that the host counted; set VLLM_BATCH_INVARIANT=1",
}


class SinkAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Decoder attention over a paged cache in the model's dtype, with sinks and windows."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["SinkAttentionImpl"]:
        return SinkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["SinkAttentionMetadataBuilder"]:
        return SinkAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or capability[0] >= 8

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return not _decodes_apart(current_platform.device_type)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """What is not served, as sentences; vLLM calls this where the user names the backend."""
        reasons = [WAYS_OUT.get(x, x) for x in super().validate_configuration(*args, **kwargs)]
        if current_platform.is_cuda_alike() and kwargs.get("dtype") == torch.float32:
            reasons.append("the model's dtype is float32, which has no CUDA kernel")
        dtype, cached = kwargs.get("dtype"), kwargs.get("kv_cache_dtype")
        if cached in ("bfloat16", "float16") and dtype != getattr(torch, cached):
            reasons.append(f'kv_cache_dtype is {cached} and the model {dtype}; kv_cache_dtype="auto" makes them one')
        return [f"{'; '.join(reasons)}: {plugin.OWN}"] if reasons else []


def _decodes_apart(device_type: str) -> bool:
    """Whether decodes go to the decode kernels; a CPU's give a row the bits that it has among packed rows."""
    return device_type == "cuda" and not envs.VLLM_BATCH_INVARIANT


class SinkAttentionMetadataBuilder(AttentionMetadataBuilder[plugin.Step]):  # type: ignore[misc]
    """Takes what the kernels read out of vLLM's metadata; nothing is read on the device.

    On CUDA the engine is asked to put sequences with a token, or a token and drafts, in front, for the decode kernels.
    How these cut the keys depends on the batch, and so do last bits: with VLLM_BATCH_INVARIANT nothing goes to them.
    """

    reorder_batch_threshold: int | None = None
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not _decodes_apart(device.type):
            return
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        if heads is None:
            heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        most = plugin.most_decode_rows(heads, kv_cache_spec.num_kv_heads)
        if most:
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
            self.reorder_batch_threshold = min(self.reorder_batch_threshold or 0, most)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Which graphs take other batches: one with packed rows any, one with decodes those with as many rows each."""
        return AttentionCGSupport.ALWAYS if envs.VLLM_BATCH_INVARIANT else AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> plugin.Step:
        given = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(
                f"sinkattn: {common_prefix_len} tokens are a prefix that all share, for cascade attention; set"
                " disable_cascade_attn"
            )
        if given.causal is not True:
            raise NotImplementedError(f"sinkattn: rows may see keys after them, as causal is not True: {plugin.OWN}")
        decodes = rows = 0
        if self.reorder_batch_threshold is not None:
            decodes, _, tokens, _ = split_decodes_and_prefills(
                given, self.reorder_batch_threshold, require_uniform=True
            )
            rows = tokens // max(1, decodes)
            if rows * decodes != tokens:
                decodes = 0
        packed = plugin.Packed(given.query_start_loc, given.seq_lens, given.block_table_tensor)
        return plugin.Step.of(given.num_actual_tokens, packed, given.max_seq_len, decodes, rows)

    def update_block_table(self, metadata: plugin.Step, blk_table: Tensor, slot_mapping: Tensor) -> plugin.Step:
        return metadata.with_block_table(blk_table)


class SinkAttentionImpl(AttentionImpl[plugin.Step]):  # type: ignore[misc]
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name  # that layer writes the cache; vLLM sees to it
        self.sinks = sinks  # the model's parameter, so that weights that are loaded later are the ones used
        unserved = {
            "alibi_slopes": alibi_slopes is not None and "scores take no bias here",
            "logits_soft_cap": logits_soft_cap and f"it is {logits_soft_cap}, and scores are not capped here",
            "attn_type": attn_type != AttentionType.DECODER and f"it is {attn_type}, and only decoders are served",
        }
        for name, reason in unserved.items():
            if reason:
                raise NotImplementedError(f"sinkattn: a layer has {name}; {reason}: {plugin.OWN}")
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(
                f"sinkattn: sinks have shape {tuple(sinks.shape)} and the layer {num_heads} heads; they must hold one"
                " logit a head: where heads are split over devices, split the sinks alike"
            )

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        plugin.write_cache(key, value, kv_cache, slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: plugin.Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output [tokens, num_heads, head_size]; without metadata vLLM measures memory, and reads nothing."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "sinkattn: the output is to be quantized by the attention; set fuse_attn_quant to False in vLLM's"
                " compilation_config.pass_config"
            )
        if attn_metadata is None:
            return output.fill_(0)
        plugin.attend(
            query,
            kv_cache,
            attn_metadata,
            output,
            scale=self.scale,
            sliding_window=self.sliding_window,
            s_aux=self.sinks,
        )
        return output
