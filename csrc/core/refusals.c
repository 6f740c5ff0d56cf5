/* SPDX-License-Identifier: Apache-2.0
 *
 * What rows of variants.def ask for beside dtype and head_dim: NULL, or the one reason why a row does not serve.
 */
#include <math.h>

#include "core.h"
#include "layout.h"
#include "mask.h"
#include "numerics.h"
#include "workspace.h"

#define SA_TOO_MANY_SINK_TOKENS "more than 16 positional sink tokens"
_Static_assert(SA_WINDOW_SINK_TOKENS == 16, "SA_TOO_MANY_SINK_TOKENS names it");

static const char *const narrow_values = "values are narrower than keys";

const char *sa_refusal_any(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    (void)p;
    (void)info;
    return NULL;
}

const char *sa_refusal_one_width(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    (void)info;
    return sa_has_narrow_values(p) ? narrow_values : NULL;
}

/* A TMA descriptor cannot describe an empty tensor. */
static bool has_elements(const sinkattn_problem *p) {
    const bool has_keys = p->op != SINKATTN_DECODE || (p->extras && !p->packed) || (p->page_size ? p->num_pages : p->batch);
    return p->q_len && p->k_len && has_keys && (p->packed || p->batch);
}

/* All heads of a token fit a tile of rows; there is something to describe to the copy engine; scores may be scaled after their maximum. */
const char *sa_refusal_whole_tokens(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->num_q_heads / p->num_kv_heads > info->tile_q) return "more query heads a kv head than its tile_q";
    if (!has_elements(p)) return "there are no rows or no keys";
    return p->softmax_scale < 0.0 ? "softmax_scale is negative" : NULL;
}

/* What the i-th item of a dense forward takes, in key tiles, where tiles have so many tokens and keys. */
static double item_steps(const sinkattn_problem *p, int64_t tokens, int64_t tile_k, int64_t i) {
    const sa_band band = sa_band_of(&p->mask, p->q_len, p->k_len);
    const int64_t tile = sa_ceil_div(p->q_len, tokens) - 1 - i / (p->num_kv_heads * p->batch), begin = tile * tokens;
    int64_t sink_end;
    const sa_range keys = sa_rows_band(&band, (sa_range){begin, sa_min(begin + tokens, p->q_len)}, &sink_end);
    return 2 + (double)(sink_end + keys.end - keys.begin) / (double)tile_k;
}

/* What tiles of so many rows take of the time of 192: measured, docs/kernels/fwd_sm90.md. */
static double share_of_large_tiles(int64_t tile_q) { return tile_q == 192 ? 1 : tile_q == 128 ? 0.9 : 0.8; }

/* What an H200's busiest multiprocessor takes, in key tiles of 192 rows, by a model: second items come in reverse. INFINITY where there
 * are third ones. */
static double busiest_steps(const sinkattn_problem *p, int64_t tile_q, int64_t tile_k) {
    const int64_t tokens = tile_q / (p->num_q_heads / p->num_kv_heads), blocks = SA_H200_SMS;
    const int64_t items = p->num_kv_heads * p->batch * sa_ceil_div(p->q_len, tokens);
    if (items > 2 * blocks) return INFINITY;
    double steps = item_steps(p, tokens, tile_k, 0);
    if (items > blocks) {
        const int64_t firsts[] = {2 * blocks - items, blocks - 1}; /* the first and the last block with two */
        for (int i = 0; i < 2; i++)
            steps = fmax(steps, item_steps(p, tokens, tile_k, firsts[i]) + item_steps(p, tokens, tile_k, 2 * blocks - 1 - firsts[i]));
    }
    return steps * share_of_large_tiles(tile_q);
}

