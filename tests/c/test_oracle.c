/* SPDX-License-Identifier: Apache-2.0
 *
 * The oracle against what needs no oracle: closed forms, the edges of the contract, and central differences.
 */
#include <inttypes.h>

#include "sample.h"

static const double inf = (double)INFINITY;

static sinkattn_problem small(sinkattn_op op, int64_t q_len, int64_t k_len, sinkattn_mask mask) {
    return (sinkattn_problem){.op = op,
            .dtype = SINKATTN_FP64,
            .s_aux_dtype = SINKATTN_FP64,
            .batch = 1,
            .num_q_heads = 2,
            .num_kv_heads = 1,
            .head_dim = 8,
            .q_len = q_len,
            .k_len = k_len,
            .mask = mask};
}

static void set_s_aux(sample *s, double value) {
    for (int64_t h = 0; h < s->problem.num_q_heads; h++) sa_store(s->s_aux, s->problem.s_aux_dtype, h, value);
}

static double lse_of(const sample *s, int64_t i) { return sa_load(s->lse, SINKATTN_FP64, i); }

static bool run(sample *s) {
    const sinkattn_device device = oracle_device();
    const sinkattn_status status = sample_run(s, &device, NULL, NULL);
    return CHECK(status.code == SINKATTN_OK, "%s", status.message);
}

static bool all_equal(const array *a, double value) {
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t head = 0; head < a->heads; head++)
            for (int64_t x = 0; x < a->head_dim; x++) {
                const double got = array_get(a, 0, row, head, x);
                if (isnan(value) ? !isnan(got) : got != value) return false;
            }
    return true;
}

/* One row, one key: P is the sigmoid of S - s, and dS and ds_aux are P (1 - P) dP up to sign. The scale never touches s. */
static void test_one_key_is_a_sigmoid(void) {
    sinkattn_problem problem = small(SINKATTN_BWD, 1, 1, (sinkattn_mask){.has_right = true});
    problem.softmax_scale = 0.3;
    sample s = sample_new(&problem, true);
    if (!run(&s)) return;
    for (int64_t h = 0; h < 2; h++) {
        double score = 0.0, dp = 0.0;
        for (int64_t x = 0; x < 8; x++) {
            score += 0.3 * array_get(&s.q, 0, 0, h, x) * array_get(&s.k, 0, 0, 0, x);
            dp += array_get(&s.dout, 0, 0, h, x) * array_get(&s.v, 0, 0, 0, x);
        }
        const double sink = sa_load(s.s_aux, SINKATTN_FP64, h), p = 1.0 / (1.0 + exp(sink - score));
        const double g = sa_load(s.dlse, SINKATTN_FP64, h), ds = p * ((1.0 - p) * dp + g);
        CHECK(fabs(lse_of(&s, h) - log(exp(score) + exp(sink))) < 1e-14, "lse %.17g", lse_of(&s, h));
        CHECK(fabs(sa_load(s.ds_aux, SINKATTN_FP64, h) - (1.0 - p) * (g - p * dp)) < 1e-14, "ds_aux of head %" PRId64, h);
        for (int64_t x = 0; x < 8; x++) {
            CHECK(fabs(array_get(&s.out, 0, 0, h, x) - p * array_get(&s.v, 0, 0, 0, x)) < 1e-14, "out");
            CHECK(fabs(array_get(&s.dq, 0, 0, h, x) - 0.3 * ds * array_get(&s.k, 0, 0, 0, x)) < 1e-14, "dq");
        }
    }
    sample_free(&s);
}

