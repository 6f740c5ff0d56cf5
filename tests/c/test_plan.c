/* SPDX-License-Identifier: Apache-2.0
 *
 * Plans for devices that need not be there, and what the machine says of itself.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/split.h"
#include "sample.h"

static sinkattn_device cpu(sinkattn_cpu_level level, int32_t workers) {
    return (sinkattn_device){.backend = SINKATTN_CPU, .arch = (int32_t)level, .workers = workers};
}

static sinkattn_problem prefill(sinkattn_op op, sinkattn_dtype dtype) {
    return (sinkattn_problem){.op = op,
            .dtype = dtype,
            .batch = 2,
            .num_q_heads = 8,
            .num_kv_heads = 2,
            .head_dim = 64,
            .q_len = 100,
            .k_len = 100,
            .mask = {.has_right = true}};
}

static sinkattn_problem decode(int64_t batch, int64_t k_len) {
    sinkattn_problem problem = prefill(SINKATTN_DECODE, SINKATTN_BF16);
    problem.batch = batch;
    problem.num_kv_heads = problem.q_len = 1;
    problem.k_len = k_len;
    return problem;
}

static void test_the_best_row_is_taken(void) {
    static const struct {
        sinkattn_op op;
        sinkattn_dtype dtype;
        sinkattn_cpu_level level;
        const char *name;
    } cases[] = {
            {SINKATTN_FWD, SINKATTN_FP64, SINKATTN_CPU_SCALAR, "oracle"},
            {SINKATTN_BWD, SINKATTN_BF16, SINKATTN_CPU_ORACLE, "oracle"},
            {SINKATTN_FWD, SINKATTN_BF16, SINKATTN_CPU_SCALAR, "scalar"},
#if defined(__x86_64__)
            {SINKATTN_FWD, SINKATTN_FP64, SINKATTN_CPU_AVX512_BF16, "oracle"},
            {SINKATTN_DECODE, SINKATTN_FP32, SINKATTN_CPU_AVX2, "avx2"},
            {SINKATTN_BWD, SINKATTN_FP16, SINKATTN_CPU_AVX512_BF16, "avx512"},
            {SINKATTN_BWD, SINKATTN_BF16, SINKATTN_CPU_AVX512_BF16, "avx512_bf16"},
            {SINKATTN_BWD, SINKATTN_BF16, SINKATTN_CPU_AMX_BF16, "amx_bf16"},
#endif
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const sinkattn_problem problem = prefill(cases[i].op, cases[i].dtype);
        check_planned(&problem, cpu(cases[i].level, 4), cases[i].name);
    }
}

static sinkattn_problem windowed(sinkattn_op op, int64_t len, int64_t left) {
    sinkattn_problem problem = prefill(op, SINKATTN_BF16);
    problem.batch = 1;
    problem.num_q_heads = 16;
    problem.q_len = problem.k_len = len;
    problem.mask = (sinkattn_mask){.has_left = true, .left = left, .has_right = true};
    return problem;
}

/* sm_90a code runs on 9.0 alone, the sm_80 rows everywhere from 8.0; a window must fit the row's key tile. */
static void test_the_cuda_row_is_taken(void) {
    static const struct {
        int32_t arch;
        int64_t num_q_heads, window;
        const char *name;
    } cases[] = {
            {80, 16, 128, "sm80_d64"},
            {90, 16, 128, "sm90_window"},
            {100, 16, 128, "sm80_d64"},
            {90, 16, 137, "sm90_window"},
            {90, 16, 154, "sm90_d64_window"},
            {90, 16, 155, "sm90_d64_tile128"},
            {90, 12, 128, "sm90_d64_window"},
            {90, 2, 128, "sm90_d64_tile64"},
            {90, 6, 128, "sm90_d64_window"},
            {90, 386, 128, "sm80_d64"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = windowed(SINKATTN_FWD, 1000, cases[i].window - 1);
        problem.num_q_heads = cases[i].num_q_heads;
        check_planned(&problem, gpu(cases[i].arch), cases[i].name);
    }
}

/* Another row than sa_<op>_cuda_sm90_window is planned, and this is the reason; without one, that row. */
static void check_why_no_window(const sinkattn_problem *problem, const sinkattn_device *device, const char *why) {
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(problem, device, &plan);
    if (!CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, problem_text(problem))) return;
    char row[160];
    snprintf(row, sizeof row, "; not sa_%s_cuda_sm90_window%s", sa_op_name(problem->op), why ? why : "");
    const char *found = strstr(plan.reason, why && *why == ';' ? why : row);
    const bool taken = strcmp(sinkattn_variant(plan.variant)->name + 12, "sm90_window") == 0;
    CHECK(why ? found && !taken : taken && !found, "%s: %s", problem_text(problem), plan.reason);
}

