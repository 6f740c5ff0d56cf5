/* SPDX-License-Identifier: Apache-2.0
 *
 * libFuzzer on the C API. An input is a struct header, whose zero bytes mean a plain small call, and a stream of bytes for strides and
 * lengths. Every buffer ends where malloc ends. A call is refused in a sentence, or its outputs are the oracle's.
 *
 * The seeds of corpus/ are written by this file itself: cc -DSA_WRITE_SEEDS -Icsrc -Icsrc/include, then run it with the folder's name.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/layout.h"
#include "core/numerics.h"

typedef struct header {
    uint8_t op, dtype, s_aux_dtype, level, workers, packed, batch, num_kv_heads, group, head_dim, q_len, k_len, window, left, right, sinks,
            page_size, num_pages, num_splits, invariant, scale, missing, seed;
} header;

typedef struct stream {
    const uint8_t *data;
    size_t left;
} stream;

#define REQUIRE(ok, ...) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, __VA_ARGS__); \
            abort(); \
        } \
    } while (0)

static uint8_t take(stream *s) {
    if (s->left == 0) return 0;
    s->left--;
    return *s->data++;
}

static int32_t take_int32(stream *s) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits = bits << 8 | take(s);
    return (int32_t)bits;
}

enum { FIRST_SPECIAL = 240 };

/* Small for most bytes; what sizes must survive for the last sixteen. */
static int64_t size_of(uint8_t byte, int64_t largest, bool *strange) {
    static const int64_t specials[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 1, INT32_MAX, INT64_C(1) << 31, INT64_C(1) << 40,
            INT64_C(1) << 48, (INT64_C(1) << 48) + 1, INT64_C(1) << 62, -2, INT32_MIN, 4, 1000003, INT64_C(1) << 33, 65536};
    if (byte < FIRST_SPECIAL) return byte % (largest + 1);
    *strange = true;
    return specials[byte - FIRST_SPECIAL];
}

/* Mostly head_dim, by 0; then a width up to it; then something that must be refused. */
static int32_t head_dim_v_of(uint8_t byte, int64_t head_dim, bool *strange) {
    if (byte < 64 || head_dim < 8 || head_dim > SA_MAX_HEAD_DIM) return 0;
    const int32_t refused[] = {(int32_t)head_dim + 8, 12, -8, INT32_MIN, INT32_MAX, 1 << 20, 4, 1};
    const int64_t widest = sa_min(head_dim, SA_MAX_HEAD_DIM_V) / 8;
    if (byte < 120) return (int32_t)(8 * (widest - byte % widest));
    *strange = true;
    return refused[byte % 8];
}

static sinkattn_problem problem_of(const header *h, bool *strange) {
    bool odd_window = false;
    sinkattn_problem p = {.op = (sinkattn_op)(h->op % 4), .dtype = (sinkattn_dtype)((h->dtype + SINKATTN_FP32) % 6)};
    p.s_aux_dtype = (sinkattn_dtype)(h->s_aux_dtype % 6);
    p.packed = h->packed & 1;
    p.batch = size_of((uint8_t)(h->batch + 1), 3, strange);
    p.num_kv_heads = size_of((uint8_t)(h->num_kv_heads + 1), 3, strange);
    p.num_q_heads = h->group < FIRST_SPECIAL && p.num_kv_heads >= 0 && p.num_kv_heads < 4 ? p.num_kv_heads * (1 + h->group % 5)
                                                                                          : size_of(h->group, 5, strange);
    p.head_dim =
            h->head_dim < FIRST_SPECIAL ? 8 * (1 + h->head_dim % (p.op == SINKATTN_DECODE ? 72 : 36)) : size_of(h->head_dim, 0, strange);
    p.head_dim_v = head_dim_v_of(h->packed >> 1, p.head_dim, strange);
    p.q_len = size_of((uint8_t)(h->q_len + 3), 40, strange);
    p.k_len = size_of((uint8_t)(h->k_len + 5), 230, strange);
    p.mask = (sinkattn_mask){.has_left = h->window & 1, .has_right = h->window & 2, .num_sink_tokens = size_of(h->sinks, 8, &odd_window)};
    if (p.mask.has_left || (h->window & 4)) p.mask.left = size_of(h->left, 200, &odd_window);
    if (p.mask.has_right || (h->window & 8)) p.mask.right = size_of(h->right, 40, &odd_window);
    if (h->page_size) {
        p.page_size = size_of(h->page_size, 40, strange);
        p.num_pages = size_of(h->num_pages, 9, strange);
        if (p.page_size > 0 && p.page_size <= 40 && p.k_len >= 0) p.k_len -= (h->window & 16) ? 0 : p.k_len % p.page_size;
    }
    p.num_splits = size_of(h->num_splits, 6, &odd_window);
    p.invariant = h->invariant & 1;
    p.softmax_scale = h->scale == 255 ? (double)NAN : h->scale == 254 ? (double)INFINITY : h->scale / 300.0;
    while (!*strange && p.q_len > 1 && p.batch * p.num_q_heads * p.q_len * p.k_len * p.head_dim > 50000) p.q_len /= 2;
    return p;
}

