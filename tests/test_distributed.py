# SPDX-License-Identifier: Apache-2.0
"""Attention of tokens that lie on several ranks, on four CPU processes, and what is refused."""

from collections.abc import Iterator

import distributed_cases
import pytest
import torch
import torch.distributed as dist
from distributed_cases import DTENSORS, Case, cases
from torch import Tensor

import sinkattn
from sinkattn.distributed import METHODS, Shards, context_parallel_attention, method_for

RANKS = 4


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return distributed_cases.outcomes(RANKS, tmp_path_factory.mktemp("ranks"), "gloo")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_ranks_agree_with_one_process(case: Case, outcomes: list[dict[str, str]]) -> None:
    for rank in case.members:
        assert not outcomes[rank][case.id], outcomes[rank][case.id]


@pytest.mark.parametrize("name", ["data-parallel", *DTENSORS])
def test_all_ranks_agree_with_one_process(name: str, outcomes: list[dict[str, str]]) -> None:
    for of_rank in outcomes:
        assert not of_rank[name], of_rank[name]


def test_messages_travel_while_a_rank_computes(outcomes: list[dict[str, str]]) -> None:
    for of_rank in outcomes[:2]:
        assert not of_rank["overlap"], of_rank["overlap"]


def test_the_ring_rounds_the_gradient_of_narrow_sinks_once(outcomes: list[dict[str, str]]) -> None:
    for of_rank in outcomes[:2]:
        assert not of_rank["narrow-sinks"], of_rank["narrow-sinks"]


def test_parts_of_the_keys() -> None:
    distributed_cases.check_parts_of_the_keys("cpu")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with distributed_cases.ranks("gloo", 0, 1, str(tmp_path_factory.mktemp("rank") / "meeting")):
        yield


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("method", METHODS)
def test_one_rank_gives_the_bits_of_one_process(method: str) -> None:
    case = Case("alone", method, Shards.contiguous((50,)), (9 if method == "halo" else -1, 0), members=(0,))
    x = distributed_cases.inputs_of(case, "cpu")
    assert dist.group.WORLD is not None
    expected, got = distributed_cases.alone(case, x), distributed_cases.together(case, x, dist.group.WORLD)
    for name in expected:
        if (method, name) == ("ring", "ds_aux"):  # summed in another order
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(got[name], expected[name]), name


def rows(tokens: int = 6, heads: int = 4, head_dim: int = 8) -> Tensor:
    return torch.zeros(1, tokens, heads, head_dim)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"method": "rings"}, ValueError, "method is 'rings'"),
        ({"method": "halo"}, NotImplementedError, r"window_size is \(-1, 0\); halo needs both sides"),
        ({"method": "ring", "window_size": (3, 0)}, NotImplementedError, r"window_size is \(3, 0\); ring has none"),
        ({"method": "ring", "num_sink_tokens": 2}, NotImplementedError, "num_sink_tokens is 2 with method \"ring\""),
        ({"q": torch.zeros(6, 4, 8)}, ValueError, r"q has shape \[6, 4, 8\]"),
        ({"k": rows(5), "v": rows(5)}, ValueError, r"k has shape \[1, 5, 4, 8\]"),
        ({"k": rows(heads=3), "v": rows(heads=3)}, ValueError, r"q, k, v have \[4, 3, 3\] heads"),
        ({"v": rows(heads=2)}, ValueError, r"q, k, v have \[4, 4, 2\] heads"),
        ({"v": rows().half()}, ValueError, "v are torch.float32 on cpu, torch.float32 on cpu, torch.float16 on cpu"),
        ({"s_aux": torch.zeros(2)}, ValueError, r"s_aux has shape \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "q has shape"),
        ({"shards": Shards.contiguous((3, 3))}, ValueError, "shards are of 2 ranks; the group has 1"),
        ({"shards": Shards.contiguous((5,))}, ValueError, "q has 6 tokens on rank 0; shards say 5"),
        ({"window_size": (-1, -3)}, ValueError, "window_size_right is -3"),
    ],
)  # fmt: skip
def test_refusals(changed: dict[str, object], error: type[Exception], said: str) -> None:
    arguments = {"q": rows(), "k": rows(), "v": rows(), "causal": "window_size" not in changed, **changed}
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(error, match=said):
        context_parallel_attention(q, k, v, **arguments)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_offsets_of_another_dtype_are_refused() -> None:
    packed = rows()[0]
    with pytest.raises(ValueError, match=r"cu_seqlens is torch.int64 \[2\]; it must be int32"):
        context_parallel_attention(packed, packed, packed, cu_seqlens=torch.tensor([0, 6]))


def test_heads_that_do_not_divide_take_the_ring() -> None:
    assert method_for(64, 8, 8, (127, 0)) == "halo"
    assert [method_for(64, 8, ranks, (-1, 0)) for ranks in (2, 8, 16, 12)] == ["ulysses", "ulysses", "ulysses", "ring"]
    assert method_for(64, 8, 2, (127, 0), num_sink_tokens=4) == "ulysses"


@pytest.mark.parametrize("ranges", [(((0, 3),), ((4, 6),)), (((0, 3),), ((2, 6),)), (((3, 6), (0, 3)),), (((0, 0),),)])
def test_shards_hold_each_token_once(ranges: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    with pytest.raises(ValueError, match="sinkattn: shards"):
        Shards(ranges)


@pytest.mark.parametrize("shards", [Shards.zigzag(23, 3), Shards.contiguous((4, 0, 9)), Shards.zigzag(3, 4)])
def test_shards_take_apart_and_join(shards: Shards) -> None:
    whole = torch.arange(shards.total)[None]
    parts = [shards.take(whole, rank, 1) for rank in range(len(shards.ranges))]
    assert [part.shape[1] for part in parts] == list(shards.lengths)
    assert torch.equal(shards.join(parts, 1), whole)


def test_zigzag_costs_every_rank_the_same() -> None:
    shards = Shards.zigzag(800, 4)
    pairs = [sum(sinkattn.visible_pairs(e - b, e, (-1, 0)) for b, e in held) for held in shards.ranges]
    assert max(pairs) - min(pairs) <= 800
