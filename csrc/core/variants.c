/* SPDX-License-Identifier: Apache-2.0 */
#include "core.h"

#define SA_VARIANT(op, backend, arch, needs, dtypes, max_head_dim, tile_q, tile_k, workspace, serves) \
    sinkattn_status sa_##op##_##backend##_##arch(const void *, const sinkattn_plan *, const sinkattn_context *);
#include "variants.def"

/* The words of variants.def as values. A kernel that is not compiled has a row without code. */
#ifdef SA_WITH_CUDA
#define SA_HAS_cuda true
#define SA_CODE_cuda(kernel) kernel
#else
#define SA_HAS_cuda false
#define SA_CODE_cuda(kernel) NULL
#endif
#define SA_HAS_cpu true
#define SA_CODE_cpu(kernel) kernel
enum { SA_OP_fwd = SINKATTN_FWD, SA_OP_bwd = SINKATTN_BWD, SA_OP_decode = SINKATTN_DECODE };
enum { SA_BACKEND_cpu = SINKATTN_CPU, SA_BACKEND_cuda = SINKATTN_CUDA };

static const sa_variant sa_variants[] = {
#define SA_VARIANT(...) SA_ROW(false, __VA_ARGS__)
#define SA_ROOMY_VARIANT(...) SA_ROW(true, __VA_ARGS__)
#define SA_ROW(roomy, op, backend, arch, needs, dtypes, max_head_dim, tile_q, tile_k, workspace, serves) \
    {{"sa_" #op "_" #backend "_" #arch, (sinkattn_op)SA_OP_##op, (sinkattn_backend)SA_BACKEND_##backend, needs, dtypes, max_head_dim, \
             tile_q, tile_k, SA_HAS_##backend}, \
            SA_CODE_##backend(sa_##op##_##backend##_##arch), sa_##workspace##_workspace, sa_refusal_##serves, roomy},
#include "variants.def"
};

const sa_variant *sa_variant_at(int32_t i) {
    return i >= 0 && (size_t)i < sizeof sa_variants / sizeof *sa_variants ? &sa_variants[i] : NULL;
}

const sinkattn_variant_info *sinkattn_variant(int32_t i) {
    const sa_variant *variant = sa_variant_at(i);
    return variant ? &variant->info : NULL;
}
