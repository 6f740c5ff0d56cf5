# SPDX-License-Identifier: Apache-2.0
"""A decode on a machine that need not exist: blocks share the memories, and each takes in no more than one block can.

A block reads its pieces one after the other, at the rate of one block or, where more of them read a memory than it
serves at that rate, at an equal part of the memory's. Blocks begin in order, as slots are free. kv heads are alike and
share evenly, so one of them is simulated, with its part of the slots and of the memories. Nothing here is measured but
what a Machine was made from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, sqrt

from . import decode_crossover, harness, long
from .decode import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS

TILE = 16  # keys
STEP = 8  # tiles below which parts by length are not cut: 32 KiB of K and V
Piece = tuple[int, float]  # memory, bytes


@dataclass(frozen=True)
class Heads:
    """What a key weighs, in bf16, and a partial of it, in fp32: (O, pivot, sum) and padding for each row of a group."""

    num_q_heads: int = NUM_Q_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    head_dim: int = HEAD_DIM

    @property
    def key_bytes(self) -> int:
        """Of one kv head, K and V."""
        return 2 * 2 * self.head_dim

    @property
    def partial_bytes(self) -> int:
        return self.num_q_heads // self.num_kv_heads * (self.head_dim + 8) * 4


GPT_OSS = Heads()


@dataclass(frozen=True)
class Machine:
    """gbps: of each memory, the nearest first. begin_us pass before the first key, merge_us behind the last part."""

    name: str
    sms: int
    gbps: tuple[float, ...]
    block_gbps: float
    begin_us: float
    merge_us: float
    blocks_an_sm: int = long.BLOCKS_AN_SM

    def part_us(self, heads: Heads) -> float:
        """To add up one part more: its partial, read as fast as a block reads."""
        return heads.partial_bytes / self.block_gbps / 1e3

    def fill_batch(self, heads: Heads) -> int:
        """B*: sequences from which on one part each fills the machine."""
        return ceil(self.sms / heads.num_kv_heads)

    def fill_parts(self, heads: Heads, batch: int) -> int:
        """P: parts of each sequence that fill it below B*; 0 from there on."""
        return self.sms // (batch * heads.num_kv_heads)

    def worth_parts(self, heads: Heads, keys: int) -> float:
        """What P* caps P at: with more parts, one more costs more than it saves."""
        return sqrt(keys / TILE / (heads.partial_bytes / (TILE * heads.key_bytes)))

    def best_parts(self, heads: Heads, batch: int, keys: int) -> int:
        """P*."""
        return max(1, int(min(self.fill_parts(heads, batch), self.worth_parts(heads, keys))))


def h200() -> Machine:
    """One H200, from three kept times of decode-crossover and the rate at which its longest batch was read."""
    facts, rows = harness.load(
        harness.RESULTS / "nvidia-h200" / f"{decode_crossover.SUITE}.json", decode_crossover.CrossoverRow
    )
    us = {(row.batch, row.length, row.num_splits): row.us for row in rows if row.impl != "found"}
    tau = (us[1, 65536, 1] - us[1, 512, 1]) / (65536 - 512)
    begin = us[1, 512, 1] - 512 * tau
    merge = us[1, 4096, 16] - begin - 256 * tau
    found = max((row for row in rows if row.impl == "found"), key=lambda row: (row.length, row.batch))
    gbps = found.batch * found.length * GPT_OSS.num_kv_heads * GPT_OSS.key_bytes / found.us / 1e3
    block = GPT_OSS.key_bytes / tau / 1e3
    at = Machine("H200", int(str(facts["sms"])), (gbps,), block, begin, 0.0)
    return replace(at, merge_us=merge - 16 * at.part_us(GPT_OSS))


def utilisation(items: int, workers: int) -> float:
    """Of the workers' time, where items take equally long: of the last round some workers have none."""
    return items / (ceil(items / workers) * workers)


def closed_us(machine: Machine, heads: Heads, batch: int, keys: int, parts: int) -> float:
    """T(P) in closed form: one part's time or the memory's, whichever is longer, and the merge."""
    total = batch * keys * heads.num_kv_heads * heads.key_bytes
    one = keys / parts * heads.key_bytes / machine.block_gbps / 1e3
    merge = machine.merge_us + parts * machine.part_us(heads) if parts > 1 else 0.0
    return max(machine.begin_us + one, total / machine.gbps[0] / 1e3) + merge


