/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives of cpu.h, written once over vectors of SA_VL floats. An instruction set's file defines
 *     SA_OPS          the name of its sa_cpu_ops
 *     SA_VL           floats a vector
 *     SA_PANEL        vectors of lanes that a block of the product holds; with SA_ROWS rows its sums fill the registers
 *     SA_BF16_CELLS   optional, where AVX-512 or NEON has bf16 dot products: cells are two bf16; without it they are fp32
 *     SA_PRODUCT      optional: a product of its own; with SA_ENTER, SA_LEAVE, SA_ROWS_TO_COLUMNS, SA_KEY_STEP, which see in sa_cpu_ops
 * and includes this. The compiler maps the vectors to the machine, so the same text serves all of them.
 */
#if SA_VL >= 8
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/cpu.h"

typedef float sa_vf __attribute__((vector_size(SA_VL * 4), aligned(4), may_alias));
typedef int32_t sa_vi __attribute__((vector_size(SA_VL * 4), aligned(4), may_alias));
typedef uint32_t sa_vu __attribute__((vector_size(SA_VL * 4), aligned(4), may_alias));
typedef uint16_t sa_vh __attribute__((vector_size(SA_VL * 2), aligned(2), may_alias));

#define SA_INLINE static inline __attribute__((always_inline))
#define SA_UNROLL _Pragma("GCC unroll 8")
#define SA_STEP ((int64_t)SA_VL)
enum { SA_ROWS = 6 };

#ifdef SA_BF16_CELLS
#define SA_PACK 2
#if defined(__aarch64__)
#define SA_CELL_MADD(sum, a, b) ((sa_vf)vbfdotq_f32((float32x4_t)(sum), (bfloat16x8_t)(a), (bfloat16x8_t)(b)))
#define SA_NARROW_BF16(x) ((sa_vh)vcvt_bf16_f32((float32x4_t)(x)))
#else
#define SA_CELL_MADD(sum, a, b) ((sa_vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define SA_NARROW_BF16(x) ((sa_vh)_mm512_cvtneps_pbh((__m512)(x)))
#endif
#else
#define SA_PACK 1
#define SA_CELL_MADD(sum, a, b) ((sum) + (sa_vf)(a) * (sa_vf)(b))
#define SA_NARROW_BF16(x) sa_round_bf16(x)
#endif

SA_INLINE sa_vf sa_load_vf(const float *p) { return *(const sa_vf *)p; }
SA_INLINE void sa_store_vf(float *p, sa_vf x) { *(sa_vf *)p = x; }
SA_INLINE sa_vu sa_load_vu(const sa_cell *p) { return *(const sa_vu *)p; }
SA_INLINE sa_vf sa_splat(float x) { return x - (sa_vf){0}; }
SA_INLINE sa_vu sa_splat_cell(sa_cell x) { return x - (sa_vu){0}; }
SA_INLINE sa_vf sa_select(sa_vi mask, sa_vf yes, sa_vf no) { return (sa_vf)(((sa_vi)yes & mask) | ((sa_vi)no & ~mask)); }

/* sa_vmax(a, b): b where either is NaN. sa_times_power: y * 2^n, n also in the low bits of shifted; 0 where x is below least. */
#if SA_VL == 16
SA_INLINE sa_vf sa_vmax(sa_vf a, sa_vf b) { return (sa_vf)_mm512_max_ps((__m512)a, (__m512)b); }
SA_INLINE sa_vf sa_times_power(sa_vf y, sa_vf n, sa_vf shifted, sa_vf x, const float least) {
    (void)shifted;
    return (sa_vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLT_UQ), (__m512)y, (__m512)n);
}
#else
SA_INLINE sa_vf sa_vmax(sa_vf a, sa_vf b) { return sa_select(a > b, a, b); }
SA_INLINE sa_vf sa_times_power(sa_vf y, sa_vf n, sa_vf shifted, sa_vf x, const float least) {
    (void)n;
    return sa_select(x < least, sa_splat(0.0f), y * (sa_vf)(((sa_vu)shifted - 0x4b400000u + 127u) << 23));
}
#endif

