# SPDX-License-Identifier: Apache-2.0
"""The studies of decoding: what they count and conclude, drawn without a GPU, and measured where one is."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import needs_gpus

import sinkattn
from benchmarks import decode_crossover, harness, launches, long, paged, planner, simulate, tiers, trace, traffic
from benchmarks.__main__ import main


def crossover_rows() -> list[decode_crossover.CrossoverRow]:
    """At 512 keys unsplit is as fast from the start, at 1024 from 8 sequences on, at 2048 never."""
    slow = {512: (1.0, 1.01, 1.0, 1.0), 1024: (3.0, 1.0, 1.5, 1.01), 2048: (9.0, 5.0, 3.0, 1.1)}
    return [
        decode_crossover.CrossoverRow(decode_crossover.SUITE, batch, length, impl, splits, 10 * times, "abc", "2.0")
        for length, all_times in slow.items()
        for batch, ratio in zip((1, 2, 4, 8), all_times, strict=True)
        for impl, splits, times in (("unsplit", 1, ratio), ("closed", 4, 1.2), ("passes", -4, 1.5), ("found", 0, 1.0))
    ]


def test_the_batch_from_which_splitting_stops_paying() -> None:
    rows = crossover_rows()
    assert [decode_crossover.crossover(rows, length) for length in (512, 1024, 2048)] == [1, 8, None]
    shown = {str(column.header): list(column.cells) for column in decode_crossover.table(rows, 132).columns}
    assert shown["unsplit as fast"] == ["b1", "b8", "-"]
    assert shown["b2, P 8"] == ["10.0 1.01 1.20 1.50", "10.0 1.00 1.20 1.50", "10.0 5.00 1.20 1.50"]


def test_closed_forms_are_the_planner_s() -> None:
    device = {"backend": "cuda", "arch": 90, "workers": 132}
    sizes = {"dtype": "bf16", "num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "q_len": 1, "k_len": 65536}
    for batch in (1, 3, 16, 17, 64):
        reason = sinkattn.plan("decode", device, batch=batch, window_size_right=0, **sizes)["reason"]
        b_star, parts = re.search(r"B\* = (\d+), P = (\d+)", reason).groups()  # type: ignore[union-attr]
        assert (int(b_star), max(1, int(parts))) == (
            decode_crossover.fill_batch(132),
            decode_crossover.fill_parts(batch, 132),
        )
    for batch, k_len, num_q_heads, told in (
        (1, 8192, 64, "sqrt(512 / 0.56)) = 16"),  # P, where a partial of eight rows is 0.56 of a tile of 16 keys
        (1, 1024, 64, "sqrt(64 / 0.56)) = 10"),
        (1, 1024, 8, "sqrt(64 / 0.07)) = 16"),
        (17, 8192, 64, "sqrt(512 / 0.56)) = 1"),
    ):
        sizes |= {"k_len": k_len, "num_q_heads": num_q_heads}
        reason = sinkattn.plan("decode", device, batch=batch, window_size_right=0, **sizes)["reason"]
        assert f", P* = min(P, {told}" in reason, reason


def test_crossover_cells_fit_the_memory() -> None:
    found = decode_crossover.cells()
    assert (1, 65536) in found
    assert (256, 4096) in found
    assert (256, 8192) not in found
    assert all(length % 64 == 0 for _, length in found)


def test_a_server_s_trace() -> None:
    steps = trace.lengths_of(300)
    assert steps == trace.lengths_of(300)
    assert all(len(lengths) == trace.SLOTS and max(lengths) <= trace.CAPACITY for lengths in steps)
    starts = [b for a, b in ((x[slot], y[slot]) for x, y in itertools.pairwise(steps) for slot in range(64))
              if b and b != a + 1]  # fmt: skip
    share = sum(n <= trace.PROMPTS["short"][1] for n in starts) / len(starts)
    assert 0.5 < share < 0.9
    busy = [sum(n > 0 for n in lengths) for lengths in steps]
    assert max(busy) > 2 * min(busy) > 0


def test_a_server_s_policies() -> None:
    assert [trace.choose(n, 132) for n in (0, 1, 2, 3, 8, 16, 60)] == [16, 16, 8, 4, 2, 1, 1]
    times = {n: [float(n + step) for step in range(101)] for n in (0, *trace.SPLITS)}
    rows = trace.summarise(times, [[5, *[0] * 63]] * 50 + [[5] * 64] * 51, 132, "abc")
    found = {row.impl: row for row in rows}
    assert next(iter(found)) == "unsplit"
    assert found["unsplit"].mean_us == 51
    assert found["split-8"].p99_us == 107
    assert found["by-lengths"].percentiles[trace.PERCENTILES.index(100)] == 100
    assert found["by-batch"].mean_us == pytest.approx((50 * 16 + 51 * 1 + sum(range(101))) / 101, rel=1e-3)
    assert "split-32" in [str(x) for x in trace.table(rows).columns[0].cells]


def tier_rows() -> list[tiers.TierRow]:
    return [
        tiers.TierRow(tiers.SUITE, "b1-131k", pages, 2048, impl, num_splits, us, 60.0, "abc", "2.0")
        for pages in (0, 16, 1024)
        for impl, num_splits, us in (("found", 0, 120.0), ("resident", 66, 75.0))
    ]


def test_two_tiers_are_bound_by_the_slower() -> None:
    case = tiers.CASES[0]
    assert case.cache_bytes == 2048 * tiers.PAGE_BYTES
    assert tiers.bound_us(case, 0, (4000.0, 50.0)) == pytest.approx(67.1, abs=0.1)
    assert tiers.bound_us(case, 1024, (4000.0, 50.0)) == pytest.approx(80 * 67.1 / 2, rel=1e-2)
    shown = {str(column.header): list(column.cells) for column in tiers.table(tier_rows()).columns}
    assert shown["pages of the host"][1] == "16 of 2048"
    assert (shown["found"][1], shown["resident"][1]) == ("120.0, 2.00", "75.0, 1.25")


def test_studies_of_decoding_are_drawn_without_a_gpu(tmp_path: Path) -> None:
    machine, folder = {"gpu": "NVIDIA H200", "sms": 132}, tmp_path / "nvidia-h200"
    rows = crossover_rows()
    times = {n: [10.0 + n] * 20 for n in (0, *trace.SPLITS)}
    steps = trace.summarise(times, [[5] * 64] * 20, 132, "abc")
    for suite, kind, some in (
        (decode_crossover.SUITE, decode_crossover.CrossoverRow, rows),
        (trace.SUITE, trace.TraceRow, steps),
        (long.SUITE, long.LongRow, long_rows()),
        (tiers.SUITE, tiers.TierRow, tier_rows()),
    ):
        harness.save(folder / f"{suite}.json", some, machine)
        assert harness.load(folder / f"{suite}.json", kind) == (machine, some)
    main(["plot", "--results", str(tmp_path), "--output", str(tmp_path)])
    for suite in (decode_crossover.SUITE, trace.SUITE, long.SUITE, tiers.SUITE):
        assert b"</svg>" in (tmp_path / f"{suite}-nvidia-h200.svg").read_bytes()


def long_rows() -> list[long.LongRow]:
    """Of 1 to 16 parts, whose times are 1000 / parts and as much as 10 for each, and two passes 5 longer."""

    def row(impl: str, num_splits: int, us: float, reduce_us: float | None = None) -> long.LongRow:
        return long.LongRow(long.SUITE, 64, impl, num_splits, us, 1e3 / us, 20 / us, reduce_us, None, "abc", "2.0")

    rows = [row("read", 0, 20.0), row("one launch", 0, 25.0)]
    for n in (1, 4, 16):
        rows += [row("one launch", n, 1000 / n + 10 * n), row("model", n, 1000 / n + 1, 1.0)]
    return rows + [row("two passes", -n, 1005 / n + 10 * n, 6.5) for n in (4, 16)]


def test_a_long_sequence_s_best_parts() -> None:
    rows = long_rows()
    assert [long.best(rows, impl) for impl in ("one launch", "two passes", "model")] == [16, 16, 16]
    shown = {str(column.header): list(column.cells) for column in long.table(rows).columns}
    assert shown["parts"] == ["by lengths", "1", "4", "16"]
    assert shown["of read"] == ["0.800", "0.020", "0.069", "0.090"]
    assert shown["second pass, ncu"] == ["-", "-", "6.5", "6.5"]
    assert shown["DRAM GB/s, ncu"] == ["-"] * 4


def test_the_model_of_a_long_sequence() -> None:
    keys, head_bytes = 1 << 20, 256 << 20
    alone = long.model_us(1, keys, 132, 4400.0, 28.0)
    assert alone == (pytest.approx(head_bytes / 28e3), 0.0)  # a block's rate
    full, reduce = long.model_us(33, keys, 132, 4400.0, 28.0)
    assert full == pytest.approx(8 * head_bytes / 4400e3 + reduce)  # the machine's
    assert reduce == pytest.approx(33 * 8 * 72 * 4 / 28e3)
    assert min(long.PARTS, key=lambda n: long.model_us(n, keys, 132, 4400.0, 28.0)) == 33
    one_wave, two_waves = (long.model_us(n, keys, 132, 1e9, 28.0)[0] for n in (66, 67))
    assert two_waves > 1.5 * one_wave  # 67 * 8 blocks are more than 4 on each of 132


def planned() -> simulate.Machine:
    """10 multiprocessors, on each one block of 10 bytes a us; 60 a us in all."""
    return simulate.Machine("small", 10, (0.06, 0.01), 0.01, 1.0, 0.5, blocks_an_sm=1)


def test_simulated_blocks_share_a_memory() -> None:
    heads = simulate.Heads(1, 1, 1)  # a key is 4 bytes, a partial 36
    machine = planned()
    assert simulate.read_us(machine, heads, [[(0, 100.0)]]) == pytest.approx(10)  # one block's rate
    assert simulate.read_us(machine, heads, [[(0, 100.0)]] * 6) == pytest.approx(10)  # six of them are the memory's
    assert simulate.read_us(machine, heads, [[(0, 100.0)]] * 10) == pytest.approx(1000 / 60)
    assert simulate.read_us(machine, heads, [[(0, 100.0)]] * 11) == pytest.approx(1000 / 60 + 10)  # ten slots
    assert simulate.read_us(machine, heads, [[(0, 60.0)]] * 9 + [[(0, 120.0)]]) == pytest.approx(10 + 6)
    assert simulate.read_us(machine, heads, [[(1, 100.0), (0, 100.0)]]) == pytest.approx(20)  # one memory, then another
    assert simulate.read_us(machine, heads, [[(1, 100.0)]] * 2 + [[(0, 100.0)]]) == pytest.approx(20)
    assert simulate.read_us(machine, heads, [[(0, 0.0)], []]) == 0
    assert simulate.call_us(machine, heads, [[[(0, 100.0)]]]) == pytest.approx(11)
    split = simulate.call_us(machine, heads, [simulate.equal_parts(heads, 50, 2)])
    assert split == pytest.approx(1 + 10 + 0.5 + 2 * 3.6)
    assert simulate.closed_us(machine, heads, 1, 50, 2) == pytest.approx(split)


def test_simulated_parts_hold_every_key() -> None:
    heads, machine = simulate.GPT_OSS, simulate.h200()
    for weight in (1.0, 8.0):
        (parts,) = simulate.two_tiers(heads, 1000, 0.25, 7, weight)
        of = [sum(size for part in parts for memory, size in part if memory == m) for m in (0, 1)]
        assert of == [pytest.approx(n * heads.key_bytes) for n in (750, 250)]
        weights = [sum(size * (weight if memory else 1) for memory, size in part) for part in parts]
        assert weights == [pytest.approx(weights[0])] * 7
    lengths = [40_000, 0, 100, 3_000]
    cut = simulate.cut_by_length(machine, heads, lengths)
    assert [sum(size for part in parts for _, size in part) // heads.key_bytes for parts in cut] == [40_000, 100, 3_000]
    assert max(size for parts in cut for part in parts for _, size in part) == 1312 * heads.key_bytes  # 43100 / 33


def test_a_reader_s_own_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["planner", "--sms", "1000", "--gbps", "33500", "4000", "--keys", "131072", "--num-kv-heads", "4"])
    told = capsys.readouterr().out
    assert re.search(r"B\*\s+250\b", told)
    assert re.search(r"\bP\s+250\b", told)
    assert re.search(r"sqrt\(t / r\)\s+85\.3\b", told)  # 16 rows a kv head: a partial twice as long
    assert "11.1 %" in told
    assert "wrote" not in told
    with pytest.raises(SystemExit, match="every number must be above 0"):
        main(["planner", "--sms", "0"])
    with pytest.raises(SystemExit, match="one or two numbers above 0"):
        main(["planner", "--gbps", "1", "2", "3"])


def test_kept_plans_are_those_of_the_simulation(tmp_path: Path) -> None:
    """And the simulated H200 is near the measured one."""
    facts, kept = harness.load(harness.results_path("planner", "simulated"), planner.PlannerRow)
    assert kept == planner.rows(), "python -m benchmarks planner"
    us = {(row.keys, row.parts, row.impl): row.us for row in kept if row.machine == "H200"}
    both = [(t, us[keys, parts, "simulated"]) for (keys, parts, impl), t in us.items() if impl == "measured"]
    assert len(both) > 10
    assert all(abs(simulated / measured - 1) < 0.1 for measured, simulated in both)
    assert simulate.utilisation(136, 132) == 136 / 264
    assert planner.best(kept, "1000 SMs", 1 << 17, "simulated") == 125
    planner.plot(tmp_path / "planner.svg", facts, kept)
    assert b"</svg>" in (tmp_path / "planner.svg").read_bytes()


def test_the_branch_of_the_merge_s_cost_is_not_reached() -> None:
    """By requests of the traffic, however long; nor is a cap by the number of key tiles, by anybody."""
    machine, heads = simulate.h200(), simulate.GPT_OSS
    assert traffic.branch(machine, heads, 17, 1 << 20) == ("one part", 1)
    assert traffic.branch(machine, heads, 16, 1 << 20) == ("P parts", 1)
    assert traffic.branch(machine, heads, 1, 2303) == ("P* parts", 15)
    assert traffic.branch(machine, heads, 1, 2304) == ("P parts", 16)
    assert [traffic.fewest_keys(machine, heads, n) for n in (1, 2)] == [2304, 576]
    assert traffic.ABOVE["long"][0] > 2304
    assert all(machine.worth_parts(heads, 16 * tiles) < tiles for tiles in range(2, 5000))


def test_long_requests_wait_for_each_other() -> None:
    """A step takes 1 us, and more where long ones take part."""
    machine = simulate.Machine("small", 8, (1.0, 1.0), 1.0, 1.0, 0.0)

    def cut(lengths: Sequence[int]) -> list[list[list[simulate.Piece]]]:
        return [[[(0, 9000.0 if n > 1000 else 0.0)]] for n in lengths]

    def waiting() -> list[traffic.Request]:
        return [traffic.Request(n, 4, 0.0, n > 1000) for n in (10, 70_000, 70_000)]

    heads = simulate.Heads(8, 8, 64)
    together = traffic.serve(machine, heads, waiting(), cut, 1)
    step = together["short"][0]
    assert together == {"short": [step] * 4, "long": [step] * 8}
    apart = traffic.serve(machine, heads, waiting(), cut, 2)
    assert apart["short"] == pytest.approx([step, 1, step, 1])
    assert apart["long"] == pytest.approx([step] * 2 + [1 + step] * 4 + [step] * 2)


def test_simulated_traffic_is_kept(tmp_path: Path) -> None:
    """The kept rows are in the ways' order, and over the measured steps near what was measured."""
    facts, kept = harness.load(harness.results_path(traffic.SUITE, "simulated"), traffic.TrafficRow)
    both = [(row.mean_us, row.measured_us) for row in kept if row.measured_us]
    assert len(both) == 4
    assert all(0.8 < simulated / measured < 1.05 for simulated, measured in both)
    main(["traffic", "--steps", "12", "--requests", "0", "--json", str(tmp_path / "rows.json")])
    _, few = harness.load(tmp_path / "rows.json", traffic.TrafficRow)
    assert [(row.traffic, row.way, row.count) for row in few] == [
        (row.traffic, row.way, 12) for row in kept if row.what == "step"
    ]
    mean = {(row.traffic, row.way): row.mean_us for row in few}
    assert mean["above 64K", "three branches"] >= mean["above 64K", "by lengths"] > mean["trace", "by lengths"]
    traffic.plot(tmp_path / "traffic.svg", facts, kept)
    assert b"</svg>" in (tmp_path / "traffic.svg").read_bytes()