/* One reason a row, and the right one. */
static void test_the_window_row_says_why_not(void) {
    const sinkattn_device device = gpu(90), older = {SINKATTN_CUDA, 80, 108, ""};
    const sinkattn_problem base = windowed(SINKATTN_FWD, 1000, 127);
    sinkattn_problem wide = base, sinks = base, many_sinks = base, ungrouped = base, negative = base, large = base;
    wide.mask.left = 137;
    sinks.mask.num_sink_tokens = 16;
    many_sinks.mask.num_sink_tokens = 17;
    ungrouped.num_q_heads = 2;
    negative.softmax_scale = -1.0;
    large.head_dim = 72;
    const struct {
        const sinkattn_problem *problem;
        const sinkattn_device *device;
        const char *why;
    } cases[] = {{&base, &device, NULL}, {&wide, &device, " (64 x 144): left + right + tokens a tile > its tile_k"},
            {&sinks, &device, NULL}, {&many_sinks, &device, " (64 x 144): more than 16 positional sink tokens"},
            {&ungrouped, &device, " (64 x 144): query heads a kv head"}, {&negative, &device, " (64 x 144): softmax_scale is negative"},
            {&large, &device, " (64 x 144): head_dim is above its largest"}, {&base, &older, "; not those for sm_90"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        check_why_no_window(cases[i].problem, cases[i].device, cases[i].why);
    }
}

/* A window is one block's work; else the kernel cuts by lengths, into shares whose number and workspace do not depend on them. */
static void test_cuda_decode_plans(void) {
    const sinkattn_device device = gpu(90);
    sinkattn_problem p = decode(3, 8192);
    p.num_q_heads = 64;
    p.num_kv_heads = 8;
    sinkattn_plan plan;
    const sinkattn_plan balanced = {.num_splits = 264, .num_items = 264, .workers = 132};
    CHECK(sinkattn_make_plan(&p, &device, &plan).code == SINKATTN_OK && plan.num_splits == balanced.num_splits &&
                    plan.num_items == balanced.num_items && plan.workers == balanced.workers &&
                    strstr(plan.reason, "up to 264 of at most 512"),
            "balanced: %s", plan.reason);
    const int64_t workspace_bytes = plan.workspace_bytes;
    p.batch = 4000;
    CHECK(sinkattn_make_plan(&p, &device, &plan).code == SINKATTN_OK && plan.num_items == 528 && workspace_bytes > 0 &&
                    plan.workspace_bytes == 2 * (workspace_bytes - 16) + 16,
            "%" PRId64 " bytes", plan.workspace_bytes);
    CHECK(sa_validate_plan(&p, &plan).code == SINKATTN_OK, "the plan fits its problem");
    p.num_splits = 3;
    CHECK(sinkattn_make_plan(&p, &device, &plan).code == SINKATTN_OK && plan.num_splits == 3 && plan.num_items == 3 * 8 * 4000,
            "as asked: %s", plan.reason);
    p.num_splits = 0;
    p.mask.has_left = true;
    p.mask.left = 127;
    CHECK(sinkattn_make_plan(&p, &device, &plan).code == SINKATTN_OK && plan.num_splits == 1 && plan.num_items == 8 * 4000 &&
                    plan.workspace_bytes == 0,
            "a window: %s", plan.reason);
    const int64_t head_dims[] = {8, 64, 72, 128, 200, 256, 512};
    const char *const names[] = {"sm80_d64", "sm80_d64", "sm80_d128", "sm80_d128", "sm80_d256", "sm80_d256", "sm80_d512"};
    for (size_t i = 0; i < COUNT(head_dims); i++) {
        p.head_dim = head_dims[i];
        check_planned(&p, device, names[i]);
    }
    p.invariant = true;
    const sinkattn_status status = sinkattn_make_plan(&p, &device, &plan);
    CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, "invariant"), "%s", status.message);
    p.head_dim = 256;
    check_planned(&p, device, "sm90_packed_d256");
    p.extras = true;
    CHECK(strstr(sinkattn_make_plan(&p, &device, &plan).message, "quantise out afterwards"), "host pages");
}

