// SPDX-License-Identifier: Apache-2.0
//
// Positional sink tokens in the windowed backward. Every row sees the sequence's first keys, so their dK and dV are sums over all rows. The
// row warpgroup computes their pairs by mma.sync, beside dQ: each warp finds S, dP, P and dS of 16 rows; then, with P and dS of all 64 rows
// from shared memory, it sums 16 columns of dK^T and dV^T in registers, over the steps of a tile of rows. A tile's sums go to the
// workspace, and the second launch adds up those of a sequence. Tiles lie at multiples of 64 positions, and the order in which they are
// added depends on their number alone: so no bit depends on where a share ends or what else is in the batch.
//
// The math warpgroups skip pairs with sink tokens. Values of K and V that are not finite are zeroed here as they are loaded, in both
// launches, and NaN put where a row sees them.
#pragma once

#include "core/workspace.h"
#include "cuda/bwd_window_sm90/smem.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/mma.cuh"

namespace sa::bwd_window_sm90 {

constexpr int kPartial = SA_BWD_WINDOW_PARTIAL; // of one sink token: dK, then dV
constexpr int kSlices = kThreads / 32;
static_assert(kPartial == 2 * 64, "head_dim is at most 64");
static_assert(kSinkKeys == 16, "two columns of accumulators, one k16 step");

// Partial sums in the workspace, by sa_bwd_window_layout.

__device__ __forceinline__ int64_t first_slot(const sinkattn_problem &problem, const sa_sequence &sequence, int64_t b) {
    if (problem.packed) return sa_tile_of(static_cast<sa_position_t>(sequence.q_begin), kKeys) + 2 * b;
    return b * (sa_tile_of(static_cast<sa_position_t>(problem.q_len), kKeys) + 2);
}

__device__ __forceinline__ float *partial_at(const Problem &p, int64_t kv_head, int64_t slot, int64_t token) {
    return p.partials + ((kv_head * p.row_tiles + slot) * p.num_sink_tokens + token) * kPartial;
}

// Beside next_tile, which has advanced the walk.
__device__ __forceinline__ void describe_sink_step(Smem &smem, int stage, const sinkattn_fwd_args &args, const Problem &p) {
    const ShareWalk &walk = smem.walk;
    if (!(smem.steps[stage].flags & kExists)) return;
    const sa_sequence &sequence = walk.sequence;
    SinkStep &step = smem.sink_steps[stage];
    step.position = kKeys * walk.tile;
    step.num_keys = static_cast<int>(sa_min(sequence.k_len, p.num_sink_tokens));
    const int64_t slot = first_slot(args.problem, sequence, walk.index) + walk.tile - first_row_tile(sequence);
    const Step &rows = smem.steps[stage];
    step.slot = rows.flags & kOwnsRows && rows.begin < rows.end && walk.tile >= 0 && sequence.k_len > 0 ? static_cast<int>(slot) : -1;
    step.first_key = walk.tile == walk.begin ? static_cast<int>(sequence.k_begin) : -1;
}

__device__ __forceinline__ void copy_sink_step(Smem &smem, uint32_t n) {
    SinkStep &step = smem.sink_steps[n % kStages];
    step = smem.sink_steps[(n - 1) % kStages];
    step.first_key = -1;
}

// Of P (part 0) and dS (part 1) of the step, rows of 64 bytes: four chunks so placed that eight rows meet no bank twice.
__device__ __forceinline__ int staged_at(int row, int part, int chunk) { return row * 64 + (((2 * part + chunk) ^ (row / 2 & 3)) << 4); }

template <class C> struct SinkTokens {
    using Element = typename C::Element;
    static constexpr int kBlocks = C::kSinkTokens > 8 ? 2 : 1; // of 8 tokens

    float dk[4 * kBlocks] = {}, dv[4 * kBlocks] = {}; // of a tile: 16 columns of head_dim in the rows, sink tokens in the columns
    float terms = 0.0f;                               // p_sink P dP of the step's part of the heads; the thread's two rows are of one head

    // Loads K and V by all threads.
    __device__ __forceinline__ void load(SinkSmem &smem, const sinkattn_fwd_args &args, const Step &step, const SinkStep &sink) {
        const int thread = pinned(threadIdx.x), key = thread / 8, chunk = thread % 8;
        const bool real = key < sink.num_keys && 8 * chunk < args.problem.head_dim;
        uint32_t bad = 0;
        for (int i = 0; i < 2; i++) {
            const sinkattn_tensor &tensor = i ? args.v : args.k;
            unsigned char *to = (i ? smem.sink_v : smem.sink_k) + swizzled(key, chunk);
            uint4 x = {};
            if (real)
                x = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(tensor.data) +
                                                     sa_offset(&tensor, step.batch, sink.first_key + key, step.kv_head) + 8 * chunk);
            *reinterpret_cast<uint4 *>(to) = x;
            if (any_nonfinite<Element>(x.x) || any_nonfinite<Element>(x.y) || any_nonfinite<Element>(x.z) || any_nonfinite<Element>(x.w)) {
                zero_chunk<Element>(to);
                bad |= 1u << i;
            }
        }
        for (int distance = 1; distance < 8; distance *= 2) bad |= __shfl_xor_sync(0xffffffffu, bad, distance);
        if (chunk == 0) smem.bad_sinks[key] = bad;
        if (bad) smem.any_bad_sinks = 1;
        async_fence();
        bar_sync<128>(kRowBarrier);
    }