/* Two-row calls whose first row stands before every key. */
static void test_a_row_without_keys(void) {
    const sinkattn_problem problem = small(SINKATTN_BWD, 2, 1, (sinkattn_mask){.has_right = true});
    sample s = sample_new(&problem, true);
    set_s_aux(&s, 0.75);
    sample fwd = sample_widened(&s);
    fwd.problem.op = SINKATTN_FWD;
    if (!run(&fwd)) return;
    for (int64_t h = 0; h < 2; h++) {
        CHECK(lse_of(&fwd, 2 * h) == 0.75, "LSE is s, got %g", lse_of(&fwd, 2 * h));
        for (int64_t x = 0; x < 8; x++) CHECK(array_get(&fwd.out, 0, 0, h, x) == 0.0, "O is 0");
    }
    if (!run(&s)) return;
    for (int64_t h = 0; h < 2; h++)
        for (int64_t x = 0; x < 8; x++) CHECK(array_get(&s.dq, 0, 0, h, x) == 0.0, "dQ is 0");
    fwd.problem.s_aux_dtype = SINKATTN_NO_DTYPE;
    void *kept = fwd.s_aux;
    fwd.s_aux = NULL;
    if (run(&fwd)) CHECK(lse_of(&fwd, 0) == -inf && array_get(&fwd.out, 0, 0, 0, 0) == 0.0, "without s_aux LSE is -inf, O is 0");
    fwd.s_aux = kept;
    sample_free(&fwd);
    sample_free(&s);
}

/* ds_aux of rows that see nothing is the sum of g. */
static void test_ds_aux_of_rows_without_keys_is_g(void) {
    const sinkattn_problem problem = small(SINKATTN_BWD, 3, 0, (sinkattn_mask){0});
    sample s = sample_new(&problem, true);
    if (!run(&s)) return;
    for (int64_t h = 0; h < 2; h++) {
        double g = 0.0;
        for (int64_t i = 0; i < 3; i++) g += sa_load(s.dlse, SINKATTN_FP64, 3 * h + i);
        CHECK(fabs(sa_load(s.ds_aux, SINKATTN_FP64, h) - g) < 1e-15, "ds_aux of head %" PRId64, h);
    }
    sample_free(&s);
}

static void test_sinks_at_the_edges(void) {
    const sinkattn_problem problem = small(SINKATTN_BWD, 3, 5, (sinkattn_mask){.has_right = true});
    const double values[] = {inf, 100.0, 1e4, (double)NAN};
    for (int i = 0; i < 4; i++) {
        sample s = sample_new(&problem, true);
        set_s_aux(&s, values[i]);
        sample fwd = sample_widened(&s);
        fwd.problem.op = SINKATTN_FWD;
        if (!run(&fwd)) return;
        for (int64_t j = 0; j < 6; j++) {
            const double lse = lse_of(&fwd, j);
            sa_store(s.lse, SINKATTN_FP64, j, lse);
            CHECK(isnan(values[i]) ? isnan(lse) : lse == values[i] || (values[i] == 100.0 && fabs(lse - 100.0) < 1e-12), "s %g: LSE %g",
                    values[i], lse);
        }
        if (isnan(values[i]) || isinf(values[i])) CHECK(all_equal(&fwd.out, isnan(values[i]) ? values[i] : 0.0), "s %g: O", values[i]);
        for (int64_t row = 0; row < 3; row++)
            for (int64_t h = 0; h < 2; h++)
                for (int64_t x = 0; x < 8; x++) array_set(&s.out, 0, row, h, x, array_get(&fwd.out, 0, row, h, x));
        if (!run(&s)) return;
        if (isnan(values[i])) CHECK(all_equal(&s.dq, values[i]) && all_equal(&s.dk, values[i]), "s NaN: NaN gradients");
        if (isinf(values[i])) CHECK(all_equal(&s.dq, 0.0) && all_equal(&s.dk, 0.0) && all_equal(&s.dv, 0.0), "s +inf: gradients are 0");
        sample_free(&fwd);
        sample_free(&s);
    }
}

static void test_no_sink_is_a_sink_of_minus_infinity(void) {
    const sinkattn_problem problem = small(SINKATTN_FWD, 4, 6, (sinkattn_mask){.has_right = true});
    sample s = sample_new(&problem, true);
    set_s_aux(&s, -inf);
    if (!run(&s)) return;
    const uint64_t with = sample_hash(&s);
    sample_reset(&s);
    void *kept = s.s_aux;
    s.s_aux = NULL;
    s.problem.s_aux_dtype = SINKATTN_NO_DTYPE;
    if (run(&s)) CHECK(sample_hash(&s) == with, "bits differ");
    s.s_aux = kept;
    sample_free(&s);
}

