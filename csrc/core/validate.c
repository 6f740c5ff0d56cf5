/* SPDX-License-Identifier: Apache-2.0
 *
 * Every rule of the interface, once, in the order null, dtype, shape, stride, alignment, range. Tensors are checked as a list of
 * operands, so that a rule is written once for all of them. Products of sizes are never formed unchecked.
 */
#include <float.h>
#include <inttypes.h>
#include <math.h>

#include "core.h"
#include "layout.h"
#include "numerics.h"
#include "nvfp4.h"

/* No size reaches a tensor of more elements, which leaves room to count bytes, splits and statistics in int64. */
#define SA_MAX_ELEMENTS (INT64_C(1) << 48)
#define SA_ROW_ALIGNMENT 16
#define SA_MAX_STRIDE (INT64_MAX / 16)

typedef struct operand {
    const char *name;
    const sinkattn_tensor *tensor;
    int64_t batch, rows, heads;
    bool written;
} operand;

typedef struct operands {
    const sinkattn_problem *problem;
    operand list[8];
    int count;
} operands;

static bool has_elements(const operands *all, int i) {
    const operand *o = &all->list[i];
    return o->batch != 0 && o->rows != 0 && o->heads != 0 && all->problem->head_dim != 0;
}

static void add_rows_of_q(operands *all, const char *name, const sinkattn_tensor *tensor, bool written) {
    const sinkattn_problem *p = all->problem;
    all->list[all->count++] = (operand){name, tensor, p->packed ? 1 : p->batch, p->q_len, p->num_q_heads, written};
}

static void add_rows_of_k(operands *all, const char *name, const sinkattn_tensor *tensor, bool written) {
    const sinkattn_problem *p = all->problem;
    operand o = {name, tensor, p->packed ? 1 : p->batch, p->k_len, p->num_kv_heads, written};
    if (p->page_size != 0) {
        o.batch = p->num_pages;
        o.rows = p->page_size;
    }
    all->list[all->count++] = o;
}

static operands fwd_operands(const sinkattn_fwd_args *args, bool out_written) {
    operands all = {.problem = &args->problem};
    add_rows_of_q(&all, "q", &args->q, false);
    add_rows_of_k(&all, "k", &args->k, false);
    add_rows_of_k(&all, "v", &args->v, false);
    add_rows_of_q(&all, "out", &args->out, out_written);
    return all;
}

static operands bwd_operands(const sinkattn_bwd_args *args) {
    operands all = fwd_operands(&args->fwd, false);
    add_rows_of_q(&all, "dout", &args->dout, false);
    add_rows_of_q(&all, "dq", &args->dq, true);
    add_rows_of_k(&all, "dk", &args->dk, true);
    add_rows_of_k(&all, "dv", &args->dv, true);
    return all;
}

/* ---- null ---- */

static sinkattn_status null_error(const char *name, const char *rule) {
    return sa_status(SINKATTN_INVALID, "%s is NULL; it must be given %s", name, rule);
}

static sinkattn_status surplus_error(const char *name, const char *rule) {
    return sa_status(SINKATTN_INVALID, "%s is given; it must be NULL %s", name, rule);
}

static sinkattn_status check_operands_null(const operands *all) {
    for (int i = 0; i < all->count; i++)
        if (has_elements(all, i) && !all->list[i].tensor->data) return null_error(all->list[i].name, "where the tensor has elements");
    return sa_ok();
}

static sinkattn_status check_fwd_null(const sinkattn_fwd_args *args) {
    const sinkattn_problem *p = &args->problem;
    if (!args->lse && (p->packed || p->batch != 0) && p->q_len != 0 && p->num_q_heads != 0) return null_error("lse", "where q has rows");
    if (!args->s_aux && p->num_q_heads != 0 && p->s_aux_dtype != SINKATTN_NO_DTYPE) return null_error("s_aux", "with an s_aux_dtype");
    if (args->s_aux && p->s_aux_dtype == SINKATTN_NO_DTYPE) return surplus_error("s_aux", "without an s_aux_dtype");
    if (p->packed && !args->cu_seqlens_q) return null_error("cu_seqlens_q", "for packed sequences");
    if (p->packed && !args->cu_seqlens_k) return null_error("cu_seqlens_k", "for packed sequences");
    if (!p->packed && args->cu_seqlens_q) return surplus_error("cu_seqlens_q", "unless sequences are packed");
    if (!p->packed && args->cu_seqlens_k) return surplus_error("cu_seqlens_k", "unless sequences are packed");
    return sa_ok();
}

