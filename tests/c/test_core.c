/* SPDX-License-Identifier: Apache-2.0
 *
 * mask.h against its definition over all small sizes; layout.h, split.h and numerics.h.
 */
#include "test.h"

#include <inttypes.h>
#include <string.h>

#include "core/core.h"
#include "core/layout.h"
#include "core/numerics.h"
#include "core/split.h"

/* The contract's sentence, written once more, without mask.h. -1 is unbounded. */
static bool visible(int64_t q_len, int64_t k_len, int64_t left, int64_t right, int64_t num_sink_tokens, int64_t i, int64_t j) {
    const int64_t p = i + (k_len - q_len);
    return (right < 0 || j - p <= right) && (left < 0 || p - j <= left || j < num_sink_tokens);
}

typedef struct window {
    int64_t q_len, k_len, left, right, num_sink;
} window;

static bool sees(const window *w, int64_t i, int64_t j) { return visible(w->q_len, w->k_len, w->left, w->right, w->num_sink, i, j); }

static sa_band band_of(const window *w) {
    const sinkattn_mask mask = {w->left >= 0, w->right >= 0, w->left, w->right, w->num_sink};
    return sa_band_of(&mask, w->q_len, w->k_len);
}

#define CHECK_WINDOW(ok, w, what) \
    CHECK(ok, "%s: q_len %" PRId64 ", k_len %" PRId64 ", window (%" PRId64 ", %" PRId64 "), sink tokens %" PRId64, what, (w)->q_len, \
            (w)->k_len, (w)->left, (w)->right, (w)->num_sink)

static void check_rows(const window *w) {
    const sa_band band = band_of(w);
    int64_t pairs = 0;
    for (int64_t i = 0; i < w->q_len; i++) {
        const sa_range keys = sa_row_band(&band, i);
        const int64_t sink_end = sa_row_sink_end(&band, i);
        CHECK_WINDOW(0 <= sink_end && sink_end <= keys.begin && keys.begin <= keys.end && keys.end <= w->k_len, w, "row ranges in order");
        for (int64_t j = 0; j < w->k_len; j++) {
            const bool truth = sees(w, i, j), ranges = j < sink_end || (j >= keys.begin && j < keys.end);
            CHECK_WINDOW(sa_visible(&band, i, j) == truth, w, "sa_visible");
            CHECK_WINDOW(ranges == truth, w, "sa_row_band and sa_row_sink_end");
            pairs += truth;
        }
    }
    CHECK_WINDOW(sa_pair_count(&band) == pairs, w, "sa_pair_count");
    const sinkattn_mask mask = {w->left >= 0, w->right >= 0, w->left, w->right, w->num_sink};
    CHECK_WINDOW(sinkattn_visible_pairs(&mask, w->q_len, w->k_len) == pairs, w, "sinkattn_visible_pairs");
}

static bool some_row_sees(const window *w, sa_range rows, int64_t j) {
    for (int64_t i = rows.begin; i < rows.end; i++)
        if (sees(w, i, j)) return true;
    return false;
}

static bool row_sees_some(const window *w, int64_t i, sa_range keys) {
    for (int64_t j = keys.begin; j < keys.end; j++)
        if (sees(w, i, j)) return true;
    return false;
}

static void check_row_tiles(const window *w) {
    const sa_band band = band_of(w);
    for (int64_t begin = 0; begin < w->q_len; begin++)
        for (int64_t end = begin + 1; end <= w->q_len; end++) {
            const sa_range rows = {begin, end};
            int64_t sink_end;
            const sa_range keys = sa_rows_band(&band, rows, &sink_end);
            for (int64_t j = 0; j < w->k_len; j++) {
                const bool ranges = j < sink_end || (j >= keys.begin && j < keys.end);
                CHECK_WINDOW(ranges == some_row_sees(w, rows, j), w, "sa_rows_band is the union of its rows");
            }
        }
}

