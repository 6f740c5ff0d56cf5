# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a small gpt-oss on real text, once with sinkattn and once with eager attention, and compare.

The model is a small gpt-oss: alternating layers with a window of 128 and full ones, grouped heads, experts, sinks from
N(0, 1.5). The text is the language reference that Python ships, read as bytes. All runs share weights and batches; with
--dtype bfloat16 a third one, eager attention in fp32, is what both losses are compared with. Written to --output:
results.json, finetune.png and the tuned model.
"""

import argparse
import contextlib
import copy
import json
import pydoc_data.topics
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM

import sinkattn
import sinkattn.hf

IMPLEMENTATIONS = ("sinkattn", "eager")
EXACT = "eager, fp32"
FAR = 1e-5  # of the largest logit


def make_model(seed: int) -> GptOssForCausalLM:
    torch.manual_seed(seed)
    # initializer_range: at this width the default leaves attention all but flat for hundreds of steps.
    config = GptOssConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=128,
        initializer_range=0.06, pad_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    return model


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes for training and, from the last tenth of the topics, for evaluation; int64 [bytes]."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    cut = len(topics) * 9 // 10
    train, held_out = ("\n".join(part).encode() for part in (topics[:cut], topics[cut:]))
    return torch.tensor(list(train)), torch.tensor(list(held_out))


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


@torch.no_grad()
def evaluate(model: GptOssForCausalLM, ids: Tensor) -> float:
    """Mean loss in nats a byte over ids [rows, length]."""
    return statistics.fmean(model(row[None], labels=row[None]).loss.item() for row in ids)


def train(
    model: GptOssForCausalLM, name: str, dtype: torch.dtype, text: Tensor, held_out: Tensor, args: argparse.Namespace
) -> dict[str, Any]:
    device = torch.device(args.device)
    model.to(device).train()
    held_out = held_out.to(device)
    # Weights stay in fp32; a lower dtype is for the arithmetic.
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    generator = torch.Generator().manual_seed(args.seed)
    losses, seconds = [], []
    with autocast:
        before = evaluate(model, held_out)
    with tqdm(range(args.steps), desc=name.ljust(8), unit="step") as progress:
        for _ in progress:
            ids = windows(text, args.batch, args.length, generator).to(device)
            start = time.perf_counter()
            with autocast:
                loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            losses.append(loss.item())  # waits for the device, so the clock is right
            seconds.append(time.perf_counter() - start)
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    with autocast:
        after = evaluate(model, held_out)
    speed = args.batch * args.length / statistics.median(seconds)
    return {"eval_loss_before": before, "eval_loss_after": after, "losses": losses, "tokens_per_second": speed}


def sinks(model: GptOssForCausalLM) -> Tensor:
    """[num_layers, num_q_heads]"""
    return torch.stack([layer.self_attn.sinks.detach().float().cpu() for layer in model.model.layers])


@torch.no_grad()
def logit_difference(model: GptOssForCausalLM, ids: Tensor) -> dict[str, float]:
    """Differences of sinkattn's and eager's logits in fp32 on the CPU; ids are [rows, length].

    Where two experts tie in a router, a token may visit another one: it, and those after it in its row, differ by far
    and are counted apart.
    """
    model = copy.deepcopy(model).cpu().eval()
    logits, chosen = [], []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda module, inputs, outputs: chosen[-1].append(outputs[-1]))
    for name in IMPLEMENTATIONS:
        model.set_attn_implementation(name)
        chosen.append([])
        logits.append(model(ids).logits)
    ours, eager = (torch.stack(choice).view(len(choice), *ids.shape, -1).sort(-1).values for choice in chosen)
    rerouted = (ours != eager).any(-1).any(0)  # [rows, length]
    after = rerouted.cumsum(1) > 0
    difference = (logits[0] - logits[1]).abs().amax(-1)
    largest = logits[1].abs().max().item()
    found = {
        "median": difference.median(),
        "largest": difference.max(),
        "largest_before_rerouting": torch.where(after, 0.0, difference).max(),
        "far": (difference > FAR * largest).float().mean(),
        "rerouted": rerouted.float().mean(),
    }
    return {"largest_logit": largest} | {name: x.item() for name, x in found.items()}


@torch.no_grad()
def sink_mass(model: GptOssForCausalLM, ids: Tensor) -> Tensor:
    """Share of each head's attention that its sink takes, exp(s - LSE), mean over rows; [num_layers, num_q_heads]."""
    mass = []

    def recording(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        s_aux, window = kwargs["s_aux"], kwargs["sliding_window"]
        out, lse = sinkattn.flash_attn_func(
            *(x.transpose(1, 2) for x in (query, key, value)), softmax_scale=kwargs["scaling"], causal=True,
            window_size=(-1 if window is None else window - 1, 0), s_aux=s_aux, return_lse=True,
        )  # fmt: skip
        mass.append((s_aux[:, None] - lse).exp().mean(dim=(0, 2)))
        return out, None

    AttentionInterface.register("recording", recording)
    model = copy.deepcopy(model).cpu().eval()
    model.set_attn_implementation("recording")
    model(ids)
    return torch.stack(mass)


def plot(results: dict[str, Any], path: Path) -> None:
    figure, (curves, shares) = plt.subplots(1, 2, figsize=(13, 4.5), width_ratios=(2, 3), layout="constrained")
    for name, style in zip(IMPLEMENTATIONS, ("-", "--"), strict=True):
        run = results["runs"][name]
        label = f"{name}: {run['tokens_per_second']:,.0f} tokens/s, eval {run['eval_loss_after']:.3f}"
        curves.plot(run["losses"], style, label=label)
    curves.set(xlabel="step", ylabel="training loss, nats a byte", title="same weights, same batches")
    curves.legend()

    before, after = (torch.tensor(results["sink_mass"][when]) for when in ("before", "after"))
    num_layers, num_heads = after.shape
    x = torch.arange(num_layers)[:, None] * (num_heads + 1.5) + torch.arange(num_heads)
    shares.bar(x.flatten(), after.flatten(), width=0.9, color="tab:orange", label="sink")
    shares.bar(x.flatten(), 1 - after.flatten(), 0.9, after.flatten(), color="tab:blue", alpha=0.5, label="keys")
    shares.scatter(x.flatten(), before.flatten(), marker="_", color="black", label="sink, before tuning")
    shares.set_xticks(x.float().mean(1), [f"layer {i}\n{kind}" for i, kind in enumerate(results["layer_types"])])
    shares.set(ylabel="share of attention", yscale="log", ylim=(1e-4, 1), title="where each head's mass goes")
    shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(results: dict[str, Any]) -> None:
    runs = Table(title="fine-tuning", title_justify="left")
    for heading in ("attention", "eval loss before", "eval loss after", "tokens/s"):
        runs.add_column(heading, justify="left" if heading == "attention" else "right")
    for name, run in results["runs"].items():
        losses = (f"{run[f'eval_loss_{when}']:.4f}" for when in ("before", "after"))
        runs.add_row(name, *losses, f"{run['tokens_per_second']:,.0f}")

    learned = Table(title="sinks with sinkattn, and their share of attention; mean of the heads", title_justify="left")
    for heading in ("layer", "before", "after", "largest move", "mass before", "mass after"):
        learned.add_column(heading, justify="left" if heading == "layer" else "right")
    pairs = [[torch.tensor(results[key][when]) for when in ("before", "after")] for key in ("sinks", "sink_mass")]
    for i, kind in enumerate(results["layer_types"]):
        (s_before, s_after), (p_before, p_after) = ((before[i], after[i]) for before, after in pairs)
        learned.add_row(
            f"{i} {kind}", f"{s_before.mean():+.3f}", f"{s_after.mean():+.3f}",
            f"{(s_after - s_before).abs().max():.3f}", f"{p_before.mean():.1%}", f"{p_after.mean():.1%}",
        )  # fmt: skip

    console = Console()
    console.print(runs, learned)
    seen = results["logit_difference"]
    rerouted = "Each token goes to the same experts."
    if seen["rerouted"]:
        rerouted = (
            f"{seen['rerouted']:.2%} of the tokens go to other experts: two tie in a router there and last bits decide."
            f" Ahead of them in their rows the largest is {seen['largest_before_rerouting']:.1e}."
        )
    ours, eager = (results["runs"][name]["tokens_per_second"] for name in IMPLEMENTATIONS)
    console.print(
        f"{ours / eager:.1f} times the tokens a second of eager attention at length {results['length']}.\n"
        f"Logits against eager's in fp32, the largest difference of each token: median {seen['median']:.1e}, largest"
        f" {seen['largest']:.1e}, above {FAR:g} of the largest logit ({seen['largest_logit']:.1f}) in {seen['far']:.2%}"
        f" of the tokens.\n{rerouted}"
    )
    if distances := results["loss_distance"]:
        both = ", ".join(f"{name} {distance:.2e}" for name, distance in distances.items())
        console.print(f"Training losses against eager's in fp32, mean difference in {results['dtype']}: {both}.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--batch", type=int, default=2, help="rows a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    args = parser.parse_args(arguments)

    sinkattn.hf.register()
    text, held_out_text = load_text()
    held_out = windows(held_out_text, 8, args.length, torch.Generator().manual_seed(args.seed))
    initial = make_model(args.seed)
    print(f"{sum(p.numel() for p in initial.parameters()):,} parameters, {len(text):,} bytes of text")

    tuned, runs = {}, {}
    dtype = getattr(torch, args.dtype)
    exact = {} if dtype == torch.float32 else {EXACT: ("eager", torch.float32)}
    for name, (implementation, of_run) in ({name: (name, dtype) for name in IMPLEMENTATIONS} | exact).items():
        model = copy.deepcopy(initial)
        model.set_attn_implementation(implementation)  # the one line
        runs[name] = train(model, name, of_run, text, held_out, args)
        tuned[name] = model

    model = tuned["sinkattn"]
    results = {
        **{key: getattr(args, key) for key in ("steps", "length", "batch", "device", "dtype")},
        "layer_types": [kind.removesuffix("_attention") for kind in model.config.layer_types],
        "runs": runs,
        "sinks": {"before": sinks(initial).tolist(), "after": sinks(model).tolist()},
        "sink_mass": {when: sink_mass(m, held_out).tolist() for when, m in (("before", initial), ("after", model))},
        "logit_difference": logit_difference(model, held_out),
        "loss_distance": {
            name: statistics.fmean(abs(a - b) for a, b in zip(runs[name]["losses"], runs[EXACT]["losses"], strict=True))
            for name in IMPLEMENTATIONS
            if exact
        },
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, args.output / "finetune.png")
    model.save_pretrained(args.output / "model")
    report(results)
    print(f"Written to {args.output}: results.json, finetune.png, model")


if __name__ == "__main__":
    main()
