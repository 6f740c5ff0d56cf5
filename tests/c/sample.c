/* SPDX-License-Identifier: Apache-2.0 */
#include "sample.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { GUARD_BYTES = 64 };

typedef enum role { READ, READ_SHARED, WRITTEN } role;

static void *allocate(size_t bytes) {
    void *block = malloc(bytes ? bytes : 1);
    if (!block) abort();
    return block;
}

static int64_t element_offset(const array *a, int64_t b, int64_t row, int64_t head, int64_t x) {
    return sa_offset(&a->at, b, row, head) + x;
}

double array_get(const array *a, int64_t b, int64_t row, int64_t head, int64_t x) {
    return sa_load(a->at.data, a->dtype, element_offset(a, b, row, head, x));
}

void array_set(array *a, int64_t b, int64_t row, int64_t head, int64_t x, double value) {
    sa_store(a->at.data, a->dtype, element_offset(a, b, row, head, x), value);
}

static bool is_empty(const array *a) { return a->batch == 0 || a->rows == 0 || a->heads == 0; }

/* Axes in any order, each with room left after it; a read axis may be expanded. */
static int64_t choose_strides(array *a, role r, bool plain) {
    static const int orders[6][3] = {{2, 1, 0}, {1, 2, 0}, {2, 0, 1}, {0, 2, 1}, {1, 0, 2}, {0, 1, 2}};
    const int64_t sizes[3] = {a->batch, a->rows, a->heads}, step = 16 / sa_dtype_bytes(a->dtype);
    int64_t strides[3], extent = a->head_dim, stride = a->head_dim;
    const int *order = orders[plain ? 0 : pick(0, 5)];
    const int shared = r == READ_SHARED && !plain && one_in(6) ? (int)pick(0, 2) : -1;
    for (int i = 0; i < 3; i++) {
        const int axis = order[i];
        strides[axis] = axis == shared ? 0 : stride;
        if (axis == shared) {
            a->expanded = true;
            continue;
        }
        if (!plain && one_in(3)) strides[axis] += pick(1, 3) * step;
        extent += (sizes[axis] - 1) * strides[axis];
        stride = sizes[axis] * strides[axis];
    }
    a->at.batch_stride = strides[0];
    a->at.row_stride = strides[1];
    a->at.head_stride = strides[2];
    return extent;
}

static array array_new(sinkattn_dtype dtype, int64_t batch, int64_t rows, int64_t heads, int64_t head_dim, role r, bool plain) {
    array a = {.dtype = dtype, .batch = batch, .rows = rows, .heads = heads, .head_dim = head_dim};
    const int64_t extent = choose_strides(&a, r, plain);
    if (is_empty(&a)) return a;
    const size_t lead = (r == WRITTEN ? GUARD_BYTES : 0) + (plain ? 0 : 16 * (size_t)pick(0, 3));
    a.bytes = lead + (size_t)(extent * sa_dtype_bytes(dtype)) + (r == WRITTEN ? GUARD_BYTES : 0);
    a.block = allocate(a.bytes);
    memset(a.block, 0xff, a.bytes);
    a.at.data = a.block + lead;
    return a;
}

static void array_fill(array *a) {
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t row = 0; row < a->rows; row++)
            for (int64_t head = 0; head < a->heads; head++)
                for (int64_t x = 0; x < a->head_dim; x++) array_set(a, b, row, head, x, pick_normal());
}

static void array_copy(array *to, const array *from) {
    for (int64_t b = 0; b < to->batch; b++)
        for (int64_t row = 0; row < to->rows; row++)
            for (int64_t head = 0; head < to->heads; head++)
                for (int64_t x = 0; x < to->head_dim; x++) array_set(to, b, row, head, x, array_get(from, b, row, head, x));
}

static bool guards_hold(const array *a) {
    if (is_empty(a)) return true;
    unsigned char *owned = calloc(a->bytes, 1);
    if (!owned) abort();
    const size_t start = (size_t)((unsigned char *)a->at.data - a->block), row_bytes = (size_t)(a->head_dim * sa_dtype_bytes(a->dtype));
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t row = 0; row < a->rows; row++)
            for (int64_t head = 0; head < a->heads; head++)
                memset(owned + start + (size_t)(element_offset(a, b, row, head, 0) * sa_dtype_bytes(a->dtype)), 1, row_bytes);
    bool hold = true;
    for (size_t i = 0; i < a->bytes; i++) hold = hold && (owned[i] || a->block[i] == 0xff);
    free(owned);
    return hold;
}

