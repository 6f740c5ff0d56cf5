// SPDX-License-Identifier: Apache-2.0
//
// One tile of a decode: 16 rows against 16 keys, by one warp, on mma.sync. Q and K lie in shared memory in swizzled rows of C::kRowBytes, V
// in rows of C::kRowBytesV; a warp computes C::kColumns columns of O.
#pragma once

#include <numeric>
#include <type_traits>

#include "cuda/decode/work.cuh"
#include "cuda/ptx/sm80.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/fragment.cuh"

namespace sa::decode {

// A tile of 16 keys, K and then V, of at most so many columns. Without kNarrow, V has as many as K.
template <int kHeadDim_, int kHeadDimV_ = kHeadDim_> struct TileSizes {
    static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kChunks = kHeadDim / 8, kChunksV = kHeadDimV / 8;
    static constexpr int kRowBytes = 2 * kHeadDim, kRowBytesV = 2 * kHeadDimV, kTileBytes = kTileK * kRowBytes; // kTileBytes: of K
    static constexpr int kHeadBytes = kTileBytes + kTileK * kRowBytesV;
    static constexpr int kRowThreads = std::gcd(kChunks, kChunksV); // that copy a row of each
    static constexpr int kPartialRow = kHeadDimV + 8; // floats: O, pivot, sum, a counter, and room that spreads rows over the banks
    static constexpr bool kNarrow = kHeadDim > 128;
    static_assert(kNarrow || kHeadDimV == kHeadDim);
};

// Offsets that a lane passes to ldmatrix, of chunk 0 or 1 of a row: as right side of a product (K), as left side (Q), or transposed (V).
struct LaneRows {
    uint32_t k, q, v;
};

template <class C> __device__ __forceinline__ LaneRows lane_rows() {
    const int lane = threadIdx.x % 32;
    return {swizzled(0, C::kRowBytes, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1), swizzled(0, C::kRowBytes, lane & 15, lane >> 4),
            swizzled(0, C::kRowBytesV, lane & 15, lane >> 4)};
}

// The state of a warp's stream. o[n][2 i + x]: row fragment_row(i), column 8 n + fragment_column() + x of the warp's; pivot[i] in log2
// units; sum[i] over this lane's keys.
template <class C> struct Rows {
    uint32_t q[C::kQueriesInRegisters ? C::kHeadDim / 16 : 1][4];
    float o[C::kColumns / 8][4], pivot[2], sum[2];

    __device__ __forceinline__ Rows() {
        for (auto &columns : o)
            for (float &x : columns) x = 0.0f;
        pivot[0] = pivot[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }
};

// x: elements fragment_column() and the next of a chunk, in row fragment_row(half).
template <class C> __device__ __forceinline__ void set_query(Rows<C> &rows, int half, int chunk, uint32_t x) {
    rows.q[chunk / 2][2 * (chunk % 2) + half] = x;
}

// s = Q K^T. q and k are addresses at lane_rows.
template <class C> __device__ __forceinline__ void qk_product(float (&s)[2][4], const Rows<C> &rows, uint32_t q, uint32_t k, float scale) {
    for (int x = 0; x < 4; x++) s[0][x] = s[1][x] = 0.0f;
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; step++) {
        uint32_t keys[4], a[4];
        ldmatrix_x4(keys, pairs_on(k, step));
        if constexpr (!C::kQueriesInRegisters)
            ldmatrix_x4(a, pairs_on(q, step));
        else
            for (int x = 0; x < 4; x++) a[x] = rows.q[step][x];
        mma_m16n8k16<typename C::Element>(s[0], a, keys[0], keys[1]);
        mma_m16n8k16<typename C::Element>(s[1], a, keys[2], keys[3]);
    }
    if (scale < 0.0f) // its sign moves to the scores, whose maximum becomes the pivot
        for (int x = 0; x < 4; x++) s[0][x] = -s[0][x], s[1][x] = -s[1][x];
}

__device__ __forceinline__ bool sees(const Row &row, int32_t key) { return (key >= row.begin && key < row.end) || key < row.sink_end; }

// Sets scores to -inf where the row does not see the key.
template <class C> __device__ __forceinline__ void mask_tile(float (&s)[2][4], const Rows<C> &, const Row *seen, int32_t tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const Row row = seen[lane / 4 + 8 * i];
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (!sees(row, tile * kTileK + 8 * (x / 2) + 2 * (lane % 4) + x % 2)) s[x / 2][2 * i + x % 2] = -INFINITY;
    }
}