static void check_key_tiles(const window *w) {
    const sa_band band = band_of(w);
    for (int64_t begin = 0; begin < w->k_len; begin++)
        for (int64_t end = begin + 1; end <= w->k_len; end++) {
            const sa_range keys = {begin, end}, rows = sa_keys_rows(&band, keys);
            for (int64_t i = 0; i < w->q_len; i++)
                CHECK_WINDOW((i >= rows.begin && i < rows.end) == row_sees_some(w, i, keys), w, "sa_keys_rows are those that see a key");
        }
}

/* sa_all_visible may say no to a tile that is all visible, half through the prefix; it must never say yes to another. */
static void check_full_tiles(const window *w) {
    const sa_band band = band_of(w);
    for (int64_t i = 0; i < w->q_len; i++)
        for (int64_t rows_end = i + 1; rows_end <= w->q_len; rows_end += 2)
            for (int64_t j = 0; j < w->k_len; j++)
                for (int64_t keys_end = j + 1; keys_end <= w->k_len; keys_end += 2) {
                    bool all = true;
                    for (int64_t row = i; row < rows_end; row++)
                        for (int64_t key = j; key < keys_end; key++) all = all && sees(w, row, key);
                    const bool said = sa_all_visible(&band, (sa_range){i, rows_end}, (sa_range){j, keys_end});
                    CHECK_WINDOW(all || !said, w, "sa_all_visible says yes to a masked tile");
                    if (w->num_sink == 0) CHECK_WINDOW(all == said, w, "sa_all_visible without a prefix");
                }
}

static bool all_see_all(const window *w, sa_range rows, sa_range keys) {
    for (int64_t i = rows.begin; i < rows.end; i++)
        for (int64_t j = keys.begin; j < keys.end; j++)
            if (!sees(w, i, j)) return false;
    return keys.end <= w->k_len;
}

/* A walk over key tiles meets every key that some row sees, once, and says rightly where masking is not needed. */
static void check_tile_walk(const window *w, sa_range rows, int64_t tile_k) {
    const sa_band band = band_of(w);
    const sa_key_tiles tiles = sa_key_tiles_of(&band, rows, tile_k);
    int64_t met = 0, seen = 0;
    int32_t n = 0;
    const sa_range full = sa_full_key_tiles(&tiles);
    for (int32_t t = sa_key_tile_from(&tiles, 0); t < tiles.end; t = sa_key_tile_from(&tiles, t + 1)) {
        const bool in_full = n >= full.begin && n < full.end, is_full = sa_key_tile_is_full(&tiles, t);
        CHECK_WINDOW(in_full == is_full || (w->num_sink && is_full), w, "sa_full_key_tiles");
        CHECK_WINDOW(sa_key_tile_at(&tiles, n++) == t, w, "sa_key_tile_at");
        const sa_range keys = sa_key_tile(&tiles, t), whole = {t * tile_k, (t + 1) * tile_k};
        CHECK_WINDOW(keys.begin < keys.end && keys.begin >= whole.begin && keys.end <= whole.end, w, "sa_key_tile lies in its tile");
        CHECK_WINDOW(some_row_sees(w, rows, keys.begin) && some_row_sees(w, rows, keys.end - 1), w, "sa_key_tile begins and ends seen");
        CHECK_WINDOW(!is_full || all_see_all(w, rows, whole), w, "sa_key_tile_is_full of a masked tile");
        CHECK_WINDOW(w->num_sink || is_full == all_see_all(w, rows, whole), w, "sa_key_tile_is_full");
        for (int64_t j = keys.begin; j < keys.end; j++) met += some_row_sees(w, rows, j);
    }
    CHECK_WINDOW(n == sa_key_tile_count(&tiles), w, "sa_key_tile_count");
    for (int64_t j = 0; j < w->k_len; j++) seen += some_row_sees(w, rows, j);
    CHECK_WINDOW(met == seen, w, "the walk meets every key that is seen");
    CHECK_WINDOW(seen <= sa_rows_reach(&band, rows.end - rows.begin), w, "sa_rows_reach bounds the keys");
}