#define SA_ROUND 0x1.8p23f /* adding it leaves the nearest integer in the low bits */

/* e^x = 2^n e^f with |f| <= ln(2) / 2. Zero below the normal numbers; NaN stays NaN. In 2 ulp, by a polynomial of relative error 4e-9; for
 * cells of bf16, which it is rounded to, in 3 ulp by one of 1e-7. */
SA_INLINE sa_vf sa_exp(sa_vf x) {
    const sa_vf shifted = x * 0x1.715476p0f + SA_ROUND, n = shifted - SA_ROUND;
#if SA_PACK == 2
    const sa_vf f = x - n * 0x1.62e43p-1f;
    sa_vf y = f * 0x1.10627ap-7f + 0x1.572a08p-5f;
    y = y * f + 0x1.5557aep-3f;
    y = y * f + 0x1.fffdfcp-2f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
#else
    const sa_vf f = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
    sa_vf y = f * 0x1.687b46p-10f + 0x1.123bdcp-7f;
    y = y * f + 0x1.555b5cp-5f;
    y = y * f + 0x1.55548ep-3f;
    y = y * f + 0x1.fffff8p-2f;
    y = y * (f * f) + f + 1.0f;
#endif
    return sa_times_power(y, n, shifted, x, -87.0f);
}

/* 2^x = 2^n 2^f with |f| <= 1/2, as sa_exp; exact for an integer. */
SA_INLINE sa_vf sa_exp2(sa_vf x) {
    const sa_vf shifted = x + SA_ROUND, n = shifted - SA_ROUND, f = x - n;
#if SA_PACK == 2
    sa_vf y = f * 0x1.5bba12p-10f + 0x1.3cea88p-7f;
    y = y * f + 0x1.c6b752p-5f;
    y = y * f + 0x1.ebf9bcp-3f;
    y = y * f + 0x1.62e42ap-1f;
#else
    sa_vf y = f * 0x1.41fbbcp-13f + 0x1.5f3e54p-10f;
    y = y * f + 0x1.3b2d4cp-7f;
    y = y * f + 0x1.c6aee8p-5f;
    y = y * f + 0x1.ebfbdcp-3f;
    y = y * f + 0x1.62e43p-1f;
#endif
    return sa_times_power(y * f + 1.0f, n, shifted, x, -126.0f);
}

SA_INLINE sa_vf sa_widen_bf16(sa_vh x) { return (sa_vf)(__builtin_convertvector(x, sa_vu) << 16); }

/* Round to nearest even, as numerics.h. */
SA_INLINE sa_vh sa_round_bf16(sa_vf x) {
    const sa_vu bits = (sa_vu)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
    const sa_vu is_nan = (sa_vu)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), sa_vh);
}

