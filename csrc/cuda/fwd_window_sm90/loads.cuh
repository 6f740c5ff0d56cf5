// SPDX-License-Identifier: Apache-2.0
//
// The windowed forward's spans, its shared memory, and its loader warps: one loads K and V of spans, one tiles of Q, one checks V.
//
// A span is consecutive tokens of one sequence and kv head whose tiles share one load of K and V. Spans begin at multiples of their length
// counted from position 0. Item i of a launch is span i / num_kv_heads of kv head i % num_kv_heads; a block computes every gridDim.x-th.
#pragma once

#include <type_traits>

#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/pipe.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/items.cuh"

namespace sa::fwd_window_sm90 {

constexpr int kWarpgroups = 4;                // math warpgroups, at most
enum NamedBarrier : int { kMathBarrier = 1 }; // of the first math warpgroup, the next ones follow; 0 is __syncthreads
constexpr int kTileRows = sa_fwd_cuda_sm90_window_tile_q, kKeys = sa_fwd_cuda_sm90_window_tile_k;
constexpr int kMaxSpan = 96, kSpanKeys = kMaxSpan + kKeys;
constexpr int kSpanCost = 4; // measured: a span takes as long as its tokens and this many more
constexpr int kSinkKeys = SA_WINDOW_SINK_TOKENS, kSinkBytes = kSinkKeys * kRowBytes; // one k16 step of the product with V
constexpr int kStages = 2, kTileStages = 3, kTileBytes = kTileRows * kRowBytes, kKeyBytes = kSpanKeys * kRowBytes;

struct Span {
    sa_sequence sequence;
    int64_t kv_head, lse;                 // lse: offset of the first token and head in lse
    sa_position_t first_token, first_key; // first_key: of the first token's window; both may lie outside the sequence
    int key_begin, key_end;               // of the sequence's keys after its sink tokens, counted from first_key
    int token_begin, token_end;           // of the sequence, counted from first_token
    int first_tile, num_tiles;            // the tiles that hold tokens of the sequence
    bool exists, has_sink;
};

struct Smem {
    unsigned char keys[kStages][kKeyBytes], values[kStages][kKeyBytes];
    unsigned char tiles[kWarpgroups][kTileStages][kTileBytes]; // Q, then out
    Span spans[kStages];
    Barriers<kStages> planned, kv_full, kv_ready, kv_empty; // planned: spans[] is written; ready: V is checked, s_aux[] is written
    Barriers<kTileStages> q_full[kWarpgroups], q_empty[kWarpgroups];
    float s_aux[kStages][kTileRows]; // of the heads of the GQA group, -inf for none
    bool nonfinite[kStages];         // V held values that are not finite, which are zeros now
};

// With positional sink tokens: K and V of the sequence's first keys, beside those of each span.
struct SinkSmem : Smem {
    alignas(1024) unsigned char sink_keys[kStages][kSinkBytes], sink_values[kStages][kSinkBytes];
};

struct Maps {
    CUtensorMap q, k, v, out;
};

struct SinkMaps : Maps {
    CUtensorMap sink_k, sink_v;
};

// kSinkTokens: positional sink tokens that a row may see, in front of kWindowKeys keys of a tile's windows. S is as large with 8 and 136 as
// without sink tokens; with 16 and 144 four math warpgroups do not fit the registers.
template <class Element_, class Keys_, int kSinkTokens, int kWindowKeys> struct Config {
    using Element = Element_;
    using Keys = Keys_;
    static constexpr bool kHasSinkTokens = kSinkTokens > 0;
    static constexpr int kSinkScores = kSinkTokens / 2, kWindowScores = kWindowKeys / 2, kScores = kSinkScores + kWindowScores; // a thread
    static constexpr int kSinkSteps = kHasSinkTokens, kSteps = kSinkSteps + (kWindowKeys + 15) / 16; // of 16 keys, of the product with V
    static constexpr int kWarpgroups = kScores <= 72 ? 4 : 3, kMathThreads = 128 * kWarpgroups, kThreads = kMathThreads + 128;
    static constexpr int kMathRegisters = kWarpgroups == 4 ? 104 : 144, kLoaderRegisters = 64;
    static_assert(kWarpgroups * kMathRegisters + kLoaderRegisters <= 65536 / kThreads / 8 * 8 * (kWarpgroups + 1),
            "setmaxnreg distributes the registers that the block begins with");
    static_assert(kSinkTokens <= kSinkKeys && kWindowKeys <= kKeys && kWarpgroups <= fwd_window_sm90::kWarpgroups, "");
    using Smem = std::conditional_t<kHasSinkTokens, SinkSmem, fwd_window_sm90::Smem>;
    using Maps = std::conditional_t<kHasSinkTokens, SinkMaps, fwd_window_sm90::Maps>;
};

struct Problem {
    sa_band window;           // of a sequence so long that nothing is clamped
    unsigned num_spans;       // of a kv head
    unsigned step, head_step; // gridDim.x items are `step` spans and `head_step` kv heads
    unsigned batch_spans;     // spans of a kv head in a batch entry; 0: packed
    int group, group_log2;    // q heads of a kv head, a power of two
    int tile_tokens, span_tokens;
    int last_key; // the last key of a row's window, counted from its first
    float scale_log2;
};

static inline int64_t num_spans(const sinkattn_problem &problem, int span_tokens) {
    if (problem.packed) return problem.q_len / span_tokens + 2 * (problem.batch + 1);
    return problem.batch * (problem.q_len / span_tokens + 2);
}

// Tokens of a span with which the blocks should end soonest. Dense: rounds of spans times a span's cost; packed, where each sequence may
// end in a short span: a block's average work and one span.
static inline int choose_span(const sinkattn_problem &problem, int tile_tokens, int most, int workers) {
    const int least = tile_tokens < 8 ? 8 : tile_tokens;
    const int64_t heads = problem.num_kv_heads;
    int best = least;
    int64_t best_cost = INT64_MAX;
    for (int span = least; span <= most; span += least) {
        const int64_t spans = problem.packed ? problem.q_len / span + problem.batch : num_spans(problem, span);
        const int64_t cost = problem.packed ? (problem.q_len + spans * kSpanCost) * heads / workers + span
                                            : sa_ceil_div(spans * heads, workers) * (span + kSpanCost);
        if (cost < best_cost) best = span;
        best_cost = sa_min(cost, best_cost);
    }
    return best;
}

// The block's next item, and the sequence of its previous one, where the search for the next sequence begins.
struct SpanWalk {
    unsigned span, kv_head, sequence;
};

// A distance in tokens or keys as int; a span is far shorter than the limits.
__device__ __forceinline__ int distance(int64_t tokens) { return static_cast<int>(sa_clamp(tokens, -(1 << 20), 1 << 20)); }

// The sequence's keys before this one are positional sink tokens, and no keys of a window.
__device__ __forceinline__ sa_position_t num_sink_keys(const sa_sequence &sequence, const Problem &p) {
    return static_cast<sa_position_t>(sa_min(sequence.k_len, p.window.num_sink));
}

// The block's next span that holds tokens. By a whole warp, whose lanes look for the sequence in a packed batch.
template <class C>
__device__ __forceinline__ Span next_span(SpanWalk &walk, const sinkattn_fwd_args &args, const typename C::Keys &keys, const Problem &p) {
    const sinkattn_problem &problem = args.problem;
    const auto batch = static_cast<unsigned>(problem.batch), heads = static_cast<unsigned>(problem.num_kv_heads);
    // Leaves room for every span of the sequences before b, which may begin and end inside a span.
    const auto first_span = [&](unsigned b) {
        return static_cast<unsigned>(rows_before(args, b)) / static_cast<unsigned>(p.span_tokens) + 2 * b;
    };
    Span span;
    span.exists = false;
    while (walk.span < p.num_spans && !span.exists) {
        sa_position_t within;
        if (p.batch_spans) {
            walk.sequence = walk.span / p.batch_spans;
            within = static_cast<sa_position_t>(walk.span % p.batch_spans);
        } else {
            for (unsigned begun = 32; begun == 32; walk.sequence += begun) { // begun: how many of the next 32 sequences begin by walk.span
                const unsigned b = walk.sequence + 1 + threadIdx.x % 32;
                begun = __ffs(~__ballot_sync(0xffffffffu, b <= batch && first_span(b) <= walk.span)) - 1u;
                if (begun > 32) begun = 32;
            }
            within = static_cast<sa_position_t>(walk.span - first_span(walk.sequence));
        }
        span.has_sink = args.s_aux && walk.sequence < batch;
        span.kv_head = walk.kv_head;
        span.sequence = sequence_or_tail(args, walk.sequence, keys);
        const sa_band band = sa_band_of(&problem.mask, span.sequence.q_len, span.sequence.k_len);
        const sa_position_t start = sa_position(&band, 0),
                            base = (start >= 0 ? start : start - p.span_tokens + 1) / p.span_tokens * p.span_tokens; // rounded down
        span.first_token = base - start + within * p.span_tokens;
        span.first_key = sa_window_begin(&p.window, base + within * p.span_tokens);
        span.exists = within >= 0 && span.first_token < span.sequence.q_len && span.sequence.q_len > 0;
        const sa_position_t sink_end = C::kHasSinkTokens ? num_sink_keys(span.sequence, p) : 0;
        span.key_begin = distance(sink_end - static_cast<int64_t>(span.first_key));
        span.key_end = distance(span.sequence.k_len - span.first_key);
        span.token_begin = distance(-static_cast<int64_t>(span.first_token));
        span.token_end = distance(span.sequence.q_len - span.first_token);
        span.first_tile = sa_tile_of(max(span.token_begin, 0), p.tile_tokens);
        span.num_tiles = sa_tile_from(min(span.token_end, p.span_tokens), p.tile_tokens) - span.first_tile;
        span.lse = sa_row_index(&problem, &span.sequence, span.kv_head * p.group, span.first_token);
        walk.span += p.step;
        walk.kv_head += p.head_step;
        if (walk.kv_head >= heads) {
            walk.kv_head -= heads;
            walk.span++;
        }
    }
    return span;
}

// A span's keys begin in shared memory so many rows after those of a cache, which are copied in boxes at multiples of a box.
__device__ __forceinline__ int rows_before_span(const TensorKeys &, const Span &) { return 0; }
__device__ __forceinline__ int rows_before_span(const CacheKeys &cache, const Span &span) { return span.first_key & (cache.box - 1); }

// Keys that rows of the span see: [0, sink_end) and [begin, end).
struct SeenKeys {
    int sink_end, begin, end;

