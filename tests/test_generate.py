# SPDX-License-Identifier: Apache-2.0
"""generate(): one flash_decode a layer and token with each cache, one graph a token, and first keys seen throughout."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hf_cases import Calls, assert_close, gradients, loss, positions, tokens
from tiny_gpt_oss import WINDOW, tiny_gpt_oss
from torch import Tensor
from transformers import DynamicCache, GptOssForCausalLM, StaticCache
from transformers.masking_utils import sliding_window_causal_mask_function

import sinkattn
import sinkattn.hf as hf
import sinkattn.hf_decode as hf_decode
from sinkattn.cache import StreamingCache
from sinkattn.hf_masks import COLUMNS, LENGTHS

hf.register()
LAYERS, NEW, PROMPT, ROOM = 2, 9, 5, 24


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    torch.set_num_threads(1)


def padded_mask(batch: int, length: int, *pads: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row, n in enumerate(pads):
        mask[row, :n] = 0
    return mask


def generated(model: GptOssForCausalLM, cache: str, pads: tuple[int, ...] = (), **options: Any) -> Tensor:
    ids = tokens(2, PROMPT)
    if cache == "streaming":
        options["past_key_values"] = StreamingCache(model, 6, 2)
    else:
        options["cache_implementation"] = cache
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "output_logits": True}
    mask = padded_mask(2, PROMPT, *pads)
    return torch.stack(model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options).logits)


CASES = [("dynamic", ()), ("dynamic", (3,)), ("static", ()), ("static", (3,)), ("streaming", ())]


@pytest.mark.parametrize(("cache", "pads"), CASES)
def test_a_new_token_is_one_decode_a_layer(cache: str, pads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of the first layer is shorter than the text; what a prefill of one row gives is within rounding."""
    model = tiny_gpt_oss()
    with Calls() as calls:
        got = generated(model, cache, pads)
    assert [name for name, _, _ in calls.seen] == ["flash_attn_fwd"] * LAYERS + ["flash_decode"] * LAYERS * (NEW - 1)
    tables = {arguments.get("block_table") is not None for arguments, _ in calls.named("flash_decode")}
    assert tables == {bool(pads)}, "pages, of one key, only where padding lies among the keys"
    monkeypatch.setattr(hf, "MAX_ROWS", 0)
    with Calls() as calls:
        assert_close(got, generated(model, cache, pads), 1e-5)
    assert not calls.named("flash_decode")


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, max_cache_len=ROOM)])
@pytest.mark.parametrize("gap", [(0, 0), (0, 3), (1, 3)])
def test_wherever_padding_lies(make: Any, gap: tuple[int, int]) -> None:
    """Amid the tokens too, and the new token itself; the rows are those that they are without it."""
    model = tiny_gpt_oss(sliding_window=ROOM)
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[0, slice(*gap)] = 0
    mask[1, 7] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    cache = make(config=model.config)
    with torch.no_grad(), Calls() as calls:
        for at in (slice(0, 7), slice(7, 8)):
            extra = {"attention_mask": mask[:, : at.stop], "position_ids": position_ids[:, at]}
            got = model(ids[:, at], past_key_values=cache, **extra).logits[0, -1]
        assert len(calls.named("flash_decode")) == LAYERS
        want = model(ids[:1, mask[0].bool()], use_cache=False).logits[0, -1]
    assert_close(got, want, 1e-5)
    for _, (out, _) in calls.named("flash_decode"):
        assert (out[1] == 0).all()


def test_a_few_tokens_are_one_decode() -> None:
    """As an assistant proposes; more rows than pay go to the prefill."""
    model, ids = tiny_gpt_oss(), tokens(2, PROMPT + 33)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for new, decodes in ((3, LAYERS), (32, LAYERS), (33, 0)):  # 4 q heads a kv head
            cache = DynamicCache(config=model.config)
            model(ids[:, :PROMPT], past_key_values=cache)
            with Calls() as calls:
                got = model(ids[:, PROMPT : PROMPT + new], past_key_values=cache).logits
            assert_close(got, want[:, PROMPT : PROMPT + new], 1e-5)
            assert len(calls.named("flash_decode")) == decodes
            assert len(calls.seen) == LAYERS
    assert hf_decode.MAX_ROWS == 128


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, max_cache_len=ROOM)])
@pytest.mark.parametrize("pads", [(), (3,)])
def test_gradients_take_the_differentiable_op(make: Any, pads: tuple[int, ...]) -> None:
    """A cached prompt, and one token that trains."""
    model, ids, mask = tiny_gpt_oss(), tokens(2, 6), padded_mask(2, 6, *pads)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    both = []
    for decodes in (make(config=model.config), None):
        logits = None
        if decodes is None:
            logits = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits[:, -1]
        else:
            with torch.no_grad():
                model(ids[:, :5], attention_mask=mask[:, :5], position_ids=position_ids[:, :5], past_key_values=decodes)
            for layer in decodes.layers:  # a static one is written in place, and its values are no leaves
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            with Calls() as calls:
                extra = {"attention_mask": mask, "position_ids": position_ids[:, 5:]}
                logits = model(ids[:, 5:], past_key_values=decodes, **extra).logits[:, -1]
            assert [name for name, _, _ in calls.seen] == ["flash_attn_fwd"] * LAYERS
            assert gradients(model, loss(logits))["model.layers.1.self_attn.sinks"].abs().sum() > 0
        both.append(logits)
    assert_close(both[0], both[1], 1e-5)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("kept", ["growing", "static", "padded"])