static int32_t *cut(int64_t batch, int64_t total) {
    int32_t *cu_seqlens = allocate((size_t)(batch + 1) * sizeof *cu_seqlens);
    cu_seqlens[0] = 0;
    const int64_t used = one_in(2) ? total : pick(0, total);
    for (int64_t b = 0; b < batch; b++) /* a third of what is left, or nothing, or a single row */
        cu_seqlens[b + 1] =
                (int32_t)(b == batch - 1 && one_in(2)
                                  ? used
                                  : sa_min(used, cu_seqlens[b] + (one_in(4) ? pick(0, 1) : pick(0, 1 + 2 * used / (batch + 1)))));
    return cu_seqlens;
}

static sa_sequence sequence_at(const sample *s, int64_t b) {
    const sinkattn_fwd_args args = {.problem = s->problem, .cu_seqlens_q = s->cu_seqlens_q, .cu_seqlens_k = s->cu_seqlens_k};
    const sinkattn_decode_args decode = {.fwd = args, .cache_seqlens = s->cache_seqlens};
    return s->problem.op == SINKATTN_DECODE ? sa_cached_sequence(&decode, b) : sa_sequence_at(&args, b);
}

static bool is_seen(const sa_band *band, int64_t j) {
    for (int64_t i = 0; i < band->q_len; i++)
        if (sa_visible(band, i, j)) return true;
    return false;
}

static void choose_lengths(sample *s) {
    const sinkattn_problem *p = &s->problem;
    if (p->packed) s->cu_seqlens_q = cut(p->batch, p->q_len);
    if (p->packed && p->op != SINKATTN_DECODE) s->cu_seqlens_k = cut(p->batch, p->k_len);
    if (p->op != SINKATTN_DECODE) return;
    if (!one_in(4)) {
        s->cache_seqlens = allocate((size_t)p->batch * sizeof(int32_t));
        for (int64_t b = 0; b < p->batch; b++) s->cache_seqlens[b] = (int32_t)(one_in(4) ? p->k_len : pick(0, p->k_len));
    }
    if (p->page_size == 0) return;
    const int64_t max_pages = p->k_len / p->page_size;
    s->block_table = allocate((size_t)(p->batch * max_pages) * sizeof(int32_t));
    for (int64_t b = 0; b < p->batch; b++) {
        const sa_sequence sequence = sequence_at(s, b);
        const sa_band band = sa_band_of(&p->mask, sequence.q_len, sequence.k_len);
        for (int64_t i = 0; i < max_pages; i++) {
            bool needed = false;
            for (int64_t j = i * p->page_size; j < sa_min((i + 1) * p->page_size, sequence.k_len); j++)
                needed = needed || is_seen(&band, j);
            s->block_table[b * max_pages + i] = (int32_t)(needed ? pick(0, p->num_pages - 1) : one_in(2) ? -1 : INT32_MAX);
        }
    }
}