    template <class C> __device__ __forceinline__ static SeenKeys of(const Span &span, const Problem &p) {
        const int begin = span.first_key + max(span.token_begin, 0),
                  end = min(span.first_key + min(span.token_end, p.span_tokens) + p.last_key, static_cast<int>(span.sequence.k_len));
        return {C::kHasSinkTokens ? min(num_sink_keys(span.sequence, p), end) : 0, begin, end};
    }
};

// By a warp: a lane copies every 32nd box. What no row of the span sees becomes zeros, and so does a page that does not exist:
// coordinates outside the map are not read.
template <class C>
__device__ __forceinline__ void copy_boxes(typename C::Smem &smem, uint32_t stage, const Span &span, const typename C::Maps &maps,
        const Problem &p, const CacheKeys &cache, unsigned *error_word) {
    const int lane = threadIdx.x % 32, box = cache.box, before = rows_before_span(cache, span), head = static_cast<int>(span.kv_head);
    const int boxes = (before + p.span_tokens + kKeys + box - 1) / box;
    const SeenKeys seen = SeenKeys::of<C>(span, p);
    Barrier &full = smem.kv_full[stage];
    const auto copy = [&](unsigned char *keys_to, unsigned char *values_to, int i, int key, int begin, int end) {
        const bool sees = key >= 0 && key + box > begin && key < end;
        const int page = sees ? cache.page_of(cache.row(span.sequence), key) : -1, slot = sees ? cache.slot(key) : 0;
        if (sees && !cache.has_page(page)) atomicOr(error_word, kBadBlockTable);
        tensor_load(keys_to + i * box * kRowBytes, &maps.k, full, 0, head, slot, page);
        tensor_load(values_to + i * box * kRowBytes, &maps.v, full, 0, head, slot, page);
    };
    if (lane == 0) full.arrive_expect(2 * (boxes * box + C::kSinkSteps * kSinkKeys) * kRowBytes);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < boxes; i += 32)
        copy(smem.keys[stage], smem.values[stage], i, span.first_key - before + i * box, seen.begin, seen.end);
    if constexpr (C::kHasSinkTokens)
        for (int i = lane; i * box < kSinkKeys; i += 32) copy(smem.sink_keys[stage], smem.sink_values[stage], i, i * box, 0, seen.sink_end);
}

