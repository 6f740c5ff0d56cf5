/* SPDX-License-Identifier: Apache-2.0
 *
 * The planner's rules at their edges, on rows and devices that need not be there, so that builds without CUDA check its rows' rules too.
 */
#include <float.h>
#include <inttypes.h>

#include "core/split.h"
#include "sample.h"

static sinkattn_problem causal_window(sinkattn_op op, int64_t left) {
    return (sinkattn_problem){.op = op,
            .dtype = SINKATTN_BF16,
            .batch = 1,
            .num_q_heads = 8,
            .num_kv_heads = 1,
            .head_dim = 64,
            .q_len = 1000,
            .k_len = 1000,
            .mask = {.has_left = true, .left = left, .has_right = true}};
}

/* Code for 9.0a runs on 9.0 alone, older CUDA code and every CPU level on what is newer too; no row on the other backend. */
static void test_rows_and_devices(void) {
    static const struct {
        sinkattn_backend row;
        int32_t arch;
        sinkattn_backend device;
        int32_t has;
        bool runs;
    } cases[] = {{SINKATTN_CUDA, 90, SINKATTN_CUDA, 90, true}, {SINKATTN_CUDA, 90, SINKATTN_CUDA, 89, false},
            {SINKATTN_CUDA, 90, SINKATTN_CUDA, 100, false}, {SINKATTN_CUDA, 90, SINKATTN_CUDA, 120, false},
            {SINKATTN_CUDA, 80, SINKATTN_CUDA, 80, true}, {SINKATTN_CUDA, 80, SINKATTN_CUDA, 86, true},
            {SINKATTN_CUDA, 80, SINKATTN_CUDA, 120, true}, {SINKATTN_CUDA, 80, SINKATTN_CUDA, 75, false},
            {SINKATTN_CPU, 2, SINKATTN_CPU, 5, true}, {SINKATTN_CPU, 3, SINKATTN_CPU, 2, false},
            {SINKATTN_CPU, 2, SINKATTN_CUDA, 90, false}, {SINKATTN_CUDA, 80, SINKATTN_CPU, 90, false}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const sinkattn_variant_info info = {.backend = cases[i].row, .arch = cases[i].arch};
        const sinkattn_device device = {.backend = cases[i].device, .arch = cases[i].has};
        CHECK(sa_runs_on(&info, &device) == cases[i].runs, "case %zu", i);
    }
}

/* The longest window that two key tiles before a row's own hold, and one key more. */
static void test_the_local_windows_edge(void) {
    for (int64_t tile_k = 64; tile_k <= 128; tile_k *= 2) {
        const sinkattn_variant_info info = {.tile_q = 64, .tile_k = tile_k};
        const sinkattn_problem fits = causal_window(SINKATTN_BWD, 2 * tile_k), longer = causal_window(SINKATTN_BWD, 2 * tile_k + 1);
        CHECK(!sa_refusal_local_window(&fits, &info), "left %" PRId64, fits.mask.left);
        CHECK(sa_refusal_local_window(&longer, &info), "left %" PRId64, longer.mask.left);
    }
}

/* Rows and window fill a key tile, or have one key too many. */
static void test_the_single_tiles_edge(void) {
    const sinkattn_variant_info info = {.tile_q = 64, .tile_k = 144};
    const sinkattn_problem fits = causal_window(SINKATTN_FWD, 144 - 64 / 8), longer = causal_window(SINKATTN_FWD, 144 - 64 / 8 + 1);
    CHECK(!sa_refusal_one_key_tile(&fits, &info), "left %" PRId64, fits.mask.left);
    CHECK(sa_refusal_one_key_tile(&longer, &info), "left %" PRId64, longer.mask.left);
}

