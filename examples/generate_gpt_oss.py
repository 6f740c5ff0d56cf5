# SPDX-License-Identifier: Apache-2.0
"""Write text with the model that finetune_gpt_oss.py tuned, from a dynamic and a static cache, and as eager does."""

import argparse
import time
from pathlib import Path

import torch
from transformers import GptOssForCausalLM

import sinkattn.hf


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("build/demo/model"))
    parser.add_argument("--prompt", default="The for statement is used to ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    if not args.model.is_dir():
        raise SystemExit(f"There is no model in {args.model}: run `make demo` first, which tunes one, or give --model.")

    sinkattn.hf.register()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16  # the CUDA kernels take no fp32
    model = GptOssForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sinkattn")
    model.to(args.device).eval()
    ids = torch.tensor([list(args.prompt.encode())], device=args.device)

    written = {}
    for implementation, cache in (("sinkattn", "dynamic"), ("sinkattn", "static"), ("eager", "dynamic")):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.tokens,
            do_sample=True,
            temperature=0.7,
            cache_implementation=cache,
            use_cache=True,
            disable_compile=True,  # of a static cache on a GPU, for minutes
        )
        written[implementation, cache] = bytes(out[0].tolist())
        print(f"{implementation}, {cache} cache: {args.tokens / (time.perf_counter() - start):.0f} tokens/s")
    print(written["sinkattn", "dynamic"].decode(errors="replace"))
    same = len(set(written.values())) == 1
    print("All three wrote the same." if same else "They differ: one draw near the edge of two tokens is enough.")


if __name__ == "__main__":
    main()
