// SPDX-License-Identifier: Apache-2.0
//
// Values that are not finite. A masked weight is 0, but 0 * NaN is NaN: such values are zeroed before the product and added back, one by
// one, to the rows that see them. Tests and zeroing work on bits: an exponent of all ones is an infinity or a NaN.
#pragma once

#include "cuda/ptx/sm80.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/tile/fragment.cuh"

namespace sa {

// Bits: uint16_t or uint32_t, whichever the caller holds.
template <class Element, class Bits> __device__ __forceinline__ bool is_nonfinite(Bits half) {
    return (half & kExponent<Element>) == kExponent<Element>;
}

template <class Element> __device__ __forceinline__ bool any_nonfinite(uint32_t pair) {
    constexpr uint32_t kLow = kExponent<Element>, kHigh = kLow << 16;
    return (pair & kLow) == kLow || (pair & kHigh) == kHigh;
}

// The halves of a pair that are not finite, and zeros for the others.
template <class Element> __device__ __forceinline__ uint32_t nonfinite_halves(uint32_t pair) {
    constexpr uint32_t kLow = kExponent<Element>, kHigh = kLow << 16;
    return ((pair & kLow) == kLow ? pair & 0x0000ffffu : 0u) | ((pair & kHigh) == kHigh ? pair & 0xffff0000u : 0u);
}

// Whether any value in thread i's share of the 16-byte chunks, every kThreads-th of `bytes`, is not finite.
template <class Element, int kThreads> __device__ __forceinline__ bool any_nonfinite(const unsigned char *values, int bytes, int i) {
    uint32_t sum[4] = {};
#pragma unroll 4
    for (int x = i; x < bytes / 16; x += kThreads) {
        const uint4 chunk = reinterpret_cast<const uint4 *>(values)[x];
        sum[0] = add_times_zero<Element>(sum[0], chunk.x);
        sum[1] = add_times_zero<Element>(sum[1], chunk.y);
        sum[2] = add_times_zero<Element>(sum[2], chunk.z);
        sum[3] = add_times_zero<Element>(sum[3], chunk.w);
    }
    bool any = false;
    for (int n = 0; n < 4; n++) any |= any_nonfinite<Element>(sum[n]);
    return any;
}

// Whether a warp's accumulators are all finite.
template <int kBlocks, int kColumns> __device__ __forceinline__ bool is_finite(const float (&o)[kBlocks][kColumns][4]) {
    float nan = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int n = 0; n < kColumns; n++)
#pragma unroll
            for (int x = 0; x < 4; x++) nan = fmaf(o[block][n][x], 0.0f, nan);
    return nan == 0.0f;
}

template <class Element> __device__ __forceinline__ void zero_nonfinite(uint16_t &half) {
    if (is_nonfinite<Element>(half)) half = 0;
}

// Zeroes the values of a chunk that are not finite; bit n of the result says that value n was zeroed.
template <class Element> __device__ __forceinline__ uint32_t zero_chunk(unsigned char *chunk) {
    auto *each = reinterpret_cast<uint16_t *>(chunk);
    uint32_t found = 0;
#pragma unroll 1
    for (int n = 0; n < 8; n++) {
        if (!is_nonfinite<Element>(each[n])) continue;
        each[n] = 0;
        found |= 1u << n;
    }
    return found;
}

// Zeroes values that are not finite in thread i's share of the chunks, every kThreads-th of `bytes`. True if there were any.
template <class Element, int kThreads> __device__ __forceinline__ bool zero_nonfinite(unsigned char *values, int bytes, int i) {
    bool found = false;
    for (int x = i; x < bytes / 16; x += kThreads) {
        uint4 &chunk = reinterpret_cast<uint4 *>(values)[x];
        const uint4 pairs = chunk;
        if (!(any_nonfinite<Element>(pairs.x) || any_nonfinite<Element>(pairs.y) || any_nonfinite<Element>(pairs.z) ||
                    any_nonfinite<Element>(pairs.w)))
            continue;
        found = true;
        auto *each = reinterpret_cast<uint16_t *>(&chunk);
        for (int n = 0; n < 8; n++) zero_nonfinite<Element>(each[n]);
    }
    return found;
}

// Zeroes the values of 16 keys that are not finite, in `columns` columns of swizzled rows whose halves lie kHalf bytes apart; before it,
// calls add_back() if there are any. By a warpgroup, at one of its named barriers, between copies by TMA.
template <class Element, int kHalf, class AddBack>
__device__ __forceinline__ void hide_nonfinite_values(unsigned char *values, int columns, int barrier, const AddBack &add_back) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const auto chunk_at = [&](int x) { return values + x / 128 * kHalf + x % 128 * 16; };
    bool bad = false;
    for (int x = thread; x < 2 * columns; x += 128) {
        const uint4 chunk = *reinterpret_cast<const uint4 *>(chunk_at(x));
        for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) bad |= any_nonfinite<Element>(pair);
    }
    async_fence(); // of values that were read, before a copy overwrites them
    if (!bar_any<128>(barrier, bad)) return;
    add_back();
    bar_sync<128>(barrier); // all have read the values
    for (int x = thread; x < 2 * columns; x += 128) zero_chunk<Element>(chunk_at(x));
    async_fence();
    bar_sync<128>(barrier);
}

// The value if it is not finite, else 0.
template <class Element, class Bits> __device__ __forceinline__ float nonfinite_part(Bits half) {
    return is_nonfinite<Element>(half) ? widen<Element>(static_cast<uint16_t>(half)) : 0.0f;
}

// Adds a key's values that are not finite, `row` in global memory, to a wgmma accumulator; sees(i): the thread's i-th row sees the key.
template <class Element, int kLength, class Sees>
__device__ __forceinline__ void add_nonfinite(float (&o)[kLength], const uint16_t *row, int64_t head_dim, const Sees &sees) {
    int first = fragment_column();
    asm volatile("" : "+r"(first)); // compiler fence: keeps the columns out of registers elsewhere
#pragma unroll
    for (int i = 0; i < kLength; i++) {
        const int x = first + element_column(i);
        if (x >= head_dim || !sees(element_row(i))) continue;
        if (is_nonfinite<Element>(row[x])) o[i] += widen<Element>(row[x]);
    }
}

} // namespace sa