def test_invariant_steps_have_the_bits_of_a_prefill(kept: str, window: int | None) -> None:
    """Of the attention alone, since matmuls have other bits; where the cache keeps all keys, behind a window too."""
    torch.manual_seed(0)
    torch.set_num_threads(8)  # so that steps that are not invariant are split
    q, k, s_aux = torch.randn(3, 8, 400, 16), torch.randn(3, 2, 400, 16), torch.randn(8)
    module, options = torch.nn.Module(), {"s_aux": s_aux, "sliding_window": window}
    pads = 3 if kept == "padded" else 0
    seen, function = padded_mask(3, 400, pads, pads, pads), window and sliding_window_causal_mask_function(window)
    with torch.no_grad():
        prefill, _ = hf.attention_forward(module, q[:, :, pads:], k[:, :, pads:], k[:, :, pads:], None, **options)
        hf.register(invariant=True)
        attend = hf.AttentionInterface._global_mapping["sinkattn"]
        hf.register(invariant=False)
        with Calls() as calls:
            for at in (40, 131, 398):
                keys = k if kept == "static" else k[:, :, : at + 1]
                where = (torch.tensor(at), 0) if kept == "static" else (at, 0)
                mask = hf.attention_mask(3, 1, keys.shape[2], *where, function, seen[:, : at + 1] if pads else None)
                got, _ = attend(module, q[:, :, at : at + 1], keys, keys, mask, **options)
                assert torch.equal(got[:, 0], prefill[:, at - pads])
    assert [arguments["invariant"] for arguments, _ in calls.named("flash_decode")] == [True] * 3


def test_what_register_said_of_invariance_stays() -> None:
    """Until a call says otherwise; transformers has no other place that knows it."""
    hf.register(invariant=True)
    hf.register()
    assert hf.AttentionInterface._global_mapping["sinkattn"].keywords == {"invariant": True}
    hf.register(invariant=False)
    hf.register()
    assert hf.AttentionInterface._global_mapping["sinkattn"] is hf.attention_forward


@pytest.mark.parametrize("kind", [LENGTHS, COLUMNS])
def test_a_mask_that_was_moved_dies_with_its_forward(kind: torch.dtype) -> None:
    """A move to another device makes it dense, its own base: what was read of it must be no view of it."""
    q, kv = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 20, 16)
    pads = padded_mask(2, 20, 3) if kind == COLUMNS else None
    mask = hf.attention_mask(2, 1, 20, torch.tensor(9), attention_mask=pads)
    assert mask.dtype == kind
    mask = mask.clone(memory_format=torch.contiguous_format)
    assert mask._base is None
    with torch.no_grad():
        hf.attention_forward(torch.nn.Module(), q, kv, kv, mask)
    alive = weakref.ref(mask)
    del mask
    gc.collect()
    assert alive() is None


def test_pages_of_one_key_are_the_cache() -> None:
    """In any layout; one whose sequences are no whole number of tokens apart is copied."""
    torch.manual_seed(0)
    q, s_aux = torch.randn(3, 1, 4, 8), torch.randn(4)
    seen = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]).bool()
    keys = hf_decode.read_keys(hf_decode.keys_beside_padding(seen, 5, 0, 6))
    assert keys.cache_seqlens.tolist() == [6, 3, 1]
    plain = torch.randn(3, 6, 2, 8)
    heads_first = plain.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.randn(3 * 6 * 16 + 24).as_strided(plain.shape, (6 * 16 + 8, 16, 8, 1)).copy_(plain)
    want = torch.cat(
        [sinkattn.flash_attn_func(q[b : b + 1], plain[b : b + 1, seen[b]], plain[b : b + 1, seen[b]], s_aux=s_aux)
         for b in range(3)]
    )  # fmt: skip
    for cache in (plain, heads_first, odd):
        assert_close(hf_decode.decode(q, cache, cache, keys, s_aux=s_aux), want, 1e-6, "out")
    assert len(keys.tables) == 2


