/* SPDX-License-Identifier: Apache-2.0
 *
 * Lengths and pages that another thread writes while a call runs: between their validation and their use, which is where the executor is
 * called. Whatever is written, no byte outside the caller's tensors is read or written (ASan watches the one, guards the other), and
 * lengths are used as they were validated: the bits are those of an undisturbed run.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "sample.h"

/* An array of lengths, and what it holds when the executor is called. */
typedef struct change {
    int32_t *lengths;
    int64_t count;
    int32_t first, step;
} change;

static void run_changed(void *self, int32_t workers, void (*task)(void *arg, int32_t worker), void *arg) {
    const change *c = self;
    for (int64_t i = 0; c->lengths && i < c->count; i++) c->lengths[i] = (int32_t)(c->first + (int64_t)c->step * i);
    for (int32_t w = 0; w < workers; w++) task(arg, w);
}

static const int32_t contents[][2] = {{INT32_MAX, 0}, {INT32_MIN, 0}, {-1, 0}, {0, 0}, {1, 1}, {50, -3}, {7, 1000}, {-100000, 40000}};
enum { NUM_CONTENTS = COUNT(contents) };

static sinkattn_problem problem_of(sinkattn_op op, sinkattn_dtype dtype, bool packed) {
    sinkattn_problem p = {.op = op,
            .dtype = dtype,
            .s_aux_dtype = SINKATTN_FP32,
            .packed = packed,
            .batch = 3,
            .num_q_heads = 4,
            .num_kv_heads = 2,
            .head_dim = 16,
            .q_len = packed ? 150 : 3,
            .k_len = 160,
            .mask = {.has_left = true, .left = 60, .has_right = true, .num_sink_tokens = 2}};
    if (op != SINKATTN_DECODE) return p;
    p.num_splits = packed ? 0 : 2;
    p.page_size = 16;
    p.num_pages = 12;
    return p;
}

/* The bits of a run during which one array changes, and then is as it was. */
static uint64_t hash_of(sample *s, const sinkattn_device *device, int32_t *lengths, int64_t count, const int32_t content[2]) {
    change c = {lengths, count, content[0], content[1]};
    const sinkattn_executor executor = {run_changed, &c};
    int32_t *kept = malloc((size_t)count * sizeof *kept);
    if (!kept) abort();
    if (lengths) memcpy(kept, lengths, (size_t)count * sizeof *kept);
    sample_reset(s);
    const sinkattn_status status = sample_run(s, device, &executor, NULL);
    if (lengths) memcpy(lengths, kept, (size_t)count * sizeof *kept);
    free(kept);
    CHECK(status.code == SINKATTN_OK, "%s", status.message);
    return sample_hash(s);
}

/* Each array in turn, and each content. Pages are looked up where they are used: other pages give other bits. */
static void check_changes(sample *s, const sinkattn_device *device, int32_t *lengths, int64_t count, bool same_bits) {
    const uint64_t undisturbed = hash_of(s, device, NULL, 1, contents[0]);
    for (int i = 0; i < NUM_CONTENTS; i++) {
        const uint64_t disturbed = hash_of(s, device, lengths, count, contents[i]);
        CHECK(!same_bits || disturbed == undisturbed, "level %d, lengths from %" PRId32 " by %" PRId32 ": other bits: %s", device->arch,
                contents[i][0], contents[i][1], problem_text(&s->problem));
    }
}

static sample packed_sample(sinkattn_op op, sinkattn_dtype dtype) {
    const int32_t cu_seqlens_q[] = {0, 70, 71, 148}, cu_seqlens_k[] = {0, 90, 90, 150};
    const sinkattn_problem problem = problem_of(op, dtype, true);
    sample s = sample_new(&problem, true);
    memcpy(s.cu_seqlens_q, cu_seqlens_q, sizeof cu_seqlens_q);
    memcpy(s.cu_seqlens_k, cu_seqlens_k, sizeof cu_seqlens_k);
    return s;
}

static void check_packed(const sinkattn_device *device, sinkattn_dtype dtype) {
    const sinkattn_op ops[] = {SINKATTN_FWD, SINKATTN_BWD};
    for (int i = 0; i < 2; i++) {
        sample s = packed_sample(ops[i], dtype);
        check_changes(&s, device, s.cu_seqlens_q, 4, true);
        check_changes(&s, device, s.cu_seqlens_k, 4, true);
        sample_free(&s);
    }
}

static void check_decode(const sinkattn_device *device, sinkattn_dtype dtype) {
    const sinkattn_problem problem = problem_of(SINKATTN_DECODE, dtype, false);
    sample s = sample_new(&problem, true);
    if (!s.cache_seqlens) s.cache_seqlens = malloc(3 * sizeof(int32_t));
    for (int b = 0; b < 3; b++) s.cache_seqlens[b] = 40 * b + 37;
    for (int i = 0; i < 30; i++) s.block_table[i] = 7 * i % 12;
    check_changes(&s, device, s.cache_seqlens, 3, true);
    check_changes(&s, device, s.block_table, 30, false);
    sample_free(&s);
}