/* Keys that no row sees must not matter, whatever they hold. */
static void poison(sample *s) {
    static const double poisons[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    const sinkattn_problem *p = &s->problem;
    array *k = &s->k, *v = &s->v;
    if (k->expanded || v->expanded || is_empty(k)) return;
    bool *seen = calloc((size_t)(k->batch * k->rows), sizeof *seen);
    if (!seen) abort();
    for (int64_t b = 0; b < p->batch; b++) {
        const sa_sequence sequence = sequence_at(s, b);
        const sa_band band = sa_band_of(&p->mask, sequence.q_len, sequence.k_len);
        const int64_t k_batch = p->op == SINKATTN_DECODE ? b : sequence.batch;
        for (int64_t j = 0; j < sequence.k_len; j++) {
            if (!is_seen(&band, j)) continue;
            if (s->block_table)
                seen[s->block_table[b * (p->k_len / p->page_size) + j / p->page_size] * k->rows + j % p->page_size] = true;
            else
                seen[k_batch * k->rows + sequence.k_begin + j] = true;
        }
    }
    array *const both[] = {k, v};
    for (int64_t row = 0; row < k->batch * k->rows; row++)
        for (int64_t head = 0; head < k->heads && !seen[row]; head++)
            for (int i = 0; i < 2; i++)
                for (int64_t x = 0; x < both[i]->head_dim; x++)
                    array_set(both[i], row / k->rows, row % k->rows, head, x, poisons[pick(0, 2)]);
    free(seen);
}

sinkattn_dtype sample_lse_dtype(const sinkattn_problem *problem) { return problem->dtype == SINKATTN_FP64 ? SINKATTN_FP64 : SINKATTN_FP32; }

static size_t stat_bytes(const sample *s) { return (size_t)(s->num_stats * sa_dtype_bytes(sample_lse_dtype(&s->problem))); }
static size_t s_aux_bytes(const sample *s) { return (size_t)(s->problem.num_q_heads * sa_dtype_bytes(s->problem.s_aux_dtype)); }

/* Values that are columns of the keys, in the keys' memory. */
static array last_columns_of(const array *k, int64_t head_dim) {
    array v = *k;
    v.block = NULL;
    v.head_dim = head_dim;
    if (!is_empty(k)) v.at.data = (char *)k->at.data + (k->head_dim - head_dim) * sa_dtype_bytes(k->dtype);
    return v;
}

static void allocate_sample(sample *s, bool plain) {
    const sinkattn_problem *p = &s->problem;
    const bool backward = p->op == SINKATTN_BWD, paged = p->page_size != 0;
    const int64_t batch = p->packed ? 1 : p->batch, k_batch = p->op == SINKATTN_DECODE ? p->batch : batch;
    const int64_t head_dim_v = sa_head_dim_v(p), pages = paged ? p->num_pages : k_batch, page_rows = paged ? p->page_size : p->k_len;
    s->q = array_new(p->dtype, batch, p->q_len, p->num_q_heads, p->head_dim, READ_SHARED, plain);
    s->k = array_new(p->dtype, pages, page_rows, p->num_kv_heads, p->head_dim, READ_SHARED, plain);
    const bool latent = p->op == SINKATTN_DECODE && !plain && one_in(3);
    s->v = latent ? last_columns_of(&s->k, head_dim_v)
                  : array_new(p->dtype, pages, page_rows, p->num_kv_heads, head_dim_v, READ_SHARED, plain);
    s->out = array_new(p->dtype, batch, p->q_len, p->num_q_heads, head_dim_v, backward ? READ : WRITTEN, plain);
    s->num_stats = batch * p->num_q_heads * p->q_len;
    s->lse = allocate(stat_bytes(s));
    if (p->s_aux_dtype) s->s_aux = allocate(s_aux_bytes(s));
    if (!backward) {
        s->lse_raw = allocate(stat_bytes(s));
        return;
    }
    s->dout = array_new(p->dtype, batch, p->q_len, p->num_q_heads, head_dim_v, READ_SHARED, plain);
    s->dq = array_new(p->dtype, batch, p->q_len, p->num_q_heads, p->head_dim, WRITTEN, plain);
    s->dk = array_new(p->dtype, batch, p->k_len, p->num_kv_heads, p->head_dim, WRITTEN, plain);
    s->dv = array_new(p->dtype, batch, p->k_len, p->num_kv_heads, head_dim_v, WRITTEN, plain);
    if (p->s_aux_dtype) s->ds_aux = allocate(s_aux_bytes(s));
    if (plain || !one_in(3)) s->dlse = allocate(stat_bytes(s));
}

static double random_logit(bool plain) {
    const double edges[] = {-(double)INFINITY, (double)INFINITY, 100.0, 1e4, -100.0};
    return plain || !one_in(6) ? 3.0 * pick_normal() : edges[pick(0, 4)];
}

/* The forward's results, rounded as the forward would leave them. */
static void compute_forward(sample *s) {
    sample wide = sample_widened(s);
    wide.problem.op = SINKATTN_FWD;
    const sinkattn_device device = oracle_device();
    const sinkattn_status status = sample_run(&wide, &device, NULL, NULL);
    CHECK(status.code == SINKATTN_OK, "%s", status.message);
    array_copy(&s->out, &wide.out);
    for (int64_t i = 0; i < s->num_stats; i++) sa_store(s->lse, sample_lse_dtype(&s->problem), i, sa_load(wide.lse, SINKATTN_FP64, i));
    sample_free(&wide);
}

sample sample_new(const sinkattn_problem *problem, bool plain) {
    sample s = {.problem = *problem};
    allocate_sample(&s, plain);
    choose_lengths(&s);
    array *const inputs[] = {&s.q, &s.k, &s.v, &s.dout};
    for (int i = 0; i < 4; i++) array_fill(inputs[i]);
    for (int64_t h = 0; s.s_aux && h < problem->num_q_heads; h++) sa_store(s.s_aux, problem->s_aux_dtype, h, random_logit(plain));
    for (int64_t i = 0; s.dlse && i < s.num_stats; i++) sa_store(s.dlse, sample_lse_dtype(problem), i, pick_normal());
    if (!plain) poison(&s);
    if (problem->op == SINKATTN_BWD) compute_forward(&s);
    sample_reset(&s);
    return s;
}

static int32_t *copied_ints(const int32_t *from, int64_t count) {
    if (!from) return NULL;
    int32_t *to = allocate((size_t)count * sizeof *to);
    memcpy(to, from, (size_t)count * sizeof *to);
    return to;
}

sample sample_widened(const sample *s) {
    sample wide = {.problem = s->problem};
    const sinkattn_problem *p = &s->problem;
    wide.problem.dtype = SINKATTN_FP64;
    wide.problem.s_aux_dtype = s->s_aux ? SINKATTN_FP64 : SINKATTN_NO_DTYPE;
    allocate_sample(&wide, true);
    array_copy(&wide.q, &s->q);
    array_copy(&wide.k, &s->k);
    array_copy(&wide.v, &s->v);
    wide.cu_seqlens_q = copied_ints(s->cu_seqlens_q, p->batch + 1);
    wide.cu_seqlens_k = copied_ints(s->cu_seqlens_k, p->batch + 1);
    wide.cache_seqlens = copied_ints(s->cache_seqlens, p->batch);
    if (s->block_table) wide.block_table = copied_ints(s->block_table, p->batch * (p->k_len / p->page_size));
    for (int64_t h = 0; s->s_aux && h < p->num_q_heads; h++) sa_store(wide.s_aux, SINKATTN_FP64, h, sa_load(s->s_aux, p->s_aux_dtype, h));
    if (p->op != SINKATTN_BWD) {
        sample_reset(&wide);
        return wide;
    }
    array_copy(&wide.out, &s->out);
    array_copy(&wide.dout, &s->dout);
    if (!s->dlse) {
        free(wide.dlse);
        wide.dlse = NULL;
    }
    for (int64_t i = 0; i < s->num_stats; i++) {
        sa_store(wide.lse, SINKATTN_FP64, i, sa_load(s->lse, sample_lse_dtype(p), i));
        if (s->dlse) sa_store(wide.dlse, SINKATTN_FP64, i, sa_load(s->dlse, sample_lse_dtype(p), i));
    }
    sample_reset(&wide);
    return wide;
}

void sample_free(sample *s) {
    array *const arrays[] = {&s->q, &s->k, &s->v, &s->out, &s->dout, &s->dq, &s->dk, &s->dv};
    void *const rest[] = {
            s->lse, s->lse_raw, s->dlse, s->s_aux, s->ds_aux, s->cu_seqlens_q, s->cu_seqlens_k, s->cache_seqlens, s->block_table};
    for (int i = 0; i < 8; i++) free(arrays[i]->block);
    for (int i = 0; i < 9; i++) free(rest[i]);
    *s = (sample){0};
}

sinkattn_fwd_args sample_fwd_args(const sample *s) {
    return (sinkattn_fwd_args){.problem = s->problem,
            .q = s->q.at,
            .k = s->k.at,
            .v = s->v.at,
            .out = s->out.at,
            .lse = s->lse,
            .lse_raw = s->lse_raw,
            .s_aux = s->s_aux,
            .cu_seqlens_q = s->cu_seqlens_q,
            .cu_seqlens_k = s->cu_seqlens_k};
}

sinkattn_bwd_args sample_bwd_args(const sample *s) {
    return (sinkattn_bwd_args){.fwd = sample_fwd_args(s),
            .dout = s->dout.at,
            .dlse = s->dlse,
            .dq = s->dq.at,
            .dk = s->dk.at,
            .dv = s->dv.at,
            .ds_aux = s->ds_aux};
}

sinkattn_decode_args sample_decode_args(const sample *s) {
    const sinkattn_problem *p = &s->problem;
    return (sinkattn_decode_args){.fwd = sample_fwd_args(s),
            .cache_seqlens = s->cache_seqlens,
            .block_table = s->block_table,
            .block_table_stride = s->block_table ? p->k_len / p->page_size : 0};
}

sinkattn_status sample_run_planned(sample *s, const sinkattn_plan *plan, const sinkattn_executor *executor) {
    void *workspace = allocate((size_t)plan->workspace_bytes);
    memset(workspace, 0xff, (size_t)plan->workspace_bytes);
    const sinkattn_context context = {
            .workspace = workspace, .workspace_bytes = plan->workspace_bytes, .executor = executor ? *executor : (sinkattn_executor){0}};
    sinkattn_status status;
    if (s->problem.op == SINKATTN_FWD) {
        const sinkattn_fwd_args args = sample_fwd_args(s);
        status = sinkattn_fwd(&args, plan, &context);
    } else if (s->problem.op == SINKATTN_BWD) {
        const sinkattn_bwd_args args = sample_bwd_args(s);
        status = sinkattn_bwd(&args, plan, &context);
    } else {
        const sinkattn_decode_args args = sample_decode_args(s);
        status = sinkattn_decode(&args, plan, &context);
    }
    free(workspace);
    return status;
}

sinkattn_status sample_run(sample *s, const sinkattn_device *device, const sinkattn_executor *executor, sinkattn_plan *plan) {
    sinkattn_plan own;
    if (!plan) plan = &own;
    const sinkattn_status status = sinkattn_make_plan(&s->problem, device, plan);
    return status.code == SINKATTN_OK ? sample_run_planned(s, plan, executor) : status;
}

/* The output arrays of the sample's op. */
static int outputs(const sample *s, const array **list) {
    int count = 0;
    if (s->problem.op != SINKATTN_BWD) {
        list[count++] = &s->out;
        return count;
    }
    list[count++] = &s->dq;
    list[count++] = &s->dk;
    list[count++] = &s->dv;
    return count;
}

void sample_reset(sample *s) {
    const array *list[3];
    const int count = outputs(s, list);
    for (int i = 0; i < count; i++)
        if (list[i]->block) memset(list[i]->block, 0xff, list[i]->bytes);
    if (s->problem.op != SINKATTN_BWD) memset(s->lse, 0xff, stat_bytes(s));
    if (s->lse_raw) memset(s->lse_raw, 0xff, stat_bytes(s));
    if (s->ds_aux) memset(s->ds_aux, 0xff, s_aux_bytes(s));
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ c[i]) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t sample_hash(const sample *s) {
    const array *list[3];
    const int count = outputs(s, list);
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; i < count; i++) hash = hash_bytes(hash, list[i]->block, list[i]->block ? list[i]->bytes : 0);
    if (s->problem.op != SINKATTN_BWD) hash = hash_bytes(hash, s->lse, stat_bytes(s));
    if (s->lse_raw) hash = hash_bytes(hash, s->lse_raw, stat_bytes(s));
    return s->ds_aux ? hash_bytes(hash, s->ds_aux, s_aux_bytes(s)) : hash;
}

