/* SPDX-License-Identifier: Apache-2.0
 *
 * Every compiled CPU kernel that this machine runs, against the oracle in fp64, on random problems, for one to three workers.
 */
#include <inttypes.h>
#include <stdio.h>

#include "sample.h"

/* Workers, and who runs them: the calling thread alone, in reverse, or a thread each. */
static void check_worker_counts(sample *s, const sinkattn_variant_info *info, int32_t variant, const char *what) {
    const sinkattn_executor *const executors[] = {NULL, &threads, &backwards, &threads};
    const int32_t counts[] = {1, 2, 3, 3};
    uint64_t first = 0;
    int64_t first_splits = 0;
    for (int run = 0; run < 4; run++) {
        const sinkattn_device device = {.backend = SINKATTN_CPU, .arch = info->arch, .workers = counts[run]};
        sinkattn_plan plan;
        sample_reset(s);
        const sinkattn_status status = sample_run(s, &device, executors[run], &plan);
        if (!CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, what)) return;
        CHECK(plan.variant == variant, "the plan takes %s: %s", sinkattn_variant(plan.variant)->name, what);
        const uint64_t hash = sample_hash(s);
        if (run == 0) {
            first = hash;
            first_splits = plan.num_splits;
        }
        CHECK(hash == first || plan.num_splits != first_splits, "run %d with %d workers has other bits: %s", run, counts[run], what);
    }
}

typedef sinkattn_problem (*problem_maker)(const sinkattn_variant_info *info, sinkattn_dtype dtype);

static void check_variant(int32_t variant, sinkattn_dtype dtype, problem_maker make, int repeats) {
    const sinkattn_variant_info *info = sinkattn_variant(variant);
    const sinkattn_device oracle = oracle_device();
    for (int i = 0; i < repeats; i++) {
        const sinkattn_problem problem = make(info, dtype);
        char what[640];
        snprintf(what, sizeof what, "%s on sample %d: %s", info->name, i, problem_text(&problem));
        sample s = sample_new(&problem, false), wide = sample_widened(&s);
        const sinkattn_status status = sample_run(&wide, &oracle, NULL, NULL);
        CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, what);
        check_worker_counts(&s, info, variant, what);
        sample_check(&s, &wide, what);
        sample_free(&s);
        sample_free(&wide);
    }
}

static void check_op(sinkattn_op op, problem_maker make, int repeats) {
    sinkattn_device here;
    const sinkattn_status status = sinkattn_query_cpu(1, &here);
    if (!CHECK(status.code == SINKATTN_OK, "%s", status.message)) return;
    const sinkattn_variant_info *info;
    for (int32_t i = 0; (info = sinkattn_variant(i)); i++) {
        if (info->op != op || info->backend != SINKATTN_CPU) continue;
        if (info->arch > here.arch) {
            skip("%s needs level %" PRId32 ", this run has %" PRId32, info->name, info->arch, here.arch);
            continue;
        }
        for (sinkattn_dtype dtype = SINKATTN_BF16; dtype <= SINKATTN_FP64; dtype++)
            if (info->dtypes & SA_BIT(dtype)) check_variant(i, dtype, make, repeats);
    }
}

/* Thousands of rows, which kernels may cut into segments, under a narrow window that keeps the oracle quick. */
static sinkattn_problem long_problem(const sinkattn_variant_info *info, sinkattn_dtype dtype) {
    sinkattn_problem p = random_problem(info, dtype);
    p.packed = info->tile_q && one_in(3);
    p.batch = p.packed ? 2 : 1;
    p.num_kv_heads = 1;
    p.num_q_heads = pick(1, 2);
    p.head_dim = 16;
    p.head_dim_v = one_in(4) ? 8 : 0;
    p.q_len = info->tile_q ? pick(1025, 2400) : 100;
    p.k_len = p.q_len + pick(-60, 60);
    p.mask = (sinkattn_mask){true, true, pick(0, 40), pick(0, 9), one_in(2) ? pick(1, 130) : 0};
    return p;
}

static void test_forward_kernels(void) { check_op(SINKATTN_FWD, random_problem, 18); }
static void test_backward_kernels(void) { check_op(SINKATTN_BWD, random_problem, 12); }
static void test_long_backward_kernels(void) { check_op(SINKATTN_BWD, long_problem, 1); }
static void test_decode_kernels(void) { check_op(SINKATTN_DECODE, random_problem, 18); }

const test kernel_tests[] = {TEST(forward_kernels), TEST(backward_kernels), TEST(long_backward_kernels), TEST(decode_kernels), {0}};
