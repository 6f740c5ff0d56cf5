/* SPDX-License-Identifier: Apache-2.0
 *
 * Number formats, and the identities of the softmax with a sink. Host and device.
 *
 * LSE = log(sum_j exp(S_ij) + exp(s)) in natural-log units, sink included; the raw LSE is that of the keys alone. The online softmax of
 * a row is a pivot m, the sum l of exp(S - m), and o = sum exp(S - m) v over its keys, from (-inf, 0, 0) on. Chunks of keys join in
 * ascending order: sa_join_pivots. The sink joins once, at the row's end, as the partial (s, 1, 0): sa_end_row. So s = -inf is bit for bit
 * no sink, and no sink, however large, costs the keys' sum its precision.
 */
#ifndef SA_NUMERICS_H
#define SA_NUMERICS_H

#include <math.h>
#include <string.h>

#include "mask.h"

#define SA_LOG2_E 1.44269504088896340736

SA_HD float sa_bf16_to_float(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Round to nearest even; NaN stays NaN. */
SA_HD uint16_t sa_float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)((bits >> 16) | 0x0040u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

SA_HD float sa_fp16_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
    uint32_t bits;
    float x;
    if (exponent == 0x1fu) {
        bits = sign | 0x7f800000u | (fraction << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112u) << 23) | (fraction << 13);
    } else { /* subnormal: fraction * 2^-24 is exact in fp32 */
        x = (float)fraction * 0x1p-24f;
        return sign ? -x : x;
    }
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Round to nearest even, overflow to infinity; NaN stays NaN. */
SA_HD uint16_t sa_float_to_fp16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (bits >= 0x38800000u) return (uint16_t)(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
    float magnitude; /* below 2^-14: adding 0.5 leaves the value's multiples of 2^-24, rounded, in the low bits */
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000u));
}

SA_HD int64_t sa_dtype_bytes(sinkattn_dtype dtype) { return dtype == SINKATTN_FP64 ? 8 : dtype == SINKATTN_FP32 ? 4 : 2; }

SA_HD double sa_load(const void *data, sinkattn_dtype dtype, int64_t index) {
    if (dtype == SINKATTN_FP64) return ((const double *)data)[index];
    if (dtype == SINKATTN_FP32) return ((const float *)data)[index];
    const uint16_t bits = ((const uint16_t *)data)[index];
    return dtype == SINKATTN_BF16 ? sa_bf16_to_float(bits) : sa_fp16_to_float(bits);
}

SA_HD void sa_store(void *data, sinkattn_dtype dtype, int64_t index, double x) {
    if (dtype == SINKATTN_FP64)
        ((double *)data)[index] = x;
    else if (dtype == SINKATTN_FP32)
        ((float *)data)[index] = (float)x;
    else
        ((uint16_t *)data)[index] = dtype == SINKATTN_BF16 ? sa_float_to_bf16((float)x) : sa_float_to_fp16((float)x);
}

/* s_aux of a head; -inf, the neutral sink, when there is none. */
SA_HD double sa_s_aux(const sinkattn_fwd_args *args, int64_t head) {
    return args->s_aux ? sa_load(args->s_aux, args->problem.s_aux_dtype, head) : -(double)INFINITY;
}

/* Columns of v, out and their gradients. */
SA_HD int64_t sa_head_dim_v(const sinkattn_problem *problem) { return problem->head_dim_v ? problem->head_dim_v : problem->head_dim; }
SA_HD bool sa_has_narrow_values(const sinkattn_problem *problem) { return sa_head_dim_v(problem) != problem->head_dim; }

/* Rows of a kv head: query tokens times its query heads. */
SA_HD int64_t sa_kv_head_rows(const sinkattn_problem *problem) { return problem->q_len * (problem->num_q_heads / problem->num_kv_heads); }

SA_HD double sa_softmax_scale(const sinkattn_problem *problem) {
    return problem->softmax_scale != 0.0 ? problem->softmax_scale : 1.0 / sqrt((double)problem->head_dim);
}

/* l of the sink as a partial. */
SA_HD double sa_sink_sum(double s) { return s == -(double)INFINITY ? 0.0 : s == s ? 1.0 : s; }

/* exp(x - pivot) where both may be the same infinity: 0 for a missing term (-inf), 1 for the pivot itself. */
SA_HD double sa_exp_minus(double x, double pivot) {
    if (x == -(double)INFINITY) return 0.0;
    return x == pivot ? 1.0 : exp(x - pivot);
}

SA_HD double sa_lse(double pivot, double sum) { return sum == 0.0 ? -(double)INFINITY : pivot + log(sum); }

/* 2^n for an integer n of at most 0, or -inf; 0 where that is no normal number. */
SA_HD float sa_power_of_two(float n) {
    const uint32_t bits = n < -126.0f ? 0u : (uint32_t)(int32_t)(n + 127.0f) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Two partials (m, l, o) of a row become one: l and o are `kept` times the first's plus `added` times the second's. Here pivots are in
 * units of log(2), and integers: both factors are powers of two, so only the addition rounds, whether or not it is fused. */
typedef struct sa_joint {
    float pivot, kept, added;
} sa_joint;

SA_HD sa_joint sa_join_pivots(float first, float second) {
    const float top = second > first ? second : first;
    const sa_joint joint = {top, first == top ? 1.0f : sa_power_of_two(first - top), second == top ? 1.0f : sa_power_of_two(second - top)};
    return joint;
}

/* The end of a row. */
typedef struct sa_row_end {
    double factor; /* out = factor * o */
    double lse, lse_raw;
} sa_row_end;

/* From pivot and sum over the keys. A NaN in s stays. */
SA_HD sa_row_end sa_end_row(double pivot, double sum, double s) {
    const double top = pivot > s ? pivot : s, kept = sa_exp_minus(pivot, top);
    const double total = sum * kept + sa_sink_sum(s) * sa_exp_minus(s, top);
    sa_row_end end;
    end.factor = total == 0.0 ? 0.0 : kept / total;
    end.lse = sa_lse(top, total);
    end.lse_raw = sa_lse(pivot, sum);
    return end;
}

#endif