/* A causal window of up to 128 keys. The workspace: a flag a block; 12 sums a block and head; sink tokens: 16, and sums of each tile. */
static void test_the_backward_of_a_window_is_planned(void) {
    const sinkattn_device device = gpu(90), older = {SINKATTN_CUDA, 80, 108, ""};
    sinkattn_problem base = windowed(SINKATTN_BWD, 2000, 128);
    base.s_aux_dtype = SINKATTN_FP32;
    sinkattn_plan plan = {0};
    CHECK(sinkattn_make_plan(&base, &device, &plan).code == SINKATTN_OK && plan.workers == 132 &&
                    plan.workspace_bytes == 4 * (132 * (16 * 12 + 1) + 1) + 3,
            "%" PRId64 " bytes: %s", plan.workspace_bytes, plan.reason);
    sinkattn_problem ungrouped = base, odd = base, negative = base, wide = base, unbounded = base, two_sided = base, sinks = base,
                     many = base, empty = base, no_batch = base, large = base;
    ungrouped.num_q_heads = 2;
    odd.num_q_heads = 10;
    negative.softmax_scale = -1.0;
    wide.mask.left = 129;
    unbounded.mask = (sinkattn_mask){.has_right = true};
    two_sided.mask.right = 1;
    sinks.mask.num_sink_tokens = 16; /* 33 tiles of rows leave 16 x 2 x 128 sums */
    CHECK(sinkattn_make_plan(&sinks, &device, &plan).code == SINKATTN_OK && plan.workspace_bytes == 4 * (135168 + 132 * 257 + 1) + 15,
            "%" PRId64 " bytes with sink tokens: %s", plan.workspace_bytes, plan.reason);
    sinks.mask.num_sink_tokens = 17;
    many.num_q_heads = 130;
    empty.k_len = 0;
    no_batch.batch = 0;
    large.head_dim = 72;
    const struct {
        const sinkattn_problem *problem;
        const sinkattn_device *device;
        const char *why;
    } cases[] = {{&base, &device, NULL}, {&ungrouped, &device, NULL}, {&odd, &device, NULL}, {&negative, &device, NULL},
            {&wide, &device, " (64 x 64): left > 2 of its tile_k"}, {&unbounded, &device, " (64 x 64): left > 2 of its tile_k"},
            {&two_sided, &device, " (64 x 64): rows see keys after their own"},
            {&sinks, &device, " (64 x 64): more than 16 positional sink tokens"},
            {&many, &device, " (64 x 64): more query heads a kv head than its tile_q"},
            {&empty, &device, " (64 x 64): there are no rows or no keys"}, {&no_batch, &device, " (64 x 64): there are no rows or no keys"},
            {&large, &device, " (64 x 64): head_dim is above its largest"}, {&base, &older, "; not those for sm_90"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        check_why_no_window(cases[i].problem, cases[i].device, cases[i].why);
    }
}

/* Of every row lse and g - delta, 8 bytes, and with a sink the row's term of ds_aux, 4; packed rows are one stream. */
static void test_the_cuda_backward_is_planned(void) {
    static const struct {
        int64_t head_dim;
        const char *name;
    } rows[] = {{8, "sm80_d64"}, {64, "sm80_d64"}, {72, "sm80_d128"}, {128, "sm80_d128"}, {256, "sm80_d256"}};
    const sinkattn_device device = {.backend = SINKATTN_CUDA, .arch = 80, .workers = 108};
    sinkattn_problem problem = prefill(SINKATTN_BWD, SINKATTN_BF16);
    for (size_t i = 0; i < COUNT(rows); i++) {
        problem.head_dim = rows[i].head_dim;
        check_planned(&problem, device, rows[i].name);
    }
    for (int i = 0; i < 4; i++) {
        problem.packed = i % 2;
        problem.s_aux_dtype = i / 2 ? SINKATTN_BF16 : SINKATTN_NO_DTYPE;
        const int64_t num_rows = (problem.packed ? 1 : problem.batch) * problem.num_q_heads * problem.q_len;
        const int64_t bytes = check_planned(&problem, device, "sm80_d256").workspace_bytes;
        CHECK(bytes == num_rows * (8 + 4 * (i / 2)) + 7, "%" PRId64 " bytes: %s", bytes, problem_text(&problem));
    }
}

/* On 9.0 every mask, where a token's heads, or slices of 8 of them, fit a tile of rows. */
static void test_the_backward_of_sm90_is_planned(void) {
    static const struct {
        int32_t arch, head_dim_v;
        int64_t head_dim, num_q_heads, k_len;
        const char *name;
    } cases[] = {
            {90, 0, 8, 8, 100, "sm90_d64"},
            {90, 0, 64, 8, 100, "sm90_d64"},
            {90, 0, 96, 8, 100, "sm90_d96"},
            {90, 0, 104, 8, 100, "sm90_d128"},
            {90, 0, 136, 8, 100, "sm90_d256"},
            {90, 128, 192, 8, 100, "sm90_d192_v128"},
            {90, 0, 192, 8, 100, "sm90_d256"},
            {90, 56, 64, 8, 100, "sm90_d192_v128"},
            {90, 136, 192, 8, 100, "sm90_d256"},
            {90, 8, 200, 8, 100, "sm90_d256"},
            {90, 0, 64, 256, 100, "sm90_d64"},
            {90, 0, 64, 258, 100, "sm80_d64"},
            {90, 0, 64, 272, 100, "sm90_d64"},
            {90, 0, 128, 128, 100, "sm90_d128"},
            {90, 0, 128, 130, 100, "sm80_d128"},
            {90, 0, 128, 144, 100, "sm90_d128"},
            {90, 0, 256, 128, 100, "sm90_d256"},
            {90, 0, 256, 130, 100, "sm80_d256"},
            {90, 128, 192, 130, 100, "sm80_d256"},
            {90, 0, 64, 8, 0, "sm80_d64"},
            {90, 128, 192, 8, 0, "sm80_d256"},
            {80, 128, 192, 8, 100, "sm80_d256"},
            {100, 0, 64, 8, 100, "sm80_d64"},
    };
    sinkattn_problem problem = prefill(SINKATTN_BWD, SINKATTN_BF16);
    for (size_t i = 0; i < COUNT(cases); i++) {
        problem.head_dim = cases[i].head_dim;
        problem.head_dim_v = cases[i].head_dim_v;
        problem.num_q_heads = cases[i].num_q_heads;
        problem.k_len = cases[i].k_len;
        check_planned(&problem, gpu(cases[i].arch), cases[i].name);
    }
    /* At 32768 tokens, 64 query heads: what the backward adds to the forward's lse is at most 128 MiB. */
    problem = prefill(SINKATTN_BWD, SINKATTN_BF16);
    problem.batch = 1;
    problem.num_q_heads = 64;
    problem.num_kv_heads = 8;
    problem.q_len = problem.k_len = 32768;
    problem.s_aux_dtype = SINKATTN_FP32;
    const int64_t bytes = check_planned(&problem, gpu(90), "sm90_d64").workspace_bytes;
    CHECK(bytes <= INT64_C(128) << 20, "%" PRId64 " bytes", bytes);
}

static void test_a_miss_lists_what_there_is(void) {
    sinkattn_problem problem = prefill(SINKATTN_FWD, SINKATTN_FP64);
    sinkattn_device device = gpu(90);
    sinkattn_plan plan;
    sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
    CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, "fp64") &&
                    strstr(status.message, "there are sa_fwd_cuda_sm80_d256 (bf16 fp16 head_dim <= 256)"),
            "%s", status.message);
    device = cpu((sinkattn_cpu_level)-1, 1);
    status = sinkattn_make_plan(&problem, &device, &plan);
    CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, "sa_fwd_cpu_oracle (bf16 fp16 fp32 fp64 head_dim <= 256)"), "%s",
            status.message);
}