/* ---- dtype ---- */

static sinkattn_status check_dtype(const sinkattn_problem *p) {
    if (p->op < SINKATTN_FWD || p->op > SINKATTN_DECODE)
        return sa_status(SINKATTN_INVALID, "op is %d; it must be fwd (0), bwd (1) or decode (2)", (int)p->op);
    if (p->dtype < SINKATTN_BF16 || p->dtype > SINKATTN_FP64)
        return sa_status(SINKATTN_INVALID, "dtype is %s; it must be bf16, fp16, fp32 or fp64", sa_dtype_name(p->dtype));
    if (p->s_aux_dtype < SINKATTN_NO_DTYPE || p->s_aux_dtype > SINKATTN_FP64)
        return sa_status(SINKATTN_INVALID, "s_aux_dtype is %d; it must be bf16, fp16, fp32 or none", (int)p->s_aux_dtype);
    if (p->s_aux_dtype == SINKATTN_FP64 && p->dtype != SINKATTN_FP64)
        return sa_status(SINKATTN_INVALID, "s_aux_dtype is fp64; it must be bf16, fp16 or fp32 when dtype is %s", sa_dtype_name(p->dtype));
    return sa_ok();
}

/* ---- shape ---- */

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
    const int64_t keys[] = {p->packed ? 1 : p->batch, p->k_len, p->num_q_heads, p->head_dim};
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
    const int64_t max_head_dim = p->op == SINKATTN_DECODE ? 512 : 256;
    if (p->head_dim < 8 || p->head_dim > max_head_dim || p->head_dim % 8 != 0)
        return sa_status(SINKATTN_INVALID, "head_dim is %" PRId64 "; it must be a multiple of 8 from 8 to %" PRId64, p->head_dim,
                         max_head_dim);
    return sa_ok();
}

static sinkattn_status check_packed(const sinkattn_problem *p) {
    if (!p->packed) return sa_ok();
    if (p->op == SINKATTN_DECODE) return sa_status(SINKATTN_INVALID, "packed is true; it must be false for decode");
    if (p->q_len > INT32_MAX || p->k_len > INT32_MAX)
        return sa_status(SINKATTN_INVALID, "%s has %" PRId64 " packed rows; cu_seqlens is int32, so it must have at most %d",
                         p->q_len > INT32_MAX ? "q" : "k", sa_max(p->q_len, p->k_len), INT32_MAX);
    return sa_ok();
}

static sinkattn_status check_pages(const sinkattn_problem *p) {
    if (p->page_size == 0 && p->num_pages == 0) return sa_ok();
    if (p->op != SINKATTN_DECODE)
        return sa_status(SINKATTN_INVALID, "page_size is %" PRId64 "; it must be 0: only decode reads a paged cache", p->page_size);
    if (p->page_size == 0)
        return sa_status(SINKATTN_INVALID, "num_pages is %" PRId64 "; it must be 0 when page_size is 0 (contiguous cache)", p->num_pages);
    if (p->k_len % p->page_size != 0)
        return sa_status(SINKATTN_INVALID, "k_len is %" PRId64 "; it must be a multiple of page_size, %" PRId64, p->k_len, p->page_size);
    return sa_ok();
}

static sinkattn_status check_shape(const sinkattn_problem *p) {
    SA_TRY(check_at_least("batch", p->batch, 0));
    SA_TRY(check_at_least("q_len", p->q_len, 0));
    SA_TRY(check_at_least("k_len", p->k_len, 0));
    SA_TRY(check_heads(p));
    SA_TRY(check_at_least("max_seqlen_q", p->max_seqlen_q, 0));
    SA_TRY(check_at_least("max_seqlen_k", p->max_seqlen_k, 0));
    SA_TRY(check_at_least("page_size", p->page_size, 0));
    SA_TRY(check_at_least("num_pages", p->num_pages, 0));
    SA_TRY(check_packed(p));
    SA_TRY(check_pages(p));
    if (sa_max(p->q_len, p->k_len) > SA_MAX_LEN)
        return sa_status(SINKATTN_INVALID, "%s is %" PRId64 "; it must be at most 2^36", p->q_len > SA_MAX_LEN ? "q_len" : "k_len",
                         sa_max(p->q_len, p->k_len));
    return check_sizes_fit(p);
}

