/* SPDX-License-Identifier: Apache-2.0
 *
 * Statuses and the error word, for the launchers of the CUDA kernels. */
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

/* The address of the current device's error word, whose bits kernels set. */
sinkattn_status sa_cuda_error_word(unsigned **word);

#ifdef __cplusplus
}
#endif
#endif
