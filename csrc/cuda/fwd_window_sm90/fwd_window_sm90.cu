// SPDX-License-Identifier: Apache-2.0
//
// Forward for windows that fit one key tile, head_dim up to 64, on sm_90.
//
//     key warp       K, V of a span             K, V of the next span ..
//     query warp     Q tile | Q tile | Q tile ..
//     checker warp   NaN and infinity in V, s_aux of the heads
//     math group g   QK wgmma, softmax over all keys at once, PV wgmma, out through Q's slot      (four groups, each its own tiles)
//
// A tile is 64 rows, kTokens tokens x the heads of a group, and sees at most 144 keys: one pass, nothing is rescaled. The window begins
// at its exact token, since a wgmma operand may start at any row. K and V are read once a span of at most 96 tokens, with the keys before
// it. Tiles lie at multiples of kTokens positions: a row's bits are its own.
//
// Shared memory: two stages of K and V, 240 keys each, 120 KiB; twelve slots of 8 KiB for Q and out. Registers: S 72, P 36, O 32. A block
// of 640 threads begins with 96 each; setmaxnreg moves 32 of the loaders' group to the math.

#include "cuda/fwd_window_sm90/loads.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::fwd_window_sm90 {
namespace {

// The i-th of a thread's two rows of an accumulator, its token and head in the tile.
struct ThreadRow {
    int row, token, head;

    __device__ __forceinline__ ThreadRow(const Problem &p, int i) {
        unsigned thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread)); // read anew wherever it is needed: there is no register to keep it in
        thread %= 128;
        row = warpgroup_row(thread, i);
        token = row >> p.group_log2;
        head = row & (p.group - 1);
    }
};

// Columns of the tile that each of the two rows sees: a row's own window, of the keys inside the sequence, which are [low, high).
struct Columns {
    int begin[2], end[2];
    bool edge; // the sequence's edge hides more columns than in an interior tile

    __device__ __forceinline__ Columns(int low, int high, const Problem &p) {
        low = min(max(low, 0), kKeys);
        high = min(max(high, 0), kKeys);
        edge = low > 0 || high < kKeys || p.tokens > 16 || p.reach < 119;
        for (int i = 0; i < 2; i++) {
            const int token = ThreadRow(p, i).token;
            begin[i] = max(token, low);
            end[i] = min(token + p.reach + 1, high);
        }
    }
};

struct Softmax {
    float pivot[2], sum[2]; // pivot in log2 units
};

// In two parts, 80 keys and 64: ptxas has 96 registers for what wgmma holds, of which an instruction of 144 keys leaves too few.
template <class Element> __device__ __forceinline__ void qk_product(float (&s)[72], uint32_t q, uint32_t k) {
    float (&first)[40] = *reinterpret_cast<float (*)[40]>(s), (&second)[32] = *reinterpret_cast<float (*)[32]>(s + 40);
    const uint64_t left = operand(q, 0), right = operand(k, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_shared<Element>(first, operand_at(left, 32 * step), operand_at(right, 32 * step), step > 0);
#pragma unroll
    for (int step = 0; step < 4; step++)
        wgmma_shared<Element>(second, operand_at(left, 32 * step), operand_at(right, 80 * kRowBytes + 32 * step), step > 0);
    wgmma_commit();
}

// Scores of hidden keys to -inf. Written out for all columns only where more than those of an inner tile may be hidden.
__device__ __forceinline__ void mask(float (&s)[72], const Columns &seen, const Problem &p) {
    const int column = fragment_column();
    const int begin[2] = {seen.begin[0] - column, seen.begin[1] - column}, end[2] = {seen.end[0] - column, seen.end[1] - column};
    const auto hide_first = [&](int n) {
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i++)
            if (element_column(i) < begin[element_row(i)]) s[i] = -INFINITY;
    };
    const auto hide_last = [&](int n) {
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i++)
            if (element_column(i) >= end[element_row(i)]) s[i] = -INFINITY;
    };
    if (seen.edge) {
#pragma unroll
        for (int n = 0; n < 18; n++) {
            hide_first(n);
            hide_last(n);
        }
        return;
    }
    hide_first(0);
    if (p.tokens > 8) hide_first(1);
    if (p.reach < 127) hide_last(15);
    hide_last(16);
    hide_last(17);
}

// Scores become exp2(s - pivot); the sums are of this thread's columns.
template <class Element>
__device__ __forceinline__ void exponentials(uint32_t (&weights)[9][4], Softmax &rows, const float (&s)[72], const Problem &p) {
    float from[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        from[i] = rows.pivot[i] == -INFINITY ? 0.0f : rows.pivot[i];
        rows.sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 72; i += 2) {
        const int r = element_row(i);
        const float x = exp2_approx(fmaf(s[i], p.scale_log2, -from[r])), y = exp2_approx(fmaf(s[i + 1], p.scale_log2, -from[r]));
        rows.sum[r] += x + y;
        weights[i / 8][i / 2 % 4] = pack_halves<Element>(x, y);
    }
}

