# SPDX-License-Identifier: Apache-2.0
"""Every causal LM of the installed transformers that builds tiny: right with sinkattn, or refused by a sentence.

python tools/sweep_models.py                 all of them, as the table of docs/models.md; some minutes
python tools/sweep_models.py llama gpt_oss   these; --verbose shows each check's distance

Each model has a layer of each kind, random weights, sinks from N(0, 1.5) and windows of 6 tokens, and is compared in
fp32 with its own eager attention: logits and gradients, padding on both sides, greedy generation, torch.compile; packed
rows with each sequence alone. Exits with 1 when a model is silently wrong.
"""

import argparse
import copy
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

import sinkattn.hf as hf

BATCH, LENGTH, VOCABULARY, WINDOW = 2, 20, 97, 6
PACKED = [7, 1, 1, 11]
TOLERANCE = 1e-4  # of the largest value
MOST_PARAMETERS = 20_000_000

# Written over a model's defaults where it has an attribute of that name.
TINY: dict[str, Any] = {
    "attention_chunk_size": WINDOW, "attention_dropout": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "d_model": 64,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "decoder_layers": 2, "dropout": 0.0, "embd_pdrop": 0.0,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "encoder_layers": 2, "eos_token_id": 2, "ffn_dim": 64,
    "ffn_hidden_size": 64, "first_k_dense_replace": 1, "global_head_dim": 16, "head_dim": 16, "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0, "hidden_size": 64, "hidden_size_per_layer_input": 16, "initializer_range": 0.2,
    "intermediate_size": 64, "kv_lora_rank": 16, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_heads": 8,
    "max_position_embeddings": 128, "max_window_layers": 0, "moe_intermediate_size": 32, "n_embd": 64, "n_group": 1,
    "n_head": 4, "n_inner": 64, "n_layer": 2, "n_positions": 128, "n_routed_experts": 4, "num_attention_heads": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "num_global_key_value_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_kv_shared_layers": 0, "num_local_experts": 4, "pad_token_id": 0, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "resid_pdrop": 0.0, "sliding_window": WINDOW, "topk_group": 1,
    "use_sliding_window": True, "v_head_dim": 8, "vision_intermediate_size": 64, "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip


USED_WHEN_NONE = {"head_dim", "n_routed_experts", "num_experts", "num_key_value_heads", "q_lora_rank", "sliding_window"}

# What some models want beside it.
OF_MODEL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "doge": {"keep_window_size": 64},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_heads": 4},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
}


class Unbuilt(Exception):
    """The model is not one that this command can compare."""


class AsEager(Exception):
    """Packed sequences see each other, as in eager attention: neither the mask nor the layers are told positions."""


def causal_models() -> list[str]:
    return sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read(config: Any, key: str) -> Any:
    """The attribute, or None; some configurations raise for what differs by layer."""
    try:
        return getattr(config, key, None)
    except Exception:
        return None


