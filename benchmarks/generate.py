# SPDX-License-Identifier: Apache-2.0
"""A token of generate() behind many keys: eager attention, sinkattn, and sinkattn with a static cache in one graph.

The model has 4 layers of gpt-oss-20b's sizes, experts included, and random weights; its cache is filled, not
computed. A token's time is what 32 tokens more take, over 32, on the host's clock: Python and launches included. The
static cache is compiled by transformers, as generate() does it by itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import harness, studies

SUITE = "generate"
KEYS = (8192, 131072 - 256)  # the last is as long as the model goes, less the new tokens
LAYERS, FEW, MORE, ROUNDS = 4, 8, 32, 3
IMPLS = {"eager": ("eager", False), "sinkattn": ("sinkattn", False), "sinkattn-static": ("sinkattn", True)}
QUICK: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class GenerateRow:
    """ms: of a token."""

    suite: str
    keys: int
    impl: str
    ms: float
    commit: str
    torch: str


def new_model(attention: str, quick: bool) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(num_hidden_layers=LAYERS, **(QUICK if quick else {}))
    config._attn_implementation = attention
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(studies.device()):
            return GptOssForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def full_cache(config: Any, keys: int, static: bool) -> Any:
    from transformers import DynamicCache, StaticCache

    cache = StaticCache(config=config, max_cache_len=keys + 128) if static else DynamicCache(config=config)
    generator = torch.Generator(studies.device()).manual_seed(1)
    shape = 1, config.num_key_value_heads, keys, config.head_dim
    for layer in range(LAYERS):
        k, v = (
            torch.randn(shape, device=studies.device(), dtype=torch.bfloat16, generator=generator) for _ in range(2)
        )
        cache.update(k, v, layer, {"cache_position": torch.arange(keys, device=studies.device())})
    return cache


def seconds_of(model: Any, keys: int, static: bool) -> Callable[[int], float]:
    """How long so many tokens take."""
    ids = torch.randint(model.config.vocab_size, (1, keys + 1), device=studies.device())
    synchronize: Callable[[], None] = torch.cuda.synchronize if studies.device() == "cuda" else lambda: None

    def run(new: int) -> float:
        cache = full_cache(model.config, keys, static)
        synchronize()
        begin = time.perf_counter()
        model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        synchronize()
        return time.perf_counter() - begin

    return run


def token_ms(run: Callable[[int], float]) -> float:
    """The first run compiles, where something is compiled, and the second captures."""
    for _ in range(2):
        run(FEW)
    few, many = (min(run(n) for _ in range(ROUNDS)) for n in (FEW, FEW + MORE))
    return harness.digits((many - few) / MORE * 1e3)


def markdown(machine: dict[str, object], rows: Sequence[GenerateRow]) -> list[str]:
    found = {(row.keys, row.impl): row.ms for row in rows}
    lines = [
        [str(keys), *(f"{found[keys, impl]:.3g}" for impl in IMPLS)] for keys in dict.fromkeys(r.keys for r in rows)
    ]
    return [studies.where(machine, rows), studies.table(["keys", *(f"{impl}, ms a token" for impl in IMPLS)], lines)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)
    parser.add_argument("--keys", nargs="*", type=int, help=f"in the cache; default: {KEYS}")


def run(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("benchmarks generate needs transformers: pip install --no-build-isolation '.[hf]'")
    import sinkattn.hf

    sinkattn.hf.register()
    rows = list[GenerateRow]()
    commit = options.commit or harness.commit()
    with torch.no_grad():
        for impl, (attention, static) in IMPLS.items():
            model = new_model(attention, options.quick)
            for keys in options.keys or ((64,) if options.quick else KEYS):
                ms = token_ms(seconds_of(model, keys, static))
                rows.append(GenerateRow(SUITE, keys, impl, ms, commit, torch.__version__))
                print(f"{keys} keys, {impl}: {ms} ms a token", flush=True)
            del model
            if studies.device() == "cuda":
                torch.cuda.empty_cache()
    rows.sort(key=lambda row: row.keys)
    studies.show(markdown(studies.machine(), rows))
    studies.keep(studies.place(SUITE, options), rows)
