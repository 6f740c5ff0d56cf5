// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps (TMA descriptors), made by an entry point of the driver that is looked up at first use.
#pragma once

#include <cuda.h>

#include "cuda/host/backend.h"
#include "cuda/work/keys.cuh"

namespace sa {

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
        const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static inline sinkattn_status find_encode(Encode *encode) {
    static Encode known; // one driver a process
    *encode = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (*encode) return sa_ok();
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error == cudaSuccess && found != cudaDriverEntryPointSuccess)
        return sa_status(SINKATTN_DEVICE, "the CUDA driver has no cuTensorMapEncodeTiled; it must be that of CUDA 12.0 or later");
    if (error != cudaSuccess) return sa_cuda_status("cudaGetDriverEntryPointByVersion", error);
    *encode = reinterpret_cast<Encode>(function);
    __atomic_store_n(&known, *encode, __ATOMIC_RELAXED);
    return sa_ok();
}

// The driver's own calls need a context, which a thread has from its first launch on; the first call of an autograd's worker may be this.
static inline sinkattn_status enter_context() {
    static thread_local bool entered;
    if (entered) return sa_ok();
    int ordinal = 0;
    cudaError_t error = cudaGetDevice(&ordinal);
    if (error == cudaSuccess) error = cudaSetDevice(ordinal);
    entered = error == cudaSuccess;
    return sa_cuda_status("cudaSetDevice", error);
}

// The map of a tensor [batch, rows, heads, head_dim], in boxes of box_rows rows x box_heads heads x 64.
static inline sinkattn_status encode_map(CUtensorMap *map, const sinkattn_problem &p, const sinkattn_tensor &tensor, int64_t batch,
        int64_t rows, int64_t heads, int box_rows, int box_heads, const char *name) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(p.head_dim), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(rows),
            static_cast<cuuint64_t>(batch)};
    const int64_t step[] = {tensor.head_stride, tensor.row_stride, tensor.batch_stride};
    cuuint64_t strides[3];
    for (int i = 0; i < 3; i++) // a dimension of size 1 may have any stride, which the driver would refuse
        strides[i] = sizes[i + 1] == 1 ? 16 : static_cast<cuuint64_t>(step[i] * 2);
    const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows), 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapDataType type = p.dtype == SINKATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    Encode encode = nullptr;
    SA_TRY(find_encode(&encode));
    SA_TRY(enter_context());
    const CUresult result = encode(map, type, 4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return sa_ok();
    return sa_status(SINKATTN_DEVICE, "cuTensorMapEncodeTiled for %s failed with %d; strides %lld, %lld, %lld", name,
            static_cast<int>(result), static_cast<long long>(tensor.batch_stride), static_cast<long long>(tensor.row_stride),
            static_cast<long long>(tensor.head_stride));
}

// The map of a tensor like q: tiles of `tokens` tokens x `heads` heads.
static inline sinkattn_status map_rows(
        CUtensorMap *map, const sinkattn_problem &p, const sinkattn_tensor &tensor, int tokens, int heads, const char *name) {
    return encode_map(map, p, tensor, p.packed ? 1 : p.batch, p.q_len, p.num_q_heads, tokens, heads, name);
}

// The map of a tensor like k: tiles of `keys` keys of one head.
static inline sinkattn_status map_keys(
        CUtensorMap *map, const sinkattn_problem &p, const sinkattn_tensor &tensor, int keys, const char *name) {
    return encode_map(map, p, tensor, p.packed ? 1 : p.batch, p.k_len, p.num_kv_heads, keys, 1, name);
}

static inline sinkattn_status map_keys(
        CUtensorMap *map, const sinkattn_problem &p, const sinkattn_tensor &tensor, const TensorKeys &, int keys, const char *name) {
    return map_keys(map, p, tensor, keys, name);
}

// The same of a cache: its pages, in boxes of keys of one page.
static inline sinkattn_status map_keys(
        CUtensorMap *map, const sinkattn_problem &p, const sinkattn_tensor &tensor, const CacheKeys &cache, int, const char *name) {
    return encode_map(map, p, tensor, cache.num_pages, cache.page_size, p.num_kv_heads, cache.box, 1, name);
}

} // namespace sa