static void check_splits(const sinkattn_problem *problem, int32_t workers, int64_t expected) {
    const sinkattn_device device = cpu(SINKATTN_CPU_SCALAR, workers);
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(problem, &device, &plan);
    if (!CHECK(status.code == SINKATTN_OK, "%s", status.message)) return;
    CHECK(plan.num_splits == expected, "%" PRId64 " parts, expected %" PRId64 ": %s; %s", plan.num_splits, expected, plan.reason,
            problem_text(problem));
    CHECK(plan.num_items == problem->batch * problem->num_kv_heads * plan.num_splits && plan.workers <= workers && plan.workers >= 1,
            "%" PRId64 " items, %d workers", plan.num_items, plan.workers);
    CHECK(strstr(plan.reason, "B* = ") && strstr(plan.reason, "P = "), "the closed forms are told: %s", plan.reason);
}

static void test_decode_splits(void) {
    sinkattn_problem p = decode(1, 8192);
    const int64_t chunks = 8192 / SA_CPU_CHUNK;
    check_splits(&p, 1, 1);
    check_splits(&p, 6, 6);
    check_splits(&p, 1000, chunks);
    p = decode(4, 8192);
    check_splits(&p, 6, 2);
    check_splits(&p, 4, 1);
    const int64_t asked[] = {3, -3, 1000, -1000, INT64_MIN};
    for (size_t i = 0; i < COUNT(asked); i++) {
        p.num_splits = asked[i];
        check_splits(&p, 1, i < 2 ? 3 : chunks);
    }
    p = decode(1, 8192);
    p.invariant = true;
    check_splits(&p, 6, 6);
    p = decode(1, 8192);
    p.mask.has_left = true;
    p.mask.left = 127;
    check_splits(&p, 64, 2);
    p.mask.num_sink_tokens = 4;
    check_splits(&p, 64, 3);
    p = decode(0, 0);
    check_splits(&p, 8, 1);
}

