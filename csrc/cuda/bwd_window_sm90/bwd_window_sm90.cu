// SPDX-License-Identifier: Apache-2.0
//
// Backward for causal windows of up to 128 keys before a row, head_dim up to 64, on sm_90.
//
//     row group      dQ of step n                    | delta of step n + 2; one warp: Q, dO, out (and K, V) of step n + 3 | ...
//     math group g   S = K Q^T, dP = V dO^T | P, dS | dV += P dO, dK += dS Q | ...        (three groups, keys in the rows of wgmma)
//
// A block walks down a range of groups of 64 positions of the sequences of one kv head after another. The tokens of group a see keys of
// the groups a - 2, a - 1 and a only; key groups go round the three math groups, and a math group keeps dK and dV of its 64 keys in
// registers while the walk passes the three token groups that see them: each gradient is summed in one place, over all heads, and rounded
// once. A step is 64 rows, tokens x heads. dS goes through shared memory to the row group, which sums dQ over the three key groups. At the
// start of its range a block meets keys that are another's, for dQ alone; after the end it meets rows that are another's, for dK and dV
// alone. Groups lie at multiples of 64 positions and sums run in their order, so no bit depends on where a range is cut.
//
// The row group works in order, and most waits follow from that: it says that step n is ready when it is done with dQ of step n - 2, so
// the place of dS is free; keys of a group are replaced when dQ of the last step that saw them is done.
//
// ds_aux of a head is the sum of p_sink (g - sum_j P_ij dP_ij) over rows. A thread's columns are always of the same heads, so it sums
// p_sink P dP of its heads in registers, in fp32; each warp leaves one number a head, and the second launch adds those up.
//
// Values that are not finite: masked pairs have P = dS = 0, but 0 * NaN is NaN. A block that meets such keys, or ends with such a
// gradient, says so, and the second launch does that block's range again with such values zeroed, and NaN where a pair sees them.
//
// Shared memory: four stages of Q, dO and out, 96 KiB; K and V of four groups, 64 KiB; two stages of dS of three groups, 48 KiB.
// Registers: dK and dV 64; S, dP, P and dS of half a step at a time, 48, since those of all 64 rows do not fit beside them.

#include "cuda/bwd_window_sm90/rows.cuh"
#include "cuda/bwd_window_sm90/walk.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/host/tensor_map.cuh"
#include "cuda/tile/mma.cuh"
#include "cuda/tile/wgmma.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_window_sm90 {
namespace {

// ---- a math group ----

constexpr int kHalfRows = kRows / 2, kHalfBytes = kHalfRows * kRowBytes;

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

template <class Element>
__device__ __forceinline__ void add_gradients(float (&dk)[32], float (&dv)[32], const uint32_t (&weights)[2][4],
                                              const uint32_t (&gradients)[2][4], uint32_t q, uint32_t dout, bool adds) {
    gradient_product<Element>(dv, weights, dout, adds);
    gradient_product<Element>(dk, gradients, q, adds);
    wgmma_commit();
}

enum Mask { kAll, kPairs, kAny }; // all pairs are seen, or both columns of a thread are of one token, or neither

// S and dP to P and dS, as operands. `first`: the first of the rows, `before`: the group's first position less the thread's first key.
template <class C, Mask kMask>
__device__ __forceinline__ void differentiate(uint32_t (&weights)[2][4], uint32_t (&gradients)[2][4], float (&sums)[2],
                                              const float (&s)[16], const float (&dp)[16], const Smem &smem, int stage, int slot, int first,
                                              int before, const Problem &p) {
    const int column = first + fragment_column(), key = warpgroup_row(0);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 lse = *reinterpret_cast<const float2 *>(&smem.lse[stage][8 * n + column]);
        const float4 both = *reinterpret_cast<const float4 *>(&smem.bias[stage][8 * n + column]);
        const float bias[2] = {both.x, both.z}, p_sink[2] = {both.y, both.w};
        int2 token = {};
        if (kMask == kPairs) token.x = token.y = smem.token[stage][8 * n + column];
        if (kMask == kAny) token = *reinterpret_cast<const int2 *>(&smem.token[stage][8 * n + column]);
        float weight[4], term[4], ds[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int distance = (x & 1 ? token.y : token.x) + before - 8 * (x / 2);
            const bool sees = kMask == kAll || static_cast<uint32_t>(distance) <= static_cast<uint32_t>(p.behind);
            weight[x] = exp2_approx(fmaf(s[4 * n + x], p.scale_log2, -(x & 1 ? lse.y : lse.x)));
            if (!sees) weight[x] = 0.0f;
            term[x] = weight[x] * (sees ? dp[4 * n + x] : 0.0f);
            ds[x] = fmaf(weight[x], bias[x & 1], term[x]);
            if (!C::kHide) continue;
            if (sees) {
                const int row = 8 * n + column + (x & 1);
                const uint32_t bad = smem.bad_rows[stage][row] | smem.bad_keys[slot][key + 8 * (x / 2)];
                if (bad) term[x] = ds[x] = NAN;
                if (bad & 1) weight[x] = NAN;
            } else {
                ds[x] = 0.0f; // g - delta may be NaN
            }
        }
        if (C::kSums)
            for (int x = 0; x < 2; x++) sums[x] = fmaf(p_sink[x], term[x] + term[x + 2], sums[x]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            weights[n / 2][n % 2 * 2 + i] = pack_halves<typename C::Element>(weight[2 * i], weight[2 * i + 1]);
            gradients[n / 2][n % 2 * 2 + i] = pack_halves<typename C::Element>(ds[2 * i], ds[2 * i + 1]);
        }
    }
}

