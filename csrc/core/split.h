/* SPDX-License-Identifier: Apache-2.0
 *
 * The key tiles that a tile of rows works through, the row tiles that a tile of keys works through, and how work is cut into parts. Host
 * and device.
 *
 * Key tiles lie at multiples of tile_k from key 0 of the sequence, never at the first key seen: so a row meets its keys in the same tiles
 * whichever rows are its neighbours. Row tiles lie at multiples of their size from row 0.
 */
#ifndef SA_SPLIT_H
#define SA_SPLIT_H

#include "mask.h"

/* Of tiles of `size`: the one that holds x; the first that begins at x or after it, where tiles that hold what is before x end. */
SA_HD int32_t sa_tile_of(sa_position_t x, sa_position_t size) { return (int32_t)(x / size); }
SA_HD int32_t sa_tile_from(sa_position_t x, sa_position_t size) { return (int32_t)((x + size - 1) / size); }
/* The CPU's chunks: keys [i * SA_CPU_CHUNK, (i + 1) * SA_CPU_CHUNK) of a sequence are summed by themselves, and chunks join in ascending
 * order. A decode's parts are whole chunks, so it sums as the forward does. A multiple of every tile_k. */
enum { SA_CPU_CHUNK = 512 };

/* The chunks of CUDA's forward on 9.0 up to this head_dim, and of decodes in its order, in its key tiles and in keys: 8192 up to head_dim
 * 64, 20480 above. Masks with a left side are not cut. */
enum { SA_CHUNKS_HEAD_DIM = 128 };
static inline int64_t sa_chunk_tiles(int64_t tile_k) { return tile_k == 128 ? 64 : 256; }
static inline int64_t sa_chunk_keys(int64_t tile_k) { return sa_chunk_tiles(tile_k) * tile_k; }

/* The windowed CUDA kernels take at most so many positional sink tokens: a k16 step in front of those of the window's keys. */
enum { SA_WINDOW_SINK_TOKENS = 16 };

/* Tile t holds keys [t * tile_k, (t + 1) * tile_k). Tile numbers are int32, which a loop keeps in registers: 2^31 tiles are enough. */
typedef struct sa_key_tiles {
    int32_t sink_end, begin, end;                /* tiles [0, sink_end) and [begin, end) hold keys that some row sees */
    int32_t full_sink_end, full_begin, full_end; /* full: tiles [full_begin, full_end), and those before both full_sink_end and full_end */
    sa_position_t tile_k, sink_keys;             /* keys [0, sink_keys) and the band are seen by some row */
    sa_range band;
} sa_key_tiles;

SA_HD sa_key_tiles sa_key_tiles_of(const sa_band *band, sa_range rows, sa_position_t tile_k) {
    const sa_range first = sa_row_band(band, rows.begin), last = sa_row_band(band, rows.end - 1);
    sa_key_tiles tiles;
    tiles.tile_k = tile_k;
    tiles.band = sa_rows_band(band, rows, &tiles.sink_keys);
    tiles.sink_end = (int32_t)((tiles.sink_keys + tile_k - 1) / tile_k);
    tiles.begin = (int32_t)(tiles.band.begin / tile_k);
    tiles.end = tiles.band.begin < tiles.band.end ? (int32_t)((tiles.band.end + tile_k - 1) / tile_k) : tiles.sink_end;
    tiles.full_sink_end = (int32_t)(band->num_sink / tile_k);
    tiles.full_begin = (int32_t)((last.begin + tile_k - 1) / tile_k);
    tiles.full_end = (int32_t)(first.end / tile_k);
    return tiles;
}

/* Of rows [first, last] among those that `all` is of, where row i sees the window [begin[i], end[i]): what a walk reads, without tile_k,
 * sink_keys and band. A walk skips one range of tiles alone, so where there are sink tokens the part keeps all tiles before its window. */
SA_HD void sa_key_tiles_of_part(sa_key_tiles *part, const sa_key_tiles *all, const sa_band *band, const int32_t *begin, const int32_t *end,
        int32_t first, int32_t last, sa_position_t tile_k) {
    part->sink_end = all->sink_end;
    part->full_sink_end = all->full_sink_end;
    part->full_begin = (int32_t)((begin[last] + tile_k - 1) / tile_k);
    part->full_end = (int32_t)(end[first] / tile_k);
    const bool sees = first <= last && begin[first] < end[last];
    part->begin = band->num_sink ? all->begin : sees ? (int32_t)(begin[first] / tile_k) : 0;
    part->end = sees ? (int32_t)((end[last] + tile_k - 1) / tile_k) : all->sink_end;
}

/* The first tile at or after t to work through, while it is below tiles->end. */
SA_HD int32_t sa_key_tile_from(const sa_key_tiles *tiles, int32_t t) { return t < tiles->sink_end || t >= tiles->begin ? t : tiles->begin; }

