# SPDX-License-Identifier: Apache-2.0
"""python -m sinkattn: what is installed here, and whether it computes what it should.

python -m sinkattn plan: which kernel serves given sizes, and why.
python -m sinkattn doctor: why an import or a plan fails.
"""

import argparse
import sys
from typing import Any

from . import _C, doctor
from .check import check, plan

_PLAN = "Which kernel serves given sizes, and why; on this CPU, or by --cuda or --arch on a GPU. Heads are gpt-oss's."
_PLANNED = """what is printed:
  variant           the kernel; its name says from which CPU level or compute capability on it runs
  compiled          whether this build has it: those for CUDA only if nvcc was there
  tile_q, tile_k    rows, (token, head) pairs of one kv head, and keys that it works on at a time; 0: no tiles
  workers           threads or multiprocessors that get some of the work
  num_splits        parts that the keys of a sequence are cut into
  num_items         pieces of work: tiles of rows of all sequences and kv heads, times their parts
  workspace_bytes   memory that a call needs beside its tensors
  reason            why this kernel and these parts, and why no better kernel

docs/planner.md defines B*, P and P*."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m sinkattn", description="Without a command: version, backends, devices, self-test."
    )
    parser.add_argument("--version", action="version", version=f"sinkattn {_C.version}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("doctor", help="why an import or a plan fails, or that nothing does")
    command = commands.add_parser(
        "plan",
        help="which kernel serves given sizes, and why",
        description=_PLAN,
        epilog=_PLANNED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, text: str, default: int | None = 0) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        command.add_argument(name, type=int, default=default, metavar="N", help=text + shown)

    dtypes = ("bf16", "fp16", "fp32", "fp64")
    command.add_argument("op", choices=("fwd", "bwd", "decode"))
    command.add_argument("--dtype", default="bf16", choices=dtypes, help="of q, k and v (default: %(default)s)")
    command.add_argument("--s-aux-dtype", choices=dtypes, help="of the learned sinks (default: none are given)")
    add("--batch", "sequences", 1)
    add("--num-q-heads", "query heads", 64)
    add("--num-kv-heads", "key and value heads", 8)
    add("--head-dim", "elements of a head", 64)
    add("--head-dim-v", "elements of a value and of out; 0: as many")
    add("--q-len", "rows a sequence; packed: of the whole tensor (default: 1 in a decode, else --k-len)", None)
    add("--k-len", "keys a sequence; packed: of the whole tensor; decode: the cache's capacity", 8192)
    command.add_argument("--packed", action="store_true", help="sequences lie end to end, bounded by cu_seqlens")
    add("--page-size", "decode: slots a page; 0: a contiguous cache")
    add("--num-pages", "decode: pages of a paged cache")
    add("--window-size-left", "keys before a row's own; -1: unbounded", -1)
    add("--window-size-right", "keys after a row's own; -1: unbounded, 0: causal", -1)
    add("--num-sink-tokens", "first keys, visible through the window")
    add("--num-splits", "decode: parts a sequence; 0: the planner's choice; -N: two passes")
    command.add_argument("--invariant", action="store_true", help="decode: the bits of the prefill row")
    device = command.add_mutually_exclusive_group()
    device.add_argument("--cuda", type=int, metavar="ORDINAL", help="plan for this CUDA device instead of the CPU")
    device.add_argument(
        "--arch", type=int, metavar="N", help="plan for a CUDA device that need not be here: 90 is 9.0; with --sms"
    )
    add("--sms", "its multiprocessors", None)
    return parser


def _device(cuda: int | None, arch: int | None, sms: int | None) -> dict[str, Any] | None:
    """None: this CPU."""
    if (arch is None) != (sms is None):
        raise ValueError("sinkattn: --arch and --sms come together")
    if arch is not None:
        return {"backend": "cuda", "arch": arch, "workers": sms}
    return None if cuda is None else _C.query_cuda(cuda)


def main(arguments: list[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    try:
        wanted = options.pop("command")
        if wanted == "doctor":
            return doctor.main()
        if wanted is None:
            print(check())
            print("\n".join(doctor.self_tests()))
            return 0
        device = _device(options.pop("cuda"), options.pop("arch"), options.pop("sms"))
        op = options.pop("op")
        if options["q_len"] is None:
            options["q_len"] = 1 if op == "decode" else options["k_len"]
        chosen = plan(op, device, **options)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    chosen["compiled"] = "yes" if chosen["compiled"] else "no, this build was made without nvcc"
    chosen["reason"] = chosen["reason"].replace("; ", "\n" + " " * 17)
    print("\n".join(f"{name:15}  {value}" for name, value in chosen.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