static bool plan_extreme(const sinkattn_device *device, sinkattn_op op, bool packed, const int64_t *sizes) {
    sinkattn_problem p = {
            .op = op, .dtype = SINKATTN_BF16, .s_aux_dtype = SINKATTN_FP32, .packed = packed, .batch = sizes[0], .num_q_heads = 8};
    p.num_kv_heads = 1 + 7 * (sizes[0] & 1);
    p.head_dim = 8;
    p.q_len = sizes[1];
    p.k_len = sizes[2];
    p.mask = (sinkattn_mask){true, true, sizes[2], sizes[1], sizes[0]};
    if (op == SINKATTN_DECODE) p.num_splits = sizes[1];
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(&p, device, &plan);
    CHECK(status.code == SINKATTN_OK ? plan.num_items >= 0 && plan.workspace_bytes >= 0 : status.message[0] != 0, "%s", problem_text(&p));
    return status.code == SINKATTN_OK;
}

/* Sizes near the limits are planned, or refused in a sentence; nothing overflows. UBSan watches. */
static void test_plans_of_extreme_sizes(void) {
    const int64_t sizes[] = {0, 1, INT32_MAX, INT64_C(1) << 36, INT64_C(1) << 45, INT64_MAX};
    int num_planned = 0;
    const sinkattn_device devices[] = {
            cpu(SINKATTN_CPU_ORACLE, 64), cpu(SINKATTN_CPU_SCALAR, 64), {SINKATTN_CUDA, 80, 108, ""}, {SINKATTN_CUDA, 90, 132, ""}};
    for (int op = 0; op < 3; op++)
        for (int i = 0; i < 4 * 2 * 6 * 6 * 6; i++) {
            const int64_t chosen[3] = {sizes[i / 8 % 6], sizes[i / 48 % 6], sizes[i / 288]};
            num_planned += plan_extreme(&devices[i % 4], (sinkattn_op)op, i / 4 % 2, chosen);
        }
    CHECK(num_planned > 100, "%d were planned", num_planned);
}

