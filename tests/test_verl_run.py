# SPDX-License-Identifier: Apache-2.0
"""verl itself with sinkattn, on the CPU: its trainer, its Ulysses groups, its critic, its names."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip(
        "verl is not installed: pip install --no-build-isolation '.[verl]', see docs/verl.md", allow_module_level=True
    )

from tiny_gpt_oss import tiny_gpt_oss

ROOT = Path(__file__).parent.parent


def run(script: Path, *arguments: object, **environment: str) -> str:
    """In a process of its own, where verl's import applies the plugin."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "sinkattn.verl_patch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | ours | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The example in short: SFT on 1 and 2 ranks and by verl's own recipe, 1 step of GRPO."""
    folder = tmp_path_factory.mktemp("verl")
    short = {"steps": 3, "grpo-steps": 1, "batch": 4, "length": 128, "tokens": 256, "response": 8, "output": folder}
    flags = [x for name, value in short.items() for x in (f"--{name}", value)]
    run(ROOT / "examples/train_verl.py", *flags, "--runs", "sinkattn", "sinkattn, SP 2", "eager, packed")
    found: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("name", ["sinkattn", "sinkattn, SP 2"])
def test_sft_follows_eager(results: dict[str, dict[str, Any]], name: str) -> None:
    """Packed rows train as each sequence alone does in fp32; verl's recipe shows what a wrong gradient looks like."""
    got, wrong = results[name], results["eager, packed"]
    assert got["loss_error"] < 1e-5 < 1e-3 < wrong["loss_error"]
    assert got["gradient_error"] < 1e-5 < 1e-2 < wrong["gradient_error"]
    assert got["sinks_error"] < 1e-5 < 1e-3 < got["sinks_moved"]


def test_ulysses_equals_one_rank(results: dict[str, dict[str, Any]]) -> None:
    one, two = results["sinkattn"], results["sinkattn, SP 2"]
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=0, atol=1e-5)
    got, want = (torch.tensor(x["gradients"][0]) for x in (two, one))
    assert (got - want).norm() < 1e-5 * want.norm()


def test_grpo(results: dict[str, dict[str, Any]]) -> None:
    """Training finds the log-probabilities that the rollout sampled with, and the update moves the sinks of both."""
    got, wrong = results["sinkattn"]["grpo"], results["eager, packed"]["grpo"]
    assert got["log_prob_difference"][0] < 1e-5 < 1e-3 < wrong["log_prob_difference"][0]
    assert got["sinks_moved"] > 1e-4
    assert got["sinks_synced"]


ULYSSES = """
import sys, torch, torch.distributed as dist

def work(rank, store, folder):
    import verl
    from verl.utils import ulysses
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    gathered = []
    gather = ulysses.all_gather_tensor
    ulysses.all_gather_tensor = lambda x, *rest: (gathered.append(x.dtype), gather(x, *rest))[1]
    found = {}
    for size in (1, 2, 4):
        groups = [dist.new_group(range(first, first + size)) for first in range(0, 4, size)]
        for checkpointing in (False, True):
            found[size, checkpointing] = step(ulysses, groups[rank // size], size, folder, checkpointing, gathered)
    if rank == 0:
        torch.save(found, f"{store}.pt")

def step(ulysses, group, size, folder, checkpointing, gathered):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sinkattn", dtype=torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ulysses.set_ulysses_sequence_parallel_group(group)
    for last in (17, 18):  # two forwards, of other positions
        model.zero_grad()
        gathered.clear()
        positions = torch.cat([torch.arange(n) for n in (13, 1, 1, last)])[None]
        ids = (torch.arange(positions.shape[1])[None] * 7) % 50
        ids, positions, pad = ulysses.ulysses_pad_and_slice_inputs(ids, positions, size)
        logits = model(ids, position_ids=positions, use_cache=False).logits
        logits = ulysses.gather_outputs_and_unpad(logits, 1, 1, pad, grad_scaler=False)
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        # once a forward for the masks of two kinds of layers: not once a layer, and not again when it is recomputed
        assert gathered.count(torch.int64) == (2 if size > 1 else 0), gathered
    gradients = {name: p.grad for name, p in model.named_parameters() if "sinks" in name or "_proj" in name}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    return {"logits": logits.detach(), **gradients}

if __name__ == "__main__":
    import verl.utils.ulysses  # once, before the forks
    torch.multiprocessing.start_processes(work, tuple(sys.argv[1:]), nprocs=4, start_method="fork")
"""


