# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the same tokens under the same weights: a trainer's, a prefill's in chunks and a decoder's.

A policy gradient takes their ratio to be 1 before training. The model is a small gpt-oss with random weights and sinks
from N(0, 1.5); the text is the language reference that Python ships, read as bytes. Passes:

    trainer            all sequences packed into one row, with gradients; eager attention gets them as a batch
    chunks             a cache that keeps all keys, the sequences in uneven chunks
    decode             such a cache, the prompt at once and then token by token, all sequences in one batch, after
                       register(invariant=True)
    decode, invariant  the same through flash_attn_with_kvcache(invariant=True)
    decode, split      the same with invariant=False, which on CUDA splits the keys of a sequence by load

torch's matmuls and means too give a row other bits beside other rows, so each pass runs twice: on torch's own and on
ones that compute ROWS rows at a time. With these and sinkattn all passes but the split one must agree bit for bit on
the decoded tokens; the script fails where they do not.
"""

import argparse
import contextlib
import pydoc_data.topics
from collections.abc import Callable
from itertools import accumulate, cycle, pairwise, takewhile
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GptOssConfig, GptOssForCausalLM

import sinkattn
import sinkattn.hf

ROWS = 16
CHUNKS = (37, 64, 5, 1, 18)  # again and again
DECODERS = {"invariant": True, "split": False}


class FixedRows(TorchDispatchMode):
    """Matmuls and means over the last dimension, in blocks of ROWS rows: a row has its bits beside any others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.mm.default:
            return in_blocks(lambda rows: func(rows, args[1]), args[0])
        if func is aten.addmm.default and not kwargs:
            return in_blocks(lambda rows: func(args[0], rows, args[2]), args[1])
        if func is aten.mean.dim and args[1] == [-1]:
            x = args[0]
            return in_blocks(lambda rows: func(rows, *args[1:]), x.flatten(0, -2)).view(*x.shape[:-1], -1)
        return func(*args, **(kwargs or {}))


def fix_rows(model: torch.nn.Module) -> None:
    """The same in a model of vLLM's on a CPU, until weights are loaded again."""

    def fixed(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def in_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = in_blocks(lambda rows: linear(rows, weight, bias), x.flatten(0, -2))
            return out.view(*x.shape[:-1], -1)

        return in_rows

    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.cpu_linear = fixed(layer.cpu_linear)


def in_blocks(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """function(rows) for rows [n, width], ROWS at a time, the last ones beside zeros."""
    padded = pad(rows, (0, 0, 0, -len(rows) % ROWS)).contiguous()
    return torch.cat([function(block) for block in padded.split(ROWS)])[: len(rows)]


def decode_by(invariant: bool) -> Callable[..., tuple[Tensor, None]]:
    """An attention for transformers that takes keys and values as the cache that they come from."""

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.shape[2] > 1:
            return sinkattn.hf.attention_forward(module, query, key, value, mask, **kwargs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window, s_aux = kwargs["sliding_window"], kwargs["s_aux"]
        left = -1 if window is None else window - 1
        out = sinkattn.flash_attn_with_kvcache(
            q, k, v, causal=True, window_size=(left, 0), s_aux=s_aux, invariant=invariant
        )
        return out, None

    return attend


def make_model(args: argparse.Namespace) -> GptOssForCausalLM:
    torch.manual_seed(args.seed)
    config = GptOssConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=args.heads, num_key_value_heads=args.heads // 4, head_dim=64, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=64, initializer_range=args.hidden**-0.5, pad_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    return model.to(args.device, getattr(torch, args.dtype))


def load_text(batch: int, length: int) -> Tensor:
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    return torch.tensor(list(text[: batch * length])).view(batch, length)


def log_probs(logits: Tensor, ids: Tensor, prompt: int) -> Tensor:
    """Of each token after the prompt's and the one that follows it, which a prefill gives; fp32."""
    return logits[:, prompt:-1].float().log_softmax(-1).gather(2, ids[:, prompt + 1 :, None])[..., 0].detach()


def by_trainer(model: GptOssForCausalLM, ids: Tensor, packed: bool) -> Tensor:
    if not packed:
        return model(ids, use_cache=False).logits
    position_ids = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))[None]
    return model(ids.view(1, -1), position_ids=position_ids, use_cache=False).logits.view(*ids.shape, -1)


@torch.no_grad()
def in_steps(model: GptOssForCausalLM, ids: Tensor, lengths: list[int]) -> Tensor:
    """With a cache that keeps all keys, also on windowed layers: cut to the window, they would count from elsewhere."""
    cache = DynamicCache()
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(lengths, dim=1)], dim=1)


def passes(model: GptOssForCausalLM, ids: Tensor, prompt: int, attention: str) -> dict[str, Tensor]:
    """Log-probabilities by each pass; the trainer's come first."""
    ends = takewhile(lambda end: end < ids.shape[1], accumulate(cycle(CHUNKS)))
    chunks = [end - begin for begin, end in pairwise([0, *ends, ids.shape[1]])]
    steps = [prompt, *[1] * (ids.shape[1] - prompt)]
    model.set_attn_implementation(attention)
    logits = {"trainer": by_trainer(model.train(), ids, packed=attention == "sinkattn")}
    model.eval()
    logits |= {"chunks": in_steps(model, ids, chunks), "decode": in_steps(model, ids, steps)}
    for name in DECODERS if attention == "sinkattn" else ():
        model.set_attn_implementation(name)
        logits[f"decode, {name}"] = in_steps(model, ids, steps)
    return {name: log_probs(x, ids, prompt) for name, x in logits.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--prompt", type=int, default=192, help="tokens ahead of the decoded ones")
    parser.add_argument("--tokens", type=int, default=32, help="decoded a sequence")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model; gpt-oss-20b's is 2880")
    parser.add_argument("--heads", type=int, default=8, help="of queries, four for each of keys")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    sinkattn.hf.register(invariant=True)
    for name, invariant in DECODERS.items():
        AttentionInterface.register(name, decode_by(invariant))
        AttentionMaskInterface.register(name, sinkattn.hf.attention_mask)
    model = make_model(args)
    model.set_experts_implementation("eager")
    ids = load_text(args.batch, args.prompt + args.tokens).to(args.device)

    shown = Table(title=f"log-probabilities against the trainer's, {args.dtype} on {args.device}", title_justify="left")
    for heading in ("attention", "matmuls", "pass", "largest gap", "mean gap", "same bits"):
        shown.add_column(heading, justify="left" if heading in ("attention", "matmuls", "pass") else "right")
    broken = []
    for attention in ("sinkattn", "eager"):
        for matmuls in (f"{ROWS} rows", "torch's"):
            with contextlib.nullcontext() if matmuls == "torch's" else FixedRows():
                found = passes(model, ids, args.prompt, attention)
            trainer = found.pop("trainer")
            for name, other in found.items():
                gap, same = (other - trainer).abs(), (other == trainer).double().mean().item()
                shown.add_row(attention, matmuls, name, f"{gap.max():.1e}", f"{gap.mean():.1e}", f"{same:.1%}")
                if attention == "sinkattn" and matmuls != "torch's" and "split" not in name and same < 1:
                    broken.append(name)
    Console(width=120).print(shown)
    if broken:
        raise SystemExit(f"not bit for bit: {', '.join(broken)}")
    print("sinkattn, on matmuls of fixed rows: trainer, chunks and decode agree bit for bit.")


if __name__ == "__main__":
    main()
