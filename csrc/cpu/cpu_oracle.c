/* SPDX-License-Identifier: Apache-2.0
 *
 * The definition of correct: attention with a sink in double, three loops, no tiles.
 *
 *     q, dq               [batch, q_len, num_q_heads, head_dim]         dtype; packed tensors drop batch
 *     k, dk               [batch, k_len, num_kv_heads, head_dim]        dtype; or pages of a cache
 *     out, dout; v, dv    as q; as k, with head_dim_v in place of head_dim
 *     lse, dlse           [batch, num_q_heads, q_len]                   fp32, fp64 with fp64
 *
 * Every pass recomputes its scores, so that nothing is stored; the backward takes rows first (dq and ds_aux), then keys (dk and dv).
 */
#include "cpu/cpu_tile.h"

/* One head of one sequence. */
typedef struct head {
    const sinkattn_fwd_args *args;
    const sinkattn_decode_args *cache; /* NULL: k and v are plain tensors */
    int64_t b;
    sa_sequence sequence;
    sa_band band;
    int64_t q_head, kv_head, head_dim, head_dim_v;
    double scale, s; /* s is the head's logit, -inf when it has none */
} head;

static head head_at(const sinkattn_fwd_args *args, const sinkattn_decode_args *cache, int64_t b, int64_t q_head) {
    const sinkattn_problem *p = &args->problem;
    head h = {.args = args, .cache = cache, .b = b, .q_head = q_head, .head_dim = p->head_dim, .head_dim_v = sa_head_dim_v(p)};
    h.sequence = cache ? sa_cached_sequence(cache, b) : sa_sequence_at(args, b);
    h.band = sa_band_of(&p->mask, h.sequence.q_len, h.sequence.k_len);
    h.kv_head = q_head / (p->num_q_heads / p->num_kv_heads);
    h.scale = sa_softmax_scale(p);
    h.s = sa_s_aux(args, q_head);
    return h;
}

static int64_t q_offset(const head *h, const sinkattn_tensor *tensor, int64_t i) {
    return sa_offset(tensor, h->sequence.batch, h->sequence.q_begin + i, h->q_head);
}

/* -1 where a cache's page is unmapped: it was mapped when the run began. It reads as zeros. */
static int64_t k_offset(const head *h, const sinkattn_tensor *tensor, int64_t j) {
    if (h->cache) return sa_cache_offset(h->cache, tensor, h->b, j, h->kv_head);
    return sa_offset(tensor, h->sequence.batch, h->sequence.k_begin + j, h->kv_head);
}

static int64_t row_index(const head *h, int64_t i) { return sa_row_index(&h->args->problem, &h->sequence, h->q_head, i); }

static sinkattn_dtype lse_dtype(const sinkattn_problem *p) { return p->dtype == SINKATTN_FP64 ? SINKATTN_FP64 : SINKATTN_FP32; }

static void load_row(const head *h, const sinkattn_tensor *tensor, int64_t offset, double *row, int64_t n) {
    for (int64_t x = 0; x < n; x++) row[x] = sa_load(tensor->data, h->args->problem.dtype, offset + x);
}

static void store_row(const head *h, const sinkattn_tensor *tensor, int64_t offset, const double *row, int64_t n, double factor) {
    for (int64_t x = 0; x < n; x++) sa_store(tensor->data, h->args->problem.dtype, offset + x, factor * row[x]);
}

/* a . b, of n values and a row of a tensor */
static double dot(const head *h, const double *a, const sinkattn_tensor *b, int64_t offset, int64_t n) {
    double sum = 0.0;
    for (int64_t x = 0; x < n && offset != -1; x++) sum += a[x] * sa_load(b->data, h->args->problem.dtype, offset + x);
    return sum;
}

static void add_row(const head *h, double weight, const sinkattn_tensor *tensor, int64_t offset, double *sum, int64_t n) {
    for (int64_t x = 0; x < n && offset != -1; x++) sum[x] += weight * sa_load(tensor->data, h->args->problem.dtype, offset + x);
}

static double score(const head *h, const double *q, int64_t j) {
    return h->scale * dot(h, q, &h->args->k, k_offset(h, &h->args->k, j), h->head_dim);
}

/* exp(score - pivot): zero for a score of -inf, even against a pivot of -inf; NaN for +inf against itself, which has no limit. */
static double weight(double s, double pivot) { return s == -(double)INFINITY ? 0.0 : exp(s - pivot); }