/* ---- stride and alignment ---- */

typedef struct axis {
    const char *name;
    int64_t size, stride;
} axis;

/* The bytes an operand spans stay countable, whatever its strides. */
static bool extent_fits(const axis *axes, int64_t head_dim, int64_t bytes) {
    int64_t extent = head_dim;
    for (int i = 0; i < 3; i++) {
        int64_t reach;
        if (__builtin_mul_overflow(axes[i].size - 1, axes[i].stride, &reach) || __builtin_add_overflow(extent, reach, &extent))
            return false;
    }
    return !__builtin_mul_overflow(extent, bytes, &extent);
}

/* A written tensor is free of overlap when each axis, taken by rising stride, steps over all that the smaller ones span. */
static bool is_disjoint(const axis *axes, int64_t head_dim) {
    int order[3] = {0, 1, 2};
    for (int i = 0; i < 3; i++)
        for (int j = i + 1; j < 3; j++)
            if (axes[order[j]].stride < axes[order[i]].stride) {
                const int swapped = order[i];
                order[i] = order[j];
                order[j] = swapped;
            }
    int64_t span = head_dim;
    for (int i = 0; i < 3; i++) {
        const axis *a = &axes[order[i]];
        if (a->size > 1 && a->stride < span) return false;
        if (a->size > 1) span += (a->size - 1) * a->stride;
    }
    return true;
}

static sinkattn_status check_stride(const operand *o, const sinkattn_problem *p) {
    const int64_t bytes = sa_dtype_bytes(p->dtype), step = SA_ROW_ALIGNMENT / bytes;
    axis axes[3] = {{"batch_stride", o->batch, o->tensor->batch_stride},
                    {"row_stride", o->rows, o->tensor->row_stride},
                    {"head_stride", o->heads, o->tensor->head_stride}};
    for (int i = 0; i < 3; i++) {
        if (axes[i].stride > SA_MAX_STRIDE || axes[i].stride < -SA_MAX_STRIDE)
            return sa_status(SINKATTN_INVALID, "%s.%s is %" PRId64 "; its bytes must be countable in int64", o->name, axes[i].name,
                             axes[i].stride);
        if (axes[i].size == 1) axes[i].stride = 0; /* never stepped, so any value that can be multiplied will do */
        if (axes[i].stride < 0 || axes[i].stride % step != 0)
            return sa_status(SINKATTN_INVALID,
                             "%s.%s is %" PRId64 "; it must be a multiple of %" PRId64 " elements (16 bytes), not negative", o->name,
                             axes[i].name, axes[i].stride, step);
    }
    if (!extent_fits(axes, p->head_dim, bytes))
        return sa_status(SINKATTN_INVALID, "%s has strides %" PRId64 ", %" PRId64 ", %" PRId64 "; its bytes must be countable in int64",
                         o->name, axes[0].stride, axes[1].stride, axes[2].stride);
    if (o->written && !is_disjoint(axes, p->head_dim))
        return sa_status(SINKATTN_INVALID,
                         "%s has strides %" PRId64 ", %" PRId64 ", %" PRId64 "; it is written, so its rows must not overlap", o->name,
                         axes[0].stride, axes[1].stride, axes[2].stride);
    return sa_ok();
}

static sinkattn_status check_aligned(const char *name, const void *data, int64_t bytes) {
    if ((uintptr_t)data % (uintptr_t)bytes == 0) return sa_ok();
    return sa_status(SINKATTN_INVALID, "%s is at %p; it must be aligned to %" PRId64 " bytes", name, data, bytes);
}

static sinkattn_status check_layout(const operands *all) {
    for (int i = 0; i < all->count; i++)
        if (has_elements(all, i)) SA_TRY(check_stride(&all->list[i], all->problem));
    for (int i = 0; i < all->count; i++)
        if (has_elements(all, i)) SA_TRY(check_aligned(all->list[i].name, all->list[i].tensor->data, SA_ROW_ALIGNMENT));
    return sa_ok();
}

static int64_t lse_bytes(const sinkattn_problem *p) { return p->dtype == SINKATTN_FP64 ? 8 : 4; }