    // Where P and dS are staged: where the second launch alone keeps what it found, or, in that one, over out, read for delta.
    static __device__ __forceinline__ uint32_t stage_address(const Smem &smem, uint32_t n) {
        static_assert(sizeof(smem.bad_rows) + sizeof(smem.bad_dout) + sizeof(smem.bad_keys) == kRows * 64, "P and dS of a step");
        return shared_address(C::kHide ? reinterpret_cast<const void *>(smem.out[n % kStages]) : smem.bad_rows);
    }

    // How many sink tokens the row sees: past the first tile all.
    static __device__ __forceinline__ int num_seen(const Smem &smem, int stage, int row) {
        const SinkStep &sink = smem.sink_steps[stage];
        return sink.position > 0 ? sink.num_keys : min(sink.num_keys, smem.token[stage][row] + 1);
    }

    // Columns 8 n to 8 n + 7 of an accumulator.
    template <int kLength> static __device__ __forceinline__ float (&columns(float (&d)[kLength], int n))[4] {
        return *reinterpret_cast<float (*)[4]>(d + 4 * n);
    }

    // s += rows keys^T, of 16 rows.
    static __device__ __forceinline__ void score(float (&s)[kBlocks][4], uint32_t rows, uint32_t keys, int lane) {
        uint32_t left[4], right[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            ldmatrix_x4(left, rows + swizzled(left_row(lane), 2 * t + left_chunk(lane)));
            if constexpr (kBlocks == 1) {
                if (t % 2 == 0) ldmatrix_x4(right, keys + swizzled(lane % 8, 2 * t + lane / 8)); // of two steps
                mma_m16n8k16<Element>(s[0], left, right[t % 2 * 2], right[t % 2 * 2 + 1]);
            } else {
                ldmatrix_x4(right, keys + swizzled(right_row(lane), 2 * t + right_chunk(lane)));
                mma_m16n8k16<Element>(s[0], left, right[0], right[1]);
                mma_m16n8k16<Element>(s[kBlocks - 1], left, right[2], right[3]);
            }
        }
    }

    // What the lane gives stmatrix or ldmatrix for P and dS of 16 rows. With 16 sink tokens `part` 0 is P, 1 dS; with 8 one access has
    // both.
    static __device__ __forceinline__ uint32_t pairs_address(const Smem &smem, uint32_t n, int rows, int lane, int part) {
        const int row = 16 * rows + left_row(lane), chunk = left_chunk(lane);
        return stage_address(smem, n) + (kBlocks == 1 ? staged_at(row, chunk, 0) : staged_at(row, part, chunk));
    }

    // Stages P and dS of 16 rows.
    static __device__ __forceinline__ void stage_pairs(
            const Smem &smem, uint32_t n, const uint32_t (&weights)[4], const uint32_t (&gradients)[4], int rows, int lane) {
        if constexpr (kBlocks == 1) {
            const uint32_t both[4] = {weights[0], weights[1], gradients[0], gradients[1]};
            stmatrix_x4(pairs_address(smem, n, rows, lane, 0), both);
        } else {
            stmatrix_x4(pairs_address(smem, n, rows, lane, 0), weights);
            stmatrix_x4(pairs_address(smem, n, rows, lane, 1), gradients);
        }
    }