/* A visible score of -inf weighs nothing; a row of such scores alone is a row without keys. */
static void test_scores_of_minus_infinity(void) {
    sinkattn_problem problem = small(SINKATTN_FWD, 1, 2, (sinkattn_mask){0});
    problem.s_aux_dtype = SINKATTN_NO_DTYPE;
    sample s = sample_new(&problem, true);
    for (int64_t h = 0; h < 2; h++) array_set(&s.q, 0, 0, h, 0, 1.0);
    array_set(&s.k, 0, 0, 0, 0, -inf);
    if (run(&s))
        for (int64_t x = 0; x < 8; x++)
            CHECK(array_get(&s.out, 0, 0, 1, x) == array_get(&s.v, 0, 1, 0, x), "the other key has all the weight");
    array_set(&s.k, 0, 1, 0, 0, -inf);
    if (run(&s)) CHECK(lse_of(&s, 0) == -inf && all_equal(&s.out, 0.0), "LSE %g", lse_of(&s, 0));
    sample_free(&s);
}

/* NaN in a key reaches the rows that see it, and no other. */
static void test_nan_stays_where_it_is_seen(void) {
    const sinkattn_problem problem = small(SINKATTN_FWD, 6, 6, (sinkattn_mask){.has_right = true, .has_left = true, .left = 1});
    sample s = sample_new(&problem, true);
    array_set(&s.k, 0, 2, 0, 3, (double)NAN);
    array_set(&s.q, 0, 5, 1, 0, (double)NAN);
    if (!run(&s)) return;
    for (int64_t i = 0; i < 6; i++)
        for (int64_t h = 0; h < 2; h++) {
            const bool hit = i == 2 || i == 3 || (i == 5 && h == 1);
            CHECK(isnan(array_get(&s.out, 0, i, h, 0)) == hit && isnan(lse_of(&s, 6 * h + i)) == hit, "row %" PRId64 ", head %" PRId64, i,
                    h);
        }
    sample_free(&s);
}

/* L = sum w out + sum u lse, whose gradients the backward is given as dout and dlse. */
static double loss(sample *fwd, const sample *s) {
    if (!run(fwd)) return (double)NAN;
    double sum = 0.0;
    const array *out = &fwd->out;
    for (int64_t b = 0; b < out->batch; b++)
        for (int64_t row = 0; row < out->rows; row++)
            for (int64_t head = 0; head < out->heads; head++)
                for (int64_t x = 0; x < out->head_dim; x++) sum += array_get(&s->dout, b, row, head, x) * array_get(out, b, row, head, x);
    for (int64_t i = 0; i < s->num_stats; i++) {
        const double lse = lse_of(fwd, i);
        if (isfinite(lse)) sum += sa_load(s->dlse, SINKATTN_FP64, i) * lse;
    }
    return sum;
}

static void check_differences(const char *name, sample *fwd, const sample *s, array *input, const array *gradient) {
    const double step = 1e-5;
    for (int64_t n = 0; n < 12 && input->block; n++) {
        const int64_t b = pick(0, input->batch - 1), row = pick(0, input->rows - 1), head = pick(0, input->heads - 1),
                      x = pick(0, input->head_dim - 1);
        const double value = array_get(input, b, row, head, x);
        array_set(input, b, row, head, x, value + step);
        const double above = loss(fwd, s);
        array_set(input, b, row, head, x, value - step);
        const double difference = (above - loss(fwd, s)) / (2.0 * step), got = array_get(gradient, b, row, head, x);
        array_set(input, b, row, head, x, value);
        CHECK(fabs(difference - got) <= 1e-7 * (1.0 + fabs(difference)), "d%s is %.12g, differences say %.12g: %s", name, got, difference,
                problem_text(&s->problem));
    }
}