static sinkattn_status check_fwd_alignment(const sinkattn_fwd_args *args) {
    SA_TRY(check_aligned("lse", args->lse, lse_bytes(&args->problem)));
    if (args->s_aux) SA_TRY(check_aligned("s_aux", args->s_aux, sa_dtype_bytes(args->problem.s_aux_dtype)));
    SA_TRY(check_aligned("cu_seqlens_q", args->cu_seqlens_q, sizeof(int32_t)));
    return check_aligned("cu_seqlens_k", args->cu_seqlens_k, sizeof(int32_t));
}

/* ---- range ---- */

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
        return sa_status(SINKATTN_INVALID, "num_splits is %" PRId64 ", invariant is %d; both must be 0 but for decode", p->num_splits,
                         p->invariant);
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

/* ---- whole argument structs ---- */

sinkattn_status sa_validate_problem(const sinkattn_problem *problem) {
    if (!problem) return null_error("problem", "always");
    SA_TRY(check_dtype(problem));
    SA_TRY(check_shape(problem));
    return check_range(problem);
}

static sinkattn_status check_op(const sinkattn_problem *p, sinkattn_op op) {
    if (p->op != op) return sa_status(SINKATTN_INVALID, "problem.op is %d; it must be %d for this call", (int)p->op, (int)op);
    return sa_ok();
}

sinkattn_status sa_validate_fwd(const sinkattn_fwd_args *args) {
    if (!args) return null_error("args", "always");
    const operands all = fwd_operands(args, true);
    SA_TRY(check_operands_null(&all));
    SA_TRY(check_fwd_null(args));
    SA_TRY(check_op(&args->problem, SINKATTN_FWD));
    SA_TRY(check_dtype(&args->problem));
    SA_TRY(check_shape(&args->problem));
    SA_TRY(check_layout(&all));
    SA_TRY(check_fwd_alignment(args));
    return check_range(&args->problem);
}

sinkattn_status sa_validate_bwd(const sinkattn_bwd_args *args) {
    if (!args) return null_error("args", "always");
    const sinkattn_fwd_args *fwd = &args->fwd;
    const operands all = bwd_operands(args);
    SA_TRY(check_operands_null(&all));
    SA_TRY(check_fwd_null(fwd));
    if (fwd->s_aux && !args->ds_aux) return null_error("ds_aux", "with s_aux; a frozen s_aux is passed as NULL");
    if (!fwd->s_aux && args->ds_aux) return surplus_error("ds_aux", "without s_aux");
    SA_TRY(check_op(&fwd->problem, SINKATTN_BWD));
    SA_TRY(check_dtype(&fwd->problem));
    SA_TRY(check_shape(&fwd->problem));
    SA_TRY(check_layout(&all));
    SA_TRY(check_fwd_alignment(fwd));
    SA_TRY(check_aligned("dlse", args->dlse, lse_bytes(&fwd->problem)));
    if (args->ds_aux) SA_TRY(check_aligned("ds_aux", args->ds_aux, sa_dtype_bytes(fwd->problem.s_aux_dtype)));
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
        return sa_status(SINKATTN_INVALID, "host.num_pages is %" PRId64 "; it must be 0 when page_size is 0 (contiguous cache)",
                         host->num_pages);
    return sa_ok();
}

static sinkattn_status check_host_strides(const sinkattn_decode_args *args) {
    const sinkattn_problem *p = &args->fwd.problem;
    const sinkattn_tensor *tiers[2][2] = {{&args->fwd.k, &args->host.k}, {&args->fwd.v, &args->host.v}};
    if (args->host.num_pages == 0) return sa_ok();
    for (int i = 0; i < 2; i++) {
        const sinkattn_tensor *cache = tiers[i][0], *host = tiers[i][1];
        if ((args->host.num_pages > 1 && host->batch_stride != cache->batch_stride) ||
            (p->page_size > 1 && host->row_stride != cache->row_stride) || (p->num_kv_heads > 1 && host->head_stride != cache->head_stride))
            return sa_status(SINKATTN_INVALID,
                             "host.%s has strides %" PRId64 ", %" PRId64 ", %" PRId64 "; they must be the cache's, %" PRId64 ", %" PRId64
                             ", %" PRId64,
                             i ? "v" : "k", host->batch_stride, host->row_stride, host->head_stride, cache->batch_stride, cache->row_stride,
                             cache->head_stride);
    }
    return sa_ok();
}