def test_ten_million_keys_from_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 pages stands in the table 2442 times: out as of its keys once, the LSE larger by log(2442)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    times, keys = 2442, 64 * paged.PAGE_SIZE
    many = paged.Paged.of(times * keys, pages=64)
    assert times * keys > 10_000_000
    assert many.block_table[0].bincount().tolist() == [times] * 64
    out, lse = many.decode()
    once = replace(many, block_table=torch.arange(64).int()[None], keys=keys, s_aux=many.s_aux - math.log(times))
    want, want_lse = once.exact()
    assert torch.nn.functional.cosine_similarity(out.double().flatten(), want.flatten(), 0) > 0.99999
    torch.testing.assert_close(lse[0, :, 0].double(), want_lse + math.log(times), rtol=0, atol=1e-5)


def test_paged_keys_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "rows.json"
    main(["paged", "--quick", "--json", str(path), "--commit", "none"])
    _, (row,) = harness.load(path, paged.PagedRow)
    assert (row.keys, row.commit) == (paged.QUICK_KEYS, "none")
    assert row.ms * row.gbps == pytest.approx(2 * 2 * 64 * 100_032 / 1e6, rel=1e-3)
    monkeypatch.setattr(paged.studies, "free_bytes", lambda: 1 << 30)
    with pytest.raises(SystemExit, match="10000000 keys need 3 GiB, 1 are free"):
        main(["paged"])


