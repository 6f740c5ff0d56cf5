/* SPDX-License-Identifier: Apache-2.0
 *
 * Statuses, the error word and workspace sizes, for the launchers of the CUDA kernels. */
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

/* Bytes of workspace, by the names in variants.def. fwd: a counter of work items. decode: counters and partials. invariant: offsets,
 * statistics and gathered pages. bwd_sm80: the rows' statistics and terms of ds_aux. bwd_sm90: the table, statistics, dQ under way and
 * terms of ds_aux. bwd_sm90_window: partial sums of ds_aux, and which blocks run again. */
int64_t sa_cuda_fwd_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cuda_decode_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cuda_invariant_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cuda_bwd_sm80_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cuda_bwd_sm90_d64_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cuda_bwd_sm90_d128_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cuda_bwd_sm90_window_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
