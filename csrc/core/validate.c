/* SPDX-License-Identifier: Apache-2.0
 *
 * Every rule of the interface, once, in the order null, dtype, shape, stride, alignment, overlap, range; where tensors lie is checked in
 * validate_layout.c. Products of sizes are never formed unchecked.
 */
#include <float.h>
#include <inttypes.h>
#include <math.h>

#include "core.h"
#include "layout.h"
#include "numerics.h"
#include "nvfp4.h"
#include "validate.h"

/* No size reaches a tensor of more elements, which leaves room to count bytes, splits and statistics in int64. */
#define SA_MAX_ELEMENTS (INT64_C(1) << 48)

/* A decode's keys lie in a cache, whatever its rows are. */
static bool keys_are_packed(const sinkattn_problem *p) { return p->packed && p->op != SINKATTN_DECODE; }

static void add_rows_of_q(sa_checked *all, const char *name, const sinkattn_tensor *tensor, int64_t head_dim, bool written) {
    const sinkattn_problem *p = all->problem;
    all->tensors[all->num_tensors++] =
            (sa_checked_tensor){name, tensor, p->packed ? 1 : p->batch, p->q_len, p->num_q_heads, head_dim, written};
}

static void add_rows_of_k(sa_checked *all, const char *name, const sinkattn_tensor *tensor, int64_t head_dim, bool written) {
    const sinkattn_problem *p = all->problem;
    sa_checked_tensor o = {name, tensor, keys_are_packed(p) ? 1 : p->batch, p->k_len, p->num_kv_heads, head_dim, written};
    if (p->page_size != 0) {
        o.batch = p->num_pages;
        o.rows = p->page_size;
    }
    all->tensors[all->num_tensors++] = o;
}

static sa_checked fwd_tensors(const sinkattn_fwd_args *args, bool out_written) {
    sa_checked all = {.problem = &args->problem};
    const int64_t head_dim = args->problem.head_dim, head_dim_v = sa_head_dim_v(&args->problem);
    add_rows_of_q(&all, "q", &args->q, head_dim, false);
    add_rows_of_k(&all, "k", &args->k, head_dim, false);
    add_rows_of_k(&all, "v", &args->v, head_dim_v, false);
    add_rows_of_q(&all, "out", &args->out, head_dim_v, out_written);
    return all;
}

static sa_checked bwd_tensors(const sinkattn_bwd_args *args) {
    sa_checked all = fwd_tensors(&args->fwd, false);
    const int64_t head_dim = args->fwd.problem.head_dim, head_dim_v = sa_head_dim_v(&args->fwd.problem);
    add_rows_of_q(&all, "dout", &args->dout, head_dim_v, false);
    add_rows_of_q(&all, "dq", &args->dq, head_dim, true);
    add_rows_of_k(&all, "dk", &args->dk, head_dim, true);
    add_rows_of_k(&all, "dv", &args->dv, head_dim_v, true);
    return all;
}

static sinkattn_status null_error(const char *name, const char *rule) {
    return sa_status(SINKATTN_INVALID, "%s is NULL; it must be given %s", name, rule);
}

static sinkattn_status surplus_error(const char *name, const char *rule) {
    return sa_status(SINKATTN_INVALID, "%s is given; it must be NULL %s", name, rule);
}

static sinkattn_status check_tensors_null(const sa_checked *all) {
    for (int i = 0; i < all->num_tensors; i++) {
        const sa_checked_tensor *t = &all->tensors[i];
        if (sa_has_elements(t) && !t->tensor->data) return null_error(t->name, "where the tensor has elements");
    }
    return sa_ok();
}

