/* SPDX-License-Identifier: Apache-2.0
 *
 * Plans for packed rows over a cache, and for backwards of windows of wide heads, of many query heads and of packed sequences side by side,
 * on CUDA devices that need not be there.
 */
#include <inttypes.h>

#include "core/workspace.h"
#include "sample.h"

static const char *chosen(const sinkattn_problem *problem, int32_t arch) {
    const sinkattn_device device = gpu(arch);
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(problem, &device, &plan);
    if (!CHECK(status.code == SINKATTN_OK && plan.num_splits == 1, "%s", status.message)) return "none";
    CHECK(sa_validate_plan(problem, &plan).code == SINKATTN_OK, "%s", plan.reason);
    return forward_of_order(sinkattn_variant(plan.variant))->name;
}

static sinkattn_problem packed_problem(int64_t num_q_heads, int64_t head_dim, int64_t left) {
    return (sinkattn_problem){.op = SINKATTN_FWD,
            .dtype = SINKATTN_BF16,
            .packed = true,
            .batch = 3,
            .num_q_heads = num_q_heads,
            .num_kv_heads = 2,
            .head_dim = head_dim,
            .q_len = 1000,
            .k_len = 2000,
            .mask = {.has_left = left >= 0, .left = left < 0 ? 0 : left, .has_right = true}};
}

/* The same kernel, or one with its order of sums, gives the same bits. */
static void check_forwards_kernel(sinkattn_problem problem, int32_t arch) {
    const size_t prefix = strlen("sa_fwd_cuda_smXX_");
    const char *forward = chosen(&problem, arch);
    problem.op = SINKATTN_DECODE;
    for (int paged = 0; paged < 2; paged++) {
        problem.page_size = paged ? 16 : 0;
        problem.num_pages = paged ? 7 : 0;
        const char *name = chosen(&problem, arch), *found = strstr(name, "_packed_");
        CHECK(found && strlen(forward) > prefix && strcmp(found + strlen("_packed_"), forward + prefix) == 0, "%s beside %s", name,
                forward);
        problem.invariant = true;
        CHECK(chosen(&problem, arch) == name, "invariant changes nothing");
        problem.invariant = false;
    }
}

static void test_packed_rows_have_the_forwards_kernel(void) {
    static const int32_t archs[] = {80, 90, 100};
    static const int64_t head_dims[] = {8, 64, 72, 128, 136, 256}, lefts[] = {-1, 127, 136, 137, 300}, heads[] = {2, 6, 16, 128, 386};
    for (int i = 0; i < 2 * 3 * 6 * 5 * 5; i++) {
        sinkattn_problem problem = packed_problem(heads[i / 90 % 5], head_dims[i / 3 % 6], lefts[i / 18 % 5]);
        problem.head_dim_v = i < 450 ? 0 : (int32_t)problem.head_dim / 16 * 8;
        check_forwards_kernel(problem, archs[i % 3]);
        problem.mask.num_sink_tokens = 4;
        check_forwards_kernel(problem, archs[i % 3]);
        problem.softmax_scale = -1.0;
        check_forwards_kernel(problem, archs[i % 3]);
    }
}

/* A TMA descriptor cannot describe an empty tensor. */
static void test_a_cache_without_pages(void) {
    sinkattn_problem problem = packed_problem(16, 64, 127);
    problem.op = SINKATTN_DECODE;
    problem.page_size = 16;
    check_planned(&problem, gpu(90), "sm80_packed_d64");
    problem.num_pages = 1;
    check_planned(&problem, gpu(90), "sm90_packed_window");
}

/* From small pages no kernel reads narrow values once: the forward need not beat one. */
static void test_many_rows_of_narrow_values(void) {
    sinkattn_problem problem = packed_problem(64, 256, -1);
    problem.op = SINKATTN_DECODE;
    problem.packed = false;
    problem.batch = 32;
    problem.num_kv_heads = 8;
    problem.q_len = 8;
    problem.page_size = 8;
    problem.k_len = 32768;
    problem.num_pages = 9;
    problem.head_dim_v = 128;
    check_planned(&problem, gpu(90), "sm90_packed_d256_tile64");
}

static void test_the_largest_head_dim(void) {
    const sinkattn_device device = gpu(90);
    sinkattn_problem problem = packed_problem(16, 264, -1);
    problem.op = SINKATTN_DECODE;
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
    CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, "head_dim 264; on CUDA it must be at most 256"), "%s",
            status.message);
}

/* Causal windows of wide heads; 16 bytes a row, and dK and dV of each positional sink token over stretches of 32 tiles, for two
 * warpgroups, and over the windows of sequences with rows behind one. */
