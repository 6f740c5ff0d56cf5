# SPDX-License-Identifier: Apache-2.0
"""Random configurations on the CPU against fp64, from a printed seed; --case ID runs one again."""

import argparse
import json
import os
import random
import sys
import time

import torch

from .cases import Case
from .joins import random_join
from .runner import LEVEL_VARIABLE, available_levels, check_at, run_random


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sinkattn._testing", description=__doc__)
    parser.add_argument("--case", help="run the case of this id alone, at the level in SINKATTN_CPU_LEVEL")
    parser.add_argument("--cases", type=int, default=2000, help="random configurations to run")
    parser.add_argument(
        "--joins", type=int, help="run this many random merges and sinks that join, and no configuration"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
    parser.add_argument("--json", help="write the summary here")
    args = parser.parse_args(arguments)
    if args.case:
        outcome = check_at(Case.parse(args.case), os.environ.get(LEVEL_VARIABLE, available_levels()[-1]))
        for f in outcome.findings:
            print(f"{f.name:10} {f.ratio:8.3f} of what is allowed: {f.text}")
        return 1 if outcome.failures else 0
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    if args.joins:
        failures = [f for index in range(args.joins) for f in random_join(f"{seed}/{index}") if not f.ratio <= 1]
        print("\n".join(f"FAILED {f.name}: {f.text}" for f in failures))
        print(f"seed {seed}: {args.joins} joins, {len(failures)} failures")
        return 1 if failures else 0
    print(f"seed {seed}, {args.cases} cases, levels {' '.join(available_levels())}", flush=True)
    begun = time.monotonic()
    summary = run_random(seed, args.cases, args.workers)
    seconds = time.monotonic() - begun
    for name, (ratio, where) in sorted(summary.worst.items()):
        print(f"worst {name:14} {ratio:8.3f} of what is allowed, {where}")
    print(f"seed {seed}: {args.cases} cases, {len(summary.failed)} failed, {seconds:.0f} s")
    if args.json:
        from sinkattn import _C

        report = {
            "seed": seed, "cases": args.cases, "failed": [str(outcome) for outcome in summary.failed],
            "seconds": round(seconds), "workers": args.workers, "build": _C.build_info(), "torch": torch.__version__,
            "levels": available_levels(), "counts": dict(sorted(summary.counts.items())),
            "worst_error_over_allowed": {name: [round(r, 4), w] for name, (r, w) in sorted(summary.worst.items())},
        }  # fmt: skip
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
