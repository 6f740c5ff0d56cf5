// SPDX-License-Identifier: Apache-2.0
//
// Partials (O unnormalised, pivot, sum) of rows over some of their keys, and their merge: a block's teams in shared memory, a stream's
// parts in the workspace, by the block that arrives last, or in a cluster's shared memory. Always in the order of teams and parts.
//
// A partial is num_rows rows of C::kPartialRow floats: O, then pivot in log2 units, then sum.
#pragma once

#include "cuda/decode/keys.cuh"
#include "cuda/decode/tile.cuh"
#include "cuda/tile/pivot.cuh"
#include "cuda/work/launch_counter.cuh"

namespace sa::decode {

// Four columns of a row.
struct Quad {
    float o[4] = {}, pivot = -INFINITY, sum = 0.0f;
};

// kAtOnce partials of a quad, loaded at once. Past the last one it reads `neutral`, zeros with a pivot of -inf.
template <class C, int kAtOnce> struct Partials {
    float4 o[kAtOnce];
    float2 stats[kAtOnce];

    __device__ __forceinline__ void load(const float *row, int count, int64_t stride, int column, const float *neutral) {
#pragma unroll
        for (int n = 0; n < kAtOnce; n++, row += stride) {
            const float *its_row = n < count ? row : neutral;
            o[n] = *reinterpret_cast<const float4 *>(its_row + column);
            stats[n] = *reinterpret_cast<const float2 *>(its_row + C::kHeadDimV);
        }
    }

    __device__ __forceinline__ void add_to(Quad &quad) const {
        float top = quad.pivot;
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) top = fmaxf(top, stats[n].x);
        const float kept = weight(quad.pivot, top);
        for (float &x : quad.o) x *= kept;
        quad.sum *= kept;
        quad.pivot = top;
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) {
            const float added = weight(stats[n].x, top);
            quad.o[0] += o[n].x * added;
            quad.o[1] += o[n].y * added;
            quad.o[2] += o[n].z * added;
            quad.o[3] += o[n].w * added;
            quad.sum += stats[n].y * added;
        }
    }
};

// Merges count partials of a row, `stride` floats apart, in order. Past head_dim 64 a thread has registers for 16 at once.
template <class C> __device__ __forceinline__ Quad add_up(const float *row, int count, int64_t stride, int column, const float *neutral) {
    constexpr int kAtOnce = 8;
    Quad quad;
    if constexpr (C::kHeadDim > 64) {
#pragma unroll 1
        for (; count > kAtOnce; count -= 2 * kAtOnce, row += 2 * kAtOnce * stride) {
            Partials<C, 2 * kAtOnce> partials;
            partials.load(row, count, stride, column, neutral);
            partials.add_to(quad);
        }
    }
#pragma unroll 1
    for (; count > 0; count -= kAtOnce, row += kAtOnce * stride) {
        Partials<C, kAtOnce> partials;
        partials.load(row, count, stride, column, neutral);
        partials.add_to(quad);
    }
    return quad;
}

// In a cluster, block b merges quads [b, b + 1) << exchange_bits of the stream: at least four, since four lanes share a scale of NVFP4. No
// more blocks than parts are needed, and ClusterSmem has room: the quads of all parts are fewer than twice num_quads rounded up to a power
// of two.
__device__ __forceinline__ int exchange_bits(uint32_t num_quads, uint32_t num_parts) {
    return max(2, 32 - __clz(num_quads - 1) - (31 - __clz(num_parts)));
}

// add_up over a quad's partials in a ClusterSmem, `stride` apart.
template <class C> __device__ __forceinline__ Quad add_up_exchanged(const float4 *o, const float2 *stats, int count, int stride) {
    constexpr int kAtOnce = 8;
    Quad quad;
#pragma unroll 1
    for (; count > 0; count -= kAtOnce, o += kAtOnce * stride, stats += kAtOnce * stride) {
        Partials<C, kAtOnce> partials;
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) {
            partials.o[n] = n < count ? o[n * stride] : float4{0.0f, 0.0f, 0.0f, 0.0f};
            partials.stats[n] = n < count ? stats[n * stride] : float2{-INFINITY, 0.0f};
        }
        partials.add_to(quad);
    }
    return quad;
}

// Writes a team's rows to shared memory as a partial.
template <class C> __device__ __forceinline__ void leave_partial(float *partial, Rows<C> &rows, int num_rows, int first_column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = quad_sum(rows.sum[i]);
        const int row = lane / 4 + 8 * i;
        if (row >= num_rows) continue;
        float *to = partial + row * C::kPartialRow;
#pragma unroll
        for (int n = 0; n < C::kColumns / 8; n++)
            *reinterpret_cast<float2 *>(to + first_column + n * 8 + fragment_column()) = {rows.o[n][2 * i], rows.o[n][2 * i + 1]};
        if (lane % 4 == 0 && first_column == 0) *reinterpret_cast<float2 *>(to + C::kHeadDimV) = {rows.pivot[i], sum};
    }
}

// Writes a quad to the workspace.
template <class C> __device__ __forceinline__ void store_quad(float *row, int column, const Quad &quad) {
    *reinterpret_cast<float4 *>(row + column) = {quad.o[0], quad.o[1], quad.o[2], quad.o[3]};
    if (column == 0) *reinterpret_cast<float2 *>(row + C::kHeadDimV) = {quad.pivot, quad.sum};
}

template <class C> __device__ __forceinline__ Quad load_quad(const float *row, int column) {
    const float4 o = *reinterpret_cast<const float4 *>(row + column);
    const float2 stats = *reinterpret_cast<const float2 *>(row + C::kHeadDimV);
    return {{o.x, o.y, o.z, o.w}, stats.x, stats.y};
}

// A stream's parts are counted as they arrive.

// The counter lies behind the first row of part 0.
template <class C> __device__ __forceinline__ unsigned long long *counter_of(const Part &part, const Params &params) {
    return reinterpret_cast<unsigned long long *>(slot_of(part, params, 0) + C::kHeadDimV + 2);
}

// True for the last of num_parts, which then sees what the others wrote before they arrived.
__device__ __forceinline__ bool arrive(unsigned long long *counter, unsigned long long tag, uint32_t num_parts) {
    if (add_acquire_release(counter, 1) - (tag << kCountBits) + 1 != num_parts) return false;
    *counter = tag << kCountBits;
    return true;
}

} // namespace sa::decode
