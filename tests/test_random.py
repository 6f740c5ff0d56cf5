# SPDX-License-Identifier: Apache-2.0
"""Random configurations from a fresh seed, which is printed: SINKATTN_SEED in the environment gives the same ones."""

from gpu_cases import gpu_case

from sinkattn._testing import Case, random_case, run_random


def test_random_configurations(seed: int) -> None:
    summary = run_random(seed, 2000, workers=2)
    assert not summary.failed, "\n".join(map(str, [f"seed {seed}", *summary.failed[:20]]))
    assert summary.counts["decode"] + summary.counts["forward and backward"] == 2000


def test_a_case_is_its_seed_and_its_id(seed: int) -> None:
    for index in range(200):
        case = random_case(f"{seed}/{index}")
        assert random_case(f"{seed}/{index}") == case == Case.parse(case.id)


def test_random_configurations_of_a_gpu_differ_and_have_sinks(seed: int) -> None:
    """So that SINKATTN_GPU_CASES=4200 is 4000 distinct ones with a sink, forward and backward."""
    cases = {gpu_case(f"{seed}-{index}") for index in range(4200)}
    assert len(cases) == 4200
    assert sum(case.s_aux != "none" for case in cases) > 4000
    assert not any(case.decode for case in cases)


def test_a_negative_scale_is_in_the_id() -> None:
    case = Case(scale=-0.1, s_aux="-1e4")
    assert (case.id, Case.parse(case.id)) == ("d64-auxminus1e4-scaleminus0.1-fp32", case)
    assert any((random_case(f"1/{index}").scale or 0) < 0 for index in range(100))