/* Chunks of two tiles have a walk's tiles, in its order. */
static void check_chunks(const window *w, sa_range rows, int64_t tile_k) {
    const sa_band band = band_of(w);
    const sa_key_tiles tiles = sa_key_tiles_of(&band, rows, tile_k);
    int32_t n = 0;
    for (int32_t chunk = 0; 2 * chunk < tiles.end; chunk++) {
        sa_key_tiles part = tiles;
        sa_cut_key_tiles(&part, 2 * chunk, 2 * chunk + 2);
        const sa_range full = sa_full_key_tiles(&part);
        for (int32_t i = 0; i < sa_key_tile_count(&part); i++, n++) {
            const int32_t t = sa_key_tile_at(&part, i);
            CHECK_WINDOW(t == sa_key_tile_at(&tiles, n) && t / 2 == chunk, w, "sa_cut_key_tiles");
            CHECK_WINDOW((i >= full.begin && i < full.end) == sa_key_tile_is_full(&tiles, t), w, "full tiles of a chunk");
        }
        CHECK_WINDOW(part.band.begin >= 2 * chunk * tile_k && part.band.end <= (2 * chunk + 2) * tile_k, w, "the keys of a chunk");
    }
    CHECK_WINDOW(n == sa_key_tile_count(&tiles), w, "chunks have all tiles");
}

static void check_tile_walks(const window *w) {
    for (int64_t begin = 0; begin < w->q_len; begin++)
        for (int64_t end = begin + 1; end <= w->q_len; end++)
            for (int64_t tile_k = 1; tile_k <= 4; tile_k++) {
                check_tile_walk(w, (sa_range){begin, end}, tile_k);
                if (!w->num_sink) check_chunks(w, (sa_range){begin, end}, tile_k);
            }
}

static void test_mask_over_all_small_sizes(void) {
    for (int64_t q_len = 0; q_len <= 8; q_len++)
        for (int64_t k_len = 0; k_len <= 9; k_len++)
            for (int64_t left = -1; left <= 10; left++)
                for (int64_t right = -1; right <= 10; right++)
                    for (int64_t num_sink = 0; num_sink <= 8; num_sink += num_sink < 3 ? 1 : 5) {
                        const window w = {q_len, k_len, left, right, num_sink};
                        check_rows(&w);
                        check_row_tiles(&w);
                        check_key_tiles(&w);
                        check_full_tiles(&w);
                        check_tile_walks(&w);
                    }
}

static void test_mask_of_extreme_windows(void) {
    const int64_t extremes[] = {INT32_MAX, INT64_MAX};
    for (int e = 0; e < 2; e++) {
        const window w = {5, 3, extremes[e], extremes[e], extremes[e]};
        check_rows(&w);
        check_row_tiles(&w);
        check_key_tiles(&w);
    }
    CHECK(sinkattn_visible_pairs(NULL, 1, 1) == -1, "NULL mask");
    CHECK(sinkattn_visible_pairs(&(sinkattn_mask){0}, -1, 1) == -1, "negative q_len");
    CHECK(sinkattn_visible_pairs(&(sinkattn_mask){.has_left = true, .left = INT64_MIN}, 4, 4) == -1, "negative window");
    CHECK(sinkattn_visible_pairs(&(sinkattn_mask){0}, INT64_MAX, INT64_MAX) == -1, "sizes past int64");
}