/* The instructions round to nearest even and keep subnormals, whatever the CPU's modes. */
#if SA_VL == 16
SA_INLINE sa_vf sa_widen_fp16(sa_vh half) { return (sa_vf)_mm512_cvtph_ps((__m256i)half); }
SA_INLINE sa_vh sa_narrow_fp16(sa_vf x) { return (sa_vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif SA_VL == 8
SA_INLINE sa_vf sa_widen_fp16(sa_vh half) { return (sa_vf)_mm256_cvtph_ps((__m128i)half); }
SA_INLINE sa_vh sa_narrow_fp16(sa_vf x) { return (sa_vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
SA_INLINE sa_vf sa_widen_fp16(sa_vh half) { return (sa_vf)vcvt_f32_f16((float16x4_t)half); }
SA_INLINE sa_vh sa_narrow_fp16(sa_vf x) { return (sa_vh)vcvt_f16_f32((float32x4_t)x); }
#else
SA_INLINE sa_vf sa_widen_fp16(sa_vh half) {
    sa_vf x;
    for (int i = 0; i < SA_VL; i++) x[i] = sa_fp16_to_float(half[i]);
    return x;
}

SA_INLINE sa_vh sa_narrow_fp16(sa_vf x) {
    sa_vh half;
    for (int i = 0; i < SA_VL; i++) half[i] = sa_float_to_fp16(x[i]);
    return half;
}
#endif

SA_INLINE sa_vf sa_load_values(const void *row, sinkattn_dtype dtype, int64_t x) {
    if (dtype == SINKATTN_FP32) return sa_load_vf((const float *)row + x);
    const sa_vh half = *(const sa_vh *)((const uint16_t *)row + x);
    return dtype == SINKATTN_BF16 ? sa_widen_bf16(half) : sa_widen_fp16(half);
}

#ifndef SA_PRODUCT
SA_INLINE void sa_block(const sa_product *g, int64_t i, int64_t lane, const int rows, const int vectors, const bool low) {
    sa_vf sum[SA_ROWS][SA_PANEL];
    SA_UNROLL
    for (int r = 0; r < rows; r++) SA_UNROLL
    for (int v = 0; v < vectors; v++) sum[r][v] = sa_splat(0.0f);
    const sa_cell *a = g->a + i * g->a_row, *b = g->b + lane;
    const int64_t a_row = g->a_row, a_col = g->a_col, b_row = g->b_row, to_low = low ? g->b_low - g->b : 0;
    for (int64_t x = 0; x < g->k; x++, a += a_col, b += b_row) {
        sa_vu right[SA_PANEL];
        SA_UNROLL
        for (int v = 0; v < vectors; v++) right[v] = sa_load_vu(b + v * SA_STEP);
        SA_UNROLL
        for (int r = 0; r < rows; r++) {
            const sa_vu left = sa_splat_cell(a[r * a_row]);
            SA_UNROLL
            for (int v = 0; v < vectors; v++) sum[r][v] = SA_CELL_MADD(sum[r][v], left, right[v]);
        }
        if (!low) continue;
        SA_UNROLL
        for (int v = 0; v < vectors; v++) right[v] = sa_load_vu(b + to_low + v * SA_STEP);
        SA_UNROLL
        for (int r = 0; r < rows; r++) {
            const sa_vu left = sa_splat_cell(a[r * a_row]);
            SA_UNROLL
            for (int v = 0; v < vectors; v++) sum[r][v] = SA_CELL_MADD(sum[r][v], left, right[v]);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; r++) {
        float *c = g->c + (i + r) * g->c_row + lane;
        SA_UNROLL
        for (int v = 0; v < vectors; v++, c += SA_VL) {
            if (g->join == SA_SET)
                sa_store_vf(c, sum[r][v]);
            else if (g->join == SA_ADD)
                sa_store_vf(c, sa_load_vf(c) + sum[r][v]);
            else
                sa_store_vf(c, sa_load_vf(c) * sa_load_vf(g->beta + lane + v * SA_STEP) + sum[r][v]);
        }
    }
}

SA_INLINE void sa_panel(const sa_product *g, int64_t lane, const int vectors, const bool low) {
    int64_t i = 0;
    for (; i + SA_ROWS <= g->m; i += SA_ROWS) sa_block(g, i, lane, SA_ROWS, vectors, low);
    switch (g->m - i) {
    case 5: sa_block(g, i, lane, 5, vectors, low); break;
    case 4: sa_block(g, i, lane, 4, vectors, low); break;
    case 3: sa_block(g, i, lane, 3, vectors, low); break;
    case 2: sa_block(g, i, lane, 2, vectors, low); break;
    case 1: sa_block(g, i, lane, 1, vectors, low); break;
    default: break;
    }
}

SA_INLINE void sa_panels(const sa_product *g, const bool low) {
    int64_t lane = 0;
    for (; lane + SA_PANEL * SA_STEP <= g->lanes; lane += SA_PANEL * SA_STEP) sa_panel(g, lane, SA_PANEL, low);
#if SA_PANEL * SA_VL > 16
    for (; lane + 2 * SA_STEP <= g->lanes; lane += 2 * SA_STEP) sa_panel(g, lane, 2, low);
    for (; lane < g->lanes; lane += SA_VL) sa_panel(g, lane, 1, low);
#endif
}

static void sa_product_run(const sa_product *g) {
#if SA_PACK == 2
    if (g->b_low) {
        sa_panels(g, true);
        return;
    }
#endif
    sa_panels(g, false);
}

#endif

SA_INLINE sa_vi sa_seen(const sa_lane_mask *mask, int64_t lane, int32_t key) {
    const sa_vi begin = *(const sa_vi *)(mask->begin + lane), count = *(const sa_vi *)(mask->count + lane);
    const sa_vi in_band = (sa_vi)((sa_vu)(key - begin) < (sa_vu)count);
    if (!mask->has_sink) return in_band;
    return in_band | (key < *(const sa_vi *)(mask->sink_end + lane));
}

#if SA_PACK == 2
SA_INLINE sa_vu sa_pair(sa_vf first, sa_vf second) {
#if SA_VL == 16
    static const uint16_t interleaved[32] = {
            0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (sa_vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(interleaved), halves);
#else
    return __builtin_convertvector(SA_NARROW_BF16(first), sa_vu) | (__builtin_convertvector(SA_NARROW_BF16(second), sa_vu) << 16);
#endif
}
#endif

/* What a vector of lanes sees of a tile: nothing outside of [some.begin, some.end), everything in all, which lies in some. */
typedef struct sa_spans {
    sa_range some, all;
} sa_spans;

static sa_spans sa_spans_of(const sa_softmax_tile *t, int64_t lane) {
    const sa_range keys = {0, t->keys}, none = {0, 0};
    sa_spans spans = {keys, keys};
    if (!t->mask.begin) return spans;
    spans.all = none;
    if (t->mask.has_sink) return spans;
    const int32_t *begin = t->mask.begin + lane, *count = t->mask.count + lane;
    int32_t first = begin[0], last_begin = begin[0], first_end = begin[0] + count[0], last = first_end;
    for (int64_t i = 1; i < SA_VL; i++) {
        const int32_t end = begin[i] + count[i];
        first = begin[i] < first ? begin[i] : first;
        last_begin = begin[i] > last_begin ? begin[i] : last_begin;
        first_end = end < first_end ? end : first_end;
        last = end > last ? end : last;
    }
    spans.some.begin = (sa_position_t)first / SA_PACK * SA_PACK; /* whole cells */
    spans.some.end = sa_min(sa_ceil_div(last, SA_PACK) * SA_PACK, t->keys);
    spans.all.begin = sa_ceil_div(last_begin, SA_PACK) * SA_PACK;
    spans.all.end = (sa_position_t)first_end / SA_PACK * SA_PACK;
    if (spans.all.begin >= spans.all.end) spans.all.begin = spans.all.end = spans.some.begin;
    return spans;
}

SA_INLINE sa_vf sa_masked(const sa_softmax_tile *t, int64_t lane, int64_t key, sa_vf x, sa_vf unseen, const bool masked) {
    return masked ? sa_select(sa_seen(&t->mask, lane, (int32_t)key), x, unseen) : x;
}

SA_INLINE sa_vf sa_scaled_score(const sa_softmax_tile *t, int64_t lane, int64_t key, const bool masked) {
    const sa_vf x = sa_load_vf(t->scores + key * t->row_stride + lane) * t->scale;
    return sa_masked(t, lane, key, x, sa_splat(-INFINITY), masked);
}

/* Masked last, so that the compiler fuses scale and difference alike in both, and a key's weight has the same bits. */
SA_INLINE sa_vf sa_weight(const sa_softmax_tile *t, int64_t lane, int64_t key, sa_vf from, const bool masked) {
    const sa_vf p = sa_exp2(sa_load_vf(t->scores + key * t->row_stride + lane) * t->scale - from);
    return sa_masked(t, lane, key, p, sa_splat(0.0f), masked);
}

/* The maximum of top and some keys' scaled scores in a vector of lanes; NaN is passed over. */
SA_INLINE sa_vf sa_top_score(const sa_softmax_tile *t, int64_t lane, sa_range keys, sa_vf top, const bool masked) {
    sa_vf odd_top = top;
    int64_t key = keys.begin;
    for (; key + 1 < keys.end; key += 2) {
        top = sa_vmax(sa_scaled_score(t, lane, key, masked), top);
        odd_top = sa_vmax(sa_scaled_score(t, lane, key + 1, masked), odd_top);
    }
    if (key < keys.end) top = sa_vmax(sa_scaled_score(t, lane, key, masked), top);
    return sa_vmax(top, odd_top);
}

/* The nearest integer: from 2^23 on a float is one, and SA_ROUND would take it to another. */
SA_INLINE sa_vf sa_whole(sa_vf x) { return sa_select((x < 0x1p23f) & (x > -0x1p23f), x + SA_ROUND - SA_ROUND, x); }

#define SA_PIVOT_SLACK 6.0f /* the pivot stays while no weight passes 2^6, so that O^T is seldom rescaled */

#if SA_PACK == 2
/* A little below a weight, in its upper 16 bits: what that leaves is positive where the weight is, as an infinite value must not meet 0. */
SA_INLINE sa_vu sa_upper(sa_vf weight) {
    const sa_vu bits = (sa_vu)weight;
    return (bits + (sa_vu)(bits != 0)) & 0xffff0000u;
}

/* Two keys' weights as cells of their upper bits, and of what those leave. */
SA_INLINE void sa_store_weights(float *cells, int64_t stride, sa_vf first, sa_vf second) {
    const sa_vu one = sa_upper(first), two = sa_upper(second);
    const sa_vu one_left = (sa_vu)(first - (sa_vf)one), two_left = (sa_vu)(second - (sa_vf)two);
    *(sa_vu *)cells = one >> 16 | two;
    *(sa_vu *)(cells + stride) = one_left >> 16 | (two_left & 0xffff0000u);
}
#endif

/* Some keys' scores become cells of P; returns sum and theirs. */
SA_INLINE sa_vf sa_exp_scores(const sa_softmax_tile *t, int64_t lane, sa_range keys, sa_vf from, sa_vf sum, const bool masked) {
    const int64_t stride = t->row_stride;
    float *cells = t->scores + keys.begin * stride + lane;
    for (int64_t key = keys.begin; key < keys.end; key += SA_PACK, cells += SA_PACK * stride) {
        const sa_vf p = sa_weight(t, lane, key, from, masked);
        sum += p;
#if SA_PACK == 1
        sa_store_vf(cells, p);
#else
        sa_vf q = sa_splat(0.0f);
        if (key + 1 < keys.end) q = sa_weight(t, lane, key + 1, from, masked);
        sum += q;
        sa_store_weights(cells, stride, p, q);
#endif
    }
    return sum;
}

SA_INLINE void sa_zero_cells(const sa_softmax_tile *t, int64_t lane, int64_t begin, int64_t end) {
    const int64_t first = sa_ceil_div(begin, SA_PACK) * SA_PACK, last = sa_ceil_div(end, SA_PACK) * SA_PACK; /* whole cells */
    for (int64_t key = first; key < last; key++) sa_store_vf(t->scores + key * t->row_stride + lane, sa_splat(0.0f));
}

static void sa_softmax_run(const sa_softmax_tile *t) {
    const sa_vf none = sa_splat(-INFINITY);
    for (int64_t lane = 0; lane < t->lanes; lane += SA_VL) {
        const sa_spans spans = sa_spans_of(t, lane);
        const sa_range before_all = {spans.some.begin, spans.all.begin}, after_all = {spans.all.end, spans.some.end};
        sa_vf top = sa_top_score(t, lane, before_all, none, true);
        top = sa_top_score(t, lane, spans.all, top, false);
        top = sa_top_score(t, lane, after_all, top, true);
        const sa_vf before = sa_load_vf(t->pivot + lane), pivot = sa_select(top > before + SA_PIVOT_SLACK, sa_whole(top), before);
        const sa_vf from = sa_select(pivot == none, sa_splat(0.0f), pivot); /* -inf - -inf would be NaN for a lane without keys */
        sa_zero_cells(t, lane, 0, spans.some.begin);
        sa_vf sum = sa_exp_scores(t, lane, before_all, from, sa_splat(0.0f), true);
        sum = sa_exp_scores(t, lane, spans.all, from, sum, false);
        sum = sa_exp_scores(t, lane, after_all, from, sum, true);
        sa_zero_cells(t, lane, spans.some.end, t->keys);
        const sa_vf alpha = sa_select(before == pivot, sa_splat(1.0f), sa_exp2(before - from));
        sa_store_vf(t->alpha + lane, alpha);
        sa_store_vf(t->pivot + lane, pivot);
        sa_store_vf(t->sum + lane, sa_load_vf(t->sum + lane) * alpha + sum);
    }
}

static void sa_join_run(const sa_partial *to, const sa_partial *next, int64_t lanes, int64_t head_dim) {
    float kept[SA_MAX_LANES], added[SA_MAX_LANES];
    for (int64_t lane = 0; lane < lanes; lane++) {
        const sa_joint joint = sa_join_pivots(to->pivot[lane], next->pivot[lane]);
        to->pivot[lane] = joint.pivot;
        to->sum[lane] = to->sum[lane] * joint.kept + next->sum[lane] * joint.added;
        kept[lane] = joint.kept;
        added[lane] = joint.added;
    }
    for (int64_t x = 0; x < head_dim; x++)
        for (int64_t lane = 0; lane < lanes; lane += SA_VL) {
            float *out = to->out + x * lanes + lane;
            const sa_vf more = sa_load_vf(next->out + x * lanes + lane) * sa_load_vf(added + lane);
            sa_store_vf(out, sa_load_vf(out) * sa_load_vf(kept + lane) + more);
        }
}

SA_INLINE sa_vf sa_gradient_at(const sa_gradient_tile *t, int64_t lane, int64_t key, sa_vf lse, sa_vf bias, sa_vf *ds, sa_vf *sink_sum) {
    sa_vf p = sa_exp(sa_load_vf(t->scores + key * t->row_stride + lane) * t->scale - lse);
    sa_vf dp = sa_load_vf(t->dp + key * t->row_stride + lane);
    if (t->mask.begin) { /* both: an unseen NaN must not survive as 0 * NaN */
        const sa_vi seen = sa_seen(&t->mask, lane, (int32_t)key);
        p = sa_select(seen, p, sa_splat(0.0f));
        dp = sa_select(seen, dp, sa_splat(0.0f));
    }
    *sink_sum += p * dp;
    *ds = p * (dp + bias);
    if (t->mask.begin) *ds = sa_select(sa_seen(&t->mask, lane, (int32_t)key), *ds, sa_splat(0.0f));
    return p;
}

static void sa_gradient_run(const sa_gradient_tile *t) {
    for (int64_t lane = 0; lane < t->lanes; lane += SA_VL) {
        sa_vf lse = sa_load_vf(t->lse + lane);
        lse = sa_select(lse == sa_splat(-INFINITY), sa_splat(0.0f), lse);
        const sa_vf bias = sa_load_vf(t->bias + lane);
        sa_vf sink_sum = sa_splat(0.0f);
        for (int64_t key = 0; key < t->keys; key += SA_PACK) {
            sa_vf ds;
            const sa_vf p = sa_gradient_at(t, lane, key, lse, bias, &ds, &sink_sum);
#if SA_PACK == 1
            sa_store_vf((float *)t->p_rows + key * t->row_stride + lane, p);
            sa_store_vf((float *)t->ds_rows + key * t->row_stride + lane, ds);
#else
            sa_vf next_p = sa_splat(0.0f), next_ds = sa_splat(0.0f);
            if (key + 1 < t->keys) next_p = sa_gradient_at(t, lane, key + 1, lse, bias, &next_ds, &sink_sum);
            uint16_t *p_row = (uint16_t *)t->p_rows + key * t->row_stride + lane;
            uint16_t *ds_row = (uint16_t *)t->ds_rows + key * t->row_stride + lane;
            *(sa_vh *)p_row = SA_NARROW_BF16(p);
            *(sa_vh *)ds_row = SA_NARROW_BF16(ds);
            if (key + 1 < t->keys) {
                *(sa_vh *)(p_row + t->row_stride) = SA_NARROW_BF16(next_p);
                *(sa_vh *)(ds_row + t->row_stride) = SA_NARROW_BF16(next_ds);
            }
            *(sa_vu *)(t->ds_keys + key / 2 * t->row_stride + lane) = sa_pair(ds, next_ds);
#endif
        }
        if (t->sink_sum) sa_store_vf(t->sink_sum + lane, sa_load_vf(t->sink_sum + lane) + sink_sum);
    }
}

#include "cpu/cpu_rows_io.h"

static void sa_lane_dot_run(const sa_cell *a, const sa_cell *b, int64_t k, int64_t lanes, float *out) {
    for (int64_t lane = 0; lane < lanes; lane += SA_VL) {
        sa_vf sum = sa_splat(0.0f);
        for (int64_t x = 0; x < k; x++) sum = SA_CELL_MADD(sum, sa_load_vu(a + x * lanes + lane), sa_load_vu(b + x * lanes + lane));
        sa_store_vf(out + lane, sum);
    }
}

static bool sa_all_finite_run(const void *row, sinkattn_dtype dtype, int64_t n) {
    const bool wide = dtype == SINKATTN_FP32;
    const uint32_t exponent = wide ? 0x7f800000u : dtype == SINKATTN_BF16 ? 0x7f80u : 0x7c00u;
    if (wide) {
        uint32_t bad = 0;
        for (int64_t x = 0; x < n; x++) bad |= (((const uint32_t *)row)[x] & exponent) == exponent;
        return !bad;
    }
    uint16_t bad = 0; /* as wide as the elements, so that vectors of them stay vectors */
    for (int64_t x = 0; x < n; x++) bad |= (uint16_t)((((const uint16_t *)row)[x] & (uint16_t)exponent) == (uint16_t)exponent);
    return !bad;
}

const sa_cpu_ops SA_OPS = {
        .pack = SA_PACK,
#ifdef SA_PRODUCT
        .key_step = SA_KEY_STEP,
        .enter = SA_ENTER,
        .leave = SA_LEAVE,
        .product = SA_PRODUCT,
        .rows_to_columns = SA_ROWS_TO_COLUMNS,
#else
        .key_step = 2,
        .product = sa_product_run,
#endif
        .softmax = sa_softmax_run,
        .join = sa_join_run,
        .gradient = sa_gradient_run,
        .rows_to_lanes = sa_rows_to_lanes_run,
        .rows_to_cells = sa_rows_to_cells_run,
        .rows_to_pairs = sa_rows_to_pairs_run,
        .lanes_to_rows = sa_lanes_to_rows_run,
        .store_row = sa_store_row_run,
        .lane_dot = sa_lane_dot_run,
        .all_finite = sa_all_finite_run,
};
