# SPDX-License-Identifier: Apache-2.0
"""256 greedy tokens with every kind of cache: eager fp32's, from one pass over the text without a cache.

A row of that pass depends on no later token: where each token is its row's choice, the text is the one eager generates.
On CUDA, where attention is in half precision, that holds for a model that knows what comes next.
"""

from typing import Any

import pytest
import torch
from gpus import needs_gpus
from hf_cases import assert_close, tokens
from packaging.version import Version
from tiny_gpt_oss import tiny_gpt_oss
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, GptOssForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import sinkattn.hf as hf

if Version(hf.transformers.__version__) < Version(hf.MIN_TRANSFORMERS):
    pytest.skip(f"transformers is {hf.transformers.__version__}, older than sinkattn.hf needs", allow_module_level=True)

from sinkattn.cache import _ROTATED_MODELS, StreamingCache

hf.register()

STEPS, PROMPT, WINDOW, SINKS = 256, 21, 24, 3
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpus())]
LONG_PROMPT = SINKS + WINDOW + 30
CASES = [("dynamic", PROMPT), ("static", PROMPT), *(("streaming", n) for n in (PROMPT, 2, LONG_PROMPT))]
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}  # of the largest logit


def attention_in_half(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    out, _ = hf.attention_forward(module, query.half(), key.half(), value.half(), *rest, **options)
    return out.float(), None


def make_model(device: str, num_layers: int = 2, **config: Any) -> GptOssForCausalLM:
    """A sliding and a full layer, or full ones only; every token visits every expert, so that no choice flips."""
    types = ["sliding_attention", "full_attention"] if num_layers == 2 else ["full_attention"] * num_layers
    sizes: dict[str, Any] = {"num_hidden_layers": num_layers, "layer_types": types, "hidden_size": 32}
    sizes |= {"intermediate_size": 16, "num_attention_heads": 4, "num_local_experts": 2, "eos_token_id": None}
    model = tiny_gpt_oss(**sizes | config)
    if device == "cuda":
        AttentionInterface.register("sinkattn", attention_in_half)
    return model.to(device)


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> Any:
    """And the attention that a test puts in sinkattn's place goes with it."""
    torch.set_num_threads(1)
    yield
    hf.register()


class Streaming:
    """Attention that knows what a StreamingCache keeps, over whole sequences: an eager fp32 one for the full layers.

    Row i of the prompt sees all before it. Row i behind it sees keys j < SINKS and j > i - WINDOW; the first keys are
    moved on by the tokens that are missing between.
    """

    def __init__(self, model: GptOssForCausalLM, prompt: int) -> None:
        self.prompt, self.inv_freq = prompt, model.model.rotary_emb.inv_freq.double()

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        if module.sliding_window is not None:
            return eager_attention_forward(module, query, key, value, mask, scaling)
        length = query.shape[2]
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = query @ k.transpose(2, 3)
        row, column = torch.arange(length)[:, None].to(k.device), torch.arange(length).to(k.device)
        missing = torch.where(row < self.prompt, 0, (row + 1 - SINKS - WINDOW).clamp(min=0))  # [rows, 1]
        first = k[:, :, None, :SINKS].double()  # [batch, heads, 1, SINKS, head_dim]
        pairs = torch.complex(*first.chunk(2, -1)) * torch.polar(
            torch.ones_like(angle := missing * self.inv_freq), angle
        ).unsqueeze(1)
        turned = torch.cat((pairs.real, pairs.imag), -1).float()  # [batch, heads, rows, SINKS, head_dim]
        scores[..., :SINKS] = torch.einsum("bhrd,bhrsd->bhrs", query, turned)
        seen = (column <= row) & ((row < self.prompt) | (column < SINKS) | (column > row - WINDOW))
        scores = (scores * scaling).masked_fill(~seen, -torch.inf)
        sinks = module.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(1, 2).contiguous(), None


def from_scratch(model: GptOssForCausalLM, text: Tensor, prompt: int, cache: str) -> Tensor:
    """[STEPS, batch, vocabulary], of the tokens behind the prompt."""
    name = "eager"
    if cache == "streaming":
        name = "streaming_from_scratch"
        AttentionInterface.register(name, Streaming(model, prompt))
        AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation(name)
    with torch.no_grad():
        logits = model(text[:, :-1], use_cache=False).logits[:, prompt - 1 :]
    model.set_attn_implementation("sinkattn")
    return logits.transpose(0, 1)


def generate(model: GptOssForCausalLM, ids: Tensor, cache: str, **options: Any) -> Any:
    if cache == "streaming":
        options["past_key_values"] = StreamingCache(model, WINDOW, SINKS)
    else:
        options["cache_implementation"] = cache
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False, output_logits=True,
        return_dict_in_generate=True, disable_compile=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cache", "prompt"), CASES)
def test_tokens_are_those_from_scratch(cache: str, prompt: int, device: str) -> None:
    model, ids = make_model(device), tokens(2, prompt).to(device)
    got = generate(model, ids, cache)
    logits, chosen = from_scratch(model, got.sequences, prompt, cache), got.sequences[:, prompt:]
    if device == "cpu":
        assert torch.equal(logits.argmax(-1).T, chosen)
    assert_close(torch.stack(got.logits).float(), logits, TOLERANCE[device])
    assert len(chosen.unique()) > 10  # a model that repeats itself would prove little


PERIOD = 11  # more than the windowed layer sees


@pytest.fixture(scope="module")
def repeats() -> dict[str, Tensor]:
    """For CUDA: weights that go on with a text of period 11, at any place and by far, so no rounding turns the choice.

    How soon they do depends on the CPU, whose last bits training makes much of: 420 steps on some, 460 on others.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, generator = make_model("cpu").train(), torch.Generator().manual_seed(3)
    model.set_attn_implementation("eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses: list[float] = []
    for rows, length in [(8, 38)] * 340 + [(2, 290)] * 600:
        ids = torch.randint(1, 97, (rows, PERIOD), generator=generator).repeat(1, 27)[:, :length]
        logits = model(ids, use_cache=False).logits[:, PERIOD:-1]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PERIOD + 1 :].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) >= 420 and max(losses[-10:]) < 0.04:
            break
    torch.set_num_threads(threads)
    return model.state_dict()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("cache", "prompt"), [case for case in CASES if case[1] > PERIOD])
def test_greedy_tokens_are_those_from_scratch(cache: str, prompt: int, device: str, repeats: dict[str, Tensor]) -> None:
    model, ids = make_model(device), tokens(2, PERIOD).to(device).repeat(1, 6)[:, :prompt]
    model.load_state_dict(repeats)
    text = generate(model, ids, cache).sequences
    logits, chosen = from_scratch(model, text, prompt, cache), text[:, prompt:]
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 2 * TOLERANCE["cuda"] * logits.abs().max()
    assert torch.equal(logits.argmax(-1).T, chosen)
    assert len(chosen.unique()) > 10


@pytest.mark.parametrize("device", DEVICES)
def test_kept_tokens_count_as_one_text(device: str) -> None:
    """With one layer, whose keys depend on their tokens alone, a step is that of a text of the kept tokens."""
    model, ids = make_model(device, num_layers=1), tokens(2, PROMPT).to(device)
    got = generate(model, ids, "streaming")
    model.set_attn_implementation("eager")
    for step in range(0, STEPS, 5):
        text = got.sequences[:, : PROMPT + step]
        if text.shape[1] > SINKS + WINDOW and step:
            text = torch.cat((text[:, :SINKS], text[:, -WINDOW:]), 1)
        with torch.no_grad():
            assert_close(got.logits[step].float(), model(text, use_cache=False).logits[:, -1], TOLERANCE[device])


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_prompt_in_chunks(chunk: int) -> None:
    model, ids = make_model("cpu", num_layers=1), tokens(2, 80)
    got = generate(model, ids, "streaming", prefill_chunk_size=chunk)
    kept = ids[:, :0]
    for piece in ids.split(chunk, 1):
        kept = torch.cat((kept, piece), 1)
        text, most = kept, SINKS + WINDOW - 1
        kept = kept if kept.shape[1] <= most else torch.cat((kept[:, :SINKS], kept[:, 1 - WINDOW :]), 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert_close(got.logits[0], model(text, use_cache=False).logits[:, -1], TOLERANCE["cpu"])


def test_the_cache_stops_growing() -> None:
    model, ids = make_model("cpu"), tokens(1, PROMPT)
    cache = StreamingCache(model, WINDOW, SINKS)
    for step in range(60):
        with torch.no_grad():
            model(ids if step == 0 else tokens(1, 1, seed=step), past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == PROMPT + step
        sizes = [layer.keys.shape[-2] for layer in cache.layers]
        assert sizes == [7, min(PROMPT + step, SINKS + WINDOW - 1)]


def test_after_reset_it_is_as_new() -> None:
    model, ids = make_model("cpu"), tokens(1, PROMPT)
    cache = StreamingCache(model, WINDOW, SINKS)
    with torch.no_grad():
        want = [model(ids, past_key_values=cache, use_cache=True).logits for ids in ids.split(7, 1)]
        cache.reset()
        assert cache.get_seq_length() == 0
        got = [model(ids, past_key_values=cache, use_cache=True).logits for ids in ids.split(7, 1)]
    assert torch.equal(torch.cat(got, 1), torch.cat(want, 1))


@pytest.mark.parametrize(("sliding_window", "window"), [(8, WINDOW), (32, 4)])  # one layer or the other has dropped
def test_cropping_all_layers_or_none(sliding_window: int, window: int) -> None:
    model, ids = make_model("cpu", sliding_window=sliding_window), tokens(1, 12)
    cache, fresh = StreamingCache(model, window, 1), StreamingCache(model, window, 1)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache, use_cache=True)
        model(ids[:, :3], past_key_values=fresh, use_cache=True)
        cache.crop(-1)
        more = [model(ids[:, 3:], past_key_values=x, use_cache=True).logits for x in (cache, fresh)]
        assert_close(*more, TOLERANCE["cpu"])
        with pytest.raises(ValueError, match=r"has dropped [58] tokens; the cache cannot be cropped"):
            cache.crop(10)
        cache.crop(12)
        assert [layer.get_seq_length() for layer in cache.layers] == [12, 12]
        more = [model(ids[:, :1], past_key_values=x, use_cache=True).logits for x in (cache, fresh)]
    assert_close(*more, TOLERANCE["cpu"])


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(1, 0), (1, 2), (5, 0)])
def test_small_windows(window: int, num_sink_tokens: int) -> None:
    model, ids = make_model("cpu", num_layers=1), tokens(2, 12)
    cache = StreamingCache(model, window, num_sink_tokens)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        got = model(ids[:, :1], past_key_values=cache, use_cache=True).logits[:, -1]
        kept = torch.cat((ids[:, :num_sink_tokens], ids[:, 13 - window :], ids[:, :1]), 1)
        model.set_attn_implementation("eager")
        assert_close(got, model(kept, use_cache=False).logits[:, -1], TOLERANCE["cpu"])


def test_beams_are_reordered() -> None:
    model, ids = make_model("cpu"), tokens(2, PROMPT)
    options: dict[str, Any] = {"max_new_tokens": 24, "num_beams": 3, "do_sample": False}
    options["attention_mask"] = torch.ones_like(ids)
    got = model.generate(ids, past_key_values=StreamingCache(model, WINDOW, SINKS), **options)
    AttentionInterface.register("streaming_from_scratch", Streaming(model, PROMPT))
    AttentionMaskInterface.register("streaming_from_scratch", eager_mask)
    model.set_attn_implementation("streaming_from_scratch")
    assert torch.equal(got, model.generate(ids, use_cache=False, **options))


SMALL_EXPERTS = {
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def make_known(model_type: str, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "initializer_range": 0.2, "pad_token_id": 0,
        "eos_token_id": None, "bos_token_id": None, "layer_types": ["full_attention"],
        "sliding_window": 16 if model_type in ("gpt_oss", "ministral", "olmo3") else None,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **sizes | SMALL_EXPERTS | config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sinkattn").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.2, 2.0)
    return model


@pytest.mark.parametrize("model_type", _ROTATED_MODELS)
def test_known_models_turn_their_keys(model_type: str) -> None:
    model, ids = make_known(model_type), tokens(1, 40)
    cache = StreamingCache(model, 8, SINKS)
    with torch.no_grad():
        for token in ids.split(1, 1):
            got = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
        model.set_attn_implementation("eager")
        kept = torch.cat((ids[:, :SINKS], ids[:, -8:]), 1)
        assert_close(got, model(kept, use_cache=False).logits[:, -1], TOLERANCE["cpu"])
    assert cache.layers[0].dropped == 40 - SINKS - 7


def test_max_cache_shape_is_what_a_step_sees() -> None:
    model, seen = make_model("cpu"), []
    cache = StreamingCache(model, WINDOW, SINKS)
    layer: Any = cache.layers[1]
    update = layer.update
    layer.update = lambda *args, **kwargs: (x := update(*args, **kwargs), seen.append(x[0].shape[-2]))[0]
    with torch.no_grad():
        for token in tokens(1, SINKS + WINDOW + 5).split(1, 1):
            model(token, past_key_values=cache, use_cache=True)
    assert max(seen) == seen[-1] == layer.get_max_cache_shape() == SINKS + WINDOW


@pytest.mark.parametrize("model_type", _ROTATED_MODELS)
def test_packed_rows_raise(model_type: str) -> None:
    model, ids = make_known(model_type), tokens(1, 6)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "use_cache": True}
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids)):
            with pytest.raises(NotImplementedError, match="position_ids restart within a row"):
                model(ids, attention_mask=mask, past_key_values=StreamingCache(model, 8), **packed)
        late = {"position_ids": torch.arange(3, 9)[None], "use_cache": True}
        model(ids, past_key_values=StreamingCache(model, 8), **late)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_is_switched_afterwards_raises(padded: bool) -> None:
    model, ids = make_model("cpu"), tokens(2, 6)
    cache, mask = StreamingCache(model, 8), torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        model.set_attn_implementation("eager")
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="attn_implementation is 'eager'; a StreamingCache needs"):
                model(ids, attention_mask=mask if padded else None, past_key_values=cache, use_cache=True)
        model.set_attn_implementation("sinkattn")
        model(ids, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("model_type", ["smollm3", "cohere2", "exaone4", "hunyuan_v1_dense", "gemma3_text", "afmoe"])
def test_models_with_other_keys_raise(model_type: str) -> None:
    """Without positions in some layers, normalised after they were rotated, or with two kinds of rotary embeddings."""
    with pytest.raises(NotImplementedError, match=f"this one is '{model_type}', use a DynamicCache"):
        StreamingCache(make_known(model_type), 8)


def test_a_compiled_model() -> None:
    model, ids = make_model("cpu"), tokens(2, 12)
    compiled = torch.compile(model, backend="eager")
    got, want = StreamingCache(model, 8, SINKS), StreamingCache(model, 8, SINKS)
    with torch.no_grad():
        for piece in (ids[:, :7], *ids[:, 7:].split(1, 1)):
            a, b = (m(piece, past_key_values=c, use_cache=True).logits for m, c in ((compiled, got), (model, want)))
            assert_close(a, b, TOLERANCE["cpu"])
        assert [layer.dropped for layer in got.layers] == [5, 2]
        mask = torch.ones(2, 13, dtype=torch.long)
        mask[0, :2] = 0
        packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
        with pytest.raises(NotImplementedError, match="position_ids restart within a row"):
            compiled(ids[:, :7], position_ids=packed, past_key_values=StreamingCache(model, 8), use_cache=True)
        with pytest.raises(NotImplementedError, match="attention_mask has padding"):
            compiled(ids[:, :1], attention_mask=mask, past_key_values=got, use_cache=True)


def test_what_it_does_not_serve_raises() -> None:
    model, ids = make_model("cpu"), tokens(2, 6)
    for window, num_sink_tokens in ((0, 4), (8, -1)):
        with pytest.raises(ValueError, match=f"window is {window} and num_sink_tokens {num_sink_tokens}"):
            StreamingCache(model, window, num_sink_tokens)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(NotImplementedError, match="attention_mask has padding"):
        model.generate(ids, attention_mask=mask, past_key_values=StreamingCache(model, 8), max_new_tokens=3)
    model.set_attn_implementation("eager")
    with pytest.raises(NotImplementedError, match="attn_implementation is 'eager'"):
        StreamingCache(model, 8)
    for change in ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, {"partial_rotary_factor": 0.5}):
        model = make_model("cpu")
        model.config.rope_parameters = model.config.rope_parameters | change
        with pytest.raises(NotImplementedError, match="StreamingCache needs rotary_emb"):
            StreamingCache(model, 8)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match=r"layers of type .'linear_attention'. have no StreamingCache"):
        StreamingCache(model, 8)
    with pytest.raises(NotImplementedError, match="each layer has a window of its own"):
        StreamingCache(make_model("cpu", layer_types=["sliding_attention"] * 2), 8)
