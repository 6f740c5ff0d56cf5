/* SPDX-License-Identifier: Apache-2.0
 *
 * Promises about bits, at every CPU level of this machine: a row does not know how it was batched, packed, chunked or paged.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "sample.h"

static sinkattn_problem problem_of(sinkattn_op op, sinkattn_dtype dtype, int64_t batch, int64_t q_len, int64_t k_len) {
    sinkattn_problem p = {.op = op,
            .dtype = dtype,
            .s_aux_dtype = SINKATTN_FP32,
            .batch = batch,
            .num_q_heads = 6,
            .num_kv_heads = 2,
            .head_dim = 40,
            .q_len = q_len,
            .k_len = k_len,
            .mask = {.has_right = true}};
    if (one_in(2)) {
        p.mask.has_left = true;
        p.mask.left = pick(0, 150);
        p.mask.num_sink_tokens = pick(0, 5);
    }
    return p;
}

static bool run(sample *s, const sinkattn_device *device) {
    const sinkattn_status status = sample_run(s, device, &threads, NULL);
    return CHECK(status.code == SINKATTN_OK, "%s: %s", status.message, problem_text(&s->problem));
}

/* Rows [from, from + count) of sequence b of one array, and rows [to, ..) of another. */
static void copy_rows(array *to, int64_t to_b, int64_t to_row, const array *from, int64_t from_b, int64_t from_row, int64_t count) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t head = 0; head < to->heads; head++)
            for (int64_t x = 0; x < to->head_dim; x++)
                array_set(to, to_b, to_row + row, head, x, array_get(from, from_b, from_row + row, head, x));
}

/* As doubles, which hold every value of every dtype exactly. */
static bool same_rows(const array *a, int64_t a_b, int64_t a_row, const array *b, int64_t b_b, int64_t b_row, int64_t count) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t head = 0; head < a->heads; head++)
            for (int64_t x = 0; x < a->head_dim; x++) {
                const double left = array_get(a, a_b, a_row + row, head, x), right = array_get(b, b_b, b_row + row, head, x);
                if (memcmp(&left, &right, sizeof left) != 0) return false;
            }
    return true;
}

static double stat(const void *lse, const sample *s, int64_t b, int64_t head, int64_t row) {
    const sinkattn_problem *p = &s->problem;
    return sa_load(lse, SINKATTN_FP32, (b * p->num_q_heads + head) * p->q_len + row);
}

static void check_decode_is_prefill(const sinkattn_device *device, sinkattn_dtype dtype) {
    const int64_t len = pick(100, 700), rows = pick(1, 5), capacity = len + pick(0, 40);
    sinkattn_problem problem = problem_of(SINKATTN_FWD, dtype, 1, len, len);
    sample whole = sample_new(&problem, true);
    problem.op = SINKATTN_DECODE;
    problem.invariant = one_in(2);
    if (!problem.invariant) problem.num_splits = pick(0, 3);
    problem.q_len = rows;
    problem.k_len = capacity;
    problem.batch = 2;
    sample last = sample_new(&problem, true);
    free(last.cache_seqlens);
    last.cache_seqlens = malloc(2 * sizeof(int32_t));
    last.cache_seqlens[0] = 3;
    last.cache_seqlens[1] = (int32_t)len;
    memcpy(last.s_aux, whole.s_aux, 6 * sizeof(float));
    copy_rows(&last.q, 1, 0, &whole.q, 0, len - rows, rows);
    copy_rows(&last.k, 1, 0, &whole.k, 0, 0, len);
    copy_rows(&last.v, 1, 0, &whole.v, 0, 0, len);
    if (run(&whole, device) && run(&last, device)) {
        CHECK(same_rows(&last.out, 1, 0, &whole.out, 0, len - rows, rows), "level %d, out: %s", device->arch, problem_text(&problem));
        for (int64_t head = 0; head < 6; head++)
            for (int64_t i = 0; i < rows; i++)
                CHECK(stat(last.lse, &last, 1, head, i) == stat(whole.lse, &whole, 0, head, len - rows + i), "level %d, lse: %s",
                        device->arch, problem_text(&problem));
    }
    sample_free(&whole);
    sample_free(&last);
}

