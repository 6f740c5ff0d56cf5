// SPDX-License-Identifier: Apache-2.0
//
// wgmma of csrc/cuda/ptx/sm90.cuh: every shape and source of operands, against sums on the host that are exact.

#include "cuda/ptx/sm90.cuh"

#include "check.cuh"

using namespace sa;

constexpr int kPad = 5; // rows before an operand: a tile may start at any row

enum Source { kShared, kTransposed, kColumns, kRegisters };
constexpr __host__ __device__ bool has_a_transposed(Source source) { return source == kTransposed || source == kColumns; }
constexpr __host__ __device__ bool has_b_along_k(Source source) { return source == kShared || source == kColumns; }

// Rows of 64 16-bit elements, swizzled by 128 bytes from a multiple of 1024 on.
__device__ void put(uint16_t *tile, int row, int column, uint32_t bits) {
    tile[64 * row + 8 * (column / 8 ^ row % 8) + column % 8] = static_cast<uint16_t>(bits);
}

template <class Element> __device__ uint32_t half_of(float x) { return pack_halves<Element>(x, 0.0f) & 0xffff; }

// d[64 x N] = a[64 x 64] b[64 x N], in four steps of 16, where a and b are of small(), given as [64][64] and [64][N].
template <class Element, int kLength, Source kSource>
__global__ __launch_bounds__(128) void products(const float *a, const float *b, float *d) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kN = 2 * kLength, kHalves = has_b_along_k(kSource) ? 1 : (kN + 63) / 64;
    constexpr int kRowsB = has_b_along_k(kSource) ? kN : 64, kHalf = (kPad + kRowsB + 7) / 8 * 8 * 64; // elements of 64 columns of b
    extern __shared__ __align__(1024) uint16_t shared[];
    uint16_t *tile_a = shared, *tile_b = shared + (kPad + 64 + 7) / 8 * 8 * 64;
    for (int i = threadIdx.x; i < 64 * 64; i += 128) { // K along the rows, or, transposed, M
        const int row = i / 64, column = i % 64;
        put(tile_a, kPad + row, column, half_of<Element>(has_a_transposed(kSource) ? a[64 * column + row] : a[i]));
    }
    for (int i = threadIdx.x; i < 64 * kN; i += 128) {
        const int k = i / kN, n = i % kN;
        if (has_b_along_k(kSource))
            put(tile_b, kPad + n, k, half_of<Element>(b[i]));
        else
            put(tile_b + n / 64 * kHalf, kPad + k, n % 64, half_of<Element>(b[i]));
    }
    async_fence();
    __syncthreads();
    const uint64_t of_a = operand(shared_address(tile_a) + 128 * kPad, 0);
    const uint64_t of_b = operand(shared_address(tile_b) + 128 * kPad, kHalves > 1 ? 2 * kHalf : 0);
    const int row = 16 * (threadIdx.x / 32) + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    float sum[kLength];
    for (float &x : sum) x = 1000.0f; // of no account at first
    uint32_t from_a[4][4];
    for (int step = 0; step < 4; step++)
        for (int i = 0; i < 4; i++) {
            const float *at = a + 64 * (row + 8 * (i % 2)) + 16 * step + pair + 8 * (i / 2);
            from_a[step][i] = pack_halves<Element>(at[0], at[1]);
        }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if constexpr (kSource == kShared)
            wgmma_shared<Element, kLength>(sum, operand_at(of_a, 32 * step), operand_at(of_b, 32 * step), step > 0);
        else if constexpr (kSource == kTransposed)
            wgmma_shared_transposed<Element, kLength>(sum, operand_at(of_a, 2048 * step), operand_at(of_b, 2048 * step), step > 0);
        else if constexpr (kSource == kColumns)
            wgmma_shared_columns<Element, kLength>(sum, operand_at(of_a, 2048 * step), operand_at(of_b, 32 * step), step > 0);
        else
            wgmma_registers<Element, kLength>(sum, from_a[step], operand_at(of_b, 2048 * step), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(sum);
#pragma unroll
    for (int i = 0; i < kLength; i++) d[kN * (row + 8 * (i / 2 % 2)) + 8 * (i / 4) + pair + i % 2] = sum[i];
#endif
}

template <class Element, int kLength, Source kSource> static bool products_are_right() {
    constexpr int kN = 2 * kLength, kBytes = 2 * 64 * (72 + (has_b_along_k(kSource) ? (kPad + kN + 7) / 8 * 8 : 72 * ((kN + 63) / 64)));
    auto *a = new_array<float>(64 * 64), *b = new_array<float>(64 * kN), *d = new_array<float>(64 * kN);
    for (int i = 0; i < 64 * 64; i++) a[i] = small(i / 64, i % 64);
    for (int i = 0; i < 64 * kN; i++) b[i] = small(i % kN + 3, i / kN);
    products<Element, kLength, kSource><<<1, 128, kBytes>>>(a, b, d);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 64 * kN; i++) {
        float want = 0;
        for (int k = 0; k < 64; k++) want += a[64 * (i / kN) + k] * b[kN * k + i % kN];
        right &= d[i] == want;
    }
    return right;
}

template <class Element> static void test_products() {
    check("wgmma_shared, n 32", products_are_right<Element, 16, kShared>());
    check("wgmma_shared, n 64", products_are_right<Element, 32, kShared>());
    check("wgmma_shared, n 80", products_are_right<Element, 40, kShared>());
    check("wgmma_shared, n 128", products_are_right<Element, 64, kShared>());
    check("wgmma_shared, n 144", products_are_right<Element, 72, kShared>());
    check("wgmma_shared_transposed", products_are_right<Element, 32, kTransposed>());
    check("wgmma_shared_columns, n 16", products_are_right<Element, 8, kColumns>());
    check("wgmma_shared_columns, n 64", products_are_right<Element, 32, kColumns>());
    check("wgmma_registers, n 64", products_are_right<Element, 32, kRegisters>());
    check("wgmma_registers, n 128", products_are_right<Element, 64, kRegisters>());
}

void test_wgmma() {
    test_products<Bf16>();
    test_products<Fp16>();
}
