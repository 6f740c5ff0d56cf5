// SPDX-License-Identifier: Apache-2.0
//
// The instructions of sm_80 that the kernels use, one a function. Nothing here knows of attention.
#pragma once

#include <stdint.h>

namespace sa {

struct Bf16 {};
struct Fp16 {};

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes from global to shared memory; if !valid, writes zeros and does not read the source.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// The same for data that is read once: it is the first to leave the L2 cache.
__device__ __forceinline__ void cp_async_16_once(uint32_t to, const void *from, bool valid) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0), "l"(policy)
            : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_8(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same for a number known at run time: waits until at most min(pending, 3) groups are in flight.
__device__ __forceinline__ void cp_async_wait_upto(int pending) {
    if (pending == 2)
        cp_async_wait<2>();
    else if (pending == 1)
        cp_async_wait<1>();
    else if (pending == 0)
        cp_async_wait<0>();
    else
        cp_async_wait<3>();
}

// A barrier among kThreads threads of the block that name the same id, from 1.
template <int kThreads> __device__ __forceinline__ void bar_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Counts towards the same barrier without waiting.
template <int kThreads> __device__ __forceinline__ void bar_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// The same barrier; true if x is true in any thread.
template <int kThreads> __device__ __forceinline__ bool bar_any(int id, bool x) {
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred own, all;\n"
                 "setp.ne.u32 own, %1, 0;\n"
                 "bar.red.or.pred all, %2, %3, own;\n"
                 "selp.u32 %0, 1, 0, all;\n"
                 "}"
            : "=r"(any)
            : "r"(static_cast<uint32_t>(x)), "r"(id), "n"(kThreads)
            : "memory");
    return any;
}

// Compiler fence: keeps expressions of x from being hoisted out of the loop, which would cost registers.
__device__ __forceinline__ int pinned(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class T> __device__ __forceinline__ const T *pinned(const T *x) {
    asm volatile("" : "+l"(x));
    return x;
}

// threadIdx.x, read again, for where no register is free to keep it.
__device__ __forceinline__ unsigned thread_again() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
            : "r"(address)
            : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
            : "r"(address)
            : "memory");
}

// The transpose of an 8 x 8 matrix of 16-bit elements, two a lane.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// d[16 x 8] += a[16 x 16] b[16 x 8]. Lane l holds d at row l / 4 (+ 8 for d[2], d[3]), column 2 (l % 4) + {0, 1}.
template <class Element> __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <> __device__ __forceinline__ void mma_m16n8k16<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> __device__ __forceinline__ void mma_m16n8k16<Fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to nearest even, `low` in the low half.
template <class Element> __device__ __forceinline__ uint32_t pack_halves(float low, float high);

template <> __device__ __forceinline__ uint32_t pack_halves<Bf16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <> __device__ __forceinline__ uint32_t pack_halves<Fp16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Bits of the exponent: all ones in an infinity and in a NaN.
template <class Element> constexpr uint32_t kExponent = 0x7f80u;
template <> constexpr uint32_t kExponent<Fp16> = 0x7c00u;

template <class Element> __device__ __forceinline__ float widen(uint16_t half);
template <> __device__ __forceinline__ float widen<Bf16>(uint16_t half) { return __uint_as_float(static_cast<uint32_t>(half) << 16); }
template <> __device__ __forceinline__ float widen<Fp16>(uint16_t half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

// The sum of the products of 8 pairs.
template <class Element> __device__ __forceinline__ float dot(const uint4 &a, const uint4 &b) {
    const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int x = 0; x < 8; x++)
        sum = fmaf(widen<Element>(static_cast<uint16_t>(left[x / 2] >> 16 * (x % 2))),
                widen<Element>(static_cast<uint16_t>(right[x / 2] >> 16 * (x % 2))), sum);
    return sum;
}

// Exponentials are powers of two: scores and pivots are in log2 units.
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x * 0 + sum, by halves: NaN once x is NaN or infinite.
template <class Element> __device__ __forceinline__ uint32_t add_times_zero(uint32_t sum, uint32_t x);
template <> __device__ __forceinline__ uint32_t add_times_zero<Bf16>(uint32_t sum, uint32_t x) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
    return sum;
}
template <> __device__ __forceinline__ uint32_t add_times_zero<Fp16>(uint32_t sum, uint32_t x) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
    return sum;
}

