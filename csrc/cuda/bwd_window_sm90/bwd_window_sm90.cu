// SPDX-License-Identifier: Apache-2.0
//
// Backward for causal windows of up to 128 keys before a row, head_dim up to 64, on sm_90.
//
//     row warpgroup      dQ of step n                    | delta of step n + 2; one warp: Q, dO, out (and K, V) of step n + 3 | ...
//     math warpgroup i   S = K Q^T, dP = V dO^T | P, dS | dV += P dO, dK += dS Q | ...        (three, keys in the rows of wgmma)
//
// Positions are cut into tiles of 64, whose rows see keys of their own tile and of the two before (walk.cuh). A block walks down its share
// of tiles in steps of 64 rows. Key tiles go round the three math warpgroups; each keeps dK and dV of its 64 keys in registers while the
// walk passes the tiles that see them, so a gradient is summed in one place, over all heads, and rounded once. dS goes through shared
// memory to the row warpgroup, which sums dQ over the three key tiles. Before its share a block meets keys of another block, for dQ alone;
// after it rows of another, for dK and dV alone. Tiles lie at multiples of 64 positions and sums run in their order, so no bit depends on
// where a share begins or ends. The LSE that is read already holds the sink, which no kernel here adds again.
//
// The row warpgroup works in order, so two buffers need no barrier: step n is ready only when dQ of step n - 2 is done, so dS of that step
// may be replaced; and keys are replaced once dQ of the last step that saw them is done.
//
// ds_aux of a head is the sum of p_sink (g - sum_j P_ij dP_ij) over rows. A thread's columns are always of the same heads, so it sums
// p_sink P dP of its heads in registers, in fp32; each warp leaves one number a head, and the second launch adds those up.
//
// Values that are not finite: a masked pair has P = dS = 0, but 0 * NaN is NaN. A block that meets such keys, or whose dK or dV are not
// finite, raises its flag, and the second launch computes its share again with such values zeroed, and NaN where a row sees them.
//
// Shared memory, 223 KiB: four stages of Q, dO and out, 96 KiB; K and V of four tiles, 64 KiB; dS of two steps and three tiles, 48 KiB.
// Registers: dK and dV 64 of 144; S, dP, P and dS of 32 rows at a time, 48, since those of all 64 rows do not fit beside them.