/* Whole tokens, where tiles of so few rows let more multiprocessors work. Of a packed batch only total sizes are known. */
const char *sa_refusal_small_tiles(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    const char *why = sa_refusal_whole_tokens(p, info);
    if (why) return why;
    if (p->packed && p->batch != 1) {
        const int64_t rounds = info->tile_q == 64 ? 1 : 3, tokens = info->tile_q / (p->num_q_heads / p->num_kv_heads);
        const int64_t tiles = p->num_kv_heads * sa_packed_tiles(p->q_len, tokens, p->batch);
        return tiles <= rounds * SA_H200_SMS ? NULL : "its tiles of rows are too many";
    }
    const double steps = busiest_steps(p, info->tile_q, info->tile_k);
    for (int64_t tile_q = info->tile_q + 64; tile_q <= (info->max_head_dim == 256 ? 128 : 192); tile_q += 64)
        if (busiest_steps(p, tile_q, info->tile_k) <= steps) return "tiles of more rows are faster";
    return NULL;
}

/* Both with values of at most 128 columns. */
const char *sa_refusal_whole_tokens_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_head_dim_v(p) > 128 ? "values are wider than 128" : sa_refusal_whole_tokens(p, info);
}

const char *sa_refusal_small_tiles_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_head_dim_v(p) > 128 ? "values are wider than 128" : sa_refusal_small_tiles(p, info);
}

/* A window whose tile_q rows, whole tokens of 2 to tile_q heads each, see at most tile_k keys beside few sink tokens. */
const char *sa_refusal_one_key_tile(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    const int64_t group = p->num_q_heads / p->num_kv_heads;
    if (sa_has_narrow_values(p)) return narrow_values;
    if (p->mask.num_sink_tokens > SA_WINDOW_SINK_TOKENS) return SA_TOO_MANY_SINK_TOKENS;
    if (group < 2 || info->tile_q % group) return "query heads a kv head must be 2 or more and divide its tile_q";
    if (!has_elements(p)) return "there are no rows or no keys";
    if (p->softmax_scale < 0.0) return "softmax_scale is negative";
    sinkattn_mask window = p->mask;
    window.num_sink_tokens = 0;
    const sa_band band = sa_band_of(&window, info->tile_k, info->tile_k);
    return sa_rows_reach(&band, info->tile_q / group) <= info->tile_k ? NULL : "left + right + tokens a tile > its tile_k";
}

/* Whether the windows of tile_q rows, whole tokens, lie in so many keys from a multiple of 16 on. */
static bool fits_steps(const sinkattn_problem *p, int64_t tile_q, int64_t keys) {
    return sa_window_keys(&p->mask) <= keys - 15 - (tile_q / (p->num_q_heads / p->num_kv_heads) - 1);
}

/* A window whose tile_q rows, whole tokens, see at most tile_k keys from a multiple of 16 on, beside few sink tokens. */
const char *sa_refusal_wide_window(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    const int64_t group = p->num_q_heads / p->num_kv_heads, tokens = info->tile_q / group;
    if (p->mask.num_sink_tokens > SA_WINDOW_SINK_TOKENS) return SA_TOO_MANY_SINK_TOKENS;
    if (8 * tokens * group < 7 * info->tile_q) return "tokens with all heads of a kv head leave an eighth of its tile_q idle";
    if (!has_elements(p)) return "there are no rows or no keys";
    if (p->softmax_scale < 0.0) return "softmax_scale is negative";
    return fits_steps(p, info->tile_q, info->tile_k) ? NULL : "left + right + tokens a tile + 15 > its tile_k";
}

/* The same with values of at most 128 columns, without sink tokens. */
const char *sa_refusal_wide_window_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->mask.num_sink_tokens) return "there are positional sink tokens";
    return sa_head_dim_v(p) > 128 ? "values are wider than 128" : sa_refusal_wide_window(p, info);
}

/* A causal window of which a key tile's rows see that tile and the two before it. */
static const char *refusal_of_window(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->num_q_heads / p->num_kv_heads > info->tile_q) return "more query heads a kv head than its tile_q";
    if (!has_elements(p)) return "there are no rows or no keys";
    if (!sa_is_causal(&p->mask)) return "rows see keys after their own";
    return sa_window_keys(&p->mask) <= 2 * info->tile_k + 1 ? NULL : "left > 2 of its tile_k";
}