/* The last rows of a prompt computed after the others, against keys that are all there. */
static void check_chunked_prefill(const sinkattn_device *device, sinkattn_dtype dtype) {
    const int64_t len = pick(100, 300), rows = pick(1, 90);
    sinkattn_problem problem = problem_of(SINKATTN_FWD, dtype, 1, len, len);
    sample whole = sample_new(&problem, true);
    problem.q_len = rows;
    sample chunk = sample_new(&problem, true);
    memcpy(chunk.s_aux, whole.s_aux, 6 * sizeof(float));
    copy_rows(&chunk.q, 0, 0, &whole.q, 0, len - rows, rows);
    copy_rows(&chunk.k, 0, 0, &whole.k, 0, 0, len);
    copy_rows(&chunk.v, 0, 0, &whole.v, 0, 0, len);
    if (run(&whole, device) && run(&chunk, device))
        CHECK(same_rows(&chunk.out, 0, 0, &whole.out, 0, len - rows, rows), "level %d: %s", device->arch, problem_text(&problem));
    sample_free(&whole);
    sample_free(&chunk);
}

static void check_paged_is_contiguous(const sinkattn_device *device, sinkattn_dtype dtype) {
    const int64_t page_size = pick(1, 40), max_pages = sa_ceil_div(200, page_size);
    sinkattn_problem problem = problem_of(SINKATTN_DECODE, dtype, 2, pick(1, 3), max_pages * page_size);
    problem.num_splits = pick(1, 3);
    sample flat = sample_new(&problem, true);
    problem.page_size = page_size;
    problem.num_pages = 2 * max_pages;
    sample paged = sample_new(&problem, true);
    free(paged.cache_seqlens);
    paged.cache_seqlens = NULL;
    if (flat.cache_seqlens) {
        paged.cache_seqlens = malloc(2 * sizeof(int32_t));
        memcpy(paged.cache_seqlens, flat.cache_seqlens, 2 * sizeof(int32_t));
    }
    memcpy(paged.s_aux, flat.s_aux, 6 * sizeof(float));
    for (int64_t b = 0; b < 2; b++) {
        copy_rows(&paged.q, b, 0, &flat.q, b, 0, problem.q_len);
        for (int64_t i = 0; i < max_pages; i++) {
            const int64_t page = (2 * i + b + 1) % (2 * max_pages);
            paged.block_table[b * max_pages + i] = (int32_t)page;
            copy_rows(&paged.k, page, 0, &flat.k, b, i * page_size, page_size);
            copy_rows(&paged.v, page, 0, &flat.v, b, i * page_size, page_size);
        }
    }
    if (run(&flat, device) && run(&paged, device))
        for (int64_t b = 0; b < 2; b++)
            CHECK(same_rows(&paged.out, b, 0, &flat.out, b, 0, problem.q_len), "level %d: %s", device->arch, problem_text(&problem));
    sample_free(&flat);
    sample_free(&paged);
}

