// SPDX-License-Identifier: Apache-2.0
//
// The windowed backward's variants, shared memory and arguments.
#pragma once

#include <type_traits>

#include "cuda/bwd_window_sm90/walk.cuh"
#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/pipe.cuh"

namespace sa::bwd_window_sm90 {

constexpr int kWarpgroups = kSeenTiles, kWarps = 4 * kWarpgroups; // math warpgroups, one for each key tile that a row may see
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kPreparers = 96, kRowWarps = 2; // threads of warps 1 to 3; warps that prepare rows, a row a thread
constexpr int kStages = 4, kKeyStages = 4, kTileBytes = 64 * kRowBytes, kBlockBytes = 16 * kRowBytes; // a block: 16 keys of a tile
enum NamedBarrier : int { kRowBarrier = 1 }; // of the row warpgroup; 0 is __syncthreads
constexpr int kHeads = 64;                   // at most, in a GQA group
constexpr int kSinkKeys = SA_WINDOW_SINK_TOKENS;
constexpr int kNoToken = INT32_MAX / 2; // so far after every key that it sees none

template <class Element_, bool kSums_, bool kHide_, int kSinkTokens_> struct Config {
    using Element = Element_;
    static constexpr bool kSums = kSums_; // ds_aux is wanted
    static constexpr bool kHide = kHide_; // the second launch: values that are not finite are zeroed, and NaN put where a row sees them
    static constexpr int kSinkTokens = kSinkTokens_; // at most so many, in blocks of 8
    static constexpr int kParts =
            kWarps + (kSinkTokens ? 4 : 0); // of ds_aux a block and head: each math warp's and, with sink tokens, row warp's
};

// What a step needs for its pairs with sink tokens.
struct alignas(16) SinkStep {
    int position, num_keys; // of the tile's first position; sink tokens of the sequence
    int slot;               // of the tile's partial sums, in its kv head's; -1: the block has no such pairs in the step
    int first_key;          // coordinate of the sequence's first key, -1 where K and V of the sink tokens are loaded already
};

struct Smem {
    alignas(1024) unsigned char q[kStages][kTileBytes], dout[kStages][kTileBytes], out[kStages][kTileBytes]; // out, then dQ
    unsigned char k[kKeyStages][kTileBytes], v[kKeyStages][kTileBytes]; // key tile n in stage n % kKeyStages; v lies behind k
    unsigned char ds[2][kSeenTiles][kTileBytes];                        // of even and odd steps, the oldest key tile first
    float lse[kStages][kRows], g[kStages][kRows];                       // lse: natural as loaded, then in log2 units; g: dlse
    alignas(16) float2 bias[kStages][kRows];                            // g - delta, p_sink
    int token[kStages][kRows];                                          // position in the tile, kNoToken for a row that does not exist
    uint32_t bad_rows[kStages][kRows], bad_dout[kStages][kRows][2];     // not finite: bit 0 for q, bit 1 for dO; by columns of dO
    uint32_t bad_keys[kKeyStages][kKeys];                               // not finite: bit 0 for K, bit 1 for V
    // By head: the math warps' - sum of p_sink P dP, and the row warps' sum of p_sink g for each of the last four kv heads.
    float sums[kWarps][kHeads], terms[4][kRowWarps][kHeads];
    Step steps[kStages];
    ShareWalk walk;
    Barriers<kStages> step_full, step_ready, step_empty; // ready: rows and keys are prepared
    Barriers<2> ds_full;
    union {
        int64_t scan[kThreads / 32];
        double sink_sums[kThreads / 32];
    };
    int nonfinite;
    // With positional sink tokens.
    SinkStep sink_steps[kStages];
    uint32_t bad_sinks[kSinkKeys]; // not finite: bit 0 for K, bit 1 for V
    int any_bad_sinks;
};

struct SinkSmem : Smem {
    alignas(1024) unsigned char sink_k[kSinkKeys * kRowBytes], sink_v[kSinkKeys * kRowBytes];
};

template <class C> using SmemOf = std::conditional_t<(C::kSinkTokens > 0), SinkSmem, Smem>;

struct Maps {
    CUtensorMap q, dout, out, k, v, dq;
};

struct Problem : WalkShape {
    float scale, scale_log2;
    unsigned *redo; // [blocks]: whether the share must be computed again; then how many blocks of the second launch are done
    float *sums;    // [num_q_heads][blocks * C::kParts]
    // Positional sink tokens; the tiles of rows of all sequences; their partial sums of dK, then dV: [num_kv_heads][tiles][tokens][2][64].
    int num_sink_tokens;
    unsigned num_sink_tasks;
    int64_t row_tiles;
    float *partials;
};

} // namespace sa::bwd_window_sm90
