# SPDX-License-Identifier: Apache-2.0
"""sinkattn as the attention of transformers models: the logits, gradients and tokens of eager attention."""

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import (
    LENGTHS,
    Calls,
    assert_close,
    assert_same_gradients,
    boundaries,
    gradients,
    loss,
    one_by_one,
    positions,
    tokens,
)
from tiny_gpt_oss import SIZES, WINDOW, tiny_gpt_oss
from torch import Tensor
from transformers import DynamicCache, GptOssForCausalLM, StaticCache, masking_utils

import sinkattn.hf as hf

hf.register()


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, WINDOW), (2, 29)])
def test_dense_matches_eager(
    model: GptOssForCausalLM, eager: GptOssForCausalLM, shape: tuple[int, int], use_cache: bool
) -> None:
    ids = tokens(*shape)
    got, want = (m(ids, use_cache=use_cache).logits for m in (model, eager))
    assert_close(got, want, 1e-5)
    assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))


def test_the_sink_matters(model: GptOssForCausalLM) -> None:
    """The comparisons above would pass without sinks if these did not move the logits."""
    ids = tokens(1, 29)
    with torch.no_grad():
        want = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
        assert (model(ids).logits - want).abs().max() > 1e-2 * want.abs().max()


PADDING = {
    "left": [(11, 0), (0, 0), (28, 0)],
    "right": [(0, 11), (0, 0), (0, 28)],
    "both": [(4, 5), (0, 20), (9, 0)],
    "empty row": [(0, 0), (29, 0), (3, 3)],
}


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING.keys())
def test_padded_matches_eager(
    model: GptOssForCausalLM, eager: GptOssForCausalLM, padding: list[tuple[int, int]]
) -> None:
    ids, mask = tokens(3, 29), torch.ones(3, 29, dtype=torch.int64)
    for row, (left, right) in enumerate(padding):
        mask[row, :left] = 0
        mask[row, 29 - right :] = 0
    seen = mask.bool()
    got, want = (m(ids, attention_mask=mask).logits[seen] for m in (model, eager))
    assert_close(got, want, 1e-5)
    assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))
    with torch.no_grad():  # no token sees the padding
        other = model(torch.where(seen, ids, 96 - ids % 7), attention_mask=mask).logits[seen]
    assert torch.equal(other, got)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_padding_gets_zeros(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 6, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=dtype)
    out, _ = hf.attention_forward(torch.nn.Module(), q, q[:, :2], q[:, :2], mask, s_aux=torch.randn(4))
    mask = mask.bool()
    assert (out[~mask] == 0).all()
    assert (out[mask] != 0).all()


def test_all_ones_mask_is_no_mask(model: GptOssForCausalLM) -> None:
    ids = tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


def by_position_ids(ids: Tensor) -> dict[str, Any]:
    return {"position_ids": positions(LENGTHS)}


def by_position_ids_and_full_mask(ids: Tensor) -> dict[str, Any]:
    return by_position_ids(ids) | {"attention_mask": torch.ones_like(ids)}


def by_cu_seq_lens(ids: Tensor) -> dict[str, Any]:
    cu, longest = boundaries(LENGTHS), max(LENGTHS)
    bounds = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    return by_position_ids(ids) | bounds


@pytest.mark.parametrize("how", [by_position_ids, by_position_ids_and_full_mask, by_cu_seq_lens])
def test_packed_matches_one_by_one(
    model: GptOssForCausalLM, eager: GptOssForCausalLM, how: Callable[[Tensor], dict[str, Any]]
) -> None:
    ids = tokens(1, sum(LENGTHS))
    got, want = model(ids, use_cache=False, **how(ids)).logits, one_by_one(eager, ids, LENGTHS)
    assert_close(got, want, 1e-5)
    assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))


