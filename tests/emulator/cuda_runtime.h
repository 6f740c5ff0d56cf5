// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA half takes of the runtime's header: a device of compute capability 9.0 with 16 multiprocessors, whose memory is the
// host's. A launch returns when the grid has ended.
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "emulator.h"

// csrc/core then marks functions __host__ __device__, which tests/emulator/nvcc removes.
#define __CUDACC__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// The host's side.

enum cudaError_t { cudaSuccess, cudaErrorInvalidDevice, cudaErrorSymbolNotFound };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrReservedSharedMemoryPerBlock
};
enum { cudaEnableDefault, cudaMemcpyDefault, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
using cudaStream_t = void *;

struct cudaFuncAttributes {
    int ptxVersion;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
        dim3 clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline const char *cudaGetErrorName(cudaError_t) { return "an error"; }
inline const char *cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    static const int values[] = {9, 0, emulated::kMultiprocessors, emulated::kMostSharedBytes + 1024, emulated::kMostSharedBytes, 1024};
    return *value = values[attribute], cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
        const char *name, void **function, unsigned version, unsigned flags, cudaDriverEntryPointQueryResult *found);

template <class T> cudaError_t cudaMalloc(T **to, size_t bytes) {
    return *to = static_cast<T *>(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024)), cudaSuccess;
}
template <class T> cudaError_t cudaMallocManaged(T **to, size_t bytes) { return cudaMalloc(to, bytes); }
inline cudaError_t cudaMemset(void *to, int byte, size_t bytes) { return memset(to, byte, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int) { return memcpy(to, from, bytes), cudaSuccess; }
template <class T> cudaError_t cudaGetSymbolAddress(void **to, T &symbol) { return *to = &symbol, cudaSuccess; }
template <class T> cudaError_t cudaMemcpyFromSymbol(void *to, const T &symbol, size_t bytes) {
    return memcpy(to, &symbol, bytes), cudaSuccess;
}
template <class T> cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t bytes) {
    return memcpy(&symbol, from, bytes), cudaSuccess;
}
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }
template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, Kernel) { return to->ptxVersion = 90, cudaSuccess; }
template <class Kernel> cudaError_t cudaOccupancyMaxActiveClusters(int *count, Kernel, const cudaLaunchConfig_t *config) {
    return *count = emulated::kMultiprocessors / static_cast<int>(config->gridDim.x), cudaSuccess;
}

namespace emulated {

// kernel<<<grid, threads, shared_bytes>>>(arguments...)
template <class... Parameters>
auto launcher(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes = 0, void * = nullptr) {
    return [=](const auto &...arguments) {
        launch({grid.x, grid.y, grid.z}, threads, static_cast<unsigned>(shared_bytes), 1, [&] { kernel(arguments...); });
    };
}

} // namespace emulated

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...), const Arguments &...arguments) {
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
    const dim3 &grid = config->gridDim;
    emulated::launch({grid.x, grid.y, grid.z}, config->blockDim.x, static_cast<unsigned>(config->dynamicSmemBytes), cluster,
            [&] { kernel(arguments...); });
    return cudaSuccess;
}

// The device's side.

inline int lane_number() { return static_cast<int>(emulated::current->lane); }
template <class T> T __shfl_xor_sync(unsigned mask, T x, int distance) {
    return emulated::shuffle("shfl.bfly", mask, x, lane_number() ^ distance);
}
template <class T> T __shfl_sync(unsigned mask, T x, int source) { return emulated::shuffle("shfl.idx", mask, x, source & 31); }
template <class T> T __shfl_up_sync(unsigned mask, T x, int distance) {
    return emulated::shuffle("shfl.up", mask, x, lane_number() - distance);
}
template <class T> T __reduce_max_sync(unsigned mask, T x) {
    return emulated::reduce("redux.max", mask, x, [](T a, T b) { return a > b ? a : b; });
}
template <class T> T __reduce_min_sync(unsigned mask, T x) {
    return emulated::reduce("redux.min", mask, x, [](T a, T b) { return a < b ? a : b; });
}
template <class T> T __reduce_add_sync(unsigned mask, T x) {
    return emulated::reduce("redux.add", mask, x, [](T a, T b) { return a + b; });
}
template <class T> T __reduce_or_sync(unsigned mask, T x) {
    return emulated::reduce("redux.or", mask, x, [](T a, T b) { return a | b; });
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
    return emulated::reduce(
            "vote.ballot", mask, static_cast<unsigned>(x) << emulated::current->lane, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, bool x) {
    return emulated::reduce("vote.any", mask, x, [](bool a, bool b) { return a || b; });
}
inline int __all_sync(unsigned mask, bool x) {
    return emulated::reduce("vote.all", mask, x, [](bool a, bool b) { return a && b; });
}
inline void __syncwarp(unsigned mask = ~0u) {
    int nothing;
    emulated::by_warp("bar.warp", mask, nothing, [](auto &) {});
}

inline int __syncthreads_or(bool x) {
    emulated::Block &block = *emulated::current->block;
    return emulated::arrive(block.barriers[0], block.alive, true, x);
}
inline int __syncthreads_and(bool x) { return !__syncthreads_or(!x); }
inline void __syncthreads() { __syncthreads_or(false); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { emulated::yield("nanosleep"); }
inline void __trap() { emulated::fail("trap"); }

template <class T> T atomicAdd(T *at, T x) {
    const T before = *at;
    *at += x;
    return before;
}
inline unsigned atomicOr(unsigned *at, unsigned x) { return __atomic_fetch_or(at, x, __ATOMIC_RELAXED); }
template <class T> T atomicExch(T *at, T x) { return __atomic_exchange_n(at, x, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T *at, T expected, T x) {
    __atomic_compare_exchange_n(at, &expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T __ldcg(const T *from) { return *from; }
template <class T> T __ldg(const T *from) { return *from; }
template <class T> void __stcg(T *to, T x) { *to = x; }

inline size_t __cvta_generic_to_shared(const void *p) { return emulated::shared_address(p); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift < 32 ? shift : 32)) >> 32);
}
inline float __uint_as_float(unsigned x) {
    float y;
    return memcpy(&y, &x, sizeof y), y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    return memcpy(&y, &x, sizeof y), y;
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
#define __logf logf // glibc declares another __logf

// Of two types CUDA's take the wider, and of equal widths the unsigned one, as operators do.
template <class A, class B> auto min(A a, B b) -> decltype(a + b) {
    const decltype(a + b) x = a, y = b;
    return x < y ? x : y;
}
template <class A, class B> auto max(A a, B b) -> decltype(a + b) {
    const decltype(a + b) x = a, y = b;
    return x > y ? x : y;
}

#include "instructions.h"
