# SPDX-License-Identifier: Apache-2.0
"""Train a small gpt-oss with verl's own trainer: packed by sinkattn, on 1 rank and on 2, and as verl's recipe does.

Model and text are those of finetune_gpt_oss.py, cut into sequences of uneven length. Each run is verl's SFTTrainer
(FSDP2, remove-padding, dynamic micro-batches), in its own processes, on the same weights and batches:

    sinkattn           several sequences in one row, each by itself
    sinkattn, SP 2     the same row cut over two ranks (Ulysses)
    eager, packed      verl's published gpt-oss recipe; eager attention knows nothing of packing
    eager, padded      the same without remove-padding

The reference is a loop without verl: eager in fp32, one sequence at a time. Runs on one rank also take GRPO steps with
verl's TrainingWorker, ppo_loss and advantage, on rollouts by transformers' generate. Written to --output: results.json
and verl's log of each run.
"""

import argparse
import functools
import json
import os
import random
import socket
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from finetune_gpt_oss import load_text, make_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GptOssForCausalLM, PreTrainedTokenizerFast

# name: attention, remove-padding, ranks
RUNS = {
    "sinkattn": ("sinkattn", True, 1),
    "sinkattn, SP 2": ("sinkattn", True, 2),
    "eager, packed": ("eager", True, 1),
    "eager, padded": ("eager", False, 1),
}
REFERENCE = "eager, fp32, alone"
BETAS = (0.9, 0.999)


class TextDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What verl's SFTTrainer makes from data.custom_cls."""

    def __init__(self, parquet_files: str, **_: Any) -> None:
        self.sequences: list[Tensor] = torch.load(parquet_files)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.sequences[index]
        positions = torch.arange(len(ids))
        return {"input_ids": ids, "position_ids": positions, "loss_mask": (positions > 0).long()}