// Weights of all keys, and this thread's part of their sums.
template <class Element> __device__ __forceinline__ Softmax softmax(uint32_t (&weights)[9][4], const float (&s)[72], const Problem &p) {
    Softmax rows;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 18; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
#pragma unroll
    for (int i = 0; i < 2; i++) rows.pivot[i] = quad_max(top[i]) * p.scale_log2;
    exponentials<Element>(weights, rows, s, p);
    return rows;
}

// What each row is multiplied by. Of four lanes the first two each write the LSE of one row. Runs while P V is in flight.
__device__ __forceinline__ void finish_softmax(float (&factor)[2], Softmax &rows, const sinkattn_fwd_args &args, const Span &span,
                                               int ahead, const Problem &p, const float *s_aux) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.sum[i] = quad_sum(rows.sum[i]);
        factor[i] = RowEnd(rows.pivot[i], rows.sum[i], s_aux[ThreadRow(p, i).head]).factor();
    }
    const bool second = threadIdx.x % 4 == 1;
    const ThreadRow row(p, second);
    const int token = ahead + row.token;
    if (threadIdx.x % 4 >= 2 || token < span.low_token || token >= span.high_token) return;
    const float pivot = second ? rows.pivot[1] : rows.pivot[0], sum = second ? rows.sum[1] : rows.sum[0];
    const int64_t at = span.lse + row.head * args.problem.q_len + token;
    static_cast<float *>(args.lse)[at] = RowEnd(pivot, sum, s_aux[row.head]).lse();
    if (args.lse_raw) static_cast<float *>(args.lse_raw)[at] = raw_lse(pivot, sum);
}

template <class Element> __device__ __forceinline__ void pv_product(float (&o)[32], const uint32_t (&weights)[9][4], uint32_t v) {
    const uint64_t right = operand(v, kKeyBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 9; step++) wgmma_registers<Element>(o, weights[step], operand_at(right, step * 16 * kRowBytes), step > 0);
    wgmma_commit();
}

template <class Element>
__device__ __forceinline__ void add_hidden(float (&o)[32], const sinkattn_fwd_args &args, const Span &span, sa_position_t first_key,
                                           const Columns &seen) {
#pragma unroll 1
    for (int j = min(seen.begin[0], seen.begin[1]); j < max(seen.end[0], seen.end[1]); j++)
        add_nonfinite<Element>(o,
                               static_cast<const uint16_t *>(args.v.data) +
                                   sa_offset(&args.v, span.sequence.batch, span.sequence.k_begin + first_key + j, span.kv_head),
                               args.problem.head_dim, [&](int i) { return j >= seen.begin[i] && j < seen.end[i]; });
}

template <class Element> __device__ __forceinline__ void stage_out(unsigned char *slot, const float (&o)[32], const float (&factor)[2]) {
    const uint32_t to = shared_address(slot) + swizzled(store_row(threadIdx.x), store_chunk(threadIdx.x));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[i] = pack_halves<Element>(o[4 * n + 2 * i] * factor[i & 1], o[4 * n + 2 * i + 1] * factor[i & 1]);
        stmatrix_x4(pairs_on(to, n / 2), packed);
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
        auto *to = reinterpret_cast<uint4 *>(out + at + chunk * 8);
        *to = *reinterpret_cast<const uint4 *>(slot + swizzled(row, chunk));
    }
}

// Sends out from its slot. A slot is released one tile later, when its copy, or the threads, have read it.
__device__ __forceinline__ void write_tile(Smem &smem, Ring<kSlots> slots, const sinkattn_fwd_args &args, const Maps &maps,
                                           const Span &span, int ahead, const Problem &p, int math_group) {
    const bool whole = ahead >= span.low_token && ahead + p.tokens <= span.high_token;
    const sa_position_t token = span.token + ahead;
    unsigned char *slot = smem.slots[math_group][slots.stage()];
    async_fence();
    bar_sync<128>(kMathBarrier + math_group);
    if (!whole) write_rows(slot, args, span, token, p.group);
    if (threadIdx.x % 128) return;
    if (whole)
        tensor_store(&maps.out, slot, 0, static_cast<int>(span.kv_head * p.group), static_cast<int>(span.sequence.q_begin + token),
                     static_cast<int>(span.sequence.batch));
    store_commit();
    store_wait_read<1>();
    if (slots.n) smem.q_empty[math_group].release({slots.n - 1});
}