static sinkattn_status check_fwd_null(const sinkattn_fwd_args *args) {
    const sinkattn_problem *p = &args->problem;
    if (!args->lse && (p->packed || p->batch != 0) && p->q_len != 0 && p->num_q_heads != 0) return null_error("lse", "where q has rows");
    if (!args->s_aux && p->num_q_heads != 0 && p->s_aux_dtype != SINKATTN_NO_DTYPE) return null_error("s_aux", "with an s_aux_dtype");
    if (args->s_aux && p->s_aux_dtype == SINKATTN_NO_DTYPE) return surplus_error("s_aux", "without an s_aux_dtype");
    if (p->packed && !args->cu_seqlens_q) return null_error("cu_seqlens_q", "for packed sequences");
    if (keys_are_packed(p) && !args->cu_seqlens_k) return null_error("cu_seqlens_k", "for packed sequences");
    if (p->packed && !keys_are_packed(p) && args->cu_seqlens_k)
        return surplus_error("cu_seqlens_k", "over a cache, whose keys in use are counted by cache_seqlens");
    if (!p->packed && args->cu_seqlens_q) return surplus_error("cu_seqlens_q", "unless sequences are packed");
    if (!p->packed && args->cu_seqlens_k) return surplus_error("cu_seqlens_k", "unless sequences are packed");
    return sa_ok();
}

static sinkattn_status check_dtype(const sinkattn_problem *p) {
    if (p->op < SINKATTN_FWD || p->op > SINKATTN_DECODE)
        return sa_status(SINKATTN_INVALID, "op is %d; it must be fwd (0), bwd (1) or decode (2)", (int)p->op);
    if (p->dtype < SINKATTN_BF16 || p->dtype > SINKATTN_FP64)
        return sa_status(SINKATTN_INVALID, "dtype is %s; it must be bf16, fp16, fp32 or fp64", sa_dtype_name(p->dtype));
    if (p->s_aux_dtype < SINKATTN_NO_DTYPE || p->s_aux_dtype > SINKATTN_FP64)
        return sa_status(SINKATTN_INVALID, "s_aux_dtype is %d; it must be bf16, fp16, fp32 or none", (int)p->s_aux_dtype);
    if (p->s_aux_dtype == SINKATTN_FP64 && p->dtype != SINKATTN_FP64)
        return sa_status(SINKATTN_INVALID, "s_aux is fp64; it must be bf16, fp16 or fp32 where q, k and v are %s", sa_dtype_name(p->dtype));
    return sa_ok();
}

static sinkattn_status check_at_least(const char *name, int64_t value, int64_t least) {
    if (value < least) return sa_status(SINKATTN_INVALID, "%s is %" PRId64 "; it must be at least %" PRId64, name, value, least);
    return sa_ok();
}

static bool product_fits(const int64_t *factors, int count) {
    int64_t product = 1;
    for (int i = 0; i < count; i++)
        if (__builtin_mul_overflow(product, sa_max(factors[i], 1), &product) || product > SA_MAX_ELEMENTS) return false;
    return true;
}

/* Zero factors count as one: a tensor may be empty while its siblings are not. */
static sinkattn_status check_sizes_fit(const sinkattn_problem *p) {
    const int64_t rows[] = {p->packed ? 1 : p->batch, p->q_len, p->num_q_heads, p->head_dim};
    const int64_t keys[] = {keys_are_packed(p) ? 1 : p->batch, p->k_len, p->num_q_heads, p->head_dim};
    const int64_t pages[] = {p->num_pages, p->page_size, p->num_kv_heads, p->head_dim};
    const int64_t heads[] = {p->batch, p->num_q_heads}, sequences[] = {p->batch, sa_max(p->q_len, p->k_len)};
    if (product_fits(rows, 4) && product_fits(keys, 4) && product_fits(pages, 4) && product_fits(heads, 2) && product_fits(sequences, 2))
        return sa_ok();
    return sa_status(SINKATTN_INVALID,
            "batch %" PRId64 ", q_len %" PRId64 ", k_len %" PRId64 ", num_q_heads %" PRId64
            " make too large a tensor; it must have at most 2^48 elements",
            p->batch, p->q_len, p->k_len, p->num_q_heads);
}