def test_packed_rows_of_a_batch(model: GptOssForCausalLM, eager: GptOssForCausalLM) -> None:
    ids = tokens(2, sum(LENGTHS))
    position_ids = torch.cat([positions(LENGTHS), positions(LENGTHS[::-1])])
    with torch.no_grad():
        got = model(ids, position_ids=position_ids, use_cache=False).logits
        assert_close(got[:1], one_by_one(eager, ids[:1], LENGTHS), 1e-5)
        assert_close(got[1:], one_by_one(eager, ids[1:], LENGTHS[::-1]), 1e-5)
        shared = model(ids, position_ids=position_ids[:1], use_cache=False).logits
        assert torch.equal(shared[:1], got[:1])
        assert_close(shared[1:], one_by_one(eager, ids[1:], LENGTHS), 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing_is_exact(model: GptOssForCausalLM, use_reentrant: bool, packed: bool) -> None:
    ids = tokens(1, sum(LENGTHS))
    inputs = {"input_ids": ids, "use_cache": False} | (by_position_ids(ids) if packed else {})
    model.train()
    want = gradients(model, loss(model(**inputs).logits))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = gradients(model, loss(model(**inputs).logits))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_lora_leaves_sinks_frozen_and_free(model: GptOssForCausalLM, eager: GptOssForCausalLM) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ids, both = tokens(2, 20), []
    for base in (model, eager):
        torch.manual_seed(3)
        adapted = peft.get_peft_model(base, config)
        with Calls() as calls:
            logits = adapted(ids).logits
            both.append((logits, gradients(adapted, loss(logits))))
        if base is model:
            backward = calls.named("flash_attn_bwd")
            assert len(backward) == 2
            assert all(arguments["s_aux"] is None and result[3].numel() == 0 for arguments, result in backward)
    assert_close(both[0][0], both[1][0], 1e-5)
    assert_same_gradients(both[0][1], both[1][1])


@pytest.mark.parametrize("use_cache", [False, True])
def test_autocast_bf16(model: GptOssForCausalLM, eager: GptOssForCausalLM, use_cache: bool) -> None:
    """q and k reach the attention in fp32, v in bf16 or, with a cache, fp32: as near to fp32 as eager."""
    ids = tokens(2, 40)
    exact = eager(ids).logits
    exact_gradients = gradients(eager, loss(exact))
    with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        got, low = (m(ids, use_cache=use_cache).logits for m in (model, eager))
    forward = calls.named("flash_attn_fwd")
    assert [arguments["q"].dtype for arguments, _ in forward] == [torch.bfloat16] * 2
    assert [arguments["s_aux"].dtype for arguments, _ in forward] == [torch.float32] * 2
    assert (got - exact).abs().mean() <= 1.5 * (low - exact).abs().mean()
    got_gradients, low_gradients = gradients(model, loss(got)), gradients(eager, loss(low))
    for name, want in exact_gradients.items():
        assert (got_gradients[name] - want).norm() <= 2 * (low_gradients[name] - want).norm() + 0.02 * want.norm(), name


def test_switching_back_to_eager_is_exact(model: GptOssForCausalLM) -> None:
    ids = tokens(2, 20)
    with torch.no_grad():
        ours = model(ids).logits
        model.set_attn_implementation("eager")
        before = model(ids).logits
        model.set_attn_implementation("sinkattn")
        assert torch.equal(model(ids).logits, ours)
        model.set_attn_implementation("eager")
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("prompt", [3, 12, WINDOW])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_matches_eager(
    model: GptOssForCausalLM, eager: GptOssForCausalLM, prompt: int, cache: str, padded: bool
) -> None:
    ids = tokens(2, prompt)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : prompt - 2] = 0
    options: dict[str, Any] = {
        "max_new_tokens": 14,
        "do_sample": False,
        "cache_implementation": cache,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    got, want = (m.generate(ids, attention_mask=mask, **options) for m in (model, eager))
    assert torch.equal(got.sequences, want.sequences)
    assert_close(torch.stack(got.logits), torch.stack(want.logits), 1e-5)


@pytest.mark.parametrize(
    "make_cache", [DynamicCache, lambda config: StaticCache(config, max_cache_len=40)], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("padded", [False, True])
def test_chunked_prefill(
    model: GptOssForCausalLM, eager: GptOssForCausalLM, make_cache: Callable[..., Any], padded: bool
) -> None:
    ids = tokens(2, 29)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    cache = make_cache(config=model.config)
    chunks, begin = [], 0
    with torch.no_grad():
        for length in (3, 9, 5, 1, 11):
            end = begin + length
            extra = {"attention_mask": mask[:, :end]} if padded else {}
            step = model(ids[:, begin:end], position_ids=position_ids[:, begin:end], past_key_values=cache, **extra)
            chunks.append(step.logits)
            begin = end
        want = eager(ids, attention_mask=mask, position_ids=position_ids).logits
    assert_close(torch.cat(chunks, 1)[mask.bool()], want[mask.bool()], 1e-5)


@pytest.mark.parametrize("form", ["dense", "packed", "padded"])
def test_compiles_without_a_graph_break(form: str) -> None:
    q, k, s_aux = torch.randn(2, 4, 12, 16), torch.randn(2, 2, 12, 16), torch.randn(4, requires_grad=True)
    position_ids, mask = torch.arange(12)[None], None
    if form == "packed":
        position_ids = positions([4, 1, 1, 6])
    if form == "padded":
        mask = torch.arange(12) >= torch.tensor([[5], [0]])

    def attend(q: Tensor, k: Tensor, s_aux: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        mask = hf.attention_mask(2, 12, 12, attention_mask=mask, mask_function=causal)
        return hf.attention_forward(
            torch.nn.Module(), q, k, k, mask, sliding_window=5, s_aux=s_aux, position_ids=position_ids
        )[0]

    causal = masking_utils.sliding_window_causal_mask_function(5)
    results = []
    for f in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, s_aux)]
        out = f(*leaves, position_ids, mask)
        loss(out).backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 1e-6)