@pytest.mark.parametrize(("kind", "pads"), [("full", ()), ("full", (3,)), ("sliding", (3,))])
def test_a_static_cache_is_one_graph(kind: str, pads: tuple[int, ...]) -> None:
    """From the second token to the last; of a window one more when it is full, as transformers' cache has it."""
    torch.compiler.reset()
    model = tiny_gpt_oss(num_hidden_layers=1, layer_types=[f"{kind}_attention"])
    model.set_experts_implementation("batched_mm")
    graphs: list[int] = []
    step = 0

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(step)
        return graph.forward

    compiled, ids, mask = torch.compile(model, backend=count, fullgraph=True), tokens(2, ROOM), None
    room = WINDOW + 4  # filled to its end
    caches = [StaticCache(config=model.config, max_cache_len=room) for _ in range(2)]
    position_ids = (padded_mask(2, room, *pads).cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for begin, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, room))]:
            if pads:
                mask = padded_mask(2, room if begin else end, *pads)
            both, step = [], end
            for run, cache in zip((compiled if begin else model, model), caches, strict=True):
                extra = {"attention_mask": mask, "position_ids": position_ids[:, begin:end]}
                both.append(run(ids[:, begin:end], past_key_values=cache, **extra).logits[:, -1])
            assert_close(*both, 1e-6)
    assert graphs == ([PROMPT + 1] if kind == "full" else [PROMPT + 1, PROMPT + 2, WINDOW + 1])


def test_a_graph_cannot_miss_a_mask_that_is_too_short() -> None:
    """Nothing is read on the host there: flash_decode refuses the rows."""
    tokens_seen = torch.ones(2, 4, dtype=torch.bool)
    keys = hf_decode.read_keys(hf_decode.keys_beside_padding(tokens_seen, torch.tensor([4]), 0, 8))
    assert keys.cache_seqlens.tolist() == [-1, -1]
    wrong = torch.tensor([False, True])
    keys = hf_decode.read_keys(hf_decode.keys_beside_padding(tokens_seen, torch.tensor([3]), 0, 8, wrong))
    assert keys.cache_seqlens.tolist() == [4, -1]
    q = torch.randn(2, 1, 4, 8)
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is -1"):
        hf_decode.decode(q, q.expand(2, 8, 4, 8), q.expand(2, 8, 4, 8), keys)


def with_sinks(number: int = 2, **config: Any) -> GptOssForCausalLM:
    model = tiny_gpt_oss(**config)
    model.config.num_sink_tokens = number
    return model


def by_reference(model: GptOssForCausalLM) -> GptOssForCausalLM:
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        window = (-1 if kwargs["sliding_window"] is None else kwargs["sliding_window"] - 1, 0)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options = {"window_size": window, "s_aux": kwargs["s_aux"], "softmax_scale": kwargs["scaling"]}
        return sinkattn.reference.flash_attn_func(q, k, v, **options, num_sink_tokens=2), None

    hf.AttentionInterface.register("reference", attend)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("reference")
    return twin


def test_first_keys_in_training_and_packed_rows() -> None:
    model, ids = with_sinks(), tokens(1, 20)
    twin = by_reference(model)
    got, want = model(ids, use_cache=False).logits, twin(ids, use_cache=False).logits
    assert_close(got, want, 1e-5)
    assert (got - tiny_gpt_oss()(ids).logits).abs().max() > 1e-2
    got_gradients, want_gradients = gradients(model, loss(got)), gradients(twin, loss(want))
    for name, gradient in want_gradients.items():
        assert_close(got_gradients[name], gradient, 1e-4, name)
    lengths = [11, 1, 8]
    packed = model(ids, position_ids=positions(lengths), use_cache=False).logits
    alone = torch.cat([twin(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    assert_close(packed, alone, 1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "streaming", "padded"])
def test_first_keys_in_generation(cache: str) -> None:
    model, ids = with_sinks(), tokens(1, 30)
    twin, pads = by_reference(model), 4 if cache == "padded" else 0
    kept = StreamingCache(model, 40) if cache == "streaming" else DynamicCache()
    mask = padded_mask(1, 30, pads)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    got = []
    with torch.no_grad():
        for begin, end in [(0, 7), (7, 12), *((i, i + 1) for i in range(12, 30))]:
            extra = {"attention_mask": mask[:, :end], "position_ids": position_ids[:, begin:end]}
            got.append(model(ids[:, begin:end], past_key_values=kept, **extra).logits)
        want = twin(ids[:, pads:], use_cache=False).logits
    assert_close(torch.cat(got, 1)[:, pads:], want, 1e-5)
    if cache == "streaming":
        assert kept.layers[0].keys.shape[2] == 2 + WINDOW - 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_that_drops_the_first_keys_raises(cache: str) -> None:
    with pytest.raises(NotImplementedError, match=r"num_sink_tokens 2, and the cache has dropped the first tokens"):
        generated(with_sinks(), cache)
    assert generated(with_sinks(sliding_window=PROMPT + NEW), cache).shape[0] == NEW


def test_first_keys_without_a_mask_raise() -> None:
    module, q = torch.nn.Module(), torch.randn(1, 2, 6, 8)
    module.config = with_sinks().config
    with pytest.raises(NotImplementedError, match="4 keys are cached before a row without a mask"):
        hf.attention_forward(module, q[:, :, :2], q, q, None, sliding_window=3)
    hf.attention_forward(module, q, q, q, None, sliding_window=3)