/* The general forward of 9.0 by its two widths; heads of a token beyond its tile, and older devices, have the kernels of sm_80. */
static void test_the_forward_of_sm90_is_planned(void) {
    static const struct {
        int32_t arch;
        int64_t head_dim;
        int32_t head_dim_v;
        int64_t num_q_heads;
        const char *name;
    } cases[] = {
            {90, 64, 0, 16, "sm90_d64"},
            {90, 64, 8, 16, "sm90_d64"},
            {90, 72, 0, 16, "sm90_d96"},
            {90, 96, 64, 384, "sm90_d96"},
            {90, 96, 0, 386, "sm80_d128"},
            {90, 104, 0, 16, "sm90_d128"},
            {90, 128, 64, 16, "sm90_d128"},
            {90, 136, 0, 16, "sm90_d256"},
            {90, 136, 128, 16, "sm90_d192_v128"},
            {90, 192, 0, 16, "sm90_d256"},
            {90, 192, 128, 16, "sm90_d192_v128"},
            {90, 192, 136, 16, "sm90_d256"},
            {90, 200, 128, 16, "sm90_d256"},
            {90, 256, 0, 16, "sm90_d256"},
            {90, 192, 128, 384, "sm90_d192_v128"},
            {90, 192, 128, 386, "sm80_d256"},
            {90, 256, 0, 258, "sm80_d256"},
            {80, 192, 128, 16, "sm80_d256"},
            {100, 64, 8, 16, "sm80_d256"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_FWD, 500);
        problem.batch = 100;
        problem.head_dim = cases[i].head_dim;
        problem.head_dim_v = cases[i].head_dim_v;
        problem.num_q_heads = cases[i].num_q_heads;
        problem.num_kv_heads = 2;
        check_planned(&problem, gpu(cases[i].arch), cases[i].name);
    }
}

/* Tiles of 64 rows, of 128, of 192: by rounds of 132 blocks, and what a block's two tiles have to do. Of a packed batch the tiles count. */
static void test_the_small_tiles_edge(void) {
    const struct {
        int64_t batch, num_q_heads, q_len, k_len, head_dim;
        bool packed;
        const char *name;
    } cases[] = {{1, 64, 128, 8192, 128, false, "sm90_d128_tile64"}, {1, 64, 129, 8192, 128, false, "sm90_d128_tile128"},
            {1, 64, 512, 8192, 128, false, "sm90_d128_tile128"}, {1, 64, 1024, 8192, 128, false, "sm90_d128"},
            {1, 64, 128, 2048, 72, false, "sm90_d128_tile64"}, {1, 64, 129, 2048, 72, false, "sm90_d96"},
            {2, 64, 64, 8192, 64, false, "sm90_d64_tile64"}, {2, 64, 65, 8192, 64, false, "sm90_d64_tile128"},
            {1, 64, 768, 768, 64, false, "sm90_d64"}, {4, 32, 256, 256, 128, false, "sm90_d128_tile128"},
            {1, 128, 528, 4224, 64, false, "sm90_d64"}, {1, 8, 64, 64, 64, false, "sm90_d64_tile64"},
            {1, 64, 128, 8192, 128, true, "sm90_d128_tile64"}, {1, 64, 1024, 8192, 128, true, "sm90_d128"},
            {8, 64, 64, 8192, 64, true, "sm90_d64_tile64"}, {8, 64, 96, 8192, 64, true, "sm90_d64_tile128"},
            {41, 64, 128, 8192, 64, true, "sm90_d64_tile128"}, {42, 64, 128, 8192, 64, true, "sm90_d64"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_FWD, 4000);
        problem.batch = cases[i].batch;
        problem.num_q_heads = cases[i].num_q_heads;
        problem.num_kv_heads = 8;
        problem.q_len = cases[i].q_len;
        problem.k_len = cases[i].k_len;
        problem.head_dim = cases[i].head_dim;
        problem.packed = cases[i].packed;
        check_planned(&problem, gpu(90), cases[i].name);
    }
    sinkattn_problem problem = causal_window(SINKATTN_FWD, 4000); /* tiles of 10 tokens, so 7 a kv head */
    problem.num_q_heads = 6 * problem.num_kv_heads;
    problem.q_len = 64;
    problem.k_len = 8192;
    const int32_t workers = check_planned(&problem, gpu(90), "sm90_d64_tile64").workers;
    CHECK(workers == 7 * problem.num_kv_heads, "%d workers", (int)workers);
}