static void test_gradients_by_central_differences(void) {
    const sinkattn_mask masks[] = {{0}, {.has_right = true}, {.has_left = true, .left = 2, .has_right = true, .num_sink_tokens = 2},
            {.has_left = true, .left = 1, .has_right = true, .right = 2}};
    for (int i = 0; i < 16; i++) {
        sinkattn_problem problem = small(SINKATTN_BWD, pick(1, 7), pick(1, 8), masks[i % 4]);
        problem.batch = pick(1, 2);
        problem.packed = i >= 8;
        problem.num_q_heads = 4;
        problem.num_kv_heads = i % 3 ? 2 : 4;
        if (i % 4 == 2) problem.head_dim = 16, problem.head_dim_v = 8;
        sample s = sample_new(&problem, true), fwd = sample_widened(&s);
        fwd.problem.op = SINKATTN_FWD;
        if (!run(&s)) return;
        check_differences("q", &fwd, &s, &fwd.q, &s.dq);
        check_differences("k", &fwd, &s, &fwd.k, &s.dk);
        check_differences("v", &fwd, &s, &fwd.v, &s.dv);
        for (int64_t h = 0; h < 4; h++) {
            const double value = sa_load(fwd.s_aux, SINKATTN_FP64, h), got = sa_load(s.ds_aux, SINKATTN_FP64, h);
            sa_store(fwd.s_aux, SINKATTN_FP64, h, value + 1e-5);
            const double above = loss(&fwd, &s);
            sa_store(fwd.s_aux, SINKATTN_FP64, h, value - 1e-5);
            const double difference = (above - loss(&fwd, &s)) / 2e-5;
            sa_store(fwd.s_aux, SINKATTN_FP64, h, value);
            CHECK(fabs(difference - got) <= 1e-7 * (1.0 + fabs(difference)), "ds_aux is %.12g, differences say %.12g", got, difference);
        }
        sample_free(&fwd);
        sample_free(&s);
    }
}

/* One-hot values give back P itself, so every zero and every weight of the mask is read off. */
static void test_one_hot_values_show_the_key_set(void) {
    for (int i = 0; i < 60; i++) {
        sinkattn_problem problem =
                small(SINKATTN_FWD, pick(1, 8), pick(1, 8), (sinkattn_mask){.has_left = one_in(2), .has_right = one_in(2)});
        if (problem.mask.has_left) problem.mask.left = pick(0, 9);
        if (problem.mask.has_right) problem.mask.right = pick(0, 9);
        problem.mask.num_sink_tokens = pick(0, 3);
        sample s = sample_new(&problem, true);
        for (int64_t j = 0; j < problem.k_len; j++)
            for (int64_t x = 0; x < 8; x++) array_set(&s.v, 0, j, 0, x, x == j);
        if (!run(&s)) return;
        for (int64_t row = 0; row < problem.q_len; row++)
            for (int64_t j = 0; j < problem.k_len; j++) {
                const int64_t p = row + problem.k_len - problem.q_len;
                const bool right = !problem.mask.has_right || j - p <= problem.mask.right;
                const bool left = !problem.mask.has_left || p - j <= problem.mask.left || j < problem.mask.num_sink_tokens;
                CHECK((array_get(&s.out, 0, row, 1, j) > 0.0) == (left && right), "row %" PRId64 ", key %" PRId64 ": %s", row, j,
                        problem_text(&problem));
            }
        sample_free(&s);
    }
}

const test oracle_tests[] = {TEST(one_key_is_a_sigmoid), TEST(a_row_without_keys), TEST(ds_aux_of_rows_without_keys_is_g),
        TEST(sinks_at_the_edges), TEST(no_sink_is_a_sink_of_minus_infinity), TEST(scores_of_minus_infinity),
        TEST(nan_stays_where_it_is_seen), TEST(gradients_by_central_differences), TEST(one_hot_values_show_the_key_set), {0}};