def test_whole_model_compiles(model: GptOssForCausalLM) -> None:
    """With its masks, made inside the graph; eager experts loop over data, so the batched ones stand in."""
    torch.compiler.reset()
    model.set_experts_implementation("batched_mm")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :9] = 0
    for inputs in ({}, {"attention_mask": mask}, {"position_ids": positions([13, 1, 6])}):
        got, want = (m(ids, use_cache=False, **inputs).logits for m in (compiled, model))
        seen = inputs.get("attention_mask", torch.ones_like(mask)).bool()
        assert_close(got[seen], want[seen], 1e-6)
        assert_same_gradients(gradients(model, loss(got[seen])), gradients(model, loss(want[seen])))


@pytest.mark.parametrize("padded", [False, True])
def test_privacy_filter_two_sided(padded: bool) -> None:
    module = pytest.importorskip("transformers.models.openai_privacy_filter.modeling_openai_privacy_filter")
    config = module.OpenAIPrivacyFilterConfig(**SIZES | {"num_attention_heads": 14, "sliding_window": 4})
    torch.manual_seed(0)
    model = module.OpenAIPrivacyFilterModel._from_config(config, attn_implementation="sinkattn")
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.bool)
    if padded:
        mask[0, 13:] = False
    got, want = (m(ids, attention_mask=mask).last_hidden_state[mask] for m in (model, eager))
    assert_close(got, want, 1e-5)
    assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))


def test_model_refusals(model: GptOssForCausalLM) -> None:
    ids = tokens(2, 12)
    square = torch.zeros(2, 1, 12, 12)
    with pytest.raises(NotImplementedError, match=r"attention_mask is .*\(2, 1, 12, 12\)"):
        model(ids, attention_mask=square)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(NotImplementedError, match="prefix_grouper"):
        model(ids, prefix_grouper=object())
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="covers 12 tokens"):
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
    with pytest.raises(ValueError, match="restart"):
        model(ids, position_ids=positions([6, 6]), past_key_values=cache)
    dropping = tiny_gpt_oss(attention_dropout=0.1).train()
    with pytest.raises(NotImplementedError, match="dropout is"):
        dropping(ids)


def test_attention_refusals() -> None:
    q, s_aux, module = torch.randn(1, 4, 6, 8), torch.randn(4), torch.nn.Module()

    def attend(mask: Tensor | None = None, *, module: torch.nn.Module = module, **kwargs: Any) -> None:
        hf.attention_forward(module, q, q, q, mask, **({"s_aux": s_aux} | kwargs))

    attend(
        use_cache=True, output_router_logits=True, output_attentions=None, seq_idx=torch.zeros(1, 6), unheard_of=None
    )
    with pytest.raises(NotImplementedError, match="softcap"):
        attend(softcap=30.0)
    with pytest.raises(ValueError, match=r"s_aux has shape \(8,\) and query has 4 heads"):
        attend(s_aux=torch.randn(8))
    with pytest.raises(NotImplementedError, match="unheard_of"):
        attend(unheard_of=1)
    with pytest.raises(ValueError, match="sliding_window is 0"):
        attend(sliding_window=0)
    with pytest.raises(ValueError, match="come together"):
        attend(cu_seq_lens_q=boundaries([6]))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        attend(torch.ones(1, 9, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="float32"):
        attend(torch.zeros(1, 6))
    with pytest.raises(NotImplementedError, match="position_ids"):
        attend(position_ids=torch.arange(6).expand(3, 1, 6))
    compressing = torch.nn.Module()
    compressing.compressor = torch.nn.Linear(1, 1)
    with pytest.raises(NotImplementedError, match="compressor"):
        attend(module=compressing)
    with_sinks = torch.nn.Module()
    with_sinks.sinks = torch.nn.Parameter(s_aux)
    with pytest.raises(ValueError, match="not to be dropped"):
        attend(module=with_sinks, s_aux=None)


def test_import_without_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("hf_without_transformers", hf.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-build-isolation '\.\[hf\]'") as error:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert error.value.name == "transformers"


def test_forgotten_register(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in (hf.AttentionInterface, hf.AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "sinkattn")
    said = 'Specified `attn_implementation="sinkattn"` is not supported'
    with pytest.raises(ValueError, match=said):
        tiny_gpt_oss()
    with pytest.raises(ValueError, match=said):
        tiny_gpt_oss("eager").set_attn_implementation("sinkattn")
    assert said in (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()


def test_import_sinkattn_leaves_transformers_alone() -> None:
    subprocess.run([sys.executable, "-c", "import sys, sinkattn; assert 'transformers' not in sys.modules"], check=True)