/* What a dtype may lose, relative to the largest value or to the inputs' unit variance. bf16 kernels round P and dS as well; fp32 sums
 * lose with the number of terms, and exp turns what a score loses into a relative loss, so scores beyond unit variance count too. */
static double tolerance_of(const sinkattn_problem *p) {
    const double d = (double)p->head_dim, growth = fmax(1.0, sqrt(d / 128.0)) * fmax(1.0, fabs(sa_softmax_scale(p)) * sqrt(d));
    return p->dtype == SINKATTN_BF16 ? 0x1p-6 : p->dtype == SINKATTN_FP16 ? 0x1p-9 : p->dtype == SINKATTN_FP32 ? 4e-6 * growth : 1e-12;
}

static bool agree(double value, double reference, double tolerance) {
    if (isnan(reference) || isnan(value)) return isnan(reference) && isnan(value);
    if (isinf(reference) || isinf(value)) return value == reference;
    return fabs(value - reference) <= tolerance;
}

static void check_array(const char *name, const array *a, const array *reference, double tolerance, const char *what) {
    double largest = 1.0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t b = 0; b < a->batch; b++)
            for (int64_t row = 0; row < a->rows; row++)
                for (int64_t head = 0; head < a->heads; head++)
                    for (int64_t x = 0; x < a->head_dim; x++) {
                        const double ref = array_get(reference, b, row, head, x);
                        if (pass == 0 && isfinite(ref)) largest = fmax(largest, fabs(ref));
                        if (pass == 0) continue;
                        const double value = array_get(a, b, row, head, x);
                        if (!CHECK(agree(value, ref, tolerance * largest),
                                    "%s[%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                                    "] is %.9g, the oracle says %.9g, largest %.3g: %s",
                                    name, b, row, head, x, value, ref, largest, what))
                            return;
                    }
    CHECK(guards_hold(a), "%s: bytes around its rows were written: %s", name, what);
}

