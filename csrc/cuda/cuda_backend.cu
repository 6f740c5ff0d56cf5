// SPDX-License-Identifier: Apache-2.0
//
// Device facts, the CUDA half of the public API. The runtime is linked statically and the driver is found when it is first needed, so
// that a library with this half inside loads on a machine without either.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdio.h>

#include "sinkattn.h"

static sinkattn_status device_error(int32_t ordinal, const char *what, cudaError_t error) {
    sinkattn_status status = {SINKATTN_DEVICE, ""};
    snprintf(status.message, sizeof status.message, "CUDA device %d: %s failed with %s (%s)", (int)ordinal, what, cudaGetErrorName(error),
             cudaGetErrorString(error));
    cudaGetLastError(); // the runtime would hand the error to whoever asks next
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
    } facts[] = {{cudaDevAttrComputeCapabilityMajor, 0},
                 {cudaDevAttrComputeCapabilityMinor, 0},
                 {cudaDevAttrMultiProcessorCount, 0},
                 {cudaDevAttrMaxSharedMemoryPerBlockOptin, 0}};
    for (auto &fact : facts) {
        error = cudaDeviceGetAttribute(&fact.value, fact.attribute, ordinal);
        if (error != cudaSuccess) return device_error(ordinal, "cudaDeviceGetAttribute", error);
    }
    sinkattn_device found = {SINKATTN_CUDA, 10 * facts[0].value + facts[1].value, facts[2].value, facts[3].value, ""};
    error = read_name(ordinal, found.name, sizeof found.name);
    if (error != cudaSuccess) return device_error(ordinal, "cuDeviceGetName", error);
    *device = found;
    return {SINKATTN_OK, ""};
}
