# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and TRL's SFTTrainer on packed rows, with and without LoRA: the losses and sinks of eager fp32.

The reference is the same trainer, with the same batches in the same order, whose collator lays the sequences of each
packed row out as a padded batch. Every expert is taken: a router that chooses may turn the last bit into another one.
"""

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install --no-build-isolation '.[test]'")

from hf_cases import Calls
from tiny_gpt_oss import tiny_gpt_oss
from transformers import DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import sinkattn.hf as hf

hf.register()
STEPS = 50
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """For tensors this small, others only wait, and long where the machine is busy."""
    torch.set_num_threads(1)


def pieces(count: int = 400) -> list[dict[str, list[int]]]:
    """Bytes of the language reference that Python ships, 2 to 60 of them a piece."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    generator = torch.Generator().manual_seed(0)
    starts, lengths = (torch.randint(*x, (count,), generator=generator).tolist() for x in ((0, 100_000), (2, 61)))
    return [{"input_ids": [1 + b % 96 for b in text[a : a + n]]} for a, n in zip(starts, lengths, strict=True)]


class Unpacked:
    """What a collator packs into one row, as a batch with padding on the right and an attention_mask."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        packed = self.collate(examples)
        starts = (packed["position_ids"][0] == 0).nonzero().flatten().tolist()
        rows = {
            name: pad_sequence(packed[name][0].tensor_split(starts[1:]), batch_first=True, padding_value=filler)
            for name, filler in (("input_ids", 0), ("labels", -100))
        }
        return {**rows, "attention_mask": (rows["input_ids"] != 0).long()}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.seen.append(logs["loss"])


def options(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    } | others


def run(trainer: Trainer) -> list[float]:
    losses = Losses()
    trainer.add_callback(losses)
    trainer.train()
    return losses.seen


def sinks(model: torch.nn.Module) -> Tensor:
    return torch.stack([p.detach().clone() for name, p in model.named_parameters() if name.endswith("sinks")])


def assert_moved_alike(got: Tensor, want: Tensor, before: Tensor) -> None:
    assert (want - before).norm() > 1e-3
    assert (got - want).norm() < 0.01 * (want - before).norm()


def with_trainer(model: torch.nn.Module, folder: Path, unpacked: bool, **others: Any) -> Trainer:
    flatten = DataCollatorWithFlattening()
    arguments = TrainingArguments(**options(folder, per_device_train_batch_size=8, **others))
    return Trainer(model, arguments, Unpacked(flatten) if unpacked else flatten, pieces())


NO_TRL = "trl is not installed: pip install --no-build-isolation '.[trl]'"


def characters() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, **{chr(31 + i): i for i in range(1, 97)}}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>", padding_side="left"
    )


def with_trl(model: torch.nn.Module, folder: Path, unpacked: bool, **others: Any) -> Trainer:
    trl = pytest.importorskip("trl", reason=NO_TRL)
    from datasets import Dataset

    packing = {"packing": True, "max_length": 128, "per_device_train_batch_size": 2}
    config = trl.SFTConfig(**options(folder, **packing | others))
    trainer = trl.SFTTrainer(model, config, train_dataset=Dataset.from_list(pieces()), processing_class=characters())
    if unpacked:
        trainer.data_collator = Unpacked(trainer.data_collator)
    return trainer


def model_with(attention: str) -> PreTrainedModel:
    model = tiny_gpt_oss(num_experts_per_tok=4)
    model.set_attn_implementation(attention)
    return model


Setup = Callable[..., Trainer]
PADDING_FREE = {"packing": False, "padding_free": True, "max_length": None, "per_device_train_batch_size": 8}


@pytest.mark.parametrize(
    ("setup", "others"),
    [
        pytest.param(with_trainer, {}, id="Trainer"),
        pytest.param(with_trl, {"gradient_checkpointing": True}, id="TRL packing"),
        pytest.param(with_trl, PADDING_FREE, id="TRL padding-free"),
    ],
)
def test_packed_training_follows_eager_fp32(setup: Setup, others: dict[str, Any], tmp_path: Path) -> None:
    model, eager = model_with("sinkattn"), model_with("eager")
    before = sinks(model)
    got = run(setup(model, tmp_path, unpacked=False, **others))
    want = run(setup(eager, tmp_path, unpacked=True, **others))
    assert len(got) == len(want) == STEPS
    assert want[-1] < want[0] - 0.5
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-3
    assert_moved_alike(sinks(model), sinks(eager), before)

    # What the comparison is worth: eager attention on the packed rows themselves.
    wrong = run(setup(model_with("eager"), tmp_path, unpacked=False, **others | {"max_steps": 1}))
    assert abs(wrong[0] - want[0]) > 1e-3


@pytest.mark.parametrize("setup", [pytest.param(with_trainer, id="Trainer"), pytest.param(with_trl, id="TRL")])
@pytest.mark.parametrize("trained", [False, True])
def test_lora(setup: Setup, trained: bool, tmp_path: Path) -> None:
    """PEFT freezes sinks and has no way to name them, so who wants them trained says so after get_peft_model."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install --no-build-isolation '.[test]'")
    losses, models = [], []
    for base in (model_with("sinkattn"), model_with("eager")):
        before = sinks(base)
        torch.manual_seed(3)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.requires_grad_(trained)
        trainer = setup(model, tmp_path, unpacked=bool(models), max_steps=20, learning_rate=5e-3)
        with Calls() as calls:
            losses.append(run(trainer))
        backward = calls.named("flash_attn_bwd")
        assert len(backward) == (0 if models else 40)
        assert all((arguments["s_aux"] is None) is not trained for arguments, _ in backward)
        assert all((result[3].numel() == 0) is not trained for _, result in backward)
        models.append(model)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3
    for (name, ours), eager in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if "lora_B" in name:
            assert_moved_alike(ours, eager, torch.zeros_like(eager))
    ours, eager = (sinks(model) for model in models)
    if trained:
        assert_moved_alike(ours, eager, before)
    else:
        assert torch.equal(ours, before)
    merged = models[0].merge_and_unload()
    assert torch.equal(sinks(merged), ours)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(sinks(type(merged).from_pretrained(tmp_path / "merged")), ours)


def test_grpo_follows_eager(tmp_path: Path) -> None:
    """TRL's GRPOTrainer generates, scores and trains: from the same seed the same samples, and the sinks go alike."""
    trl = pytest.importorskip("trl", reason=NO_TRL)
    from datasets import Dataset

    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 3}
    models, rewards = [model_with("sinkattn"), model_with("eager")], []
    before = sinks(models[0])
    for model in models:
        # An update by SGD is the gradient's; Adam's would be its sign.
        config = trl.GRPOConfig(**options(tmp_path, **sizes, optim="sgd", learning_rate=1.0))
        data = Dataset.from_dict({"prompt": ["a few words", "one"] * 8})
        trainer = trl.GRPOTrainer(model, count_letters, config, data, processing_class=characters())
        with Calls() as calls:
            trainer.train()
        assert bool(calls.named("flash_decode")) == bool(calls.named("flash_attn_bwd")) == (model is models[0])
        rewards.append([x["reward"] for x in trainer.state.log_history if "reward" in x])
    assert len(rewards[0]) == 3
    assert rewards[0] == rewards[1]
    assert_moved_alike(*map(sinks, models), before)


def count_letters(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(x.isalpha() for x in completion)) for completion in completions]