// NaN in dV where a key is seen by a row whose dO has such a value in that column, which was left out of the product.
__device__ __forceinline__ void mark_values(float (&dv)[32], const Smem &smem, int stage, int before, const Problem &p) {
#pragma unroll 1
    for (int row = 0; row < kRows; row++) {
        const uint64_t bad = smem.bad_dout[stage][row][0] | static_cast<uint64_t>(smem.bad_dout[stage][row][1]) << 32;
        if (!bad) continue;
        const int distance = smem.token[stage][row] + before;
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (bad >> (element_column(i) + fragment_column()) & 1 &&
                static_cast<uint32_t>(distance - 8 * element_row(i)) <= static_cast<uint32_t>(p.behind))
                dv[i] = NAN;
    }
}

// A gradient of the group's keys, in whole 16-byte chunks. True when it is not finite.
template <class Element>
__device__ __forceinline__ bool write_keys(float (&d)[32], float factor, const sinkattn_tensor &tensor, const Step &step, int r,
                                           int64_t head_dim) {
    const int key = warpgroup_row(0), column = 8 * (threadIdx.x % 4);
    const int num_keys = step.num_keys + r * kKeys;
    auto *to = static_cast<uint16_t *>(tensor.data) + sa_offset(&tensor, step.batch, step.key - r * kKeys + key, step.kv_head) + column;
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
            computed(d); // one piece after another, for want of registers
        }
        to += 8 * tensor.row_stride;
    }
    return nan != 0.0f;
}

