// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA half takes of the driver's header: tensor maps.
#pragma once

#include <stdint.h>

using CUdevice = int;
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Of four dimensions, the first contiguous, of 16-bit elements; strides in bytes.
struct alignas(64) CUtensorMap {
    unsigned char *data;
    uint64_t sizes[4], strides[3];
    uint32_t box[4];
};
static_assert(sizeof(CUtensorMap) == 128, "as the driver's");