static sinkattn_status check_heads(const sinkattn_problem *p) {
    SA_TRY(check_at_least("num_q_heads", p->num_q_heads, 1));
    SA_TRY(check_at_least("num_kv_heads", p->num_kv_heads, 1));
    if (p->num_q_heads % p->num_kv_heads != 0)
        return sa_status(SINKATTN_INVALID, "num_q_heads is %" PRId64 "; it must be a multiple of num_kv_heads, %" PRId64, p->num_q_heads,
                p->num_kv_heads);
    const int64_t max_head_dim = p->op == SINKATTN_DECODE ? SA_MAX_HEAD_DIM : 256;
    if (p->head_dim < 8 || p->head_dim > max_head_dim || p->head_dim % 8 != 0)
        return sa_status(
                SINKATTN_INVALID, "head_dim is %" PRId64 "; it must be a multiple of 8 from 8 to %" PRId64, p->head_dim, max_head_dim);
    if (p->head_dim_v < 0 || p->head_dim_v > p->head_dim || p->head_dim_v % 8 != 0)
        return sa_status(SINKATTN_INVALID,
                "head_dim_v is %" PRId32 "; it must be a multiple of 8 from 8 to head_dim, %" PRId64 ", or 0 for head_dim itself",
                p->head_dim_v, p->head_dim);
    if (sa_head_dim_v(p) > SA_MAX_HEAD_DIM_V)
        return sa_status(SINKATTN_INVALID, "head_dim_v is %" PRId64 "; it must be at most %d, whatever head_dim is", sa_head_dim_v(p),
                SA_MAX_HEAD_DIM_V);
    return sa_ok();
}

static sinkattn_status check_packed(const sinkattn_problem *p) {
    if (!p->packed) return sa_ok();
    if (p->q_len > INT32_MAX || (keys_are_packed(p) && p->k_len > INT32_MAX))
        return sa_status(SINKATTN_INVALID, "%s has %" PRId64 " packed rows; cu_seqlens is int32, so it must have at most %d",
                p->q_len > INT32_MAX ? "q" : "k", p->q_len > INT32_MAX ? p->q_len : p->k_len, INT32_MAX);
    return sa_ok();
}

static sinkattn_status check_pages(const sinkattn_problem *p) {
    if (p->page_size == 0 && p->num_pages == 0) return sa_ok();
    if (p->op != SINKATTN_DECODE)
        return sa_status(SINKATTN_INVALID, "page_size is %" PRId64 "; it must be 0: only decode reads a paged cache", p->page_size);
    if (p->page_size == 0)
        return sa_status(SINKATTN_INVALID,
                "page_size is 0, num_pages is %" PRId64 "; pages must have 1 row or more, and a contiguous cache has no pages",
                p->num_pages);
    if (p->k_len % p->page_size != 0)
        return sa_status(SINKATTN_INVALID, "k_len is %" PRId64 "; it must be a multiple of page_size, %" PRId64, p->k_len, p->page_size);
    return sa_ok();
}

static sinkattn_status check_shape(const sinkattn_problem *p) {
    SA_TRY(check_at_least("batch", p->batch, 0));
    SA_TRY(check_at_least("q_len", p->q_len, 0));
    SA_TRY(check_at_least("k_len", p->k_len, 0));
    SA_TRY(check_heads(p));
    SA_TRY(check_at_least("page_size", p->page_size, 0));
    SA_TRY(check_at_least("num_pages", p->num_pages, 0));
    SA_TRY(check_packed(p));
    SA_TRY(check_pages(p));
    if (sa_max(p->q_len, p->k_len) > SA_MAX_LEN)
        return sa_status(SINKATTN_INVALID, "%s is %" PRId64 "; it must be at most 2^36", p->q_len > SA_MAX_LEN ? "q_len" : "k_len",
                sa_max(p->q_len, p->k_len));
    return check_sizes_fit(p);
}

/* Arrays: where they lie, and their alignment. */

static void add_array(sa_checked *all, const char *name, const void *data, int64_t bytes, bool written) {
    all->arrays[all->num_arrays++] = (sa_checked_array){name, data, bytes, written};
}

static int64_t lse_bytes(const sinkattn_problem *p) { return p->dtype == SINKATTN_FP64 ? 8 : 4; }

/* As lse. */
static void add_stats(sa_checked *all, const char *name, const void *data, bool written) {
    const sinkattn_problem *p = all->problem;
    add_array(all, name, data, (p->packed ? 1 : p->batch) * p->num_q_heads * p->q_len * lse_bytes(p), written);
}