#include "cuda/bwd_window_sm90/rows.cuh"
#include "cuda/bwd_window_sm90/sink_tokens.cuh"
#include "cuda/bwd_window_sm90/smem.cuh"
#include "cuda/bwd_window_sm90/walk.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/mma.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_window_sm90 {
namespace {

// A math warpgroup: 64 keys in the rows of its accumulators, the step's rows in their columns.

constexpr int kHalfRows = kRows / 2, kHalfBytes = kHalfRows * kRowBytes;

// What a step needs of its math warpgroup.
struct MathWarpgroup {
    Smem &smem;
    const Problem &p;
    const int warp, lane, pair_at; // warp: of the warpgroup; pair_at: where the thread stores dS, in bytes from the start of a tile
    float *warp_sums;              // [kHeads]: the warp's part of ds_aux
    float (&dk)[32], (&dv)[32], (&sums)[2]; // sums: p_sink P dP of the heads of the thread's two columns
    const int &age, &key_stage;             // of the key tile
};

template <class Element> __device__ __forceinline__ void score_product(float (&s)[16], uint32_t keys, uint32_t rows) {
    const uint64_t a = operand(keys, 0), b = operand(rows, 0);
#pragma unroll
    for (int t = 0; t < 4; t++) wgmma_shared<Element>(s, operand_at(a, 32 * t), operand_at(b, 32 * t), t > 0);
}

template <class Element>
__device__ __forceinline__ void gradient_product(float (&d)[32], const uint32_t (&weights)[2][4], uint32_t rows, bool adds) {
    const uint64_t b = operand(rows, kTileBytes);
#pragma unroll
    for (int t = 0; t < 2; t++) wgmma_registers<Element>(d, weights[t], operand_at(b, t * 16 * kRowBytes), adds || t > 0);
}

// dV += P dO and dK += dS Q over 32 rows.
template <class Element>
__device__ __forceinline__ void add_gradients(float (&dk)[32], float (&dv)[32], const uint32_t (&weights)[2][4],
        const uint32_t (&gradients)[2][4], uint32_t q, uint32_t dout, bool adds) {
    gradient_product<Element>(dv, weights, dout, adds);
    gradient_product<Element>(dk, gradients, q, adds);
    wgmma_commit();
}

enum Mask { kNone, kByToken, kByColumn }; // all pairs are seen; a thread's two columns are of one token; or of two

// P and dS of 32 rows from `first` on, as left operands. before: how far the thread's first key lies before the step's tile of positions;
// num_hidden: so many keys from that one on are sink tokens, whose pairs the row warpgroup computes.
template <class C, Mask kMask>
__device__ __forceinline__ void differentiate(uint32_t (&weights)[2][4], uint32_t (&gradients)[2][4], const MathWarpgroup &m,
        const float (&s)[16], const float (&dp)[16], int stage, int first, int before, int num_hidden) {
    const Smem &smem = m.smem;
    const Problem &p = m.p;
    const int column = first + fragment_column(), key = warpgroup_row(0);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 lse = *reinterpret_cast<const float2 *>(&smem.lse[stage][8 * n + column]);
        const float4 both = *reinterpret_cast<const float4 *>(&smem.bias[stage][8 * n + column]);
        const float bias[2] = {both.x, both.z}, p_sink[2] = {both.y, both.w};
        int2 token = {};
        if (kMask == kByToken) token.x = token.y = smem.token[stage][8 * n + column];
        if (kMask == kByColumn) token = *reinterpret_cast<const int2 *>(&smem.token[stage][8 * n + column]);
        float weight[4], term[4], ds[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int distance = (x & 1 ? token.y : token.x) + before - 8 * (x / 2);
            const bool hidden = C::kSinkTokens && 8 * (x / 2) < num_hidden;
            const bool sees = kMask == kNone || (p.sees(distance) && !hidden);
            weight[x] = exp2_approx(fmaf(s[4 * n + x], p.scale_log2, -(x & 1 ? lse.y : lse.x)));
            if (!sees) weight[x] = 0.0f;
            term[x] = weight[x] * (sees ? dp[4 * n + x] : 0.0f);
            ds[x] = fmaf(weight[x], bias[x & 1], term[x]);
            if (!C::kHide) continue;
            if (sees) {
                const int row = 8 * n + column + (x & 1);
                const uint32_t bad = smem.bad_rows[stage][row] | smem.bad_keys[m.key_stage][key + 8 * (x / 2)];
                if (bad) term[x] = ds[x] = NAN;
                if (bad & 1) weight[x] = NAN;
            } else {
                ds[x] = 0.0f; // g - delta may be NaN
            }
        }
        if (C::kSums)
            for (int x = 0; x < 2; x++) m.sums[x] = fmaf(p_sink[x], term[x] + term[x + 2], m.sums[x]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            weights[n / 2][n % 2 * 2 + i] = pack_halves<typename C::Element>(weight[2 * i], weight[2 * i + 1]);
            gradients[n / 2][n % 2 * 2 + i] = pack_halves<typename C::Element>(ds[2 * i], ds[2 * i + 1]);
        }
    }
}

// Puts NaN into dV where a row that sees the key had a value of dO that is not finite, zeroed for the product, in that column.
__device__ __forceinline__ void mark_values(float (&dv)[32], const Smem &smem, int stage, int before, const Problem &p) {
#pragma unroll 1
    for (int row = 0; row < kRows; row++) {
        const uint64_t bad = smem.bad_dout[stage][row][0] | static_cast<uint64_t>(smem.bad_dout[stage][row][1]) << 32;
        if (!bad) continue;
        const int distance = smem.token[stage][row] + before;
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (bad >> (element_column(i) + fragment_column()) & 1 && p.sees(distance - 8 * element_row(i))) dv[i] = NAN;
    }
}