template <class Element>
__device__ __forceinline__ void compute(Smem &smem, const sinkattn_fwd_args &args, const Maps &maps, const Problem &p) {
    const int math_group = warp_uniform(threadIdx.x / 128);
    int tile = math_group;
    Ring<kSlots> slots;
    for (Ring<kStages> stages;; stages.n++) {
        const uint32_t stage = stages.stage();
        smem.kv_full.wait(stages);
        const Span &span = smem.spans[stage];
        if (!span.exists) break;
        for (; tile < span.num_tiles; tile += kGroups, slots.n++) {
            const int ahead = (span.first_tile + tile) * p.tokens; // of the span's first token
            unsigned char *slot = smem.slots[math_group][slots.stage()];
            const uint32_t first_row = ahead * kRowBytes;
            float s[72], o[32], factor[2];
            uint32_t weights[9][4];
            smem.q_full[math_group].wait(slots);
            qk_product<Element>(s, shared_address(slot), shared_address(smem.keys[stage]) + first_row);
            const Columns seen(span.low_key - ahead, span.high_key - ahead, p);
            smem.kv_ready.wait(stages);
            wgmma_wait<0>();
            computed(s);
            mask(s, seen, p);
            Softmax result = softmax<Element>(weights, s, p);
            pv_product<Element>(o, weights, shared_address(smem.values[stage]) + first_row);
            finish_softmax(factor, result, args, span, ahead, p, smem.s_aux[stage]);
            wgmma_wait<0>();
            computed(o);
            if (smem.nonfinite[stage])
                add_hidden<Element>(o, args, span, span.key + ahead, Columns(span.low_key - ahead, span.high_key - ahead, p));
            stage_out<Element>(slot, o, factor);
            write_tile(smem, slots, args, maps, span, ahead, p, math_group);
        }
        tile -= span.num_tiles;
        smem.kv_empty.release(stages);
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
            smem.planned[i].init(1);
            smem.kv_full[i].init(1);
            smem.kv_ready[i].init(32);
            smem.kv_empty[i].init(kMathThreads + 32);
        }
        for (int g = 0; g < kGroups; g++)
            for (int i = 0; i < kSlots; i++) {
                smem.q_full[g][i].init(1);
                smem.q_empty[g][i].init(1);
            }
        barrier_init_fence();
    }
    if (blockIdx.x == 0) check_lengths(args, error_word);
    __syncthreads();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp < kMathThreads / 32) {
        registers_up<kMathRegisters>();
        compute<Element>(smem, args, maps, p);
        return;
    }
    registers_down<kOtherRegisters>();
    if (warp == kMathThreads / 32) load_keys(smem, args, maps, p);
    if (warp == kMathThreads / 32 + 1) load_queries(smem, maps, p);
    if (warp == kMathThreads / 32 + 2) check_values<Element>(smem, args, p);
#else
    __trap();
#endif
}

template <class Element> sinkattn_status launch(const sinkattn_fwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.problem;
    Problem p = {};
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.tokens = kTileRows / p.group;
    while (1 << p.group_log2 < p.group) p.group_log2++;
    p.window = sa_band_of(&problem.mask, kKeys, kKeys);
    p.reach = static_cast<int>(sa_window_size(&p.window)) - 1;
    p.span = choose_span(problem, p.tokens, plan.workers);
    const int64_t spans = num_spans(problem, p.span);
    if (spans > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld spans of rows; a launch holds at most 2^31", static_cast<long long>(spans));
    const auto heads = static_cast<unsigned>(problem.num_kv_heads), blocks = static_cast<unsigned>(sa_min(spans * heads, plan.workers));
    p.num_spans = static_cast<unsigned>(spans);
    p.step = blocks / heads;
    p.head_step = blocks % heads;
    p.spans_a_batch = problem.packed ? 0 : static_cast<unsigned>(problem.q_len / p.span + 2);
    p.scale_log2 = static_cast<float>(sa_softmax_scale(&problem)) * kLog2e;
    unsigned *error_word;
    Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_rows(&maps.q, problem, args.q, p.tokens, p.group, "q"));
    SA_TRY(map_keys(&maps.k, problem, args.k, p.span + kKeys, "k"));
    SA_TRY(map_keys(&maps.v, problem, args.v, p.span + kKeys, "v"));
    SA_TRY(map_rows(&maps.out, problem, args.out, p.tokens, p.group, "out"));
    return launch_blocks<window_kernel<Element>>("sa_fwd_cuda_sm90_window", blocks, kThreads, sizeof(Smem), context.stream, args, maps, p,
                                                 error_word);
}

} // namespace

extern "C" sinkattn_status sa_fwd_cuda_sm90_window(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &fwd = *static_cast<const sinkattn_fwd_args *>(args);
    if (fwd.problem.dtype == SINKATTN_BF16) return launch<Bf16>(fwd, *plan, *context);
    return launch<Fp16>(fwd, *plan, *context);
}

} // namespace sa::fwd_window_sm90