/* As s_aux. */
static void add_logits(sa_checked *all, const char *name, const void *data, bool written) {
    add_array(all, name, data, all->problem->num_q_heads * sa_dtype_bytes(all->problem->s_aux_dtype), written);
}

static sinkattn_status check_fwd_alignment(const sinkattn_fwd_args *args) {
    SA_TRY(sa_check_aligned("lse", args->lse, lse_bytes(&args->problem)));
    SA_TRY(sa_check_aligned("lse_raw", args->lse_raw, lse_bytes(&args->problem)));
    if (args->s_aux) SA_TRY(sa_check_aligned("s_aux", args->s_aux, sa_dtype_bytes(args->problem.s_aux_dtype)));
    SA_TRY(sa_check_aligned("cu_seqlens_q", args->cu_seqlens_q, sizeof(int32_t)));
    return sa_check_aligned("cu_seqlens_k", args->cu_seqlens_k, sizeof(int32_t));
}

static sinkattn_status check_side(const char *side, bool bounded, int64_t reach) {
    if (bounded && reach < 0)
        return sa_status(SINKATTN_INVALID, "window_size_%s is %" PRId64 "; it must be -1 (unbounded) or at least 0", side, reach);
    if (!bounded && reach > 0)
        return sa_status(SINKATTN_INVALID, "window_size_%s is %" PRId64 " with has_%s false; it must be 0 where that side is unbounded",
                side, reach, side);
    return sa_ok();
}

sinkattn_status sa_validate_mask(const sinkattn_mask *mask) {
    SA_TRY(check_side("left", mask->has_left, mask->left));
    SA_TRY(check_side("right", mask->has_right, mask->right));
    return check_at_least("num_sink_tokens", mask->num_sink_tokens, 0);
}

static sinkattn_status check_splits(const sinkattn_problem *p) {
    if (p->op != SINKATTN_DECODE && (p->num_splits != 0 || p->invariant))
        return sa_status(
                SINKATTN_INVALID, "num_splits is %" PRId64 ", invariant is %d; both must be 0 but for decode", p->num_splits, p->invariant);
    if (p->packed && p->num_splits != 0 && p->num_splits != 1)
        return sa_status(SINKATTN_INVALID, "num_splits is %" PRId64 "; it must be 0 or 1 when packed is true", p->num_splits);
    if (p->invariant && p->num_splits != 0 && p->num_splits != 1)
        return sa_status(SINKATTN_INVALID, "num_splits is %" PRId64 "; it must be 0 or 1 when invariant is true", p->num_splits);
    return sa_ok();
}

static sinkattn_status check_range(const sinkattn_problem *p) {
    const double size = fabs(p->softmax_scale), largest = p->dtype == SINKATTN_FP64 ? DBL_MAX : (double)FLT_MAX;
    if (!(size == 0.0 || (size >= (double)FLT_MIN && size <= largest)))
        return sa_status(SINKATTN_INVALID, "softmax_scale is %g; it must be finite, and neither too large nor too small for %s",
                p->softmax_scale, p->dtype == SINKATTN_FP64 ? "fp64" : "fp32");
    SA_TRY(sa_validate_mask(&p->mask));
    return check_splits(p);
}

sinkattn_status sa_validate_problem(const sinkattn_problem *problem) {
    if (!problem) return null_error("problem", "always");
    SA_TRY(check_dtype(problem));
    SA_TRY(check_shape(problem));
    return check_range(problem);
}

static sinkattn_status check_op(const sinkattn_problem *p, sinkattn_op op) {
    if (p->op == op) return sa_ok();
    if (p->op < SINKATTN_FWD || p->op > SINKATTN_DECODE)
        return sa_status(SINKATTN_INVALID, "problem.op is %d; it must be %s for this call", (int)p->op, sa_op_name(op));
    return sa_status(SINKATTN_INVALID, "problem.op is %s; it must be %s for this call", sa_op_name(p->op), sa_op_name(op));
}

