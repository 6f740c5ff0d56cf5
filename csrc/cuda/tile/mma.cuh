// SPDX-License-Identifier: Apache-2.0
//
// Products of tiles by mma.sync. A warp owns 16 kBlocks rows of a product; element x of accumulator [b][n] is row
// 16 b + fragment_row(x / 2), column 8 n + fragment_column() + x % 2.
#pragma once

#include "cuda/ptx/sm80.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/fragment.cuh"

namespace sa {

// s = a b^T. a: the warp's first row, b: the tile whose rows are the columns of s.
template <class Element, int kBytes, int kBlocks, int kColumns>
__device__ __forceinline__ void product_abt(float (&s)[kBlocks][kColumns][4], uint32_t a, uint32_t b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int n = 0; n < kColumns; n++)
#pragma unroll
            for (int x = 0; x < 4; x++) s[block][n][x] = 0.0f;
#pragma unroll
    for (int step = 0; step < kBytes / 32; step++) {
        uint32_t left[kBlocks][4];
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
            ldmatrix_x4(left[block], a + swizzled<kBytes>(16 * block + left_row(lane), 2 * step + left_chunk(lane)));
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
            uint32_t right[4];
            ldmatrix_x4(right, b + swizzled<kBytes>(8 * n + right_row(lane), 2 * step + right_chunk(lane)));
#pragma unroll
            for (int block = 0; block < kBlocks; block++) {
                mma_m16n8k16<Element>(s[block][n], left[block], right[0], right[1]);
                mma_m16n8k16<Element>(s[block][n + 1], left[block], right[2], right[3]);
            }
        }
    }
}

// Columns 16 step to 16 step + 15 of p, rounded, as the left side of a product.
template <class Element, int kBlocks, int kDepth>
__device__ __forceinline__ void left_of(uint32_t (&left)[kBlocks][4], const float (&p)[kBlocks][kDepth][4], int step) {
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float *pair = &p[block][2 * step + x / 2][2 * (x & 1)];
            left[block][x] = pack_halves<Element>(pair[0], pair[1]);
        }
}

// o += p b. The columns of o are b's from chunk first_chunk on.
template <class Element, int kBytes, int kBlocks, int kDepth, int kColumns>
__device__ __forceinline__ void product_pb(
        float (&o)[kBlocks][kColumns][4], const float (&p)[kBlocks][kDepth][4], uint32_t b, int first_chunk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kDepth / 2; step++) {
        uint32_t left[kBlocks][4];
        left_of<Element>(left, p, step);
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
            uint32_t right[4];
            ldmatrix_x4_trans(right, b + swizzled<kBytes>(16 * step + left_row(lane), first_chunk + n + left_chunk(lane)));
#pragma unroll
            for (int block = 0; block < kBlocks; block++) {
                mma_m16n8k16<Element>(o[block][n], left[block], right[0], right[1]);
                mma_m16n8k16<Element>(o[block][n + 1], left[block], right[2], right[3]);
            }
        }
    }
}

// Row `lane` of a times row `lane` of b, which are 32 rows of 64 elements each: the diagonal of a b^T.
template <class Element> __device__ __forceinline__ float row_dot(uint32_t a, uint32_t b) {
    const int lane = pinned(threadIdx.x % 32);
    const uint32_t left_at = a + swizzled(lane % 16, lane / 16), right_at = b + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    float d[2][2][4] = {};
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t left[4], right[4];
            ldmatrix_x4(left, pairs_on(left_at, t) + i * 16 * kRowBytes);
            ldmatrix_x4(right, pairs_on(right_at, t) + i * 16 * kRowBytes);
            mma_m16n8k16<Element>(d[i][0], left, right[0], right[1]);
            mma_m16n8k16<Element>(d[i][1], left, right[2], right[3]);
        }
    const int from = lane % 8 * 4 + lane % 8 / 2; // the lane that holds row lane % 8 + 8 x of the diagonal
    float sum = 0.0f;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const float *pair = &d[x / 2][x % 2][2 * (x % 2)];
        const float found = __shfl_sync(0xffffffffu, lane & 4 ? pair[1] : pair[0], from);
        if (lane / 8 == x) sum = found;
    }
    return sum;
}

// product_pb where b holds values that are not finite, and p zeros for rows of b that must have no effect: 0 * NaN is not 0. Such values
// are left out of the product, then added one row of b at a time where meets(i, row): the thread's i-th row of o meets that row of b.
// Elements of o that meet none of them have the bits of product_pb.
template <class Element, int kBytes, int kBlocks, int kDepth, int kColumns, class Meets>
__device__ __forceinline__ void product_pb_hiding(
        float (&o)[kBlocks][kColumns][4], const float (&p)[kBlocks][kDepth][4], uint32_t b, int first_chunk, const Meets &meets) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kDepth / 2; step++) {
        uint32_t left[kBlocks][4];
        left_of<Element>(left, p, step);
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
            uint32_t right[4], hidden[4];
            ldmatrix_x4_trans(right, b + swizzled<kBytes>(16 * step + left_row(lane), first_chunk + n + left_chunk(lane)));
#pragma unroll
            for (int x = 0; x < 4; x++) {
                hidden[x] = nonfinite_halves<Element>(right[x]);
                right[x] ^= hidden[x];
            }
#pragma unroll
            for (int block = 0; block < kBlocks; block++) {
                mma_m16n8k16<Element>(o[block][n], left[block], right[0], right[1]);
                mma_m16n8k16<Element>(o[block][n + 1], left[block], right[2], right[3]);
            }
            if (!__any_sync(0xffffffffu, (hidden[0] | hidden[1] | hidden[2] | hidden[3]) != 0)) continue;
#pragma unroll 1
            for (int row = 0; row < 16; row++) {
                const uint32_t half = lane % 4 != row % 8 / 2 ? 0u : row & 1 ? 0xffff0000u : 0x0000ffffu;
                const uint32_t low = row < 8 ? half : 0u, high = row < 8 ? 0u : half; // masks of the fragments' column, or row, `row`
                if (!__any_sync(0xffffffffu, (((hidden[0] | hidden[2]) & low) | ((hidden[1] | hidden[3]) & high)) != 0)) continue;
#pragma unroll
                for (int block = 0; block < kBlocks; block++) {
                    const uint32_t one[4] = {left[block][0] & low, left[block][1] & low, left[block][2] & high, left[block][3] & high};
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        float term[4] = {};
                        mma_m16n8k16<Element>(term, one, hidden[2 * side] & low, hidden[2 * side + 1] & high);
#pragma unroll
                        for (int x = 0; x < 4; x++)
                            if (meets(2 * block + x / 2, 16 * step + row)) o[block][n + side][x] += term[x];
                    }
                }
            }
        }
    }
}

} // namespace sa