/* At head_dim 72 to 128, and with values of at most 128 columns to 192, the same from a multiple of 16 on, with groups that fill seven
 * eighths of the rows. Up to 128 with up to 16 positional sink tokens. */
static void test_the_wide_tiles_edge(void) {
    const struct {
        int64_t group, left, head_dim;
        int32_t head_dim_v;
        bool serves;
    } cases[] = {{8, 137, 128, 0, true}, {8, 138, 128, 0, false}, {6, 135, 72, 0, true}, {6, 136, 72, 0, false}, {1, 81, 128, 0, true},
            {1, 82, 128, 0, false}, {11, 100, 128, 0, false}, {64, 144, 128, 0, true}, {65, 20, 128, 0, false}, {8, 127, 64, 0, false},
            {5, 149, 64, 0, true}, {5, 150, 64, 0, false}, {3, 127, 8, 0, true}, {8, 127, 128, 64, true}, {8, 137, 192, 128, true},
            {8, 138, 192, 128, false}, {8, 127, 136, 128, true}, {8, 127, 136, 0, false}, {8, 127, 192, 136, false},
            {8, 127, 200, 128, false}, {16, 141, 192, 128, true}, {8, 127, 136, 8, true}};
    const sinkattn_device device = gpu(90);
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_FWD, cases[i].left);
        problem.head_dim = cases[i].head_dim;
        problem.head_dim_v = cases[i].head_dim_v;
        problem.num_q_heads = cases[i].group * problem.num_kv_heads;
        for (int sinks = 0; sinks <= 17; sinks += sinks == 1 ? 15 : 1) {
            problem.mask.num_sink_tokens = sinks;
            sinkattn_plan plan;
            const sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
            const char *name = status.code == SINKATTN_OK ? sinkattn_variant(plan.variant)->name : status.message;
            const bool serves = cases[i].serves && sinks <= (cases[i].head_dim > 128 ? 0 : 16);
            const char *wide = cases[i].head_dim > 128  ? "sa_fwd_cuda_sm90_d192_v128_window"
                               : cases[i].head_dim > 64 ? "sa_fwd_cuda_sm90_d128_window"
                                                        : "sa_fwd_cuda_sm90_d64_window";
            CHECK((strcmp(name, wide) == 0) == serves, "case %zu, %d sink tokens: %s", i, sinks, name);
        }
    }
}

/* The decode of sm_80 by its two widths, whatever room a block has. */
static void test_the_decode_is_planned(void) {
    static const struct {
        int64_t head_dim;
        int32_t head_dim_v;
        const char *name;
    } cases[] = {{64, 0, "sm80_d64"}, {64, 56, "sm80_d192_v128"}, {72, 0, "sm80_d128"}, {128, 0, "sm80_d128"}, {128, 64, "sm80_d192_v128"},
            {136, 0, "sm80_d256"}, {136, 128, "sm80_d192_v128"}, {192, 0, "sm80_d256"}, {192, 136, "sm80_d256"},
            {192, 128, "sm80_d192_v128"}, {192, 8, "sm80_d192_v128"}, {200, 128, "sm80_d256"}, {256, 8, "sm80_d256"},
            {264, 128, "sm80_d512"}, {512, 504, "sm80_d512"}};
    for (size_t i = 0; i < 2 * COUNT(cases); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_DECODE, 500);
        problem.num_splits = 2;
        problem.head_dim = cases[i / 2].head_dim;
        problem.head_dim_v = cases[i / 2].head_dim_v;
        check_planned(&problem, gpu(i % 2 ? 86 : 90), cases[i / 2].name);
    }
}

/* The CPU's kernels, the widest of sm_80, the general and wide windowed forwards of sm_90 and the wide decodes take values narrower than
 * keys, others do not; a plan and a refusal say how wide they are. */
