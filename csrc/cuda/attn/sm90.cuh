// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of sm_90 share: tensor maps, the rows of a wgmma's accumulators, values that are not finite.
#pragma once

#include "cuda/attn/work.cuh"
#include "cuda/cuda_backend.h"
#include "cuda/device/ptx_sm90.cuh"

namespace sa {

constexpr int kRowBytes = 128; // of a row of 64 elements in shared memory, its 16-byte chunk c at c ^ (row % 8)

// The two rows of a thread's accumulators in a warp group's 64: element i belongs to row (i / 2) % 2 of them.
struct ThreadRows {
    int first, group, token[2]; // row of the tile, heads of a token, tokens of the tile

    __device__ __forceinline__ ThreadRows(int first_row, int group_) : first(first_row), group(group_) {
        for (int i = 0; i < 2; i++) token[i] = row(i) / group;
    }

    __device__ __forceinline__ int row(int i) const { return first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }
    __device__ __forceinline__ int head(int i) const { return row(i) - token[i] * group; }
};

// ---- 0 * NaN is not 0: values that are not finite are zeroed before the math sees them, and added to the rows that see them ----

template <class Element> __device__ __forceinline__ bool unfinite(uint32_t pair) {
    constexpr uint32_t kLow = kExponent<Element>, kHigh = kLow << 16;
    return (pair & kLow) == kLow || (pair & kHigh) == kHigh;
}

// By kThreads threads, of which this is the i-th. True where something was zeroed.
template <class Element, int kThreads> __device__ __forceinline__ bool zero_unfinite(unsigned char *values, int bytes, int i) {
    bool found = false;
    for (int x = i; x < bytes / 16; x += kThreads) {
        uint4 &chunk = reinterpret_cast<uint4 *>(values)[x];
        const uint4 halves = chunk;
        if (!(unfinite<Element>(halves.x) || unfinite<Element>(halves.y) || unfinite<Element>(halves.z) || unfinite<Element>(halves.w)))
            continue;
        found = true;
        auto *each = reinterpret_cast<uint16_t *>(&chunk);
        for (int n = 0; n < 8; n++)
            if ((each[n] & kExponent<Element>) == kExponent<Element>) each[n] = 0;
    }
    return found;
}

// From global memory. `row` holds the values of a key; sees(i) says whether the thread's i-th row sees it.
template <class Element, int kLength, class Sees>
__device__ __forceinline__ void add_unfinite(float (&o)[kLength], const uint16_t *row, int64_t head_dim, const Sees &sees) {
#pragma unroll
    for (int i = 0; i < kLength; i++) {
        const int x = 8 * (i / 4) + 2 * (threadIdx.x % 4) + (i & 1);
        if (x >= head_dim || !sees(i / 2 & 1)) continue;
        if ((row[x] & kExponent<Element>) == kExponent<Element>) o[i] += widen<Element>(row[x]);
    }
}

// ---- tensor maps ----

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                            const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

static inline sinkattn_status find_encode(Encode *encode) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error == cudaSuccess && found != cudaDriverEntryPointSuccess)
        return sa_status(SINKATTN_DEVICE, "the CUDA driver has no cuTensorMapEncodeTiled; it must be that of CUDA 12.0 or later");
    *encode = reinterpret_cast<Encode>(function);
    return sa_cuda_status("cudaGetDriverEntryPointByVersion", error);
}

// [batch, rows, heads, head_dim], in boxes of `tokens` rows x `heads_a_box` heads x 64.
static inline sinkattn_status encode_map(Encode encode, CUtensorMap *map, const sinkattn_problem &p, const sinkattn_tensor &tensor,
                                         int64_t rows, int64_t heads, int tokens, int heads_a_box, const char *name) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(p.head_dim), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(p.packed ? 1 : p.batch)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(tensor.head_stride * 2), static_cast<cuuint64_t>(tensor.row_stride * 2),
                                  static_cast<cuuint64_t>((p.packed ? tensor.row_stride : tensor.batch_stride) * 2)};
    const cuuint32_t box[] = {64, static_cast<cuuint32_t>(heads_a_box), static_cast<cuuint32_t>(tokens), 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapDataType type = p.dtype == SINKATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUresult result = encode(map, type, 4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return sa_ok();
    return sa_status(SINKATTN_DEVICE, "cuTensorMapEncodeTiled for %s failed with %d; strides %lld, %lld, %lld", name,
                     static_cast<int>(result), static_cast<long long>(tensor.batch_stride), static_cast<long long>(tensor.row_stride),
                     static_cast<long long>(tensor.head_stride));
}

static inline unsigned num_multiprocessors() {
    int device, count;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return static_cast<unsigned>(count);
}

} // namespace sa
