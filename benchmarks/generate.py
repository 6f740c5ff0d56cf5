# SPDX-License-Identifier: Apache-2.0
"""A token of generate() behind many keys: eager attention, a prefill of one row, sinkattn, a static cache in graphs.

The model has 4 layers of gpt-oss-20b's sizes, experts included, random weights and a random cache. A token's time is
what 32 more tokens take, over 32, on the host's clock. generate() itself compiles the static cache. The attention of
each new row is compared with one prefill's of the final text, over the same keys and values.
"""

import argparse
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import harness, studies

SUITE = "generate"
KEYS = (8192, 131072 - 256)  # the last is as long as the model goes, less the new tokens
LAYERS, FEW, MORE, ROUNDS = 4, 8, 32, 3
PREFILL, INVARIANT, STATIC = "sinkattn-prefill", "sinkattn-invariant", "sinkattn-static"
IMPLS = ("eager", PREFILL, "sinkattn", INVARIANT, STATIC)
QUICK: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class GenerateRow:
    """ms, launches, graphs: of a token; apart: new rows of attention with other bits than a prefill's, of how many."""

    suite: str
    keys: int
    impl: str
    ms: float
    commit: str
    torch: str
    launches: float = 0.0
    graphs: float = 0.0
    apart: str = ""


def new_model(quick: bool) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(num_hidden_layers=LAYERS, **(QUICK if quick else {}))
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(studies.device()):
            return GptOssForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def full_cache(config: Any, keys: int, static: bool, drops: bool = True) -> Any:
    """drops: behind a window, as generate()'s own caches."""
    from transformers import DynamicCache, StaticCache

    if static:
        cache: Any = StaticCache(config=config, max_cache_len=keys + 128)
    else:
        cache = DynamicCache(config=config) if drops else DynamicCache()
    generator = torch.Generator(studies.device()).manual_seed(1)
    shape = 1, config.num_key_value_heads, keys, config.head_dim
    for layer in range(LAYERS):
        k, v = (
            torch.randn(shape, device=studies.device(), dtype=torch.bfloat16, generator=generator) for _ in range(2)
        )
        cache.update(k, v, layer, {"cache_position": torch.arange(keys, device=studies.device())})
    return cache


@contextmanager
def attending(model: Any, impl: str, seen: list[tuple[Tensor, ...]] | None = None) -> Iterator[None]:
    """Attention of the impl inside the block; `seen` takes q, k, v and out of each decode, and its options."""
    import sinkattn
    import sinkattn.hf

    decode = sinkattn.hf.decode
    sinkattn.hf.register(invariant=impl == INVARIANT)
    model.set_attn_implementation("eager" if impl == "eager" else "sinkattn")

    def prefill(q: Tensor, k: Tensor, v: Tensor, keys: object, *, invariant: bool, **options: Any) -> Any:
        if keys is not None:
            raise RuntimeError("a prefill stands in for a decode of whole caches alone")
        return sinkattn.flash_attn_func(q, k, v, **options)

    def watched(q: Tensor, k: Tensor, v: Tensor, keys: object, **options: Any) -> Tensor:
        out = decode(q, k, v, keys, **options)  # type: ignore[arg-type]
        options.pop("invariant")
        seen.append((q, k, v, out, options))  # type: ignore[union-attr, arg-type]
        return out

    if impl == PREFILL:
        sinkattn.hf.decode = prefill  # type: ignore[assignment]
    elif seen is not None:
        sinkattn.hf.decode = watched
    try:
        yield
    finally:
        sinkattn.hf.decode = decode
        sinkattn.hf.register(invariant=False)


def rows_apart(model: Any, keys: int, impl: str) -> str:
    """Rows of all heads and layers that differ from one prefill over the last call's keys and values, which are all."""
    import sinkattn

    seen = list[tuple[Any, ...]]()
    cache = full_cache(model.config, keys, static=False, drops=False)
    ids = torch.randint(model.config.vocab_size, (1, keys + 1), device=studies.device())
    with attending(model, impl, seen):
        model.generate(ids, past_key_values=cache, max_new_tokens=FEW, min_new_tokens=FEW, do_sample=False)
    apart = rows = 0
    for layer in range(LAYERS):
        calls = seen[layer::LAYERS]
        _, k, v, _, options = calls[-1]
        q, out = (torch.cat([call[i] for call in calls], 1) for i in (0, 3))
        want = sinkattn.flash_attn_func(q, k, v, **options)
        apart += int((out != want).any(-1).sum())
        rows += want[..., 0].numel()
    return f"{apart} of {rows}"


def launches(run: Callable[[int], float], tokens: int = FEW) -> tuple[float, float]:
    """Kernels that the host launches a token, and graphs; 0 on a CPU. The first token is left out: it is a prefill."""
    if studies.device() != "cuda":
        return 0.0, 0.0

    def count(new: int) -> Counter[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(new)
        found = Counter[str]()
        for event in profile.events():
            found["graphs"] += "GraphLaunch" in event.name
            found["launches"] += event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
        return found

    few, many = count(tokens), count(2 * tokens)
    return (many["launches"] - few["launches"]) / tokens, (many["graphs"] - few["graphs"]) / tokens


def seconds_of(model: Any, keys: int, static: bool) -> Callable[[int], float]:
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


def counted(launches: float) -> str:
    return f"{launches:.3g}" if launches else "-"


def markdown(machine: dict[str, object], rows: Sequence[GenerateRow]) -> list[str]:
    names = ["keys", "attention", "ms a token", "launches a token", "graphs a token", "rows unlike a prefill's"]
    lines = [
        [str(row.keys), row.impl, f"{row.ms:.3g}", counted(row.launches), counted(row.graphs), row.apart or "-"]
        for row in rows
    ]
    return [studies.where(machine, rows), studies.table(names, lines)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    studies.add_output(parser, SUITE)
    parser.add_argument("--keys", nargs="*", type=int, help=f"in the cache; default: {KEYS}")
    parser.add_argument("--impls", nargs="*", choices=IMPLS, default=IMPLS)


def run(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("benchmarks generate needs transformers: pip install --no-build-isolation '.[hf]'")
    rows = list[GenerateRow]()
    commit = options.commit or harness.commit()
    model = new_model(options.quick)
    with torch.no_grad():
        for keys in options.keys or ((64,) if options.quick else KEYS):
            for impl in options.impls:
                with attending(model, impl):
                    run = seconds_of(model, keys, impl == STATIC)
                    ms = token_ms(run)
                    counts = launches(run)
                apart = rows_apart(model, keys, impl) if impl in ("sinkattn", INVARIANT) else ""
                rows.append(GenerateRow(SUITE, keys, impl, ms, commit, torch.__version__, *counts, apart))
                print(f"{keys} keys, {impl}: {ms} ms a token, {counts} {apart}", flush=True)
                if studies.device() == "cuda":
                    torch.cuda.empty_cache()
                studies.keep(studies.place(SUITE, options), rows)
    studies.show(markdown(studies.machine(), rows))
