# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on sinkattn, against transformers: tokens, log-probabilities bit for bit, weight syncs, refusals."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not in this environment: make test-vllm makes one", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from rl_parity import FixedRows
from tiny_gpt_oss import tiny_gpt_oss
from transformers import AutoModelForCausalLM, GraniteSWAConfig, GraniteSWAForCausalLM, PreTrainedModel
from vllm.platforms import current_platform

import sinkattn.hf

if not current_platform.is_cpu():
    pytest.skip("this vLLM is for another device than the CPU, whose engine these tests run", allow_module_level=True)

sinkattn.hf.register()
ROOT = Path(__file__).parent.parent
TOKENS = 8
SHARED = 48
"""Tokens that every fourth prompt begins with: three blocks of the prefix cache."""


def save_granite(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = GraniteSWAConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
        attention_multiplier=0.25,
        initializer_range=0.15,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GraniteSWAForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=1.5)
    model.bfloat16().save_pretrained(folder)
    return folder


def make_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in lengths]
    return [prompts[0][:SHARED] + x if i % 4 == 3 else x for i, x in enumerate(prompts)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    tiny_gpt_oss(head_dim=32).save_pretrained(folder / "gpt_oss")
    prompts = make_prompts([60, *(1 + 37 * i % 100 for i in range(1, 64))])
    repetitive = [(x * 9)[:40] for x in prompts[1:9]]
    # Prompts are cut in chunks of what 48 tokens a step leave over; pages of 16.
    options = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 48, "block_size": 16}
    greedy = {"max_tokens": TOKENS, "temperature": 0}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    jobs = {
        "gpt_oss": {"model": folder / "gpt_oss", "prompts": prompts, "sampling": [greedy] * 64, "options": options},
        "granite": {
            "model": save_granite(folder / "granite", seed=0),
            "sync": save_granite(folder / "trained", seed=1),
            "prompts": prompts[:24],
            "sampling": [greedy | {"temperature": i % 3 / 2} for i in range(24)],
            "fixed_rows": True,
            "options": options | {"dtype": "bfloat16", "model_impl": "transformers"},
        },
        "experts": {
            "model": folder / "gpt_oss",
            "prompts": prompts[:8],
            "sampling": [greedy | {"temperature": i % 2} for i in range(8)],
            "fixed_rows": True,
            "options": options | {"dtype": "bfloat16", "model_impl": "transformers"},
        },
        "drafts": {
            "model": folder / "gpt_oss",
            "prompts": repetitive,
            "sampling": [greedy | {"max_tokens": 24}] * 8,
            "options": options | {"speculative_config": drafts},
        },
        "own": {
            "model": folder / "gpt_oss",
            "prompts": prompts[:2],
            "sampling": [greedy] * 2,
            "options": options | {"attention_backend": None},
        },
    }
    (folder / "jobs.json").write_text(json.dumps(list(jobs.values()), default=str))
    run("tests/vllm_engine.py", "jobs.json", "results.json", cwd=folder)
    results = json.loads((folder / "results.json").read_text())
    return {name: job | result for (name, job), result in zip(jobs.items(), results, strict=True)}


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompt: list[int], ids: list[int]) -> Tensor:
    """Of every token of the vocabulary, in one forward over the prompt and ids: [ids, vocabulary] in fp32."""
    logits = model(torch.tensor([prompt + ids]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1, dtype=torch.float32)


def run(script: str, *arguments: object, cwd: Path) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_calls(job: dict[str, Any]) -> None:
    assert job["impls"] == ["SinkAttentionImpl"]
    assert job["forwards"] > TOKENS
    assert job["calls"] == job["with_sinks"] == job["forwards"] * job["layers"]


@pytest.mark.parametrize("name", ["gpt_oss", "drafts"])
def test_gpt_oss_writes_what_transformers_writes(engine: dict[str, Any], name: str) -> None:
    """Greedy: each token is the one that transformers' eager attention finds likeliest behind those before."""
    job, model = engine[name], tiny_gpt_oss("eager", head_dim=32)
    for prompt, output in zip(job["prompts"], job["outputs"], strict=True):
        found = log_probs(model, prompt, output["ids"])
        assert found.argmax(-1).tolist() == output["ids"]
        gap = found.amax(-1) - torch.tensor(output["log_probs"])
        assert gap.abs().max() < 1e-4
    check_calls(job)


def test_steps_were_mixed(engine: dict[str, Any]) -> None:
    """What the requests are for: tokens beside chunks of prompts, prefixes out of the cache, drafts of four rows."""
    steps = engine["gpt_oss"]["steps"]
    mixed = [step for step in steps if {1} < {rows for rows, _ in step}]
    assert any(1 < rows < keys for step in mixed for rows, keys in step)
    cached = [x["cached"] for x in engine["gpt_oss"]["outputs"]]
    assert cached.count(SHARED) >= 8
    assert any(rows == 4 < keys for step in engine["drafts"]["steps"] for rows, keys in step)


@pytest.mark.parametrize(
    ("name", "when", "weights"),
    [("granite", "outputs", "model"), ("granite", "synced", "sync"), ("experts", "outputs", "model")],
)
def test_log_probs_are_the_trainers(engine: dict[str, Any], name: str, when: str, weights: str) -> None:
    """bf16, bit for bit, of greedy and of sampled tokens, before and after a weight sync; eager attention is not it.

    Of a dense model, and of a gpt-oss whose code is transformers' in vLLM too. Matmuls are in blocks of rows on both
    sides: theirs, not attention's, change with the number of rows.
    """
    job = engine[name]
    model = AutoModelForCausalLM.from_pretrained(job[weights], dtype=torch.bfloat16)
    gaps: dict[str, list[Tensor]] = {"sinkattn": [], "eager": []}
    for attention, found in gaps.items():
        model.set_attn_implementation(attention)
        for prompt, output in zip(job["prompts"], job[when], strict=True):
            ids = torch.tensor(output["ids"])[:, None]
            with FixedRows():
                trainer = log_probs(model, prompt, output["ids"]).gather(1, ids)[:, 0]
            found.append(trainer - torch.tensor(output["log_probs"]))
    assert all(x.eq(0).all() for x in gaps["sinkattn"])
    assert torch.cat(gaps["eager"]).abs().mean() > 1e-3, "nothing was compared"
    check_calls(job)


def test_a_dropped_sink_is_noticed(engine: dict[str, Any]) -> None:
    """The sync loads the trained weights without their sinks first, then all of them."""
    assert "layer 0 of vLLM's model computes with other sinks than the trainer's" in engine["granite"]["stale"]
    assert "layer 0 has sinks, and the trainer's weights none" in engine["granite"]["missing"]
    assert engine["granite"]["checked"] == engine["granite"]["layers"] == 2


def test_an_installed_plugin_changes_nothing_by_itself(engine: dict[str, Any]) -> None:
    assert engine["own"]["impls"] == ["CPUAttentionBackendImpl"]
    assert engine["own"]["calls"] == 0
    for own, ours in zip(engine["own"]["outputs"], engine["gpt_oss"]["outputs"], strict=False):
        assert own["ids"] == ours["ids"]


def test_on_policy(tmp_path: Path) -> None:
    """The example, with engines in processes of their own, where vLLM finds the plugin by itself."""
    printed = run("examples/on_policy.py", "--syncs", 1, "--batch", 8, "--output", tmp_path, cwd=tmp_path)
    found = dict(re.findall(r"^(\w[^:\n]*): mean (\S+),", printed, re.MULTILINE))
    assert found["both, 16 rows"] == "0.00e+00"
    assert float(found["eager"]) > 1e-5, "nothing was compared"
    assert "both, 16 rows: mean 0.00e+00, max 0.00e+00, log_probs 0.00e+00, same 1.00e+00" in printed