/* The same beside few sink tokens. */
const char *sa_refusal_local_window(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (sa_has_narrow_values(p)) return narrow_values;
    return p->mask.num_sink_tokens > SA_WINDOW_SINK_TOKENS ? SA_TOO_MANY_SINK_TOKENS : refusal_of_window(p, info);
}

/* The same for narrow values of at most 128 columns, without sink tokens, and for wide heads. Without sink tokens both serve the problems
 * for which the general backward was slower (docs/kernels/bwd_wide_window_sm90.md); with sink tokens the second serves all that fit. */
const char *sa_refusal_local_wide_window_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (!sa_has_narrow_values(p)) return "values are as wide as keys";
    if (sa_head_dim_v(p) > 128) return "values are wider than 128";
    if (p->mask.num_sink_tokens) return "there are positional sink tokens";
    return p->num_q_heads == p->num_kv_heads ? "a kv head has one query head" : refusal_of_window(p, info);
}

const char *sa_refusal_local_wide_window(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->mask.num_sink_tokens)
        return fits_steps(p, info->tile_q, 160) ? sa_refusal_local_window(p, info) : "left + tokens a tile + 15 > 160";
    if (p->head_dim <= 96) return "head_dim is at most 96";
    if (p->num_q_heads / p->num_kv_heads < 5) return "a kv head has fewer than 5 query heads";
    return sa_window_keys(&p->mask) <= 64 ? "rows see at most 64 keys" : sa_refusal_local_window(p, info);
}

/* All heads of a token, or a slice of them, fit a tile of rows; there is something to describe to the copy engine. */
const char *sa_refusal_whole_rows(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (sa_bwd_sm90_slice_heads(p, info->tile_q) > info->tile_q) return "more query heads a kv head than its tile_q, and no multiple of 8";
    return has_elements(p) ? NULL : "there are no rows or no keys";
}

const char *sa_refusal_whole_rows_one_width(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_has_narrow_values(p) ? narrow_values : sa_refusal_whole_rows(p, info);
}

const char *sa_refusal_whole_rows_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_head_dim_v(p) > 128 ? "values are wider than 128" : sa_refusal_whole_rows(p, info);
}

/* Rows of a decode: a few of each sequence, as many of each. */
static const char *const packed_rows = "packed rows over a cache";

const char *sa_refusal_not_invariant(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    (void)info;
    if (p->packed) return packed_rows;
    return p->invariant ? "its parts depend on the batch" : NULL;
}

const char *sa_refusal_not_invariant_one_width(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_has_narrow_values(p) ? narrow_values : sa_refusal_not_invariant(p, info);
}

const char *sa_refusal_not_invariant_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_head_dim_v(p) > 128 ? "values are wider than 128" : sa_refusal_not_invariant(p, info);
}

/* What decodes take on an H200, in us, were all sequences full: docs/planner.md. First, thousands of keys that a row sees. */
static double keys_seen(const sinkattn_problem *p) {
    const int64_t window = sa_min(sa_window_keys(&p->mask), SA_SHORT_LEN) + p->q_len + sa_min(p->mask.num_sink_tokens, SA_SHORT_LEN);
    return 1e-3 * (double)sa_min(p->k_len, window);
}

/* What a multiprocessor needs to read them and their values, while all do. */
static double reading_us(const sinkattn_problem *p) { return keys_seen(p) * (double)(p->head_dim + sa_head_dim_v(p)) * (7.4 / 128); }

static bool has_small_pages(const sinkattn_problem *p) { return p->page_size % 16; }

/* Tiles of so many rows of a kv head, a multiprocessor. */
static double tiles_each(const sinkattn_problem *p, int64_t rows) {
    return (double)(p->batch * p->num_kv_heads * sa_ceil_div(sa_kv_head_rows(p), rows)) / SA_H200_SMS;
}