static void test_values_narrower_than_keys(void) {
    static const char *(*const refusals[])(const sinkattn_problem *, const sinkattn_variant_info *) = {sa_refusal_any,
            sa_refusal_whole_tokens, sa_refusal_whole_tokens_v128, sa_refusal_packed_any, sa_refusal_packed_whole_tokens,
            sa_refusal_packed_whole_tokens_v128, sa_refusal_not_invariant, sa_refusal_not_invariant_v128, /* these take them */
            sa_refusal_packed_one_width, sa_refusal_packed_one_key_tile, sa_refusal_one_width, sa_refusal_one_key_tile,
            sa_refusal_local_window, sa_refusal_whole_rows_one_width, sa_refusal_not_invariant_one_width};
    const sinkattn_variant_info info = {.backend = SINKATTN_CUDA, .tile_q = 64, .tile_k = 144};
    for (size_t i = 0; i < COUNT(refusals); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_FWD, 127);
        problem.packed = (i >= 3 && i <= 5) || i == 8 || i == 9;
        CHECK(!refusals[i](&problem, &info), "rule %zu", i);
        problem.head_dim_v = 64;
        CHECK(!refusals[i](&problem, &info), "rule %zu: 64 is head_dim", i);
        problem.head_dim_v = 56;
        const char *why = refusals[i](&problem, &info);
        CHECK(i < 8 ? !why : why && strstr(why, "values are narrower than keys"), "rule %zu: %s", i, why ? why : "it serves");
    }
    sinkattn_problem problem = causal_window(SINKATTN_FWD, 127);
    problem.head_dim_v = 56;
    sinkattn_plan plan = check_planned(&problem, (sinkattn_device){SINKATTN_CPU, SINKATTN_CPU_SCALAR, 1, ""}, "scalar");
    CHECK(strstr(plan.reason, "head_dim 64, head_dim_v 56 on"), "%s", plan.reason);
    const sinkattn_device device = gpu(90);
    plan = check_planned(&problem, device, "sm90_d64_window");
    CHECK(strstr(plan.reason, "not sa_fwd_cuda_sm90_window (64 x 144): values are narrower than keys"), "%s", plan.reason);
    problem.op = SINKATTN_DECODE;
    problem.invariant = true;
    check_planned(&problem, device, "sm90_packed_d64_tile64");
    const sinkattn_device small = {.backend = SINKATTN_CUDA, .arch = 86, .workers = 84};
    problem.op = SINKATTN_FWD;
    problem.invariant = false;
    sinkattn_status status = sinkattn_make_plan(&problem, &small, &plan);
    CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, "no fwd kernel on sm_86 takes values narrower"), "%s",
            status.message);
    problem.dtype = SINKATTN_FP32;
    status = sinkattn_make_plan(&problem, &device, &plan);
    CHECK(status.code == SINKATTN_UNSUPPORTED && strstr(status.message, "no fwd kernel serves fp32"), "%s", status.message);
}

/* Past head_dim 128 a block of some rows takes more shared memory than 8.6, 8.9 and 12.x have: forward, backward, packed rows over a cache,
 * invariant decode. */
static void test_room_for_a_block(void) {
    static const int32_t small[] = {86, 89, 120, 121}, large[] = {80, 87, 90, 100, 103, 110};
    for (int i = 0; i < 40; i++) {
        const int form = i % 4, at = i / 4;
        const sinkattn_device device = {.backend = SINKATTN_CUDA, .arch = at < 4 ? small[at] : large[at - 4], .workers = 100};
        sinkattn_problem problem = causal_window(form == 1 ? SINKATTN_BWD : form ? SINKATTN_DECODE : SINKATTN_FWD, 127);
        problem.packed = form == 2;
        problem.invariant = form == 3;
        problem.head_dim = 128;
        sinkattn_plan plan;
        sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
        CHECK(status.code == SINKATTN_OK, "form %d on %d: %s", form, (int)device.arch, status.message);
        problem.head_dim = 136;
        status = sinkattn_make_plan(&problem, &device, &plan);
        const bool told = strstr(status.message, "head_dim is 136; for a ") && strstr(status.message, "it must be at most 128");
        CHECK(at < 4 ? status.code == SINKATTN_UNSUPPORTED && told : status.code == SINKATTN_OK, "form %d on %d: %s", form,
                (int)device.arch, status.message);
    }
}