// A thread's two columns are of two heads, or of one.
__device__ __forceinline__ void close_heads(float *warp_sums, float (&sums)[2], int first, int heads) {
    const int lane = threadIdx.x % 32;
    if (heads == 1) sums[0] += sums[1];
    for (int distance = 16; distance >= (heads + 1) / 2; distance /= 2)
        for (float &sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (2 * lane < heads)
        for (int x = 0; x < 2 && 2 * lane + x < heads; x++) warp_sums[first + 2 * lane + x] -= sums[x];
    sums[0] = sums[1] = 0.0f;
}

// A warp's part of ds_aux, with that of a warp of the row group.
__device__ __forceinline__ void write_sums(const Smem &smem, const float *warp_sums, const sinkattn_bwd_args &args, const Problem &p,
                                           const Step &step, int warp) {
    __syncwarp();
    for (int h = threadIdx.x % 32; h < p.group; h += 32) {
        const float rows = args.dlse && warp < kRowWarps ? smem.terms[step.kv_head % 4][warp][h] : 0.0f;
        p.sums[(static_cast<int64_t>(step.kv_head * p.group + h) * gridDim.x + blockIdx.x) * kWarps + warp] = rows + warp_sums[h];
    }
}

// Step n of a token group that sees the math group's keys, begun while the last products of the one before run.
template <class C>
__device__ __forceinline__ void take_step(float (&dk)[32], float (&dv)[32], float (&sums)[2], float *warp_sums, Smem &smem,
                                          const Problem &p, uint32_t n, int slot, int r, int flags, int warp, int lane, int pair_at,
                                          bool adds, bool opens) {
    using Element = typename C::Element;
    const int stage = n % kStages;
    const Step &step = smem.steps[stage];
    const int step_token = warp_uniform(step.token), before = r * kKeys - 16 * warp - lane / 4;
    const uint32_t q = warp_uniform_register(shared_address(smem.q[stage])), dout = q + sizeof(smem.q),
                   k = warp_uniform_register(shared_address(smem.k[slot])), v = k + sizeof(smem.k);
    uint32_t weights[2][4], gradients[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float s[16], dp[16];
        wgmma_fence();
        score_product<Element>(s, k, q + half * kHalfBytes);
        score_product<Element>(dp, v, dout + half * kHalfBytes);
        wgmma_commit();
        // Also for keys of another block; that result is discarded.
        if (half) add_gradients<Element>(dk, dv, weights, gradients, q, dout, adds);
        const int first = step_token + (half * kHalfRows >> p.head_shift), last = first + (kHalfRows >> p.head_shift) - 1;
        const int nearest = r * kKeys + first - 16 * warp - 15, farthest = r * kKeys + last - 16 * warp;
        const bool some = farthest >= 0 && nearest <= p.behind, all = !C::kHide && nearest >= 0 && farthest <= p.behind && !(flags & kEdge);
        wgmma_wait<0>();
        computed(s);
        computed(dp);
        computed(dv);
        computed(dk);
        if (!half && !opens) smem.step_empty.release({n - 1});
        if (all) {
            differentiate<C, kAll>(weights, gradients, sums, s, dp, smem, stage, slot, half * kHalfRows, before, p);
        } else if (some && !C::kHide && p.head_shift > 0) {
            differentiate<C, kPairs>(weights, gradients, sums, s, dp, smem, stage, slot, half * kHalfRows, before, p);
        } else if (some) {
            differentiate<C, kAny>(weights, gradients, sums, s, dp, smem, stage, slot, half * kHalfRows, before, p);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) weights[i / 4][i % 4] = gradients[i / 4][i % 4] = 0;
        }
        if (flags & kOwnsRows) {
            const uint32_t to = shared_address(smem.ds[n % 2][kGroups - 1 - r]);
#pragma unroll
            for (int t = 0; t < 2; t++) stmatrix_x4(to + pairs_on(pair_at, 2 * half + t), gradients[t]);
        }
    }
    wgmma_fence();
    add_gradients<Element>(dk, dv, weights, gradients, q + kHalfBytes, dout + kHalfBytes, true);
    async_fence(); // dS is on its way while the products run
    __syncwarp();
    smem.ds_full.arrive({n});
    if (C::kHide) {
        wgmma_wait<0>();
        computed(dv);
        computed(dk);
        mark_values(dv, smem, stage, before, p);
    }
    if (C::kSums && flags & kHeadsEnd) close_heads(warp_sums, sums, step.head_in_group, 1 << p.head_shift);
}