/* The general decode, which reads K and V for each 16 rows; few keys in one part. */
static double general_us(const sinkattn_problem *p) {
    const double reading = reading_us(p) * (has_small_pages(p) ? 1.65 : 1);
    return keys_seen(p) <= 0.256 ? 4.8 + tiles_each(p, 16) * (0.1 + 1.16 * reading) : 7.5 + tiles_each(p, 16) * (1 + reading);
}

/* Those that read them once for 64. */
static double once_us(const sinkattn_problem *p) {
    const double rows = (double)sa_min(64, sa_kv_head_rows(p));
    return 12 + tiles_each(p, 64) * (3 + rows / 8 + reading_us(p) * (1 + rows / 192));
}

/* The general decode where it is faster. Above head_dim 256 the others come first. */
static const char *unless_general_is_slower(const sinkattn_problem *p) {
    return p->head_dim <= 256 && general_us(p) <= once_us(p) ? "the general decode is faster" : NULL;
}

/* Whether one of them serves more than 16 rows. */
static bool is_read_once(const sinkattn_problem *p) {
    return !sa_has_narrow_values(p) || (!has_small_pages(p) && (sa_kv_head_rows(p) > 32 || p->head_dim > 192));
}

/* More rows of a kv head than two tiles of the kernels for 8.0, or one past head_dim 192, where those are slower; keys that those cannot
 * take, whatever the rows. With num_splits a row's bits are those kernels': over one token's keys the parts are theirs. */
const char *sa_refusal_many_rows(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    const char *why = sa_refusal_not_invariant(p, info);
    if (why) return why;
    if (has_small_pages(p)) return "page_size is not a multiple of its tile_k";
    if (p->head_dim > 512) return NULL;
    const int64_t rows = sa_kv_head_rows(p);
    if (rows <= 16) return "a kv head has 16 rows or fewer";
    if (rows <= 32 && p->head_dim <= 192) return "a kv head has 32 rows or fewer";
    if (p->num_splits < 0 || (p->num_splits && p->q_len > 1)) return "num_splits is negative, or of several tokens";
    return unless_general_is_slower(p);
}

const char *sa_refusal_many_rows_one_width(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_has_narrow_values(p) ? narrow_values : sa_refusal_many_rows(p, info);
}

const char *sa_refusal_many_rows_v128(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    return sa_head_dim_v(p) > 128 ? "values are wider than 128" : sa_refusal_many_rows(p, info);
}

/* The same of values as wide as keys: more than 16 rows up to head_dim 128, 17 to 32 up to 256, 9 to 16 past that; from small pages any
 * number up to 256, and up to 16 past that. */
const char *sa_refusal_swapped(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    const char *why = sa_refusal_not_invariant_one_width(p, info);
    if (why) return why;
    const int64_t rows = sa_kv_head_rows(p);
    const bool small_pages = has_small_pages(p), wide = info->max_head_dim > 256;
    if (wide && p->head_dim <= 256) return "head_dim is at most 256";
    if (wide && ((rows < 9 && !small_pages) || rows > 16)) return "a kv head has fewer than 9 rows or more than 16";
    if (!wide && rows <= 16 && !small_pages) return "a kv head has 16 rows or fewer, in large pages";
    if (info->max_head_dim == 256 && rows > 32 && !small_pages) return "a kv head has more than 32 rows";
    if (p->num_splits) return "num_splits is given";
    return unless_general_is_slower(p);
}

