/* SPDX-License-Identifier: Apache-2.0
 *
 * The mask as integer functions: the only place where window arithmetic is written. Host and device.
 *
 *     key j ->       sinks         band of row i
 *                 [0, num_sink)   [p - left, p + right]            p = i + (k_len - q_len), bottom-right aligned
 *     row i  ......####..............##########......
 *     row i+1 .....####...............##########.....
 *
 * A row's keys are at most two ranges, the sink prefix and the band, and both ends of both move monotonically with the row. So a tile
 * of rows sees the union from its first row's begin to its last row's end, without holes, and a tile of keys is seen by one range of rows.
 */
#ifndef SA_MASK_H
#define SA_MASK_H

#include "sinkattn.h"

#ifdef __CUDACC__
#define SA_HD __host__ __device__ static inline
#else
#define SA_HD static inline
#endif

/* Of positions in a sequence, and of lengths. GPUs count in 32 bits: their kernels take fewer than SA_SHORT_LEN rows or keys, so that no
 * sum below overflows. */
#define SA_SHORT_LEN (1 << 29)
#ifdef __CUDACC__
typedef int32_t sa_position_t;
#else
typedef int64_t sa_position_t;
#endif

typedef struct sa_range {
    sa_position_t begin, end;
} sa_range;

/* A mask made concrete for one sequence: every bound is finite, so no function below asks whether a side is bounded. */
typedef struct sa_band {
    sa_position_t q_len, k_len;
    sa_position_t shift;       /* p = i + shift */
    sa_position_t left, right; /* clamped to q_len + k_len, which reaches every key from every row */
    sa_position_t num_sink;    /* clamped to k_len */
} sa_band;

SA_HD int64_t sa_min(int64_t a, int64_t b) { return a < b ? a : b; }
SA_HD int64_t sa_max(int64_t a, int64_t b) { return a > b ? a : b; }
SA_HD int64_t sa_clamp(int64_t x, int64_t low, int64_t high) { return sa_max(low, sa_min(x, high)); }
SA_HD int64_t sa_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Of positions, which are narrower in kernels. */
SA_HD sa_position_t sa_first(sa_position_t a, sa_position_t b) { return a < b ? a : b; }
SA_HD sa_position_t sa_last(sa_position_t a, sa_position_t b) { return a > b ? a : b; }
SA_HD sa_position_t sa_within(sa_position_t x, sa_position_t low, sa_position_t high) { return sa_last(low, sa_first(x, high)); }

SA_HD sa_band sa_band_of(const sinkattn_mask *mask, sa_position_t q_len, sa_position_t k_len) {
    const sa_position_t reach = q_len + k_len;
    sa_band band;
    band.q_len = q_len;
    band.k_len = k_len;
    band.shift = k_len - q_len;
    band.left = mask->has_left ? (sa_position_t)sa_min(mask->left, reach) : reach;
    band.right = mask->has_right ? (sa_position_t)sa_min(mask->right, reach) : reach;
    band.num_sink = (sa_position_t)sa_min(mask->num_sink_tokens, k_len);
    return band;
}

/* Whether every row sees the first key of its sequence, and all up to its last. */
SA_HD bool sa_sees_from_first(const sinkattn_mask *mask) { return !mask->has_left; }

/* Keys that a row's window holds, were there keys everywhere; INT64_MAX where a side is open. */
SA_HD int64_t sa_window_keys(const sinkattn_mask *mask) {
    const int64_t most = INT64_MAX / 4;
    return mask->has_left && mask->has_right ? sa_min(mask->left, most) + sa_min(mask->right, most) + 1 : INT64_MAX;
}

SA_HD bool sa_is_causal(const sinkattn_mask *mask) { return mask->has_right && mask->right == 0; }

/* The same mask over fewer keys. */
SA_HD sa_band sa_band_with_keys(sa_band band, sa_position_t k_len) {
    band.k_len = k_len;
    band.shift = k_len - band.q_len;
    return band;
}

/* The first row that sees a key, q_len where none does; the last row that sees none after `key`, which may lie outside. */
SA_HD sa_position_t sa_first_seeing_row(const sa_band *band) {
    return band->k_len ? sa_within(-band->shift - band->right, 0, band->q_len) : band->q_len;
}
SA_HD sa_position_t sa_last_row_before(const sa_band *band, sa_position_t key) { return key - band->right - band->shift; }

/* Where row i stands among the keys. */
SA_HD sa_position_t sa_position(const sa_band *band, sa_position_t i) { return i + band->shift; }

/* The first key that the window of a row at this position reaches, were there keys everywhere, and how many it reaches. */
SA_HD sa_position_t sa_window_begin(const sa_band *band, sa_position_t position) { return position - band->left; }
SA_HD sa_position_t sa_window_size(const sa_band *band) { return band->left + band->right + 1; }

SA_HD bool sa_visible(const sa_band *band, sa_position_t i, sa_position_t j) {
    const sa_position_t p = i + band->shift;
    return j <= p + band->right && (j >= p - band->left || j < band->num_sink);
}

/* The keys of row i are [0, sink end) and [begin, end). The band is empty, begin == end, for a row before the first key; the prefix
 * ends where the band begins at the latest, so no key is named twice. */
SA_HD sa_range sa_row_band(const sa_band *band, sa_position_t i) {
    const sa_position_t p = i + band->shift;
    sa_range keys;
    keys.end = sa_within(p + band->right + 1, 0, band->k_len);
    keys.begin = sa_within(p - band->left, 0, keys.end);
    return keys;
}

SA_HD sa_position_t sa_row_sink_end(const sa_band *band, sa_position_t i) { return sa_first(band->num_sink, sa_row_band(band, i).begin); }

/* The keys that some row of [rows.begin, rows.end) sees: [0, *sink_end) and the band returned, disjoint and ascending. */
SA_HD sa_range sa_rows_band(const sa_band *band, sa_range rows, sa_position_t *sink_end) {
    const sa_range last = sa_row_band(band, rows.end - 1);
    sa_range keys;
    keys.begin = sa_row_band(band, rows.begin).begin;
    keys.end = last.end;
    *sink_end = sa_first(sa_first(band->num_sink, last.end), keys.begin);
    return keys;
}

/* No more keys than this are seen by any `rows` neighbouring rows. */
SA_HD int64_t sa_rows_reach(const sa_band *band, int64_t rows) { return rows + band->left + band->right + band->num_sink; }

/* The rows that see some key of [keys.begin, keys.end). */
SA_HD sa_range sa_keys_rows(const sa_band *band, sa_range keys) {
    const bool has_sink = keys.begin < band->num_sink;
    sa_range rows;
    rows.end = has_sink ? band->q_len : sa_within(keys.end - 1 + band->left - band->shift + 1, 0, band->q_len);
    rows.begin = sa_within(keys.begin - band->right - band->shift, 0, rows.end);
    return rows;
}

/* True when every row of the range sees every key of the range: no masking is needed there. */
SA_HD bool sa_all_visible(const sa_band *band, sa_range rows, sa_range keys) {
    const sa_range first = sa_row_band(band, rows.begin), last = sa_row_band(band, rows.end - 1);
    return keys.end <= first.end && (keys.begin >= last.begin || keys.end <= band->num_sink);
}

SA_HD int64_t sa_pair_count(const sa_band *band) {
    int64_t pairs = 0;
    for (sa_position_t i = 0; i < band->q_len; i++) {
        const sa_range keys = sa_row_band(band, i);
        pairs += keys.end - keys.begin + sa_row_sink_end(band, i);
    }
    return pairs;
}

#endif
