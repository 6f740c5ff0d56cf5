// SPDX-License-Identifier: Apache-2.0
//
// What the windowed forward's other warps do for its math groups, and the shared memory that they have together: one fetches K and V of a
// span, one tiles of queries, one looks at the values. Which spans there are.
#pragma once

#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/items.cuh"

namespace sa::fwd_window_sm90 {

constexpr int kGroups = 4, kMathThreads = 128 * kGroups, kThreads = kMathThreads + 128;
enum NamedBarrier : int { kMathBarrier = 1 }; // one a math group, from this one on; 0 is __syncthreads
constexpr int kMathRegisters = 104, kOtherRegisters = 64;
constexpr int kTileRows = sa_fwd_cuda_sm90_window_tile_q, kKeys = sa_fwd_cuda_sm90_window_tile_k;
constexpr int kMaxSpan = 96, kSpanKeys = kMaxSpan + kKeys;
constexpr int kSpanCost = 4; // of a span beside its tokens, in tokens: measured
constexpr int kStages = 2, kSlots = 3, kSlotBytes = kTileRows * kRowBytes, kKeyBytes = kSpanKeys * kRowBytes;
static_assert(kGroups * kMathRegisters + kOtherRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
              "registers that the block begins with");

// A span of tokens of one sequence and kv head.
struct Span {
    sa_sequence sequence;
    int64_t kv_head, lse;     // offset of the first row's lse
    sa_position_t token, key; // of the first tile: its first token, and the first key of that token's window; both may lie outside
    int low_key, high_key, low_token, high_token; // the sequence's keys and tokens, from these two on
    int first_tile, num_tiles;                    // that hold tokens of the sequence
    bool exists, has_sink;
};

struct Smem {
    unsigned char keys[kStages][kKeyBytes], values[kStages][kKeyBytes];
    unsigned char slots[kGroups][kSlots][kSlotBytes];
    Span spans[kStages];
    Barriers<kStages> planned, kv_full, kv_ready, kv_empty; // planned: the span is described; ready: values checked, s_aux there
    Barriers<kSlots> q_full[kGroups], q_empty[kGroups];
    float s_aux[kStages][kTileRows];
    bool nonfinite[kStages];
};

struct Maps {
    CUtensorMap q, k, v, out;
};

struct Problem {
    sa_band window;           // of a sequence long enough that nothing is clamped
    unsigned num_spans;       // of a kv head
    unsigned step, head_step; // from one of a block's spans to its next
    unsigned spans_a_batch;   // 0: packed
    int group, group_log2;    // heads of a token, a power of two
    int tokens, span;         // of a tile, of a span
    int reach;                // keys that a row sees beside its window's first
    float scale_log2;
};

static inline int64_t num_spans(const sinkattn_problem &problem, int span) {
    if (problem.packed) return problem.q_len / span + 2 * (problem.batch + 1);
    return problem.batch * (problem.q_len / span + 2);
}

// Tokens of a span: as many as let the blocks end soonest. Of a packed batch the last spans of sequences are short.
static inline int choose_span(const sinkattn_problem &problem, int tokens, int workers) {
    const int least = tokens < 8 ? 8 : tokens;
    const int64_t heads = problem.num_kv_heads;
    int best = least;
    int64_t best_cost = INT64_MAX;
    for (int span = least; span <= kMaxSpan; span += least) {
        const int64_t spans = problem.packed ? problem.q_len / span + problem.batch : num_spans(problem, span);
        const int64_t cost = problem.packed ? (problem.q_len + spans * kSpanCost) * heads / workers + span
                                            : sa_ceil_div(spans * heads, workers) * (span + kSpanCost);
        if (cost < best_cost) best = span;
        best_cost = sa_min(cost, best_cost);
    }
    return best;
}

// Where a block stands among the spans: kv heads in turn, then sequences. What comes later lies in the same or in a later sequence.
struct Walk {
    unsigned n, kv_head, sequence;
};

__device__ __forceinline__ int near(int64_t distance) { return static_cast<int>(sa_clamp(distance, -(1 << 20), 1 << 20)); }

// The next span that exists, by the lanes of a warp, which look for its sequence.
__device__ __forceinline__ Span next_span(Walk &walk, const sinkattn_fwd_args &args, const Problem &p) {
    const sinkattn_problem &problem = args.problem;
    const auto batch = static_cast<unsigned>(problem.batch), heads = static_cast<unsigned>(problem.num_kv_heads);
    const auto first_span = [&](unsigned b) { return static_cast<unsigned>(rows_before(args, b)) / static_cast<unsigned>(p.span) + 2 * b; };
    Span span;
    span.exists = false;
    while (walk.n < p.num_spans && !span.exists) {
        sa_position_t within;
        if (p.spans_a_batch) {
            walk.sequence = walk.n / p.spans_a_batch;
            within = static_cast<sa_position_t>(walk.n % p.spans_a_batch);
        } else {
            for (unsigned begun = 32; begun == 32; walk.sequence += begun) {
                const unsigned b = walk.sequence + 1 + threadIdx.x % 32;
                begun = __ffs(~__ballot_sync(0xffffffffu, b <= batch && first_span(b) <= walk.n)) - 1u;
                if (begun > 32) begun = 32;
            }
            within = static_cast<sa_position_t>(walk.n - first_span(walk.sequence));
        }
        span.has_sink = args.s_aux && walk.sequence < batch;
        span.kv_head = walk.kv_head;
        span.sequence = sequence_or_tail(args, walk.sequence);
        const sa_band band = sa_band_of(&problem.mask, span.sequence.q_len, span.sequence.k_len);
        const sa_position_t start = sa_position(&band, 0),
                            base = (start >= 0 ? start : start - p.span + 1) / p.span * p.span; // a multiple of span
        span.token = base - start + within * p.span;
        span.key = sa_window_begin(&p.window, base + within * p.span);
        span.exists = within >= 0 && span.token < span.sequence.q_len && span.sequence.q_len > 0; // then it has a tile
        span.low_key = near(-static_cast<int64_t>(span.key));
        span.high_key = near(span.sequence.k_len - span.key);
        span.low_token = near(-static_cast<int64_t>(span.token));
        span.high_token = near(span.sequence.q_len - span.token);
        span.first_tile = max(span.low_token, 0) / p.tokens;
        span.num_tiles = (min(span.high_token, p.span) + p.tokens - 1) / p.tokens - span.first_tile;
        span.lse = sa_row_index(&problem, &span.sequence, span.kv_head * p.group, span.token);
        walk.n += p.step;
        walk.kv_head += p.head_step;
        if (walk.kv_head >= heads) {
            walk.kv_head -= heads;
            walk.n++;
        }
    }
    return span;
}

// Keys and values, a span ahead of the queries. By a warp.
__device__ __forceinline__ void load_keys(Smem &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    const auto heads = static_cast<unsigned>(args.problem.num_kv_heads);
    Walk walk{blockIdx.x / heads, blockIdx.x % heads, 0};
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        const Span span = next_span(walk, args, p);
        smem.kv_empty.acquire(stages);
        if (threadIdx.x % 32 == 0) {
            smem.spans[stage] = span;
            smem.planned[stage].arrive();
            if (!span.exists) {
                smem.kv_full[stage].arrive();
            } else {
                smem.kv_full[stage].arrive_expect(2 * (p.span + kKeys) * kRowBytes);
                const int key = static_cast<int>(span.sequence.k_begin + span.key), batch = static_cast<int>(span.sequence.batch);
                tensor_load(smem.keys[stage], &maps.k, smem.kv_full[stage], 0, static_cast<int>(span.kv_head), key, batch);
                tensor_load(smem.values[stage], &maps.v, smem.kv_full[stage], 0, static_cast<int>(span.kv_head), key, batch);
            }
        }
        if (!span.exists) break;
    }
}