// By a warp. In flight at the top: K and V of at most two earlier spans.
template <class C>
__device__ __forceinline__ void load_keys(typename C::Smem &smem, const sinkattn_fwd_args &args, const typename C::Keys &keys,
        const typename C::Maps &maps, const Problem &p, unsigned *error_word) {
    const auto heads = static_cast<unsigned>(args.problem.num_kv_heads);
    SpanWalk walk{blockIdx.x / heads, blockIdx.x % heads, 0};
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        const Span span = next_span<C>(walk, args, keys, p);
        smem.kv_empty.acquire(stages);
        if (threadIdx.x % 32 == 0) {
            smem.spans[stage] = span;
            smem.planned[stage].arrive();
            if (!span.exists) {
                smem.kv_full[stage].arrive();
            } else if constexpr (!C::Keys::kCached) {
                smem.kv_full[stage].arrive_expect(2 * (p.span_tokens + kKeys + C::kSinkSteps * kSinkKeys) * kRowBytes);
                const int key = static_cast<int>(span.sequence.k_begin + span.first_key), batch = static_cast<int>(span.sequence.batch);
                tensor_load(smem.keys[stage], &maps.k, smem.kv_full[stage], 0, static_cast<int>(span.kv_head), key, batch);
                tensor_load(smem.values[stage], &maps.v, smem.kv_full[stage], 0, static_cast<int>(span.kv_head), key, batch);
                if constexpr (C::kHasSinkTokens) {
                    const int head = static_cast<int>(span.kv_head), first = static_cast<int>(span.sequence.k_begin);
                    tensor_load(smem.sink_keys[stage], &maps.sink_k, smem.kv_full[stage], 0, head, first, batch);
                    tensor_load(smem.sink_values[stage], &maps.sink_v, smem.kv_full[stage], 0, head, first, batch);
                }
            }
        }
        if (!span.exists) break;
        if constexpr (C::Keys::kCached) copy_boxes<C>(smem, stage, span, maps, p, keys, error_word);
    }
}

