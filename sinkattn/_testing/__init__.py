# SPDX-License-Identifier: Apache-2.0
"""Cases, an explicit fp64 evaluation with its backward, and the tolerance that results are held to.

`python -m sinkattn._testing --cases 100000 --seed 1` runs random configurations on the CPU, `--case ID` runs one again.
"""

from .cases import DTYPES, EDGES, HEAD_DIMS, RATIOS, UNBOUNDED, Case, random_case
from .evaluation import (
    Finding,
    Inputs,
    compare,
    compare_all,
    compare_ds_aux,
    compare_lse,
    evaluate,
    make_inputs,
    restride,
)
from .joins import random_join
from .runner import (
    LEVEL_VARIABLE,
    LEVELS,
    Outcome,
    Summary,
    assert_right,
    assert_right_at,
    at_level,
    available_levels,
    check,
    check_at,
    random_outcome,
    run_ops,
    run_random,
)

__all__ = [
    "DTYPES",
    "EDGES",
    "HEAD_DIMS",
    "LEVELS",
    "LEVEL_VARIABLE",
    "RATIOS",
    "UNBOUNDED",
    "Case",
    "Finding",
    "Inputs",
    "Outcome",
    "Summary",
    "assert_right",
    "assert_right_at",
    "at_level",
    "available_levels",
    "check",
    "check_at",
    "compare",
    "compare_all",
    "compare_ds_aux",
    "compare_lse",
    "evaluate",
    "make_inputs",
    "random_case",
    "random_join",
    "random_outcome",
    "restride",
    "run_ops",
    "run_random",
]