typedef struct call {
    sinkattn_decode_args decode; /* its fwd serves all */
    sinkattn_bwd_args bwd;
    int64_t stats; /* elements of lse */
    bool refused;  /* something in it must be refused */
    void *blocks[24];
    int num_blocks;
} call;

static void *allocate(call *c, int64_t bytes) {
    void *block = malloc(bytes > 0 ? (size_t)bytes : 1);
    REQUIRE(block, "out of memory");
    return c->blocks[c->num_blocks++] = block;
}

/* Between -2 and 2, the same for every element of a call. */
static double value_at(const header *h, int tensor, int64_t i) {
    const uint64_t x =
            ((uint64_t)i + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ ((uint64_t)(h->seed + 256 * tensor) * UINT64_C(0xbf58476d1ce4e5b9));
    return (double)((x >> 40) % 4001) / 1000.0 - 2.0;
}

static int64_t stride_of(call *c, stream *s, int64_t size, int64_t stride, int64_t step, bool written) {
    const uint8_t byte = take(s);
    if (byte < 100) return stride;
    if (byte < 200) return stride + step * (byte % 4);
    const int64_t hostile[] = {-step, 1, INT64_MAX - 7, INT64_C(1) << 62};
    const bool expanded = byte < 220;
    if (size > 1 && (!expanded || written)) c->refused = true;
    return expanded ? 0 : hostile[byte % 4];
}

/* What an axis of `size` steps spans, for the next axis to step over; a hostile stride spans nothing sane. */
static int64_t span_of(int64_t size, int64_t stride, int64_t inner) {
    return size > 1 && stride > 0 && stride < 1 << 20 ? size * stride : inner;
}

/* A decode's keys lie in a cache, whether its rows are packed or not. */
static int64_t batch_of(const sinkattn_problem *p, bool is_k) {
    if (is_k && p->page_size) return p->num_pages;
    return p->packed && !(is_k && p->op == SINKATTN_DECODE) ? 1 : p->batch;
}

static int64_t rows_of(const sinkattn_problem *p, bool is_k) { return is_k ? (p->page_size ? p->page_size : p->k_len) : p->q_len; }

static sinkattn_tensor tensor_of(
        call *c, const header *h, stream *s, const sinkattn_problem *p, bool is_k, int64_t head_dim, bool written) {
    const int64_t bytes = sa_dtype_bytes(p->dtype), step = 16 / bytes;
    const int64_t batch = batch_of(p, is_k), rows = rows_of(p, is_k);
    const int64_t heads = is_k ? p->num_kv_heads : p->num_q_heads;
    const bool was_refused = c->refused, empty = batch == 0 || rows == 0 || heads == 0;
    sinkattn_tensor t = {0};
    t.head_stride = stride_of(c, s, heads, head_dim, step, written);
    t.row_stride = stride_of(c, s, rows, span_of(heads, t.head_stride, head_dim), step, written);
    t.batch_stride = stride_of(c, s, batch, span_of(rows, t.row_stride, span_of(heads, t.head_stride, head_dim)), step, written);
    if (empty) {
        c->refused = was_refused;
        return t;
    }
    const int64_t extent =
            c->refused ? 64 : (batch - 1) * t.batch_stride + (rows - 1) * t.row_stride + (heads - 1) * t.head_stride + head_dim;
    const int64_t skew = take(s) > 250 ? 8 : 0; /* a base that is not aligned to 16 bytes */
    t.data = (char *)allocate(c, extent * bytes + skew) + skew;
    if (skew) c->refused = true;
    for (int64_t i = 0; i < extent; i++) sa_store(t.data, p->dtype, i, written ? (double)NAN : value_at(h, c->num_blocks, i));
    return t;
}

static void *stats_of(call *c, const header *h, const sinkattn_problem *p, bool written) {
    const sinkattn_dtype dtype = p->dtype == SINKATTN_FP64 ? SINKATTN_FP64 : SINKATTN_FP32;
    void *stats = allocate(c, c->stats * sa_dtype_bytes(dtype));
    for (int64_t i = 0; i < c->stats; i++) sa_store(stats, dtype, i, written ? (double)NAN : 5.0 + value_at(h, c->num_blocks, i));
    return stats;
}

/* Mostly in order, sometimes anything. */
static int32_t *cu_seqlens_of(call *c, stream *s, int64_t batch, int64_t total) {
    int32_t *cu_seqlens = allocate(c, (batch + 1) * (int64_t)sizeof *cu_seqlens);
    const bool hostile = take(s) > 200;
    cu_seqlens[0] = hostile ? take_int32(s) : 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t left = total - cu_seqlens[b];
        cu_seqlens[b + 1] =
                hostile ? take_int32(s) : (int32_t)(cu_seqlens[b] + (b == batch - 1 && !(take(s) & 1) ? left : take(s) % (left + 1)));
    }
    return cu_seqlens;
}