/* Whatever the integers hold, rows stay in the tensor and in order, and each is some sequence's or past the last. */
static void test_layout_clamps_hostile_lengths(void) {
    const int32_t values[] = {INT32_MIN, -1, 0, 3, 7, 8, 9, INT32_MAX};
    const int64_t total = 8;
    for (size_t a = 0; a < 8; a++)
        for (size_t b = 0; b < 8; b++) {
            const int32_t cu_seqlens[2] = {values[a], values[b]};
            const sa_range rows = sa_packed_rows(cu_seqlens, 0, total);
            CHECK(rows.begin == 0 && rows.begin <= rows.end && rows.end <= total, "cu_seqlens %d, %d", values[a], values[b]);
            const sinkattn_fwd_args args = {.problem = {.packed = true, .batch = 1, .q_len = total, .k_len = total},
                    .cu_seqlens_q = cu_seqlens,
                    .cu_seqlens_k = cu_seqlens};
            const sa_sequence s = sa_sequence_at(&args, 0);
            CHECK(s.batch == 0 && s.q_begin == rows.begin && s.k_len == rows.end - rows.begin, "sequence of %d, %d", values[a], values[b]);
        }
    for (size_t i = 0; i < 8 * 8 * 8; i++) {
        const int32_t cu_seqlens[3] = {values[i / 64], values[i / 8 % 8], values[i % 8]};
        const sa_range first = sa_packed_rows(cu_seqlens, 0, total), second = sa_packed_rows(cu_seqlens, 1, total);
        for (int64_t row = 0; row < sa_packed_begin(cu_seqlens, 2, total); row++)
            CHECK(row < first.end || (second.begin <= row && row < second.end), "row %" PRId64 " of %d, %d, %d is nobody's", row,
                    cu_seqlens[0], cu_seqlens[1], cu_seqlens[2]);
    }
    for (size_t a = 0; a < 8; a++) {
        const int32_t page = values[a];
        const sinkattn_tensor cache = {.batch_stride = 100, .row_stride = 10, .head_stride = 1};
        const sinkattn_decode_args args = {
                .fwd.problem = {.k_len = 4, .page_size = 4, .num_pages = 8}, .cache_seqlens = &values[a], .block_table = &page};
        const int64_t length = sa_cache_len(&args, 0), offset = sa_cache_offset(&args, &cache, 0, 3, 2);
        CHECK(length >= 0 && length <= 4, "cache_seqlens %d gives %" PRId64, page, length);
        CHECK(offset == (page >= 0 && page < 8 ? page * 100 + 32 : -1), "page %d gives %" PRId64, page, offset);
    }
}

static void test_offsets_are_int64(void) {
    const sinkattn_tensor huge = {.batch_stride = INT64_C(1) << 40, .row_stride = INT64_C(1) << 33, .head_stride = 64};
    CHECK(sa_offset(&huge, 3, 5, 7) == 3 * (INT64_C(1) << 40) + 5 * (INT64_C(1) << 33) + 448, "offsets past 2^31 elements");
}

static void test_split_covers_every_tile_once(void) {
    for (int64_t tiles = 0; tiles <= 40; tiles++)
        for (int64_t parts = 1; parts <= 45; parts++) {
            int64_t end = 0, longest = 0, shortest = INT64_MAX;
            for (int64_t part = 0; part < parts; part++) {
                const sa_range range = sa_split_part(tiles, parts, part);
                CHECK(range.begin == end, "%" PRId64 " tiles, %" PRId64 " parts: a hole before part %" PRId64, tiles, parts, part);
                end = range.end;
                longest = sa_max(longest, range.end - range.begin);
                shortest = sa_min(shortest, range.end - range.begin);
            }
            CHECK(end == tiles && longest - shortest <= 1, "%" PRId64 " tiles, %" PRId64 " parts", tiles, parts);
        }
}

static void test_division_by_a_known_size(void) {
    const uint32_t edges[] = {0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 65535, 65536, 65537, 1u << 30, INT32_MAX - 1, INT32_MAX};
    const size_t count = COUNT(edges);
    for (size_t s = 1; s < count; s++)
        for (uint32_t size = edges[s]; size < edges[s] + 300 && size <= INT32_MAX; size += 7) {
            const sa_divisor by = sa_divisor_of(size);
            for (size_t e = 0; e < count; e++) {
                const uint32_t multiple = edges[e] / size * size, all_x[] = {edges[e], multiple, multiple ? multiple - 1 : 0};
                for (size_t x = 0; x < 3; x++) CHECK(sa_divide(all_x[x], by) == all_x[x] / size, "%" PRIu32 " / %" PRIu32, all_x[x], size);
            }
        }
}

