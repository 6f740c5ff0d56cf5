// SPDX-License-Identifier: Apache-2.0
//
// Forward for windows that fit one key tile, head_dim up to 64, on sm_90.
//
//     producer warp   K, V of a span | Q tile | Q tile | ...          K, V of the next span | ...
//     math group g    QK wgmma, softmax over all keys at once, PV wgmma, out through Q's slot      (three groups, each its own tiles)
//
// A tile is 64 rows, kTokens tokens x the heads of a group, and sees at most 144 keys: one pass, nothing is rescaled, the sink is in the
// pivot and in the sum from the start. The window begins at its exact token, since a wgmma operand may start at any row. K and V are read
// once a span of 96 tokens, with the keys before it. Tiles lie at multiples of kTokens positions: a row's bits are its own.
//
// Shared memory: two stages of K and V, 240 keys each, 120 KiB; nine slots of 8 KiB for Q and out. Registers: S 72, P 36, O 32.

#include "cuda/attn/unfinite.cuh"
#include "cuda/tensor_map.cuh"

namespace sa {
namespace {

constexpr int kGroups = 3, kThreads = 128 * (kGroups + 1), kTileRows = sa_fwd_cuda_sm90_window_tile_q;
constexpr int kKeys = sa_fwd_cuda_sm90_window_tile_k, kMaxSpan = 96, kSpanKeys = kMaxSpan + kKeys;
constexpr int kSpanCost = 4; // of a span beside its tokens, in tokens: measured
constexpr int kStages = 2, kSlots = 3, kCheckers = 3, kSlotBytes = kTileRows * kRowBytes, kKeyBytes = kSpanKeys * kRowBytes;

// A span of tokens of one sequence and kv head.
struct Span {
    sa_sequence sequence;
    int64_t batch, kv_head;
    sa_position_t token, key; // of the first tile: its first token, and the first key of that token's window; both may lie outside
    bool exists, has_sink;
};

struct Smem {
    unsigned char keys[kStages][kKeyBytes], values[kStages][kKeyBytes];
    unsigned char slots[kGroups][kSlots][kSlotBytes];
    Span spans[kStages];
    uint64_t kv_full[kStages], kv_ready[kStages], kv_empty[kStages], q_full[kGroups][kSlots], q_empty[kGroups][kSlots];
    bool unfinite[kStages][kCheckers];
    uint32_t copied[kGroups]; // one more than the slot whose copy of out may still be read, 0 for none
};

struct Maps {
    CUtensorMap q, k, v, out;
};

struct Problem {
    sa_band window; // of a sequence long enough that nothing is clamped
    int64_t num_items;
    int group, tokens, span; // heads of a token; tokens of a tile and of a span
    int reach;               // keys that a row sees beside its window's first
    float scale_log2;
};

static inline int64_t num_spans(const sinkattn_problem &problem, int span) {
    if (problem.packed) return problem.q_len / span + 2 * (problem.batch + 1);
    return problem.batch * (problem.q_len / span + 2);
}

// Tokens of a span, the same number of tiles for each group: as many as let the blocks end soonest.
static inline int choose_span(const sinkattn_problem &problem, int tokens, int workers) {
    const int least = kGroups * tokens;
    int best = least;
    int64_t best_cost = INT64_MAX;
    for (int span = least; span <= kMaxSpan; span += least) {
        const int64_t cost = sa_ceil_div(num_spans(problem, span) * problem.num_kv_heads, workers) * (span + kSpanCost);
        if (cost < best_cost) best = span;
        best_cost = sa_min(cost, best_cost);
    }
    return best;
}

__device__ __forceinline__ Span span_at(const sinkattn_fwd_args &args, const Problem &p, int64_t item) {
    const sinkattn_problem &problem = args.problem;
    Span span;
    span.kv_head = item % problem.num_kv_heads;
    const int64_t n = item / problem.num_kv_heads;
    sa_position_t within;
    if (problem.packed) {
        const auto first_span = [&](int64_t b) { return rows_before(args, b) / p.span + 2 * b; };
        span.batch = find_sequence(problem.batch, n, first_span);
        within = static_cast<sa_position_t>(n - first_span(span.batch));
    } else {
        const int64_t each = problem.q_len / p.span + 2;
        span.batch = n / each;
        within = static_cast<sa_position_t>(n % each);
    }
    span.has_sink = args.s_aux && span.batch < problem.batch;
    span.sequence = sequence_or_tail(args, span.batch);
    const sa_band band = sa_band_of(&problem.mask, span.sequence.q_len, span.sequence.k_len);
    const sa_position_t start = sa_position(&band, 0),
                        base = (start >= 0 ? start : start - p.span + 1) / p.span * p.span; // a multiple of span
    span.token = base - start + within * p.span;
    span.key = sa_window_begin(&p.window, base + within * p.span);
    span.exists = within >= 0 && span.token < span.sequence.q_len;
    return span;
}

__device__ __forceinline__ void produce(Smem &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    Ring<kStages> stages;
    Ring<kSlots> slots;
    for (int64_t item = blockIdx.x; item < p.num_items; item += gridDim.x) {
        const Span span = span_at(args, p, item);
        if (!span.exists) continue;
        const uint32_t stage = stages.place();
        barrier_wait(&smem.kv_empty[stage], stages.phase() ^ 1);
        smem.spans[stage] = span;
        barrier_arrive_expect(&smem.kv_full[stage], 2 * (p.span + kKeys) * kRowBytes);
        const int key = static_cast<int>(span.sequence.k_begin + span.key), batch = static_cast<int>(span.sequence.batch);
        tensor_load(smem.keys[stage], &maps.k, &smem.kv_full[stage], 0, static_cast<int>(span.kv_head), key, batch);
        tensor_load(smem.values[stage], &maps.v, &smem.kv_full[stage], 0, static_cast<int>(span.kv_head), key, batch);
        for (int tile = 0; tile < p.span / p.tokens; tile++) {
            const int group = tile % kGroups;
            const uint32_t slot = slots.place();
            barrier_wait(&smem.q_empty[group][slot], slots.phase() ^ 1);
            barrier_arrive_expect(&smem.q_full[group][slot], kSlotBytes);
            tensor_load(smem.slots[group][slot], &maps.q, &smem.q_full[group][slot], 0, static_cast<int>(span.kv_head * p.group),
                        static_cast<int>(span.sequence.q_begin + span.token + tile * p.tokens), batch);
            slots.n += group == kGroups - 1;
        }
        stages.n++;
    }
    barrier_wait(&smem.kv_empty[stages.place()], stages.phase() ^ 1);
    smem.spans[stages.place()].exists = false;
    barrier_arrive(&smem.kv_full[stages.place()]);
}

// The other warps of the producer's group.
template <class Element> __device__ __forceinline__ void check_values(Smem &smem, const Problem &p) {
    const int checker = threadIdx.x / 32 - 1;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.place();
        barrier_wait(&smem.kv_full[stage], stages.phase());
        if (!smem.spans[stage].exists) break;
        bool bad = zero_unfinite<Element, 32 * kCheckers>(smem.values[stage], (p.span + kKeys) * kRowBytes, threadIdx.x - 32);
        bad = __any_sync(0xffffffffu, bad);
        if (threadIdx.x % 32 == 0) smem.unfinite[stage][checker] = bad;
        async_fence();
        barrier_arrive(&smem.kv_ready[stage]);
    }
}

// The two rows of a thread's accumulators: element i of a row block belongs to row (i / 2) % 2.
struct ThreadRows {
    int group, token[2]; // heads of a token, tokens of the tile

