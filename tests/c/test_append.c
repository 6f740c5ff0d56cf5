/* SPDX-License-Identifier: Apache-2.0
 *
 * Where new keys go: behind those in use, or to slots by number.
 */
#include <string.h>

#include "sample.h"

enum { APPEND_BATCH = 2, APPEND_NEW = 2, APPEND_HEADS = 2, APPEND_DIM = 16, APPEND_PAGE = 4, APPEND_PAGES = 6, APPEND_CAPACITY = 8 };

/* Rows of the cache that were written, or -1 where the call was refused and left everything as it was. Values have half the columns. */
static int count_appended(const int32_t *used, const int32_t *block_table, sinkattn_status *status) {
    enum { ROW = APPEND_HEADS * APPEND_DIM, ROW_V = ROW / 2, NUM_ROWS = APPEND_PAGES * APPEND_PAGE };
    static float k_cache[NUM_ROWS][ROW], v_cache[NUM_ROWS][ROW_V], k[APPEND_BATCH * APPEND_NEW][ROW], v[APPEND_BATCH * APPEND_NEW][ROW_V];
    const sinkattn_problem problem = {.op = SINKATTN_DECODE,
            .dtype = SINKATTN_FP32,
            .batch = APPEND_BATCH,
            .num_q_heads = APPEND_HEADS,
            .num_kv_heads = APPEND_HEADS,
            .head_dim = APPEND_DIM,
            .q_len = APPEND_NEW,
            .k_len = APPEND_CAPACITY,
            .page_size = APPEND_PAGE,
            .num_pages = APPEND_PAGES,
            .head_dim_v = APPEND_DIM / 2};
    int32_t after[APPEND_BATCH] = {-7, -7};
    sinkattn_append_args args = {.cache = {.fwd = {.problem = problem,
                                                   .k = {k_cache, APPEND_PAGE * ROW, ROW, APPEND_DIM},
                                                   .v = {v_cache, APPEND_PAGE * ROW_V, ROW_V, APPEND_DIM / 2}},
                                         .cache_seqlens = used,
                                         .block_table = block_table,
                                         .block_table_stride = APPEND_CAPACITY / APPEND_PAGE},
            .k = {k, APPEND_NEW * ROW, ROW, APPEND_DIM},
            .v = {v, APPEND_NEW * ROW_V, ROW_V, APPEND_DIM / 2},
            .cache_seqlens = after};
    for (int r = 0; r < NUM_ROWS; r++)
        for (int x = 0; x < ROW; x++) k_cache[r][x] = v_cache[r][x / 2] = -1.0f;
    for (int r = 0; r < APPEND_BATCH * APPEND_NEW; r++)
        for (int x = 0; x < ROW; x++) k[r][x] = (float)(r * ROW + x), v[r][x / 2] = (float)(1000 + r * ROW_V + x / 2);
    *status = sinkattn_append(&args, SINKATTN_CPU, &(sinkattn_context){0});
    int written = 0;
    for (int r = 0; r < NUM_ROWS; r++) written += k_cache[r][0] != -1.0f || v_cache[r][0] != -1.0f;
    if (status->code != SINKATTN_OK) return written || after[0] != -7 || after[1] != -7 ? written : -1;
    for (int b = 0; b < APPEND_BATCH; b++)
        for (int i = 0; i < APPEND_NEW; i++) {
            const int slot = used[b] + i, row = block_table[b * 2 + slot / APPEND_PAGE] * APPEND_PAGE + slot % APPEND_PAGE;
            const int from = b * APPEND_NEW + i;
            CHECK(!memcmp(k_cache[row], k[from], sizeof k[0]) && !memcmp(v_cache[row], v[from], sizeof v[0]), "row %d of %d", i, b);
        }
    CHECK(after[0] == used[0] + APPEND_NEW && after[1] == used[1] + APPEND_NEW, "%d and %d in use", after[0], after[1]);
    return written;
}

