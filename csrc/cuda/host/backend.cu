// SPDX-License-Identifier: Apache-2.0
//
// Device facts, the CUDA half of the public API. The runtime is linked statically and the driver is found when it is first needed, so
// that a library with this half inside loads on a machine without either.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>

#include "cuda/host/backend.h"
#include "cuda/work/items.cuh"

static sinkattn_status device_error(int32_t ordinal, const char *what, cudaError_t error) {
    sinkattn_status status = {SINKATTN_DEVICE, ""};
    snprintf(status.message, sizeof status.message, "CUDA device %d: %s failed with %s (%s)", (int)ordinal, what, cudaGetErrorName(error),
            cudaGetErrorString(error));
    cudaGetLastError(); // clears it, or an unrelated call would report it
    return status;
}

// cudaGetDeviceProperties has the name too, but takes longer than a whole attention call.
static cudaError_t read_name(int32_t ordinal, char *name, int bytes) {
    typedef CUresult (*name_function)(char *, int, CUdevice);
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuDeviceGetName", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    return ((name_function)function)(name, bytes, ordinal) == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidDevice;
}

// SINKATTN_CUDA_ARCH in the environment lowers the compute capability, so that kernels for older devices run on this one.
static sinkattn_status lower_arch(int32_t *arch) {
    const char *wanted = getenv("SINKATTN_CUDA_ARCH");
    if (!wanted) return sa_ok();
    char *end;
    const long lowered = strtol(wanted, &end, 10);
    if (end == wanted || *end || lowered < 80 || lowered > *arch) {
        sinkattn_status status = {SINKATTN_INVALID, ""};
        snprintf(status.message, sizeof status.message, "SINKATTN_CUDA_ARCH is %.100s; it must be from 80 to %d, this device's own", wanted,
                (int)*arch);
        return status;
    }
    *arch = (int32_t)lowered;
    return sa_ok();
}

extern "C" sinkattn_status sinkattn_query_cuda(int32_t ordinal, sinkattn_device *device) {
    if (!device) return {SINKATTN_INVALID, "device is NULL; it must be given"};
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return device_error(ordinal, "cudaGetDeviceCount", error);
    if (ordinal < 0 || ordinal >= count) {
        sinkattn_status status = {SINKATTN_INVALID, ""};
        snprintf(status.message, sizeof status.message, "ordinal is %d; it must be from 0 to %d", (int)ordinal, count - 1);
        return status;
    }

    struct {
        cudaDeviceAttr attribute;
        int value;
    } facts[] = {{cudaDevAttrComputeCapabilityMajor, 0}, {cudaDevAttrComputeCapabilityMinor, 0}, {cudaDevAttrMultiProcessorCount, 0}};
    for (auto &fact : facts) {
        error = cudaDeviceGetAttribute(&fact.value, fact.attribute, ordinal);
        if (error != cudaSuccess) return device_error(ordinal, "cudaDeviceGetAttribute", error);
    }
    sinkattn_device found = {SINKATTN_CUDA, 10 * facts[0].value + facts[1].value, facts[2].value, ""};
    error = read_name(ordinal, found.name, sizeof found.name);
    if (error != cudaSuccess) return device_error(ordinal, "cuDeviceGetName", error);
    const sinkattn_status status = lower_arch(&found.arch);
    if (!status.code) *device = found;
    return status;
}

// One word a device; bits stay set until sinkattn_check_errors. Kernels get its address.
static __device__ unsigned error_word;

extern "C" sinkattn_status sa_cuda_status(const char *what, cudaError_t error) {
    if (error == cudaSuccess) return sa_ok();
    int ordinal = -1;
    cudaGetDevice(&ordinal);
    return device_error(ordinal, what, error);
}

extern "C" sinkattn_status sa_cuda_error_word(unsigned **word) {
    return sa_cuda_status("cudaGetSymbolAddress", cudaGetSymbolAddress((void **)word, error_word));
}

static sinkattn_status take_errors(unsigned *errors) {
    const unsigned none = 0;
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaMemcpyFromSymbol(errors, error_word, sizeof *errors);
    if (error == cudaSuccess && *errors) error = cudaMemcpyToSymbol(error_word, &none, sizeof none);
    return sa_cuda_status("reading the error word", error);
}

extern "C" sinkattn_status sinkattn_check_errors(int32_t ordinal) {
    int before;
    cudaError_t error = cudaGetDevice(&before);
    if (error == cudaSuccess) error = cudaSetDevice(ordinal);
    if (error != cudaSuccess) return device_error(ordinal, "cudaSetDevice", error);
    unsigned errors = 0;
    sinkattn_status status = take_errors(&errors);
    cudaSetDevice(before);
    if (status.code || !errors) return status;
    const char *cu_seqlens = errors & sa::kBadCuSeqlens ? "cu_seqlens did not start at 0, decreased or ended past the tensor; " : "";
    const char *cache_seqlens =
            errors & sa::kBadCacheSeqlens ? "cache_seqlens was negative or above the capacity, new keys included; " : "";
    const char *block_table =
            errors & sa::kBadBlockTable ? "block_table named a page outside the cache, whose keys were read as 0 and not written; " : "";
    const char *slots = errors & sa::kBadSlotMapping ? "slot_mapping named a slot outside the cache, whose row was not written; " : "";
    return sa_status(SINKATTN_INVALID, "CUDA device %d: %s%s%s%sthe call clamped them, so its results are not what was meant", (int)ordinal,
            cu_seqlens, cache_seqlens, block_table, slots);
}
