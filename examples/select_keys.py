# SPDX-License-Identifier: Apache-2.0
"""Attention to the keys that a selection names: a decode over 1024 of 131072, as a block table with pages of one key.

A sparse attention chooses each new token's keys by its own index, here the scores of q's and k's first 16 columns.
Nothing is copied: the cache is [keys, 1, kv heads, head_dim] in pages of one slot, the chosen keys are a row of the
block table, and their number is the length.
"""

import argparse
import time

import torch
from torch import Tensor

import sinkattn
from sinkattn import reference

INDEXED = 16  # columns


def choose(q: Tensor, k: Tensor, top: int) -> Tensor:
    """int32 [batch, top], in ascending order; q [batch, 1, q heads, head_dim], k [keys, 1, head_dim]."""
    scores = q[:, 0, :, :INDEXED].float() @ k[:, 0, :INDEXED].float().T  # [batch, q heads, keys]
    return scores.amax(1).topk(top, -1).indices.sort(-1).values.int()


def attend(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """out and the LSE over the keys that each row of the table names by their numbers in k, v [keys, 1, head_dim]."""
    lengths = torch.full((len(table),), table.shape[1], dtype=torch.int32, device=q.device)
    return sinkattn.flash_attn_with_kvcache(
        q, k[:, None], v[:, None], cache_seqlens=lengths, block_table=table, causal=True, s_aux=s_aux, return_lse=True
    )


def best_ms(call: object, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()  # type: ignore[operator]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--top", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=128, help="query heads of the one kv head")
    parser.add_argument("--head-dim", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = {"device": args.device, "dtype": torch.bfloat16}
    q = torch.randn(args.batch, 1, args.heads, args.head_dim, **device)
    k = torch.randn(args.keys, 1, args.head_dim, **device)
    q[..., :INDEXED] = q[:, :, :1, :INDEXED]  # the index knows most of a score, and heads agree on it
    k[..., :INDEXED] *= args.head_dim**0.5
    s_aux = torch.randn(args.heads, device=args.device)
    v = k  # as where keys and values are one compressed row
    table = choose(q, k, args.top)
    every = torch.arange(args.keys, dtype=torch.int32, device=args.device).expand(args.batch, -1).contiguous()

    out, lse = attend(q, k, v, s_aux, table)
    _, whole = attend(q, k, v, s_aux, every)
    chosen = k[table.long()]  # [batch, top, 1, head_dim]
    exact = reference.flash_attn_func(q.double(), chosen.double(), chosen.double(), causal=True, s_aux=s_aux.double())
    assert isinstance(exact, Tensor)
    off = (out.double() - exact).norm() / exact.norm()
    print(f"{args.top} of {args.keys} keys, {args.heads}:1 heads of {args.head_dim}: off from fp64 by {off:.1e}")
    print(f"the softmax's weight that they and the sink hold: {float((lse - whole).exp().mean()):.3f}")
    few, all_ms = (best_ms(lambda t=t: attend(q, k, v, s_aux, t)) for t in (table, every))
    print(f"ms on {args.device}: {few:.3f}; over all keys {all_ms:.3f}")


if __name__ == "__main__":
    main()
