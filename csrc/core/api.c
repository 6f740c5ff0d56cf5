/* SPDX-License-Identifier: Apache-2.0
 *
 * The door: every call is validated whole, then handed to the kernel of its plan.
 */
#include <inttypes.h>

#include "core.h"
#include "mask.h"

static sinkattn_status launch(
        const void *args, const sinkattn_problem *problem, const sinkattn_plan *plan, const sinkattn_context *context) {
    const sinkattn_status status = sa_validate_plan(problem, plan);
    if (status.code != SINKATTN_OK) return status;
    if (!context) return sa_status(SINKATTN_INVALID, "context is NULL; it must be given");
    const sa_variant *row = sa_variant_at(plan->variant);
    if (!row->run)
        return sa_status(SINKATTN_UNSUPPORTED, "plan.variant is %s; this build must be made with nvcc to have it", row->info.name);
    const int64_t needed = row->workspace_bytes(problem, plan); /* plan.workspace_bytes is the caller's word, this is ours */
    if (context->workspace_bytes < needed)
        return sa_status(
                SINKATTN_INVALID, "context.workspace_bytes is %" PRId64 "; it must be at least %" PRId64, context->workspace_bytes, needed);
    if (needed > 0 && !context->workspace)
        return sa_status(SINKATTN_INVALID, "context.workspace is NULL; it must hold %" PRId64 " bytes", needed);
    return row->run(args, plan, context);
}

sinkattn_status sinkattn_fwd(const sinkattn_fwd_args *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const sinkattn_status status = sa_validate_fwd(args);
    return status.code == SINKATTN_OK ? launch(args, &args->problem, plan, context) : status;
}

sinkattn_status sinkattn_bwd(const sinkattn_bwd_args *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const sinkattn_status status = sa_validate_bwd(args);
    return status.code == SINKATTN_OK ? launch(args, &args->fwd.problem, plan, context) : status;
}

sinkattn_status sinkattn_decode(const sinkattn_decode_args *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const sinkattn_status status = sa_validate_decode(args);
    return status.code == SINKATTN_OK ? launch(args, &args->fwd.problem, plan, context) : status;
}

sinkattn_status sinkattn_append(const sinkattn_append_args *args, sinkattn_backend backend, const sinkattn_context *context) {
    const sinkattn_status status = sa_validate_append(args);
    if (status.code != SINKATTN_OK) return status;
    if (!context) return sa_status(SINKATTN_INVALID, "context is NULL; it must be given");
    if (backend == SINKATTN_CPU) return sa_append_cpu(args);
    if (backend == SINKATTN_CUDA) return sa_append_cuda(args, context);
    return sa_status(SINKATTN_INVALID, "backend is %d; it must be cpu (0) or cuda (1)", (int)backend);
}

#ifndef SA_WITH_CUDA
static sinkattn_status without_cuda(int32_t ordinal) {
    return sa_status(SINKATTN_UNSUPPORTED,
            "CUDA device %" PRId32 " is asked for; this build must be made with nvcc to have the CUDA backend", ordinal);
}

sinkattn_status sinkattn_query_cuda(int32_t ordinal, sinkattn_device *device) {
    (void)device;
    return without_cuda(ordinal);
}

sinkattn_status sinkattn_check_errors(int32_t ordinal) { return without_cuda(ordinal); }

sinkattn_status sa_append_cuda(const sinkattn_append_args *args, const sinkattn_context *context) {
    (void)args;
    (void)context;
    return sa_status(SINKATTN_UNSUPPORTED, "backend is cuda; this build must be made with nvcc to have the CUDA backend");
}
#endif

const char *sinkattn_build_info(void) {
    return "sinkattn " SINKATTN_VERSION "; "
#ifndef __clang__
           "gcc "
#endif
            __VERSION__ "; backends: cpu"
#ifdef SA_WITH_CUDA
           ", cuda"
#endif
            ;
}

int64_t sinkattn_visible_pairs(const sinkattn_mask *mask, int64_t q_len, int64_t k_len) {
    if (!mask || sa_validate_mask(mask).code != SINKATTN_OK || q_len < 0 || k_len < 0 || sa_max(q_len, k_len) > INT32_MAX) return -1;
    const sa_band band = sa_band_of(mask, q_len, k_len);
    return sa_pair_count(&band);
}