/* A packed batch of three, the middle one empty, against each sequence alone; the backward covers the forward's tiles too. */
static void check_packed_is_dense(const sinkattn_device *device, sinkattn_dtype dtype) {
    const int32_t cu_q[] = {0, 37, 37, 60}, cu_k[] = {0, 140, 140, 163};
    sinkattn_problem problem = problem_of(SINKATTN_BWD, dtype, 3, 64, 170);
    problem.packed = true;
    sample packed = sample_new(&problem, true);
    memcpy(packed.cu_seqlens_q, cu_q, sizeof cu_q);
    memcpy(packed.cu_seqlens_k, cu_k, sizeof cu_k);
    problem.packed = false;
    problem.batch = 1;
    if (!run(&packed, device)) return;
    for (int b = 0; b < 3; b += 2) {
        problem.q_len = cu_q[b + 1] - cu_q[b];
        problem.k_len = cu_k[b + 1] - cu_k[b];
        sample dense = sample_new(&problem, true);
        memcpy(dense.s_aux, packed.s_aux, 6 * sizeof(float));
        array *const to[] = {&dense.q, &dense.out, &dense.dout, &dense.k, &dense.v};
        const array *const from[] = {&packed.q, &packed.out, &packed.dout, &packed.k, &packed.v};
        for (int i = 0; i < 5; i++) copy_rows(to[i], 0, 0, from[i], 0, i < 3 ? cu_q[b] : cu_k[b], to[i]->rows);
        for (int64_t head = 0; head < 6; head++)
            for (int64_t i = 0; i < problem.q_len; i++) {
                sa_store(dense.lse, SINKATTN_FP32, head * problem.q_len + i, sa_load(packed.lse, SINKATTN_FP32, head * 64 + cu_q[b] + i));
                sa_store(dense.dlse, SINKATTN_FP32, head * problem.q_len + i, sa_load(packed.dlse, SINKATTN_FP32, head * 64 + cu_q[b] + i));
            }
        if (run(&dense, device)) {
            CHECK(same_rows(&dense.dq, 0, 0, &packed.dq, 0, cu_q[b], problem.q_len), "level %d, dq: %s", device->arch,
                    problem_text(&problem));
            CHECK(same_rows(&dense.dk, 0, 0, &packed.dk, 0, cu_k[b], problem.k_len), "level %d, dk: %s", device->arch,
                    problem_text(&problem));
            CHECK(same_rows(&dense.dv, 0, 0, &packed.dv, 0, cu_k[b], problem.k_len), "level %d, dv: %s", device->arch,
                    problem_text(&problem));
        }
        sample_free(&dense);
    }
    sample_free(&packed);
}

/* A chunk of a prefill, no row, a decode row, a few speculative rows, rows without keys: over pages, against each sequence alone. */
static void check_packed_over_pages_is_dense(const sinkattn_device *device, sinkattn_dtype dtype) {
    enum { BATCH = 5, TOTAL = 50 };
    const int32_t cu_q[] = {0, 37, 37, 38, 42, 47}, k_lens[] = {140, 50, 163, 9, 0};
    const int64_t page_size = pick(1, 40), max_pages = sa_ceil_div(163, page_size);
    sinkattn_problem problem = problem_of(SINKATTN_DECODE, dtype, BATCH, TOTAL, max_pages * page_size);
    problem.mask.has_right = one_in(2);
    problem.packed = true;
    problem.page_size = page_size;
    problem.num_pages = BATCH * max_pages;
    sample packed = sample_new(&problem, true);
    free(packed.cache_seqlens);
    packed.cache_seqlens = malloc(sizeof k_lens);
    memcpy(packed.cache_seqlens, k_lens, sizeof k_lens);
    memcpy(packed.cu_seqlens_q, cu_q, sizeof cu_q);
    for (int64_t i = 0; i < BATCH * max_pages; i++) packed.block_table[i] = (int32_t)((i + 2) % problem.num_pages);
    if (!run(&packed, device)) return;
    problem.op = SINKATTN_FWD;
    problem.packed = false;
    problem.batch = 1;
    problem.page_size = problem.num_pages = 0;
    for (int b = 0; b < BATCH; b++) {
        problem.q_len = cu_q[b + 1] - cu_q[b];
        problem.k_len = k_lens[b];
        sample dense = sample_new(&problem, true);
        memcpy(dense.s_aux, packed.s_aux, 6 * sizeof(float));
        copy_rows(&dense.q, 0, 0, &packed.q, 0, cu_q[b], problem.q_len);
        for (int64_t j = 0; j < problem.k_len; j++) {
            const int64_t page = packed.block_table[b * max_pages + j / page_size];
            copy_rows(&dense.k, 0, j, &packed.k, page, j % page_size, 1);
            copy_rows(&dense.v, 0, j, &packed.v, page, j % page_size, 1);
        }
        if (run(&dense, device)) {
            CHECK(same_rows(&dense.out, 0, 0, &packed.out, 0, cu_q[b], problem.q_len), "level %d, out of sequence %d: %s", device->arch, b,
                    problem_text(&packed.problem));
            for (int64_t head = 0; head < 6; head++)
                for (int64_t i = 0; i < problem.q_len; i++)
                    CHECK(stat(dense.lse, &dense, 0, head, i) == stat(packed.lse, &packed, 0, head, cu_q[b] + i),
                            "level %d, lse of sequence %d: %s", device->arch, b, problem_text(&packed.problem));
        }
        sample_free(&dense);
    }
    for (int64_t i = cu_q[BATCH]; i < TOTAL; i++)
        CHECK(array_get(&packed.out, 0, i, 0, 0) == 0.0 && isinf(stat(packed.lse, &packed, 0, 0, i)), "row %" PRId64 " of no sequence", i);
    sample_free(&packed);
}

