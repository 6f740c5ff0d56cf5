// SPDX-License-Identifier: Apache-2.0
//
// What both launches of the wide windowed backward share: shapes, the statistics that the first leaves to the second, tensor maps, and the
// search for a sequence.
#pragma once

#include "core/workspace.h"
#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/items.cuh"

namespace sa::bwd_wide_window_sm90 {

constexpr int kRows = 64, kStepKeys = 16, kPieceSteps = 5, kPieceKeys = kPieceSteps * kStepKeys; // rows of a tile; keys of one product
constexpr int kBlockKeys = 128;                                                                  // of the second launch, 64 a warpgroup
constexpr int kSinkHalf = kStepKeys * kRowBytes; // positional sink tokens are at most one step of keys
static_assert(SA_WINDOW_SINK_TOKENS == kStepKeys, "the planner's limit");
constexpr int kWarpgroups = 2, kMathThreads = 128 * kWarpgroups, kThreads = kMathThreads + 128;
// A block begins with 168 registers a thread, the most for 384 threads, and exchanges no others: a sum above 3 x 168 would wait forever.
constexpr int kRowsLoaderRegisters = 40, kRowsMathRegisters = 232, kKeysLoaderRegisters = 24, kKeysMathRegisters = 240;
static_assert(kRowsLoaderRegisters + kWarpgroups * kRowsMathRegisters <= 3 * 168, "registers of the block, for each of 128 threads");
static_assert(kKeysLoaderRegisters + kWarpgroups * kKeysMathRegisters <= 3 * 168, "registers of the block, for each of 128 threads");

// kHalves: pieces of 64 columns of a row of Q and K, kHalvesV of V and dO; a row tile's lie kRowHalf bytes apart.
template <class Element_, int kHeadDim_, int kHeadDimV_> struct Widths {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kHalves = kHeadDim / 64, kHalvesV = kHeadDimV / 64;
    static constexpr int kRowHalf = kRows * kRowBytes;
    static_assert(kHeadDim == 128 || kHeadDim == 192, "dQ and dK have 128 columns, or 128 and 64");
    static_assert(kHeadDimV == 128, "dV has 128 columns");
};

// Of a row of one head: LSE in log2 units, g - delta, p_sink (g - delta). suspect: Q or dO may hold values that are not finite.
struct alignas(SA_BWD_WIDE_WINDOW_STATS_BYTES) RowStats {
    float lse, bias, term;
    uint32_t suspect;
};

static_assert(sizeof(RowStats) == SA_BWD_WIDE_WINDOW_STATS_BYTES, "as the planner counts them");

struct Maps {
    CUtensorMap q, dout, k, v;  // boxes: a tile's whole tokens; a span's or a block's keys
    CUtensorMap sink_k, sink_v; // a step of keys
};

struct Problem {
    int group, group_inverse; // heads of the GQA group; 2^16 / group, rounded up: row / group is row * group_inverse >> 16
    int tokens, span_tokens;  // of a row tile; of a span, the first launch's item
    unsigned num_kv_heads, num_spans, num_blocks; // spans and key blocks of a kv head
    unsigned batch_spans, batch_blocks;           // of a sequence; 0 if packed
    unsigned halves;                              // items of a key block: 1, or one a math warpgroup
    int64_t num_tokens;                           // of all sequences
    float scale, scale_log2;
    RowStats *stats; // [num_kv_heads][num_tokens][group]
    // Positional sink tokens; tokens of a stretch; the fewest keys of a sequence with stretches; stretches of a kv head, of a sequence (0
    // if packed).
    int num_sinks, stretch_tokens, stretch_keys;
    unsigned num_stretches, batch_stretches;
    int64_t window_slots, num_slots; // window_slots: the first slot of a window
    float *partials;                 // [num_kv_heads][num_slots][num_sinks][2][128], by sa_bwd_wide_window_layout

    __device__ __forceinline__ int row_token(int row) const { return row * group_inverse >> 16; }
    __device__ __forceinline__ int tile_rows() const { return tokens * group; }

    __device__ __forceinline__ float *partial_of(int kv_head, int64_t slot, int key) const {
        return partials + ((kv_head * num_slots + slot) * num_sinks + key) * SA_BWD_WIDE_WINDOW_PARTIAL;
    }
    // The number of a sequence's first stretch, half its first slot, and the slot of its window.
    __device__ __forceinline__ int64_t first_stretch(const sa_sequence &sequence, unsigned b) const {
        if (batch_stretches) return static_cast<int64_t>(b) * batch_stretches;
        return sequence.q_begin / stretch_tokens + sequence.k_begin / stretch_keys;
    }
    __device__ __forceinline__ int64_t window_slot(const sa_sequence &sequence, unsigned b) const {
        return window_slots + (batch_stretches ? b : sequence.k_begin / stretch_keys);
    }
    // The first row that sees a sink token before its window; q_len if there is none.
    __device__ __forceinline__ int first_row(const sa_band &band) const {
        return band.k_len ? sa_keys_rows(&band, {0, 1}).end : band.q_len;
    }

