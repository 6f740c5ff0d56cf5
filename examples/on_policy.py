# SPDX-License-Identifier: Apache-2.0
"""Train a small model with sinks on samples of vLLM, and measure how far sampler and trainer disagree.

After each weight sync both score the same tokens, and rollout_probs_diff (verl's name) is the difference of their
probabilities:

    eager            transformers' eager attention in the trainer, vLLM's own in the sampler
    trainer alone    sinkattn in the trainer, vLLM's own in the sampler
    both             sinkattn in both
    both, 16 rows    the same, and matmuls that compute 16 rows at a time: this is trained on

granite is a dense model whose code vLLM takes from transformers; in its last line any difference is an error. gpt-oss
is vLLM's own code, whose experts and norms round otherwise (docs/vllm.md): nothing is left with --model-impl
transformers, --experts 4 takes the choice from its router, and a second sync raises (--syncs 1).

The task is to write bytes below 32: the reward is their share. Needs the environment of docs/vllm.md, and no GPU.
"""

import argparse
import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # check_sinks is sent to the engine's process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than a tiny model runs
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from rich.console import Console
from rich.table import Table
from rl_parity import ROWS, FixedRows, fix_rows
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, GraniteSWAConfig, GraniteSWAForCausalLM, PreTrainedModel
from vllm import LLM, SamplingParams

import sinkattn.hf
from sinkattn.vllm import check_sinks

LAST = f"both, {ROWS} rows"
COLUMNS = {
    "eager": ("eager", "own"),
    "trainer alone": ("sinkattn", "own"),
    "both": ("sinkattn", "sinkattn"),
    LAST: ("sinkattn", f"sinkattn, {ROWS} rows"),
}
"""Attention of the trainer, and the sampler."""
REWARDED = 32
_GRANITE = {"layer_types": ["full_attention", "sliding_attention"] * 2, "attention_multiplier": 32**-0.5}
_GPT_OSS = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "granite": (GraniteSWAForCausalLM, GraniteSWAConfig, _GRANITE, "transformers"),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, _GPT_OSS, "auto"),
}


def save_model(args: argparse.Namespace, folder: Path) -> None:
    kind, config, changes, _ = MODELS[args.model]
    torch.manual_seed(args.seed)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "initializer_range": 0.09}
    if "num_experts_per_tok" in changes:
        changes = changes | {"num_experts_per_tok": args.experts}
    # vLLM's reload_weights loses a head that is tied to the embedding.
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | {"tie_word_embeddings": False}
    model = kind(config(**sizes, **heads, **tokens, **changes))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    model.to(getattr(torch, args.dtype)).save_pretrained(folder)


def start_engine(args: argparse.Namespace, folder: Path, attention: str | None) -> LLM:
    return LLM(
        str(folder),
        attention_backend=attention,
        model_impl=args.model_impl,
        dtype=args.dtype,
        max_model_len=args.prompt + args.tokens,
        max_num_batched_tokens=128,  # prompts come in chunks, beside tokens of other sequences
        kv_cache_memory_bytes=1 << 26,
        skip_tokenizer_init=True,
        enforce_eager=True,
        seed=args.seed,
    )


def sync(llm: LLM, model: PreTrainedModel, folder: Path) -> None:
    """The trainer's weights into the engine; sinks that did not arrive raise."""
    model.save_pretrained(folder)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()
    sinks = {name: x.detach() for name, x in model.state_dict().items() if name.endswith("sinks")}
    llm.apply_model(partial(check_sinks, weights=sinks))


