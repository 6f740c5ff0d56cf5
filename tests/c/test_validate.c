/* SPDX-License-Identifier: Apache-2.0
 *
 * Malformed calls, as a table of one change each to a call that is right.
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

#define CHANGE(name, ...)                                                                                                                  \
    static void name(call *c, sinkattn_fwd_args *f, sinkattn_problem *p) {                                                                 \
        (void)c, (void)f, (void)p;                                                                                                         \
        __VA_ARGS__;                                                                                                                       \
    }

CHANGE(no_q, f->q.data = NULL)
CHANGE(no_k, f->k.data = NULL)
CHANGE(no_v, f->v.data = NULL)
CHANGE(no_out, f->out.data = NULL)
CHANGE(no_lse, f->lse = NULL)
CHANGE(no_s_aux, f->s_aux = NULL)
CHANGE(s_aux_without_dtype, p->s_aux_dtype = SINKATTN_NO_DTYPE)
CHANGE(no_cu_seqlens_q, f->cu_seqlens_q = NULL)
CHANGE(no_cu_seqlens_k, f->cu_seqlens_k = NULL)
CHANGE(cu_seqlens_q_when_dense, f->cu_seqlens_q = c->cu_seqlens)
CHANGE(cu_seqlens_k_when_dense, f->cu_seqlens_k = c->cu_seqlens)
CHANGE(no_dout, c->bwd.dout.data = NULL)
CHANGE(no_dq, c->bwd.dq.data = NULL)
CHANGE(no_dk, c->bwd.dk.data = NULL)
CHANGE(no_dv, c->bwd.dv.data = NULL)
CHANGE(no_ds_aux, c->bwd.ds_aux = NULL)
CHANGE(ds_aux_when_frozen, f->s_aux = NULL; p->s_aux_dtype = SINKATTN_NO_DTYPE)
CHANGE(no_block_table, c->decode.block_table = NULL)
CHANGE(block_table_when_contiguous, c->decode.block_table = c->block_table)

CHANGE(negative_host_pages, c->decode.host.num_pages = -1)
CHANGE(host_without_keys, c->decode.host.num_pages = 1)
CHANGE(host_when_contiguous, c->decode.host = ((sinkattn_tier){f->k, f->v, 1}))
CHANGE(host_of_other_rows, c->decode.host = ((sinkattn_tier){f->k, f->v, 2}); c->decode.host.v.row_stride += 4)
CHANGE(host_of_other_pages, c->decode.host = ((sinkattn_tier){f->k, f->v, 2}); c->decode.host.k.batch_stride += 4)
CHANGE(host_off_by_4, c->decode.host = ((sinkattn_tier){f->k, f->v, 2}); c->decode.host.k.data = (char *)f->k.data + 4)
CHANGE(page_past_the_host, c->decode.host = ((sinkattn_tier){f->k, f->v, 2}); c->block_table[5] = 8)
CHANGE(scales_alone, c->decode.nvfp4.scales = (uint8_t *)c)
CHANGE(narrow_nvfp4, c->decode.nvfp4.scales = (uint8_t *)c; c->decode.nvfp4.values = (uint8_t *)(c + 1))

CHANGE(wrong_op, p->op = SINKATTN_BWD)
CHANGE(unknown_op, p->op = (sinkattn_op)9)
CHANGE(unknown_dtype, p->dtype = (sinkattn_dtype)9)
CHANGE(missing_dtype, p->dtype = SINKATTN_NO_DTYPE)
CHANGE(unknown_s_aux_dtype, p->s_aux_dtype = (sinkattn_dtype)9)
CHANGE(fp64_s_aux, p->s_aux_dtype = SINKATTN_FP64)

CHANGE(negative_batch, p->batch = -1)
CHANGE(negative_q_len, p->q_len = -1)
CHANGE(negative_k_len, p->k_len = -3)
CHANGE(no_q_heads, p->num_q_heads = 0)
CHANGE(no_kv_heads, p->num_kv_heads = 0)
CHANGE(negative_kv_heads, p->num_kv_heads = -2)
CHANGE(uneven_heads, p->num_q_heads = 5)
CHANGE(fewer_q_heads, p->num_q_heads = 1)
CHANGE(no_head_dim, p->head_dim = 0)
CHANGE(odd_head_dim, p->head_dim = 12)
CHANGE(large_head_dim, p->head_dim = 264)
CHANGE(larger_head_dim, p->head_dim = 520)
CHANGE(huge_batch, p->batch = INT64_MAX)
CHANGE(huge_cache, p->batch = 2; p->k_len = INT64_C(1) << 35; p->num_kv_heads = p->num_q_heads = 8192)
CHANGE(endless_q, p->q_len = (INT64_C(1) << 36) + 1)
CHANGE(endless_k, p->k_len = INT64_MAX)
CHANGE(long_packed_q, p->q_len = (int64_t)INT32_MAX + 1)
CHANGE(long_packed_k, p->k_len = (int64_t)INT32_MAX + 1)
CHANGE(cu_seqlens_k_over_a_cache, f->cu_seqlens_k = c->cu_seqlens)
CHANGE(splits, p->num_splits = 2)
CHANGE(nvfp4, c->decode.nvfp4.values = (uint8_t *)c; c->decode.nvfp4.scales = (uint8_t *)(c + 1))
CHANGE(pages_in_prefill, p->page_size = 4; p->num_pages = 4)
CHANGE(pages_without_size, p->num_pages = 4)
CHANGE(negative_page_size, p->page_size = -4)
CHANGE(negative_num_pages, p->num_pages = -1)
CHANGE(uneven_pages, p->k_len = 15)

CHANGE(odd_stride, f->q.row_stride += 1)
CHANGE(negative_stride, f->k.batch_stride = -f->k.batch_stride)
CHANGE(negative_head_stride, f->v.head_stride = -8)
CHANGE(half_aligned_stride, f->v.head_stride += 2)
CHANGE(endless_stride, f->k.batch_stride = INT64_MAX - 7)
CHANGE(endless_bytes, f->k.row_stride = INT64_C(1) << 58)
CHANGE(endless_unused_stride, p->q_len = 1; f->q.row_stride = INT64_MIN)
CHANGE(out_on_itself, f->out.row_stride = 0)
CHANGE(out_over_itself, f->out.head_stride = 0)
CHANGE(out_interleaved, f->out.row_stride = f->out.head_stride)
CHANGE(dk_on_itself, c->bwd.dk.batch_stride = 0)
CHANGE(dv_on_itself, c->bwd.dv.head_stride = 0)
CHANGE(dq_on_itself, c->bwd.dq.row_stride = 4)
CHANGE(negative_table_stride, c->decode.block_table_stride = -4)
CHANGE(endless_table_stride, c->decode.block_table_stride = INT64_MAX)

CHANGE(out_is_q, f->out = f->q)
CHANGE(out_within_k, f->out.data = (char *)f->k.data + 64)
CHANGE(lse_in_out, f->lse = (char *)f->out.data + 32)
CHANGE(lse_is_s_aux, f->lse = (void *)(uintptr_t)f->s_aux; f->lse_raw = NULL)
CHANGE(lse_raw_is_lse, f->lse_raw = f->lse)
CHANGE(dq_is_dout, c->bwd.dq = c->bwd.dout)
CHANGE(dv_is_dk, c->bwd.dv = c->bwd.dk)
CHANGE(ds_aux_in_dlse, c->bwd.ds_aux = (char *)(uintptr_t)c->bwd.dlse + 4)
CHANGE(q_off_by_an_element, f->q.data = (char *)f->q.data + 4)
CHANGE(v_off_by_a_byte, f->v.data = (char *)f->v.data + 1)
CHANGE(out_off_by_8, f->out.data = (char *)f->out.data + 8)
CHANGE(dout_off_by_4, c->bwd.dout.data = (char *)c->bwd.dout.data + 4)
CHANGE(lse_off_by_2, f->lse = (char *)f->lse + 2; f->lse_raw = NULL)
CHANGE(dlse_off_by_2, c->bwd.dlse = (const char *)c->bwd.dlse + 2)
CHANGE(s_aux_off_by_1, f->s_aux = (const char *)f->s_aux + 1)
CHANGE(ds_aux_off_by_1, c->bwd.ds_aux = (char *)c->bwd.ds_aux + 1)
CHANGE(cu_seqlens_off_by_1, f->cu_seqlens_q = (const int32_t *)((const char *)f->cu_seqlens_q + 1))
CHANGE(cache_seqlens_off_by_1, c->decode.cache_seqlens = (const int32_t *)((const char *)c->decode.cache_seqlens + 1))
CHANGE(block_table_off_by_1, c->decode.block_table = (const int32_t *)((const char *)c->decode.block_table + 1))

CHANGE(nan_scale, p->softmax_scale = (double)NAN)
CHANGE(infinite_scale, p->softmax_scale = (double)INFINITY)
CHANGE(denormal_scale, p->softmax_scale = 1e-40)
CHANGE(negative_denormal_scale, p->softmax_scale = -1e-39)
CHANGE(endless_scale, p->softmax_scale = 1e39)
CHANGE(left_below_minus_one, p->mask.has_left = true; p->mask.left = -2)
CHANGE(right_below_minus_one, p->mask.has_right = true; p->mask.right = -7)
CHANGE(left_without_its_flag, p->mask.has_left = false; p->mask.left = 127)
CHANGE(right_without_its_flag, p->mask.has_right = false; p->mask.right = 1)
CHANGE(negative_sink_tokens, p->mask.num_sink_tokens = -1)
CHANGE(splits_in_prefill, p->num_splits = 2)
CHANGE(invariant_prefill, p->invariant = true)
CHANGE(invariant_splits, p->invariant = true; p->num_splits = 2)
CHANGE(invariant_passes, p->invariant = true; p->num_splits = -1)

CHANGE(cu_seqlens_from_one, c->cu_seqlens[0] = 1)
CHANGE(cu_seqlens_negative, c->cu_seqlens[0] = -1)
CHANGE(cu_seqlens_falling, c->cu_seqlens[1] = 9)
CHANGE(cu_seqlens_too_far, c->cu_seqlens[2] = 100)
CHANGE(cu_seqlens_lowest, c->cu_seqlens[1] = INT32_MIN)
CHANGE(cache_too_long, c->cache_seqlens[1] = 17)
CHANGE(cache_negative, c->cache_seqlens[0] = -1)
CHANGE(page_too_far, c->block_table[5] = 6)
CHANGE(page_negative, c->block_table[0] = -1)
CHANGE(page_lowest, c->block_table[4] = INT32_MIN)

static const malformed table[] = {
    {FWD, no_q, "q is NULL"},
    {FWD, no_k, "k is NULL"},
    {PAGED, no_v, "v is NULL"},
    {PACKED, no_out, "out is NULL"},
    {DECODE, no_lse, "lse is NULL"},
    {FWD, no_s_aux, "s_aux is NULL; it must be given with an s_aux_dtype"},
    {FWD, s_aux_without_dtype, "s_aux is given"},
    {PACKED, no_cu_seqlens_q, "cu_seqlens_q is NULL"},
    {PACKED, no_cu_seqlens_k, "cu_seqlens_k is NULL"},
    {FWD, cu_seqlens_q_when_dense, "cu_seqlens_q is given"},
    {DECODE, cu_seqlens_k_when_dense, "cu_seqlens_k is given"},
    {BWD, no_q, "q is NULL"},
    {BWD, no_dout, "dout is NULL"},
    {BWD, no_dq, "dq is NULL"},
    {BWD, no_dk, "dk is NULL"},
    {BWD, no_dv, "dv is NULL"},
    {BWD, no_lse, "lse is NULL"},
    {BWD, no_ds_aux, "ds_aux is NULL"},
    {BWD, ds_aux_when_frozen, "ds_aux is given"},
    {PAGED, no_block_table, "block_table is NULL"},
    {DECODE, block_table_when_contiguous, "block_table is given"},
    {FWD, wrong_op, "problem.op is bwd; it must be fwd for this call"},
    {BWD, unknown_op, "problem.op is 9; it must be bwd for this call"},
    {FWD, unknown_dtype, "dtype is unknown"},
    {DECODE, missing_dtype, "dtype is none"},
    {FWD, unknown_s_aux_dtype, "s_aux_dtype is 9"},
    {FWD, fp64_s_aux, "s_aux is fp64; it must be bf16, fp16 or fp32 where q, k and v are fp32"},
    {FWD, negative_batch, "batch is -1; it must be at least 0"},
    {FWD, negative_q_len, "q_len is -1"},
    {DECODE, negative_k_len, "k_len is -3"},
    {FWD, no_q_heads, "num_q_heads is 0"},
    {FWD, no_kv_heads, "num_kv_heads is 0"},
    {BWD, negative_kv_heads, "num_kv_heads is -2"},
    {FWD, uneven_heads, "num_q_heads is 5; it must be a multiple of num_kv_heads, 2"},
    {PACKED, fewer_q_heads, "num_q_heads is 1"},
    {FWD, no_head_dim, "head_dim is 0"},
    {FWD, odd_head_dim, "head_dim is 12; it must be a multiple of 8 from 8 to 256"},
    {FWD, large_head_dim, "head_dim is 264"},
    {DECODE, larger_head_dim, "from 8 to 512"},
    {FWD, huge_batch, "too large a tensor"},
    {DECODE, huge_cache, "too large a tensor"},
    {FWD, endless_q, "q_len is 68719476737; it must be at most 2^36"},
    {DECODE, endless_k, "k_len is 9223372036854775807; it must be at most 2^36"},
    {PACKED, long_packed_q, "q has 2147483648 packed rows"},
    {PACKED, long_packed_k, "k has 2147483648 packed rows"},
    {PACKED_PAGED, no_cu_seqlens_q, "cu_seqlens_q is NULL; it must be given for packed sequences"},
    {PACKED_PAGED, no_block_table, "block_table is NULL"},
    {PACKED_PAGED, cu_seqlens_k_over_a_cache, "cu_seqlens_k is given; it must be NULL over a cache"},
    {PACKED_PAGED, splits, "num_splits is 2; it must be 0 or 1 when packed is true"},
    {PACKED_PAGED, nvfp4, "nvfp4.values is given; it must be NULL when packed is true"},
    {PACKED_PAGED, long_packed_q, "q has 2147483648 packed rows"},
    {PACKED_PAGED, out_is_q, "q and out overlap"},
    {PACKED_PAGED, lse_in_out, "out and lse overlap"},
    {FWD, pages_in_prefill, "page_size is 4"},
    {DECODE, pages_without_size, "page_size is 0, num_pages is 4; pages must have 1 row or more"},
    {PAGED, negative_page_size, "page_size is -4"},
    {PAGED, negative_num_pages, "num_pages is -1"},
    {PAGED, uneven_pages, "k_len is 15; it must be a multiple of page_size, 4"},
    {FWD, odd_stride, "q.row_stride is"},
    {FWD, negative_stride, "k.batch_stride is -"},
    {DECODE, negative_head_stride, "v.head_stride is -8"},
    {BWD, half_aligned_stride, "v.head_stride is"},
    {FWD, endless_stride, "k.batch_stride is 9223372036854775800; its bytes must be countable"},
    {FWD, endless_bytes, "bytes must be countable"},
    {FWD, endless_unused_stride, "q.row_stride is -9223372036854775808"},
    {FWD, out_on_itself, "rows must not overlap"},
    {DECODE, out_over_itself, "rows must not overlap"},
    {PACKED, out_interleaved, "rows must not overlap"},
    {BWD, dk_on_itself, "dk has strides"},
    {BWD, dv_on_itself, "dv has strides"},
    {BWD, dq_on_itself, "dq has strides"},
    {PAGED, negative_table_stride, "block_table_stride is -4"},
    {PAGED, endless_table_stride, "block_table_stride is 9"},
    {FWD, out_is_q, "q and out overlap; out is written, so it must have memory of its own"},
    {DECODE, out_within_k, "k and out overlap; out is written"},
    {PACKED, lse_in_out, "out and lse overlap; lse is written"},
    {FWD, lse_is_s_aux, "lse and s_aux overlap; lse is written"},
    {DECODE, lse_raw_is_lse, "lse and lse_raw overlap; lse_raw is written"},
    {BWD, lse_raw_is_lse, "lse_raw is given; it must be NULL in a backward"},
    {BWD, dq_is_dout, "dout and dq overlap; dq is written"},
    {BWD, dv_is_dk, "dk and dv overlap; dv is written"},
    {BWD, ds_aux_in_dlse, "dlse and ds_aux overlap; ds_aux is written"},
    {FWD, q_off_by_an_element, "q is at"},
    {FWD, v_off_by_a_byte, "v is at"},
    {DECODE, out_off_by_8, "out is at"},
    {BWD, dout_off_by_4, "dout is at"},
    {FWD, lse_off_by_2, "lse is at"},
    {BWD, dlse_off_by_2, "dlse is at"},
    {FWD, s_aux_off_by_1, "s_aux is at"},
    {BWD, ds_aux_off_by_1, "ds_aux is at"},
    {PACKED, cu_seqlens_off_by_1, "cu_seqlens_q is at"},
    {PAGED, cache_seqlens_off_by_1, "cache_seqlens is at"},
    {PAGED, block_table_off_by_1, "block_table is at"},
    {FWD, nan_scale, "softmax_scale is"},
    {BWD, infinite_scale, "softmax_scale is inf"},
    {FWD, denormal_scale, "softmax_scale is 1e-40; it must be finite, and neither too large nor too small for fp32"},
    {BWD, negative_denormal_scale, "softmax_scale is -1e-39"},
    {DECODE, endless_scale, "softmax_scale is 1e+39"},
    {FWD, left_below_minus_one, "window_size_left is -2; it must be -1 (unbounded) or at least 0"},
    {BWD, right_below_minus_one, "window_size_right is -7"},
    {FWD, left_without_its_flag, "window_size_left is 127 with has_left false"},
    {PACKED, right_without_its_flag, "window_size_right is 1 with has_right false"},
    {DECODE, negative_sink_tokens, "num_sink_tokens is -1"},
    {FWD, splits_in_prefill, "num_splits is 2"},
    {BWD, invariant_prefill, "invariant is 1"},
    {DECODE, invariant_splits, "num_splits is 2; it must be 0 or 1"},
    {DECODE, invariant_passes, "num_splits is -1; it must be 0 or 1"},
    {PACKED, cu_seqlens_from_one, "cu_seqlens_q[0] is 1; it must be 0"},
    {PACKED, cu_seqlens_negative, "cu_seqlens_q[0] is -1"},
    {PACKED, cu_seqlens_falling, "cu_seqlens_q[2] is 6; it must be at least 9"},
    {PACKED, cu_seqlens_too_far, "cu_seqlens_q[2] is 100; it must be at most 7"},
    {PACKED, cu_seqlens_lowest, "cu_seqlens_q[1] is -2147483648"},
    {PAGED, cache_too_long, "cache_seqlens[1] is 17; it must be from 0 to 16"},
    {DECODE, cache_negative, "cache_seqlens[0] is -1"},
    {PAGED, page_too_far, "block_table[1][1] is 6; it must be a page from 0 to 5"},
    {PAGED, page_negative, "block_table[0][0] is -1"},
    {PAGED, page_lowest, "block_table[1][0] is -2147483648"},
    {PACKED_PAGED, cu_seqlens_from_one, "cu_seqlens_q[0] is 1; it must be 0"},
    {PACKED_PAGED, cu_seqlens_falling, "cu_seqlens_q[2] is 6; it must be at least 9"},
    {PACKED_PAGED, cu_seqlens_too_far, "cu_seqlens_q[2] is 100; it must be at most 7"},
    {PACKED_PAGED, cache_too_long, "cache_seqlens[1] (seqused_k) is 17; it must be from 0 to 16"},
    {PACKED_PAGED, cache_negative, "cache_seqlens[0] (seqused_k) is -1"},
    {PACKED_PAGED, page_too_far, "block_table[1][1] is 6; it must be a page from 0 to 5"},
    {PACKED_PAGED, page_negative, "block_table[0][0] is -1"},
    {PAGED, negative_host_pages, "host.num_pages is -1; it must be at least 0"},
    {PAGED, host_without_keys, "host.k is NULL"},
    {DECODE, host_when_contiguous, "host.num_pages is 1; it must be 0 when page_size is 0"},
    {PAGED, host_of_other_rows, "host.v has strides 64, 20, 8; they must be the cache's, 64, 16, 8"},
    {PAGED, host_of_other_pages, "host.k has strides 68, 16, 8; they must be the cache's, 64, 16, 8"},
    {PAGED, host_off_by_4, "host.k is at"},
    {PAGED, page_past_the_host, "block_table[1][1] is 8; it must be a page from 0 to 7"},
    {DECODE, scales_alone, "nvfp4.scales is given; it must be NULL without nvfp4.values"},
    {DECODE, narrow_nvfp4, "head_dim is 8; it must be a multiple of 16 for NVFP4"},
};

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
                          .mask = {.has_right = true}};
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
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
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
                {{memory + 1, other, 1.0}, "nvfp4.values is at"},
                {{memory, other, -1.0}, "nvfp4.global_scale is -1; it must be positive"},
                {{memory, other, (double)NAN}, "nvfp4.global_scale is nan"},
                {{memory, other, 1e39}, "nvfp4.global_scale is 1e+39"},
                {{memory, other, 1e-40}, "nvfp4.global_scale is 1e-40"}};
    sinkattn_decode_args args = sample_decode_args(&s);
    args.nvfp4 = (sinkattn_nvfp4){memory, other, 2.0};
    CHECK(sa_validate_decode(&args).code == SINKATTN_OK, "%s", sa_validate_decode(&args).message);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        args.nvfp4 = rows[i].nvfp4;
        CHECK(strstr(sa_validate_decode(&args).message, rows[i].fragment) != NULL, "%s", sa_validate_decode(&args).message);
    }
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

const test validate_tests[] = {{"malformed calls", test_malformed_calls},
                               {"NULL arguments", test_null_arguments},
                               {"empty tensors need nothing", test_empty_tensors_need_nothing},
                               {"only needed pages must be mapped", test_only_needed_pages_must_be_mapped},
                               {"NVFP4 arguments", test_nvfp4_arguments},
                               {"interleaved tensors", test_interleaved_tensors},
                               {0}};