sinkattn_status sa_validate_fwd(const sinkattn_fwd_args *args) {
    if (!args) return null_error("args", "always");
    sa_checked all = fwd_tensors(args, true);
    SA_TRY(check_tensors_null(&all));
    SA_TRY(check_fwd_null(args));
    SA_TRY(check_op(&args->problem, SINKATTN_FWD));
    SA_TRY(check_dtype(&args->problem));
    SA_TRY(check_shape(&args->problem));
    add_stats(&all, "lse", args->lse, true);
    add_stats(&all, "lse_raw", args->lse_raw, true);
    add_logits(&all, "s_aux", args->s_aux, false);
    SA_TRY(sa_check_layout(&all));
    SA_TRY(check_fwd_alignment(args));
    return check_range(&args->problem);
}

sinkattn_status sa_validate_bwd(const sinkattn_bwd_args *args) {
    if (!args) return null_error("args", "always");
    const sinkattn_fwd_args *fwd = &args->fwd;
    sa_checked all = bwd_tensors(args);
    SA_TRY(check_tensors_null(&all));
    SA_TRY(check_fwd_null(fwd));
    if (fwd->s_aux && !args->ds_aux) return null_error("ds_aux", "with s_aux; a frozen s_aux is passed as NULL");
    if (!fwd->s_aux && args->ds_aux) return surplus_error("ds_aux", "without s_aux");
    if (fwd->lse_raw) return surplus_error("lse_raw", "in a backward");
    SA_TRY(check_op(&fwd->problem, SINKATTN_BWD));
    SA_TRY(check_dtype(&fwd->problem));
    SA_TRY(check_shape(&fwd->problem));
    add_stats(&all, "lse", fwd->lse, false);
    add_stats(&all, "dlse", args->dlse, false);
    add_logits(&all, "s_aux", fwd->s_aux, false);
    add_logits(&all, "ds_aux", args->ds_aux, true);
    SA_TRY(sa_check_layout(&all));
    SA_TRY(check_fwd_alignment(fwd));
    SA_TRY(sa_check_aligned("dlse", args->dlse, lse_bytes(&fwd->problem)));
    if (args->ds_aux) SA_TRY(sa_check_aligned("ds_aux", args->ds_aux, sa_dtype_bytes(fwd->problem.s_aux_dtype)));
    return check_range(&fwd->problem);
}

static sinkattn_status check_table_null(const sinkattn_decode_args *args) {
    const sinkattn_problem *p = &args->fwd.problem;
    if (p->page_size != 0 && !args->block_table && p->batch != 0 && p->k_len != 0) return null_error("block_table", "for a paged cache");
    if (p->page_size == 0 && args->block_table) return surplus_error("block_table", "when page_size is 0");
    return sa_ok();
}

static sinkattn_status check_host_null(const sinkattn_decode_args *args) {
    const sinkattn_tier *host = &args->host;
    if (host->num_pages != 0 && args->fwd.problem.page_size == 0)
        return sa_status(
                SINKATTN_INVALID, "host.num_pages is %" PRId64 "; it must be 0 when page_size is 0 (contiguous cache)", host->num_pages);
    return sa_ok();
}

static sinkattn_status check_host_strides(const sinkattn_decode_args *args) {
    const sinkattn_problem *p = &args->fwd.problem;
    const sinkattn_tensor *tiers[2][2] = {{&args->fwd.k, &args->host.k}, {&args->fwd.v, &args->host.v}};
    if (args->host.num_pages == 0) return sa_ok();
    for (int i = 0; i < 2; i++) {
        const sinkattn_tensor *cache = tiers[i][0], *host = tiers[i][1];
        if ((args->host.num_pages > 1 && host->batch_stride != cache->batch_stride) ||
                (p->page_size > 1 && host->row_stride != cache->row_stride) ||
                (p->num_kv_heads > 1 && host->head_stride != cache->head_stride))
            return sa_status(SINKATTN_INVALID,
                    "host.%s has strides %" PRId64 ", %" PRId64 ", %" PRId64 "; they must be the cache's, %" PRId64 ", %" PRId64
                    ", %" PRId64,
                    i ? "v" : "k", host->batch_stride, host->row_stride, host->head_stride, cache->batch_stride, cache->row_stride,
                    cache->head_stride);
    }
    return sa_ok();
}

