# SPDX-License-Identifier: Apache-2.0
"""The mask decides what a row sees, in a compiled graph too; a mask of which nothing is known raises."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_cases import LENGTHS, assert_close, assert_same_gradients, gradients, loss, one_by_one, positions, tokens
from tiny_gpt_oss import tiny_gpt_oss
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache, masking_utils

import sinkattn.hf as hf
import sinkattn.hf_masks as hf_masks

hf.register()
WINDOW = 6
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
# Models whose attention is not told its window: only the mask has it.
UNTOLD: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": WINDOW, "num_local_experts": 2, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen2_moe": {"use_sliding_window": True, **SLIDING, **QWEN_MOE},
}


def make(name: str, **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    made = AutoConfig.for_model(name, **SIZES | config)
    eager = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    model = copy.deepcopy(eager)
    model.set_attn_implementation("sinkattn")
    return model, eager


@pytest.mark.parametrize("name", UNTOLD)
@pytest.mark.parametrize("padded", [False, True])
def test_window_of_the_mask_alone(name: str, padded: bool) -> None:
    model, eager = make(name, **UNTOLD[name])
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, : 8 if padded else 0] = 0
    got, want = (m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for m in (model, eager))
    assert_close(got, want, 1e-5)
    assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))
    eager.config.sliding_window = 7
    assert (eager(ids, attention_mask=mask).logits[mask.bool()] - want).abs().max() > 1e-3, "one key more is seen"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_window_of_the_mask_under_checkpointing(use_reentrant: bool) -> None:
    model, eager = make("phimoe", **UNTOLD["phimoe"])
    ids = tokens(1, 20)
    want = gradients(eager.train(), loss(eager(ids, use_cache=False).logits))
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = gradients(model, loss(model(ids, use_cache=False).logits))
    assert_same_gradients(got, want)


@pytest.mark.parametrize("name", UNTOLD)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_window_of_the_mask_in_generation(name: str, cache: str, padded: bool) -> None:
    model, eager = make(name, **UNTOLD[name])
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, : 4 if padded else 0] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options |= {"cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True}
    got, want = (torch.stack(m.generate(ids, **options).logits) for m in (model, eager))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("name", UNTOLD)
def test_window_of_the_mask_compiles(name: str) -> None:
    model, eager = make(name, **UNTOLD[name])
    ids = tokens(2, 20)
    with torch.no_grad():
        assert_close(compiled(model)(ids, use_cache=False).logits, eager(ids).logits, 1e-5)


def compiled(model: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="eager", **options)


def test_layer_and_mask_must_have_one_window() -> None:
    model = tiny_gpt_oss()
    model.model.layers[0].self_attn.sliding_window = 7
    with pytest.raises(ValueError, match="GptOssAttention passes sliding_window 7, and its mask has 8"):
        model(tokens(1, 20))
    model.model.layers[0].self_attn.sliding_window = 8
    model.model.layers[1].self_attn.sliding_window = 8
    with pytest.raises(ValueError, match="GptOssAttention passes sliding_window 8, and its mask has None"):
        model(tokens(1, 20))


def test_a_window_of_nothing_raises_where_a_layer_has_it() -> None:
    """qwen2_moe makes such a mask without use_sliding_window, for layers that it then does not have."""
    q = torch.randn(1, 4, 6, 8)
    mask = hf.attention_mask(1, 6, 6, mask_function=masking_utils.sliding_window_causal_mask_function(0))
    with pytest.raises(ValueError, match="sliding_window is 0"):
        hf.attention_forward(torch.nn.Module(), q, q, q, mask)
    model, eager = make("qwen2_moe", **QWEN_MOE)
    assert_close(model(tokens(1, 12)).logits, eager(tokens(1, 12)).logits, 1e-5)


@pytest.mark.parametrize("compile", [False, True])
def test_a_decoder_made_two_sided(compile: bool) -> None:
    """config.is_causal = False: the mask is two-sided, and the layers still say that they are causal."""
    model, eager = make("llama")
    model.config.is_causal = eager.config.is_causal = False
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    with torch.no_grad():
        causal = eager(ids[:, :6]).logits
        want = eager(ids, attention_mask=mask).logits
        assert (want[:, :6] - causal).abs().max() > 1e-2
        got = (compiled(model) if compile else model)(ids, attention_mask=mask).logits
    assert_close(got[mask.bool()], want[mask.bool()], 1e-5)


PACKED = ["llama", "qwen3", "mistral", "olmo3", "gpt_oss", "phimoe", "qwen2_moe", "gpt_bigcode"]
# With a cache neither gpt_bigcode's mask nor its layers are told the positions, whatever the attention.
CACHED = [(name, "cached") for name in PACKED if name != "gpt_bigcode"]
COMPILED = [(name, "compiled") for name in ("mistral", "qwen2_moe", "gpt_bigcode")]


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in PACKED for form in ("training", "checkpointed")] + CACHED + COMPILED
)
def test_packed_rows(name: str, form: str) -> None:
    if name == "gpt_oss":
        model = tiny_gpt_oss()
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
    else:
        windows = {
            "mistral": {"sliding_window": WINDOW},
            "olmo3": SLIDING,
            "qwen3": {"use_sliding_window": True, **SLIDING},
        } | UNTOLD
        model, eager = make(name, **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, **windows.get(name, {}))
    ids, position_ids = tokens(1, sum(LENGTHS)), positions(LENGTHS)
    want = one_by_one(eager, ids, LENGTHS)
    if form == "checkpointed":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    run = compiled(model) if form == "compiled" else model
    got = run(ids, position_ids=position_ids, use_cache=form == "cached").logits
    assert_close(got, want, 1e-5)
    if form != "compiled":
        assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))


@pytest.mark.parametrize("fullgraph", [None, False, True])
def test_chunked_attention_raises_also_compiled(fullgraph: bool | None) -> None:
    model, _ = make("llama4_text", attention_chunk_size=WINDOW, intermediate_size_mlp=64, num_local_experts=2)
    run = model if fullgraph is None else compiled(model, fullgraph=fullgraph)
    ids = tokens(1, 20)
    with torch.no_grad(), pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported)) as error:
        run(ids, use_cache=False)
    if not fullgraph:
        assert "the mask of Llama4TextConfig" in str(error.value)
        assert "use eager attention" in str(error.value)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "case", ["or", "and", "chunks", "blocks", "padding", "lambda", "constant", "heads", "asymmetric"]
)
def test_unknown_masks_raise(case: str, graph: bool) -> None:
    table = torch.zeros(1, 6, dtype=torch.int64)

    def build() -> Callable[..., Any]:
        causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
        if case == "or":
            return masking_utils.or_masks(causal, both)
        if case == "and":
            return masking_utils.and_masks(causal, lambda b, h, q, k: k % 2 == 0)
        if case == "chunks":
            return masking_utils.chunked_causal_mask_function(4, torch.zeros(1))
        if case == "blocks":
            return masking_utils.and_masks(causal, lambda b, h, q, k: table[b, q] >= table[b, k])
        if case == "padding":
            return masking_utils.and_masks(causal, masking_utils.padding_mask_function(table.bool()))
        if case == "heads":
            return lambda b, h, q, k: (k <= q) & (h < 2)
        if case == "asymmetric":
            return lambda b, h, q, k: k > q - 3
        return (lambda b, h, q, k: q - k < 5) if case == "lambda" else (lambda b, h, q, k: True)

    def ask(x: Tensor) -> Tensor:
        return hf.attention_mask(1, 6, 6, mask_function=build(), device=x.device)

    run = torch.compile(ask, backend="eager") if graph else ask
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match=r"the mask of NoneType .* is not made of"):
        run(torch.zeros(1))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("case", ["causal", "two-sided", "window", "two-sided window", "packed", "own", "narrower"])
def test_known_masks_are_read(case: str, graph: bool) -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2]])
    build, want = {
        "causal": (lambda: masking_utils.causal_mask_function, (True, None)),
        "two-sided": (lambda: masking_utils.bidirectional_mask_function, (False, None)),
        "window": (lambda: masking_utils.sliding_window_causal_mask_function(5), (True, 5)),
        # |q - k| <= 5, so that 6 keys on each side count the row
        "two-sided window": (lambda: masking_utils.sliding_window_bidirectional_mask_function(5), (False, 6)),
        "packed": (
            lambda: masking_utils.and_masks(
                masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(numbers)
            ),
            (True, None),
        ),
        "own": (lambda: lambda b, h, q, k: (q >= k) & (q - 3 < k), (True, 3)),
        "narrower": (
            lambda: masking_utils.and_masks(
                masking_utils.sliding_window_causal_mask_function(5), masking_utils.sliding_window_overlay(4)
            ),
            (True, 4),
        ),
    }[case]

    def ask(x: Tensor) -> Tensor:
        return hf.attention_mask(1, 6, 6, mask_function=build(), device=x.device)

    run = torch.compile(ask, backend="eager", fullgraph=True) if graph else ask
    torch.compiler.reset()
    made = run(torch.zeros(1))
    mask, got = made[:, 0, 0, 0], hf_masks.decode_mask(made)
    assert got == want
    if case == "packed":
        assert mask.tolist() == numbers.tolist()
    else:
        assert mask.dtype == hf_masks.WHOLE
    # The same as transformers makes of it.
    square = masking_utils.sdpa_mask(
        batch_size=1, q_length=6, kv_length=6, mask_function=build(), allow_is_causal_skip=False
    )[0, 0]
    row, column = torch.arange(6)[:, None], torch.arange(6)
    causal, window = got
    seen = (column <= row) if causal else torch.ones(6, 6, dtype=torch.bool)
    if window is not None:
        seen = seen & ((row - column).abs() < window)
    if case == "packed":
        seen = seen & (numbers[0][:, None] == numbers[0])
    assert torch.equal(square, seen)


def test_masks_that_a_model_changed_are_refused() -> None:
    q = torch.randn(1, 4, 6, 8)
    mask = hf.attention_mask(1, 6, 6)
    for changed in (mask[:, :1], mask.float()):
        with pytest.raises(NotImplementedError, match="which the model has changed"):
            hf.attention_forward(torch.nn.Module(), q, q, q, changed)
    with pytest.raises(RuntimeError):  # scores plus such a mask do not go into the next projection
        (torch.zeros(1, 4, 6, 6) + mask).softmax(-1).view(1, 4, 6, 6)


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="came with 5.23")
def test_positions_must_count_on_within_a_sequence() -> None:
    """A mask of positions is one of indices only there."""
    numbers, causal = torch.tensor([[0, 0, 0, 1, 1]]), masking_utils.causal_mask_function
    q = torch.randn(1, 2, 5, 8)
    for position_ids, allowed in ((torch.tensor([[0, 1, 2, 0, 1]]), True), (torch.tensor([[0, 2, 4, 0, 2]]), False)):
        function = masking_utils.packed_sequence_compatibility_function(causal, position_ids, numbers)
        mask = hf.attention_mask(1, 5, 5, mask_function=function)
        if allowed:
            assert hf.attention_forward(torch.nn.Module(), q, q, q, mask)[0].isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match="not runs of tokens whose positions count on"):
                hf.attention_forward(torch.nn.Module(), q, q, q, mask)
    with pytest.raises(NotImplementedError, match="remap_positions_for_packed_sequence"):
        hf.attention_mask(
            1, 5, 5, mask_function=masking_utils.remap_positions_for_packed_sequence(causal, torch.zeros(1, 5))
        )


@pytest.mark.parametrize("name", ["index_topk", "keep_window_size"])
def test_masks_beside_the_mask_function_are_refused(name: str) -> None:
    config = AutoConfig.for_model("llama")
    hf.attention_mask(1, 6, 6, config=config)
    setattr(config, name, 4)
    with pytest.raises(NotImplementedError, match=f"LlamaConfig has {name}"):
        hf.attention_mask(1, 6, 6, config=config)


def test_static_cache_is_cut_to_what_is_used() -> None:
    def in_use(*args: Any, **kwargs: Any) -> Tensor:
        return hf.attention_mask(*args, **kwargs)[:, 0, 0, 0]

    assert in_use(2, 3, 40, q_offset=torch.tensor([7]), kv_offset=0).shape == (2, 10)
    assert in_use(2, 3, 10, q_offset=7, kv_offset=0).shape == (2, 10)
    padding = torch.arange(20) < torch.tensor([[15], [12]])
    assert torch.equal(in_use(2, 3, 10, q_offset=13, kv_offset=6, attention_mask=padding), padding[:, 6:16])
    two_sided = masking_utils.bidirectional_mask_function
    assert in_use(2, 3, 40, q_offset=7, mask_function=two_sided).shape == (2, 40)


def test_a_mask_is_asked_for_twice() -> None:
    mask = hf.attention_mask(2, 6, 6)
    assert hf.attention_mask(2, 6, 6, attention_mask=mask) is mask


def test_masks_of_wrong_shapes_are_refused() -> None:
    q = torch.randn(2, 4, 6, 8)
    k = torch.randn(2, 4, 9, 8)
    module = torch.nn.Module()
    for shape in ((1, 9), (2, 5), (2, 10)):
        with pytest.raises(ValueError, match=r"attention_mask has shape .*between q_len, 6, and k_len, 9"):
            hf.attention_forward(module, q, k, k, torch.ones(shape, dtype=torch.bool))
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, 7:] = False
    module.is_causal = False
    for dtype in (torch.bool, torch.uint8, torch.int64):
        with pytest.raises(NotImplementedError, match="cross-attention"):
            hf.attention_forward(module, q, k, k, padding.to(dtype))
    two_sided = masking_utils.bidirectional_mask_function
    with pytest.raises(NotImplementedError, match="cross-attention"):
        hf.attention_forward(
            module, q, k, k, hf.attention_mask(2, 6, 9, attention_mask=padding, mask_function=two_sided)
        )
    whole = hf.attention_mask(2, 6, 9, mask_function=two_sided)
    out, _ = hf.attention_forward(module, q, k, k, whole)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    assert_close(out, want, 1e-5)
    with pytest.raises(ValueError, match="covers 8 tokens; with what is cached there are 9"):
        hf.attention_mask(2, 6, 9, q_offset=3, attention_mask=padding[:, :8])


@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
def test_chunked_prefill_of_a_window_in_the_mask_alone(make_cache: Any) -> None:
    model, eager = make("qwen2_moe", **UNTOLD["qwen2_moe"])
    options = {"max_cache_len": 40} if make_cache is StaticCache else {}
    cache, ids = make_cache(config=model.config, **options), tokens(2, 20)
    with torch.no_grad():
        chunks = [model(part, past_key_values=cache).logits for part in ids.split([3, 9, 1, 7], dim=1)]
        assert_close(torch.cat(chunks, 1), eager(ids).logits, 1e-5)


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.transformers, "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"4\.57\.6.*5\.5\.3"):
        hf.register()