// top[i % 4] = max(top[i % 4], s[i]) for eight numbers, if the condition holds. Predicated: all lanes share it, so ptxas would branch.
__device__ __forceinline__ void max_if(bool condition, float (&top)[4], const float *s) {
    asm("{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %12, 0;\n"
        "@p max.f32 %0, %0, %4;\n@p max.f32 %1, %1, %5;\n@p max.f32 %2, %2, %6;\n@p max.f32 %3, %3, %7;\n"
        "@p max.f32 %0, %0, %8;\n@p max.f32 %1, %1, %9;\n@p max.f32 %2, %2, %10;\n@p max.f32 %3, %3, %11;\n"
        "}"
            : "+f"(top[0]), "+f"(top[1]), "+f"(top[2]), "+f"(top[3])
            : "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3]), "f"(s[4]), "f"(s[5]), "f"(s[6]), "f"(s[7]),
            "r"(static_cast<uint32_t>(condition)));
}

// b[i % 4] += x[i] if `second`, else a[i % 4] += x[i]; in the same way.
__device__ __forceinline__ void add_to_either(bool second, float (&a)[4], float (&b)[4], const float (&x)[8]) {
    asm("{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %16, 0;\n"
        "@p add.rn.f32 %4, %4, %8;\n@p add.rn.f32 %5, %5, %9;\n@p add.rn.f32 %6, %6, %10;\n@p add.rn.f32 %7, %7, %11;\n"
        "@!p add.rn.f32 %0, %0, %8;\n@!p add.rn.f32 %1, %1, %9;\n@!p add.rn.f32 %2, %2, %10;\n@!p add.rn.f32 %3, %3, %11;\n"
        "@p add.rn.f32 %4, %4, %12;\n@p add.rn.f32 %5, %5, %13;\n@p add.rn.f32 %6, %6, %14;\n@p add.rn.f32 %7, %7, %15;\n"
        "@!p add.rn.f32 %0, %0, %12;\n@!p add.rn.f32 %1, %1, %13;\n@!p add.rn.f32 %2, %2, %14;\n@!p add.rn.f32 %3, %3, %15;\n"
        "}"
            : "+f"(a[0]), "+f"(a[1]), "+f"(a[2]), "+f"(a[3]), "+f"(b[0]), "+f"(b[1]), "+f"(b[2]), "+f"(b[3])
            : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]), "r"(static_cast<uint32_t>(second)));
}

// Sum or maximum over the four lanes that share the rows of an accumulator.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ bool quad_any(bool x) {
    const int lane = threadIdx.x % 32;
    return __ballot_sync(0xffffffffu, x) >> (lane / 4 * 4) & 0xf;
}

// Sum or maximum over the eight lanes that share the columns of an accumulator.
__device__ __forceinline__ float column_sum(float x) {
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

__device__ __forceinline__ float column_max(float x) {
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// Reads past the caches of the SM: another kernel may be writing there.
__device__ __forceinline__ int32_t load_relaxed(const int32_t *from) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}

// Returns the value before the addition. Writes of this block that a barrier ordered before it are visible to threads that add later.
__device__ __forceinline__ unsigned long long add_acquire_release(unsigned long long *to, unsigned long long x) {
    unsigned long long before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(x) : "memory");
    return before;
}

// Parameters of a kernel come from memory a line of 64 bytes at a time: requests all lines at once.
template <class Parameters> __device__ __forceinline__ void fetch_params(const Parameters &params) {
    uint32_t words = 0;
#pragma unroll
    for (size_t i = 0; i < sizeof(Parameters); i += 64)
        words |= *reinterpret_cast<const uint32_t *>(reinterpret_cast<const char *>(&params) + i);
    asm volatile("{.reg .pred p;\n setp.eq.u32 p, %0, 0xffffffff;\n @p nanosleep.u32 0;}" ::"r"(words));
}

// Programmatic dependent launch. may_start_early: whether a kernel may start before its predecessor has ended. wait_for_previous_kernel
// waits for it and its writes; let_next_kernel_start lets the next one start. Both do nothing before sm_90.
__device__ __forceinline__ constexpr bool may_start_early() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return true;
#else
    return false;
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The barrier of a cluster's blocks: every thread arrives, and later waits for all threads that have not exited. Writes before an arrival,
// also to another block's shared memory, are visible after the wait. Does nothing before sm_90, which has no clusters.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address in block `rank` of the cluster that corresponds to p in this block's shared memory.
template <class T> __device__ __forceinline__ T *of_block(T *p, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
    return reinterpret_cast<T *>(there);
#else
    return p;
#endif
}

// Prefetches into the L2 cache: a multiple of 16 bytes, at a multiple of 16. Does nothing before sm_90.
__device__ __forceinline__ void prefetch_l2(const void *from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Element x of lane l becomes element l of lane x, within four lanes.
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & distance) continue;
            const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + distance], distance);
            x[i] = upper ? got : x[i];
            x[i + distance] = upper ? x[i + distance] : got;
        }
    }
}

} // namespace sa