/* Of tiles without a sink prefix: those of [first, last). */
SA_HD void sa_cut_key_tiles(sa_key_tiles *tiles, int32_t first, int32_t last) {
    tiles->begin = (int32_t)sa_last(tiles->begin, first);
    tiles->end = (int32_t)sa_first(tiles->end, last);
    tiles->full_begin = (int32_t)sa_last(tiles->full_begin, first);
    tiles->full_end = (int32_t)sa_first(tiles->full_end, last);
    tiles->band.begin = sa_last(tiles->band.begin, first * tiles->tile_k);
    tiles->band.end = sa_first(tiles->band.end, last * tiles->tile_k);
}

/* How many tiles there are to work through, how many lie between the sink prefix and the window, and which the n-th is. */
SA_HD int32_t sa_key_tile_count(const sa_key_tiles *tiles) {
    const int32_t begin = tiles->begin > tiles->sink_end ? tiles->begin : tiles->sink_end;
    return tiles->sink_end + (tiles->end > begin ? tiles->end - begin : 0);
}

SA_HD int32_t sa_key_tile_gap(const sa_key_tiles *tiles) { return tiles->begin > tiles->sink_end ? tiles->begin - tiles->sink_end : 0; }

SA_HD int32_t sa_key_tile_at(const sa_key_tiles *tiles, int32_t n) { return n < tiles->sink_end ? n : n + sa_key_tile_gap(tiles); }

/* Every row sees every key of tile t: no masking is needed there. */
SA_HD bool sa_key_tile_is_full(const sa_key_tiles *tiles, int32_t t) {
    return t < tiles->full_end && (t >= tiles->full_begin || t < tiles->full_sink_end);
}

/* Full tiles after the sink prefix, by their numbers among the tiles to work through: see sa_key_tile_at. */
SA_HD sa_range sa_full_key_tiles(const sa_key_tiles *tiles) {
    const int32_t gap = sa_key_tile_gap(tiles);
    sa_range full;
    full.begin = sa_last(tiles->sink_end, tiles->full_begin - gap);
    full.end = tiles->full_end - gap;
    return full;
}

/* From the first to the last key of tile t that some row sees. */
SA_HD sa_range sa_key_tile(const sa_key_tiles *tiles, int32_t t) {
    const sa_position_t begin = t * tiles->tile_k, end = begin + tiles->tile_k;
    sa_range keys;
    keys.begin = begin < tiles->sink_keys ? begin : sa_last(begin, tiles->band.begin);
    keys.end = sa_first(end, tiles->band.begin < end && tiles->band.begin < tiles->band.end ? tiles->band.end : tiles->sink_keys);
    return keys;
}

/* The row tiles that a tile of keys works through. Tile t holds rows [t * tile_q, (t + 1) * tile_q). */
typedef struct sa_row_tiles {
    int32_t begin, end;           /* tiles [begin, end) hold rows that see some of the keys */
    int32_t full_begin, full_end; /* rows of tiles [full_begin, full_end) see every key: no masking is needed there */
} sa_row_tiles;

/* full_begin and full_end for keys of the sequence: rows see the last key latest and lose the first that is no sink token earliest. */
SA_HD sa_range sa_row_tiles_full(const sa_band *band, sa_range keys, sa_position_t tile_q) {
    const sa_position_t past_sink = sa_within(band->num_sink, keys.begin, keys.end - 1);
    const sa_range latest = {keys.end - 1, keys.end}, earliest = {past_sink, past_sink + 1};
    sa_range tiles;
    tiles.begin = (sa_keys_rows(band, latest).begin + tile_q - 1) / tile_q;
    tiles.end = sa_keys_rows(band, earliest).end / tile_q;
    return tiles;
}

/* Rows of tiles before the one returned see no key after these; tiles->end where no row does. */
SA_HD sa_position_t sa_row_tiles_before(const sa_row_tiles *tiles, const sa_band *band, sa_range keys, sa_position_t tile_q) {
    const sa_position_t last = sa_last_row_before(band, keys.end - 1);
    return keys.end == band->k_len || last >= band->q_len - 1 ? tiles->end : sa_last(last + 1, 0) / tile_q;
}

/* Part `part` of `num_parts` over num_tiles tiles: contiguous, ascending, sizes differing by at most one, larger parts first. */
SA_HD sa_range sa_split_part(sa_position_t num_tiles, sa_position_t num_parts, sa_position_t part) {
    const sa_position_t size = num_tiles / num_parts, longer = num_tiles % num_parts;
    sa_range tiles;
    tiles.begin = part * size + sa_first(part, longer);
    tiles.end = tiles.begin + size + (part < longer);
    return tiles;
}