template <class C> __device__ __forceinline__ void run_math(Smem &smem, const sinkattn_bwd_args &args, const Problem &p) {
    const int own_warp = warp_uniform(threadIdx.x / 32) - 4, math_group = own_warp / 4, warp = own_warp & 3, lane = threadIdx.x % 32;
    float *warp_sums = smem.sums[own_warp], dk[32] = {}, dv[32] = {}, sums[2] = {};
    // r counts the token groups that saw the math group's keys; as if before the first of them.
    int r = (kGroups + 1 - math_group) % kGroups, slot = r == kGroups - 1 ? kSlots - 1 : math_group;
    const int pair_at = swizzled(16 * warp + lane % 16, lane / 16);
    bool adds = false; // to dK and dV, or begins them: zeroing the accumulators makes ptxas serialize all wgmma
    uint32_t n = 0;
    const auto wait_for_step = [&]() {
        smem.step_ready.wait({n});
        return warp_uniform(smem.steps[n % kStages].flags);
    };
    while (true) { // a token group
        int flags = wait_for_step();
        if (!__any_sync(0xffffffffu, flags & kExists)) break;
        if (r == kGroups - 1) { // the next keys
            r = 0;
            slot = (slot + kGroups) & (kSlots - 1);
            adds = false;
        } else {
            r++;
        }
        if (C::kSums && flags & kNewHead) {
            for (int h = lane; h < kHeads; h += 32) warp_sums[h] = 0.0f;
            __syncwarp();
        }
        if (__any_sync(0xffffffffu, smem.steps[n % kStages].groups >> r & 1)) {
            bool opens = true;
            while (true) {
                take_step<C>(dk, dv, sums, warp_sums, smem, p, n, slot, r, flags, warp, lane, pair_at, adds, opens);
                if (__any_sync(0xffffffffu, flags & kCloses)) break;
                n++;
                adds = true;
                opens = false;
                flags = wait_for_step();
            }
            wgmma_wait<0>();
            computed(dv);
            computed(dk);
            adds = true;
        } else {
            while (true) {
                smem.ds_full.arrive({n});
                if (__any_sync(0xffffffffu, flags & kCloses)) break;
                __syncwarp();
                smem.step_empty.release({n});
                n++;
                flags = wait_for_step();
            }
        }
        const Step &step = smem.steps[n % kStages];
        if (step.owned() >> r & 1 && (r == kGroups - 1 || flags & kSpanEnd)) {
            const bool bad_dk = write_keys<typename C::Element>(dk, p.scale, args.dk, step, r, args.fwd.problem.head_dim),
                       bad_dv = write_keys<typename C::Element>(dv, 1.0f, args.dv, step, r, args.fwd.problem.head_dim);
            if ((bad_dk || bad_dv) && !C::kHide) smem.nonfinite = 1;
        }
        if (C::kSums && flags & kSpanEnd) write_sums(smem, warp_sums, args, p, step, own_warp);
        __syncwarp();
        smem.step_empty.release({n});
        n++;
    }
}

// The block's range.
template <class C>
__device__ __forceinline__ void walk_range(Smem &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p,
                                           unsigned *error_word) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            smem.step_full[i].init(1 + 32);
            smem.step_ready[i].init(kPreparers);
            smem.step_empty[i].init(32 * kWarps);
        }
        for (int i = 0; i < 2; i++) smem.ds_full[i].init(32 * kWarps);
        barrier_init_fence();
        smem.nonfinite = 0;
    }
    if (C::kSums)
        for (int64_t h = threadIdx.x / 16; h < args.fwd.problem.num_q_heads; h += kThreads / 16)
            if (threadIdx.x % 16 < kWarps) p.sums[(h * gridDim.x + blockIdx.x) * kWarps + threadIdx.x % 16] = 0.0f;
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

// ds_aux from what the warps left, by the second launch: each block has some heads, or where a range was done again, the last one to come
// has all.
__device__ __forceinline__ void add_sums(Smem &smem, const sinkattn_bwd_args &args, const Problem &p) {
    int64_t first = blockIdx.x, step = gridDim.x;
    bool redone = false;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) redone |= p.redo[i] != 0;
    if (__syncthreads_or(redone)) {
        __threadfence();
        if (!__syncthreads_or(threadIdx.x == 0 && atomicAdd(&p.redo[gridDim.x], 1u) + 1 == gridDim.x)) return;
        __threadfence();
        first = 0;
        step = 1;
    }
    for (int64_t head = first; head < args.fwd.problem.num_q_heads; head += step) {
        add_sink_terms_of<kThreads>(args, p.sums, 1, static_cast<int64_t>(gridDim.x) * kWarps, head, smem.sink_sums);
        __syncthreads();
    }
}