/* Equal streams are cut alike, into no parts shorter than a step, and no more than `most` where they are two a worker or fewer; shares are
 * no more than that of any streams, and as many of each kv head. */
static void test_cutting_streams(void) {
    const uint32_t step = 8, workers = 132, all_streams[] = {1, 3, 8, 64, 132, 133, 256, 264, 265, 512, 513, 2048};
    for (size_t i = 0; i < COUNT(all_streams); i++)
        for (uint32_t each = 1, streams = all_streams[i], resident = 264; each < 9000; each += 1 + each / 7, resident = 792 - resident) {
            const uint32_t two = 2 * workers, heads = streams % 2 ? streams % 5 ? streams : streams / 5 : 8;
            const sa_cut cut = sa_cut_of(streams, heads, step, 3 * step, workers, resident);
            const uint32_t length = sa_part_length(&cut, streams * each), parts = (each + length - 1) / length;
            CHECK(length >= step, "%" PRIu32 " tiles a part", length);
            CHECK(streams > two || streams * parts <= cut.most, "%" PRIu32 " parts of %" PRIu32 " streams", parts, streams);
            CHECK(streams <= workers || streams > two || parts == 1, "%" PRIu32 " parts of %" PRIu32 " streams", parts, streams);
            CHECK(each < 4 * step * workers || streams > workers || 3 * streams * parts >= 2 * cut.most - 2 * streams,
                    "%" PRIu32 " parts of %" PRIu32 " streams", parts, streams);
            CHECK(cut.most % heads == 0 && (cut.most <= resident || cut.most == heads), "%" PRIu32 " parts at once", cut.most);
            CHECK(streams <= two || cut.most + heads > resident, "%" PRIu32 " shares of %" PRIu32, cut.most, resident);
            uint32_t of_head = 0; /* lengths as different as they can be */
            for (uint32_t s = 0; s < streams / heads; s++) of_head += s % 5 == 0 ? each : 1 + s % each;
            const uint32_t share = sa_share_length(&cut, of_head * heads);
            CHECK((of_head + share - 1) / share <= cut.most / heads && share <= sa_part_length(&cut, of_head * heads),
                    "shares of %" PRIu32 " of %" PRIu32 " tiles", share, of_head);
        }
    const sa_cut cut = sa_cut_of(8, 8, step, 3 * step, workers, 528);
    CHECK(sa_part_length(&cut, 8 * 8192) == 256 && sa_part_length(&cut, 8 * 256) == 16 && sa_part_length(&cut, 8 * 64) == 8,
            "32, 16 and 8 parts a stream");
}