// By a warp: tiles to the math warpgroups in turn. In flight at the top: Q of the tiles before, at most kTileStages a warpgroup.
template <class C> __device__ __forceinline__ void load_queries(Smem &smem, const Maps &maps, const Problem &p) {
    int warpgroup = 0;
    Ring<kTileStages> tiles;
    for (Ring<kStages> stages;; stages.n++) {
        smem.planned.wait(stages);
        const Span &span = smem.spans[stages.stage()];
        if (!span.exists) break;
        const int head = static_cast<int>(span.kv_head * p.group),
                  first = static_cast<int>(span.sequence.q_begin + span.first_token) + span.first_tile * p.tile_tokens,
                  batch = static_cast<int>(span.sequence.batch);
        for (int tile = 0; tile < span.num_tiles; tile++) {
            const uint32_t stage = tiles.stage();
            Barrier &full = smem.q_full[warpgroup][stage];
            smem.q_empty[warpgroup].acquire(tiles);
            if (threadIdx.x % 32 == 0) {
                full.arrive_expect(kTileBytes);
                tensor_load(smem.tiles[warpgroup][stage], &maps.q, full, 0, head, first + tile * p.tile_tokens, batch);
            }
            if (++warpgroup == C::kWarpgroups) {
                warpgroup = 0;
                tiles.n++;
            }
        }
        smem.kv_empty.release(stages);
    }
}

// By a warp: loads s_aux of a span's heads, and zeroes values of V that are not finite.
template <class C>
__device__ __forceinline__ void check_values(
        typename C::Smem &smem, const sinkattn_fwd_args &args, const typename C::Keys &keys, const Problem &p) {
    using Element = typename C::Element;
    const int lane = threadIdx.x % 32;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        smem.kv_full.wait(stages);
        const Span &span = smem.spans[stage];
        if (!span.exists) break;
        const int bytes = (rows_before_span(keys, span) + p.span_tokens + kKeys) * kRowBytes;
        for (int i = lane; i < p.group; i += 32)
            smem.s_aux[stage][i] = span.has_sink
                                           ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, span.kv_head * p.group + i))
                                           : -INFINITY;
        bool found = __any_sync(0xffffffffu, any_nonfinite<Element, 32>(smem.values[stage], bytes, lane));
        if (found) zero_nonfinite<Element, 32>(smem.values[stage], bytes, lane);
        if constexpr (C::kHasSinkTokens)
            found |= __any_sync(0xffffffffu, zero_nonfinite<Element, 32>(smem.sink_values[stage], kSinkBytes, lane));
        if (lane == 0) smem.nonfinite[stage] = found;
        async_fence();
        smem.kv_ready.arrive(stages);
    }
}

} // namespace sa::fwd_window_sm90