static void add_cache(call *c, const header *h, stream *s, const sinkattn_problem *p) {
    const uint8_t kind = take(s);
    if (kind & 1) {
        int32_t *lengths = allocate(c, p->batch * (int64_t)sizeof *lengths);
        for (int64_t b = 0; b < p->batch; b++) lengths[b] = kind > 200 ? take_int32(s) : (int32_t)(take(s) % (p->k_len + 1));
        c->decode.cache_seqlens = lengths;
    }
    if (!p->page_size) return;
    const int64_t max_pages = p->k_len / p->page_size;
    int32_t *table = allocate(c, p->batch * max_pages * (int64_t)sizeof *table);
    for (int64_t i = 0; i < p->batch * max_pages; i++)
        table[i] = (kind & 2) && take(s) > 200 ? take_int32(s) : (int32_t)((i * 7 + h->seed) % sa_max(p->num_pages, 1));
    c->decode.block_table = (h->missing & 8) ? NULL : table;
    c->decode.block_table_stride = max_pages;
}

static call call_of(const header *h, stream s, const sinkattn_problem *p) {
    call c = {.stats = (p->packed ? 1 : p->batch) * p->num_q_heads * p->q_len};
    const bool backward = p->op == SINKATTN_BWD;
    sinkattn_fwd_args fwd = {.problem = *p};
    const int64_t head_dim_v = sa_head_dim_v(p);
    fwd.q = tensor_of(&c, h, &s, p, false, p->head_dim, false);
    fwd.k = tensor_of(&c, h, &s, p, true, p->head_dim, false);
    fwd.v = p->op == SINKATTN_DECODE && (h->missing & 64) ? fwd.k : tensor_of(&c, h, &s, p, true, head_dim_v, false);
    fwd.out = tensor_of(&c, h, &s, p, false, head_dim_v, !backward);
    fwd.lse = stats_of(&c, h, p, !backward);
    if (!backward && h->missing & 16) fwd.lse_raw = stats_of(&c, h, p, true);
    if (p->s_aux_dtype) {
        void *s_aux = allocate(&c, p->num_q_heads * sa_dtype_bytes(p->s_aux_dtype));
        for (int64_t i = 0; i < p->num_q_heads; i++) sa_store(s_aux, p->s_aux_dtype, i, value_at(h, 20, i));
        fwd.s_aux = (h->missing & 1) ? NULL : s_aux;
    }
    if (p->packed) {
        fwd.cu_seqlens_q = (h->missing & 2) ? NULL : cu_seqlens_of(&c, &s, p->batch, p->q_len);
        /* required, and of a decode surplus */
        if (((h->missing & 4) != 0) == (p->op == SINKATTN_DECODE)) fwd.cu_seqlens_k = cu_seqlens_of(&c, &s, p->batch, p->k_len);
    }
    if (p->op == SINKATTN_DECODE) add_cache(&c, h, &s, p);
    c.decode.fwd = c.bwd.fwd = fwd;
    if (!backward) return c;
    c.bwd.dout = tensor_of(&c, h, &s, p, false, head_dim_v, false);
    c.bwd.dlse = (h->missing & 16) ? NULL : stats_of(&c, h, p, false);
    c.bwd.dq = tensor_of(&c, h, &s, p, false, p->head_dim, true);
    c.bwd.dk = tensor_of(&c, h, &s, p, true, p->head_dim, true);
    c.bwd.dv = tensor_of(&c, h, &s, p, true, head_dim_v, true);
    if (p->s_aux_dtype && !(h->missing & 32)) c.bwd.ds_aux = allocate(&c, p->num_q_heads * sa_dtype_bytes(p->s_aux_dtype));
    return c;
}