/* A decode that must have the bits of the forward with the same arch and head_dim, whose tile of rows decides what it serves. */
const char *sa_refusal_invariant_whole_tokens(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->packed) return packed_rows;
    if (!p->invariant) return "it is for invariant alone";
    if (sa_has_narrow_values(p)) return narrow_values;
    const int64_t streams = sa_num_query_tiles(p, info), slots = sa_max(1, sa_chain_slots(streams, sa_num_chunks(p, info)));
    if (streams > INT32_MAX / slots) return "its tiles of rows are too many";
    const sa_variant *row;
    for (int32_t i = 0; (row = sa_variant_at(i)); i++)
        if (row->refusal == sa_refusal_whole_tokens && row->info.max_head_dim == info->max_head_dim)
            return sa_refusal_whole_tokens(p, &row->info);
    return "no forward has its head_dim";
}

/* A decode that must have the forward's bits, under a window that its kernel for one key tile serves. */
const char *sa_refusal_invariant_window(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->packed) return packed_rows;
    if (!p->invariant) return "it is for invariant alone";
    return sa_refusal_one_key_tile(p, info);
}

/* The decodes with the forward's bits. */
static double chain_us(const sinkattn_problem *p) {
    return 13.5 + tiles_each(p, 8) * (1.8 + 0.45 * reading_us(p) * (has_small_pages(p) ? 1.4 : 1)) + 0.6 * keys_seen(p);
}

/* The forward's large tiles, of whole tokens, and the forward by tiles of tile_q rows. */
static int64_t large_tile(const sinkattn_problem *p) { return p->head_dim > 128 ? 128 : 192; }

static double forward_tiles_each(const sinkattn_problem *p) {
    const int64_t group = p->num_q_heads / p->num_kv_heads;
    return tiles_each(p, sa_max(1, large_tile(p) / group) * group);
}

static double forward_us(const sinkattn_problem *p, int64_t tile_q) {
    const bool small = has_small_pages(p);
    const double keys = keys_seen(p), begin = small && p->head_dim <= 64 && keys < 0.16 ? 24 : 4;
    const double share = share_of_large_tiles(sa_min(tile_q, large_tile(p))) / share_of_large_tiles(large_tile(p));
    const double tiles = fmax(1, forward_tiles_each(p)) * (begin + (2 * keys + 0.92 * reading_us(p)) * (small ? 2 : 1)) * share;
    return sa_window_keys(&p->mask) < p->k_len ? 6 + tiles : fmax(6 + tiles, 15 + tiles / 2); /* however few keys */
}

/* The forward serves rows of one q_len, and this is NULL, where no decode has its bits or where it is expected to take less time. */
static const char *why_not_forward(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (p->extras) return "it has neither host pages nor NVFP4";
    if (p->num_splits && !p->invariant) return "num_splits is given";
    if (forward_tiles_each(p) > INT32_MAX / SA_H200_SMS) return "its tiles of rows are too many";
    /* No decode has the bits of such a forward. */
    if (p->invariant && (info->arch < 90 || p->head_dim > 128 || sa_has_narrow_values(p))) return NULL;
    if (info->arch < 90) return "it is for packed rows, or invariant";
    if (sa_kv_head_rows(p) <= 16) return "a kv head has 16 rows or fewer";
    const double parts = (is_read_once(p) ? fmin(general_us(p), once_us(p)) : general_us(p)) + 0.01 * (double)sa_kv_head_rows(p);
    const double decode = p->invariant ? chain_us(p) : parts;
    return forward_us(p, info->tile_q) < decode ? NULL : "decodes are faster";
}

/* Packed rows over a cache, by the forward that serves them over packed keys, so that they have its bits; rows of one q_len, where it is
 * faster. */
#define SA_PACKED(rule) \
    const char *sa_refusal_packed_##rule(const sinkattn_problem *p, const sinkattn_variant_info *info) { \
        const char *why = p->packed ? NULL : why_not_forward(p, info); \
        return why ? why : sa_refusal_##rule(p, info); \
    }
SA_PACKED(any)
SA_PACKED(one_width)
SA_PACKED(whole_tokens)
SA_PACKED(small_tiles)
SA_PACKED(small_tiles_v128)
SA_PACKED(whole_tokens_v128)
SA_PACKED(one_key_tile)