    __device__ __forceinline__ explicit ThreadRows(int group_) : group(group_) {
        for (int i = 0; i < 2; i++) token[i] = row(i) / group;
    }

    __device__ __forceinline__ int row(int i) const { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }
    __device__ __forceinline__ int head(int i) const { return row(i) - token[i] * group; }
};

// Columns of the tile that each of the two rows sees: a row's own window, of the keys inside the sequence.
struct Columns {
    int begin[2], end[2];
    bool edge; // the tile reaches past the sequence

    __device__ __forceinline__ Columns(const ThreadRows &rows, const Span &span, int64_t first_key, int reach) {
        const int low = static_cast<int>(sa_clamp(-first_key, 0, kKeys)),
                  high = static_cast<int>(sa_clamp(span.sequence.k_len - first_key, 0, kKeys));
        edge = low > 0 || high < kKeys;
        for (int i = 0; i < 2; i++) {
            begin[i] = max(rows.token[i], low);
            end[i] = min(rows.token[i] + reach + 1, high);
        }
    }
};

struct Softmax {
    float pivot[2], sum[2]; // pivot in log2 units
};

template <class Element> __device__ __forceinline__ void qk_product(float (&s)[72], uint32_t q, uint32_t k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_shared<Element>(s, operand(q + 32 * step, 0), operand(k + 32 * step, 0), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    computed(s);
}

// All keys at once: maximum, exponentials, sum. The sink's logits s_aux take part in both.
template <class Element>
__device__ __forceinline__ Softmax softmax(uint32_t (&weights)[9][4], float (&s)[72], const Columns &seen, const Problem &p,
                                           const float (&s_aux)[2]) {
    const int column = 2 * (threadIdx.x % 4);
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 18; n++) {
        if (8 * n < p.tokens || 8 * n + 7 > p.reach || seen.edge) { // elsewhere every row sees every key
#pragma unroll
            for (int x = 0; x < 4; x++)
                if (8 * n + column + (x & 1) < seen.begin[x / 2] || 8 * n + column + (x & 1) >= seen.end[x / 2]) s[4 * n + x] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
    }
    Softmax rows;
    float from[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float key = quad_max(top[i]) * p.scale_log2, sink = s_aux[i] * kLog2e;
        rows.pivot[i] = key > sink ? key : sink; // a NaN in s_aux stays
        from[i] = rows.pivot[i] == -INFINITY ? 0.0f : rows.pivot[i];
        rows.sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 72; i += 2) {
        const int r = i / 2 & 1;
        const float x = exp2_approx(fmaf(s[i], p.scale_log2, -from[r])), y = exp2_approx(fmaf(s[i + 1], p.scale_log2, -from[r]));
        rows.sum[r] += x + y;
        weights[i / 8][i / 2 % 4] = pack_halves<Element>(x, y);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sink = s_aux[i] * kLog2e;
        const float added = sink == -INFINITY ? 0.0f : sink == rows.pivot[i] ? 1.0f : exp2_approx(sink - from[i]);
        rows.sum[i] = quad_sum(rows.sum[i]) + added;
    }
    return rows;
}

template <class Element> __device__ __forceinline__ void pv_product(float (&o)[32], const uint32_t (&weights)[9][4], uint32_t v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 9; step++)
        wgmma_registers<Element>(o, weights[step], operand(v + step * 16 * kRowBytes, kKeyBytes), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    computed(o);
}

template <class Element>
__device__ __forceinline__ void add_hidden(float (&o)[32], const sinkattn_fwd_args &args, const Span &span, int64_t first_key,
                                           const Columns &seen) {
#pragma unroll 1
    for (int j = min(seen.begin[0], seen.begin[1]); j < max(seen.end[0], seen.end[1]); j++)
        add_unfinite<Element>(o,
                              static_cast<const uint16_t *>(args.v.data) +
                                  sa_offset(&args.v, span.sequence.batch, span.sequence.k_begin + first_key + j, span.kv_head),
                              args.problem.head_dim, [&](int i) { return j >= seen.begin[i] && j < seen.end[i]; });
}

template <class Element>
__device__ __forceinline__ void stage_out(unsigned char *slot, const float (&o)[32], const Softmax &softmax, const ThreadRows &rows) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float factor = softmax.sum[i] == 0.0f ? 0.0f : 1.0f / softmax.sum[i];
        const int row = rows.row(i);
#pragma unroll
        for (int n = 0; n < 8; n++)
            *reinterpret_cast<uint32_t *>(slot + row * kRowBytes + ((n ^ (row & 7)) << 4) + 4 * (threadIdx.x % 4)) =
                pack_halves<Element>(o[4 * n + 2 * i] * factor, o[4 * n + 2 * i + 1] * factor);
    }
}