def read_us(machine: Machine, heads: Heads, blocks: Iterable[Sequence[Piece]]) -> float:
    """When the last block of each kv head has read its pieces."""
    rates = [gbps * 1e3 / heads.num_kv_heads for gbps in machine.gbps]  # bytes a us
    block = machine.block_gbps * 1e3
    slots = max(1, machine.sms * machine.blocks_an_sm // heads.num_kv_heads)
    # All blocks that read a memory go on at the same rate, so a clock of bytes a memory tells when each ends.
    clocks, reading = [0.0] * len(rates), [list[tuple[float, int, Sequence[Piece]]]() for _ in rates]
    waiting, now, count = iter(blocks), 0.0, 0

    def begin(pieces: Sequence[Piece]) -> bool:
        nonlocal count
        for i, (memory, size) in enumerate(pieces):
            if size > 0:
                count += 1
                heapq.heappush(reading[memory], (clocks[memory] + size, count, pieces[i + 1 :]))
                return True
        return False

    def fill(free: int) -> None:
        while free and (pieces := next(waiting, None)) is not None:
            free -= begin(pieces)

    fill(slots)
    while any(reading):
        speeds = [min(block, rate / len(of)) if of else 0.0 for rate, of in zip(rates, reading, strict=True)]
        step, ended = min(
            ((of[0][0] - clock) / speed, i)
            for i, (of, clock, speed) in enumerate(zip(reading, clocks, speeds, strict=True))
            if of
        )
        now += step
        clocks = [clock + step * speed for clock, speed in zip(clocks, speeds, strict=True)]
        clocks[ended] = reading[ended][0][0]
        if not begin(heapq.heappop(reading[ended])[2]):
            fill(1)
    return now


def call_us(machine: Machine, heads: Heads, sequences: Iterable[Sequence[Sequence[Piece]]]) -> float:
    """A decode of sequences, each as the parts of one kv head; the longest merge comes at the end."""
    sequences = list(sequences)
    most = max((len(parts) for parts in sequences), default=1)
    merge = machine.merge_us + most * machine.part_us(heads) if most > 1 else 0.0
    return machine.begin_us + read_us(machine, heads, (part for parts in sequences for part in parts)) + merge


def equal_parts(heads: Heads, keys: int, parts: int) -> list[list[Piece]]:
    """Of one sequence in one memory."""
    return [[(0, keys / parts * heads.key_bytes)]] * parts


def part_keys(machine: Machine, heads: Heads, lengths: Sequence[int]) -> int:
    """Keys of a part where all sequences are cut into parts of one length, about two a multiprocessor."""
    tiles, streams = sum(-(-n // TILE) for n in lengths), sum(n > 0 for n in lengths)
    each_head = max(1, 2 * machine.sms // heads.num_kv_heads)
    fewest = max(1, machine.sms // heads.num_kv_heads // max(1, streams)) * streams
    return TILE * max(STEP, ceil(tiles / each_head), min(ceil(tiles / max(1, fewest)), 2 * STEP))


def cut_by_length(machine: Machine, heads: Heads, lengths: Sequence[int]) -> list[list[list[Piece]]]:
    """The parts of each sequence; the last of one is shorter."""
    length = part_keys(machine, heads, lengths)
    return [[[(0, min(length, n - at) * heads.key_bytes)] for at in range(0, n, length)] for n in lengths if n]


def two_tiers(heads: Heads, keys: int, share: float, parts: int, weight: float) -> list[list[list[Piece]]]:
    """One sequence whose first `share` lies in memory 1, in parts of equal weight, a far key counting as `weight` near
    ones: weight 1 makes equal parts, the memories' ratio parts in proportion to their bandwidth."""
    far = share * keys
    total = far * weight + keys - far

    def at(position: float) -> float:
        """The key at a position among the weights."""
        return position / weight if position < far * weight else position - far * weight + far

    ends = [at(total * i / parts) for i in range(parts + 1)]
    pieces: list[list[Piece]] = [
        [
            (1, max(0.0, min(end, far) - begin) * heads.key_bytes),
            (0, max(0.0, end - max(begin, far)) * heads.key_bytes),
        ]
        for begin, end in pairwise(ends)
    ]
    return [pieces]