static void free_call(call *c) {
    for (int i = 0; i < c->num_blocks; i++) free(c->blocks[i]);
}

/* Memory of exactly the size that the plan asks for: none where it asks for none. */
static sinkattn_context context_of(call *c, const sinkattn_plan *plan) {
    const int64_t bytes = plan->workspace_bytes;
    sinkattn_context context = {.workspace_bytes = bytes};
    if (bytes == 0) return context;
    context.workspace = allocate(c, bytes);
    memset(context.workspace, 0xff, (size_t)bytes);
    return context;
}

static sinkattn_status run(call *c, const sinkattn_problem *p, const sinkattn_device *device) {
    sinkattn_plan plan;
    sinkattn_status status = sinkattn_make_plan(p, device, &plan);
    if (status.code != SINKATTN_OK) return status;
    REQUIRE(plan.workspace_bytes >= 0 && plan.num_items >= 0 && plan.workers >= 1 && plan.num_splits >= 1, "an impossible plan\n");
    const sinkattn_context context = context_of(c, &plan);
    if (p->op == SINKATTN_FWD) return sinkattn_fwd(&c->bwd.fwd, &plan, &context);
    return p->op == SINKATTN_BWD ? sinkattn_bwd(&c->bwd, &plan, &context) : sinkattn_decode(&c->decode, &plan, &context);
}

/* The lse that a backward reads, by the oracle: with a made-up one P exceeds 1 and no two ways of rounding agree. out may be anything. */
static void make_lse(call *c, const sinkattn_problem *p) {
    const int64_t head_dim_v = sa_head_dim_v(p), row = p->num_q_heads * head_dim_v;
    sinkattn_fwd_args fwd = c->bwd.fwd;
    fwd.problem.op = SINKATTN_FWD;
    fwd.out = (sinkattn_tensor){NULL, p->q_len * row, row, head_dim_v};
    const sinkattn_device oracle = {.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_ORACLE, .workers = 1};
    sinkattn_plan plan;
    if (sinkattn_make_plan(&fwd.problem, &oracle, &plan).code != SINKATTN_OK) return; /* and the backward is refused too */
    fwd.out.data = allocate(c, (p->packed ? 1 : p->batch) * p->q_len * row * sa_dtype_bytes(p->dtype));
    const sinkattn_context context = context_of(c, &plan);
    if (sinkattn_fwd(&fwd, &plan, &context).code != SINKATTN_OK) c->refused = true;
}

/* Offset of the i-th row of [batch, rows, heads]. */
static int64_t row_offset(const sinkattn_tensor *t, int64_t i, int64_t rows, int64_t heads) {
    return sa_offset(t, i / heads / rows, i / heads % rows, i % heads);
}

static double largest_norm(const sinkattn_problem *p, const sinkattn_tensor *t, bool is_k) {
    const int64_t batch = batch_of(p, is_k), rows = rows_of(p, is_k);
    const int64_t heads = is_k ? p->num_kv_heads : p->num_q_heads;
    double largest = 0.0;
    for (int64_t i = 0; i < batch * rows * heads; i++) {
        double sum = 0.0;
        for (int64_t x = 0; x < p->head_dim; x++) {
            const double value = sa_load(t->data, p->dtype, row_offset(t, i, rows, heads) + x);
            sum += value * value;
        }
        largest = fmax(largest, sqrt(sum));
    }
    return largest;
}