def test_ulysses_groups(tmp_path: Path) -> None:
    """2 and 4 ranks, the latter with more ranks than kv heads: logits and summed gradients are one rank's."""
    tiny_gpt_oss("eager", num_hidden_layers=4).save_pretrained(tmp_path / "model")
    (tmp_path / "ulysses.py").write_text(ULYSSES)
    run(tmp_path / "ulysses.py", tmp_path / "store", tmp_path / "model")
    found = torch.load(tmp_path / "store.pt")
    want = found.pop((1, False))
    assert all(x.abs().max() > 0 for x in want.values())
    assert len(found) == 5
    for case, got in found.items():
        for name, x in got.items():
            assert (x - want[name]).norm() < 1e-5 * want[name].norm(), (case, name)


REPLACED = """
import sys, torch
import verl
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.model import load_valuehead_model
from sinkattn import verl_patch
folder = sys.argv[1]
critic = load_valuehead_model(folder, torch.float32, AutoConfig.from_pretrained(folder, num_labels=1), False)
assert critic.config._attn_implementation == "sinkattn"
positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
critic(torch.arange(8)[None], position_ids=positions, use_cache=False).logits.sum().backward()
for layer in critic.model.layers:
    assert layer.self_attn.sinks.grad.abs().max() > 0
actor = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2")
assert actor.config._attn_implementation == "sinkattn"
verl_patch.remove()
try:
    AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2")
except ImportError:
    print("as before")
"""


def test_critic(tmp_path: Path) -> None:
    """verl's critic asks for flash_attention_2 whatever the config says; told so, it gets sinkattn, not in silence."""
    tiny_gpt_oss("eager").save_pretrained(tmp_path / "model")
    (tmp_path / "replaced.py").write_text(REPLACED)
    out = run(tmp_path / "replaced.py", tmp_path / "model", SINKATTN_VERL_REPLACE="flash_attention_2")
    assert "as before" in out
    assert "models that ask for flash_attention_2 get sinkattn" in out


def test_entry_point(tmp_path: Path) -> None:
    assert '"verl.plugins"]\nsinkattn = "sinkattn.verl_patch"' in (ROOT / "pyproject.toml").read_text()
    installed = tmp_path / "sinkattn-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: sinkattn\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[verl.plugins]\nsinkattn = sinkattn.verl_patch\n")
    script = tmp_path / "plugin.py"  # beside it, so that it is on the path
    script.write_text("import verl, transformers; print(transformers.AttentionInterface().get('sinkattn').__module__)")
    assert "sinkattn.verl_patch\n" in run(script, VERL_USE_EXTERNAL_MODULES="")


UNTOUCHED = """
import sys
import verl, verl.models.transformers.monkey_patch, verl.utils.ulysses, verl.utils.model
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations import flash_attention
from sinkattn import verl_patch
verl_patch.remove()  # what the import of verl did
ours = [vars(PreTrainedModel), AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping]
def names():
    modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "verl"]
    return [dict(space) for space in (*map(vars, (*modules, flash_attention)), *ours)]
before = names()
verl_patch.apply()
verl_patch.replace("flash_attention_2")
changed = [a != b for a, b in zip(before, names(), strict=True)]
assert changed == [False] * (len(before) - 3) + [True] * 3, changed
verl_patch.remove()
assert names() == before
"""


def test_remove_restores_every_name(tmp_path: Path) -> None:
    """verl's modules are never changed; transformers' are until remove()."""
    (tmp_path / "untouched.py").write_text(UNTOUCHED)
    run(tmp_path / "untouched.py")