static void test_devices_are_checked(void) {
    const sinkattn_problem p = prefill(SINKATTN_FWD, SINKATTN_BF16);
    sinkattn_device device = cpu(SINKATTN_CPU_SCALAR, 0);
    sinkattn_plan plan;
    sinkattn_status status = sinkattn_make_plan(&p, &device, &plan);
    CHECK(status.code == SINKATTN_INVALID && strstr(status.message, "device.workers is 0"), "%s", status.message);
    device = cpu(SINKATTN_CPU_SCALAR, 1);
    device.backend = (sinkattn_backend)7;
    status = sinkattn_make_plan(&p, &device, &plan);
    CHECK(status.code == SINKATTN_INVALID && strstr(status.message, "device.backend is 7"), "%s", status.message);
    CHECK(sinkattn_make_plan(NULL, &device, &plan).code == SINKATTN_INVALID, "NULL problem");
    CHECK(sinkattn_make_plan(&p, NULL, &plan).code == SINKATTN_INVALID, "NULL device");
    CHECK(sinkattn_make_plan(&p, &device, NULL).code == SINKATTN_INVALID, "NULL plan");
}

static sinkattn_status query_as(const char *level, sinkattn_device *device) {
    const char *inherited = getenv("SINKATTN_CPU_LEVEL");
    char kept[32] = "";
    if (inherited) strncpy(kept, inherited, sizeof kept - 1);
    setenv("SINKATTN_CPU_LEVEL", level, 1);
    const sinkattn_status status = sinkattn_query_cpu(2, device);
    if (inherited)
        setenv("SINKATTN_CPU_LEVEL", kept, 1);
    else
        unsetenv("SINKATTN_CPU_LEVEL");
    return status;
}

static void test_the_cpu_level_by_name(void) {
#if defined(__aarch64__)
    static const char *const names[] = {"oracle", "scalar", "neon", "neon_bf16"};
#else
    static const char *const names[] = {"oracle", "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
#endif
    sinkattn_device device;
    for (int32_t level = 0; level < (int32_t)(COUNT(names)); level++) {
        const sinkattn_status status = query_as(names[level], &device);
        if (level <= sa_cpu_level())
            CHECK(status.code == SINKATTN_OK && device.arch == level && device.workers == 2, "%s: %s", names[level], status.message);
        else
            CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, names[level]), "%s: %s", names[level], status.message);
    }
    CHECK(query_as("", &device).code == SINKATTN_OK && device.arch == sa_cpu_level(), "an empty name is no name");
    const sinkattn_status status = query_as("avx3", &device);
    CHECK(status.code == SINKATTN_INVALID && strstr(status.message, "SINKATTN_CPU_LEVEL is avx3; it must be oracle"), "%s", status.message);
    CHECK(sinkattn_query_cpu(0, &device).code == SINKATTN_INVALID, "no workers");
    CHECK(sinkattn_query_cpu(1, NULL).code == SINKATTN_INVALID, "NULL device");
    CHECK(sinkattn_query_cpu(1, &device).code == SINKATTN_OK && device.name[0], "the CPU has a name");
}