static void check_no_sink_is_minus_infinity(const sinkattn_device *device, sinkattn_dtype dtype) {
    sinkattn_problem problem = problem_of(SINKATTN_FWD, dtype, 1, 70, 150);
    if (one_in(2)) {
        problem.op = SINKATTN_DECODE;
        problem.q_len = 2;
        problem.num_splits = 2;
    }
    sample s = sample_new(&problem, true);
    for (int64_t h = 0; h < 6; h++) sa_store(s.s_aux, SINKATTN_FP32, h, -(double)INFINITY);
    if (run(&s, device)) {
        const uint64_t with = sample_hash(&s);
        void *kept = s.s_aux;
        s.s_aux = NULL;
        s.problem.s_aux_dtype = SINKATTN_NO_DTYPE;
        sample_reset(&s);
        if (run(&s, device)) CHECK(sample_hash(&s) == with, "level %d: %s", device->arch, problem_text(&problem));
        s.s_aux = kept;
    }
    sample_free(&s);
}

/* A frozen sink changes no other gradient. */
static void check_frozen_sink(const sinkattn_device *device, sinkattn_dtype dtype) {
    const sinkattn_problem problem = problem_of(SINKATTN_BWD, dtype, 1, 40, 150);
    sample s = sample_new(&problem, true);
    if (run(&s, device)) {
        void *kept = s.s_aux, *kept_gradient = s.ds_aux;
        s.s_aux = s.ds_aux = NULL;
        const uint64_t with = sample_hash(&s);
        s.problem.s_aux_dtype = SINKATTN_NO_DTYPE;
        sample_reset(&s);
        if (run(&s, device)) CHECK(sample_hash(&s) == with, "level %d: %s", device->arch, problem_text(&problem));
        s.s_aux = kept;
        s.ds_aux = kept_gradient;
    }
    sample_free(&s);
}

/* NaN in what some rows see: NaN exactly where the oracle has it. */
static void check_visible_nan(const sinkattn_device *device, sinkattn_dtype dtype) {
    const sinkattn_device oracle = oracle_device();
    const sinkattn_op ops[] = {SINKATTN_FWD, SINKATTN_BWD, SINKATTN_DECODE};
    sinkattn_problem problem = problem_of(ops[pick(0, 2)], dtype, 1, 40, 150);
    if (problem.op == SINKATTN_DECODE) {
        problem.q_len = 3;
        problem.num_splits = 2;
    }
    problem.mask.has_left = true;
    problem.mask.left = pick(0, 30);
    sample s = sample_new(&problem, true);
    array *const inputs[] = {&s.q, &s.k, &s.v, &s.dout};
    const int64_t input = pick(0, problem.op == SINKATTN_BWD ? 3 : 2);
    array *hit = inputs[input];
    const int64_t row = pick(0, hit->rows - 1), head = pick(0, hit->heads - 1), x = pick(0, hit->head_dim - 1);
    array_set(hit, 0, row, head, x, (double)NAN);
    sample wide = sample_widened(&s);
    char what[640];
    snprintf(what, sizeof what, "NaN in input %" PRId64 " at row %" PRId64 ", level %d, %s", input, row, device->arch,
            problem_text(&problem));
    if (run(&wide, &oracle) && run(&s, device)) sample_check(&s, &wide, what);
    sample_free(&s);
    sample_free(&wide);
}

