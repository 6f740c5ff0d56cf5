# SPDX-License-Identifier: Apache-2.0
"""Record what vLLM's engine hands to an attention backend, step by step: benchmarks/data/vllm_steps.npz.xz.

    build/vllm/bin/python tools/record_vllm_steps.py

The engine is vLLM's on a CPU, the model a gpt-oss of two layers, so that it has a block table for its sliding layers
and one for its full ones. Two runs: prompts of mixed lengths, some with a shared prefix, in chunks beside decoding
sequences; and n-gram drafts, whose sequences have rows for the drafts. benchmarks/vllm_steps.py reads the file.
"""

import argparse
import lzma
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from tiny_gpt_oss import tiny_gpt_oss
from vllm import LLM, SamplingParams

from benchmarks.vllm_steps import PATH
from sinkattn.vllm_backend import SinkAttentionMetadataBuilder

SHARED, BLOCK = 320, 16
Arrays = dict[str, np.ndarray[Any, Any]]


class Recorder:
    """The metadata of each build, in steps of one build a kind of layer."""

    def __init__(self) -> None:
        self.builds: dict[str, list[Any]] = {"sliding": [], "full": []}

    def build(self, builder: Any, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
        kind = "sliding" if getattr(builder.kv_cache_spec, "sliding_window", None) else "full"
        tensors = {
            "query_start_loc": given.query_start_loc,
            "seq_lens": given.seq_lens,
            "block_table": given.block_table_tensor,
            "slot_mapping": given.slot_mapping,
        }
        numbers = {name: getattr(given, name) for name in ("num_actual_tokens", "max_query_len", "max_seq_len")}
        self.builds[kind].append(numbers | {name: x.numpy().copy() for name, x in tensors.items()})
        return build(builder, common_prefix_len, given, fast_build)

    def arrays(self, run: str) -> Arrays:
        """Steps one behind the other; tables and slots as differences along a row, which are nearly all 0 and 1."""
        steps = list(zip(self.builds["sliding"], self.builds["full"], strict=True))
        for sliding, full in steps:
            assert all(np.array_equal(sliding[x], full[x]) for x in ("query_start_loc", "seq_lens"))
        one = [full for _, full in steps]
        names = ("num_actual_tokens", "max_query_len", "max_seq_len")
        found = {
            "numbers": np.array([[len(x["seq_lens"]), *(x[name] for name in names)] for x in one]),
            "query_start_loc": np.concatenate([np.diff(x["query_start_loc"]) for x in one]),
            "seq_lens": np.concatenate([x["seq_lens"] for x in one]),
        }
        for i, kind in enumerate(self.builds):
            tables = np.concatenate([x[i]["block_table"] for x in steps])
            found[f"{kind}.block_table"] = np.diff(tables, axis=1, prepend=0)
            found[f"{kind}.slot_mapping"] = np.diff(np.concatenate([x[i]["slot_mapping"] for x in steps]), prepend=0)
        return {f"{run}.{name}": x.astype(np.int32) for name, x in found.items()}


build = SinkAttentionMetadataBuilder.build


def record(run: str, folder: Path, prompts: list[list[int]], tokens: list[int], most: int, **options: Any) -> Arrays:
    """Sequences of up to `most` rows are put in front, as the backend asks for on CUDA."""
    recorder = Recorder()
    SinkAttentionMetadataBuilder.reorder_batch_threshold = most
    llm = LLM(
        str(folder),
        attention_backend="CUSTOM",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK,
        kv_cache_memory_bytes=1 << 26,
        seed=0,
        **options,
    )
    SinkAttentionMetadataBuilder.build = lambda *args, **kwargs: recorder.build(*args, **kwargs)
    params = [SamplingParams(max_tokens=n, temperature=0, detokenize=False, ignore_eos=True) for n in tokens]
    done = llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)
    SinkAttentionMetadataBuilder.build = build
    print(f"{run}: {len(recorder.builds['full'])} steps, cached tokens {[x.num_cached_tokens for x in done]}")
    return recorder.arrays(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PATH)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)

    def random(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = [1800, *random(1, 1500, 39)]
    prompts = [random(0, 97, n) for n in lengths]
    prompts = [prompts[0][:SHARED] + x[: 2000 - SHARED] if i % 4 == 3 else x for i, x in enumerate(prompts)]
    repetitive = [(x[:7] * 99)[: 40 + 37 * i] for i, x in enumerate(prompts[:8])]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_gpt_oss("eager", head_dim=32, sliding_window=128, max_position_embeddings=4096).save_pretrained(folder)
        found = record(
            "mixed", folder, prompts, random(4, 24, 40), 1, max_num_seqs=16, max_num_batched_tokens=1024
        ) | record(
            "drafts", folder, repetitive, [24] * 8, 4, max_num_seqs=8, max_num_batched_tokens=512,
            speculative_config=drafts,
        )  # fmt: skip
    args.output.parent.mkdir(exist_ok=True)
    with lzma.open(args.output, "wb") as file:
        np.savez(file, **found)
    print(f"wrote {args.output}, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