__device__ __forceinline__ void write_lse(const Softmax &softmax, const sinkattn_fwd_args &args, const Span &span, int64_t token,
                                          const ThreadRows &rows, int group, const float (&s_aux)[2]) {
    if (threadIdx.x % 4) return;
    for (int i = 0; i < 2; i++) {
        if (token + rows.token[i] < 0 || token + rows.token[i] >= span.sequence.q_len) continue;
        const float pivot =
            softmax.pivot[i] == s_aux[i] * kLog2e ? s_aux[i] : softmax.pivot[i] * kLn2; // a row without keys gets s_aux itself
        static_cast<float *>(
            args.lse)[sa_row_index(&args.problem, &span.sequence, span.kv_head * group + rows.head(i), token + rows.token[i])] =
            softmax.sum[i] == 0.0f ? -INFINITY : pivot + logf(softmax.sum[i]);
    }
}

// Rows of a tile that holds rows of no or of another sequence: by the threads, not by a copy.
__device__ __forceinline__ void write_rows(const unsigned char *slot, const sinkattn_fwd_args &args, const Span &span, int64_t token,
                                           int group) {
    auto *out = static_cast<uint16_t *>(args.out.data);
    for (int x = threadIdx.x % 128; x < kTileRows * 8; x += 128) {
        const int row = x / 8, chunk = x % 8;
        const int64_t i = token + row / group;
        if (i < 0 || i >= span.sequence.q_len || chunk * 8 >= args.problem.head_dim) continue;
        const int64_t at = sa_offset(&args.out, span.sequence.batch, span.sequence.q_begin + i, span.kv_head * group + row % group);
        *reinterpret_cast<uint4 *>(out + at + chunk * 8) =
            *reinterpret_cast<const uint4 *>(slot + row * kRowBytes + ((chunk ^ (row & 7)) << 4));
    }
}