// s becomes P; o is rescaled if the pivot grows. Rows from num_rows on get P = 0.
template <class C> __device__ __forceinline__ void softmax_step(float (&s)[2][4], Rows<C> &rows, float scale_log2, int num_rows) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int half = 2 * i;
        if (8 * i >= num_rows) {
            s[0][half] = s[0][half + 1] = s[1][half] = s[1][half + 1] = 0.0f;
            continue;
        }
        const float top = quad_max(fmaxf(fmaxf(s[0][half], s[0][half + 1]), fmaxf(s[1][half], s[1][half + 1]))) * scale_log2,
                    before = rows.pivot[i];
        const float pivot = top > before ? top : before;
        const float from = pivot == -INFINITY ? 0.0f : pivot;
        const float alpha = before == pivot ? 1.0f : exp2_approx(before - from);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int x = half; x < half + 2; x++) {
                s[n][x] = exp2_approx(fmaf(s[n][x], scale_log2, -from));
                sum += s[n][x];
            }
        rows.pivot[i] = pivot;
        rows.sum[i] = rows.sum[i] * alpha + sum;
        if (!__any_sync(0xffffffffu, alpha != 1.0f)) continue;
#pragma unroll
        for (int n = 0; n < C::kColumns / 8; n++) {
            rows.o[n][half] *= alpha;
            rows.o[n][half + 1] *= alpha;
        }
    }
}

// bf16 keeps 8 bits of P, an error as large as rounding O: so P is the sum of two bf16 numbers. The first is truncated a little below P, so
// that the second is positive where P is: an infinite value must not meet 0.
template <class C> constexpr bool kSplitsP = std::is_same_v<typename C::Element, Bf16>;

struct RoundedPair {
    uint32_t high, rest;
};

template <class Element> __device__ __forceinline__ RoundedPair round_pair(float left, float right) {
    if constexpr (!std::is_same_v<Element, Bf16>) return {pack_halves<Element>(left, right), 0};
    const uint32_t left_bits = __float_as_uint(left * 0x0.ffp0f) & 0xffff0000u,
                   right_bits = __float_as_uint(right * 0x0.ffp0f) & 0xffff0000u;
    return {left_bits >> 16 | right_bits, pack_halves<Bf16>(left - __uint_as_float(left_bits), right - __uint_as_float(right_bits))};
}

// O += P V.
template <class C> __device__ __forceinline__ void pv_product(Rows<C> &rows, const float (&p)[2][4], uint32_t v) {
    uint32_t a[4], rest[4];
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const RoundedPair pair = round_pair<typename C::Element>(p[x / 2][2 * (x & 1)], p[x / 2][2 * (x & 1) + 1]);
        a[x] = pair.high;
        rest[x] = pair.rest;
    }
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; n++) {
        uint32_t values[4];
        ldmatrix_x4_trans(values, pairs_on(v, n));
        mma_m16n8k16<typename C::Element>(rows.o[2 * n], a, values[0], values[1]);
        mma_m16n8k16<typename C::Element>(rows.o[2 * n + 1], a, values[2], values[3]);
        if constexpr (kSplitsP<C>) {
            mma_m16n8k16<Bf16>(rows.o[2 * n], rest, values[0], values[1]);
            mma_m16n8k16<Bf16>(rows.o[2 * n + 1], rest, values[2], values[3]);
        }
    }
}

// A masked key's P is 0, but 0 * NaN is NaN: a value of a masked tile that is not finite is zeroed in shared memory and added explicitly to
// the rows that see it. Each warp checks its own columns, which no other warp reads.
template <class C>
__device__ __forceinline__ void hide_nonfinite(unsigned char *values, Rows<C> &rows, const Row *seen, int32_t tile, int first_chunk) {
    constexpr int kMine = C::kColumns / 8;
    const int lane = threadIdx.x % 32;
    const auto chunk_at = [&](int key, int n) { return values + key * C::kRowBytesV + (((first_chunk + n) ^ (key & 7)) << 4); };
    bool bad = false;
    for (int x = lane; x < kTileK * kMine; x += 32) {
        const uint4 halves = *reinterpret_cast<const uint4 *>(chunk_at(x / kMine, x % kMine));
        for (const uint32_t pair : {halves.x, halves.y, halves.z, halves.w})
            bad |= is_nonfinite<typename C::Element>(pair) || is_nonfinite<typename C::Element>(pair >> 16);
    }
    if (!__any_sync(0xffffffffu, bad)) return;
#pragma unroll 1
    for (int key = 0; key < kTileK; key++) {
        const bool meets[2] = {sees(seen[lane / 4], tile * kTileK + key), sees(seen[lane / 4 + 8], tile * kTileK + key)};
#pragma unroll
        for (int n = 0; n < kMine; n++) {
            const uint32_t pair = reinterpret_cast<const uint32_t *>(chunk_at(key, n))[lane % 4];
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const uint32_t half = static_cast<uint16_t>(pair >> 16 * x);
                const float value = nonfinite_part<typename C::Element>(half);
#pragma unroll
                for (int i = 0; i < 2; i++) rows.o[n][2 * i + x] += meets[i] ? value : 0.0f;
            }
        }
    }
    __syncwarp();
    for (int x = lane; x < kTileK * kMine * 8; x += 32) {
        auto &half = reinterpret_cast<uint16_t *>(chunk_at(x / 8 / kMine, x / 8 % kMine))[x % 8];
        if (is_nonfinite<typename C::Element>(static_cast<uint32_t>(half))) half = 0;
    }
    __syncwarp();
}

} // namespace sa::decode