// Writes dK or dV of the key tile, times factor, in whole 16-byte chunks. True if the gradient is not finite.
template <class Element>
__device__ __forceinline__ bool write_keys(
        float (&d)[32], float factor, const sinkattn_tensor &tensor, const Step &step, int age, int64_t head_dim) {
    const int key = warpgroup_row(0), column = 8 * (threadIdx.x % 4);
    const int num_keys = step.num_keys + age * kKeys;
    auto *to = static_cast<uint16_t *>(tensor.data) + sa_offset(&tensor, step.batch, step.key - age * kKeys + key, step.kv_head) + column;
    float nan = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int n = 0; n < 8; n += 4) {
            uint32_t x[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float low = d[4 * (n + c) + 2 * i] * factor, high = d[4 * (n + c) + 2 * i + 1] * factor;
                nan = fmaf(low, 0.0f, fmaf(high, 0.0f, nan));
                x[c] = pack_halves<Element>(low, high);
            }
            quad_transpose(x);
            if (key + 8 * i < num_keys && column + 8 * n < head_dim) *reinterpret_cast<uint4 *>(to + 8 * n) = {x[0], x[1], x[2], x[3]};
            pin(d); // compiler fence: one piece after another, since registers are few
        }
        to += 8 * tensor.row_stride;
    }
    return nan != 0.0f;
}