// Tiles of queries, as slots become free. By a warp.
__device__ __forceinline__ void load_queries(Smem &smem, const Maps &maps, const Problem &p) {
    int group = 0;
    Ring<kSlots> slots;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        smem.planned.wait(stages);
        const Span &span = smem.spans[stage];
        if (!span.exists) break;
        const int head = static_cast<int>(span.kv_head * p.group),
                  first = static_cast<int>(span.sequence.q_begin + span.token) + span.first_tile * p.tokens,
                  batch = static_cast<int>(span.sequence.batch);
        for (int tile = 0; tile < span.num_tiles; tile++) {
            const uint32_t slot = slots.stage();
            Barrier &full = smem.q_full[group][slot];
            smem.q_empty[group].acquire(slots);
            if (threadIdx.x % 32 == 0) {
                full.arrive_expect(kSlotBytes);
                tensor_load(smem.slots[group][slot], &maps.q, full, 0, head, first + tile * p.tokens, batch);
            }
            if (++group == kGroups) {
                group = 0;
                slots.n++;
            }
        }
        smem.kv_empty.release(stages);
    }
}

// What the math needs beside the keys, by a warp.
template <class Element> __device__ __forceinline__ void check_values(Smem &smem, const sinkattn_fwd_args &args, const Problem &p) {
    const int lane = threadIdx.x % 32, bytes = (p.span + kKeys) * kRowBytes;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        smem.kv_full.wait(stages);
        const Span &span = smem.spans[stage];
        if (!span.exists) break;
        for (int i = lane; i < p.group; i += 32)
            smem.s_aux[stage][i] =
                span.has_sink ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, span.kv_head * p.group + i)) : -INFINITY;
        const bool some = __any_sync(0xffffffffu, any_nonfinite<Element, 32>(smem.values[stage], bytes, lane));
        if (some) zero_nonfinite<Element, 32>(smem.values[stage], bytes, lane);
        if (lane == 0) smem.nonfinite[stage] = some;
        async_fence();
        smem.kv_ready.arrive(stages);
    }
}

} // namespace sa::fwd_window_sm90