/* What fp32 is held to. A score's rounding is in proportion to the size it may have, and exp makes of it a relative error of P. */
static double tolerance_of(const sinkattn_fwd_args *fwd) {
    const sinkattn_problem *p = &fwd->problem;
    return 2e-5 + 0x1p-22 * fabs(sa_softmax_scale(p)) * largest_norm(p, &fwd->q, false) * largest_norm(p, &fwd->k, true);
}

static void compare(const char *name, const sinkattn_problem *p, const sinkattn_tensor *a, const sinkattn_tensor *b, bool is_k,
        int64_t head_dim, double tolerance) {
    const int64_t batch = p->packed ? 1 : p->batch, rows = is_k ? p->k_len : p->q_len, heads = is_k ? p->num_kv_heads : p->num_q_heads;
    double largest = 1.0, furthest = 0.0;
    for (int64_t i = 0; i < batch * rows * heads; i++)
        for (int64_t x = 0; x < head_dim; x++) {
            const int64_t at = row_offset(a, i, rows, heads) + x, other = row_offset(b, i, rows, heads) + x;
            const double left = sa_load(a->data, p->dtype, at), right = sa_load(b->data, p->dtype, other);
            REQUIRE(isfinite(left) && isfinite(right), "%s: %g, the oracle says %g\n", name, left, right);
            largest = fmax(largest, fabs(right));
            furthest = fmax(furthest, fabs(left - right));
        }
    const double allowed = p->dtype == SINKATTN_BF16 ? 0.03 : p->dtype == SINKATTN_FP16 ? 0.004 : tolerance;
    REQUIRE(furthest <= allowed * largest, "%s: off by %g, largest %g, allowed %g of it\n", name, furthest, largest, allowed);
}

