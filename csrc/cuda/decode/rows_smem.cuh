// SPDX-License-Identifier: Apache-2.0
//
// Sizes of the decode of many rows on sm_90, and what its roles share in a block's shared memory.
#pragma once

#include "cuda/decode/rows_finish.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/tile/pipe.cuh"

namespace sa::decode {
namespace many_rows {

using decode::kTileK;

constexpr int kRows = 64;                                  // of a stream: M of a wgmma
constexpr int kValueThreads = 256, kThreads = 512;         // two value warpgroups; the score warpgroup; the loader warp and three idle ones
constexpr int kFirstScoreThread = 256, kFirstLoader = 384; // of the block
constexpr int kRowHalf = kRows * kRowBytes;                // bytes of 64 columns of Q, and of a tile of weights

enum NamedBarrier : int {
    kScoreBarrier = 1,
    kPartBarrier,
    kValueBarrier,
    kHideBarrier
}; // kHideBarrier: one a value warpgroup; 0: the block

// A key tile of mma.sync's decode, 16 keys, is a step here; a stage of the ring holds kKeys keys. Teams are that kernel's: team t has every
// kTeams-th step of a part, with a pivot, a sum and an O of its own, so that a row's bits are the same.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kSteps_, int kStages_, int kWeightTiles_, bool kLatent_> struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kSteps = kSteps_, kStages = kStages_, kWeightTiles = kWeightTiles_;
    static constexpr bool kLatent = kLatent_; // values are columns of the keys' tiles
    static constexpr bool kSplitsP = std::is_same_v<Element, Bf16>;
    static constexpr int kHalves = kHeadDim / 64, kHalvesV = kHeadDimV / 64, kKeys = kSteps * kTileK, kKeyHalf = kKeys * kRowBytes;
    static constexpr int kTeams = kHeadDimV <= 128 ? 4 : kHeadDimV <= 256 ? 2 : 1;
    // A value warpgroup has all columns of half of the teams; of one team, half of the columns.
    static constexpr bool kSplitsColumns = kTeams == 1;
    static constexpr int kOwnTeams = kSplitsColumns ? 1 : kTeams / 2, kOwnSteps = kSplitsColumns ? kSteps : kSteps / 2;
    static constexpr int kColumns = kSplitsColumns ? kHeadDimV / 2 : kHeadDimV;
    static constexpr int kN = kColumns < 128 ? kColumns : 128; // of a wgmma; N = 256 would take all 128 registers of the block's threads
    // A slot holds the weights of a step: half of the columns of a tile of 64; 16, in bf16 the upper parts and the lower ones.
    static constexpr int kSlotBytes = 64, kTileSlots = kRowBytes / kSlotBytes, kSlots = kWeightTiles * kTileSlots;
    static constexpr int kKeyBytes = kHalves * kKeyHalf, kValueBytes = kLatent ? 0 : kHalvesV * kKeyHalf;
    static constexpr double kBusySms = 1.0; // of all, whose copies keep the memory busy
    static constexpr int kLoaderRegisters = 40, kScoreRegisters = 104, kValueRegisters = 184;

    // Of decode/finish.cuh and decode/merge.cuh, by the value warpgroups.
    struct Smem;
    using Arguments = many_rows::Arguments;
    static constexpr bool kExtras = true, kClusters = false, kNarrow = true;
    static constexpr int kThreads = kValueThreads, kStreamRows = kRows, kPartialRow = kHeadDimV + 8, kMergedQuads = 1;

    static __device__ __forceinline__ void sync() { bar_sync<kValueThreads>(kValueBarrier); }

    static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
    static_assert(kSteps % kTeams == 0, "step j of a stage is team j % kTeams's");
    static_assert(kOwnTeams == 1 || kOwnSteps == 2, "a step each");
    static_assert(kTeams == 1 || kSlots >= 4, "when a warpgroup waits for a slot, the slot's last use has been announced");
    static_assert(kRows * kPartialRow * 4 <= kStages * (kKeyBytes + kValueBytes), "the part's partial fits the ring");
    static_assert(kWeightTiles * kRowHalf >= scratch_bytes(kRows, kHeadDimV), "write_part's scratch fits the weights");
};

// The tiles of a block. At a part's end the ring, which comes first, holds the part's partial.
template <class C> struct Tiles {
    alignas(1024) unsigned char ring[C::kStages * (C::kKeyBytes + C::kValueBytes)];
    unsigned char queries[C::kHalves * kRowHalf], weights[C::kWeightTiles * kRowHalf];

    __device__ __forceinline__ unsigned char *keys(uint32_t stage) { return ring + stage * C::kKeyBytes; }
    __device__ __forceinline__ unsigned char *values(uint32_t stage) {
        return C::kLatent ? keys(stage) : ring + C::kStages * C::kKeyBytes + stage * C::kValueBytes;
    }
    __device__ __forceinline__ unsigned char *slot(uint32_t n) {
        return weights + n / C::kTileSlots * kRowHalf + n % C::kTileSlots * C::kSlotBytes;
    }
};

template <class Element, int kHeadDim, int kHeadDimV, int kSteps, int kStages, int kWeightTiles, bool kLatent>
struct Config<Element, kHeadDim, kHeadDimV, kSteps, kStages, kWeightTiles, kLatent>::Smem : Tiles<Config>, decode::PartSmem<512> {
    alignas(16) float alpha[kSlots][kRows]; // what a step's rows of O are multiplied by before its product
    bool moves[kSlots][4];                  // some alpha of the warp's rows is not 1
    float factor[kTeams][kRows];            // of a team's O in the part's
    float2 stats[kRows];                    // pivot and sum of the part
    decode::Row rows[kRows];
    float s_aux[kRows];
    // A latent's values have no barriers of their own: k_full, and k_empty with the value warpgroups' arrivals.
    Barriers<kStages> k_full, k_empty, v_full, v_empty;
    Barriers<kSlots> p_full, p_empty; // full: weights and alpha of a step are there
    bool is_last;
};

struct Maps {
    CUtensorMap k, v, host_k, host_v; // boxes of kTileK keys of one page
};

} // namespace many_rows
} // namespace sa::decode