static sinkattn_status check_extras(const sinkattn_decode_args *args) {
    if (args->fwd.problem.extras || (!args->host.num_pages && !args->nvfp4.values)) return sa_ok();
    return sa_status(SINKATTN_INVALID, "problem.extras is false; it must be true with host pages or nvfp4");
}

static sinkattn_status check_nvfp4(const sinkattn_decode_args *args) {
    const sinkattn_nvfp4 *nvfp4 = &args->nvfp4;
    const int64_t head_dim_v = sa_head_dim_v(&args->fwd.problem);
    if (nvfp4->values && args->fwd.problem.packed) return surplus_error("nvfp4.values", "when packed is true");
    if (!nvfp4->values) return nvfp4->scales ? surplus_error("nvfp4.scales", "without nvfp4.values") : sa_ok();
    if (head_dim_v % SA_NVFP4_BLOCK != 0)
        return sa_status(SINKATTN_INVALID, "%s is %" PRId64 "; it must be a multiple of %d for NVFP4",
                head_dim_v == args->fwd.problem.head_dim ? "head_dim" : "head_dim_v", head_dim_v, SA_NVFP4_BLOCK);
    if (!nvfp4->scales) return null_error("nvfp4.scales", "with nvfp4.values");
    SA_TRY(sa_check_aligned("nvfp4.values", nvfp4->values, sizeof(uint16_t)));
    if (nvfp4->global_scale != 0.0 && !(nvfp4->global_scale >= (double)FLT_MIN && nvfp4->global_scale <= (double)FLT_MAX))
        return sa_status(SINKATTN_INVALID, "nvfp4.global_scale is %g; it must be positive and neither too large nor too small for fp32",
                nvfp4->global_scale);
    return sa_ok();
}

static sinkattn_status check_block_table(const sinkattn_decode_args *args) {
    const sinkattn_problem *p = &args->fwd.problem;
    if (p->page_size == 0) return sa_ok();
    const int64_t max_pages = p->k_len / p->page_size;
    int64_t extent;
    if (args->block_table_stride < 0 || __builtin_mul_overflow(sa_max(p->batch - 1, 0), args->block_table_stride, &extent) ||
            __builtin_add_overflow(extent, max_pages, &extent) || extent > INT64_MAX / (int64_t)sizeof(int32_t))
        return sa_status(SINKATTN_INVALID, "block_table_stride is %" PRId64 "; it must be at least 0 and its bytes countable in int64",
                args->block_table_stride);
    return sa_ok();
}

sinkattn_status sa_validate_decode(const sinkattn_decode_args *args) {
    if (!args) return null_error("args", "always");
    const sinkattn_problem *p = &args->fwd.problem;
    sa_checked all = fwd_tensors(&args->fwd, true);
    SA_TRY(check_at_least("host.num_pages", args->host.num_pages, 0));
    const int64_t host_pages = args->host.num_pages, head_dim_v = sa_head_dim_v(p);
    all.tensors[all.num_tensors++] =
            (sa_checked_tensor){"host.k", &args->host.k, host_pages, p->page_size, p->num_kv_heads, p->head_dim, false};
    all.tensors[all.num_tensors++] =
            (sa_checked_tensor){"host.v", &args->host.v, host_pages, p->page_size, p->num_kv_heads, head_dim_v, false};
    SA_TRY(check_tensors_null(&all));
    SA_TRY(check_fwd_null(&args->fwd));
    SA_TRY(check_table_null(args));
    SA_TRY(check_host_null(args));
    SA_TRY(check_extras(args));
    SA_TRY(check_op(p, SINKATTN_DECODE));
    SA_TRY(check_dtype(p));
    SA_TRY(check_shape(p));
    add_stats(&all, "lse", args->fwd.lse, true);
    add_stats(&all, "lse_raw", args->fwd.lse_raw, true);
    add_logits(&all, "s_aux", args->fwd.s_aux, false);
    const int64_t num_outputs = p->batch * p->q_len * p->num_q_heads * head_dim_v;
    add_array(&all, "nvfp4.values", args->nvfp4.values, num_outputs / 2, true);
    add_array(&all, "nvfp4.scales", args->nvfp4.scales, num_outputs / SA_NVFP4_BLOCK, true);
    SA_TRY(sa_check_layout(&all));
    SA_TRY(check_block_table(args));
    SA_TRY(check_host_strides(args));
    SA_TRY(check_nvfp4(args));
    SA_TRY(check_fwd_alignment(&args->fwd));
    SA_TRY(sa_check_aligned("cache_seqlens", args->cache_seqlens, sizeof(int32_t)));
    SA_TRY(sa_check_aligned("block_table", args->block_table, sizeof(int32_t)));
    return check_range(p);
}

