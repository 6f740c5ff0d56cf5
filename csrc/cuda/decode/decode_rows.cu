// SPDX-License-Identifier: Apache-2.0
//
// Decode of many rows on sm_90: more than 32 rows of a kv head, query tokens times its query heads, past head_dim 192 more than 16,
// against a cache, dense or paged. K and V are read once for 64 rows.
//
//     loader warp        K0 | V0 | K1 | V1 | ...                        by TMA, boxes of 16 keys; of one latent, K alone
//     score warpgroup    S0 | weights of steps 0, 1, .. | S1 | ...      S of a stage; pivots, weights to shared memory, 16 keys a step
//     value warpgroups        O += P V of steps 0, 1, .. | ...          each its teams, or its columns of O
//     end of a part      teams join -> the cluster's blocks merge -> out; or a partial -> the stream's last blocks merge -> out
//
// Streams, parts, shares and the sink are decode.cu's, with tiles of 64 rows for 16. Steps are its key tiles, and teams its teams:
// team t has every kTeams-th step of a part and its own pivot, so that a row over the same part has the same bits. Weights go through
// shared memory, so that scores are computed once for all columns of O.
//
// Registers: O takes 128 of the value warpgroups' 184, 64 at head_dim 64. Shared memory: Q, the ring, the weights; one block an SM.

#include "cuda/decode/rows_finish.cuh"
#include "cuda/decode/rows_launch.cuh"
#include "cuda/decode/rows_loads.cuh"
#include "cuda/decode/rows_scores.cuh"
#include "cuda/decode/rows_smem.cuh"
#include "cuda/decode/rows_values.cuh"

namespace sa::decode {
namespace many_rows {
namespace {

template <class C> __device__ __forceinline__ void init_barriers(typename C::Smem &smem) {
    for (int i = 0; i < C::kStages; i++) {
        smem.k_full[i].init(1);
        smem.k_empty[i].init(C::kLatent ? 128 + kValueThreads : 128); // threads that read the keys
        smem.v_full[i].init(1);
        smem.v_empty[i].init(kValueThreads);
    }
    for (int i = 0; i < C::kSlots; i++) {
        smem.p_full[i].init(128);
        smem.p_empty[i].init(C::kSplitsColumns ? kValueThreads : 128);
    }
    barrier_init_fence();
}

template <class C>
__global__ __launch_bounds__(kThreads, 1) void decode_rows_kernel(
        const __grid_constant__ typename C::Arguments params, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    auto &smem = *reinterpret_cast<typename C::Smem *>(shared);
    if (threadIdx.x == 0) {
        init_barriers<C>(smem);
        smem.part.found = false;
    }
    if (threadIdx.x == kFirstLoader) prefetch_maps(maps);
    __syncthreads();
    const bool found = take_first<kThreads, kRows>(smem, params);
    if (threadIdx.x >= kFirstLoader) {
        registers_down<C::kLoaderRegisters>();
        Loader<C> loader{smem, params, maps};
        for_each_part<kThreads, kRows, false>(smem, params, found, [&] {
            if (threadIdx.x < kFirstLoader + 32) loader.load(smem.part);
        });
    } else if (threadIdx.x >= kFirstScoreThread) {
        registers_down<C::kScoreRegisters>();
        Scores<C> scores{smem, params, {}, {}};
        for_each_part<kThreads, kRows, false>(smem, params, found, [&] {
            scores.attend();
            bar_sync<kValueThreads + 128>(kPartBarrier);
        });
    } else {
        registers_up<C::kValueRegisters>();
        Values<C> values{smem, params, warp_uniform(threadIdx.x / 128), {}};
        for_each_part<kThreads, kRows, true>(smem, params, found, [&] { values.attend(); });
        decode::write_empty<C>(smem, params);
    }
#else
    __trap();
#endif
}

// Whether the values are the first columns of the keys, of pages in both tiers.
bool are_first_columns(const sinkattn_tensor &v, const sinkattn_tensor &k) {
    return v.data == k.data && v.batch_stride == k.batch_stride && v.row_stride == k.row_stride && v.head_stride == k.head_stride;
}

// Latent: Rows with values in the keys' tiles, where there is one.
template <class Rows, class Latent>
sinkattn_status launch_values(const sinkattn_decode_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const bool latent = are_first_columns(args.fwd.v, args.fwd.k) && (!args.host.num_pages || are_first_columns(args.host.v, args.host.k));
    if (!std::is_same_v<Rows, Latent> && latent) return launch<Latent, decode_rows_kernel<Latent>, kThreads>(args, plan, context);
    return launch<Rows, decode_rows_kernel<Rows>, kThreads>(args, plan, context);
}

template <class Element, int kSteps, int kStages, int kHeadDim, int kHeadDimV>
using Rows = Config<Element, kHeadDim, kHeadDimV, kSteps, kStages, (kHeadDim > 256 ? 1 : 2), false>;
template <class Element> using Latent = Config<Element, 576, 512, 4, 2, 1, true>;

template <int kSteps, int kStages, int kHeadDim, int kHeadDimV>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_decode_args *>(arguments);
    using OfBf16 = Rows<Bf16, kSteps, kStages, kHeadDim, kHeadDimV>;
    using OfFp16 = Rows<Fp16, kSteps, kStages, kHeadDim, kHeadDimV>;
    constexpr bool kHasLatent = kHeadDim == 576;
    if (args.fwd.problem.dtype == SINKATTN_BF16)
        return launch_values<OfBf16, std::conditional_t<kHasLatent, Latent<Bf16>, OfBf16>>(args, *plan, *context);
    return launch_values<OfFp16, std::conditional_t<kHasLatent, Latent<Fp16>, OfFp16>>(args, *plan, *context);
}

} // namespace

#define SA_DECODE_ROWS(name, ...) \
    extern "C" sinkattn_status sa_decode_cuda_sm90_rows_##name( \
            const void *args, const sinkattn_plan *plan, const sinkattn_context *context) { \
        return launch_dtype<__VA_ARGS__>(args, plan, context); \
    }
// Steps a stage, stages, head_dim, head_dim_v.
SA_DECODE_ROWS(d64, 4, 8, 64, 64)
SA_DECODE_ROWS(d128, 4, 5, 128, 128)
SA_DECODE_ROWS(d192_v128, 4, 4, 192, 128)
SA_DECODE_ROWS(d256, 2, 5, 256, 256)
SA_DECODE_ROWS(d576, 2, 2, 576, 512)

} // namespace many_rows
} // namespace sa::decode