// Subtracts the lanes' sums from those of the step's heads. A thread's two columns belong to two heads, or to the only one.
__device__ __forceinline__ void close_heads(float *warp_sums, float (&sums)[2], int first, int heads) {
    const int lane = threadIdx.x % 32;
    if (heads == 1) sums[0] += sums[1];
    for (int distance = 16; distance >= (heads + 1) / 2; distance /= 2)
        for (float &sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (2 * lane < heads)
        for (int x = 0; x < 2 && 2 * lane + x < heads; x++) warp_sums[first + 2 * lane + x] -= sums[x];
    sums[0] = sums[1] = 0.0f;
}

// Writes math warp `warp`'s part of ds_aux; the first kRowWarps parts include a row warp's sum.
template <class C>
__device__ __forceinline__ void write_sums(
        const Smem &smem, const float *warp_sums, const sinkattn_bwd_args &args, const Problem &p, const Step &step, int warp) {
    __syncwarp();
    for (int h = threadIdx.x % 32; h < p.group; h += 32) {
        const float rows = args.dlse && warp < kRowWarps ? smem.terms[step.kv_head % 4][warp][h] : 0.0f;
        p.sums[(static_cast<int64_t>(step.kv_head * p.group + h) * gridDim.x + blockIdx.x) * C::kParts + warp] = rows + warp_sums[h];
    }
}

// Step n, whose rows see the key tile. In flight at the top, unless it begins a tile of rows: dV and dK of the second half of step n - 1;
// at the end: those of step n. With kHide neither: mark_values needs complete sums.
template <class C> __device__ __forceinline__ void take_step(const MathWarpgroup &m, uint32_t n, int flags, bool begins) {
    using Element = typename C::Element;
    Smem &smem = m.smem;
    const Problem &p = m.p;
    const int stage = n % kStages, warp = m.warp;
    const Step &step = smem.steps[stage];
    const int step_token = warp_uniform(step.token), before = m.age * kKeys - 16 * warp - m.lane / 4;
    const uint32_t q = warp_uniform_register(shared_address(smem.q[stage])), dout = q + sizeof(smem.q),
                   k = warp_uniform_register(shared_address(smem.k[m.key_stage])), v = k + sizeof(smem.k);
    uint32_t weights[2][4], gradients[2][4];
    int num_sinks = 0; // of the sink tokens, from the warp's first key on
    if constexpr (C::kSinkTokens > 0)
        if (const int key = warp_uniform(smem.sink_steps[stage].position) - m.age * kKeys + 16 * warp; key >= 0)
            num_sinks = p.num_sink_tokens - key;
    const int num_hidden = num_sinks - m.lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float s[16], dp[16];
        wgmma_fence();
        score_product<Element>(s, k, q + half * kHalfBytes);
        score_product<Element>(dp, v, dout + half * kHalfBytes);
        wgmma_commit();
        // Also for keys of another block; that result is discarded. The first step of a key tile begins dK and dV: zeroing the accumulators
        // makes ptxas serialize all wgmma.
        if (half) add_gradients<Element>(m.dk, m.dv, weights, gradients, q, dout, !begins || m.age > 0);
        const int first = step_token + (half * kHalfRows >> p.head_shift), last = first + (kHalfRows >> p.head_shift) - 1;
        // The smallest and the largest distance of a row from one of the warp's keys.
        const int nearest = m.age * kKeys + first - 16 * warp - 15, farthest = m.age * kKeys + last - 16 * warp;
        const bool any_seen = farthest >= 0 && nearest <= p.max_distance,
                   all_seen = !C::kHide && nearest >= 0 && farthest <= p.max_distance && !(flags & kEdge) && num_sinks <= 0;
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        pin(m.dv);
        pin(m.dk);
        if (!half && !begins) smem.step_empty.release({n - 1});
        if (all_seen) {
            differentiate<C, kNone>(weights, gradients, m, s, dp, stage, half * kHalfRows, before, num_hidden);
        } else if (any_seen && !C::kHide && p.head_shift > 0) {
            differentiate<C, kByToken>(weights, gradients, m, s, dp, stage, half * kHalfRows, before, num_hidden);
        } else if (any_seen) {
            differentiate<C, kByColumn>(weights, gradients, m, s, dp, stage, half * kHalfRows, before, num_hidden);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) weights[i / 4][i % 4] = gradients[i / 4][i % 4] = 0;
        }
        if (flags & kOwnsRows) {
            const uint32_t to = shared_address(smem.ds[n % 2][kSeenTiles - 1 - m.age]);
#pragma unroll
            for (int t = 0; t < 2; t++) stmatrix_x4(to + pairs_on(m.pair_at, 2 * half + t), gradients[t]);
        }
    }
    wgmma_fence();
    add_gradients<Element>(m.dk, m.dv, weights, gradients, q + kHalfBytes, dout + kHalfBytes, true);
    async_fence(); // dS is on its way while the products run
    __syncwarp();
    smem.ds_full.arrive({n});
    if (C::kHide) {
        wgmma_wait<0>();
        pin(m.dv);
        pin(m.dk);
        mark_values(m.dv, smem, stage, before, p);
    }
    if (C::kSums && flags & kHeadsEnd) close_heads(m.warp_sums, m.sums, step.head_in_group, p.heads());
}

