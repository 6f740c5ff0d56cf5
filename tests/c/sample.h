/* SPDX-License-Identifier: Apache-2.0
 *
 * A problem with memory behind it, laid out so that what must not happen shows: inputs end where malloc ends, outputs stand between
 * watched bytes, keys that no row sees hold NaN and infinity, pages that no row needs are unmapped, the workspace is exact and dirty.
 */
#ifndef SA_SAMPLE_H
#define SA_SAMPLE_H

#include <stddef.h>

#include "core/core.h"
#include "core/layout.h"
#include "core/numerics.h"
#include "test.h"

typedef struct array {
    sinkattn_tensor at;
    sinkattn_dtype dtype;
    int64_t batch, rows, heads, head_dim;
    unsigned char *block; /* from malloc; elements nobody wrote are 0xff bytes, which are NaN */
    size_t bytes;
    bool expanded; /* some stride is 0 */
} array;

double array_get(const array *a, int64_t b, int64_t row, int64_t head, int64_t x);
void array_set(array *a, int64_t b, int64_t row, int64_t head, int64_t x, double value);

typedef struct sample {
    sinkattn_problem problem;
    array q, k, v, out;
    array dout, dq, dk, dv; /* backward */
    int64_t num_stats;      /* elements of lse */
    void *lse, *lse_raw, *dlse, *s_aux, *ds_aux;
    int32_t *cu_seqlens_q, *cu_seqlens_k, *cache_seqlens, *block_table;
} sample;

/* Random tensors and lengths for a problem. plain: dense strides, and no NaN anywhere. For the backward, out and lse are computed. */
sample sample_new(const sinkattn_problem *problem, bool plain);
/* The same values in fp64, in plain strides. */
sample sample_widened(const sample *s);
void sample_free(sample *s);

/* Plans for the device and runs in a workspace of exactly the planned size; plan may be NULL. */
sinkattn_status sample_run(sample *s, const sinkattn_device *device, const sinkattn_executor *executor, sinkattn_plan *plan);
sinkattn_status sample_run_planned(sample *s, const sinkattn_plan *plan, const sinkattn_executor *executor);

sinkattn_fwd_args sample_fwd_args(const sample *s);
sinkattn_bwd_args sample_bwd_args(const sample *s);
sinkattn_decode_args sample_decode_args(const sample *s);

/* Outputs back to 0xff, and a number that stands for their bits, the watched bytes included. */
void sample_reset(sample *s);
uint64_t sample_hash(const sample *s);

/* Outputs against a widened sample that has run on the oracle; what names the sample in failures. */
void sample_check(const sample *s, const sample *reference, const char *what);

sinkattn_dtype sample_lse_dtype(const sinkattn_problem *problem);
sinkattn_device oracle_device(void);
/* A GPU of this compute capability with an H200's 132 multiprocessors; it need not be there. */
sinkattn_device gpu(int32_t arch);
/* Checks that the row sa_<op>_<backend>_<name> is planned, for the reason that it is the best, and returns the plan. */
sinkattn_plan check_planned(const sinkattn_problem *problem, sinkattn_device device, const char *name);
/* Calls body for each level and dtype that has tiled kernels, and for the oracle. */
void at_each_level(void (*body)(const sinkattn_device *device, sinkattn_dtype dtype));
/* A problem within what the row serves; backward problems are smaller. */
sinkattn_problem random_problem(const sinkattn_variant_info *info, sinkattn_dtype dtype);
/* One line that says what a problem is. */
const char *problem_text(const sinkattn_problem *problem);

/* Executors: a thread a worker, and one thread that takes the workers backwards. */
extern const sinkattn_executor threads, backwards;

/* The forward whose order of sums this one has: those of windows and of few rows have the general ones', d96 has d128's. */
const sinkattn_variant_info *forward_of_order(const sinkattn_variant_info *forward);

#endif