/* All that is wrong is refused before anything is written. */
static void test_append_behind(void) {
    const struct {
        int32_t used[APPEND_BATCH], block_table[4];
        const char *fragment;
    } table[] = {{{0, 6}, {3, -1, 5, 0}, NULL}, {{3, 0}, {3, 1, 4, INT32_MAX}, NULL},
            {{0, 7}, {3, 1, 5, 0}, "cache_seqlens[1] is 7; it must be at least 0 and leave room for 2 new keys"},
            {{-1, 0}, {3, 1, 5, 0}, "cache_seqlens[0] is -1"}, {{INT32_MAX, 0}, {3, 1, 5, 0}, "in a cache that holds 8"},
            {{0, INT32_MIN}, {3, 1, 5, 0}, "cache_seqlens[1] is -2147483648"},
            {{0, 3}, {3, -1, 5, 6}, "block_table[1][1] is 6; it must be a page from 0 to 5"},
            {{4, 3}, {3, -1, 5, 0}, "block_table[0][1] is -1"}};
    for (size_t i = 0; i < COUNT(table); i++) {
        sinkattn_status status;
        const int written = count_appended(table[i].used, table[i].block_table, &status);
        if (!table[i].fragment)
            CHECK(written == APPEND_BATCH * APPEND_NEW, "call %zu wrote %d rows: %s", i, written, status.message);
        else
            CHECK(written == -1 && strstr(status.message, table[i].fragment), "call %zu wrote %d rows: %s", i, written, status.message);
    }
    static _Alignas(16) float rows[4][8];
    int32_t lengths[1] = {0};
    sinkattn_append_args shared = {.cache = {.fwd = {.k = {rows[0], 8, 8, 8}, .v = {rows[1], 8, 8, 8}}, .cache_seqlens = lengths},
            .k = {rows[2], 8, 8, 8},
            .v = {rows[3], 8, 8, 8},
            .cache_seqlens = lengths};
    shared.cache.fwd.problem = (sinkattn_problem){.op = SINKATTN_DECODE,
            .dtype = SINKATTN_FP32,
            .batch = 1,
            .num_q_heads = 1,
            .num_kv_heads = 1,
            .head_dim = 8,
            .q_len = 1,
            .k_len = 1};
    const sinkattn_status refused = sinkattn_append(&shared, SINKATTN_CPU, &(sinkattn_context){0});
    CHECK(refused.code == SINKATTN_INVALID && strstr(refused.message, "cache.cache_seqlens and cache_seqlens overlap"), "%s",
            refused.message);
    const sinkattn_append_args nothing = {
            .cache.fwd.problem = {.op = SINKATTN_DECODE, .dtype = SINKATTN_BF16, .num_q_heads = 1, .num_kv_heads = 1, .head_dim = 8}};
    const sinkattn_context context = {0};
    CHECK(sinkattn_append(&nothing, SINKATTN_CPU, &context).code == SINKATTN_OK, "no sequences");
    CHECK(sinkattn_append(NULL, SINKATTN_CPU, &context).code == SINKATTN_INVALID, "no arguments");
    CHECK(sinkattn_append(&nothing, SINKATTN_CPU, NULL).code == SINKATTN_INVALID, "no context");
    CHECK(sinkattn_append(&nothing, (sinkattn_backend)5, &context).code == SINKATTN_INVALID, "no such backend");
}

enum { SLOT_PAGES = 3, SLOT_PAGE = 4, SLOT_ROWS = 4 };

/* A cache of 12 slots of one head, keys beside values as engines keep them, and 4 new rows. */
typedef struct slot_call {
    float memory[SLOT_PAGES * SLOT_PAGE][2][APPEND_DIM];
    float k[SLOT_ROWS][APPEND_DIM], v[SLOT_ROWS][APPEND_DIM];
    int64_t slots[SLOT_ROWS];
    sinkattn_append_args args;
} slot_call;