template <class C> __device__ __forceinline__ void run_math(Smem &smem, const sinkattn_bwd_args &args, const Problem &p) {
    const int math_warp = warp_uniform(threadIdx.x / 32) - 4, warpgroup = math_warp / 4, warp = math_warp & 3, lane = threadIdx.x % 32;
    float *warp_sums = smem.sums[math_warp], dk[32] = {}, dv[32] = {}, sums[2] = {};
    // Before the first tile of rows, number 2: warpgroups 0 and 1 have key tiles 0 and 1, and warpgroup 2 takes tile 2 next.
    int age = (kWarpgroups + 1 - warpgroup) % kWarpgroups, key_stage = age == kSeenTiles - 1 ? kKeyStages - 1 : warpgroup;
    const MathWarpgroup m = {
            smem, p, warp, lane, swizzled(16 * warp + left_row(lane), left_chunk(lane)), warp_sums, dk, dv, sums, age, key_stage};
    uint32_t n = 0;
    const auto wait_for_step = [&]() {
        smem.step_ready.wait({n});
        return warp_uniform(smem.steps[n % kStages].flags);
    };
    while (true) { // for each tile of rows
        int flags = wait_for_step();
        if (!__any_sync(0xffffffffu, flags & kExists)) break;
        if (age == kSeenTiles - 1) { // takes the newest keys
            age = 0;
            key_stage = (key_stage + kWarpgroups) & (kKeyStages - 1);
        } else {
            age++;
        }
        if (C::kSums && flags & kKvHeadBegin) {
            for (int h = lane; h < kHeads; h += 32) warp_sums[h] = 0.0f;
            __syncwarp();
        }
        if (__any_sync(0xffffffffu, smem.steps[n % kStages].tiles >> age & 1)) {
            bool begins = true;
            while (true) {
                take_step<C>(m, n, flags, begins);
                if (__any_sync(0xffffffffu, flags & kTileEnd)) break;
                n++;
                begins = false;
                flags = wait_for_step();
            }
            wgmma_wait<0>();
            pin(dv);
            pin(dk);
        } else {
            while (true) {
                smem.ds_full.arrive({n});
                if (__any_sync(0xffffffffu, flags & kTileEnd)) break;
                __syncwarp();
                smem.step_empty.release({n});
                n++;
                flags = wait_for_step();
            }
        }
        const Step &step = smem.steps[n % kStages];
        if (step.owned() >> age & 1 && (age == kSeenTiles - 1 || flags & kSegmentEnd)) {
            const bool bad_dk = write_keys<typename C::Element>(dk, p.scale, args.dk, step, age, args.fwd.problem.head_dim),
                       bad_dv = write_keys<typename C::Element>(dv, 1.0f, args.dv, step, age, args.fwd.problem.head_dim);
            if ((bad_dk || bad_dv) && !C::kHide) smem.nonfinite = 1;
        }
        if (C::kSums && flags & kSegmentEnd) write_sums<C>(smem, warp_sums, args, p, step, math_warp);
        __syncwarp();
        smem.step_empty.release({n});
        n++;
    }
}

template <class C>
__device__ __forceinline__ void compute_share(
        Smem &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p, unsigned *error_word) {
    // By other warps than the first: thread 0 walks a dense batch.
    if (threadIdx.x == 32) {
        for (int i = 0; i < kStages; i++) {
            smem.step_full[i].init(1 + 32);
            smem.step_ready[i].init(kPreparers);
            smem.step_empty[i].init(32 * kWarps);
        }
        for (int i = 0; i < 2; i++) smem.ds_full[i].init(32 * kWarps);
        barrier_init_fence();
        smem.nonfinite = 0;
        if (C::kSinkTokens) smem.any_bad_sinks = 0;
    }
    if (threadIdx.x == 64)
        for (const CUtensorMap *map : {&maps.q, &maps.dout, &maps.out, &maps.k, &maps.v, &maps.dq}) tensor_map_prefetch(map);
    if (C::kSums && threadIdx.x >= 128)
        for (int64_t h = threadIdx.x / 16 - 8; h < args.fwd.problem.num_q_heads; h += kThreads / 16 - 8)
            if (threadIdx.x % 16 < C::kParts) p.sums[(h * gridDim.x + blockIdx.x) * C::kParts + threadIdx.x % 16] = 0.0f;
    if (blockIdx.x == 0 && !C::kHide) check_lengths(args.fwd, error_word);
    start_walk<kThreads>(smem.walk, smem.scan, args.fwd, p);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<80>();
        run_rows<C>(smem, args, maps, p);
    } else {
        registers_up<144>();
        run_math<C>(smem, args, p);
    }
    __syncthreads();
}