static void forward_row(const head *h, int64_t i) {
    double q[SA_MAX_HEAD_DIM], out[SA_MAX_HEAD_DIM] = {0};
    load_row(h, &h->args->q, q_offset(h, &h->args->q, i), q, h->head_dim);

    /* 1: the pivot */
    double pivot = -(double)INFINITY;
    for (int64_t j = 0; j < h->sequence.k_len; j++)
        if (sa_visible(&h->band, i, j)) pivot = fmax(pivot, score(h, q, j));

    /* 2: sum and output over the keys */
    double sum = 0.0;
    for (int64_t j = 0; j < h->sequence.k_len; j++) {
        if (!sa_visible(&h->band, i, j)) continue;
        const double p = weight(score(h, q, j), pivot);
        sum += p;
        add_row(h, p, &h->args->v, k_offset(h, &h->args->v, j), out, h->head_dim_v);
    }

    /* 3: the sink, and normalise */
    const sa_row_end end = sa_end_row(pivot, sum, h->s);
    store_row(h, &h->args->out, q_offset(h, &h->args->out, i), out, h->head_dim_v, end.factor);
    sa_store(h->args->lse, lse_dtype(&h->args->problem), row_index(h, i), end.lse);
    if (h->args->lse_raw) sa_store(h->args->lse_raw, lse_dtype(&h->args->problem), row_index(h, i), end.lse_raw);
}

typedef struct run {
    const sinkattn_fwd_args *fwd;
    const sinkattn_bwd_args *bwd;
    const sinkattn_decode_args *decode;
} run;

/* item: (sequence, q head) */
static void forward_item(void *arg, int64_t item, int32_t worker) {
    (void)worker;
    const run *r = arg;
    const int64_t num_q_heads = r->fwd->problem.num_q_heads;
    const head h = head_at(r->fwd, r->decode, item / num_q_heads, item % num_q_heads);
    for (int64_t i = 0; i < h.sequence.q_len; i++) forward_row(&h, i);
}

/* What a row of the backward knows before it meets a key. */
typedef struct gradient_row {
    double q[SA_MAX_HEAD_DIM], dout[SA_MAX_HEAD_DIM];
    double lse, bias; /* bias: g - delta */
    double g;
} gradient_row;

static void load_gradient_row(const head *h, const sinkattn_bwd_args *bwd, int64_t i, gradient_row *row) {
    load_row(h, &bwd->fwd.q, q_offset(h, &bwd->fwd.q, i), row->q, h->head_dim);
    load_row(h, &bwd->dout, q_offset(h, &bwd->dout, i), row->dout, h->head_dim_v);
    row->lse = sa_load(bwd->fwd.lse, lse_dtype(&h->args->problem), row_index(h, i));
    row->g = bwd->dlse ? sa_load(bwd->dlse, lse_dtype(&h->args->problem), row_index(h, i)) : 0.0;
    row->bias = row->g - dot(h, row->dout, &bwd->fwd.out, q_offset(h, &bwd->fwd.out, i), h->head_dim_v);
}

/* P_ij, and dP_ij through dp */
static double probability(const head *h, const gradient_row *row, int64_t j, double *dp) {
    *dp = dot(h, row->dout, &h->args->v, k_offset(h, &h->args->v, j), h->head_dim_v);
    return weight(score(h, row->q, j), row->lse);
}

/* item: q head; writes dq of its rows and its ds_aux, which is summed over sequences */
static void backward_rows_item(void *arg, int64_t item, int32_t worker) {
    (void)worker;
    const sinkattn_bwd_args *bwd = ((const run *)arg)->bwd;
    double ds_aux = 0.0;
    for (int64_t b = 0; b < bwd->fwd.problem.batch; b++) {
        const head h = head_at(&bwd->fwd, NULL, b, item);
        for (int64_t i = 0; i < h.sequence.q_len; i++) {
            gradient_row row;
            load_gradient_row(&h, bwd, i, &row);
            double dq[SA_MAX_HEAD_DIM] = {0}, sum_p_dp = 0.0;
            for (int64_t j = 0; j < h.sequence.k_len; j++) {
                if (!sa_visible(&h.band, i, j)) continue;
                double dp;
                const double p = probability(&h, &row, j, &dp);
                sum_p_dp += p * dp;
                add_row(&h, p * (dp + row.bias), &bwd->fwd.k, k_offset(&h, &bwd->fwd.k, j), dq, h.head_dim);
            }
            store_row(&h, &bwd->dq, q_offset(&h, &bwd->dq, i), dq, h.head_dim, h.scale);
            ds_aux += sa_exp_minus(h.s, row.lse) * (row.g - sum_p_dp);
        }
    }
    if (bwd->ds_aux) sa_store(bwd->ds_aux, bwd->fwd.problem.s_aux_dtype, item, ds_aux);
}

