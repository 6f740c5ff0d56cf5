/* SPDX-License-Identifier: Apache-2.0
 *
 * Malformed calls: malformed.def has one change each to a call that is right.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "sample.h"

/* What a change may touch. Room for its own memory, so that hostile lengths are real arrays. */
typedef struct call {
    sinkattn_bwd_args bwd; /* bwd.fwd serves all three */
    sinkattn_decode_args decode;
    int32_t cu_seqlens[3];
    int32_t cache_seqlens[2];
    int32_t block_table[8];
} call;

typedef enum kind { FWD, BWD, DECODE, PACKED, PAGED, PACKED_PAGED, NUM_KINDS } kind;

typedef struct malformed {
    kind kind;
    void (*change)(call *c, sinkattn_fwd_args *f, sinkattn_problem *p);
    const char *fragment;
} malformed;

#define NAMED(line) change_##line
#define CHANGE(line) NAMED(line)

#define CALL(kind, fragment, ...) \
    static void CHANGE(__LINE__)(call * c, sinkattn_fwd_args * f, sinkattn_problem * p) { \
        (void)c, (void)f, (void)p; \
        __VA_ARGS__; \
    }
#include "malformed.def"
#undef CALL

#define CALL(kind, fragment, ...) {kind, CHANGE(__LINE__), fragment},
static const malformed table[] = {
#include "malformed.def"
};
#undef CALL

static sinkattn_problem base_problem(kind k) {
    static const sinkattn_op ops[NUM_KINDS] = {SINKATTN_FWD, SINKATTN_BWD, SINKATTN_DECODE, SINKATTN_FWD, SINKATTN_DECODE, SINKATTN_DECODE};
    sinkattn_problem p = {.op = ops[k],
            .dtype = SINKATTN_FP32,
            .s_aux_dtype = SINKATTN_FP32,
            .packed = k == PACKED || k == PACKED_PAGED,
            .batch = 2,
            .num_q_heads = 4,
            .num_kv_heads = 2,
            .head_dim = 8,
            .q_len = 3,
            .k_len = 16,
            .mask = {.has_right = true},
            .extras = true};
    if (p.packed) p.q_len = 7;
    if (k == PACKED) p.k_len = 7;
    if (k == PAGED || k == PACKED_PAGED) {
        p.page_size = 4;
        p.num_pages = 6;
    }
    return p;
}

static call base_call(kind k, const sample *s) {
    call c = {.cu_seqlens = {0, 4, 6}, .cache_seqlens = {16, 9}, .block_table = {0, 1, 2, 3, 4, 5, 0, 1}};
    c.bwd = sample_bwd_args(s);
    if (k != BWD) c.bwd.ds_aux = NULL;
    c.decode = (sinkattn_decode_args){.block_table_stride = 4};
    return c;
}

/* Lengths point into the call itself, which must not move after this. */
static void point_lengths(kind k, call *c) {
    const bool paged = k == PAGED || k == PACKED_PAGED;
    if (k == PACKED || k == PACKED_PAGED) c->bwd.fwd.cu_seqlens_q = c->cu_seqlens;
    if (k == PACKED) c->bwd.fwd.cu_seqlens_k = c->cu_seqlens;
    if (k == DECODE || paged) c->decode.cache_seqlens = c->cache_seqlens;
    if (paged) c->decode.block_table = c->block_table;
}

static sinkattn_status run_call(kind k, call *c, const sinkattn_problem *planned) {
    const sinkattn_device device = oracle_device();
    sinkattn_plan plan;
    const sinkattn_status status = sinkattn_make_plan(planned, &device, &plan);
    if (status.code != SINKATTN_OK) return status;
    _Alignas(16) unsigned char workspace[512];
    const sinkattn_context context = {.workspace = workspace, .workspace_bytes = sizeof workspace};
    c->decode.fwd = c->bwd.fwd;
    if (k == BWD) return sinkattn_bwd(&c->bwd, &plan, &context);
    return planned->op == SINKATTN_DECODE ? sinkattn_decode(&c->decode, &plan, &context) : sinkattn_fwd(&c->bwd.fwd, &plan, &context);
}

static void test_malformed_calls(void) {
    sample samples[NUM_KINDS];
    for (int k = 0; k < NUM_KINDS; k++) {
        const sinkattn_problem problem = base_problem((kind)k);
        samples[k] = sample_new(&problem, true);
        call c = base_call((kind)k, &samples[k]);
        point_lengths((kind)k, &c);
        const sinkattn_status status = run_call((kind)k, &c, &problem);
        CHECK(status.code == SINKATTN_OK, "unchanged call of kind %d: %s", k, status.message);
    }
    for (size_t i = 0; i < COUNT(table); i++) {
        const malformed *row = &table[i];
        const sinkattn_problem problem = base_problem(row->kind);
        call c = base_call(row->kind, &samples[row->kind]);
        point_lengths(row->kind, &c);
        row->change(&c, &c.bwd.fwd, &c.bwd.fwd.problem);
        const sinkattn_status status = run_call(row->kind, &c, &problem);
        CHECK(status.code == SINKATTN_INVALID && strstr(status.message, row->fragment), "row %zu wants \"%s\", got code %d, \"%s\"", i,
                row->fragment, (int)status.code, status.message);
        CHECK(!strstr(status.message, "\n") && strlen(status.message) < 500, "one sentence: %s", status.message);
    }
    for (int k = 0; k < NUM_KINDS; k++) sample_free(&samples[k]);
}

static void test_null_arguments(void) {
    const sinkattn_plan plan = {0};
    const sinkattn_context context = {0};
    CHECK(sinkattn_fwd(NULL, &plan, &context).code == SINKATTN_INVALID, "fwd");
    CHECK(sinkattn_bwd(NULL, &plan, &context).code == SINKATTN_INVALID, "bwd");
    CHECK(sinkattn_decode(NULL, &plan, &context).code == SINKATTN_INVALID, "decode");
}