// Zeroes dK and dV of keys that no walk meets, except sink tokens. Warps take equal runs of keys.
__device__ __forceinline__ void fill_unseen_keys(const sinkattn_bwd_args &args, const Problem &p) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t all = (problem.packed ? 1 : problem.batch) * problem.k_len, each = sa_ceil_div(all, int64_t{gridDim.x} * (kThreads / 32)),
                  first = (int64_t{threadIdx.x} / 32 * gridDim.x + blockIdx.x) * each, end = sa_min(first + each, all);
    const int lane = threadIdx.x % 32, column = lane % 8 * 8, first_head = column < problem.head_dim ? lane / 8 : INT32_MAX;
    for (int64_t x = first; x < end;) {
        const int64_t b = problem.packed ? find_sequence(problem.batch, x,
                                                   [&](int64_t n) { return sa_packed_begin(args.fwd.cu_seqlens_k, n, problem.k_len); })
                                         : x / problem.k_len;
        const sa_sequence sequence = keys_or_tail(args.fwd, b);
        const int64_t begin = problem.packed ? sequence.k_begin : b * problem.k_len,
                      unseen = sa_min(sa_last(tiles_of(sequence, p).begin, 0) * kKeys, sequence.k_len);
        const int num_sinks = b < problem.batch ? p.num_sink_tokens : 0;
        for (int64_t key = sa_max(x - begin, num_sinks); key < sa_min(unseen, end - begin); key++)
            for (int64_t head = first_head; head < problem.num_kv_heads; head += 4)
                for (const sinkattn_tensor *to : {&args.dk, &args.dv})
                    *reinterpret_cast<uint4 *>(
                            static_cast<uint16_t *>(to->data) + sa_offset(to, sequence.batch, sequence.k_begin + key, head) + column) = {};
        x = sa_max(x + 1, begin + sequence.k_len); // offsets that decrease may leave x past the sequence's end
    }
}

// What the blocks left in parts, added by the second launch: ds_aux by heads, dK and dV of sink tokens by tasks. Each block adds some, or,
// where a share is computed again, the last block to finish adds all.
template <class C> __device__ __forceinline__ void add_parts(Smem &smem, const sinkattn_bwd_args &args, const Problem &p) {
    int64_t first = C::kSinkTokens ? pinned(blockIdx.x) : blockIdx.x, step = gridDim.x; // pinned: else it takes registers all the time
    bool any_redo = false;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) any_redo |= p.redo[i] != 0;
    if (__syncthreads_or(any_redo)) {
        __threadfence();
        if (!__syncthreads_or(threadIdx.x == 0 && atomicAdd(&p.redo[gridDim.x], 1u) + 1 == gridDim.x)) return;
        __threadfence();
        first = 0;
        step = 1;
    }
    if constexpr (C::kSums)
        for (int64_t head = first; head < args.fwd.problem.num_q_heads; head += step) {
            add_sink_terms_of<kThreads>(args, p.sums, 1, static_cast<int64_t>(gridDim.x) * C::kParts, head, smem.sink_sums);
            __syncthreads();
        }
    if constexpr (C::kSinkTokens > 0)
        for (auto task = static_cast<unsigned>(first); task < p.num_sink_tasks; task += static_cast<unsigned>(step))
            add_sink_partials<typename C::Element>(args, p, task);
}

template <class C>
__global__ __launch_bounds__(kThreads, 1) void bwd_window_kernel(const __grid_constant__ sinkattn_bwd_args args,
        const __grid_constant__ Maps maps, const __grid_constant__ Problem p, unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem &smem = *reinterpret_cast<SmemOf<C> *>(shared);
    if (C::kHide) fill_unseen_keys(args, p); // overlaps the first launch, which skips these keys
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (C::kHide) {
        if (p.redo[blockIdx.x]) compute_share<C>(smem, args, maps, p, error_word);
        if (C::kSums || C::kSinkTokens) add_parts<C>(smem, args, p);
    } else {
        compute_share<C>(smem, args, maps, p, error_word);
        if (threadIdx.x == 0) p.redo[blockIdx.x] = smem.nonfinite;
        if (threadIdx.x == 0 && blockIdx.x == 0) p.redo[gridDim.x] = 0;
    }
#else
    __trap();
#endif
}