/* item: (sequence, kv head); writes dk and dv of its keys, summed over the rows and heads that see them */
static void backward_keys_item(void *arg, int64_t item, int32_t worker) {
    (void)worker;
    const sinkattn_bwd_args *bwd = ((const run *)arg)->bwd;
    const sinkattn_problem *p = &bwd->fwd.problem;
    const int64_t b = item / p->num_kv_heads, kv_head = item % p->num_kv_heads, group = p->num_q_heads / p->num_kv_heads;
    const head first = head_at(&bwd->fwd, NULL, b, kv_head * group);
    for (int64_t j = 0; j < first.sequence.k_len; j++) {
        double dk[SA_MAX_HEAD_DIM] = {0}, dv[SA_MAX_HEAD_DIM] = {0};
        for (int64_t q_head = kv_head * group; q_head < (kv_head + 1) * group; q_head++) {
            const head h = head_at(&bwd->fwd, NULL, b, q_head);
            for (int64_t i = 0; i < h.sequence.q_len; i++) {
                if (!sa_visible(&h.band, i, j)) continue;
                gradient_row row;
                load_gradient_row(&h, bwd, i, &row);
                double dp;
                const double prob = probability(&h, &row, j, &dp), ds = prob * (dp + row.bias);
                for (int64_t x = 0; x < h.head_dim; x++) dk[x] += ds * row.q[x];
                for (int64_t x = 0; x < h.head_dim_v; x++) dv[x] += prob * row.dout[x];
            }
        }
        store_row(&first, &bwd->dk, k_offset(&first, &bwd->dk, j), dk, first.head_dim, first.scale);
        store_row(&first, &bwd->dv, k_offset(&first, &bwd->dv, j), dv, first.head_dim_v, 1.0);
    }
}

/* Packed rows past cu_seqlens[-1] belong to no sequence. */
static void forward_tail(const sinkattn_fwd_args *args) {
    const sinkattn_problem *p = &args->problem;
    if (!p->packed) return;
    const sa_range tail = sa_packed_tail(args->cu_seqlens_q, p->batch, p->q_len);
    sa_zero_rows(&args->out, p->dtype, tail, p->num_q_heads, sa_head_dim_v(p));
    for (int64_t q_head = 0; q_head < p->num_q_heads; q_head++)
        for (int64_t row = tail.begin; row < tail.end; row++) {
            sa_store(args->lse, lse_dtype(p), q_head * p->q_len + row, -(double)INFINITY);
            if (args->lse_raw) sa_store(args->lse_raw, lse_dtype(p), q_head * p->q_len + row, -(double)INFINITY);
        }
}

static void backward_tail(const sinkattn_bwd_args *args) {
    const sinkattn_problem *p = &args->fwd.problem;
    if (!p->packed) return;
    const sa_range tail_k = sa_packed_tail(args->fwd.cu_seqlens_k, p->batch, p->k_len);
    sa_zero_rows(&args->dq, p->dtype, sa_packed_tail(args->fwd.cu_seqlens_q, p->batch, p->q_len), p->num_q_heads, p->head_dim);
    sa_zero_rows(&args->dk, p->dtype, tail_k, p->num_kv_heads, p->head_dim);
    sa_zero_rows(&args->dv, p->dtype, tail_k, p->num_kv_heads, sa_head_dim_v(p));
}

/* The workspace holds the call's lengths. */
int64_t sa_cpu_oracle_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    (void)plan;
    sa_scratch scratch = {NULL, 0};
    sinkattn_decode_args args = {.fwd.problem = *problem};
    sa_take_cu_seqlens(&scratch, &args.fwd);
    if (problem->op == SINKATTN_DECODE) sa_take_cache_seqlens(&scratch, &args);
    return scratch.used ? scratch.used + 64 : 0;
}

sinkattn_status sa_fwd_cpu_oracle(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    sinkattn_fwd_args args = *(const sinkattn_fwd_args *)arguments;
    sa_scratch scratch = sa_scratch_of(context);
    sa_take_cu_seqlens(&scratch, &args);
    SA_TRY(sa_validate_cu_seqlens(&args));
    run r = {.fwd = &args};
    forward_tail(r.fwd);
    sa_parallel_for(context, plan->workers, r.fwd->problem.batch * r.fwd->problem.num_q_heads, forward_item, &r);
    return sa_ok();
}

sinkattn_status sa_bwd_cpu_oracle(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    sinkattn_bwd_args args = *(const sinkattn_bwd_args *)arguments;
    sa_scratch scratch = sa_scratch_of(context);
    sa_take_cu_seqlens(&scratch, &args.fwd);
    SA_TRY(sa_validate_cu_seqlens(&args.fwd));
    run r = {.bwd = &args};
    const sinkattn_problem *p = &args.fwd.problem;
    backward_tail(r.bwd);
    sa_parallel_for(context, plan->workers, p->num_q_heads, backward_rows_item, &r);
    sa_parallel_for(context, plan->workers, p->batch * p->num_kv_heads, backward_keys_item, &r);
    return sa_ok();
}

sinkattn_status sa_decode_cpu_oracle(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    sinkattn_decode_args args = *(const sinkattn_decode_args *)arguments;
    sa_scratch scratch = sa_scratch_of(context);
    sa_take_cu_seqlens(&scratch, &args.fwd);
    sa_take_cache_seqlens(&scratch, &args);
    SA_TRY(sa_validate_cache(&args));
    run r = {.fwd = &args.fwd, .decode = &args};
    forward_tail(r.fwd);
    sa_parallel_for(context, plan->workers, r.fwd->problem.batch * r.fwd->problem.num_q_heads, forward_item, &r);
    sa_pack_nvfp4(r.decode, plan, context);
    return sa_ok();
}
