// SPDX-License-Identifier: Apache-2.0
//
// Decode on sm_90 with swapped operands: keys and columns of V in M of wgmma, up to 64 rows of a kv head in N, so that few rows cost few
// cycles, and K and V are read once for all of them.
//
//     loader warp     K0 | V0 | K1 | V1 | ...                 by TMA, boxes of 16 keys
//     teams           S^T = K Q^T | weights to shared memory | O^T += V^T P^T, while the next stage's S^T waits for its keys
//     end of a part   teams join -> the cluster's blocks merge -> out; or a partial -> the stream's last blocks merge -> out
//
// Streams, parts, shares and the sink are decode.cu's. A team has every kTeams-th stage of a part. A row's pivot is its maximum
// over the first stage in which it has one; it moves where a thread's sum of weights in a later stage exceeds kLarge, as the team's vote
// finds.
//
// Registers: O^T takes rows x head_dim / 128 of a team's 208 or 240. Shared memory: the ring, Q, the weights; one block an SM.

#include "cuda/decode/rows_finish.cuh"
#include "cuda/decode/rows_launch.cuh"
#include "cuda/decode/rows_loads.cuh"
#include "cuda/decode/swapped_loads.cuh"
#include "cuda/decode/swapped_smem.cuh"
#include "cuda/decode/swapped_team.cuh"

namespace sa::decode {
namespace swapped {
namespace {

template <class C>
__global__ __launch_bounds__(kThreads, 1) void decode_swapped_kernel(
        const __grid_constant__ typename C::Arguments params, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<typename C::Smem *>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kSlots; i++) {
            smem.full[i].init(C::kByThreads ? 128 : 1);
            smem.empty[i].init(128);
        }
        barrier_init_fence();
        smem.part.found = false;
    }
    if (!C::kByThreads && threadIdx.x == kFirstLoader) many_rows::prefetch_maps(maps);
    __syncthreads();
    const bool found = many_rows::take_first<kThreads, C::kRows>(smem, params);
    if (threadIdx.x >= C::kThreads) {
        registers_down<C::kLoaderRegisters>();
        if constexpr (C::kByThreads) {
            ThreadLoader<C> loader{smem, params};
            many_rows::for_each_part<kThreads, C::kRows, false>(smem, params, found, [&] {
                if (threadIdx.x >= kFirstLoader) loader.load(smem.part);
            });
        } else {
            BoxLoader<C> loader{{smem, params, maps}};
            many_rows::for_each_part<kThreads, C::kRows, false>(smem, params, found, [&] {
                if (threadIdx.x >= kFirstLoader && threadIdx.x < kFirstLoader + 32) loader.load(smem.part);
            });
        }
    } else {
        registers_up<C::kTeamRegisters>();
        Team<C> team{smem, params, warp_uniform(threadIdx.x / 128)};
        many_rows::for_each_part<kThreads, C::kRows, true>(smem, params, found, [&] { team.attend(); });
        decode::write_empty<C>(smem, params);
    }
#else
    __trap();
#endif
}

template <class C> sinkattn_status launch(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    return many_rows::launch<C, decode_swapped_kernel<C>, kThreads>(args, plan, context);
}

// 128 keys a stage, two teams.
template <class Element>
sinkattn_status launch_d64(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t rows = sa_kv_head_rows(&problem);
    if (problem.page_size % kTileK) {
        if (rows <= 16) return launch<Config<Element, 64, 16, 2, 2, 8, true>>(args, plan, context);
        return launch<Config<Element, 64, 64, 2, 2, 8, true>>(args, plan, context);
    }
    if (rows <= 32) return launch<Config<Element, 64, 32, 2, 2, 8, false>>(args, plan, context);
    return launch<Config<Element, 64, 64, 2, 2, 8, false>>(args, plan, context);
}

// 64 keys a stage, two teams.
template <class Element>
sinkattn_status launch_d128(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t rows = sa_kv_head_rows(&problem);
    if (problem.page_size % kTileK) {
        if (rows <= 16) return launch<Config<Element, 128, 16, 1, 2, 12, true>>(args, plan, context);
        return launch<Config<Element, 128, 64, 1, 2, 8, true>>(args, plan, context);
    }
    if (rows <= 32) return launch<Config<Element, 128, 32, 1, 2, 12, false>>(args, plan, context);
    return launch<Config<Element, 128, 64, 1, 2, 8, false>>(args, plan, context);
}

// 64 keys a stage, one team.
template <class Element>
sinkattn_status launch_d256(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    if (problem.page_size % kTileK) {
        if (sa_kv_head_rows(&problem) <= 16) return launch<Config<Element, 256, 16, 1, 1, 6, true>>(args, plan, context);
        return launch<Config<Element, 256, 64, 1, 1, 5, true>>(args, plan, context);
    }
    return launch<Config<Element, 256, 32, 1, 1, 6, false>>(args, plan, context);
}

// The same.
template <class Element>
sinkattn_status launch_d512(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    if (args.fwd.problem.page_size % kTileK) return launch<Config<Element, 512, 16, 1, 1, 3, true>>(args, plan, context);
    return launch<Config<Element, 512, 16, 1, 1, 3, false>>(args, plan, context);
}

} // namespace

#define SA_DECODE_SWAPPED(name) \
    extern "C" sinkattn_status sa_decode_cuda_sm90_swapped_##name( \
            const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) { \
        const auto &args = *static_cast<const sinkattn_decode_args *>(arguments); \
        if (args.fwd.problem.dtype == SINKATTN_BF16) return launch_##name<Bf16>(args, *plan, *context); \
        return launch_##name<Fp16>(args, *plan, *context); \
    }
SA_DECODE_SWAPPED(d64)
SA_DECODE_SWAPPED(d128)
SA_DECODE_SWAPPED(d256)
SA_DECODE_SWAPPED(d512)

} // namespace swapped
} // namespace sa::decode
