/* SPDX-License-Identifier: Apache-2.0
 *
 * Every compiled CPU kernel that this machine runs, against the oracle in fp64, on random problems, for one to three workers; and every
 * CUDA row, on the emulated device of tests/emulator.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/workspace.h"
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

/* A sample, and what the oracle makes of it. */
typedef struct judged {
    sample s, wide;
    char what[640];
} judged;

static judged judged_new(const sinkattn_problem *problem, int32_t variant) {
    const sinkattn_device oracle = oracle_device();
    judged j = {.s = sample_new(problem, false)};
    j.wide = sample_widened(&j.s);
    snprintf(j.what, sizeof j.what, "%s: %s", sinkattn_variant(variant)->name, problem_text(problem));
    const sinkattn_status status = sample_run(&j.wide, &oracle, NULL, NULL);
    CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, j.what);
    return j;
}

static void judged_free(judged *j) {
    sample_free(&j->s);
    sample_free(&j->wide);
}

static void check_variant(int32_t variant, sinkattn_dtype dtype, problem_maker make, int repeats) {
    const sinkattn_variant_info *info = sinkattn_variant(variant);
    for (int i = 0; i < repeats; i++) {
        const sinkattn_problem problem = make(info, dtype);
        judged j = judged_new(&problem, variant);
        check_worker_counts(&j.s, info, variant, j.what);
        sample_check(&j.s, &j.wide, j.what);
        judged_free(&j);
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

/* Wider, longer and under narrower windows than random_problem's, as CUDA rows ask for. */
static sinkattn_problem device_problem(const sinkattn_variant_info *info) {
    sinkattn_problem p = random_problem(info, one_in(3) ? SINKATTN_FP16 : SINKATTN_BF16);
    const bool decodes = p.op == SINKATTN_DECODE;
    if (one_in(2)) {
        p.head_dim = info->max_head_dim;
        p.head_dim_v = (int32_t)sa_min(p.head_dim, strstr(info->name, "_v128") ? 128 : SA_MAX_HEAD_DIM_V);
    }
    if (one_in(2)) p.q_len = pick(1, decodes && !p.packed ? 16 : 300);
    if (one_in(3)) p.mask = (sinkattn_mask){true, true, one_in(2) ? 127 : pick(0, 300), 0, one_in(3) ? pick(1, 16) : 0};
    if (!decodes && one_in(2)) p.k_len = p.q_len + pick(0, 1) * pick(0, 300);
    if (p.page_size >= 16 && one_in(2)) p.k_len = p.page_size * sa_ceil_div(pick(1, 30000), p.page_size);
    return p;
}

static double work_of(const sinkattn_problem *p) {
    return (double)(p->batch * p->num_q_heads * p->q_len) * (double)(p->k_len * (p->head_dim + sa_head_dim_v(p)));
}

/* A problem of bounded work that row i serves, though the planner may know a faster row, and its plan; false if none is found. */
static bool find_problem(int32_t i, sinkattn_device *device, sinkattn_problem *problem, sinkattn_plan *plan) {
    static const int32_t multiprocessors[] = {1, 2, 3, 5, 8, 16};
    const sa_variant *row = sa_variant_at(i);
    device->arch = row->info.arch;
    for (int tries = 0; tries < 300000; tries++) {
        *problem = device_problem(&row->info);
        if (work_of(problem) > (tries < 2000 ? 1e7 : 3e8)) continue;
        device->workers = multiprocessors[pick(0, COUNT(multiprocessors) - 1)];
        if (sinkattn_make_plan(problem, device, plan).code) continue;
        if (plan->variant != i) {
            plan->variant = i;
            plan->num_splits = 1;
            plan->num_items = sa_num_query_tiles(problem, &row->info);
            plan->workspace_bytes = row->workspace_bytes(problem, plan);
        }
        if (!sa_validate_plan(problem, plan).code) return true;
    }
    return false;
}

/* Twice, each time with another order of threads. */
static void check_on_device(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    judged j = judged_new(problem, plan->variant);
    uint64_t first = 0;
    for (int run = 0; run < 2; run++) {
        sample_reset(&j.s);
        const sinkattn_status status = sample_run_planned(&j.s, plan, NULL);
        CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, j.what);
        if (run == 0) first = sample_hash(&j.s);
        CHECK(sample_hash(&j.s) == first, "the second run has other bits: %s", j.what);
        sample_check(&j.s, &j.wide, j.what);
    }
    const sinkattn_status errors = sinkattn_check_errors(0);
    CHECK(errors.code == SINKATTN_OK, "%s: %s", errors.message, j.what);
    judged_free(&j);
}

static bool is_emulated(sinkattn_device *device) {
    if (!sinkattn_query_cuda(0, device).code && strcmp(device->name, "emulated") == 0) return true;
    skip("CUDA kernels are run here on the emulated device alone: make test-emulated");
    return false;
}

static void check_masked(sinkattn_op op, int64_t batch, int64_t group, int64_t kv_heads, int64_t q_len, int64_t k_len, int64_t head_dim,
        sinkattn_mask mask, const sinkattn_device *device) {
    const sinkattn_problem problem = {.op = op,
            .dtype = SINKATTN_BF16,
            .batch = batch,
            .num_q_heads = group * kv_heads,
            .num_kv_heads = kv_heads,
            .head_dim = head_dim,
            .q_len = q_len,
            .k_len = k_len,
            .mask = mask};
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(&problem, device, &plan);
    if (!CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, problem_text(&problem))) return;
    if (op == SINKATTN_BWD && !mask.has_left) {
        const bool has_slices = sa_bwd_sm90_slices(&problem, sinkattn_variant(plan.variant)->tile_q) > 1,
                   has_turns = sa_bwd_sm90_layout_of(&problem, &plan).parts == 0;
        CHECK(has_slices || has_turns, "neither slices nor turns: %s", problem_text(&problem));
    }
    check_on_device(&problem, &plan);
}