static slot_call *slot_call_of(const int64_t *slots) {
    static _Alignas(16) slot_call c;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < SLOT_ROWS; i++) {
        c.slots[i] = slots[i];
        for (int x = 0; x < APPEND_DIM; x++) c.k[i][x] = (float)(i + 1), c.v[i][x] = (float)(10 * (i + 1));
    }
    const int64_t row = 2 * APPEND_DIM;
    c.args = (sinkattn_append_args){.cache.fwd = {.problem = {.op = SINKATTN_DECODE,
                                                          .dtype = SINKATTN_FP32,
                                                          .packed = true,
                                                          .num_q_heads = 1,
                                                          .num_kv_heads = 1,
                                                          .head_dim = APPEND_DIM,
                                                          .q_len = SLOT_ROWS,
                                                          .page_size = SLOT_PAGE,
                                                          .num_pages = SLOT_PAGES},
                                            .k = {c.memory[0][0], SLOT_PAGE * row, row, APPEND_DIM},
                                            .v = {c.memory[0][1], SLOT_PAGE * row, row, APPEND_DIM}},
            .k = {c.k, 0, APPEND_DIM, APPEND_DIM},
            .v = {c.v, 0, APPEND_DIM, APPEND_DIM},
            .slot_mapping = c.slots};
    return &c;
}

/* Slots that hold something. */
static int count_slots(const slot_call *c) {
    int count = 0;
    for (int slot = 0; slot < SLOT_PAGES * SLOT_PAGE; slot++) count += c->memory[slot][0][0] != 0.0f || c->memory[slot][1][0] != 0.0f;
    return count;
}

static sinkattn_status append_slots(slot_call *c) { return sinkattn_append(&c->args, SINKATTN_CPU, &(sinkattn_context){0}); }

static void test_append_to_slots(void) {
    static const struct {
        int64_t slots[SLOT_ROWS];
        int written;
        const char *fragment;
    } table[] = {{{0, 11, 5, 4}, 4, NULL}, {{-1, 3, INT64_MIN, 8}, 2, NULL}, {{-1, -1, -1, -1}, 0, NULL},
            {{0, 1, 2, 12}, 0, "slot_mapping[3] is 12; it must be a slot of the cache, which has 12, or negative to skip the row"},
            {{0, INT64_MAX, 2, 3}, 0, "slot_mapping[1] is 9223372036854775807"}};
    for (size_t i = 0; i < COUNT(table); i++) {
        slot_call *c = slot_call_of(table[i].slots);
        const sinkattn_status status = append_slots(c);
        if (table[i].fragment)
            CHECK(status.code == SINKATTN_INVALID && strstr(status.message, table[i].fragment), "call %zu: %s", i, status.message);
        else
            CHECK(status.code == SINKATTN_OK, "call %zu: %s", i, status.message);
        CHECK(count_slots(c) == table[i].written, "call %zu wrote %d slots", i, count_slots(c));
        for (int r = 0; r < SLOT_ROWS && table[i].written; r++) {
            const int64_t slot = table[i].slots[r];
            if (slot >= 0)
                CHECK(!memcmp(c->memory[slot][0], c->k[r], sizeof c->k[r]) && !memcmp(c->memory[slot][1], c->v[r], sizeof c->v[r]),
                        "call %zu, row %d", i, r);
        }
    }
}

/* Of one latent, whose values are columns of its keys. */
static void test_append_keys_alone(void) {
    const int64_t slots[SLOT_ROWS] = {3, -1, 0, 11};
    slot_call *c = slot_call_of(slots);
    const sinkattn_tensor v_cache = c->args.cache.fwd.v, v = c->args.v;
    c->args.v = c->args.cache.fwd.v = (sinkattn_tensor){0};
    CHECK(append_slots(c).code == SINKATTN_OK && count_slots(c) == 3 && c->memory[0][1][0] == 0.0f, "by slots");
    for (int r = 0; r < SLOT_ROWS; r++) CHECK(slots[r] < 0 || !memcmp(c->memory[slots[r]][0], c->k[r], sizeof c->k[r]), "row %d", r);
    c->args.cache.fwd.v = v_cache;
    sinkattn_status status = append_slots(c);
    CHECK(status.code == SINKATTN_INVALID && strstr(status.message, "v is NULL"), "%s", status.message);
    c->args.cache.fwd.v.data = NULL;
    c->args.v = v;
    status = append_slots(c);
    CHECK(status.code == SINKATTN_INVALID && strstr(status.message, "v_cache is NULL"), "%s", status.message);
}