template <class Element, bool kSums, int kSinkTokens>
sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    using First = Config<Element, kSums, false, kSinkTokens>;
    using Second = Config<Element, kSums, true, kSinkTokens>;
    constexpr int kSmemBytes = sizeof(SmemOf<First>);
    static_assert(kSmemBytes <= 227 * 1024, "what a block of compute capability 9.0 may use");
    static_assert(First::kParts == (kSinkTokens ? SA_BWD_WINDOW_SINK_PARTS : SA_BWD_WINDOW_PARTS), "as the planner counts them");
    const sinkattn_problem &problem = args.fwd.problem;
    Problem p;
    p.max_distance = static_cast<int>(sa_window_keys(&problem.mask)) - 1;
    p.tiles_before = sa_tile_from(p.max_distance, kKeys);
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.head_shift = 0;
    while (p.head_shift < 3 && p.group % (2 << p.head_shift) == 0) p.head_shift++;
    p.scale = static_cast<float>(sa_softmax_scale(&problem));
    p.scale_log2 = p.scale * kLog2e;
    const sa_bwd_window_layout layout = sa_bwd_window_layout_of(&problem, &plan);
    const auto align = static_cast<uintptr_t>(layout.alignment),
               workspace = (reinterpret_cast<uintptr_t>(context.workspace) + align - 1) / align * align;
    p.num_sink_tokens = static_cast<int>(problem.mask.num_sink_tokens);
    p.row_tiles = layout.row_tiles;
    const int64_t tasks = num_sink_tasks(problem);
    if (tasks > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld sums of sink tokens; a launch holds at most 2^31", static_cast<long long>(tasks));
    p.num_sink_tasks = static_cast<unsigned>(tasks);
    p.partials = reinterpret_cast<float *>(workspace);
    p.sums = p.partials + layout.partials;
    p.redo = reinterpret_cast<unsigned *>(p.sums) + layout.sums;
    unsigned *error_word;
    Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_rows(&maps.q, problem, args.fwd.q, p.tokens(), p.heads(), "q"));
    SA_TRY(map_rows(&maps.dout, problem, args.dout, p.tokens(), p.heads(), "dout"));
    SA_TRY(map_rows(&maps.out, problem, args.fwd.out, p.tokens(), p.heads(), "out"));
    SA_TRY(map_rows(&maps.dq, problem, args.dq, p.tokens(), p.heads(), "dq"));
    SA_TRY(map_keys(&maps.k, problem, args.fwd.k, kKeys, "k"));
    SA_TRY(map_keys(&maps.v, problem, args.fwd.v, kKeys, "v"));
    const char *name = "sa_bwd_cuda_sm90_window";
    const int64_t tiles = num_row_tiles(problem, int64_t{kKeys} * p.group) * problem.num_kv_heads;
    p.steps = problem.packed ? 0 : num_steps({0, 0, problem.q_len, 0, problem.k_len}, p);
    p.owners = 2 * tiles <= plan.workers ? 2 : 1;
    const auto blocks = static_cast<unsigned>(plan.workers / p.owners * p.owners);
    SA_TRY(launch_overlapping<bwd_window_kernel<First>>(name, blocks, kThreads, kSmemBytes, context.stream, args, maps, p, error_word));
    return launch_overlapping<bwd_window_kernel<Second>>(name, blocks, kThreads, kSmemBytes, context.stream, args, maps, p, error_word);
}

template <class Element, int kSinkTokens>
sinkattn_status launch_for(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    return args.ds_aux ? launch<Element, true, kSinkTokens>(args, plan, context) : launch<Element, false, kSinkTokens>(args, plan, context);
}

template <class Element>
sinkattn_status launch_for(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const int64_t num_sink_tokens = args.fwd.problem.mask.num_sink_tokens;
    if (!num_sink_tokens) return launch_for<Element, 0>(args, plan, context);
    return num_sink_tokens <= 8 ? launch_for<Element, 8>(args, plan, context) : launch_for<Element, kSinkKeys>(args, plan, context);
}

} // namespace

extern "C" sinkattn_status sa_bwd_cuda_sm90_window(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16) return launch_for<Bf16>(args, *plan, *context);
    return launch_for<Fp16>(args, *plan, *context);
}

} // namespace sa::bwd_window_sm90
