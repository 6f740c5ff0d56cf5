// SPDX-License-Identifier: Apache-2.0
//
// Sizes of the decode with swapped operands on sm_90, and what its roles share in a block's shared memory.
#pragma once

#include "cuda/decode/rows_finish.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/tile/pipe.cuh"

namespace sa::decode {
namespace swapped {

constexpr int kThreads = 384, kFirstLoader = 256; // of the block: two warpgroups of teams, one of loaders

enum NamedBarrier : int { kTeamsBarrier = 1, kTeamBarrier }; // kTeamBarrier: one a team; 0: the block

// kRows: of a stream, N of the products. kBlocks: of 64 keys, M of Q's product, a stage. kTeams: warpgroups, each with every kTeams-th
// stage of a part, a pivot, a sum and an O of its own. kSlots: of the ring, each the keys or the values of a stage.
template <class Element_, int kHeadDim_, int kRows_, int kBlocks_, int kTeams_, int kSlots_, bool kByThreads_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim, kRows = kRows_, kBlocks = kBlocks_, kTeams = kTeams_, kSlots = kSlots_,
                         kStages = kSlots;
    static constexpr bool kByThreads = kByThreads_; // threads copy K and V, where page_size is no multiple of 16; else TMA
    static constexpr bool kSplitsP = std::is_same_v<Element, Bf16>;
    static constexpr int kHalves = kHeadDim / 64, kKeys = 64 * kBlocks, kSteps = 4 * kBlocks;
    static constexpr int kKeyHalf = kKeys * kRowBytes, kQueryHalf = kRows * kRowBytes, kSlotBytes = kHalves * kKeyHalf;
    static constexpr int kKeyBytes = kSlotBytes, kValueBytes = kSlotBytes;
    static constexpr int kPartBytes = kBlocks * kQueryHalf; // of weights, their upper parts or their lower ones
    static constexpr int kWeightBytes = (kSplitsP ? 2 : 1) * kPartBytes;
    static constexpr int kOwn = kRows / 4;                           // rows that a thread has in an accumulator
    static constexpr double kBusySms = kHeadDim == 512 ? 0.75 : 1.0; // of all, whose copies keep the memory busy
    static constexpr int kTeamRegisters = kTeams == 2 ? 208 : 240, kLoaderRegisters = 88;

    // Of decode/finish.cuh and decode/merge.cuh, by the teams.
    struct Smem;
    using Arguments = many_rows::Arguments;
    static constexpr bool kExtras = true, kClusters = false, kNarrow = true;
    static constexpr int kThreads = 128 * kTeams, kStreamRows = kRows, kPartialRow = kHeadDimV + 8, kMergedQuads = 4;

    static __device__ __forceinline__ void sync() { bar_sync<kThreads>(kTeamsBarrier); }

    static_assert(kSlots % (2 * kTeams) == 0 || kTeams == 1, "a team waits for every use of a slot, so never for a phase beyond the next");
    static_assert(kRows * kPartialRow * 4 <= kSlots * kSlotBytes, "the part's partial fits the ring");
    static_assert(kHalves * kQueryHalf >= many_rows::scratch_bytes(kRows, kHeadDimV), "write_part's scratch fits the queries");
};

// The tiles of a block. At a part's end the ring, which comes first, holds the part's partial.
template <class C> struct Tiles {
    alignas(1024) unsigned char ring[C::kSlots][C::kSlotBytes];
    unsigned char queries[C::kHalves * C::kQueryHalf], weights[C::kTeams][C::kWeightBytes];
};

template <class Element, int kHeadDim, int kRows, int kBlocks, int kTeams, int kSlots, bool kByThreads>
struct Config<Element, kHeadDim, kRows, kBlocks, kTeams, kSlots, kByThreads>::Smem : Tiles<Config>, decode::PartSmem<384> {
    decode::Row rows[kRows];
    float s_aux[kRows], tops[kTeams][4][kRows]; // tops: a warp's maxima, and in the end its sums
    float pivots[kTeams][kRows];
    float2 stats[kRows]; // pivot and sum of the part
    Barriers<kSlots> full, empty;
    bool is_last;
};

// The slots of a block's n-th stage.
template <class C> __device__ __forceinline__ Ring<C::kSlots> keys_of(uint32_t n) { return {2 * n}; }
template <class C> __device__ __forceinline__ Ring<C::kSlots> values_of(uint32_t n) { return {2 * n + 1}; }

} // namespace swapped
} // namespace sa::decode