template <class C>
__global__ __launch_bounds__(kThreads, 1) void bwd_window_kernel(const __grid_constant__ sinkattn_bwd_args args,
                                                                 const __grid_constant__ Maps maps, const __grid_constant__ Problem p,
                                                                 unsigned *error_word) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem &smem = *reinterpret_cast<Smem *>(shared);
    if (C::kHide) {
        if (p.redo[blockIdx.x]) walk_range<C>(smem, args, maps, p, error_word);
        if (C::kSums) add_sums(smem, args, p);
    } else {
        walk_range<C>(smem, args, maps, p, error_word);
        if (threadIdx.x == 0) p.redo[blockIdx.x] = smem.nonfinite;
        if (threadIdx.x == 0 && blockIdx.x == 0) p.redo[gridDim.x] = 0;
    }
#else
    __trap();
#endif
}

static inline int64_t num_sums(const sinkattn_problem &problem, const sinkattn_plan &plan) {
    return problem.s_aux_dtype ? problem.num_q_heads * plan.workers * kWarps : 0;
}

template <class Element, bool kSums>
sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    static_assert(sizeof(Smem) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const sinkattn_problem &problem = args.fwd.problem;
    Problem p;
    p.behind = static_cast<int>(sa_window_keys(&problem.mask)) - 1;
    p.reach = (p.behind + kKeys - 1) / kKeys;
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.head_shift = 0;
    while (p.head_shift < 3 && p.group % (2 << p.head_shift) == 0) p.head_shift++;
    p.scale = static_cast<float>(sa_softmax_scale(&problem));
    p.scale_log2 = p.scale * kLog2e;
    const uintptr_t workspace = (reinterpret_cast<uintptr_t>(context.workspace) + 3) / 4 * 4;
    p.sums = reinterpret_cast<float *>(workspace);
    p.redo = reinterpret_cast<unsigned *>(workspace) + num_sums(problem, plan);
    const int heads = 1 << p.head_shift, tokens = kRows / heads;
    unsigned *error_word;
    Maps maps;
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_rows(&maps.q, problem, args.fwd.q, tokens, heads, "q"));
    SA_TRY(map_rows(&maps.dout, problem, args.dout, tokens, heads, "dout"));
    SA_TRY(map_rows(&maps.out, problem, args.fwd.out, tokens, heads, "out"));
    SA_TRY(map_rows(&maps.dq, problem, args.dq, tokens, heads, "dq"));
    SA_TRY(map_keys(&maps.k, problem, args.fwd.k, kKeys, "k"));
    SA_TRY(map_keys(&maps.v, problem, args.fwd.v, kKeys, "v"));
    const char *name = "sa_bwd_cuda_sm90_window";
    const auto blocks = static_cast<unsigned>(plan.workers);
    SA_TRY(launch_blocks<bwd_window_kernel<Config<Element, kSums, false>>>(name, blocks, kThreads, sizeof(Smem), context.stream, args, maps,
                                                                           p, error_word));
    return launch_blocks<bwd_window_kernel<Config<Element, kSums, true>>>(name, blocks, kThreads, sizeof(Smem), context.stream, args, maps,
                                                                          p, error_word);
}

} // namespace

extern "C" int64_t sa_cuda_bwd_sm90_window_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    return 4 * (num_sums(*problem, *plan) + plan->workers + 1) + 3;
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_window(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    if (args.fwd.problem.dtype == SINKATTN_BF16)
        return args.ds_aux ? launch<Bf16, true>(args, *plan, *context) : launch<Bf16, false>(args, *plan, *context);
    return args.ds_aux ? launch<Fp16, true>(args, *plan, *context) : launch<Fp16, false>(args, *plan, *context);
}

} // namespace sa::bwd_window_sm90
