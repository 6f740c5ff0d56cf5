# SPDX-License-Identifier: Apache-2.0
"""Which tokens form a sequence: by positions, by padding, by both; found once a forward and never stale."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_cases import LENGTHS, assert_close, assert_same_gradients, gradients, loss, one_by_one, positions, tokens
from tiny_gpt_oss import WINDOW, tiny_gpt_oss
from torch import Tensor
from transformers import GptOssForCausalLM

import sinkattn.hf as hf
import sinkattn.hf_sequences as hf_sequences

hf.register()


def bounds(mask: Any, position_ids: Any, q_len: int | None = None) -> tuple[list[int], list[int]]:
    """cu_seqlens of one row; mask and position_ids are lists."""
    mask = None if mask is None else torch.tensor([mask]).bool()
    position_ids = None if position_ids is None else torch.tensor([position_ids])
    k_len = (position_ids if mask is None else mask).shape[1]
    found = hf_sequences.find_sequences(mask, position_ids, 1, k_len if q_len is None else q_len, k_len)
    assert found.tokens is None
    return found.cu_seqlens_q.tolist(), found.cu_seqlens_k.tolist()


def test_length_one_neighbours() -> None:
    assert bounds(None, [0, 0, 0, 1, 0, 7, 8, 8]) == ([0, 1, 2, 4, 5, 7, 8],) * 2


def test_padding_has_queries_without_keys_and_keys_without_queries() -> None:
    assert bounds([1, 1, 1, 1], None) == ([0, 4], [0, 4])
    assert bounds([0, 0, 1, 1, 1], None) == ([0, 2, 2, 5], [0, 0, 2, 5])
    assert bounds([1, 1, 0], None) == ([0, 2, 3, 3], [0, 2, 2, 3])
    assert bounds([0, 0], None) == ([0, 2, 2], [0, 0, 2])
    # two queries behind three cached keys, the first of them padding
    assert bounds([0, 1, 1, 1, 1], None, q_len=2) == ([0, 0, 0, 2], [0, 0, 1, 5])
    # positions in the padding say nothing
    assert bounds([0, 0, 1, 1], [0, 0, 0, 1]) == ([0, 2, 2, 4], [0, 0, 2, 4])
    assert bounds([1, 1, 0, 0], [0, 1, 1, 1]) == ([0, 2, 4, 4], [0, 2, 2, 4])
    # restarts amid the tokens, and behind padding
    assert bounds([0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 1, 2]) == ([0, 1, 1, 3, 5, 6, 6], [0, 0, 1, 3, 5, 5, 6])
    assert bounds([1, 1, 0, 1, 1], [0, 1, 2, 0, 1]) == ([0, 2, 3, 3, 5], [0, 2, 2, 3, 5])


@pytest.mark.parametrize("position_ids", [None, [0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 2, 3]])
def test_a_sequence_goes_on_behind_padding(position_ids: Any) -> None:
    """Where positions count on, with the padding or without it."""
    p = None if position_ids is None else torch.tensor([position_ids])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]]).bool()
    found = hf_sequences.find_sequences(mask, p, 1, 6, 6)
    assert found.tokens is not None
    assert [x.tolist() for x in (*found[:2], *found.tokens)] == [[0, 4], [0, 4], [0, 1, 4, 5], [0, 1, 4, 5]]
    found = hf_sequences.find_sequences(mask, None, 1, 3, 6)
    assert found.tokens is not None
    assert [x.tolist() for x in (*found[:2], *found.tokens)] == [[0, 2], [0, 4], [1, 2], [0, 1, 4, 5]]


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_packed_positions_beside_padding(model: GptOssForCausalLM, eager: GptOssForCausalLM, side: str) -> None:
    ids, position_ids = tokens(1, sum(LENGTHS)), positions(LENGTHS)
    want = one_by_one(eager, ids, LENGTHS)
    at = {"left": 0, "right": ids.shape[1], "between": LENGTHS[0]}[side]
    filler = torch.zeros(1, 1, dtype=torch.int64)
    ids, position_ids = (torch.cat((x[:, :at], filler, x[:, at:]), 1) for x in (ids, position_ids))
    mask = torch.ones_like(ids)
    mask[:, at] = 0
    got = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits[mask.bool()][None]
    assert_close(got, want, 1e-5)
    assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))


def test_packed_rows_of_a_padded_batch(model: GptOssForCausalLM, eager: GptOssForCausalLM) -> None:
    ids, position_ids = tokens(2, 12), torch.cat((positions([5, 7]), positions([9, 3])))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    for use_cache in (False, True):
        with torch.no_grad():
            got = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=use_cache).logits
        assert_close(got[:1], one_by_one(eager, ids[:1], [5, 7]), 1e-5)
        assert_close(got[1:, :9], eager(ids[1:, :9]).logits, 1e-5)


def tune(model: Any, kind: str) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    torch.manual_seed(3)
    config = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    tuned = peft.get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=5))
    for name, parameter in tuned.named_parameters():
        if "prompt_encoder" in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return tuned


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_virtual_tokens_before_left_padding(model: GptOssForCausalLM, eager: GptOssForCausalLM, kind: str) -> None:
    """Each row is what it is alone, without padding; its window counts tokens, not padding."""
    ids, pads = tokens(3, 14), [6, 0, 13]
    mask = torch.ones_like(ids)
    for row, n in enumerate(pads):
        mask[row, :n] = 0
    position_ids = (mask.cumsum(1) - 1).clamp(min=0) + 5
    ours, theirs = tune(model, kind), tune(eager, kind)

    def run(tuned: Any, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        if kind == "prefix":  # peft drops position_ids
            tuned = tuned.base_model
            past = ours.get_prompt(len(ids)) if tuned is ours.base_model else theirs.get_prompt(len(ids))
            mask = torch.cat((torch.ones(len(ids), 5, dtype=mask.dtype), mask), 1)
            return tuned(ids, attention_mask=mask, position_ids=position_ids, past_key_values=past).logits
        prompts = tuned.get_prompt(len(ids))
        embeds = torch.cat((prompts, tuned.word_embeddings(ids)), 1)
        mask = torch.cat((torch.ones(len(ids), 5, dtype=mask.dtype), mask), 1)
        position_ids = torch.cat((torch.arange(5).expand(len(ids), -1), position_ids), 1)
        return tuned.base_model(inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids).logits[:, 5:]

    got = run(ours, ids, mask, position_ids)[mask.bool()]
    alone = [
        run(theirs, ids[row : row + 1, n:], mask[row : row + 1, n:], position_ids[row : row + 1, n:])[0]
        for row, n in enumerate(pads)
    ]
    want = torch.cat(alone)
    assert WINDOW < 14
    assert_close(got, want, 1e-5)
    got_gradients, want_gradients = gradients(ours, loss(got)), gradients(theirs, loss(want))
    assert got_gradients.keys() == want_gradients.keys()
    assert any("prompt_encoder" in name for name in want_gradients)
    for name in want_gradients:
        assert_close(got_gradients[name], want_gradients[name], 1e-4, name)


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_left_padding_as_peft_passes_it(kind: str) -> None:
    """Through peft's own forward and generate; no window, in which eager attention would count the padding."""
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    results = []
    for attention in ("sinkattn", "eager"):
        tuned = tune(tiny_gpt_oss(attention, sliding_window=64), kind)
        with torch.no_grad():
            logits = tuned(ids, attention_mask=mask).logits[:, -5:]
        results.append((logits, tuned.generate(input_ids=ids, attention_mask=mask, **options)))
    assert_close(results[0][0], results[1][0], 1e-5)
    assert torch.equal(results[0][1], results[1][1])