    // dS of the warp's rows, staged before, as the left operand of dQ.
    static __device__ __forceinline__ void read_pairs(uint32_t (&gradients)[4], const Smem &smem, uint32_t n) {
        const int thread = pinned(threadIdx.x);
        uint32_t x[4];
        ldmatrix_x4(x, pairs_address(smem, n, thread / 32, thread % 32, 1));
#pragma unroll
        for (int i = 0; i < 4; i++) gradients[i] = kBlocks == 2 ? x[i] : i < 2 ? x[i + 2] : 0;
    }

    // S, dP, P and dS of step n, staged, by each warp for its 16 rows. False if the rows see no sink token; then P and dS are zeros.
    __device__ __forceinline__ bool begin_step(SinkSmem &smem, const sinkattn_bwd_args &args, const Problem &p, uint32_t n) {
        const int stage = n % kStages, rows = pinned(threadIdx.x / 32), lane = pinned(threadIdx.x % 32);
        smem.step_ready.wait({n}); // lse, bias and token are another warp's
        const SinkStep &sink = smem.sink_steps[stage];
        if (sink.first_key >= 0) load(smem, args.fwd, smem.steps[stage], sink);
        const bool sees = __any_sync(0xffffffffu, sink.slot >= 0);
        uint32_t weights[4] = {}, gradients[4] = {};
        if (sees) find_pairs(weights, gradients, smem, p, stage, rows, lane);
        stage_pairs(smem, n, weights, gradients, rows, lane);
        bar_sync<128>(kRowBarrier);
        return sees;
    }

