# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's engine in a process of its own: python tests/vllm_engine.py JOBS.json RESULTS.json.

vLLM rewrites the transformers classes that a reference is computed with. A job is
{"model", "options", "prompts", "sampling": one for each prompt, "sync": folder of weights to load and run again,
"fixed_rows": matmuls in blocks}.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

# In this process, where calls can be counted; and without the minutes that compiling tiny models takes.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from rl_parity import fix_rows
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention

from sinkattn.vllm import check_sinks
from sinkattn.vllm_backend import SinkAttentionImpl

OPTIONS = {
    "attention_backend": "CUSTOM",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 256,
    "seed": 0,
}


class Spy:
    """Calls of our attention, and what the model's forwards were made of."""

    def __init__(self) -> None:
        self.calls = self.with_sinks = self.forwards = 0
        self.steps: list[list[tuple[int, int]]] = []  # (rows, keys) of each sequence

    def watch(self, model: Any) -> list[str]:
        model.register_forward_pre_hook(self.count_forward)
        return sorted({type(x.impl).__name__ for x in model.modules() if isinstance(x, Attention)})

    def count_forward(self, *_: Any) -> None:
        self.forwards += 1

    def forward(self, impl: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("attn_metadata", args[4] if len(args) > 4 else None)
        if given is not None:
            self.calls += 1
            self.with_sinks += impl.sinks is not None
            if self.calls > len(self.steps) * self.layers:
                rows = given.packed.query_start_loc.diff().tolist()
                self.steps.append(list(zip(rows, given.packed.seq_lens.tolist(), strict=True)))
        return forward(impl, layer, *args, **kwargs)


forward = SinkAttentionImpl.forward


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(job["model"], **OPTIONS | job["options"])
    spy = Spy()
    SinkAttentionImpl.forward = lambda *args, **kwargs: spy.forward(*args, **kwargs)
    [impls] = llm.apply_model(spy.watch)
    [spy.layers] = llm.apply_model(lambda model: sum(isinstance(x, Attention) for x in model.modules()))

    def generate() -> list[dict[str, Any]]:
        if job.get("fixed_rows"):
            llm.apply_model(fix_rows)
        params = [SamplingParams(logprobs=0, detokenize=False, ignore_eos=True, **x) for x in job["sampling"]]
        done = llm.generate([{"prompt_token_ids": x} for x in job["prompts"]], params, use_tqdm=False)
        outputs = []
        for request in done:
            [output] = request.outputs
            ids = list(output.token_ids)
            log_probs = [x[i].logprob for x, i in zip(output.logprobs or [], ids, strict=True)]
            outputs.append({"ids": ids, "log_probs": log_probs, "cached": request.num_cached_tokens})
        return outputs

    result: dict[str, Any] = {"outputs": generate()}
    if "sync" in job:
        weights = load_file(f"{job['sync']}/model.safetensors")
        without = {name: x for name, x in weights.items() if not name.endswith("sinks")}
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(without.items())})
        try:
            llm.apply_model(lambda model: check_sinks(model, weights))
        except ValueError as error:
            result["stale"] = str(error)
        try:
            llm.apply_model(lambda model: check_sinks(model, without))
        except ValueError as error:
            result["missing"] = str(error)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        [result["checked"]] = llm.apply_model(lambda model: check_sinks(model, weights))
        llm.reset_prefix_cache()
        result["synced"] = generate()
    names = ("calls", "with_sinks", "forwards", "steps", "layers")
    return result | {"impls": impls} | {name: getattr(spy, name) for name in names}


def send(to: Any, job: dict[str, Any]) -> None:
    to.send(run(job))


def main() -> None:
    """Each job in a fork of its own, as one process holds one engine; vLLM is imported once."""
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    results = []
    for job in jobs:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=send, args=(sender, job))
        process.start()
        sender.close()
        results.append(receiver.recv())
        process.join()
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