#define CHANGE(name, ...) \
    static void name(slot_call *c, sinkattn_append_args *a, sinkattn_problem *p) { \
        (void)c, (void)a, (void)p; \
        __VA_ARGS__; \
    }

static int32_t some_lengths[1];
CHANGE(no_slots, a->slot_mapping = NULL)
CHANGE(slots_of_sequences, p->packed = false)
CHANGE(slots_off_by_4, a->slot_mapping = (const int64_t *)((const char *)a->slot_mapping + 4))
CHANGE(slots_in_the_cache, a->slot_mapping = (const int64_t *)(const void *)c->memory)
CHANGE(lengths_before, a->cache.cache_seqlens = some_lengths)
CHANGE(lengths_after, a->cache_seqlens = some_lengths)
CHANGE(slots_and_pages, a->cache.block_table = some_lengths)
CHANGE(no_page_size, p->page_size = p->num_pages = 0)
CHANGE(no_rows, a->k.data = NULL)
CHANGE(cache_on_itself, a->cache.fwd.k.row_stride = 0)
CHANGE(values_on_keys, a->cache.fwd.v.data = a->cache.fwd.k.data)
CHANGE(pages_of_the_host, a->cache.host.num_pages = 1)
CHANGE(many_rows, p->q_len = INT64_C(1) << 31)
#undef CHANGE

static void test_malformed_slots(void) {
    static const struct {
        void (*change)(slot_call *c, sinkattn_append_args *a, sinkattn_problem *p);
        const char *fragment;
    } table[] = {{no_slots, "slot_mapping is NULL; it must be given when packed is true"},
            {slots_of_sequences, "slot_mapping is given; it must be NULL unless packed is true"}, {slots_off_by_4, "slot_mapping is at"},
            {slots_in_the_cache, "k_cache and slot_mapping overlap; k_cache is written"},
            {lengths_before, "cache.cache_seqlens is given; it must be NULL with slot_mapping"},
            {lengths_after, "cache_seqlens is given; it must be NULL with slot_mapping"},
            {slots_and_pages, "cache.block_table is given; it must be NULL with slot_mapping"},
            {no_page_size, "page_size is 0; it must be at least 1"}, {no_rows, "k is NULL"}, {cache_on_itself, "its rows must not overlap"},
            {values_on_keys, "k_cache and v_cache overlap"}, {pages_of_the_host, "cache.host.num_pages is 1"},
            {many_rows, "q has 2147483648 packed rows"}};
    const int64_t slots[SLOT_ROWS] = {0, 1, 2, 3};
    for (size_t i = 0; i < COUNT(table); i++) {
        slot_call *c = slot_call_of(slots);
        table[i].change(c, &c->args, &c->args.cache.fwd.problem);
        const sinkattn_status status = append_slots(c);
        CHECK(status.code == SINKATTN_INVALID && strstr(status.message, table[i].fragment), "row %zu wants \"%s\", got \"%s\"", i,
                table[i].fragment, status.message);
        CHECK(count_slots(c) == 0, "row %zu: something was written", i);
    }
    slot_call *c = slot_call_of(slots);
    c->args.cache.fwd.problem.q_len = 0;
    c->args.slot_mapping = NULL;
    CHECK(append_slots(c).code == SINKATTN_OK && count_slots(c) == 0, "no rows");
}

const test append_tests[] = {TEST(append_behind), TEST(append_to_slots), TEST(append_keys_alone), TEST(malformed_slots), {0}};