def test_padding_amid_a_sequence_gets_zeros() -> None:
    torch.manual_seed(0)
    q, s_aux = torch.randn(1, 4, 6, 8), 1.5 * torch.randn(4)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    out, _ = hf.attention_forward(torch.nn.Module(), q, q, q, mask, s_aux=s_aux, sliding_window=3)
    kept = q[:, :, mask[0]]
    want, _ = hf.attention_forward(torch.nn.Module(), kept, kept, kept, None, s_aux=s_aux, sliding_window=3)
    assert (out[~mask] == 0).all()
    assert torch.equal(out[mask][None], want)


def test_a_graph_refuses_padding_amid_a_sequence(model: GptOssForCausalLM) -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    with pytest.raises(NotImplementedError, match=r"leave out torch\.compile"):
        hf.sequence_bounds(mask.bool(), None, 1, 6, 6)


def test_sequences_are_found_once_a_forward(model: GptOssForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    find = hf.find_sequences
    monkeypatch.setattr(hf, "find_sequences", lambda *args: calls.append(args) or find(*args))
    gc.collect()
    kept = len(hf._kept)
    model.train()
    ids, position_ids = tokens(1, sum(LENGTHS)), positions(LENGTHS)
    padding = torch.ones(1, ids.shape[1], dtype=torch.int64)
    padding[:, :4] = 0
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for inputs in ({"position_ids": position_ids}, {"attention_mask": padding}, {}):
            calls.clear()
            loss(model(ids, use_cache=False, **inputs).logits).backward()
            assert len(calls) == 2, "one for the mask of each kind of layer, none in the second run of a checkpoint"
    model.eval()
    cache = model(ids, use_cache=True).past_key_values
    calls.clear()
    model(ids[:, :1], past_key_values=cache)
    assert calls == [], "a single token without padding needs none"
    del cache
    gc.collect()
    assert len(hf._kept) == kept


def by_item(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


def by_data(x: Tensor, index: Any, value: Any) -> None:
    x.data[index] = value


def by_numpy(x: Tensor, index: Any, value: Any) -> None:
    x.detach().numpy()[index] = value.numpy() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", [by_item, by_data, by_numpy])
def test_inputs_changed_in_place(
    model: GptOssForCausalLM, eager: GptOssForCausalLM, change: Callable[..., None], inference: bool
) -> None:
    ids = tokens(1, 12)
    with torch.inference_mode() if inference else torch.no_grad():
        position_ids = torch.arange(12)[None]
        assert_close(model(ids, position_ids=position_ids, use_cache=False).logits, eager(ids).logits, 1e-5)
        change(position_ids, (0, slice(7, None)), torch.arange(5))
        want = one_by_one(eager, ids, [7, 5])
        for use_cache in (False, True):
            got = model(ids, position_ids=position_ids, use_cache=use_cache).logits
            assert_close(got, want, 1e-5)
        change(position_ids, (0, slice(None)), torch.arange(12))
        mask = torch.ones(1, 12, dtype=torch.bool)
        model(ids, position_ids=position_ids, attention_mask=mask, use_cache=False)
        change(mask, (0, slice(9, None)), False)
        got = model(ids, position_ids=position_ids, attention_mask=mask, use_cache=False).logits[:, :9]
        assert_close(got, eager(ids[:, :9]).logits, 1e-5)


def attend(mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    torch.manual_seed(0)
    q = torch.randn(1, 4, 6, 8)
    return hf.attention_forward(torch.nn.Module(), q, q, q, mask, s_aux=torch.zeros(4), position_ids=position_ids)[0]


@pytest.mark.parametrize("change", [by_item, by_data, by_numpy])
def test_tensors_of_another_origin_are_read_in_each_layer(change: Callable[..., None]) -> None:
    """Without a mask of the model's, nothing tells one forward from the next."""
    position_ids = positions([6])
    whole, parts = attend(None, positions([6])), attend(None, positions([2, 4]))
    assert not torch.equal(whole, parts)
    assert torch.equal(attend(None, position_ids), whole)
    change(position_ids, slice(None), positions([2, 4]))
    assert torch.equal(attend(None, position_ids), parts)
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert torch.equal(attend(mask, None), whole)
    change(mask, (0, slice(0, 2)), False)
    assert (attend(mask, None)[0, :2] == 0).all()


def test_a_mask_and_other_positions() -> None:
    mask = hf.attention_mask(1, 6, 6)
    position_ids = positions([6])
    whole, parts = attend(None, positions([6])), attend(None, positions([2, 4]))
    assert torch.equal(attend(mask, position_ids), whole)
    assert torch.equal(attend(mask, positions([2, 4])), parts)
    assert torch.equal(attend(mask, position_ids), whole)
    position_ids.copy_(positions([2, 4]))
    assert torch.equal(attend(mask, position_ids), parts)
    padding = torch.ones(1, 6, dtype=torch.bool)
    mask = hf.attention_mask(1, 6, 6, attention_mask=padding)
    assert torch.equal(attend(mask, None), whole)
    padding[0, :2] = False
    assert (attend(mask, None)[0, :2] == 0).all()


def test_padding_amid_tokens_beside_a_cache_of_a_window_raises() -> None:
    """Such a cache has dropped tokens in favour of the padding."""
    model, ids = tiny_gpt_oss(sliding_window=6), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    with pytest.raises(NotImplementedError, match="beside a cache that keeps a window's last keys"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0)


def test_gathered_positions_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer, and never a strong reference to themselves."""
    calls, find = [], hf.find_sequences
    monkeypatch.setattr(hf, "find_sequences", lambda *args: calls.append(args) or find(*args))
    module, q = torch.nn.Module(), torch.randn(1, 2, 7, 8)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    before = len(hf._kept)
    outs = [
        hf.attention_forward(module, q, q, q, None, position_ids=position_ids, whole_sequence=True)[0] for _ in range(3)
    ]
    assert len(calls) == 1
    assert torch.equal(outs[0], outs[2])
    assert len(hf._kept) == before + 1
    calls.clear()
    del position_ids
    assert len(hf._kept) == before
