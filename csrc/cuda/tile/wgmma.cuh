// SPDX-License-Identifier: Apache-2.0
//
// Products of tiles by wgmma, issued and committed; the caller waits. Tiles lie in swizzled rows of 64 elements; a longer row's halves lie
// kHalf bytes apart.
#pragma once

#include "cuda/ptx/sm90.cuh"
#include "cuda/tile/fragment.cuh"

namespace sa {

// d = a b^T over kLength elements of a row, and what add() issues.
template <class Element, int kLength, int kHalfA, int kHalfB, int kSize, class Add>
__device__ __forceinline__ void wgmma_abt(float (&d)[kSize], uint32_t a, uint32_t b, const Add &add) {
    const uint64_t left = operand(a, 0), right = operand(b, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kLength / 16; step++)
        wgmma_shared<Element>(
                d, operand_at(left, step / 4 * kHalfA + step % 4 * 32), operand_at(right, step / 4 * kHalfB + step % 4 * 32), step > 0);
    add();
    wgmma_commit();
}
template <class Element, int kLength, int kHalfA, int kHalfB, int kSize>
__device__ __forceinline__ void wgmma_abt(float (&d)[kSize], uint32_t a, uint32_t b) {
    wgmma_abt<Element, kLength, kHalfA, kHalfB>(d, a, b, [] {});
}

// A product can add a float to each of its columns: its bfloat16 pieces are the first rows of an 8 x 64 tile, the others are zeros. The
// left side is all 0.5, so that an infinite float meets no zero; one step of 16 takes the 8 rows twice.
constexpr int kAddendBytes = 8 * kRowBytes;

// Returns the sum of the pieces; inf and NaN are the first piece alone. to: the tile's first kPieces rows, with its swizzle.
template <int kPieces> __device__ __forceinline__ float store_addend(uint16_t (*to)[64], int column, float x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
        const uint32_t piece = pack_halves<Bf16>(0.0f, isfinite(sum) ? x - sum : 0.0f);
        sum += __uint_as_float(piece);
        to[i][(column / 8 ^ i) * 8 + column % 8] = static_cast<uint16_t>(piece >> 16);
    }
    return sum;
}

// 8 rows of the left side.
struct alignas(128) Halves {
    uint32_t pairs[32];

    __device__ __forceinline__ void fill() {
        if (threadIdx.x < 32) pairs[threadIdx.x] = 0x3f003f00;
    }
};

template <int kSize> __device__ __forceinline__ void wgmma_add_columns(float (&d)[kSize], uint32_t halves, uint32_t addends) {
    wgmma_shared_rows<Bf16>(d, operand_of_rows(halves, 0, 0), operand(addends, kAddendBytes, 0), true);
}

// d = a b over kLength columns of a, added to d if `adds`.
template <class Element, int kLength, int kHalfA, int kHalfB, int kSize>
__device__ __forceinline__ void wgmma_ab(float (&d)[kSize], uint32_t a, uint32_t b, bool adds) {
    const uint64_t left = operand(a, 0), right = operand(b, kHalfB);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kLength / 16; step++)
        wgmma_shared_rows<Element>(
                d, operand_at(left, step / 4 * kHalfA + step % 4 * 32), operand_at(right, step * 16 * kRowBytes), adds || step > 0);
    wgmma_commit();
}

// d += p b, p as packed pairs.
template <class Element, int kHalf, int kSize, int kSteps>
__device__ __forceinline__ void wgmma_pb(float (&d)[kSize], const uint32_t (&p)[kSteps][4], uint32_t b) {
    const uint64_t right = operand(b, kHalf);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; step++) wgmma_registers<Element>(d, p[step], operand_at(right, step * 16 * kRowBytes), true);
    wgmma_commit();
}

template <class Element, int kSteps> __device__ __forceinline__ void pack(uint32_t (&packed)[kSteps][4], const float (&x)[8 * kSteps]) {
#pragma unroll
    for (int i = 0; i < 8 * kSteps; i += 2) packed[i / 8][i / 2 % 4] = pack_halves<Element>(x[i], x[i + 1]);
}

// Stores the accumulator in a tile, the thread's i-th row times factor(i), rounded. to: address of store_row's store_chunk.
template <class Element, int kHalf, int kSize, class Factor>
__device__ __forceinline__ void store_accumulator(uint32_t to, const float (&d)[kSize], const Factor &factor) {
#pragma unroll
    for (int n = 0; n < kSize / 8; n++) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[i] = pack_halves<Element>(d[8 * n + 2 * i] * factor(i & 1), d[8 * n + 2 * i + 1] * factor(i & 1));
        stmatrix_x4(pairs_on(to, n, kHalf), packed);
    }
}

// Writes the thread's i-th row of the accumulator, times `factor` and rounded, to global memory: a lane of four has every fourth chunk of 8
// columns. By all four lanes; to: the row, NULL where it is not written.
template <class Element, int kSize>
__device__ __forceinline__ void write_row(uint16_t *to, const float (&d)[kSize], int i, float factor, int columns) {
#pragma unroll
    for (int n = 0; n < kSize / 4; n += 4) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = pack_halves<Element>(d[4 * (n + k) + 2 * i] * factor, d[4 * (n + k) + 2 * i + 1] * factor);
        quad_transpose(x);
        const int column = 8 * (n + static_cast<int>(threadIdx.x % 4));
        if (to && column < columns) *reinterpret_cast<uint4 *>(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

constexpr int kStagedBytes = 16 * 64; // 16 rows of 32 columns, of a warp

// Rounds the thread's two rows of an accumulator, times `factor`, and exchanges chunks of 8 columns: to[n][r] becomes chunk 4 n + lane % 4
// of row r. Through `staged`, where chunk c of 32 columns of row r lies at c ^ (r / 2 % 4), so that no bank is met twice. By a whole warp.
template <class Element, int kSize>
__device__ __forceinline__ void exchange(uint4 (&to)[kSize / 16][2], const float (&d)[kSize], float factor, unsigned char *staged) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto offset = [](int row, int chunk) { return row * 64 + ((chunk ^ row / 2 % 4) << 4); };
    const uint32_t in = shared_address(staged) + offset(lane % 16, lane / 16);
    const unsigned char *const out = staged + offset(lane / 4, lane % 4);
#pragma unroll
    for (int n = 0; n < kSize / 16; n++) {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int k = 16 * n + 8 * pair + 2 * i;
                x[i] = pack_halves<Element>(d[k] * factor, d[k + 1] * factor);
            }
            stmatrix_x4(in ^ pair << 5, x);
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 2; r++) to[n][r] = *reinterpret_cast<const uint4 *>(out + r * 8 * 64);
        __syncwarp();
    }
}

// Writes what exchange() left to the thread's two rows; to: NULL where one is not written.
template <int kSize> __device__ __forceinline__ void write_rows(uint16_t *const (&to)[2], const uint4 (&chunks)[kSize][2], int columns) {
#pragma unroll
    for (int n = 0; n < kSize; n++) {
        const int column = 8 * (4 * n + static_cast<int>(threadIdx.x % 4));
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (to[r] && column < columns) *reinterpret_cast<uint4 *>(to[r] + column) = chunks[n][r];
    }
}

} // namespace sa