    // Of head 0 of the group.
    __device__ __forceinline__ RowStats *stats_of(const sinkattn_problem &problem, const sa_sequence &sequence, int kv_head, int i) const {
        return stats + (kv_head * num_tokens + sequence.batch * problem.q_len + sequence.q_begin + i) * group;
    }
};

// A piece of a packed or dense sequence: the n-th of `size` tokens or keys of all sequences. before(b): tokens or keys in front of packed
// sequence b; that number `batch` is the tail. By a whole warp.
struct Place {
    unsigned b;
    int within;
};

template <class Before>
__device__ __forceinline__ Place find_place(unsigned n, int size, unsigned a_batch, int64_t batch, const Before &before) {
    if (a_batch) return {n / a_batch, static_cast<int>(n % a_batch)};
    unsigned low = 0, high = static_cast<unsigned>(batch) + 1;
    while (high - low > 1) {
        const unsigned step = (high - low + 31) / 32, b = low + threadIdx.x % 32 * step;
        const bool begun = b < high && before(b) < (static_cast<int64_t>(n) - b + 1) * size;
        low += (31 - __clz(__ballot_sync(0xffffffffu, begun) | 1)) * step;
        high = min(high, low + step);
    }
    return {low, static_cast<int>(n - low) - sa_tile_of(static_cast<sa_position_t>(before(low)), size)};
}

// The window alone: positional sink tokens are handled apart.
__device__ __forceinline__ sa_band band_of(const sinkattn_fwd_args &args, const sa_sequence &sequence) {
    sa_band band = sa_band_of(&args.problem.mask, static_cast<sa_position_t>(sequence.q_len), static_cast<sa_position_t>(sequence.k_len));
    band.num_sink = 0;
    return band;
}

// Zeroes rows of a tile of kHalves pieces. By a warp.
template <int kHalves> __device__ __forceinline__ void zero_rows(unsigned char *tile, int first, int end) {
    sa::zero_rows<kHalves, kRows, 32>(tile, first, end);
}

// Which pairs of the thread's two rows and its columns are visible: a bit each, columns 8 n and 8 n + 1 after its first at bits 2 n, 2 n
// + 1.
struct Seen {
    uint32_t bits[2];

    __device__ __forceinline__ bool operator()(int r, int column) const { return bits[r] >> (column / 4 + column % 2) & 1; }

    // The bits of columns before this one, counted from the thread's first.
    static __device__ __forceinline__ uint32_t before(int column) {
        column = max(column, 0);
        return __funnelshift_lc(~0u, 0u, column / 8 * 2 + min(column % 8, 2));
    }
};

// dQ or dK: 64 rows x kHeadDim columns, the first 128 and the rest.
template <class W> struct Wide {
    static constexpr bool kHasHigh = W::kHeadDim > 128;
    float low[64], high[kHasHigh ? 32 : 1];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float &x : low) x = 0.0f;
#pragma unroll
        for (float &x : high) x = 0.0f;
    }
    __device__ __forceinline__ void pin_all() {
        pin(low);
        if constexpr (kHasHigh) pin(high);
    }
    // Issues += a b over kSteps steps of 16 rows of b, whose pieces of 64 columns lie kHalf bytes apart; `adds` false: the product begins
    // the sum. The caller waits.
    template <int kHalf, int kSteps> __device__ __forceinline__ void add_product(const uint32_t (&a)[kSteps][4], uint32_t b, bool adds) {
        const uint64_t right = operand(b, kHalf), last = operand(b + 2 * kHalf, kHalf);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            wgmma_registers<typename W::Element>(low, a[step], operand_at(right, step * kStepKeys * kRowBytes), adds || step > 0);
            if constexpr (kHasHigh)
                wgmma_registers<typename W::Element>(high, a[step], operand_at(last, step * kStepKeys * kRowBytes), adds || step > 0);
        }
        wgmma_commit();
    }
    // Writes the thread's two rows, times `factor`; to: NULL where one is not written. staged: kStagedBytes of the warp's.
    __device__ __forceinline__ void write(uint16_t *const (&to)[2], float factor, int head_dim, unsigned char *staged) const {
        uint4 first[4][2], rest[2][2];
        exchange<typename W::Element>(first, low, factor, staged);
        if constexpr (kHasHigh) exchange<typename W::Element>(rest, high, factor, staged);
        // All reads of shared memory come before the stores, behind which they would wait.
        write_rows(to, first, head_dim);
        if constexpr (kHasHigh) {
            uint16_t *const on[2] = {to[0] ? to[0] + 128 : nullptr, to[1] ? to[1] + 128 : nullptr};
            write_rows(on, rest, head_dim - 128);
        }
    }
};

} // namespace sa::bwd_wide_window_sm90