/* x / size as a multiplication and a shift, for x and size below 2^31. Proof: with factor * size = 2^(31 + bits) + e, 0 <= e < size <=
 * 2^bits, the error x * e stays below 2^(31 + bits). */
typedef struct sa_divisor {
    uint32_t factor, bits;
} sa_divisor;

SA_HD sa_divisor sa_divisor_of(uint32_t size) {
    sa_divisor by = {0, 0};
    while (size > UINT32_C(1) << by.bits) by.bits++;
    by.factor = (uint32_t)(((UINT64_C(1) << (31 + by.bits)) + size - 1) / size);
    return by;
}

SA_HD uint32_t sa_divide(uint32_t x, sa_divisor by) { return (uint32_t)((uint64_t)(2 * x) * by.factor >> 32) >> by.bits; }

/* How streams of any lengths, of num_heads kv heads, are cut: into parts of one length, the last of each stream shorter, or where there
 * would be more than `most` parts, into `most` shares.
 *
 * Parts: at least a step long; one a worker until each has two steps, then two. With more streams than that, as many as run at once,
 * `resident`. fewest and most are multiples of the number of streams while those are at most two a worker, so equal streams are cut alike;
 * more than 8 parts a stream are a multiple of 8, since 8 are merged at a time.
 * Shares: equal amounts of all tiles, the same number for each kv head, ending anywhere. A stream counts as `begin` tiles more, the time
 * that starting on it takes.
 * Cutting does not pay when whole streams are only slightly longer than a share, so with many streams a part may be longer by `slack`. */
typedef struct sa_cut {
    uint32_t step, begin, fewest, most, slack; /* tiles: step, begin, slack; parts: fewest, most */
    sa_divisor by_fewest, by_most;
} sa_cut;

SA_HD sa_cut sa_cut_of(uint32_t num_streams, uint32_t num_heads, uint32_t step, uint32_t begin, uint32_t workers, uint32_t resident) {
    const uint32_t two = 2 * workers < resident ? 2 * workers : resident;
    sa_cut cut;
    cut.step = step;
    cut.begin = begin;
    cut.fewest = num_streams < workers ? workers / num_streams * num_streams : num_streams;
    const uint32_t each = two / num_streams;
    if (num_streams <= two)
        cut.most = (each > 8 ? each / 8 * 8 : each) * num_streams;
    else
        cut.most = num_heads < resident ? resident / num_heads * num_heads : num_heads;
    cut.slack = num_streams > two ? 2 * step : 0;
    cut.by_fewest = sa_divisor_of(cut.fewest);
    cut.by_most = sa_divisor_of(cut.most);
    return cut;
}

/* Tiles of a share, where all streams have num_tiles, below 2^31 - most. */
SA_HD uint32_t sa_share_length(const sa_cut *cut, uint32_t num_tiles) { return sa_divide(num_tiles + cut->most - 1, cut->by_most); }

/* Tiles of a part, where all streams have num_tiles; below 2^30. */
SA_HD uint32_t sa_part_length(const sa_cut *cut, uint32_t num_tiles) {
    const uint32_t one = sa_divide(num_tiles + cut->fewest - 1, cut->by_fewest), two = sa_share_length(cut, num_tiles);
    const uint32_t least = one < 2 * cut->step ? one : 2 * cut->step, length = two > least ? two : least;
    return (length > cut->step ? length : cut->step) + (cut->slack ? length / 16 + cut->slack : 0);
}

/* Shares are cut from a line of positions a kv head: its streams with keys, one after another, each as `lead` empty positions, sa_cut's
 * begin, then its tiles. Shares begin at multiples of `length`, which is more than lead. This is what a share holds of one stream. */
typedef struct sa_share {
    uint32_t first, last;           /* tiles [first, last) of the stream; none where the share ends within its lead */
    uint32_t part, num_parts, slot; /* the number of this part of the stream, and of all; partials lie from `slot` on, two slots a share */
    uint32_t rest;                  /* positions of the share after the stream */
} sa_share;

/* Share `share` from position `at` of a stream on, with `room` positions left; `begin` positions lie before the stream. A stream in n
 * shares contains n - 1 of their ends, so its 2 (n - 1) slots are enough for n partials. */
SA_HD sa_share sa_share_of(uint32_t num_tiles, uint32_t lead, uint32_t length, uint32_t share, uint32_t begin, uint32_t at, uint32_t room) {
    const uint32_t end = num_tiles + lead, past = at + room < end ? at + room : end, first_share = (begin + lead) / length;
    sa_share of;
    of.first = at > lead ? at - lead : 0;
    of.last = past > lead ? past - lead : 0;
    of.part = share - first_share;
    of.num_parts = (begin + end - 1) / length - first_share + 1;
    of.slot = 2 * first_share;
    of.rest = room - (past - at);
    return of;
}

#endif
