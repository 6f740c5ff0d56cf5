# SPDX-License-Identifier: Apache-2.0
"""A cache for endless generation with transformers: a sequence's first tokens and its last ones (StreamingLLM).

    import sinkattn.cache, sinkattn.hf

    sinkattn.hf.register()
    model.set_attn_implementation("sinkattn")
    cache = sinkattn.cache.StreamingCache(model, window=1024)
    model.generate(input_ids, past_key_values=cache, max_new_tokens=100_000)

The cache does not grow: a layer that sees all tokens keeps the first num_sink_tokens and the last window of them, and a
layer with a window of its own keeps that, as ever. What is kept counts as one run of text: the distance from a token to
the first ones, by which rotary embeddings turn keys, is the one that it would be if the tokens between had never been
there. Where the model's config has num_sink_tokens, layers with a window keep as many first keys as well, unturned: a
forward without a cache sees them at their own distance too. dynamic and static caches of transformers need nothing from
here.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not follow the length

# Every layer hands its cache keys that were rotated last, by all of head_dim: a test runs each of these model_types.
_ROTATED_MODELS = (
    "apertus", "bitnet", "cohere", "ernie4_5", "gpt_oss", "granite", "granitemoe", "llama", "ministral", "mistral",
    "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "starcoder2",
)  # fmt: skip


class StreamingCache(Cache):
    """Keys and values of the first num_sink_tokens tokens and of the last `window`, the token itself among them.

    Goes into generate() and forward() as past_key_values. The rows of one call see all that was kept before it and each
    other, causally; then the cache is cut. So a prompt sees itself whole, unless it comes in chunks
    (prefill_chunk_size). The model must run attn_implementation="sinkattn" and be one whose rotary embeddings are
    known; positions count on, those of the first tokens with them. Sequences of a batch have one length: padding raises
    NotImplementedError, and so do packed rows, whose positions start again. Reordering for beams works; crop() raises
    ValueError, and changes nothing, once a layer has dropped tokens.

    Raises ValueError for a window below 1 or a negative num_sink_tokens, NotImplementedError for a model whose layers
    or positions it does not know, or that has no layer that sees all tokens.
    """

    def __init__(self, model: Any, window: int, num_sink_tokens: int = 4) -> None:
        if window < 1 or num_sink_tokens < 0:
            raise ValueError(
                f"sinkattn: window is {window} and num_sink_tokens {num_sink_tokens}; they must be at least 1 and 0"
            )
        self._config = config = model.config.get_text_config(decoder=True)
        self._check_attention()
        if config.model_type not in _ROTATED_MODELS:
            raise NotImplementedError(
                f"sinkattn: a StreamingCache rotates keys again, which is known to be right for the model_types"
                f" {', '.join(_ROTATED_MODELS)}; this one is {config.model_type!r}, use a DynamicCache"
            )
        types = getattr(config, "layer_types", None)
        if types is None:
            sliding = getattr(config, "sliding_window", None) is not None
            types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise NotImplementedError(f"sinkattn: layers of type {unknown} have no StreamingCache; use a DynamicCache")
        if "full_attention" not in types:
            raise NotImplementedError(
                "sinkattn: each layer has a window of its own and none sees the first tokens; use a DynamicCache"
            )
        turn = _Turn(model.base_model, config)
        kept = getattr(config, "num_sink_tokens", None) or 0  # by layers with a window of their own
        layers: list[Any] = [
            _StreamingLayer(window, num_sink_tokens, turn)
            if t == "full_attention"
            else _SinkLayer(config.sliding_window, kept)
            if kept
            else _SlidingLayer(sliding_window=config.sliding_window)
            for t in types
        ]
        super().__init__(layers=layers)

    def _check_attention(self) -> None:
        if self._config._attn_implementation != "sinkattn":
            raise NotImplementedError(
                f"sinkattn: attn_implementation is {self._config._attn_implementation!r}; a StreamingCache needs"
                ' model.set_attn_implementation("sinkattn"), which knows padding from tokens that are gone'
            )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Each layer's, in each forward: the model may have been switched since the cache was made."""
        self._check_attention()
        return super().update(*args, **kwargs)

    def crop(self, max_length: int) -> None:
        """Takes back the tokens from max_length on, or the last -max_length ones; first it sees that all layers can."""
        length = self.get_seq_length()
        if max_length < 0:
            max_length = max(length + max_length, 0)
        if max_length >= length:
            return
        layers: list[Any] = self.layers
        dropped = max(layer.dropped for layer in layers)
        if dropped:
            raise ValueError(f"sinkattn: a layer has dropped {dropped} tokens; the cache cannot be cropped any more")
        super().crop(max_length - length)  # the layers of transformers 5.23 take nothing but a number of tokens to drop