def sizes_for(default: Any) -> dict[str, Any]:
    """What TINY has to say about a configuration, and about those of its parts."""
    kind = type(default)
    sizes = {
        key: value
        for key, value in TINY.items()
        if not isinstance(getattr(kind, key, None), property)
        and (read(default, key) is not None or (key in USED_WHEN_NONE and hasattr(default, key)))
    }
    if "qk_rope_head_dim" in sizes:  # latent keys: rotary dimensions are head_dim's, and each head has keys
        sizes |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in sizes else {})
    types = read(default, "layer_types")
    if types is not None and not isinstance(getattr(kind, "layer_types", None), property):
        kinds = list(dict.fromkeys(types))  # one layer of each kind, and two at least
        sizes["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    for part in getattr(kind, "sub_configs", {}):
        if read(default, part) is not None:
            sizes[part] = sizes_for(getattr(default, part))
    return sizes


def tiny_config(name: str, **changes: Any) -> Any:
    return AutoConfig.for_model(name, **sizes_for(AutoConfig.for_model(name)) | OF_MODEL.get(name, {}) | changes)


def build(name: str, **changes: Any) -> Any:
    """The model with eager attention, in eval mode. Raises Unbuilt."""
    try:
        config = tiny_config(name, **changes)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise Unbuilt(f"{size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for key, parameter in model.named_parameters():
            if "sink" in key.rsplit(".", 1)[-1]:
                torch.nn.init.normal_(parameter, std=1.5)
        with torch.no_grad():
            logits = model(tokens(), use_cache=False).logits
    except Unbuilt:
        raise
    except Exception as error:
        raise Unbuilt(f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}") from error
    if not logits.isfinite().all():
        raise Unbuilt("its logits are not finite")
    return model


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def worst_distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Of the logits and of gradients; those of a key's bias, which softmax cancels, are all rounding."""
    largest = max(float(x.abs().max()) for key, x in want.items() if key != "logits")
    return max(distance(got[key], want[key]) for key in want if want[key].abs().max() > 1e-5 * largest)


def with_gradients(model: Any, seen: Tensor, **inputs: Any) -> dict[str, Tensor]:
    logits = model(tokens(), use_cache=False, **inputs).logits[seen].float()
    model.zero_grad()
    (logits * torch.sin(torch.arange(logits.numel())).view_as(logits)).mean().backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def padded(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, slice(0, 8) if side == "left" else slice(12, LENGTH)] = 0
    return mask


Check = Callable[[Any, Any], float]


def dense(model: Any, eager: Any) -> float:
    seen = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    got, want = (with_gradients(m, seen) for m in (model, eager))
    return worst_distance(got, want)


def padding(model: Any, eager: Any) -> float:
    worst = 0.0
    for side in ("left", "right"):
        mask = padded(side)
        got, want = (with_gradients(m, mask.bool(), attention_mask=mask) for m in (model, eager))
        worst = max(worst, worst_distance(got, want))
    return worst


def packed_with(use_cache: bool) -> Check:
    def check(model: Any, eager: Any) -> float:
        ids = tokens(1, sum(PACKED))
        position_ids = [torch.arange(n)[None] for n in PACKED]
        with torch.no_grad():
            alone = [
                eager(part, position_ids=p, use_cache=False).logits
                for part, p in zip(ids.split(PACKED, dim=1), position_ids, strict=True)
            ]
            inputs = {"position_ids": torch.cat(position_ids, 1), "use_cache": use_cache}
            got = model(ids, **inputs).logits
            worst = distance(got, torch.cat(alone, 1))
            if use_cache and worst > TOLERANCE and distance(got, eager(ids, **inputs).logits) <= TOLERANCE:
                raise AsEager
        return worst

    return check


def generated(model: Any, eager: Any) -> float:
    mask = padded("left")[:, :12]
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    with torch.no_grad():
        got, want = (torch.stack(m.generate(tokens()[:, :12], **options).logits) for m in (model, eager))
    return distance(got, want)


def compiled(model: Any, eager: Any) -> float:
    torch.compiler.reset()
    graph = torch.compile(model, backend="eager")
    worst = 0.0
    with torch.no_grad():
        for mask in (None, padded("left")):
            got, want = (m(tokens(), attention_mask=mask, use_cache=False).logits for m in (graph, eager))
            seen = torch.ones_like(got[..., 0]).bool() if mask is None else mask.bool()
            worst = max(worst, distance(got[seen], want[seen]))
    return worst


CHECKS: dict[str, Check] = {
    "dense": dense,
    "padded": padding,
    "packed": packed_with(use_cache=False),
    "packed, cached": packed_with(use_cache=True),
    "generated": generated,
    "compiled": compiled,
}


class Asked:
    """Stands for sinkattn's attention and counts how often a model asks for it."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Asked":
        def attend(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return hf.attention_forward(*args, **kwargs)

        hf.register()
        AttentionInterface.register(hf.NAME, attend)
        return self

    def __exit__(self, *_: Any) -> None:
        hf.register()


def zeros(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def takes_position_ids(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def attention_alone_mixes(model: Any) -> bool:
    """Whether a token reaches the next one in no other way: not through a recurrent layer or a convolution."""
    AttentionInterface.register("zeros", zeros)
    AttentionMaskInterface.register("zeros", eager_mask)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("zeros")
    ids = tokens(1)
    other = ids.clone()
    other[:, -2] = ids[:, -2] % (VOCABULARY - 1) + 1
    with torch.no_grad():
        a, b = (twin(x, use_cache=False).logits[:, -1] for x in (ids, other))
    return distance(a, b) <= TOLERANCE


def compare(name: str, checks: list[str] | None = None, verbose: bool = False, **changes: Any) -> dict[str, str]:
    """For each check "right", "wrong: ...", "no: ..." where it raises, "-" where it means nothing. Raises Unbuilt."""
    eager = build(name, **changes)
    model = copy.deepcopy(eager)
    hf.register()
    try:
        model.set_attn_implementation(hf.NAME)
    except Exception as error:
        raise Unbuilt(f"takes no attention by name: {type(error).__name__}") from error
    if model.config._attn_implementation != hf.NAME:
        raise Unbuilt("takes no attention by name")
    results = {}
    for check in checks or CHECKS:
        function = CHECKS[check]
        if check.startswith("packed") and not (takes_position_ids(eager) and attention_alone_mixes(eager)):
            results[check] = "-"
            continue
        try:
            function(eager, eager)
        except AsEager:
            pass
        except Exception as error:
            if verbose:
                print(f"  {name} {check}: eager: {type(error).__name__}: {str(error)[:200]}")
            results[check] = "-"
            continue
        with Asked() as asked:
            try:
                worst = function(model, eager)
            except AsEager:
                results[check] = "as eager"
                continue
            except Exception as error:
                sentence = next((s for s in str(error).splitlines() if "sinkattn:" in s), None)
                other = f"{type(error).__name__}: {error}"[:150]
                results[check] = "no: " + (sentence[sentence.index("sinkattn:") + 10 :] if sentence else other)
                continue
        if verbose:
            print(f"  {name} {check}: {worst:.1e}, asked {asked.count} times")
        right = worst <= TOLERANCE
        results[check] = ("right" if asked.count else "own") if right else f"wrong: {worst:.1e}"
    return results


SHOWN = {"right": "yes", "own": "own"}


def table(found: dict[str, dict[str, str]]) -> str:
    """Markdown: models with the same results in a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, results in found.items():
        cells = [SHOWN.get(x, x.split(":")[0]) for x in results.values()]
        said = next((x[4:] for x in results.values() if x.startswith("no: ")), "")
        said = re.sub(r"\b\w+Config\b( \(.*?\)+(?= is not))?", "…", said)  # the sentence, whatever the model
        rows.setdefault((*cells, f"`{said}`" if said else ""), []).append(name)
    checks = next(iter(found.values()), {})
    lines = ["| models | " + " | ".join(checks) + " | sentence |", "|---" * (len(checks) + 2) + "|"]
    for (*cells, said), names in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} | {said} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="model types; all without")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, help="only these")
    parser.add_argument("--verbose", action="store_true", help="each check's distance")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    unbuilt: dict[str, str] = {}
    for name in arguments.models or causal_models():
        try:
            found[name] = compare(name, arguments.checks, arguments.verbose)
        except Unbuilt as error:
            unbuilt[name] = str(error)
        print(f"{name}: {found.get(name) or unbuilt[name]}", file=sys.stderr, flush=True)
    print(table(found))
    print(f"\nNot compared: {', '.join(unbuilt)}.")
    return int(any(x.startswith("wrong") for results in found.values() for x in results.values()))


if __name__ == "__main__":
    sys.exit(main())