static void check_lse(const sample *s, const void *lse, const void *expected, const char *what) {
    for (int64_t i = 0; i < s->num_stats; i++) {
        const double value = sa_load(lse, sample_lse_dtype(&s->problem), i), ref = sa_load(expected, SINKATTN_FP64, i);
        const double tolerance = s->problem.dtype == SINKATTN_FP64 ? 1e-12 * fmax(1.0, fabs(ref)) : fmax(1e-5, 2e-7 * fabs(ref));
        if (!CHECK(agree(value, ref, tolerance), "lse[%" PRId64 "] is %.9g, the oracle says %.9g: %s", i, value, ref, what)) return;
    }
}

/* 1e-5 of the sum of the absolute terms that ds_aux of a head is made of, and what rounding takes from their dP, which may be small beside
 * its own terms: 2^-22 of those are six standard deviations. */
static double ds_aux_tolerance(const sample *wide, int64_t q_head) {
    const sinkattn_problem *p = &wide->problem;
    const double s = sa_load(wide->s_aux, SINKATTN_FP64, q_head), scale = sa_softmax_scale(p);
    const int64_t kv_head = q_head / (p->num_q_heads / p->num_kv_heads);
    double terms = 0.0;
    for (int64_t b = 0; b < p->batch; b++) {
        const sa_sequence at = sequence_at(wide, b);
        const sa_band band = sa_band_of(&p->mask, at.q_len, at.k_len);
        for (int64_t i = 0; i < at.q_len; i++) {
            const int64_t stat = sa_row_index(p, &at, q_head, i);
            const double lse = sa_load(wide->lse, SINKATTN_FP64, stat);
            double row = wide->dlse ? fabs(sa_load(wide->dlse, SINKATTN_FP64, stat)) : 0.0;
            for (int64_t j = 0; j < at.k_len; j++) {
                if (!sa_visible(&band, i, j)) continue;
                double score = 0.0, dp = 0.0, of_dp = 0.0;
                for (int64_t x = 0; x < p->head_dim; x++)
                    score += array_get(&wide->q, at.batch, at.q_begin + i, q_head, x) *
                             array_get(&wide->k, at.batch, at.k_begin + j, kv_head, x);
                for (int64_t x = 0; x < sa_head_dim_v(p); x++) {
                    const double term = array_get(&wide->dout, at.batch, at.q_begin + i, q_head, x) *
                                        array_get(&wide->v, at.batch, at.k_begin + j, kv_head, x);
                    dp += term;
                    of_dp += fabs(term);
                }
                row += exp(scale * score - lse) * (fabs(dp) + 0x1p-22 / 1e-5 * of_dp);
            }
            terms += sa_exp_minus(s, lse) * row;
        }
    }
    return 1e-5 * terms;
}