def sample(llm: LLM, prompts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """[prompts, tokens] sampled ids and their log-probabilities."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": x} for x in prompts.tolist()], params, use_tqdm=False)
    ids = [list(x.outputs[0].token_ids) for x in done]
    log_probs = [x.outputs[0].logprobs for x in done]
    found = [[at[i].logprob for i, at in zip(*row, strict=True)] for row in zip(ids, log_probs, strict=True)]
    return torch.tensor(ids), torch.tensor(found)


def score(model: PreTrainedModel, prompts: Tensor, ids: Tensor) -> Tensor:
    """The trainer's log-probabilities of ids [prompts, tokens], fp32 and differentiable."""
    logits = model(torch.cat([prompts, ids], dim=1), use_cache=False).logits[:, prompts.shape[1] - 1 : -1]
    return logits.log_softmax(-1, dtype=torch.float32).gather(2, ids[..., None])[..., 0]


def disagreement(trainer: Tensor, sampler: Tensor) -> dict[str, float]:
    apart = (trainer.exp() - sampler.exp()).abs()
    return {
        "mean": apart.mean().item(),
        "max": apart.max().item(),
        "log_probs": (trainer - sampler).abs().mean().item(),
        "same": (trainer == sampler).double().mean().item(),
    }


def show(history: dict[str, list[dict[str, float]]], rewards: list[float], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("sync", "attention", "mean", "max", "mean of log-probabilities", "same bits", "reward"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for i, reward in enumerate(rewards):
        for name, found in history.items():
            x = found[i]
            shown = [f"{x[key]:.1e}" for key in ("mean", "max", "log_probs")]
            table.add_row(str(i), name, *shown, f"{x['same']:.2%}", f"{reward:.3f}" if name == LAST else "")
    Console(width=120).print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="granite")
    parser.add_argument("--model-impl", choices=("auto", "transformers", "vllm"), help="whose model code vLLM runs")
    parser.add_argument("--experts", type=int, choices=range(1, 5), default=2, help="that a token of gpt-oss's takes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--syncs", type=int, default=6, help="weight syncs, each with a step of training behind it")
    parser.add_argument("--batch", type=int, default=16, help="prompts a step")
    parser.add_argument("--prompt", type=int, default=48, help="tokens a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="sampled a prompt")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/on_policy"))
    args = parser.parse_args(arguments)
    args.model_impl = args.model_impl or MODELS[args.model][3]

    sinkattn.hf.register()
    folder = args.output / args.model
    folder.mkdir(parents=True, exist_ok=True)
    save_model(args, folder)
    # Read back: a model that is cast keeps its rotation's frequencies in bf16, and vLLM in fp32.
    model = MODELS[args.model][0].from_pretrained(folder, dtype=getattr(torch, args.dtype))
    masters = [x.detach().float().requires_grad_() for x in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=args.learning_rate, weight_decay=0.0)
    engines = {name: start_engine(args, folder, x) for name, x in (("own", None), ("sinkattn", "CUSTOM"))}

    history: dict[str, list[dict[str, float]]] = {name: [] for name in COLUMNS}
    rewards: list[float] = []
    for _ in range(args.syncs):
        prompts = torch.randint(256, (args.batch, args.prompt))
        sampled = {}
        for name, llm in engines.items():
            sync(llm, model, folder)
            sampled[name] = sample(llm, prompts, args.tokens)
        engines["sinkattn"].apply_model(fix_rows)
        sampled[f"sinkattn, {ROWS} rows"] = sample(engines["sinkattn"], prompts, args.tokens)
        for column, (attention, engine) in COLUMNS.items():
            model.set_attn_implementation(attention)
            ids, rollout = sampled[engine]
            with FixedRows() if column == LAST else contextlib.nullcontext():
                trainer = score(model, prompts, ids)  # the last column's is trained on
            history[column].append(disagreement(trainer.detach(), rollout))

        reward = (ids < REWARDED).float().mean(1)
        loss = -((reward - reward.mean()) / (reward.std() + 1e-6) * trainer.mean(1)).mean()
        model.zero_grad()
        loss.backward()
        for master, x in zip(masters, model.parameters(), strict=True):
            master.grad = None if x.grad is None else x.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, x in zip(masters, model.parameters(), strict=True):
                x.copy_(master)
        rewards.append(reward.mean().item())

    show(history, rewards, f"rollout_probs_diff, {args.model} in {args.dtype} on a CPU")
    for name, found in history.items():
        mean = {key: sum(x[key] for x in found) / len(found) for key in found[0]}
        mean["max"] = max(x["max"] for x in found)
        print(f"{name}: " + ", ".join(f"{key} {value:.2e}" for key, value in mean.items()))
    one_code = args.model_impl == "transformers" and args.dtype == "bfloat16"
    if one_code and any(x["same"] < 1 for x in history[LAST]):
        raise SystemExit("sinkattn in both: sampler and trainer do not agree bit for bit")


if __name__ == "__main__":
    main()