/* Narrow values take less of the workspace, of an op that keeps sums of them. */
static void test_the_workspace_of_narrow_values(void) {
    const sinkattn_device cpu = {.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_SCALAR, .workers = 1};
    for (sinkattn_op op = SINKATTN_FWD; op <= SINKATTN_DECODE; op++) {
        sinkattn_problem problem = causal_window(op, 127);
        sinkattn_plan plan, narrow;
        CHECK(sinkattn_make_plan(&problem, &cpu, &plan).code == SINKATTN_OK, "%s", sa_op_name(op));
        problem.head_dim_v = 16;
        CHECK(sinkattn_make_plan(&problem, &cpu, &narrow).code == SINKATTN_OK && narrow.workspace_bytes < plan.workspace_bytes,
                "%s: %" PRId64 " bytes after %" PRId64, sa_op_name(op), narrow.workspace_bytes, plan.workspace_bytes);
    }
}

/* A backward of few rows and many keys has a worker a key block: 8 rows of 8 heads fill a tile. */
static void test_workers_of_few_rows(void) {
    sinkattn_problem problem = causal_window(SINKATTN_BWD, 2000);
    problem.q_len = 8;
    for (int64_t blocks = 100; blocks < 200; blocks += 50) {
        problem.k_len = 128 * blocks;
        const int32_t workers = check_planned(&problem, gpu(90), "sm90_d64").workers;
        CHECK(workers == sa_min(blocks, 132), "%d workers", (int)workers);
    }
}

/* A packed forward has a worker a tile, also for the rows past its sequences. */
static void test_workers_of_packed_rows(void) {
    sinkattn_problem problem = causal_window(SINKATTN_FWD, 4000);
    problem.packed = true;
    problem.batch = 3;
    const int32_t workers = check_planned(&problem, gpu(90), "sm90_d64_tile64").workers;
    CHECK(workers == 1000 / 8 + 4, "%d workers", (int)workers);
}

/* Decodes with invariant, in one part. */
static void test_which_decodes_have_one_key_tile(void) {
    const struct {
        int32_t arch;
        int64_t q_len, num_q_heads, left, num_sink_tokens, num_splits;
        bool invariant;
        const char *name;
    } cases[] = {{90, 1, 64, 127, 0, 0, false, "sm80_d64"}, {90, 1, 64, 127, 0, 0, true, "sm90_window"},
            {90, 1, 64, 127, 0, 1, true, "sm90_window"}, {90, 1, 64, 136, 0, 0, true, "sm90_window"},
            {90, 1, 64, 137, 0, 0, true, "sm90_chain_d64"}, {90, 2, 64, 127, 0, 0, false, "sm80_d64"},
            {90, 2, 64, 127, 0, 0, true, "sm90_window"}, {90, 1, 64, 127, 16, 0, true, "sm90_window"},
            {90, 1, 64, 127, 17, 0, true, "sm90_chain_d64"}, {90, 1, 512, 127, 0, 0, true, "sm90_packed_window"},
            {90, 1, 8, 127, 0, 0, true, "sm90_chain_d64"}, {80, 1, 64, 127, 0, 0, true, "sm80_packed_d64"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_DECODE, cases[i].left);
        problem.num_q_heads = cases[i].num_q_heads;
        problem.num_kv_heads = 8;
        problem.q_len = cases[i].q_len;
        problem.mask.num_sink_tokens = cases[i].num_sink_tokens;
        problem.num_splits = cases[i].num_splits;
        problem.invariant = cases[i].invariant;
        const sinkattn_plan plan = check_planned(&problem, gpu(cases[i].arch), cases[i].name);
        CHECK(strcmp(cases[i].name, "sm90_window") != 0 || (plan.num_splits == 1 && plan.workspace_bytes == 0), "case %zu: %s", i,
                plan.reason);
        CHECK(sa_validate_plan(&problem, &plan).code == SINKATTN_OK, "case %zu", i);
    }
}