// A slot is free again once the copy of out has read it; that wait is put off by a tile.
__device__ __forceinline__ void write_tile(Smem &smem, Ring<kSlots> slots, const sinkattn_fwd_args &args, const Maps &maps,
                                           const Span &span, int64_t token, const Problem &p, int math_group) {
    const bool leader = threadIdx.x % 128 == 0, whole = token >= 0 && token + p.tokens <= span.sequence.q_len;
    unsigned char *slot = smem.slots[math_group][slots.place()];
    async_fence();
    bar_sync<128>(1 + math_group);
    if (!whole) {
        write_rows(slot, args, span, token, p.group);
        async_fence();
        bar_sync<128>(1 + math_group);
    }
    if (!leader) return;
    uint64_t *free = smem.q_empty[math_group];
    if (whole) {
        tensor_store(&maps.out, slot, 0, static_cast<int>(span.kv_head * p.group), static_cast<int>(span.sequence.q_begin + token),
                     static_cast<int>(span.sequence.batch));
        store_commit();
        store_wait_read<1>();
    } else {
        store_wait_read<0>();
        barrier_arrive(&free[slots.place()]);
    }
    const uint32_t copied = smem.copied[math_group];
    if (copied) barrier_arrive(&free[copied - 1]);
    smem.copied[math_group] = whole ? slots.place() + 1 : 0;
}

template <class Element>
__device__ __forceinline__ void compute(Smem &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    const int math_group = warp_uniform(threadIdx.x / 128) - 1;
    const ThreadRows rows(p.group);
    Ring<kSlots> slots;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.place();
        barrier_wait(&smem.kv_full[stage], stages.phase());
        const Span &span = smem.spans[stage];
        if (!span.exists) break;
        float s_aux[2];
        for (int i = 0; i < 2; i++)
            s_aux[i] = span.has_sink
                           ? static_cast<float>(sa_load(args.s_aux, args.problem.s_aux_dtype, span.kv_head * p.group + rows.head(i)))
                           : -INFINITY;
        barrier_wait(&smem.kv_ready[stage], stages.phase());
        const bool hidden = smem.unfinite[stage][0] || smem.unfinite[stage][1] || smem.unfinite[stage][2];
        for (int tile = math_group; tile < p.span / p.tokens; tile += kGroups, slots.n++) {
            const int64_t token = span.token + tile * p.tokens, first_key = span.key + tile * p.tokens;
            unsigned char *slot = smem.slots[math_group][slots.place()];
            const uint32_t first_row = tile * p.tokens * kRowBytes;
            float s[72], o[32];
            uint32_t weights[9][4];
            barrier_wait(&smem.q_full[math_group][slots.place()], slots.phase());
            qk_product<Element>(s, shared_address(slot), shared_address(smem.keys[stage]) + first_row);
            const Columns seen(rows, span, first_key, p.reach);
            const Softmax result = softmax<Element>(weights, s, seen, p, s_aux);
            pv_product<Element>(o, weights, shared_address(smem.values[stage]) + first_row);
            if (hidden) add_hidden<Element>(o, args, span, first_key, seen);
            stage_out<Element>(slot, o, result, rows);
            write_lse(result, args, span, token, rows, p.group, s_aux);
            write_tile(smem, slots, args, maps, span, token, p, math_group);
        }
        if (threadIdx.x % 128 == 0) barrier_arrive(&smem.kv_empty[stage]);
    }
    if (threadIdx.x % 128 == 0) store_wait();
}

