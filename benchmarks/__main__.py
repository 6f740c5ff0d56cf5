# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks <study>: each study is a module with add_arguments(parser) and run(options)."""

import argparse
import sys

from . import cpu, decode, generate, plot, prefill, serving, shapes

STUDIES = {
    "cpu": cpu,
    "prefill": prefill,
    "shapes": shapes,
    "decode": decode,
    "serving": serving,
    "generate": generate,
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