static sinkattn_status check_slots_null(const sinkattn_append_args *args) {
    const sinkattn_problem *p = &args->cache.fwd.problem;
    const char *const rule = "with slot_mapping";
    if (p->q_len > 0 && !args->slot_mapping) return null_error("slot_mapping", "when packed is true");
    if (args->cache.cache_seqlens) return surplus_error("cache.cache_seqlens", rule);
    if (args->cache_seqlens) return surplus_error("cache_seqlens", rule);
    if (args->cache.block_table) return surplus_error("cache.block_table", rule);
    return check_at_least("page_size", p->page_size, 1);
}

static sinkattn_status check_append_null(const sinkattn_append_args *args) {
    const sinkattn_decode_args *cache = &args->cache;
    const sinkattn_problem *p = &cache->fwd.problem;
    if (p->packed) return check_slots_null(args);
    if (args->slot_mapping) return surplus_error("slot_mapping", "unless packed is true");
    if (p->batch != 0 && !cache->cache_seqlens) return null_error("cache.cache_seqlens", "to say where new keys go");
    if (p->batch != 0 && !args->cache_seqlens) return null_error("cache_seqlens", "for the keys in use afterwards");
    return check_table_null(cache);
}

sinkattn_status sa_validate_append(const sinkattn_append_args *args) {
    if (!args) return null_error("args", "always");
    const sinkattn_decode_args *cache = &args->cache;
    const sinkattn_problem *p = &cache->fwd.problem;
    sa_checked all = {.problem = p};
    const int64_t batch = p->packed ? 1 : p->batch, head_dim_v = sa_head_dim_v(p);
    add_rows_of_k(&all, "k_cache", &cache->fwd.k, p->head_dim, true);
    all.tensors[all.num_tensors++] = (sa_checked_tensor){"k", &args->k, batch, p->q_len, p->num_kv_heads, p->head_dim, false};
    if (args->v.data || cache->fwd.v.data) {
        add_rows_of_k(&all, "v_cache", &cache->fwd.v, head_dim_v, true);
        all.tensors[all.num_tensors++] = (sa_checked_tensor){"v", &args->v, batch, p->q_len, p->num_kv_heads, head_dim_v, false};
    }
    SA_TRY(check_tensors_null(&all));
    SA_TRY(check_append_null(args));
    if (cache->host.num_pages != 0)
        return sa_status(SINKATTN_INVALID, "cache.host.num_pages is %" PRId64 "; it must be 0: new keys go to pages of the cache",
                cache->host.num_pages);
    SA_TRY(check_op(p, SINKATTN_DECODE));
    SA_TRY(check_dtype(p));
    SA_TRY(check_shape(p));
    add_array(&all, "cache.cache_seqlens", cache->cache_seqlens, p->batch * (int64_t)sizeof(int32_t), false);
    add_array(&all, "cache_seqlens", args->cache_seqlens, p->batch * (int64_t)sizeof(int32_t), true);
    add_array(&all, "slot_mapping", args->slot_mapping, p->q_len * (int64_t)sizeof(int64_t), false);
    SA_TRY(sa_check_layout(&all));
    SA_TRY(check_block_table(cache));
    SA_TRY(sa_check_aligned("cache.cache_seqlens", cache->cache_seqlens, sizeof(int32_t)));
    SA_TRY(sa_check_aligned("cache_seqlens", args->cache_seqlens, sizeof(int32_t)));
    SA_TRY(sa_check_aligned("block_table", cache->block_table, sizeof(int32_t)));
    SA_TRY(sa_check_aligned("slot_mapping", args->slot_mapping, sizeof(int64_t)));
    return check_range(p);
}
