/* SPDX-License-Identifier: Apache-2.0
 *
 * What the CUDA kernels' launchers share. */
#ifndef SA_CUDA_HOST_BACKEND_H
#define SA_CUDA_HOST_BACKEND_H

#include <cuda_runtime.h>

#include "sinkattn.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "core/core.h"

/* A runtime call's result as a status that names the call; the runtime's own last error is cleared. */
sinkattn_status sa_cuda_status(const char *what, cudaError_t error);

/* The current device's error word, of which kernels set bits. */
sinkattn_status sa_cuda_error_word(unsigned **word);

/* decode: bytes of counters and partials. */
int64_t sa_cuda_decode_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* invariant.cu: bytes of offsets, statistics and gathered pages. */
int64_t sa_cuda_invariant_workspace(const sinkattn_problem *problem);
sinkattn_status sa_decode_cuda_sm80_prefill(const void *args, const sinkattn_plan *plan, const sinkattn_context *context);

/* bwd_window_sm90: bytes of ds_aux's partial sums and of what to do again. */
int64_t sa_cuda_bwd_window_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
sinkattn_status sa_bwd_cuda_sm90_window(const void *args, const sinkattn_plan *plan, const sinkattn_context *context);

/* bwd_sm80: bytes of the rows' statistics and of ds_aux's terms. */
int64_t sa_cuda_bwd_sm80_workspace(const sinkattn_problem *problem);

/* bwd_sm90: bytes of its table, the rows' statistics, dQ on its way and ds_aux's terms. */
int64_t sa_cuda_bwd_sm90_workspace(const sinkattn_problem *problem, int64_t head_dim);
sinkattn_status sa_bwd_cuda_sm90_d64(const void *args, const sinkattn_plan *plan, const sinkattn_context *context);
sinkattn_status sa_bwd_cuda_sm90_d128(const void *args, const sinkattn_plan *plan, const sinkattn_context *context);

#ifdef __cplusplus
}

namespace sa {

/* Calls ask() once a device, a bit of `asked` each, since asking the runtime takes a sixth of a launch; from the 65th device on, whose bit
 * is 0, each time. */
template <class Ask> cudaError_t once_a_device(uint64_t *asked, uint64_t *bit, const Ask &ask) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    *bit = device < 64 ? UINT64_C(1) << device : 0;
    if (error != cudaSuccess || (__atomic_load_n(asked, __ATOMIC_ACQUIRE) & *bit)) return error;
    error = ask();
    if (error == cudaSuccess) __atomic_fetch_or(asked, *bit, __ATOMIC_RELEASE);
    return error;
}

/* Lets blocks of a kernel have more than 48 KiB of dynamic shared memory, always as much. */
template <auto kKernel> sinkattn_status allow_shared(int bytes) {
    static uint64_t allowed;
    uint64_t bit;
    const auto allow = [&] { return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); };
    return sa_cuda_status("cudaFuncSetAttribute", once_a_device(&allowed, &bit, allow));
}

/* Whether the kernel's code that runs on this device is that for 9.0, which knows how to wait, and of clusters. */
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

/* The launch of a kernel that waits for the one in front by itself, so that it may begin while that ends; in clusters of so many blocks,
 * which only code for 9.0 may be. */
template <auto kKernel, class... Arguments>
sinkattn_status launch_clusters(const char *what, dim3 grid, unsigned cluster, unsigned threads, size_t shared_bytes, void *stream,
                                const Arguments &...arguments) {
    bool waits = false;
    const sinkattn_status status = runs_code_of_90<kKernel>(&waits);
    if (status.code) return status;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = !waits ? 0 : cluster > 1 ? 2 : 1;
    return sa_cuda_status(what, cudaLaunchKernelEx(&config, kKernel, arguments...));
}

template <auto kKernel, class... Arguments>
sinkattn_status launch_overlapping(const char *what, dim3 grid, unsigned threads, size_t shared_bytes, void *stream,
                                   const Arguments &...arguments) {
    return launch_clusters<kKernel>(what, grid, 1, threads, shared_bytes, stream, arguments...);
}

} // namespace sa
#endif
#endif