/* Of 8 kv heads: by rows of a kv head, page size, keys, widths and num_splits. */
static void test_which_decodes_have_many_rows(void) {
    const struct {
        int64_t q_len, num_q_heads, page_size, k_len, head_dim, num_splits;
        const char *name;
    } cases[] = {{2, 64, 64, 16384, 64, 0, "sm80_d64"}, {3, 64, 64, 16384, 64, 0, "sm90_swapped_d64"}, {3, 64, 64, 4096, 64, 0, "sm80_d64"},
            {16, 64, 64, 131072, 64, 0, "sm90_swapped_d64"}, {1024, 64, 64, 16384, 64, 0, "sm90_packed_d64"},
            {1024, 64, 64, 16384, 64, 1, "sm80_d64"}, {1, 512, 16, 16384, 64, 0, "sm90_swapped_d64"},
            {1, 8, 24, 16392, 64, 0, "sm90_swapped_d64"}, {1, 64, 1, 32768, 64, 0, "sm90_swapped_d64"},
            {1, 64, 1, 16384, 64, 2, "sm80_d64"}, {1, 512, 64, 16384, 64, 2, "sm90_rows_d64"},
            {5, 64, 64, 16384, 72, 0, "sm90_swapped_d128"}, {1, 64, 1, 131072, 72, 0, "sm90_swapped_d128"},
            {2, 64, 64, 16384, 72, 0, "sm80_d128"}, {3, 64, 48, 16368, 256, 0, "sm90_swapped_d256"},
            {5, 64, 64, 16384, 256, 0, "sm90_rows_d256"}, {1, 128, 16, 4096, 264, 0, "sm90_swapped_d512"},
            {1, 64, 16, 4096, 264, 0, "sm80_d512"}, {1, 136, 16, 4096, 264, 0, "sm90_rows_d576"},
            {1, 128, 8, 4096, 264, 0, "sm90_swapped_d512"}, {1, 8, 8, 4096, 264, 0, "sm90_swapped_d512"},
            {1, 128, 16, 8192, 256, 0, "sm80_d256"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        sinkattn_problem problem = causal_window(SINKATTN_DECODE, 1 << 20);
        problem.num_kv_heads = 8;
        problem.q_len = cases[i].q_len;
        problem.num_q_heads = cases[i].num_q_heads;
        problem.page_size = cases[i].page_size;
        problem.num_pages = 9;
        problem.k_len = cases[i].k_len;
        problem.head_dim = cases[i].head_dim;
        problem.num_splits = cases[i].num_splits;
        check_planned(&problem, gpu(90), cases[i].name);
    }
    sinkattn_problem drafts = causal_window(SINKATTN_DECODE, 127); /* 4 tokens each of 64 sequences, under a window */
    drafts.batch = 64, drafts.num_q_heads = 64, drafts.num_kv_heads = 8, drafts.q_len = 4, drafts.head_dim = 64;
    drafts.page_size = 64, drafts.num_pages = 9, drafts.k_len = 8192;
    check_planned(&drafts, gpu(90), "sm80_d64");
}

/* A decode with invariant has the arch and the key tiles of the forward that serves its rows, or is that forward. */
static void test_invariant_decodes_follow_a_forward(void) {
    const int64_t head_dims[] = {8, 64, 72, 128, 136, 256}, groups[] = {1, 3, 8, 192, 193}, lefts[] = {-1, 0, 127, 143, 4096},
                  sinks[] = {0, 4, 17}, lengths[] = {4096, 1 << 20};
    for (int x = 0; x < 2 * 6 * 5 * 5 * 3 * 2; x++) {
        const sinkattn_device device = gpu(x % 2 ? 90 : 80);
        sinkattn_problem problem = causal_window(SINKATTN_DECODE, sa_max(lefts[x / 60 % 5], 0));
        problem.mask.has_left = lefts[x / 60 % 5] >= 0;
        problem.mask.num_sink_tokens = sinks[x / 300 % 3];
        problem.k_len = lengths[x / 900];
        problem.head_dim = head_dims[x / 2 % 6];
        problem.num_kv_heads = 2;
        problem.num_q_heads = 2 * groups[x / 12 % 5];
        problem.q_len = x % 7 ? 1 : 40;
        problem.invariant = true;
        sinkattn_problem row = problem;
        row.op = SINKATTN_FWD;
        row.invariant = false;
        sinkattn_plan decode, forward;
        const sinkattn_status status = sinkattn_make_plan(&problem, &device, &decode);
        CHECK(status.code == SINKATTN_OK && sinkattn_make_plan(&row, &device, &forward).code == SINKATTN_OK, "case %d: %s", x,
                status.message);
        const sinkattn_variant_info *has = forward_of_order(sinkattn_variant(decode.variant)),
                                    *follows = forward_of_order(sinkattn_variant(forward.variant));
        const bool same = has->max_head_dim == follows->max_head_dim && has->tile_k == follows->tile_k;
        CHECK(has->arch == follows->arch && same, "case %d: %s follows %s", x, has->name, follows->name);
    }
}

/* 2^16 rows of 2^8 chunks are 2^24 partials, which a CPU does not cut; in 2^15 parts they are 2^31, of which a GPU plans one fewer. */
static void test_partials_that_fit(void) {
    const sinkattn_device cpu = {.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_SCALAR, .workers = 1};
    sinkattn_problem problem = causal_window(SINKATTN_DECODE, 0);
    problem.num_q_heads = 1 << 16;
    problem.head_dim = 8;
    problem.q_len = 1;
    problem.k_len = 256 * SA_CPU_CHUNK;
    problem.num_splits = 1 << 15;
    problem.mask.has_left = false;
    sinkattn_plan plan;
    sinkattn_status status = sinkattn_make_plan(&problem, &cpu, &plan);
    CHECK(status.code == SINKATTN_OK && plan.num_splits == 1, "%s", status.message);
    problem.k_len = 255 * SA_CPU_CHUNK;
    status = sinkattn_make_plan(&problem, &cpu, &plan);
    CHECK(status.code == SINKATTN_OK && plan.num_splits == 255, "%s", status.message);
    const sinkattn_device cuda = gpu(90);
    problem.k_len = 1 << 23;
    status = sinkattn_make_plan(&problem, &cuda, &plan);
    CHECK(status.code == SINKATTN_INVALID && strstr(status.message, "num_splits is 32768; it must leave less than 2^31 partial rows"), "%s",
            status.message);
    problem.num_splits--;
    status = sinkattn_make_plan(&problem, &cuda, &plan);
    CHECK(status.code == SINKATTN_OK && plan.num_splits == (1 << 15) - 1, "%s", status.message);
}

/* More positional sink tokens than keys are as many as keys: nothing is counted from the number given. */
static void test_sink_tokens_beyond_the_keys(void) {
    const int64_t counts[] = {1000, 1001, INT32_MAX, INT64_MAX};
    sinkattn_problem problem = causal_window(SINKATTN_BWD, 7);
    const sinkattn_device device = {.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_SCALAR, .workers = 2};
    int64_t bytes = 0;
    for (int i = 0; i < 4; i++) {
        problem.mask.num_sink_tokens = counts[i];
        const sa_band band = sa_band_of(&problem.mask, problem.q_len, problem.k_len);
        CHECK(band.num_sink == problem.k_len, "%" PRId64 " sink tokens are %" PRId64, counts[i], (int64_t)band.num_sink);
        sinkattn_plan plan;
        const sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
        if (i == 0) bytes = plan.workspace_bytes;
        CHECK(status.code == SINKATTN_OK && plan.workspace_bytes == bytes, "%" PRId64 " sink tokens: %" PRId64 " bytes, %s", counts[i],
                plan.workspace_bytes, status.message);
    }
}

/* The smallest and largest scales that fp32 has as normal numbers are served; fp64 has larger ones. */
static void test_scales_at_the_edge(void) {
    const double scales[] = {(double)FLT_MIN, -(double)FLT_MIN, (double)FLT_MAX, 1e39};
    sinkattn_problem problem = causal_window(SINKATTN_FWD, 7);
    for (int i = 0; i < 4; i++) {
        problem.softmax_scale = scales[i];
        problem.dtype = i == 3 ? SINKATTN_FP64 : SINKATTN_FP32;
        const sinkattn_status status = sa_validate_problem(&problem);
        CHECK(status.code == SINKATTN_OK, "%g: %s", scales[i], status.message);
    }
}

/* On the CPU in one part each, for any number of workers, and on CUDA. */
static void test_packed_rows_over_a_cache(void) {
    sinkattn_problem problem = causal_window(SINKATTN_DECODE, 127);
    problem.packed = true;
    problem.batch = 3;
    problem.page_size = 4;
    problem.num_pages = 9;
    const int32_t archs[] = {80, 90, 100};
    sinkattn_plan plan;
    sinkattn_status status;
    for (int i = 0; i < 3; i++) {
        const sinkattn_device device = gpu(archs[i]);
        status = sinkattn_make_plan(&problem, &device, &plan);
        CHECK(status.code == SINKATTN_OK && plan.num_splits == 1, "%s", status.message);
    }
    const sinkattn_device cpu = {.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_SCALAR, .workers = 64};
    for (int64_t splits = 0; splits < 2; splits++) {
        problem.num_splits = splits;
        status = sinkattn_make_plan(&problem, &cpu, &plan);
        CHECK(status.code == SINKATTN_OK && plan.num_splits == 1 && plan.num_items == 1000 * 8 / 64 + 3, "%s, %" PRId64 " splits, %" PRId64,
                status.message, plan.num_splits, plan.num_items);
    }
}

/* A kernel that is not compiled is planned for like the others, and refused where it would run. */
static void test_what_is_not_compiled_is_planned_and_not_run(void) {
    const bool with_cuda = strstr(sinkattn_build_info(), "backends: cpu, cuda");
    const sinkattn_variant_info *info;
    for (int32_t i = 0; (info = sinkattn_variant(i)); i++)
        CHECK(info->compiled == (info->backend == SINKATTN_CPU || with_cuda), "%s", info->name);
    if (with_cuda) return;
    sinkattn_problem problem = causal_window(SINKATTN_FWD, 127);
    problem.q_len = problem.k_len = 40;
    sample s = sample_new(&problem, true);
    const sinkattn_fwd_args args = sample_fwd_args(&s);
    const sinkattn_device device = gpu(90);
    sinkattn_plan plan;
    sinkattn_status status = sinkattn_make_plan(&problem, &device, &plan);
    CHECK(status.code == SINKATTN_OK && sa_validate_plan(&problem, &plan).code == SINKATTN_OK, "%s", status.message);
    status = sinkattn_fwd(&args, &plan, &(sinkattn_context){.workspace_bytes = 0});
    CHECK(status.code == SINKATTN_UNSUPPORTED &&
                    strstr(status.message, "plan.variant is sa_fwd_cuda_sm90_window; this build must be made with nvcc to have it"),
            "%s", status.message);
    sample_free(&s);
}

const test rule_tests[] = {TEST(what_is_not_compiled_is_planned_and_not_run), TEST(the_forward_of_sm90_is_planned),
        TEST(the_decode_is_planned), TEST(values_narrower_than_keys), TEST(the_workspace_of_narrow_values), TEST(room_for_a_block),
        TEST(rows_and_devices), TEST(the_local_windows_edge), TEST(the_single_tiles_edge), TEST(workers_of_few_rows),
        TEST(workers_of_packed_rows), TEST(which_decodes_have_one_key_tile), TEST(which_decodes_have_many_rows), TEST(the_small_tiles_edge),
        TEST(the_wide_tiles_edge), TEST(invariant_decodes_follow_a_forward), TEST(partials_that_fit), TEST(sink_tokens_beyond_the_keys),
        TEST(scales_at_the_edge), TEST(packed_rows_over_a_cache), {0}};
