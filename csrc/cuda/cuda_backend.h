/* SPDX-License-Identifier: Apache-2.0
 *
 * What the CUDA kernels' launchers share. */
#ifndef SA_CUDA_BACKEND_H
#define SA_CUDA_BACKEND_H

#include <cuda_runtime_api.h>

#include "sinkattn.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "core/core.h"

/* A runtime call's result as a status that names the call; the runtime's own last error is cleared. */
sinkattn_status sa_cuda_status(const char *what, cudaError_t error);

/* The current device's error word, of which kernels set bits. */
sinkattn_status sa_cuda_error_word(unsigned **word);

#ifdef __cplusplus
}
#endif
#endif