static void compare_stats(
        const char *name, sinkattn_dtype dtype, const void *a, const void *b, int64_t count, double absolute, double relative) {
    for (int64_t i = 0; i < count; i++) {
        const double left = sa_load(a, dtype, i), right = sa_load(b, dtype, i);
        REQUIRE(left == right || fabs(left - right) <= absolute + relative * fabs(right), "%s[%lld]: %g, the oracle says %g\n", name,
                (long long)i, left, right);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    header h = {0};
    memcpy(&h, data, size < sizeof h ? size : sizeof h);
    const stream s = {data + (size < sizeof h ? size : sizeof h), size < sizeof h ? 0 : size - sizeof h};
    bool strange = false;
    const sinkattn_problem p = problem_of(&h, &strange);
    sinkattn_device device;
    REQUIRE(sinkattn_query_cpu(1 + h.workers % 3, &device).code == SINKATTN_OK, "no CPU\n");
    const sinkattn_device oracle = {.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_ORACLE, .workers = 1};
    device.arch -= (int32_t)(h.level % (device.arch + 1));
    sinkattn_plan plan;
    sinkattn_status status = sinkattn_make_plan(&p, &device, &plan);
    REQUIRE((status.code == SINKATTN_OK) == (status.message[0] == 0), "code %d with message %s\n", (int)status.code, status.message);
    if (strange) return 0; /* sizes that no memory backs are planned, not run */
    if (status.code != SINKATTN_OK && (p.op > SINKATTN_DECODE || p.dtype < SINKATTN_BF16 || p.dtype > SINKATTN_FP64)) return 0;

    call ours = call_of(&h, s, &p), theirs = call_of(&h, s, &p);
    if (p.op == SINKATTN_BWD) {
        make_lse(&ours, &p);
        make_lse(&theirs, &p);
    }
    status = run(&ours, &p, &device);
    REQUIRE(!ours.refused || status.code != SINKATTN_OK, "a call that must be refused ran\n");
    REQUIRE((status.code == SINKATTN_OK) == (status.message[0] == 0), "code %d with message %s\n", (int)status.code, status.message);
    const sinkattn_status expected = run(&theirs, &p, &oracle);
    REQUIRE(expected.code == status.code, "code %d, %s; the oracle says %d, %s\n", (int)status.code, status.message, (int)expected.code,
            expected.message);
    const sinkattn_fwd_args *fwd = &ours.bwd.fwd;
    const int64_t head_dim_v = sa_head_dim_v(&p);
    const double tolerance = status.code == SINKATTN_OK ? tolerance_of(fwd) : 0.0;
    if (status.code == SINKATTN_OK && p.op != SINKATTN_BWD) {
        const sinkattn_dtype lse_dtype = p.dtype == SINKATTN_FP64 ? SINKATTN_FP64 : SINKATTN_FP32;
        compare("out", &p, &fwd->out, &theirs.bwd.fwd.out, false, head_dim_v, tolerance);
        compare_stats("lse", lse_dtype, fwd->lse, theirs.bwd.fwd.lse, ours.stats, tolerance, 2e-5);
        if (fwd->lse_raw) compare_stats("lse_raw", lse_dtype, fwd->lse_raw, theirs.bwd.fwd.lse_raw, ours.stats, tolerance, 2e-5);
    } else if (status.code == SINKATTN_OK) {
        compare("dq", &p, &ours.bwd.dq, &theirs.bwd.dq, false, p.head_dim, tolerance);
        compare("dk", &p, &ours.bwd.dk, &theirs.bwd.dk, true, p.head_dim, tolerance);
        compare("dv", &p, &ours.bwd.dv, &theirs.bwd.dv, true, head_dim_v, tolerance);
        if (ours.bwd.ds_aux) compare_stats("ds_aux", p.s_aux_dtype, ours.bwd.ds_aux, theirs.bwd.ds_aux, p.num_q_heads, 0.03, 0.03);
    }
    free_call(&ours);
    free_call(&theirs);
    return 0;
}

#ifdef SA_WRITE_SEEDS
int main(int argc, char **argv) {
    static const struct {
        const char *name;
        header h;
    } seeds[] = {
            {"forward", {.s_aux_dtype = 3, .q_len = 30, .k_len = 140, .group = 3}},
            {"window", {.dtype = 4, .s_aux_dtype = 1, .q_len = 36, .k_len = 200, .window = 3, .left = 60, .sinks = 4, .num_kv_heads = 1}},
            {"packed", {.packed = 1, .batch = 2, .q_len = 37, .k_len = 37, .window = 2, .s_aux_dtype = 2}},
            {"backward", {.op = 1, .s_aux_dtype = 3, .q_len = 20, .k_len = 40, .group = 2, .window = 2}},
            {"backward_packed", {.op = 1, .packed = 1, .batch = 1, .dtype = 4, .q_len = 20, .k_len = 60, .window = 3, .left = 7}},
            {"decode", {.op = 2, .s_aux_dtype = 1, .dtype = 4, .k_len = 220, .window = 2, .num_splits = 2, .workers = 2}},
            {"decode_paged",
                    {.op = 2, .s_aux_dtype = 1, .k_len = 220, .page_size = 16, .num_pages = 9, .window = 3, .left = 50, .sinks = 3}},
            {"decode_packed", {.op = 2,
                                      .packed = 1,
                                      .batch = 2,
                                      .s_aux_dtype = 1,
                                      .q_len = 30,
                                      .k_len = 90,
                                      .page_size = 3,
                                      .num_pages = 9,
                                      .window = 3,
                                      .left = 40}},
            {"decode_latent",
                    {.op = 2, .packed = 128, .head_dim = 71, .missing = 64, .k_len = 90, .page_size = 3, .num_pages = 9, .window = 3}},
            {"large_scores",
                    {.op = 1, .level = 168, .num_kv_heads = 13, .group = 21, .head_dim = 64, .q_len = 128, .k_len = 21, .scale = 153}},
            {"narrow_values",
                    {.packed = 184, .head_dim = 23, .s_aux_dtype = 3, .q_len = 20, .k_len = 140, .window = 3, .left = 60, .dtype = 4}},
            {"narrow_values_backward", {.op = 1, .packed = 184, .head_dim = 23, .s_aux_dtype = 3, .q_len = 20, .k_len = 40, .window = 2}},
            {"double", {.dtype = 1, .s_aux_dtype = 4, .q_len = 9, .k_len = 9}},
    };
    for (size_t i = 0; argc == 2 && i < sizeof seeds / sizeof *seeds; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", argv[1], seeds[i].name);
        FILE *file = fopen(path, "wb");
        REQUIRE(file && fwrite(&seeds[i].h, sizeof seeds[i].h, 1, file) == 1 && fclose(file) == 0, "cannot write %s\n", path);
    }
    return argc == 2 ? 0 : 2;
}
#endif