static sinkattn_status check_nvfp4(const sinkattn_decode_args *args) {
    const sinkattn_nvfp4 *nvfp4 = &args->nvfp4;
    const int64_t head_dim = args->fwd.problem.head_dim;
    if (!nvfp4->values) return nvfp4->scales ? surplus_error("nvfp4.scales", "without nvfp4.values") : sa_ok();
    if (head_dim % SA_NVFP4_BLOCK != 0)
        return sa_status(SINKATTN_INVALID, "head_dim is %" PRId64 "; it must be a multiple of %d for NVFP4", head_dim, SA_NVFP4_BLOCK);
    if (!nvfp4->scales) return null_error("nvfp4.scales", "with nvfp4.values");
    SA_TRY(check_aligned("nvfp4.values", nvfp4->values, sizeof(uint16_t)));
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
    operands all = fwd_operands(&args->fwd, true);
    SA_TRY(check_at_least("host.num_pages", args->host.num_pages, 0));
    all.list[all.count++] = (operand){"host.k", &args->host.k, args->host.num_pages, p->page_size, p->num_kv_heads, false};
    all.list[all.count++] = (operand){"host.v", &args->host.v, args->host.num_pages, p->page_size, p->num_kv_heads, false};
    SA_TRY(check_operands_null(&all));
    SA_TRY(check_fwd_null(&args->fwd));
    SA_TRY(check_table_null(args));
    SA_TRY(check_host_null(args));
    SA_TRY(check_op(p, SINKATTN_DECODE));
    SA_TRY(check_dtype(p));
    SA_TRY(check_shape(p));
    SA_TRY(check_layout(&all));
    SA_TRY(check_block_table(args));
    SA_TRY(check_host_strides(args));
    SA_TRY(check_nvfp4(args));
    SA_TRY(check_fwd_alignment(&args->fwd));
    SA_TRY(check_aligned("cache_seqlens", args->cache_seqlens, sizeof(int32_t)));
    SA_TRY(check_aligned("block_table", args->block_table, sizeof(int32_t)));
    return check_range(p);
}

sinkattn_status sa_validate_append(const sinkattn_append_args *args) {
    if (!args) return null_error("args", "always");
    const sinkattn_decode_args *cache = &args->cache;
    const sinkattn_problem *p = &cache->fwd.problem;
    operands all = {.problem = p};
    add_rows_of_k(&all, "k_cache", &cache->fwd.k, true);
    add_rows_of_k(&all, "v_cache", &cache->fwd.v, true);
    all.list[all.count++] = (operand){"k", &args->k, p->batch, p->q_len, p->num_kv_heads, false};
    all.list[all.count++] = (operand){"v", &args->v, p->batch, p->q_len, p->num_kv_heads, false};
    SA_TRY(check_operands_null(&all));
    if (p->batch != 0 && !cache->cache_seqlens) return null_error("cache.cache_seqlens", "to say where new keys go");
    if (p->batch != 0 && !args->cache_seqlens) return null_error("cache_seqlens", "for the keys in use afterwards");
    if (p->batch != 0 && args->cache_seqlens == cache->cache_seqlens)
        return sa_status(SINKATTN_INVALID,
                         "cache_seqlens is cache.cache_seqlens; it must be another array, which is read while this is written");
    SA_TRY(check_table_null(cache));
    if (cache->host.num_pages != 0)
        return sa_status(SINKATTN_INVALID, "cache.host.num_pages is %" PRId64 "; it must be 0: new keys go to pages of the cache",
                         cache->host.num_pages);
    SA_TRY(check_op(p, SINKATTN_DECODE));
    SA_TRY(check_dtype(p));
    SA_TRY(check_shape(p));
    SA_TRY(check_layout(&all));
    SA_TRY(check_block_table(cache));
    SA_TRY(check_aligned("cache.cache_seqlens", cache->cache_seqlens, sizeof(int32_t)));
    SA_TRY(check_aligned("cache_seqlens", args->cache_seqlens, sizeof(int32_t)));
    SA_TRY(check_aligned("block_table", cache->block_table, sizeof(int32_t)));
    return check_range(p);
}