class _Turn:
    """Moves rotated keys on by positions, with the model's own rotary embedding."""

    def __init__(self, model: Any, config: Any) -> None:
        parameters = getattr(config, "rope_parameters", None) or {}
        self.rotary: Any = getattr(model, "rotary_emb", None)
        prefix, self.options = "", {}
        if "full_attention" in parameters:  # frequencies by type of layer; no other type's keys are turned
            parameters, prefix = parameters["full_attention"], "full_attention_"
            self.options = {"layer_type": "full_attention"}
        self.scaling: float = getattr(self.rotary, f"{prefix}attention_scaling", 1.0)
        self.apply: Any = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
        kind, part = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
        if self.rotary is None or self.apply is None or kind not in _FIXED_ROPE or part != 1.0:
            raise NotImplementedError(
                f"sinkattn: {type(model).__name__} has rope_parameters {parameters}; a StreamingCache needs rotary_emb"
                f" and apply_rotary_pos_emb, a rope_type of {_FIXED_ROPE} and no partial_rotary_factor"
            )
        self.by = 0
        self.cos: Any = None
        self.sin: Any = None

    def __call__(self, keys: Tensor, by: int) -> Tensor:
        """keys [batch, num_kv_heads, tokens, head_dim]; all layers of a forward move theirs by as much."""
        x = keys.float()
        if self.by != by or self.cos is None or self.cos.device != x.device:
            self.by = by
            self.cos, self.sin = self.rotary(x, torch.full((1, 1), by, device=x.device), **self.options)
        turned: Tensor = self.apply(x, x, self.cos, self.sin)[1]
        return (turned / self.scaling).to(keys.dtype)


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """keys, values [batch, num_kv_heads, kept, head_dim] of cumulative_length tokens."""

    keys: Any
    values: Any
    cumulative_length: int

    @property
    def dropped(self) -> int:
        return self.cumulative_length - self.kept

    @property
    def kept(self) -> int:
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys.numel() else 0

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0


class _SlidingLayer(_Layer, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """The one of transformers; but reset() there leaves zeros behind, which the next prompt would see as keys."""


class _StreamingLayer(_Layer):  # type: ignore[no-untyped-call]
    """Keeps at most num_sink_tokens + window - 1 tokens: the first, then the last."""

    is_sliding = False

    def __init__(self, window: int, num_sink_tokens: int, turn: _Turn | None = None) -> None:
        super().__init__()
        self.window, self.num_sink_tokens, self.turn = window, num_sink_tokens, turn
        self.cumulative_length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        dropped = self.dropped
        keys, values = (torch.cat(x, -2) for x in ((self.keys, key_states), (self.values, value_states)))
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = self._kept(keys), self._kept(values)
        if dropped and self.turn is not None:  # from where the first keys once stood, so that no rounding adds up
            first = keys[..., : self.num_sink_tokens, :]
            keys = torch.cat((self.turn(first, dropped), keys[..., self.num_sink_tokens :, :]), -2)
        return keys, values

    def _kept(self, x: Tensor) -> Tensor:
        """What the next token still sees, beside itself."""
        first, last = self.num_sink_tokens, x.shape[-2] - (self.window - 1)
        return x if last <= first else torch.cat((x[..., :first, :], x[..., last:, :]), -2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The offset is negative, so that hf.attention_mask knows: what is gone stood behind the first tokens."""
        return self.kept + query_length, -1 - self.dropped

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_cache_shape(self) -> int:
        return self.num_sink_tokens + self.window

    def crop(self, max_length: int) -> None:
        super().crop(max_length)
        self.cumulative_length = self.kept


class _SinkLayer(_StreamingLayer):  # type: ignore[no-untyped-call]
    """Of a layer with a window, that sees the first keys through it where they stand, at their own distance."""

    is_sliding = True