template <class Element>
__global__ __launch_bounds__(kThreads, 1) void window_kernel(const __grid_constant__ sinkattn_fwd_args args,
                                                             const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                                                             unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem &smem = *reinterpret_cast<Smem *>(shared);
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.q, &maps.k, &maps.v, &maps.out}) tensor_map_prefetch(map);
        for (int i = 0; i < kStages; i++) {
            barrier_init(&smem.kv_full[i], 1);
            barrier_init(&smem.kv_ready[i], 32 * kCheckers);
            barrier_init(&smem.kv_empty[i], kGroups);
        }
        for (int g = 0; g < kGroups; g++) {
            smem.copied[g] = 0;
            for (int i = 0; i < kSlots; i++) {
                barrier_init(&smem.q_full[g][i], 1);
                barrier_init(&smem.q_empty[g][i], 1);
            }
        }
        barrier_init_fence();
    }
    if (blockIdx.x == 0) check_lengths(args, error_word);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<40>();
        if (threadIdx.x == 0) produce(smem, args, maps, p);
        if (threadIdx.x >= 32) check_values<Element>(smem, p);
    } else {
        registers_up<152>();
        compute<Element>(smem, args, maps, p);
    }
#else
    __trap();
#endif
}

template <class Element> sinkattn_status launch(const sinkattn_fwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.problem;
    Problem p;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = kTileRows / p.group;
    p.window = sa_band_of(&problem.mask, kKeys, kKeys);
    p.reach = static_cast<int>(sa_window_size(&p.window)) - 1;
    p.span = choose_span(problem, p.tokens, plan.workers);
    p.num_items = num_spans(problem, p.span) * problem.num_kv_heads;
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    Encode encode = nullptr;
    unsigned *error_word;
    Maps maps;
    sinkattn_status status = find_encode(&encode);
    if (!status.code) status = sa_cuda_error_word(&error_word);
    if (!status.code) status = encode_map(encode, &maps.q, problem, args.q, problem.q_len, problem.num_q_heads, p.tokens, p.group, "q");
    if (!status.code) status = encode_map(encode, &maps.k, problem, args.k, problem.k_len, problem.num_kv_heads, p.span + kKeys, 1, "k");
    if (!status.code) status = encode_map(encode, &maps.v, problem, args.v, problem.k_len, problem.num_kv_heads, p.span + kKeys, 1, "v");
    if (!status.code)
        status = encode_map(encode, &maps.out, problem, args.out, problem.q_len, problem.num_q_heads, p.tokens, p.group, "out");
    if (!status.code) status = allow_shared<window_kernel<Element>>(sizeof(Smem));
    if (status.code) return status;
    const unsigned blocks = static_cast<unsigned>(sa_min(p.num_items, plan.workers));
    window_kernel<Element><<<blocks, kThreads, sizeof(Smem), static_cast<cudaStream_t>(context.stream)>>>(args, maps, p, error_word);
    return sa_cuda_status("sa_fwd_cuda_sm90_window", cudaGetLastError());
}

} // namespace
} // namespace sa

extern "C" sinkattn_status sa_fwd_cuda_sm90_window(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &fwd = *static_cast<const sinkattn_fwd_args *>(args);
    if (fwd.problem.dtype == SINKATTN_BF16) return sa::launch<sa::Bf16>(fwd, *plan, *context);
    return sa::launch<sa::Fp16>(fwd, *plan, *context);
}