    // P and dS of 16 rows.
    __device__ __forceinline__ void find_pairs(
            uint32_t (&weights)[4], uint32_t (&gradients)[4], const SinkSmem &smem, const Problem &p, int stage, int rows, int lane) {
        const bool any_bad = C::kHide || smem.any_bad_sinks;
        float s[kBlocks][4] = {}, dp[kBlocks][4] = {};
        score(s, shared_address(smem.q[stage]) + 16 * rows * kRowBytes, shared_address(smem.sink_k), lane);
        score(dp, shared_address(smem.dout[stage]) + 16 * rows * kRowBytes, shared_address(smem.sink_v), lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * rows + fragment_row(lane, i), seen = num_seen(smem, stage, row);
            const float lse = smem.lse[stage][row];
            const float2 bias = smem.bias[stage][row]; // g - delta, p_sink
#pragma unroll
            for (int block = 0; block < kBlocks; block++) {
                float weight[2], ds[2];
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    const int key = 8 * block + fragment_column(lane) + x;
                    const bool sees = key < seen;
                    weight[x] = sees ? exp2_approx(fmaf(s[block][2 * i + x], p.scale_log2, -lse)) : 0.0f;
                    float term = sees ? weight[x] * dp[block][2 * i + x] : 0.0f;
                    ds[x] = sees ? fmaf(weight[x], bias.x, term) : 0.0f;
                    if (any_bad) {
                        const uint32_t bad = smem.bad_sinks[key] | (C::kHide ? smem.bad_rows[stage][row] : 0);
                        if (sees && bad) term = ds[x] = NAN;
                        if (sees && bad & 1) weight[x] = NAN;
                    }
                    if (C::kSums) terms = fmaf(bias.y, term, terms);
                }
                weights[2 * block + i] = pack_halves<Element>(weight[0], weight[1]);
                gradients[2 * block + i] = pack_halves<Element>(ds[0], ds[1]);
            }
        }
    }

    // dV^T += dO^T P and dK^T += Q^T dS over rows 16 kBegin to 16 kEnd - 1 of step n.
    template <int kBegin, int kEnd> __device__ __forceinline__ void add_rows(const Smem &smem, uint32_t n) {
        const int stage = n % kStages, lane = pinned(threadIdx.x % 32), warp = pinned(threadIdx.x / 32);
        const uint32_t from = stage_address(smem, n);
#pragma unroll
        for (int t = kBegin; t < kEnd; t++) {
            uint32_t left[4], right[4];
            const int at = swizzled(16 * t + right_row(lane), 2 * warp + right_chunk(lane)), row = 16 * t + left_row(lane);
            ldmatrix_x4_trans(left, shared_address(smem.dout[stage]) + at);
            ldmatrix_x4_trans(right, from + (kBlocks == 1 ? staged_at(row, left_chunk(lane), 0) : staged_at(row, 0, left_chunk(lane))));
            mma_m16n8k16<Element>(columns(dv, 0), left, right[0], right[1]);
            if (kBlocks == 2) mma_m16n8k16<Element>(columns(dv, kBlocks - 1), left, right[2], right[3]);
            ldmatrix_x4_trans(left, shared_address(smem.q[stage]) + at);
            if (kBlocks == 2) ldmatrix_x4_trans(right, from + staged_at(row, 1, left_chunk(lane)));
            mma_m16n8k16<Element>(columns(dk, 0), left, right[kBlocks == 1 ? 2 : 0], right[kBlocks == 1 ? 3 : 1]);
            if (kBlocks == 2) mma_m16n8k16<Element>(columns(dk, kBlocks - 1), left, right[2], right[3]);
        }
    }

    // Parts 0 and 1 add the step's rows; part 2, where they see sink tokens, passes the sums of a tile that ends to the workspace.
    template <int kPart> __device__ __forceinline__ void end_step(Smem &smem, const Problem &p, uint32_t n) {
        const int stage = n % kStages;
        if constexpr (kPart == 0) {
            // The second launch has no registers for sums between steps: they stay in the workspace.
            if (C::kHide && !(smem.steps[stage].flags & kTileBegin)) read_partials(smem, p, stage);
            add_rows<0, 2>(smem, n);
        } else if constexpr (kPart == 1) {
            add_rows<2, 4>(smem, n);
        } else {
            if (C::kHide) {
                mark_values(smem, stage);
                bar_sync<128>(kRowBarrier); // dQ replaces P and dS
            }
            if (C::kHide || smem.steps[stage].flags & kTileEnd) write_partials(smem, p, stage);
        }
    }

    // Puts NaN into dV where a row that sees the key had a value of dO that is not finite, zeroed for the product, in that column.
    __device__ __forceinline__ void mark_values(const Smem &smem, int stage) {
        const int thread = pinned(threadIdx.x);
#pragma unroll 1
        for (int row = 0; row < kRows; row++) {
            const uint64_t bad = smem.bad_dout[stage][row][0] | static_cast<uint64_t>(smem.bad_dout[stage][row][1]) << 32;
            if (!bad) continue;
            const int seen = num_seen(smem, stage, row);
#pragma unroll
            for (int i = 0; i < 4 * kBlocks; i++)
                if (bad >> warpgroup_row(thread, element_row(i)) & 1 && fragment_column(thread) + element_column(i) < seen) dv[i] = NAN;
        }
    }

    __device__ __forceinline__ void read_partials(const Smem &smem, const Problem &p, int stage) {
        const float *from = partial_at(p, smem.steps[stage].kv_head, smem.sink_steps[stage].slot, 0);
        const int thread = pinned(threadIdx.x), first = fragment_column(thread);
#pragma unroll
        for (int i = 0; i < 4 * kBlocks; i++) {
            const int token = first + element_column(i), at = token * kPartial + warpgroup_row(thread, element_row(i));
            if (token >= p.num_sink_tokens) continue;
            dk[i] = from[at];
            dv[i] = from[at + 64];
        }
    }

    __device__ __forceinline__ void write_partials(Smem &smem, const Problem &p, int stage) {
        float *to = partial_at(p, smem.steps[stage].kv_head, smem.sink_steps[stage].slot, 0);
        const int thread = pinned(threadIdx.x), first = fragment_column(thread);
        float nan = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * kBlocks; i++) {
            const int token = first + element_column(i), at = token * kPartial + warpgroup_row(thread, element_row(i));
            nan = fmaf(dk[i], 0.0f, fmaf(dv[i], 0.0f, nan));
            if (token < p.num_sink_tokens) {
                to[at] = dk[i];
                to[at + 64] = dv[i];
            }
            dk[i] = dv[i] = 0.0f;
        }
        if (!C::kHide && nan != 0.0f) smem.nonfinite = 1;
    }

    // Adds the lanes' terms to this warp's part of ds_aux, at the end of the step's part of the heads. No other thread adds to the same
    // sums.
    __device__ __forceinline__ void close_sums(const Smem &smem, const Problem &p, uint32_t n) {
        const Step &step = smem.steps[n % kStages];
        if (!(step.flags & kHeadsEnd)) return;
        const int lane = pinned(threadIdx.x % 32), warp = pinned(threadIdx.x / 32), heads = p.heads();
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < 4 || distance >= 4 * heads) terms += __shfl_xor_sync(0xffffffffu, terms, distance);
        const int head = fragment_row(lane, 0);
        if (fragment_column(lane) == 0 && head < heads)
            atomicAdd(&p.sums[(static_cast<int64_t>(step.head + head) * gridDim.x + blockIdx.x) * C::kParts + kWarps + warp], -terms);
        terms = 0.0f;
    }
};

