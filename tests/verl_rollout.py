# SPDX-License-Identifier: Apache-2.0
"""GRPO steps of verl with verl's own vLLM rollout, on a CPU: python tests/verl_rollout.py FOLDER.

verl's TrainingWorker trains, its ServerAdapter sends the weights, its vLLMHttpServer, a Ray actor, samples by vLLM's
engine, whose worker has verl's extension. RayPPOTrainer, which would place these on GPUs, is left out. Writes
FOLDER/rollout.json.
"""

import asyncio
import functools
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu,sinkattn.verl_patch"}
os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "TOKENIZERS_PARALLELISM": "false", "TORCHDYNAMO_DISABLE": "1"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1"}
os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])  # in Ray's processes too

import numpy as np
import ray
import torch
import verl  # noqa: F401
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GraniteSWAConfig, GraniteSWAForCausalLM, PreTrainedTokenizerFast
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig, HFModelConfig, RolloutConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding
from verl_extension import check_attention

from sinkattn.vllm import check_sinks

PROMPTS, GROUP, RESPONSE, STEPS = 4, 4, 12, 2


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "attention_multiplier": 0.25}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False}
    config = GraniteSWAConfig(
        **sizes, **heads, **tokens, layer_types=["full_attention", "sliding_attention"], initializer_range=0.15
    )
    model = GraniteSWAForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(
        WordLevel({chr(33 + i): i for i in range(93)} | {f"<{i}>": i for i in range(93, 97)}, unk_token="!")
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!", eos_token='"').save_pretrained(folder)


def make_worker(folder: Path) -> TrainingWorker:
    from hydra import compose, initialize_config_module

    settings = {
        "model.path": folder,
        "+model.override_config.attn_implementation": "sinkattn",
        "model.use_remove_padding": True,
        "engine.strategy": "fsdp2",
        "engine.use_torch_compile": False,
        "+engine.mixed_precision.param_dtype": "fp32",
        "optim.lr": 1e-2,
        "checkpoint.save_contents": [],
        "trainer.device": "cpu",
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", [f"{key}={value}" for key, value in settings.items()])
    parts = {part: omega_conf_to_dataclass(config[part]) for part in ("model", "engine", "optim", "checkpoint")}
    parts["optimizer"] = parts.pop("optim")
    worker = TrainingWorker(
        TrainingWorkerConfig(model_type="language_model", **{f"{part}_config": value for part, value in parts.items()})
    )
    actor = ActorConfig(
        strategy="fsdp2", rollout_n=GROUP, ppo_mini_batch_size=PROMPTS, use_dynamic_bsz=True, ppo_epochs=1
    )
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    worker.reset()
    return worker


def start_ray(attempts: int = 4) -> None:
    """Ray gives processes of its own 15 s to start, which is too little on a machine with other work."""
    for attempt in range(attempts):
        try:
            ray.init(num_cpus=2, num_gpus=1, include_dashboard=False)
            return
        except Exception:
            ray.shutdown()
            if attempt == attempts - 1:
                raise


def start_server(folder: Path) -> tuple[Any, ServerAdapter]:
    engine = {
        "attention_backend": "CUSTOM",  # the one line
        "model_impl": "transformers",
        "worker_extension_cls": "verl_extension.CPUWorkerExtension",
        "kv_cache_memory_bytes": 1 << 26,
        "block_size": 16,
    }
    config = RolloutConfig(
        name="vllm",
        dtype="float32",
        tensor_model_parallel_size=1,
        max_model_len=128,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        enforce_eager=True,
        free_cache_engine=False,
        enable_sleep_mode=False,
        calculate_log_probs=True,
        response_length=RESPONSE,
        prompt_length=64,
        engine_kwargs={"vllm": engine},
    )
    model = HFModelConfig(path=str(folder))
    start_ray()
    server = (
        ray.remote(vLLMHttpServer)
        .options(name="vllm_server_0_0", max_concurrency=100, num_cpus=0)
        .remote(
            config=config, model_config=model, rollout_mode=RolloutMode.HYBRID, workers=[], replica_rank=0, node_rank=0,
            gpus_per_node=1, nnodes=1, cuda_visible_devices="",
        )
    )  # fmt: skip
    ray.get(server.launch_server.remote())
    return server, ServerAdapter(config, model, None)


def sample(server: Any, prompts: list[list[int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As verl pads rollouts: prompts on the left, responses on the right."""
    asked = [(i, p) for i, p in enumerate(prompts) for _ in range(GROUP)]
    options = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "ignore_eos": True}
    done = ray.get([server.generate.remote(p, dict(options), f"{n}") for n, (_, p) in enumerate(asked)])
    widest = max(map(len, prompts))
    responses = torch.tensor([x.token_ids for x in done])
    ids = torch.tensor([[0] * (widest - len(p)) + p for _, p in asked])
    ids = torch.cat([ids, responses], 1)
    lengths = torch.tensor([len(p) for _, p in asked])
    positions = torch.arange(ids.shape[1]) - (widest - lengths)[:, None]
    data = {
        "input_ids": ids,
        "prompts": ids[:, :widest].clone(),
        "responses": responses,
        "attention_mask": (positions >= 0).long(),
        "position_ids": positions.clamp(min=0),
        "response_mask": torch.ones_like(responses),
    }
    return data, torch.tensor([x.log_probs for x in done])


def sinks_of(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    weights, _ = worker.engine.get_per_tensor_param()
    return {name: x.detach().clone() for name, x in weights if name.endswith("sinks")}


def said(server: Any, check: Any) -> str:
    """What the check raises in the process of the engine's worker."""
    try:
        ray.get(server.collective_rpc.remote("apply_model", args=(check,)))
    except Exception as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    save_model(folder / "model")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    torch.distributed.init_process_group("gloo")
    worker = make_worker(folder / "model")
    server, adapter = start_server(folder / "model")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 97, (n,), generator=generator).tolist() for n in (9, 23, 40, 61)]
    first = sinks_of(worker)
    found: dict[str, Any] = {"gaps": [], "stale": [], "synced": []}
    found["attention"] = said(server, check_attention)
    found["dummy"] = said(server, functools.partial(check_sinks, weights=first))  # what the engine starts with
    for step in range(STEPS):
        weights, _ = worker.engine.get_per_tensor_param()
        asyncio.run(adapter.update_weights(weights, global_steps=step))
        found["synced"].append(said(server, functools.partial(check_sinks, weights=sinks_of(worker))))
        data, sampled = sample(server, prompts)
        score = (data["responses"] < 32).float().mean(1)
        token_rewards = torch.zeros_like(sampled)
        token_rewards[:, -1] = score
        index = np.arange(PROMPTS).repeat(GROUP)
        advantages, _ = compute_grpo_outcome_advantage(token_rewards, data["response_mask"], index)
        td = left_right_2_no_padding(tu.get_tensordict(dict(data)))
        shared = {"temperature": 1.0, "max_token_len_per_gpu": 512, "use_dynamic_bsz": True}
        tu.assign_non_tensor(td, compute_loss=False, calculate_entropy=False, **shared)
        old = no_padding_2_padding(tu.get(worker.infer_batch(td), "log_probs"), td).float()
        found["gaps"].append((old - sampled).abs().max().item())
        td = left_right_2_no_padding(tu.get_tensordict(data | {"old_log_probs": old, "advantages": advantages}))
        tu.assign_non_tensor(td, calculate_entropy=False, global_batch_size=len(index), compute_loss=True, **shared)
        worker.train_batch(td)
        found["stale"].append(said(server, functools.partial(check_sinks, weights=sinks_of(worker))))
    found["moved"] = max((first[name] - x).abs().max().item() for name, x in sinks_of(worker).items())
    (folder / "rollout.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