static void check_packed_decode(const sinkattn_device *device, sinkattn_dtype dtype) {
    const int32_t cu_seqlens_q[] = {0, 70, 71, 148};
    const sinkattn_problem problem = problem_of(SINKATTN_DECODE, dtype, true);
    sample s = sample_new(&problem, true);
    memcpy(s.cu_seqlens_q, cu_seqlens_q, sizeof cu_seqlens_q);
    if (!s.cache_seqlens) s.cache_seqlens = malloc(3 * sizeof(int32_t));
    for (int b = 0; b < 3; b++) s.cache_seqlens[b] = 40 * b + 75;
    for (int i = 0; i < 30; i++) s.block_table[i] = 7 * i % 12;
    check_changes(&s, device, s.cu_seqlens_q, 4, true);
    check_changes(&s, device, s.cache_seqlens, 3, true);
    check_changes(&s, device, s.block_table, 30, false);
    sample_free(&s);
}

static void test_changing_cu_seqlens(void) { at_each_level(check_packed); }
static void test_changing_cache(void) { at_each_level(check_decode); }
static void test_changing_cache_of_packed_rows(void) { at_each_level(check_packed_decode); }

/* An append has no executor. Its own lengths, written where the next sequence's page or length is read, change it as a thread would:
 * validated whole, and then another at the second sequence. */
static void test_changing_append(void) {
    enum { PAGES = 4, PAGE = 4, DIM = 8, BEFORE = 64, CACHE = PAGES * PAGE * DIM };
    for (int which = 0; which < 2; which++) {
        _Alignas(16) float memory[2][BEFORE + CACHE + BEFORE], rows[2 * DIM];
        int32_t lengths[] = {13, 1, 0}, block_table[] = {3, 2, 1, 0, 0, 1, 2, 3};
        for (int i = 0; i < 2 * DIM; i++) rows[i] = 1.0f;
        memset(memory, 0, sizeof memory);
        const sinkattn_tensor from = {rows, DIM, DIM, DIM};
        sinkattn_append_args args = {.cache = {.fwd = {.problem = {.op = SINKATTN_DECODE,
                                                               .dtype = SINKATTN_FP32,
                                                               .batch = 2,
                                                               .num_q_heads = 1,
                                                               .num_kv_heads = 1,
                                                               .head_dim = DIM,
                                                               .q_len = 1,
                                                               .k_len = PAGES * PAGE,
                                                               .page_size = PAGE,
                                                               .num_pages = PAGES},
                                                       .k = {memory[0] + BEFORE, PAGE * DIM, DIM, DIM},
                                                       .v = {memory[1] + BEFORE, PAGE * DIM, DIM, DIM}},
                                             .cache_seqlens = lengths,
                                             .block_table = block_table,
                                             .block_table_stride = PAGES},
                .k = from,
                .v = from,
                .cache_seqlens = which ? block_table + 4 : lengths + 1};
        const sinkattn_status status = sa_append_cpu(&args);
        CHECK(status.code == SINKATTN_OK, "%s", status.message);
        for (int t = 0; t < 2; t++)
            for (int i = 0; i < BEFORE; i++)
                CHECK(memory[t][i] == 0.0f && memory[t][BEFORE + CACHE + i] == 0.0f, "row %d, array %d: a byte outside the cache", which,
                        t);
    }
}

/* Slots that lie in the cache, by an argument that validation refuses: the first row's write changes the second's. */
static void test_changing_slots(void) {
    enum { SLOTS = 8, DIM = 8, BEFORE = 64, CACHE = SLOTS * DIM };
    const int64_t written[] = {-1, SLOTS, 5, INT64_MIN, INT64_MAX};
    for (size_t i = 0; i < COUNT(written); i++) {
        _Alignas(16) float memory[2][BEFORE + CACHE + BEFORE], rows[2 * DIM];
        memset(memory, 0, sizeof memory);
        for (int x = 0; x < DIM; x++) memcpy(rows + 2 * x, &written[i], sizeof written[i]);
        int64_t *slots = (int64_t *)(void *)(memory[0] + BEFORE); /* {0, 0}: the first row goes where the slots are */
        const sinkattn_tensor from = {rows, 0, DIM, DIM};
        const sinkattn_append_args args = {.cache.fwd = {.problem = {.op = SINKATTN_DECODE,
                                                                 .dtype = SINKATTN_FP32,
                                                                 .packed = true,
                                                                 .num_q_heads = 1,
                                                                 .num_kv_heads = 1,
                                                                 .head_dim = DIM,
                                                                 .q_len = 2,
                                                                 .page_size = 2,
                                                                 .num_pages = SLOTS / 2},
                                                   .k = {memory[0] + BEFORE, 2 * DIM, DIM, DIM},
                                                   .v = {memory[1] + BEFORE, 2 * DIM, DIM, DIM}},
                .k = from,
                .v = from,
                .slot_mapping = slots};
        const sinkattn_status status = sa_append_cpu(&args);
        CHECK(status.code == SINKATTN_OK, "%s", status.message);
        for (int t = 0; t < 2; t++)
            for (int x = 0; x < BEFORE; x++)
                CHECK(memory[t][x] == 0.0f && memory[t][BEFORE + CACHE + x] == 0.0f, "slot %" PRId64 ", array %d: outside the cache",
                        written[i], t);
    }
}

const test changing_tests[] = {TEST(changing_cu_seqlens), TEST(changing_cache), TEST(changing_cache_of_packed_rows), TEST(changing_append),
        TEST(changing_slots), {0}};