/* A tensor without elements needs no memory and no sensible strides; axes of one element need no sensible stride. */
static void test_empty_tensors_need_nothing(void) {
    const sinkattn_tensor nothing = {.batch_stride = -3, .row_stride = 1, .head_stride = 7};
    sinkattn_fwd_args args = {.problem = base_problem(FWD), .q = nothing, .k = nothing, .v = nothing, .out = nothing};
    args.problem.s_aux_dtype = SINKATTN_NO_DTYPE;
    args.problem.batch = 0;
    CHECK(sa_validate_fwd(&args).code == SINKATTN_OK, "%s", sa_validate_fwd(&args).message);
    args.problem.batch = 2;
    CHECK(sa_validate_fwd(&args).code == SINKATTN_INVALID, "not empty");

    sinkattn_problem problem = base_problem(FWD);
    problem.batch = 1;
    sample s = sample_new(&problem, true);
    args = sample_fwd_args(&s);
    args.q.batch_stride = args.out.batch_stride = -5;
    CHECK(sa_validate_fwd(&args).code == SINKATTN_OK, "%s", sa_validate_fwd(&args).message);
    sample_free(&s);
}

/* Rows of one tensor may lie between those of another: out beside q, head by head, in one buffer. */
static void test_interleaved_tensors(void) {
    sinkattn_problem problem = base_problem(FWD);
    sample s = sample_new(&problem, true);
    sinkattn_fwd_args args = sample_fwd_args(&s);
    const int64_t row = problem.num_q_heads * problem.head_dim, elements = problem.batch * problem.q_len * row;
    float *both = aligned_alloc(16, (size_t)(2 * elements) * sizeof *both);
    if (!both) abort();
    args.q = (sinkattn_tensor){both, 2 * problem.q_len * row, 2 * row, 2 * problem.head_dim};
    args.out = args.q;
    args.out.data = both + problem.head_dim;
    CHECK(sa_validate_fwd(&args).code == SINKATTN_OK, "%s", sa_validate_fwd(&args).message);
    args.out.data = both;
    CHECK(sa_validate_fwd(&args).code == SINKATTN_INVALID, "out is q");
    free(both);
    sample_free(&s);
}

static void test_nvfp4_arguments(void) {
    sinkattn_problem problem = base_problem(DECODE);
    problem.head_dim = 16;
    sample s = sample_new(&problem, true);
    _Alignas(2) uint8_t memory[192], other[24]; /* 24 rows of 16 columns */
    const struct {
        sinkattn_nvfp4 nvfp4;
        const char *fragment;
    } rows[] = {{{memory, NULL, 0.0}, "nvfp4.scales is NULL; it must be given with nvfp4.values"},
            {{memory + 1, other, 1.0}, "nvfp4.values is at"}, {{memory, other, -1.0}, "nvfp4.global_scale is -1; it must be positive"},
            {{memory, other, (double)NAN}, "nvfp4.global_scale is nan"}, {{memory, other, 1e39}, "nvfp4.global_scale is 1e+39"},
            {{memory, other, 1e-40}, "nvfp4.global_scale is 1e-40"}};
    sinkattn_decode_args args = sample_decode_args(&s);
    args.nvfp4 = (sinkattn_nvfp4){memory, other, 2.0};
    CHECK(sa_validate_decode(&args).code == SINKATTN_OK, "%s", sa_validate_decode(&args).message);
    for (size_t i = 0; i < COUNT(rows); i++) {
        args.nvfp4 = rows[i].nvfp4;
        CHECK(strstr(sa_validate_decode(&args).message, rows[i].fragment) != NULL, "%s", sa_validate_decode(&args).message);
    }
    args.fwd.problem.extras = false;
    CHECK(strstr(sa_validate_decode(&args).message, "problem.extras is false"), "%s", sa_validate_decode(&args).message);
    sample_free(&s);
}

/* A page that no row can see need not be mapped; one that the window or the prefix reaches must be. */
static void test_only_needed_pages_must_be_mapped(void) {
    int32_t lengths[1] = {14}, pages[4] = {0, -7, 2, INT32_MAX};
    sinkattn_decode_args args = {.cache_seqlens = lengths, .block_table = pages, .block_table_stride = 4};
    args.fwd.problem = base_problem(PAGED);
    args.fwd.problem.batch = 1;
    args.fwd.problem.mask = (sinkattn_mask){.has_left = true, .left = 1, .has_right = true, .num_sink_tokens = 2};
    lengths[0] = 12; /* rows at 9, 10, 11 see keys 8 to 11, and 0 and 1 */
    CHECK(sa_validate_cache(&args).code == SINKATTN_OK, "%s", sa_validate_cache(&args).message);
    lengths[0] = 13;
    CHECK(strstr(sa_validate_cache(&args).message, "block_table[0][3]") != NULL, "%s", sa_validate_cache(&args).message);
    lengths[0] = 11;
    CHECK(strstr(sa_validate_cache(&args).message, "block_table[0][1]") != NULL, "%s", sa_validate_cache(&args).message);
    lengths[0] = 12;
    pages[0] = 6;
    CHECK(strstr(sa_validate_cache(&args).message, "block_table[0][0]") != NULL, "%s", sa_validate_cache(&args).message);
}

const test validate_tests[] = {TEST(malformed_calls), TEST(null_arguments), TEST(empty_tensors_need_nothing),
        TEST(only_needed_pages_must_be_mapped), TEST(nvfp4_arguments), TEST(interleaved_tensors), {0}};
