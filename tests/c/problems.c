/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "sample.h"

sinkattn_device oracle_device(void) { return (sinkattn_device){.backend = SINKATTN_CPU, .arch = SINKATTN_CPU_ORACLE, .workers = 1}; }

sinkattn_device gpu(int32_t arch) { return (sinkattn_device){.backend = SINKATTN_CUDA, .arch = arch, .workers = 132}; }

sinkattn_plan check_planned(const sinkattn_problem *problem, sinkattn_device device, const char *name) {
    sinkattn_plan plan = {0};
    char best[96];
    snprintf(best, sizeof best, "sa_%s_%s_%s is the best", sa_op_name(problem->op), device.backend == SINKATTN_CPU ? "cpu" : "cuda", name);
    const sinkattn_status status = sinkattn_make_plan(problem, &device, &plan);
    if (!CHECK(status.code == SINKATTN_OK, "%s: %s: %s", best, status.message, problem_text(problem))) return plan;
    const char *taken = sinkattn_variant(plan.variant)->name;
    const bool is_best = strncmp(taken, best, strlen(taken)) == 0 && best[strlen(taken)] == ' ';
    CHECK(is_best && strstr(plan.reason, best), "%s on %d, %s is taken: %s: %s", best, (int)device.arch, taken, plan.reason,
            problem_text(problem));
    return plan;
}

void at_each_level(void (*body)(const sinkattn_device *device, sinkattn_dtype dtype)) {
    sinkattn_device device;
    const sinkattn_status status = sinkattn_query_cpu(2, &device);
    if (!CHECK(status.code == SINKATTN_OK, "%s", status.message)) return;
    for (; device.arch >= 0; device.arch--)
        for (sinkattn_dtype dtype = SINKATTN_BF16; dtype <= SINKATTN_FP32; dtype++) body(&device, dtype);
}

const char *problem_text(const sinkattn_problem *p) {
    static char text[512];
    char left[24] = "-1", right[24] = "-1";
    if (p->mask.has_left) snprintf(left, sizeof left, "%" PRId64, p->mask.left);
    if (p->mask.has_right) snprintf(right, sizeof right, "%" PRId64, p->mask.right);
    snprintf(text, sizeof text,
            "op %d, %s, s_aux %s, %sbatch %" PRId64 ", q_len %" PRId64 ", k_len %" PRId64 ", heads %" PRId64 ":%" PRId64
            ", head_dim %" PRId64 ":%" PRId64 ", window (%s, %s), sink tokens %" PRId64 ", pages %" PRId64 " of %" PRId64
            ", scale %g, splits %" PRId64 "%s",
            (int)p->op, sa_dtype_name(p->dtype), sa_dtype_name(p->s_aux_dtype), p->packed ? "packed, " : "", p->batch, p->q_len, p->k_len,
            p->num_q_heads, p->num_kv_heads, p->head_dim, sa_head_dim_v(p), left, right, p->mask.num_sink_tokens, p->num_pages,
            p->page_size, p->softmax_scale, p->num_splits, p->invariant ? ", invariant" : "");
    return text;
}

static int64_t among(const int64_t *values, int64_t count) { return values[pick(0, count - 1)]; }
#define AMONG(...) among((const int64_t[]){__VA_ARGS__}, (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

static sinkattn_mask random_mask(int64_t k_len) {
    sinkattn_mask mask = {.has_right = !one_in(4), .num_sink_tokens = AMONG(0, 0, 1, 4, 64, k_len + 3)};
    if (mask.has_right) mask.right = one_in(4) ? AMONG(1, 5, 40, k_len, INT32_MAX) : 0;
    mask.has_left = one_in(2);
    if (mask.has_left) mask.left = AMONG(0, 1, 7, 31, 126, 127, 128, sa_max(0, k_len - 1), k_len, INT32_MAX, INT64_MAX);
    return mask;
}

static void choose_decode(sinkattn_problem *p) {
    p->invariant = one_in(4);
    p->num_splits = p->invariant || p->packed ? pick(0, 1) : AMONG(0, 0, 1, 2, 3, 50);
    if (!p->packed) {
        p->q_len = AMONG(1, 1, 1, 2, 5, 17);
        p->mask.has_right = true;
        p->mask.right = 0;
    }
    if (p->num_splits > 1 && one_in(2)) p->k_len = pick(257, 700);
    if (one_in(2)) return;
    p->page_size = AMONG(1, 3, 16, 64, 128, 256);
    p->k_len = p->page_size * sa_ceil_div(p->k_len, p->page_size);
    p->num_pages = pick(1, 2 + p->batch * p->k_len / p->page_size);
}

/* Keeps the oracle's work bounded: rows first, then sequences. */
static void bound_work(sinkattn_problem *p) {
    const int64_t most = p->op == SINKATTN_BWD ? 250000 : 800000;
    while (p->batch * p->num_q_heads * p->q_len * p->k_len * p->head_dim > most && p->q_len > 1) p->q_len = sa_ceil_div(p->q_len, 2);
    while (p->batch * p->num_q_heads * p->q_len * p->k_len * p->head_dim > most && p->batch > 1) p->batch--;
}

sinkattn_problem random_problem(const sinkattn_variant_info *info, sinkattn_dtype dtype) {
    const int64_t group = AMONG(1, 1, 2, 3, 5, 8, 16);
    sinkattn_problem p = {
            .op = info->op, .dtype = dtype, .packed = one_in(3), .batch = AMONG(0, 1, 1, 1, 2, 3), .num_kv_heads = AMONG(1, 1, 2, 3)};
    p.num_q_heads = group * p.num_kv_heads;
    p.s_aux_dtype =
            one_in(4) ? SINKATTN_NO_DTYPE : (sinkattn_dtype)pick(SINKATTN_BF16, dtype == SINKATTN_FP64 ? SINKATTN_FP64 : SINKATTN_FP32);
    p.head_dim = sa_min(AMONG(8, 8, 16, 24, 40, 64, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576), info->max_head_dim);
    if (one_in(4) || p.head_dim > SA_MAX_HEAD_DIM_V) p.head_dim_v = 8 * (int32_t)pick(1, sa_min(p.head_dim, SA_MAX_HEAD_DIM_V) / 8);
    p.q_len = one_in(12) ? 0 : AMONG(1, pick(1, 8), pick(1, 40), pick(1, 150));
    p.k_len = one_in(12) ? 0 : AMONG(p.q_len, pick(1, 8), pick(1, 150), pick(120, 400));
    p.mask = random_mask(p.k_len);
    p.softmax_scale = one_in(3) ? (one_in(2) ? 2.0 : -0.7) / sqrt((double)p.head_dim) : 0.0;
    if (p.op == SINKATTN_DECODE) choose_decode(&p);
    bound_work(&p);
    return p;
}

const sinkattn_variant_info *forward_of_order(const sinkattn_variant_info *forward) {
    char general[64];
    snprintf(general, sizeof general, "%s", forward->name);
    char *const tile = strstr(general, "_tile"), *const window = strstr(general, "90_d") ? strstr(general, "_window") : NULL,
                *const narrow = strstr(general, "_d96");
    if (tile) *tile = 0;
    if (window) *window = 0;
    if (narrow) memcpy(narrow, "_d128", sizeof "_d128");
    const sinkattn_variant_info *row;
    for (int32_t i = 0; (row = sinkattn_variant(i)); i++)
        if (strcmp(row->name, general) == 0) return row;
    return forward;
}
