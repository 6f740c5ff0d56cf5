// SPDX-License-Identifier: Apache-2.0
//
// Rows of out once more in NVFP4, four columns a lane.
#pragma once

#include "core/nvfp4.h"
#include "cuda/ptx/sm80.cuh"

namespace sa {

// row: of [batch, q_len, num_q_heads]. halves: columns [column, column + 4) of out; lanes 4 n to 4 n + 3 hold a block of 16.
template <class Element>
__device__ __forceinline__ void write_nvfp4(
        uint8_t *values, uint8_t *scales, float global_scale, int64_t head_dim, int64_t row, int column, uint2 halves) {
    float y[4];
    uint32_t top = 0, code = 0;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        y[x] = widen<Element>(static_cast<uint16_t>((x < 2 ? halves.x : halves.y) >> 16 * (x % 2))) * global_scale;
        top = max(top, sa_magnitude_bits(y[x]));
    }
    const unsigned mates = 0xfu << (threadIdx.x % 32 / 4 * 4);
    top = max(top, __shfl_xor_sync(mates, top, 1));
    top = max(top, __shfl_xor_sync(mates, top, 2));
    const uint32_t scale = sa_nvfp4_scale(top);
    const float factor = sa_e4m3_factor(scale);
#pragma unroll
    for (int x = 0; x < 4; x++) code |= sa_nvfp4_value(y[x], factor) << 4 * x;
    const int64_t at = row * head_dim + column;
    *reinterpret_cast<uint16_t *>(values + at / 2) = static_cast<uint16_t>(code);
    if (column % SA_NVFP4_BLOCK == 0) scales[at / SA_NVFP4_BLOCK] = static_cast<uint8_t>(scale);
}

} // namespace sa