static void check_ds_aux(const sample *s, const sample *reference, const char *what) {
    for (int64_t h = 0; h < s->problem.num_q_heads; h++) {
        const sinkattn_dtype dtype = s->problem.s_aux_dtype;
        const double value = sa_load(s->ds_aux, dtype, h), ref = sa_load(reference->ds_aux, SINKATTN_FP64, h);
        const double rounding = dtype == SINKATTN_BF16 ? 0x1p-8 : dtype == SINKATTN_FP16 ? 0x1p-11 : 0.0;
        const double tolerance = ds_aux_tolerance(reference, h) + rounding * fabs(ref) + (dtype == SINKATTN_FP16 ? 0x1p-24 : 0x1p-126);
        CHECK(agree(value, ref, tolerance), "ds_aux[%" PRId64 "] is %.9g, the oracle says %.9g: %s", h, value, ref, what);
    }
}

void sample_check(const sample *s, const sample *reference, const char *what) {
    static const char *const gradient_names[] = {"dq", "dk", "dv"};
    const array *list[3], *expected[3];
    const int count = outputs(s, list);
    outputs(reference, expected);
    for (int i = 0; i < count; i++)
        check_array(count == 1 ? "out" : gradient_names[i], list[i], expected[i], tolerance_of(&s->problem), what);
    if (count == 1) {
        check_lse(s, s->lse, reference->lse, what);
        check_lse(s, s->lse_raw, reference->lse_raw, what);
    }
    if (s->ds_aux) check_ds_aux(s, reference, what);
}