constexpr int kTaskKeys = 2; // sink tokens of a task

static inline int64_t num_sink_tasks(const sinkattn_problem &problem) {
    return problem.batch * problem.num_kv_heads * sa_ceil_div(problem.mask.num_sink_tokens, kTaskKeys);
}

// dK and dV of up to two sink tokens of one sequence and kv head. Warp i adds tiles i, i + kSlices, .., a lane four columns of a token;
// then the warps' sums are added in order.
template <class Element> __device__ __forceinline__ void add_sink_partials(const sinkattn_bwd_args &args, const Problem &p, unsigned task) {
    extern __shared__ __align__(1024) unsigned char shared[];
    auto *room = reinterpret_cast<float4 *>(shared); // [kSlices][kTaskKeys][32]
    const sinkattn_problem &problem = args.fwd.problem;
    const unsigned tasks = (p.num_sink_tokens + kTaskKeys - 1) / kTaskKeys, heads = static_cast<unsigned>(problem.num_kv_heads),
                   kv_head = task / tasks % heads, b = task / tasks / heads;
    const int first = static_cast<int>(task % tasks) * kTaskKeys, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const sa_sequence sequence = sa_sequence_at(&args.fwd, b);
    const int num_keys = static_cast<int>(sa_min(sequence.k_len, p.num_sink_tokens));
    if (first >= num_keys) return; // of all threads
    const int64_t first_tile = first_row_tile(sequence), begin = sa_max(first_tile, 0),
                  slot = first_slot(problem, sequence, b) - first_tile, end = sequence.q_len ? sa_ceil_div(sequence.k_len, kKeys) : 0;
    float4 sums[kTaskKeys] = {};
#pragma unroll 4
    for (int64_t tile = begin + warp; tile < end; tile += kSlices) {
        const auto *from = reinterpret_cast<const float4 *>(partial_at(p, kv_head, slot + tile, first)) + lane;
#pragma unroll
        for (int i = 0; i < kTaskKeys; i++) {
            if (first + i >= num_keys) break;
            const float4 x = from[i * kPartial / 4];
            sums[i].x += x.x;
            sums[i].y += x.y;
            sums[i].z += x.z;
            sums[i].w += x.w;
        }
    }
#pragma unroll
    for (int i = 0; i < kTaskKeys; i++) room[(warp * kTaskKeys + i) * 32 + lane] = sums[i];
    __syncthreads();
    const int column = 4 * (lane % 16);
    if (warp < kTaskKeys && first + warp < num_keys && column < problem.head_dim) {
        float4 sum = {};
        for (int slice = 0; slice < kSlices; slice++) {
            const float4 x = room[(slice * kTaskKeys + warp) * 32 + lane];
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        const sinkattn_tensor &tensor = lane < 16 ? args.dk : args.dv;
        const float factor = lane < 16 ? p.scale : 1.0f;
        auto *to = static_cast<uint16_t *>(tensor.data) + sa_offset(&tensor, sequence.batch, sequence.k_begin + first + warp, kv_head) +
                   column;
        *reinterpret_cast<uint2 *>(to) = {
                pack_halves<Element>(sum.x * factor, sum.y * factor), pack_halves<Element>(sum.z * factor, sum.w * factor)};
    }
    __syncthreads();
}

} // namespace sa::bwd_window_sm90