static void test_the_wide_windowed_backward_is_planned(void) {
    static const struct {
        int64_t head_dim, left, right, sinks, group;
        int32_t head_dim_v;
        const char *name;
    } cases[] = {{104, 127, 0, 0, 6, 0, "sm90_d128_window"}, {128, 128, 0, 0, 64, 0, "sm90_d128_window"}, {96, 127, 0, 0, 6, 0, "sm90_d96"},
            {128, 64, 0, 0, 5, 0, "sm90_d128_window"}, {128, 63, 0, 0, 5, 0, "sm90_d128"}, {128, 127, 0, 0, 4, 0, "sm90_d128"},
            {128, 129, 0, 0, 6, 0, "sm90_d128"}, {96, 127, 1, 0, 6, 0, "sm90_d96"}, {128, 127, 0, 4, 6, 0, "sm90_d128_window"},
            {128, 127, 0, 17, 6, 0, "sm90_d128"}, {128, 127, 0, 1, 3, 0, "sm90_d128"}, {72, 82, 0, 16, 1, 0, "sm90_d96"},
            {72, 81, 0, 16, 1, 0, "sm90_d128_window"}, {96, 127, 0, 1, 4, 0, "sm90_d128_window"}, {128, 127, 0, 0, 65, 0, "sm80_d128"},
            {64, 127, 0, 0, 8, 0, "sm90_window"}, {192, 127, 0, 0, 8, 128, "sm90_d192_v128_window"},
            {136, 128, 0, 0, 2, 8, "sm90_d192_v128_window"}, {192, 0, 0, 0, 64, 128, "sm90_d192_v128_window"},
            {192, 127, 0, 0, 1, 128, "sm90_d192_v128"}, {192, 129, 0, 0, 8, 128, "sm90_d192_v128"},
            {192, 127, 0, 1, 8, 128, "sm90_d192_v128"}, {192, 127, 0, 0, 8, 136, "sm90_d256"}, {192, 127, 0, 0, 8, 0, "sm90_d256"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = packed_problem(2 * cases[i].group, cases[i].head_dim, cases[i].left);
        problem.op = SINKATTN_BWD;
        problem.packed = i % 2;
        problem.head_dim_v = cases[i].head_dim_v;
        problem.mask.right = cases[i].right;
        problem.mask.num_sink_tokens = cases[i].sinks;
        const sinkattn_plan plan = check_planned(&problem, gpu(90), cases[i].name);
        if (!strstr(cases[i].name, "128_window")) continue;
        const int64_t rows = (problem.packed ? 1 : problem.batch) * problem.num_q_heads * problem.q_len + 64,
                      tokens = 64 / cases[i].group * 32, windows = problem.packed ? problem.k_len / (cases[i].left + 2) + 1 : problem.batch,
                      stretches =
                              problem.packed ? problem.q_len / tokens + windows : problem.batch * ((problem.q_len + tokens - 1) / tokens),
                      sums = (2 * stretches + windows) * problem.num_kv_heads * cases[i].sinks;
        CHECK(plan.workspace_bytes == rows * 16 + sums * 1024 + 15, "case %zu: %" PRId64 " bytes", i, plan.workspace_bytes);
    }
}

/* Where sums are cut, each block of the forward keeps its rows' sums. A decode has a slot of 8 rows for each chunk, or two for each stream
 * where these are many. */
static void test_the_workspace_of_chunks(void) {
    const sinkattn_device device = gpu(90);
    const struct {
        sinkattn_op op;
        int64_t head_dim, k_len, left, batch, bytes;
    } cases[] = {{SINKATTN_FWD, 64, 8192, -1, 3, 0}, {SINKATTN_FWD, 64, 8193, -1, 3, 132 * 192 * 72 * 4 + 15},
            {SINKATTN_FWD, 64, 8193, 5000, 3, 0}, {SINKATTN_FWD, 72, 20480, -1, 3, 0},
            {SINKATTN_FWD, 72, 20481, -1, 3, 132 * 192 * 104 * 4 + 15}, {SINKATTN_FWD, 128, 40960, -1, 3, 132 * 192 * 136 * 4 + 15},
            {SINKATTN_FWD, 136, 30720, -1, 3, 0}, {SINKATTN_DECODE, 64, 8192, -1, 3, 0},
            {SINKATTN_DECODE, 64, 16385, -1, 3, 3 * 3 * 8 * 8 * 72 * 4 + 15}, {SINKATTN_DECODE, 64, 16385, 5000, 3, 0},
            {SINKATTN_DECODE, 128, 20481, -1, 3, 3 * 2 * 8 * 8 * 136 * 4 + 15},
            {SINKATTN_DECODE, 64, 131072, -1, 127, INT64_C(127) * 16 * 8 * 8 * 72 * 4 + 15},
            {SINKATTN_DECODE, 64, 131072, -1, 128, INT64_C(128) * 2 * 8 * 8 * 72 * 4 + 15}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = packed_problem(64, cases[i].head_dim, cases[i].left);
        problem.op = cases[i].op;
        problem.packed = false;
        problem.batch = cases[i].batch;
        problem.num_kv_heads = 8;
        problem.k_len = cases[i].k_len;
        problem.q_len = cases[i].op == SINKATTN_FWD ? cases[i].k_len : 1;
        problem.invariant = cases[i].op == SINKATTN_DECODE;
        sinkattn_plan plan;
        const sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
        CHECK(status.code == SINKATTN_OK && plan.workspace_bytes == cases[i].bytes, "case %zu: %s%" PRId64 " bytes", i, status.message,
                plan.workspace_bytes);
    }
    sinkattn_problem problem = packed_problem(65536, 8, -1);
    problem.op = SINKATTN_DECODE;
    problem.packed = false;
    problem.invariant = true;
    problem.batch = 1;
    problem.num_kv_heads = 65536;
    problem.k_len = INT32_MAX / 4;
    for (int bits = 17; bits <= 24; bits += 7) { /* 2^30 tiles of 8 rows, with two slots each, and 2^37 */
        problem.q_len = 1 << bits;
        sinkattn_plan plan;
        const sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
        CHECK(bits == 24 ? status.code == SINKATTN_UNSUPPORTED : !strcmp(chosen(&problem, 90), "sa_decode_cuda_sm90_packed_d64"), "%s%s",
                status.message, plan.reason);
    }
}

/* 71 query heads are 9 slices, whose dK and dV pass through a place a key block; 64 are whole. A token of 48 would fill three quarters of
 * a tile: they are 6. */
static void test_many_query_heads_are_cut_into_slices(void) {
    sinkattn_problem problem = {.op = SINKATTN_BWD, .batch = 1, .num_q_heads = 71, .num_kv_heads = 1, .head_dim = 64, .q_len = 4096};
    const sinkattn_device device = gpu(90);
    problem.dtype = SINKATTN_BF16;
    problem.k_len = problem.q_len;
    sinkattn_plan plan;
    CHECK(sinkattn_make_plan(&problem, &device, &plan).code == SINKATTN_OK, "%s", problem_text(&problem));
    const sa_bwd_sm90_layout cut = sa_bwd_sm90_layout_of(&problem, &plan);
    CHECK(cut.heads == 9 && cut.room.num_heads == 9 && cut.carries >= problem.k_len / 128, "%d slices", (int)cut.heads);
    const struct {
        int32_t num_q_heads, num_kv_heads, tile_q, slices;
    } cases[] = {{71, 1, 128, 9}, {64, 1, 128, 1}, {64, 1, 64, 1}, {48, 1, 64, 6}, {48, 1, 128, 6}, {48, 2, 64, 3}, {24, 1, 128, 1},
            {36, 2, 64, 1}, {44, 2, 64, 1}, {22, 1, 64, 3}, {11, 1, 64, 1}, {7, 1, 64, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem.num_q_heads = cases[i].num_q_heads;
        problem.num_kv_heads = cases[i].num_kv_heads;
        const int64_t slices = sa_bwd_sm90_slices(&problem, cases[i].tile_q);
        CHECK(slices == cases[i].slices, "%s: %d slices", problem_text(&problem), (int)slices);
    }
}

/* Packed sequences side by side: each item is of one wave, in order, and all end with the last wave. */
static void check_waves_beside(const sa_chains *c) {
    const int32_t most = sa_waves_beside(c), waves = most + (int32_t)pick(0, 2);
    CHECK(most >= c->waves && most - c->waves <= c->waves / 4, "%d waves of %d", (int)most, (int)c->waves);
    int32_t n = 0;
    for (int32_t wave = 0; wave < waves; wave++)
        for (int32_t chain = 0; chain < c->count; chain++) {
            const int32_t own = sa_item_beside(c, waves, wave, chain);
            CHECK(own == (wave < waves - c->waves ? -1 : n), "item %d is %d", (int)n, (int)own);
            n += own >= 0;
        }
    CHECK(n == c->count * c->waves, "%d items of %d", (int)n, (int)(c->count * c->waves));
}

static void test_sequences_are_side_by_side(void) {
    for (int i = 0; i < 300; i++) {
        const sa_chain_room room = {.num_slots = (int32_t)pick(1, 3000), .beside_slots = (int32_t)pick(0, 3000)};
        int64_t end = 0, uses = 0; /* of all sequences; of those side by side */
        int32_t number = -1;
        for (int j = 0; j < 30; j++) {
            const int32_t count = (int32_t)pick(1, 40);
            const sa_chains c = {.waves = (int32_t)pick(0, 60), .count = count, .together = count, .uses = (int32_t)pick(1, 90)};
            const int64_t own = (int64_t)count * c.uses;
            check_waves_beside(&c);
            end += own;
            uses = sa_number_beside(&room, end) == number ? uses + own : own;
            number = sa_may_be_beside(&c, &room) ? sa_number_beside(&room, end) : -1;
            CHECK(number < 0 || uses <= room.num_slots, "%d uses, %d slots", (int)uses, (int)room.num_slots);
        }
    }
}

const test packed_plan_tests[] = {TEST(packed_rows_have_the_forwards_kernel), TEST(a_cache_without_pages), TEST(many_rows_of_narrow_values),
        TEST(the_largest_head_dim), TEST(the_wide_windowed_backward_is_planned), TEST(the_workspace_of_chunks),
        TEST(many_query_heads_are_cut_into_slices), TEST(sequences_are_side_by_side), {0}};