static void test_the_variant_table(void) {
    int32_t count = 0;
    const sinkattn_variant_info *info;
    for (; (info = sinkattn_variant(count)); count++) {
        CHECK(strncmp(info->name, "sa_", 3) == 0 && info->dtypes != 0 && info->max_head_dim % 8 == 0, "row %d, %s", count, info->name);
        for (int32_t other = 0; other < count; other++)
            CHECK(strcmp(sinkattn_variant(other)->name, info->name) != 0, "%s twice", info->name);
    }
    CHECK(count >= 6 && !sinkattn_variant(-1) && !sinkattn_variant(INT32_MAX), "%d rows", count);
    CHECK(strstr(sinkattn_build_info(), SINKATTN_VERSION), "%s", sinkattn_build_info());
}

/* A plan of another problem, of a row that is not there, or a workspace too small is refused, not run. */
static void test_plans_that_do_not_fit_are_refused(void) {
    sinkattn_problem problem = prefill(SINKATTN_FWD, SINKATTN_FP32);
    sample s = sample_new(&problem, true);
    const sinkattn_device device = cpu(SINKATTN_CPU_SCALAR, 2);
    const sinkattn_fwd_args args = sample_fwd_args(&s);
    sinkattn_plan plan;
    CHECK(sinkattn_make_plan(&problem, &device, &plan).code == SINKATTN_OK, "planned");
    void *workspace = malloc((size_t)plan.workspace_bytes);
    const sinkattn_context context = {.workspace = workspace, .workspace_bytes = plan.workspace_bytes};
    static const struct {
        int32_t variant, workers;
        int64_t splits, items, bytes;
        const char *fragment;
    } changes[] = {{1000, 0, 0, 0, 0, "plan.variant is 1"}, {1, 0, 0, 0, 0, "must serve fwd"}, {0, 70000, 0, 0, 0, "plan.workers is 7000"},
            {0, -9, 0, 0, 0, "plan.workers is -7"}, {0, 0, 5, 0, 0, "plan.num_splits is 6"}, {0, 0, 0, 3, 0, "plan.num_items is"},
            {0, 0, 0, 0, -1, "workspace_bytes is"}, {0, 9, 0, 0, 0, "workspace_bytes is"}};
    for (size_t i = 0; i < COUNT(changes); i++) {
        sinkattn_plan bad = plan;
        sinkattn_context small = context;
        bad.variant += changes[i].variant;
        bad.workers += changes[i].workers;
        bad.num_splits += changes[i].splits;
        bad.num_items += changes[i].items;
        small.workspace_bytes += changes[i].bytes;
        const sinkattn_status status = sinkattn_fwd(&args, &bad, &small);
        CHECK(status.code == SINKATTN_INVALID && strstr(status.message, changes[i].fragment), "change %zu: %s", i, status.message);
    }
    CHECK(sinkattn_fwd(&args, NULL, &context).code == SINKATTN_INVALID, "NULL plan");
    CHECK(sinkattn_fwd(&args, &plan, NULL).code == SINKATTN_INVALID, "NULL context");
    CHECK(sinkattn_fwd(&args, &plan, &(sinkattn_context){.workspace_bytes = plan.workspace_bytes}).code == SINKATTN_INVALID,
            "NULL workspace");
    CHECK(sinkattn_fwd(&args, &plan, &context).code == SINKATTN_OK, "the plan itself fits");
    free(workspace);
    sample_free(&s);
}

const test plan_tests[] = {TEST(the_best_row_is_taken), TEST(the_cuda_row_is_taken), TEST(the_window_row_says_why_not),
        TEST(cuda_decode_plans), TEST(the_cuda_backward_is_planned), TEST(the_backward_of_a_window_is_planned),
        TEST(the_backward_of_sm90_is_planned), TEST(a_miss_lists_what_there_is), TEST(decode_splits), TEST(plans_of_extreme_sizes),
        TEST(devices_are_checked), TEST(the_cpu_level_by_name), TEST(the_variant_table), TEST(plans_that_do_not_fit_are_refused), {0}};