/* All shares of a kv head, as blocks walk through them: each tile once, parts in order, each partial in a slot of its own. */
static void test_shares_that_end_anywhere(void) {
    enum { MOST = 66, STREAMS = 300 };
    static const uint32_t leads[] = {4, 8, 14, 28};
    for (int round = 0; round < 300; round++) {
        const uint32_t lead = leads[round % 4], streams = (uint32_t)pick(1, round % 8 > 3 ? STREAMS : 40),
                       longest = (uint32_t)pick(1, 2000);
        uint32_t tiles[STREAMS], begin[STREAMS], seen[STREAMS] = {0}, parts[STREAMS] = {0}, total = 0;
        bool used[2 * MOST] = {false};
        for (uint32_t s = 0; s < streams; s++) {
            tiles[s] = (uint32_t)pick(1, longest);
            begin[s] = total;
            total += tiles[s] + lead;
        }
        const uint32_t length = (total + MOST - 1) / MOST > lead ? (total + MOST - 1) / MOST : lead + 1;
        for (uint32_t share = 0, s = 0; share * length < total; share++) {
            while (begin[s] + tiles[s] + lead <= share * length) s++;
            uint32_t at = share * length - begin[s], room = length;
            for (uint32_t t = s; t < streams && room; t++, at = 0) {
                const sa_share of = sa_share_of(tiles[t], lead, length, share, begin[t], at, room);
                room = of.rest;
                if (of.part >= of.num_parts) {
                    CHECK(of.first == of.last && !room, "share %" PRIu32 " ends before stream %" PRIu32, share, t);
                    continue;
                }
                CHECK(of.first < of.last && of.first == seen[t] && of.part == parts[t], "share %" PRIu32 " of stream %" PRIu32, share, t);
                CHECK((of.last == tiles[t]) == (of.part + 1 == of.num_parts), "the last part of stream %" PRIu32, t);
                seen[t] = of.last;
                parts[t]++;
                if (of.num_parts == 1) continue;
                if (!CHECK(of.slot + of.part < 2 * MOST && !used[of.slot + of.part], "slot %" PRIu32, of.slot + of.part)) return;
                used[of.slot + of.part] = true;
            }
        }
        for (uint32_t s = 0; s < streams; s++) CHECK(seen[s] == tiles[s], "%" PRIu32 " of %" PRIu32 " tiles", seen[s], tiles[s]);
    }
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void test_halves_round_trip(void) {
    for (uint32_t half = 0; half < 65536; half++) {
        const uint16_t bits = (uint16_t)half;
        const float bf16 = sa_bf16_to_float(bits), fp16 = sa_fp16_to_float(bits);
        if (isnan(bf16))
            CHECK(isnan(sa_bf16_to_float(sa_float_to_bf16(bf16))), "bf16 NaN %04x", half);
        else
            CHECK(sa_float_to_bf16(bf16) == bits, "bf16 %04x", half);
        if (isnan(fp16))
            CHECK(isnan(sa_fp16_to_float(sa_float_to_fp16(fp16))), "fp16 NaN %04x", half);
        else
            CHECK(sa_float_to_fp16(fp16) == bits, "fp16 %04x", half);
        CHECK(isnan(fp16) == ((half & 0x7c00) == 0x7c00 && (half & 0x3ff)), "fp16 %04x is a NaN or not", half);
        CHECK((isinf(fp16) != 0) == ((half & 0x7fff) == 0x7c00), "fp16 %04x is infinite or not", half);
    }
}

/* Between two neighbours a < b: below the middle a, above it b, on it the even one. */
static void check_rounding(uint16_t a, float (*widen)(uint16_t), uint16_t (*round)(float), const char *format) {
    const uint16_t b = (uint16_t)(a + 1);
    const double low = widen(a), high = isinf(widen(b)) ? 2.0 * low - widen((uint16_t)(a - 1)) : widen(b);
    const float middle = (float)((low + high) / 2);
    CHECK(round(middle) == (a & 1 ? b : a), "%s %04x: the middle goes to even", format, a);
    CHECK(round(nextafterf(middle, 0.0f)) == a && round(nextafterf(middle, INFINITY)) == b, "%s %04x: the nearer wins", format, a);
    CHECK(round(-middle) == (round(middle) | 0x8000), "%s %04x: signs are alike", format, a);
}

static float widen_bf16(uint16_t bits) { return sa_bf16_to_float(bits); }
static uint16_t round_bf16(float x) { return sa_float_to_bf16(x); }
static float widen_fp16(uint16_t bits) { return sa_fp16_to_float(bits); }
static uint16_t round_fp16(float x) { return sa_float_to_fp16(x); }

static void test_halves_round_to_nearest_even(void) {
    for (uint32_t a = 0; a < 0x7c00; a++) check_rounding((uint16_t)a, widen_fp16, round_fp16, "fp16");
    for (uint32_t a = 0; a < 0x7f7f; a++) check_rounding((uint16_t)a, widen_bf16, round_bf16, "bf16");
    CHECK(sa_float_to_fp16(65519.0f) == 0x7bff && sa_float_to_fp16(65520.0f) == 0x7c00, "fp16 overflows at 65520");
    CHECK(sa_float_to_bf16(3.4e38f) == 0x7f80 && sa_float_to_bf16(INFINITY) == 0x7f80, "bf16 overflows to infinity");
    CHECK(sa_float_to_fp16(1e-8f) == 0 && bits_of(sa_fp16_to_float(0x8000)) == 0x80000000u, "fp16 zeros");
    const uint32_t odd_nan = 0x7f800001u;
    float nan;
    memcpy(&nan, &odd_nan, sizeof nan);
    CHECK(isnan(sa_bf16_to_float(sa_float_to_bf16(nan))) && isnan(sa_fp16_to_float(sa_float_to_fp16(nan))), "a low NaN stays NaN");
}

static void test_loads_and_stores(void) {
    union {
        double f64[2];
        float f32[4];
        uint16_t halves[8];
    } room = {{0}};
    for (sinkattn_dtype dtype = SINKATTN_BF16; dtype <= SINKATTN_FP64; dtype++) {
        sa_store(&room, dtype, 1, -1.5);
        CHECK(sa_load(&room, dtype, 1) == -1.5, "%s keeps -1.5", sa_dtype_name(dtype));
        sa_store(&room, dtype, 1, (double)NAN);
        CHECK(isnan(sa_load(&room, dtype, 1)), "%s keeps NaN", sa_dtype_name(dtype));
    }
    CHECK(sa_dtype_bytes(SINKATTN_BF16) == 2 && sa_dtype_bytes(SINKATTN_FP32) == 4 && sa_dtype_bytes(SINKATTN_FP64) == 8, "bytes");
}

static void test_softmax_identities(void) {
    const double inf = (double)INFINITY;
    CHECK(sa_sink_sum(-inf) == 0.0 && sa_sink_sum(3.0) == 1.0 && sa_sink_sum(inf) == 1.0 && isnan(sa_sink_sum((double)NAN)), "sa_sink_sum");
    CHECK(sa_exp_minus(-inf, -inf) == 0.0 && sa_exp_minus(inf, inf) == 1.0 && sa_exp_minus(2.0, inf) == 0.0, "sa_exp_minus at infinity");
    CHECK(sa_exp_minus(1.0, 2.0) == exp(-1.0) && isnan(sa_exp_minus((double)NAN, 0.0)), "sa_exp_minus");
    CHECK(sa_lse(-inf, 0.0) == -inf && sa_lse(inf, 1.0) == inf && sa_lse(1e4, 1.0) == 1e4 && isnan(sa_lse(0.0, (double)NAN)), "sa_lse");
    sa_row_end end = sa_end_row(2.0, 3.0, -inf);
    CHECK(end.factor == 1.0 / 3.0 && end.lse == 2.0 + log(3.0) && end.lse_raw == end.lse, "a sink of -inf is none");
    end = sa_end_row(-inf, 0.0, 0.75);
    CHECK(end.factor == 0.0 && end.lse == 0.75 && end.lse_raw == -inf, "a sink without keys");
    end = sa_end_row(2.0, 3.0, 1e4);
    CHECK(end.factor == 0.0 && end.lse == 1e4 && end.lse_raw == 2.0 + log(3.0), "a sink far above the keys");
    end = sa_end_row(2.0, 3.0, 2.0);
    CHECK(end.factor == 0.25 && end.lse == 2.0 + log(4.0), "a sink among the keys");
    CHECK(isnan(sa_end_row(2.0, 3.0, (double)NAN).factor) && sa_end_row(2.0, 3.0, inf).lse == inf, "NaN and inf");
    CHECK(sa_softmax_scale(&(sinkattn_problem){.head_dim = 64}) == 0.125, "the default scale");
    CHECK(sa_softmax_scale(&(sinkattn_problem){.head_dim = 64, .softmax_scale = -2.0}) == -2.0, "a given scale");
}

const test core_tests[] = {TEST(mask_over_all_small_sizes), TEST(mask_of_extreme_windows), TEST(layout_clamps_hostile_lengths),
        TEST(offsets_are_int64), TEST(split_covers_every_tile_once), TEST(division_by_a_known_size), TEST(cutting_streams),
        TEST(shares_that_end_anywhere), TEST(halves_round_trip), TEST(halves_round_to_nearest_even), TEST(loads_and_stores),
        TEST(softmax_identities), {0}};
