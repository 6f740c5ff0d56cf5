// SPDX-License-Identifier: Apache-2.0
//
// Partials (O unnormalised, pivot, sum) of rows over some of their keys, and how they become one: of a block's teams in shared memory, of
// a stream's blocks through the workspace, in the order of teams and parts, by the block that arrives last.
//
// A partial is num_rows rows of C::kPartialRow floats: O, then pivot in log2 units, then sum.
#pragma once

#include "cuda/attn/decode_tile.cuh"

namespace sa {

// A thread's quadruples of O, and the pivot and sum of their rows.
template <class C> struct Merged {
    float o[C::kItems][4], pivot[C::kItems], sum[C::kItems];

    __device__ __forceinline__ void clear() {
        for (int i = 0; i < C::kItems; i++) {
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = sum[i] = 0.0f;
            pivot[i] = -INFINITY;
        }
    }

    // Calls visit(i, row, column) for each of them.
    template <class Visit> __device__ __forceinline__ static void for_each(int num_rows, const Visit &visit) {
#pragma unroll
        for (int i = 0; i < C::kItems; i++) {
            const int x = threadIdx.x + i * C::kThreads, row = x / (C::kHeadDim / 4);
            if (row < num_rows) visit(i, row, x % (C::kHeadDim / 4) * 4);
        }
    }

    // Both may be the same infinity.
    __device__ __forceinline__ static float weight(float its_pivot, float top) {
        return its_pivot == top ? 1.0f : exp2_approx(its_pivot - top);
    }

    __device__ __forceinline__ void add(int i, float4 other, float its_pivot, float its_sum) {
        const float top = fmaxf(pivot[i], its_pivot), kept = weight(pivot[i], top), added = weight(its_pivot, top);
        o[i][0] = o[i][0] * kept + other.x * added;
        o[i][1] = o[i][1] * kept + other.y * added;
        o[i][2] = o[i][2] * kept + other.z * added;
        o[i][3] = o[i][3] * kept + other.w * added;
        sum[i] = sum[i] * kept + its_sum * added;
        pivot[i] = top;
    }

    // count partials of num_rows rows each, one behind the other in shared memory, in this order. With the pivot found first, each is added
    // without waiting for the one before.
    __device__ __forceinline__ void add_partials(const float *partials, int count, int num_rows) {
        const int stride = num_rows * C::kPartialRow;
        for_each(num_rows, [&](int i, int row, int column) {
            const float *partial = partials + row * C::kPartialRow;
            float top = -INFINITY;
#pragma unroll 4
            for (int n = 0; n < count; n++) top = fmaxf(top, partial[n * stride + C::kHeadDim]);
            add(i, {0.0f, 0.0f, 0.0f, 0.0f}, top, 0.0f);
#pragma unroll 4
            for (int n = 0; n < count; n++, partial += stride) {
                const float2 stats = *reinterpret_cast<const float2 *>(partial + C::kHeadDim);
                const float4 other = *reinterpret_cast<const float4 *>(partial + column);
                const float added = weight(stats.x, pivot[i]);
                o[i][0] += other.x * added;
                o[i][1] += other.y * added;
                o[i][2] += other.z * added;
                o[i][3] += other.w * added;
                sum[i] += stats.y * added;
            }
        });
    }
};

// A team's rows, as a partial in shared memory.
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
            *reinterpret_cast<float2 *>(to + first_column + n * 8 + 2 * (lane % 4)) = {rows.o[n][2 * i], rows.o[n][2 * i + 1]};
        if (lane % 4 == 0 && first_column == 0) *reinterpret_cast<float2 *>(to + C::kHeadDim) = {rows.pivot[i], sum};
    }
}

// A part of a stream, as a partial in the workspace.
template <class C> __device__ __forceinline__ void store_partial(float *slot, const Merged<C> &merged, int num_rows) {
    merged.for_each(num_rows, [&](int i, int row, int column) {
        float *to = slot + row * C::kPartialRow;
        *reinterpret_cast<float4 *>(to + column) = {merged.o[i][0], merged.o[i][1], merged.o[i][2], merged.o[i][3]};
        if (column == 0) *reinterpret_cast<float2 *>(to + C::kHeadDim) = {merged.pivot[i], merged.sum[i]};
    });
}

// All parts of a stream, through shared memory, as many at a time as fit.
template <class C>
__device__ __forceinline__ void merge_parts(float *partials, Merged<C> &merged, const Fragment &fragment, const Schedule &schedule) {
    const int num_rows = fragment.stream.num_rows, chunks = num_rows * C::kPartialRow / 4;
    const int fit = schedule.stages * C::kStageBytes / (16 * chunks), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    merged.clear();
    for (int32_t first = 0; first < fragment.num_parts; first += fit) {
        const int count = min(fit, fragment.num_parts - first);
        if (first) __syncthreads();
        for (int n = warp; n < count; n += C::kThreads / 32) {
            const float *slot = slot_of(fragment, schedule, first + n);
            const uint32_t to = shared_address(partials) + n * chunks * 16;
            for (int x = lane; x < chunks; x += 32) cp_async_16(to + x * 16, slot + x * 4, true);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        merged.add_partials(partials, count, num_rows);
    }
}

// ---- the counter of a stream's parts: tag << 24 | parts that have arrived ----
//
// The workspace may hold anything, so each block first puts its launch's tag there, unless a block of the same launch has; then counts. A
// word that holds the tag at the start counts from 0, since the last block to arrive resets it: so replays of a graph, whose tag is one,
// need no reset between them. Other launches have other tags, and their own workspaces while they run. What is left is memory that holds
// these 40 bits by chance.

constexpr int kCountBits = 24;

__device__ __forceinline__ void open_counter(unsigned long long *counter, unsigned long long tag) {
    const unsigned long long found = __ldcg(counter);
    if (found >> kCountBits != tag) atomicCAS(counter, found, tag << kCountBits); // where it fails, a block of this launch was here
}

// True for the last of num_parts; what the others wrote before they arrived is visible then.
__device__ __forceinline__ bool arrive(unsigned long long *counter, unsigned long long tag, int32_t num_parts) {
    __threadfence();
    const unsigned long long before = atomicAdd(counter, 1ull);
    if (before - (tag << kCountBits) + 1 != static_cast<unsigned long long>(num_parts)) return false;
    atomicExch(counter, tag << kCountBits);
    __threadfence();
    return true;
}

} // namespace sa