@pytest.mark.parametrize("study", ["decode-crossover", "trace", "launches", "stack", "long", "tiers"])
def test_studies_of_decoding_need_a_gpu(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"benchmarks {study} needs a CUDA device"):
        main([study])


@needs_gpus()
def test_studies_of_decoding_measure(tmp_path: Path) -> None:
    path, options = tmp_path / "rows.json", ["--json", str(tmp_path / "rows.json"), "--commit", "none"]
    main(["decode-crossover", "--batches", "1", "4", "--lengths", "512", "2048", *options])
    _, crossed = harness.load(path, decode_crossover.CrossoverRow)
    assert len(crossed) == 16
    assert all(row.us > 0 for row in crossed)
    main(["trace", "--steps", "20", "--layers", "1", *options])
    _, traced = harness.load(path, trace.TraceRow)
    assert [row.impl for row in traced][-2:] == ["by-batch", "by-lengths"]
    main(["long", "--keys", "8192", "--parts", "4", "16", *options])
    _, timed = harness.load(path, long.LongRow)
    assert [row.num_splits for row in timed if row.impl != "model"] == [0, 0, 1, 4, 16, -4, -16]
    main(["tiers", "--cases", "b1-131k", "--shares", "0", "0.01", *options])
    _, tiered = harness.load(path, tiers.TierRow)
    assert {(row.host_pages, row.impl) for row in tiered} == {(n, impl) for n in (0, 20) for impl in tiers.IMPLS}
    main(["launches", "--quick", *options])
    _, launched = harness.load(path, launches.LaunchRow)
    found = {(row.case, row.call): row for row in launched}
    for case in launches.CASES:
        out = found[case.id, "flash_decode_out"]
        assert (out.kernels, out.copies, out.syncs, out.allocations) == (1, 0, 0, 0)
        both = found[case.id, "flash_attn_with_kvcache, k and v"]
        assert (both.kernels, both.copies, both.syncs) == (2, 0, 0)
        assert found[case.id, "graph of append and decode"].kernels == 2