/* What random problems seldom meet: a decode with more tiles of rows than multiprocessors; a backward that adds dQ in turns, and one that
 * takes a GQA group in slices; windows far behind their sink tokens, of several sequences a block. */
static void test_cuda_kernels_at_their_edges(void) {
    const sinkattn_mask causal = {.has_right = true}, window = {.has_left = true, .has_right = true, .left = 127, .num_sink_tokens = 4};
    sinkattn_device device;
    if (!is_emulated(&device)) return;
    for (int64_t head_dim = 64; head_dim <= 256; head_dim *= 2) {
        device.workers = 16;
        check_masked(SINKATTN_BWD, 17, 1, 2, 150, 150, head_dim, causal, &device);
        check_masked(SINKATTN_BWD, 1, 48, 1, 70, 70, head_dim, causal, &device);
        device.workers = 1;
        check_masked(SINKATTN_DECODE, 1, 3, 2, 17, 341, head_dim, causal, &device);
    }
    check_masked(SINKATTN_FWD, 3, 6, 1, 250, 250, 128, window, &device);
    check_masked(SINKATTN_BWD, 2, 6, 1, 400, 400, 128, window, &device);
    device.arch = 80;
    check_masked(SINKATTN_DECODE, 1, 3, 2, 17, 341, 128, causal, &device);
}

static void test_cuda_kernels(void) {
    sinkattn_device device;
    if (!is_emulated(&device)) return;
    const sinkattn_variant_info *info;
    for (int32_t i = 0; (info = sinkattn_variant(i)); i++)
        for (int repeat = 0; repeat < 8 && info->backend == SINKATTN_CUDA; repeat++) {
            sinkattn_problem problem;
            sinkattn_plan plan;
            if (!CHECK(find_problem(i, &device, &problem, &plan), "%s: no problem is found for it", info->name)) break;
            check_on_device(&problem, &plan);
            if (work_of(&problem) > 1e7) break; /* one is enough where they are so large */
        }
}

const test kernel_tests[] = {TEST(forward_kernels), TEST(backward_kernels), TEST(long_backward_kernels), TEST(decode_kernels),
        TEST(cuda_kernels_at_their_edges), TEST(cuda_kernels), {0}};
