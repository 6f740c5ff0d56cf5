// SPDX-License-Identifier: Apache-2.0
//
// The wide windowed forward's shapes, and what its roles share: a block's shared memory, its spans, the tensor maps.
#pragma once

#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/items.cuh"

namespace sa::fwd_wide_window_sm90 {

enum NamedBarrier : int { kMathBarrier = 1 }; // of the first math warpgroup, the next ones follow; 0 is __syncthreads
constexpr int kWarpgroups = 3, kMathThreads = 128 * kWarpgroups, kThreads = kMathThreads + 128;
constexpr int kMathRegisters = 160, kLoaderRegisters = 32;
constexpr int kTileRows = 64, kStepKeys = 16, kStepBytes = kStepKeys * kRowBytes; // a step: of 64 columns, so many bytes
constexpr int kSpans = 2;                                                         // described spans
static_assert(kLoaderRegisters + kWarpgroups * kMathRegisters <= 512, "registers of a multiprocessor, for each of 128 threads");

// kTileK: keys of a tile; kRegionK: of a key tile of the general forward; kRing: steps of K and V; kQueries: tiles of Q; kSinkSteps: one
// for positional sink tokens, or none.
template <int kHeadDim_, int kHeadDimV_, int kTileK, int kRegionK, int kRing_, int kQueries_, int kSinkSteps_> struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kSteps = kTileK / kStepKeys, kRegionSteps = kRegionK / kStepKeys,
                         kRing = kRing_, kQueries = kQueries_, kSinkSteps = kSinkSteps_;
};

template <class Element_, class Shape> struct Config : Shape {
    using Element = Element_;
    using Shape::kHeadDim, Shape::kHeadDimV, Shape::kSteps, Shape::kRegionSteps, Shape::kRing, Shape::kQueries, Shape::kSinkSteps;
    static constexpr int kHalves = kHeadDim / 64, kHalvesV = kHeadDimV / 64; // pieces of 64 columns of a row
    // Parts of the products: the first has all of the first region.
    static constexpr int kFirstSteps = kRegionSteps, kSecondSteps = kSteps - kFirstSteps;
    static constexpr int kMirror = kRegionSteps - 1; // the ring's first steps of K lie behind its last ones again
    static constexpr int kKeyHalf = (kRing + kMirror) * kStepBytes, kValueHalf = kRing * kStepBytes, kQueryHalf = kTileRows * kRowBytes;
    static_assert(
            kSecondSteps > 0 && kSecondSteps <= kRegionSteps, "a product of Q and K is one operand; a tile meets three key tiles at most");
    static_assert(kFirstSteps * kStepKeys >= kStepKeys - 1 + kTileRows, "all rows' windows begin in the first part");
    static constexpr bool kStaged = kQueries > kWarpgroups; // out leaves through the tile of Q, while the next one arrives in the other
    static_assert(kQueries % kWarpgroups == 0, "a warpgroup waits for every use of a stage of Q, so never for a phase beyond the next");
    static_assert(kRing >= kSteps, "a tile's steps lie in the ring");
};

struct Problem {
    sa_band window;       // of a sequence so long that nothing is clamped
    unsigned num_tiles;   // of a kv head; in a packed batch, the most there may be
    unsigned num_items;   // tiles of all kv heads
    unsigned batch_tiles; // tiles of a batch entry; 0: packed
    int group, tokens;    // q heads of a kv head, tokens of a tile
    int group_inverse;    // 2^16 / group, rounded up: row / group is row * group_inverse >> 16
    int last_key;         // the last key of a row's window, counted from its first
    int num_sinks;        // positional sink tokens
    float scale_log2;
};

// The step, counted from key 0, of a tile whose first token's window begins at this key.
__device__ __forceinline__ int step_of(int first_key) { return max(first_key, 0) / kStepKeys; }

// Neighbouring tiles of one sequence and kv head.
struct Span {
    sa_sequence sequence;
    int64_t kv_head, out, lse;            // out, lse: offsets of the first token and head
    sa_position_t first_token, first_key; // first_key: of the first token's window, which may begin before key 0
    int num_tiles, num_tokens;            // num_tokens: of the sequence, from first_token on
    uint32_t first_use, end_use;          // of the ring, by the span's steps
    uint32_t key_use;                     // the use, often before the first, that would hold key 0
    uint32_t first_tile;                  // of all tiles of the block
    uint32_t number;                      // of the block's spans before it
    bool exists, has_sink, has_sink_step; // has_sink_step: the sequence's first step is there, for tiles that begin behind it
};

struct PlannedSpan : Span {
    float s_aux[kTileRows]; // of the heads of the GQA group, -inf for none
};

// A row of a tile: its token, kNoToken past the whole tokens, and q head; lse: offset in lse from the tile's first row.
struct Row {
    int token, head;
    int64_t lse;
};
constexpr int kNoToken = 1 << 30;

// K and V of the first step of a span's sequence.
template <class C, bool kExists = (C::kSinkSteps > 0)> struct SinkStep {};
template <class C> struct SinkStep<C, true> {
    alignas(1024) unsigned char sink_keys[C::kHalves * kStepBytes], sink_values[C::kHalvesV * kStepBytes];
};

template <class C> struct Smem : SinkStep<C> {
    alignas(1024) unsigned char queries[C::kQueries][C::kHalves * C::kQueryHalf];
    alignas(1024) unsigned char keys[C::kHalves * C::kKeyHalf], values[C::kHalvesV * C::kValueHalf];
    PlannedSpan spans[kSpans];
    Row rows[kTileRows];
    Barriers<kSpans> planned, span_empty;
    Barriers<C::kRing> full, ready, empty; // steps; ready: V is checked, and s_aux of the span is written
    Barriers<C::kQueries> q_full, q_empty;
    bool nonfinite[C::kRing + C::kSinkSteps]; // V held values that are not finite, which are zeros now; last, of the sink step
};

struct Maps {
    CUtensorMap q, k, v, out;
};

} // namespace sa::fwd_wide_window_sm90
