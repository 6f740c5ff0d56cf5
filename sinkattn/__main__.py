# SPDX-License-Identifier: Apache-2.0
"""python -m sinkattn: what is installed here. python -m sinkattn plan: which kernel serves given sizes, and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import _C
from .check import check, plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m sinkattn", description="Without a command: version, backends, devices.")
    command = parser.add_subparsers(dest="command").add_parser(
        "plan", help="which kernel serves given sizes, and why", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    command.add_argument("op", choices=("fwd", "bwd", "decode"))
    command.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "fp64"))
    command.add_argument("--batch", type=int, default=1, help="sequences")
    command.add_argument("--num-q-heads", type=int, default=64)
    command.add_argument("--num-kv-heads", type=int, default=8)
    command.add_argument("--head-dim", type=int, default=64)
    command.add_argument("--q-len", type=int, default=1, help="rows a sequence; packed: of the whole tensor")
    command.add_argument("--k-len", type=int, default=8192, help="keys a sequence; decode: the cache's capacity")
    command.add_argument("--s-aux-dtype", choices=("bf16", "fp16", "fp32", "fp64"), help="learned sinks, of this dtype")
    command.add_argument("--packed", action="store_true", help="sequences lie end to end, bounded by cu_seqlens")
    command.add_argument("--page-size", type=int, default=0, help="decode: slots a page; 0: a contiguous cache")
    command.add_argument("--num-pages", type=int, default=0)
    command.add_argument("--window-size-left", type=int, default=-1, help="-1: unbounded")
    command.add_argument("--window-size-right", type=int, default=-1, help="-1: unbounded, 0: causal")
    command.add_argument("--num-sink-tokens", type=int, default=0, help="first keys, visible through the window")
    command.add_argument(
        "--num-splits", type=int, default=0, help="decode: parts a sequence; 0: the planner's; -N: two passes"
    )
    command.add_argument("--invariant", action="store_true", help="decode: the bits of the prefill row")
    device = command.add_mutually_exclusive_group()
    device.add_argument("--cuda", type=int, metavar="ORDINAL", help="plan for this CUDA device instead of the CPU")
    device.add_argument("--arch", type=int, help="plan for a CUDA device that need not be here: 90 is 9.0; with --sms")
    command.add_argument("--sms", type=int, help="its multiprocessors")
    return parser


def _device(cuda: int | None, arch: int | None, sms: int | None) -> dict[str, Any] | None:
    """None: this CPU."""
    if (arch is None) != (sms is None):
        raise ValueError("sinkattn: --arch and --sms come together")
    if arch is not None:
        return {"backend": "cuda", "arch": arch, "workers": sms, "shared_bytes": 0}
    return None if cuda is None else _C.query_cuda(cuda)


def main(arguments: list[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    try:
        if options.pop("command") is None:
            print(check())
            return 0
        device = _device(options.pop("cuda"), options.pop("arch"), options.pop("sms"))
        chosen = plan(options.pop("op"), device, **options)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    chosen["reason"] = chosen["reason"].replace("; ", "\n" + " " * 17)
    print("\n".join(f"{name:15}  {value}" for name, value in chosen.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