/* A key that no row gives any weight: its element of -inf makes scores of -inf. However many rows share a tile, its dk and dv are 0; where
 * the element is NaN, or its value has an infinity, which 0 times is NaN, NaN stands where the oracle has it. */
static void check_key_without_weight(const sinkattn_device *device, sinkattn_dtype dtype) {
    static const int64_t row_counts[] = {1, 15, 16, 17, 31, 64, 65};
    enum { NO_WEIGHT, NAN_KEY, INFINITE_VALUE, NUM_CASES };
    const sinkattn_device oracle = oracle_device();
    for (size_t i = 0; i < NUM_CASES * COUNT(row_counts); i++) {
        const size_t which = i % NUM_CASES;
        sinkattn_problem problem = problem_of(SINKATTN_BWD, dtype, 1, row_counts[i / NUM_CASES], 150);
        problem.num_q_heads = problem.num_kv_heads = 2;
        problem.mask = (sinkattn_mask){.has_right = one_in(2)};
        sample s = sample_new(&problem, true);
        for (int64_t row = 0; row < problem.q_len; row++)
            for (int64_t head = 0; head < 2; head++) array_set(&s.q, 0, row, head, 7, 1.0);
        array_set(&s.k, 0, 3, 1, 7, which == NAN_KEY ? (double)NAN : -(double)INFINITY);
        if (which == INFINITE_VALUE) array_set(&s.v, 0, 3, 1, 5, (double)INFINITY);
        sample wide = sample_widened(&s);
        char what[640];
        snprintf(what, sizeof what, "case %zu, level %d, %s", which, device->arch, problem_text(&problem));
        if (run(&wide, &oracle) && run(&s, device)) sample_check(&s, &wide, what);
        for (int64_t x = 0; x < problem.head_dim && which == NO_WEIGHT; x++)
            CHECK(array_get(&s.dk, 0, 3, 1, x) == 0.0 && array_get(&s.dv, 0, 3, 1, x) == 0.0, "%s", what);
        sample_free(&s);
        sample_free(&wide);
    }
}

static void test_key_without_weight(void) { at_each_level(check_key_without_weight); }
static void test_decode_is_prefill(void) { at_each_level(check_decode_is_prefill); }
static void test_chunked_prefill(void) { at_each_level(check_chunked_prefill); }
static void test_paged_is_contiguous(void) { at_each_level(check_paged_is_contiguous); }
static void test_packed_is_dense(void) { at_each_level(check_packed_is_dense); }
static void test_packed_over_pages_is_dense(void) { at_each_level(check_packed_over_pages_is_dense); }
static void test_no_sink_is_minus_infinity(void) { at_each_level(check_no_sink_is_minus_infinity); }
static void test_frozen_sink(void) { at_each_level(check_frozen_sink); }

static void test_visible_nan(void) {
    for (int i = 0; i < 8; i++) at_each_level(check_visible_nan);
}

const test promise_tests[] = {TEST(decode_is_prefill), TEST(chunked_prefill), TEST(paged_is_contiguous), TEST(packed_is_dense),
        TEST(packed_over_pages_is_dense), TEST(no_sink_is_minus_infinity), TEST(frozen_sink), TEST(visible_nan), TEST(key_without_weight),
        {0}};
