/* SPDX-License-Identifier: Apache-2.0 */
#include "core.h"

#define SA_VARIANT(op, backend, arch, dtypes, max_head_dim, tile_q, tile_k, serves)                                                        \
    sinkattn_status sa_##op##_##backend##_##arch(const void *, const sinkattn_plan *, const sinkattn_context *);                           \
    int64_t sa_##backend##_workspace(const sinkattn_problem *, const sinkattn_plan *);
#include "variants.def"

/* The words of variants.def as values. */
enum { SA_OP_fwd = SINKATTN_FWD, SA_OP_bwd = SINKATTN_BWD, SA_OP_decode = SINKATTN_DECODE };
enum { SA_BACKEND_cpu = SINKATTN_CPU, SA_BACKEND_cuda = SINKATTN_CUDA };
enum {
    SA_ARCH_oracle = SINKATTN_CPU_ORACLE,
    SA_ARCH_scalar = SINKATTN_CPU_SCALAR,
    SA_ARCH_avx2 = SINKATTN_CPU_AVX2,
    SA_ARCH_avx512 = SINKATTN_CPU_AVX512,
    SA_ARCH_avx512_bf16 = SINKATTN_CPU_AVX512_BF16,
    SA_ARCH_amx_bf16 = SINKATTN_CPU_AMX_BF16,
    SA_ARCH_sm80_d64 = 80,
    SA_ARCH_sm80_d128 = 80,
    SA_ARCH_sm80_d256 = 80,
    SA_ARCH_sm90_d64 = 90,
    SA_ARCH_sm90_d128 = 90,
    SA_ARCH_sm80_d512 = 80,
    SA_ARCH_sm80_prefill = 80,
    SA_ARCH_sm90_window = 90
};

static const sa_variant sa_variants[] = {
#define SA_VARIANT(op, backend, arch, dtypes, max_head_dim, tile_q, tile_k, serves)                                                        \
    {{"sa_" #op "_" #backend "_" #arch, (sinkattn_op)SA_OP_##op, (sinkattn_backend)SA_BACKEND_##backend, SA_ARCH_##arch, dtypes,           \
      max_head_dim, tile_q, tile_k},                                                                                                       \
     sa_##op##_##backend##_##arch,                                                                                                         \
     sa_##backend##_workspace,                                                                                                             \
     sa_refusal_##serves},
#include "variants.def"
};

const sa_variant *sa_variant_at(int32_t i) {
    return i >= 0 && (size_t)i < sizeof sa_variants / sizeof *sa_variants ? &sa_variants[i] : NULL;
}

const sinkattn_variant_info *sinkattn_variant(int32_t i) {
    const sa_variant *variant = sa_variant_at(i);
    return variant ? &variant->info : NULL;
}
