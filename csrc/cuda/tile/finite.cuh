// SPDX-License-Identifier: Apache-2.0
//
// 0 * NaN is not 0: values that are not finite are zeroed before the math sees them, and added to the rows that see them.
#pragma once

#include "cuda/ptx/sm90.cuh"

namespace sa {

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

// x * 0 + sum, by halves: NaN once x is NaN or infinite.
template <class Element> __device__ __forceinline__ uint32_t add_unfinite_halves(uint32_t sum, uint32_t x);
template <> __device__ __forceinline__ uint32_t add_unfinite_halves<Bf16>(uint32_t sum, uint32_t x) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
    return sum;
}
template <> __device__ __forceinline__ uint32_t add_unfinite_halves<Fp16>(uint32_t sum, uint32_t x) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
    return sum;
}

// Whether any of the values that this thread looks at, the i-th of kThreads, is not finite.
template <class Element, int kThreads> __device__ __forceinline__ bool some_unfinite(const unsigned char *values, int bytes, int i) {
    uint32_t sum[4] = {};
#pragma unroll 4
    for (int x = i; x < bytes / 16; x += kThreads) {
        const uint4 chunk = reinterpret_cast<const uint4 *>(values)[x];
        sum[0] = add_unfinite_halves<Element>(sum[0], chunk.x);
        sum[1] = add_unfinite_halves<Element>(sum[1], chunk.y);
        sum[2] = add_unfinite_halves<Element>(sum[2], chunk.z);
        sum[3] = add_unfinite_halves<Element>(sum[3], chunk.w);
    }
    bool some = false;
    for (int n = 0; n < 4; n++) some |= unfinite<Element>(sum[n]);
    return some;
}

// From global memory. `row` holds the values of a key; sees(i) says whether the thread's i-th row sees it.
template <class Element, int kLength, class Sees>
__device__ __forceinline__ void add_unfinite(float (&o)[kLength], const uint16_t *row, int64_t head_dim, const Sees &sees) {
    int first = 2 * (threadIdx.x % 4);
    asm volatile("" : "+r"(first)); // or the columns were kept in registers where nobody needs them
#pragma unroll
    for (int i = 0; i < kLength; i++) {
        const int x = 8 * (i / 4) + first + (i & 1);
        if (x >= head_dim || !sees(i / 2 & 1)) continue;
        if ((row[x] & kExponent<Element>) == kExponent<Element>) o[i] += widen<Element>(row[x]);
    }
}

} // namespace sa