def prepare(args: argparse.Namespace) -> None:
    """The model, its tokenizer, a byte each, and the sequences, for all runs."""
    args.output.mkdir(parents=True, exist_ok=True)
    make_model(args.seed).save_pretrained(args.output / "model")
    vocabulary = {chr(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=chr(0)))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=chr(0), eos_token=chr(0), unk_token=chr(0)
    ).save_pretrained(args.output / "model")
    text, _ = load_text()
    generator = random.Random(args.seed)
    lengths = [generator.randint(args.length // 8, args.length) for _ in range(args.steps * args.batch)]
    starts = [generator.randrange(len(text) - length) for length in lengths]
    pairs = zip(starts, lengths, strict=True)
    torch.save([text[start : start + length].clone() for start, length in pairs], args.output / "sequences.pt")


def start_worker(rank: int, ranks: int, port: int, name: str, args: argparse.Namespace) -> None:
    """Make this process a rank of verl; its output goes to the run's log."""
    log = os.open(args.output / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # VERL_ENGINE_DEVICE is the key of verl's FSDP engine, also for our platform.
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TOKENIZERS_PARALLELISM="false",
        VERL_FILE_LOGGER_PATH=str(args.output / f"{name}.jsonl"), VERL_ENGINE_DEVICE="cuda",
    )  # fmt: skip
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if args.device == "cpu":
        from verl.plugin.platform import set_platform
        from verl.plugin.platform.platform_cuda import PlatformCUDA

        class Cpu(PlatformCUDA):
            device_name = "cpu"
            # These are all that torch.cuda does not answer without a GPU.
            device_module = SimpleNamespace(
                **vars(torch.cuda) | {"mem_get_info": lambda: (0, 0), "get_device_name": lambda: "CPU"}
            )

            def current_device(self) -> torch.device:
                return torch.device("cpu")

            def communication_backend_name(self) -> str:
                return "gloo"

        set_platform(Cpu())
        torch.distributed.init_process_group("gloo")
    else:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")


def verl_config(name: str, args: argparse.Namespace) -> Any:
    from hydra import compose, initialize_config_module

    attention, remove_padding, ranks = RUNS[name]
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[args.dtype]
    # The override is the one line; external_lib is not needed where sinkattn is installed.
    settings = {
        "model.path": args.output / "model", "+model.override_config.attn_implementation": attention,
        "model.external_lib": "sinkattn.verl_patch", "model.use_remove_padding": remove_padding,
        "model.enable_gradient_checkpointing": True, "engine.strategy": "fsdp2",
        "engine.ulysses_sequence_parallel_size": ranks, "engine.use_torch_compile": False,
        "+engine.mixed_precision.param_dtype": dtype, "optim.lr": args.learning_rate, "optim.weight_decay": 0.0,
        "optim.betas": list(BETAS), "data.train_files": args.output / "sequences.pt",
        "data.custom_cls.path": Path(__file__).resolve(), "data.custom_cls.name": "TextDataset",
        "data.train_batch_size": args.batch, "data.max_token_len_per_gpu": args.tokens // ranks,
        "data.use_dynamic_bsz": True, "data.num_workers": 0, "trainer.device": args.device,
        "trainer.logger": ["console", "file"], "trainer.total_epochs": 1, "trainer.resume_mode": "disable",
        "trainer.default_local_dir": args.output / "checkpoints", "checkpoint.save_contents": [],
    }  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", [f"{key}={value}" for key, value in settings.items()])


def all_sinks(model: torch.nn.Module, gradient: bool = False) -> Tensor:
    """[num_layers, num_q_heads], the parameters or their gradients; all ranks call it."""
    parts = [p.grad if gradient else p.detach() for n, p in model.named_parameters() if n.endswith("sinks")]
    return torch.stack([(p.full_tensor() if hasattr(p, "full_tensor") else p).float().cpu() for p in parts])


class Recorder:
    """Records sinks before each step and after the last, their gradients, seconds and tokens."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.sinks, self.gradients, self.seconds = worker, [], [], []
        self.batches: list[list[Tensor]] = []
        self.train_batch, self.optimizer_step = worker.train_batch, worker.engine.optimizer_step
        worker.train_batch, worker.engine.optimizer_step = self.timed, self.recorded

    def timed(self, data: Any) -> Any:
        self.batches.append([ids.cpu() for ids in data["input_ids"].unbind()])
        start = time.perf_counter()
        output = self.train_batch(data)  # reads the loss, so the device is done
        self.seconds.append(time.perf_counter() - start)
        return output

    def recorded(self) -> Any:
        model = self.worker.engine.module
        self.sinks.append(all_sinks(model).tolist())
        self.gradients.append(all_sinks(model, gradient=True).tolist())
        return self.optimizer_step()

    def result(self) -> dict[str, Any]:
        rates = [sum(map(len, batch)) / t for batch, t in zip(self.batches, self.seconds, strict=True)]
        return {
            "sinks": [*self.sinks, all_sinks(self.worker.engine.module).tolist()],
            "gradients": self.gradients,
            "tokens_per_second": statistics.median(rates),  # the first steps also warm up
        }


def sft(rank: int, name: str, args: argparse.Namespace) -> None:
    from verl.trainer.sft_trainer import SFTTrainer

    trainer = SFTTrainer(verl_config(name, args))
    recorder = Recorder(trainer.training_client)
    trainer.fit()
    result = recorder.result()
    if rank == 0:
        log = (args.output / f"{name}.jsonl").read_text().splitlines()
        result["losses"] = [json.loads(line)["data"]["train/loss"] for line in log]
        (args.output / f"{name}.json").write_text(json.dumps(result))
        torch.save(recorder.batches, args.output / "batches.pt")


def log_probs(model: GptOssForCausalLM, ids: Tensor) -> Tensor:
    """Of each token of ids [len] but the first."""
    logits = model(ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """The same steps by eager attention in fp32, one sequence at a time, without verl."""
    model = GptOssForCausalLM.from_pretrained(args.output / "model", attn_implementation="eager", dtype=torch.float32)
    model.to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=BETAS, weight_decay=0.0)
    losses, sinks, gradients = [], [all_sinks(model).tolist()], []
    for batch in torch.load(args.output / "batches.pt"):
        count, total = sum(len(ids) - 1 for ids in batch), 0.0
        for ids in batch:
            loss = -log_probs(model, ids.to(args.device)).sum() / count
            loss.backward()
            total += loss.item()
        gradients.append(all_sinks(model, gradient=True).tolist())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        sinks.append(all_sinks(model).tolist())
    return {"losses": losses, "sinks": sinks, "gradients": gradients}


def roll_out(
    model: GptOssForCausalLM, prompts: list[Tensor], args: argparse.Namespace
) -> tuple[dict[str, Any], Tensor]:
    """Responses to prompts, padded as verl's rollouts are, and their log-probabilities as sampled."""
    widest, rows, sampled = max(map(len, prompts)), [], []
    for prompt in prompts:
        out = model.generate(
            prompt.to(model.device).expand(args.group, -1),
            attention_mask=torch.ones(args.group, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=args.response, min_new_tokens=args.response, do_sample=True, top_k=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        responses = out.sequences[:, len(prompt) :]
        logits = torch.stack(out.logits, 1).float()
        sampled.append(logits.log_softmax(-1).gather(2, responses[..., None])[..., 0])
        rows.append(torch.nn.functional.pad(out.sequences, (widest - len(prompt), 0)))
    ids = torch.cat(rows).cpu()
    lengths = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(args.group)
    positions = torch.arange(ids.shape[1]) - (widest - lengths)[:, None]
    data = {
        "input_ids": ids, "prompts": ids[:, :widest].clone(), "responses": ids[:, widest:].clone(),
        "attention_mask": (positions >= 0).long(), "position_ids": positions.clamp(min=0),
        "response_mask": torch.ones_like(ids[:, widest:]),
    }  # fmt: skip
    return data, torch.cat(sampled).cpu()


def grpo(name: str, args: argparse.Namespace) -> None:
    """Steps of GRPO that reward the letter e: sample, log-probabilities of the old policy, advantages, update."""
    import numpy as np
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import ActorConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    config = verl_config(name, args)
    parts = {part: omega_conf_to_dataclass(config[part]) for part in ("model", "engine", "optim", "checkpoint")}
    parts["optimizer"] = parts.pop("optim")
    worker = TrainingWorker(
        TrainingWorkerConfig(model_type="language_model", **{f"{part}_config": value for part, value in parts.items()})
    )
    actor = ActorConfig(
        strategy="fsdp2", rollout_n=args.group, ppo_mini_batch_size=args.batch, use_dynamic_bsz=True, ppo_epochs=1
    )
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    worker.reset()
    recorder = Recorder(worker)

    torch.manual_seed(args.seed)
    policy = GptOssForCausalLM.from_pretrained(args.output / "model", attn_implementation="eager", dtype=torch.float32)
    policy.to(args.device).eval()
    prompts = [ids[: 16 + len(ids) // 4] for ids in TextDataset(str(args.output / "sequences.pt")).sequences]
    rewards, gaps = [], []
    for step in range(args.grpo_steps):
        data, sampled = roll_out(policy, prompts[step * args.batch : (step + 1) * args.batch], args)
        score = (data["responses"] == ord("e")).float().mean(1)
        token_rewards = torch.zeros_like(sampled)
        token_rewards[:, -1] = score
        index = np.arange(args.batch).repeat(args.group)
        advantages, _ = compute_grpo_outcome_advantage(token_rewards, data["response_mask"], index)

        td = left_right_2_no_padding(tu.get_tensordict(dict(data)))
        shared = {"temperature": 1.0, "max_token_len_per_gpu": args.tokens, "use_dynamic_bsz": True}
        tu.assign_non_tensor(td, compute_loss=False, calculate_entropy=False, **shared)
        old = no_padding_2_padding(tu.get(worker.infer_batch(td), "log_probs"), td).float()
        gaps.append((old - sampled).abs().mean().item())
        rewards.append(score.mean().item())

        td = left_right_2_no_padding(tu.get_tensordict(data | {"old_log_probs": old, "advantages": advantages}))
        tu.assign_non_tensor(td, calculate_entropy=False, global_batch_size=len(index), compute_loss=True, **shared)
        worker.train_batch(td)
        weights, _ = worker.engine.get_per_tensor_param()
        policy.load_state_dict({key: value.float() for key, value in weights}, strict=True)
    moved = (all_sinks(worker.engine.module) - torch.tensor(recorder.sinks[0])).abs().max().item()
    synced = torch.equal(all_sinks(policy), all_sinks(worker.engine.module))
    found = {"log_prob_difference": gaps, "rewards": rewards, "sinks_moved": moved, "sinks_synced": synced}
    path = args.output / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"grpo": found}))


def work(rank: int, ranks: int, port: int, name: str, args: argparse.Namespace) -> None:
    start_worker(rank, ranks, port, name, args)
    sft(rank, name, args)
    if ranks == 1 and args.grpo_steps:
        grpo(name, args)
    torch.distributed.destroy_process_group()


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    for log in args.output.glob(f"{name}.[0-9j]*"):
        log.unlink()
    ranks = RUNS[name][2]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = (ranks, port, name, args)
    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")
    result: dict[str, Any] = json.loads((args.output / f"{name}.json").read_text())
    return result


def compare(results: dict[str, Any]) -> None:
    want = {key: torch.tensor(results[REFERENCE][key]) for key in ("losses", "gradients", "sinks")}
    for name, run in results.items():
        got = {key: torch.tensor(run[key]) for key in want}
        first, right = got["gradients"][0], want["gradients"][0]
        run["gradient_error"] = ((first - right).norm() / right.norm()).item()
        run["loss_error"] = (got["losses"] - want["losses"]).abs().max().item()
        run["sinks_error"] = (got["sinks"][-1] - want["sinks"][-1]).abs().max().item()
        run["sinks_moved"] = (got["sinks"][-1] - got["sinks"][0]).abs().max().item()
        if name == REFERENCE:
            assert run["loss_error"] == run["gradient_error"] == 0


def report(results: dict[str, Any], console: Console) -> None:
    table = Table(title="against eager in fp32, one sequence at a time", title_justify="left")
    headings = ("run", "loss 1", "loss, largest error", "sink gradient 1, relative error", "sinks moved, by at most")
    headings += ("their largest error", "GRPO: train to rollout", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, run in results.items():
        gap = f"{statistics.fmean(run['grpo']['log_prob_difference']):.1e}" if "grpo" in run else ""
        speed = f"{run['tokens_per_second']:,.0f}" if "tokens_per_second" in run else ""
        errors = (f"{run[key]:.1e}" for key in ("loss_error", "gradient_error"))
        row = [f"{run['losses'][0]:.6f}", *errors, f"{run['sinks_moved']:.3f}", f"{run['sinks_error']:.1e}", gap, speed]
        table.add_row(name, *row)
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--grpo-steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step; prompts a GRPO step")
    parser.add_argument("--group", type=int, default=4, help="responses to a prompt")
    parser.add_argument("--response", type=int, default=32, help="tokens")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest sequence")
    parser.add_argument("--tokens", type=int, default=768, help="tokens of a micro-batch, at most")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/verl"))
    args = parser.parse_args(arguments)
    args.output = args.output.resolve()

    prepare(args)
    results = {}
    for name in args.runs:
        print(f"{name} ...", flush=True)
        results[name] = run(name, args)
    results[REFERENCE] = reference(args)
    compare(results)
    (args.output / "results.json").write_text(json.dumps(results) + "\n")
    report(results, Console(width=140))
    print(f"Written to {args.output}: results.json, the logs")


if __name__ == "__main__":
    main()
