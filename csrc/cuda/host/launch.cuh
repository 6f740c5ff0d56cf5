// SPDX-License-Identifier: Apache-2.0
//
// Launching a kernel, and the questions to the runtime before it, asked once a device.
#pragma once

#include "core/mask.h"
#include "cuda/host/backend.h"

namespace sa {

// Calls ask() once a device, since it takes a sixth of a launch: `asked` has a bit a device. From the 65th device on, whose bit is 0, it is
// called each time.
template <class Ask> cudaError_t once_a_device(uint64_t *asked, uint64_t *bit, const Ask &ask) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    *bit = device < 64 ? UINT64_C(1) << device : 0;
    if (error != cudaSuccess || (__atomic_load_n(asked, __ATOMIC_ACQUIRE) & *bit)) return error;
    error = ask();
    if (error == cudaSuccess) __atomic_fetch_or(asked, *bit, __ATOMIC_RELEASE);
    return error;
}

// Grants blocks of a kernel more than 48 KiB of dynamic shared memory. `bytes` is the same in every call.
template <auto kKernel> sinkattn_status allow_shared(int bytes) {
    static uint64_t allowed;
    uint64_t bit;
    const auto allow = [&] { return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); };
    return sa_cuda_status("cudaFuncSetAttribute", once_a_device(&allowed, &bit, allow));
}

// Whether this device runs the kernel's code for 9.0, which can wait for its predecessor and form clusters.
template <auto kKernel> sinkattn_status runs_code_of_90(bool *yes) {
    static uint64_t asked, found;
    uint64_t bit;
    const auto ask = [&] {
        cudaFuncAttributes code = {};
        const cudaError_t error = cudaFuncGetAttributes(&code, kKernel);
        if (error == cudaSuccess && code.ptxVersion >= 90) __atomic_fetch_or(&found, bit, __ATOMIC_RELAXED);
        return error;
    };
    const sinkattn_status status = sa_cuda_status("cudaFuncGetAttributes", once_a_device(&asked, &bit, ask));
    *yes = (__atomic_load_n(&found, __ATOMIC_RELAXED) & bit) != 0;
    return status;
}

template <auto kKernel, class... Arguments>
sinkattn_status launch_blocks(
        const char *what, dim3 grid, unsigned threads, int shared_bytes, void *stream, const Arguments &...arguments) {
    if (shared_bytes) SA_TRY(allow_shared<kKernel>(shared_bytes));
    kKernel<<<grid, threads, static_cast<size_t>(shared_bytes), static_cast<cudaStream_t>(stream)>>>(arguments...);
    return sa_cuda_status(what, cudaGetLastError());
}

// Programmatic dependent launch: the kernel starts while its predecessor ends, and waits for it itself. In clusters of `cluster` blocks;
// both on sm_90 only.
template <auto kKernel, class... Arguments>
sinkattn_status launch_clusters(
        const char *what, dim3 grid, unsigned cluster, unsigned threads, int shared_bytes, void *stream, const Arguments &...arguments) {
    bool waits = false;
    SA_TRY(runs_code_of_90<kKernel>(&waits));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = !waits ? 0 : cluster > 1 ? 2 : 1;
    return sa_cuda_status(what, cudaLaunchKernelEx(&config, kKernel, arguments...));
}

// How many clusters of `cluster` blocks, at most 8, run at once: asked once a device.
template <auto kKernel> sinkattn_status clusters_at_once(int *count, unsigned cluster, unsigned threads, int shared_bytes) {
    static uint64_t asked[9];
    static int found[9][64];
    uint64_t bit;
    const auto ask = [&] {
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {cluster, 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = cluster;
        config.blockDim = threads;
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.attrs = &attribute;
        config.numAttrs = 1;
        const cudaError_t error = cudaOccupancyMaxActiveClusters(count, kKernel, &config);
        if (error == cudaSuccess && bit) __atomic_store_n(&found[cluster][__builtin_ctzll(bit)], *count, __ATOMIC_RELAXED);
        return error;
    };
    const sinkattn_status status = sa_cuda_status("cudaOccupancyMaxActiveClusters", once_a_device(&asked[cluster], &bit, ask));
    if (bit) *count = __atomic_load_n(&found[cluster][__builtin_ctzll(bit)], __ATOMIC_RELAXED);
    return status;
}

// shared_bytes: the same in every call, or at most what allow_shared granted before.
template <auto kKernel, class... Arguments>
sinkattn_status launch_overlapping(
        const char *what, dim3 grid, unsigned threads, int shared_bytes, void *stream, const Arguments &...arguments) {
    if (shared_bytes > 47 * 1024) SA_TRY(allow_shared<kKernel>(shared_bytes));
    return launch_clusters<kKernel>(what, grid, 1, threads, shared_bytes, stream, arguments...);
}

// A decode's kernel counts streams, or chunks of them, rows' strides and heads' strides in 32 bits.
static inline sinkattn_status check_decode_strides(const sinkattn_decode_args &args, int64_t parts) {
    int64_t largest = parts;
    for (const sinkattn_tensor *tensor : {&args.fwd.q, &args.fwd.k, &args.fwd.v, &args.fwd.out})
        largest = sa_max(largest, sa_max(tensor->row_stride, tensor->head_stride));
    if (largest <= INT32_MAX) return sa_ok();
    return sa_status(SINKATTN_UNSUPPORTED, "tokens and kv heads, or a stride, are %lld; a CUDA decode takes at most %lld",
            static_cast<long long>(largest), static_cast<long long>(INT32_MAX));
}

// What a forward cannot read of a decode's arguments.
static inline sinkattn_status check_no_host_pages(const sinkattn_decode_args &args) {
    if (!args.host.num_pages) return sa_ok();
    return sa_status(SINKATTN_UNSUPPORTED,
            "host.num_pages is %lld with packed rows; on CUDA it must be 0: decode from host pages with rows of one q_len",
            static_cast<long long>(args.host.num_pages));
}

} // namespace sa
