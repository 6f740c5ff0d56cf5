# SPDX-License-Identifier: Apache-2.0
"""The folder hub/ as `kernels` and transformers load it: logits, sinks' gradients, continuous batching."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("kernels") is None:
    pytest.skip("kernels is not in this environment: make test-vllm makes one", allow_module_level=True)

from hf_cases import assert_close, assert_same_gradients, gradients, loss, tokens
from kernels import get_kernel
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata
from tiny_gpt_oss import tiny_gpt_oss
from transformers import ContinuousBatchingConfig, GenerationConfig

import sinkattn

HUB = Path(__file__).parent.parent / "hub"
KERNEL = HUB / "torch-ext" / "attn"
OURS, ASKED_FOR = "sinkattn/attn", "kernels-community/vllm-flash-attn3"
"""Its name on the hub, and the kernel that transformers' gpt-oss asks for, in whose place it is put."""


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"{OURS}={KERNEL}:{ASKED_FOR}={KERNEL}")


def test_metadata_is_that_of_the_file() -> None:
    """What kernel-builder reads, and what kernels holds a downloaded file against."""
    assert {str(x) for x in Build.open(HUB).general.backends} == {str(x) for x in (Backend.CPU, Backend.CUDA)}
    metadata = Metadata.read_from_file(KERNEL / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, KERNEL))


def test_the_functions_are_the_packages() -> None:
    kernel = get_kernel(OURS, version=0)
    assert sorted(kernel.__all__) == ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
    assert all(getattr(kernel, name) is getattr(sinkattn, name) for name in kernel.__all__)


@pytest.mark.parametrize("name", [OURS, ASKED_FOR])
def test_gpt_oss(name: str) -> None:
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = False
    eager, model = tiny_gpt_oss("eager"), tiny_gpt_oss("eager")
    model.set_attn_implementation(name, allow_all_kernels=name == OURS)
    assert model.config._attn_implementation == name
    for attention_mask in (None, mask):
        got, want = (x(ids, attention_mask=attention_mask, use_cache=False).logits for x in (model, eager))
        if attention_mask is not None:
            got, want = got[mask], want[mask]
        assert_close(got, want, 1e-5)
        assert_same_gradients(gradients(model, loss(got)), gradients(eager, loss(want)))


def test_continuous_batching() -> None:
    model, eager = tiny_gpt_oss(ASKED_FOR), tiny_gpt_oss("eager")
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 12, 30, 3)]
    config = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)  # else most of the machine's memory
    done = model.generate_batch(prompts, config, batching, progress_bar=False)
    for prompt, request in zip(prompts, done.values(), strict=True):
        alone = eager.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert request.generated_tokens == alone.tolist()
    assert model.config._attn_implementation == ASKED_FOR


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sinkattn", None)
    spec = importlib.util.spec_from_file_location("of_the_hub", KERNEL / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ModuleNotFoundError, match=r"the hub kernel calls the package sinkattn, which is not installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
