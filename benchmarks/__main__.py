# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks <study>: each study is a module with add_arguments(parser) and run(options)."""

import argparse
import sys

from . import (
    accuracy,
    cpu,
    crossover,
    decode,
    decode_crossover,
    distributed,
    generate,
    launches,
    long,
    packed,
    packed_cache,
    paged,
    planner,
    plot,
    prefill,
    scaling,
    serving,
    shapes,
    split_prefill,
    stack,
    tiers,
    trace,
    traffic,
)

STUDIES = {
    "cpu": cpu,
    "prefill": prefill,
    "shapes": shapes,
    "packed": packed,
    "packed-cache": packed_cache,
    "crossover": crossover,
    "split-prefill": split_prefill,
    "scaling": scaling,
    "accuracy": accuracy,
    "decode": decode,
    "decode-crossover": decode_crossover,
    "trace": trace,
    "traffic": traffic,
    "tiers": tiers,
    "launches": launches,
    "serving": serving,
    "stack": stack,
    "distributed": distributed,
    "long": long,
    "generate": generate,
    "paged": paged,
    "planner": planner,
    "plot": plot,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Speed against peers, measured in one run.")
    commands = parser.add_subparsers(dest="study", required=True)
    for name, study in STUDIES.items():
        description = (study.__doc__ or "").partition("\n")[0]
        # argparse formats help, and not a description
        study.add_arguments(commands.add_parser(name, help=description.replace("%", "%%"), description=description))
    options = parser.parse_args(arguments)
    STUDIES[options.study].run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
