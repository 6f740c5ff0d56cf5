/* SPDX-License-Identifier: Apache-2.0
 *
 * The key tiles that a tile of rows works through, and how they are cut into parts. Host and device.
 *
 * Tiles lie at multiples of tile_k from key 0 of the sequence, never at the first key seen: so a row meets its keys in the same tiles
 * whichever rows are its neighbours.
 */
#ifndef SA_SPLIT_H
#define SA_SPLIT_H

#include "mask.h"

/* Tile t holds keys [t * tile_k, (t + 1) * tile_k). Tile numbers are int32, which a loop keeps in registers: 2^31 tiles are enough. */
typedef struct sa_key_tiles {
    int32_t sink_end, begin, end;                /* tiles [0, sink_end) and [begin, end) hold keys that some row sees */
    int32_t full_sink_end, full_begin, full_end; /* what sa_key_tile_is_full looks at */
    sa_position_t tile_k, sink_keys;             /* keys [0, sink_keys) and the band are seen by some row */
    sa_range band;
} sa_key_tiles;

SA_HD sa_key_tiles sa_key_tiles_of(const sa_band *band, sa_range rows, sa_position_t tile_k) {
    const sa_range first = sa_row_band(band, rows.begin), last = sa_row_band(band, rows.end - 1);
    sa_key_tiles tiles;
    tiles.tile_k = tile_k;
    tiles.band = sa_rows_band(band, rows, &tiles.sink_keys);
    tiles.sink_end = (int32_t)sa_ceil_div(tiles.sink_keys, tile_k);
    tiles.begin = (int32_t)(tiles.band.begin / tile_k);
    tiles.end = tiles.band.begin < tiles.band.end ? (int32_t)sa_ceil_div(tiles.band.end, tile_k) : tiles.sink_end;
    tiles.full_sink_end = (int32_t)(band->num_sink / tile_k);
    tiles.full_begin = (int32_t)sa_ceil_div(last.begin, tile_k);
    tiles.full_end = (int32_t)(first.end / tile_k);
    return tiles;
}

/* The first tile at or after t to work through, while it is below tiles->end. */
SA_HD int32_t sa_key_tile_from(const sa_key_tiles *tiles, int32_t t) { return t < tiles->sink_end || t >= tiles->begin ? t : tiles->begin; }

/* How many tiles there are to work through, and which the n-th is. */
SA_HD int32_t sa_key_tile_count(const sa_key_tiles *tiles) {
    const int32_t begin = tiles->begin > tiles->sink_end ? tiles->begin : tiles->sink_end;
    return tiles->sink_end + (tiles->end > begin ? tiles->end - begin : 0);
}

SA_HD int32_t sa_key_tile_at(const sa_key_tiles *tiles, int32_t n) {
    const int32_t gap = tiles->begin > tiles->sink_end ? tiles->begin - tiles->sink_end : 0;
    return n < tiles->sink_end ? n : n + gap;
}

/* Every row sees every key of tile t: no masking is needed there. */
SA_HD bool sa_key_tile_is_full(const sa_key_tiles *tiles, int32_t t) {
    return t < tiles->full_end && (t >= tiles->full_begin || t < tiles->full_sink_end);
}

/* From the first to the last key of tile t that some row sees. */
SA_HD sa_range sa_key_tile(const sa_key_tiles *tiles, int32_t t) {
    const sa_position_t begin = t * tiles->tile_k, end = begin + tiles->tile_k;
    sa_range keys;
    keys.begin = begin < tiles->sink_keys ? begin : (sa_position_t)sa_max(begin, tiles->band.begin);
    keys.end =
        (sa_position_t)sa_min(end, tiles->band.begin < end && tiles->band.begin < tiles->band.end ? tiles->band.end : tiles->sink_keys);
    return keys;
}

/* Part `part` of `num_parts` over num_tiles tiles: contiguous, ascending, sizes differing by at most one, larger parts first. */
SA_HD sa_range sa_split_part(sa_position_t num_tiles, sa_position_t num_parts, sa_position_t part) {
    const sa_position_t size = num_tiles / num_parts, longer = num_tiles % num_parts;
    sa_range tiles;
    tiles.begin = part * size + (sa_position_t)sa_min(part, longer);
    tiles.end = tiles.begin + size + (part < longer);
    return tiles;
}

/* Where share `share` of num_shares <= num_tiles begins, floor(share * num_tiles / num_shares), and which share `tile` is in; at most 2^31
 * tiles and 2^16 shares. The tiles of equal streams are cut where the streams end, if num_shares is a multiple of the streams or divides
 * them. 32 bits, since a GPU divides 64 by calling a function. */
SA_HD uint32_t sa_share_begin(uint32_t num_tiles, uint32_t num_shares, uint32_t share) {
    return share * (num_tiles / num_shares) + share * (num_tiles % num_shares) / num_shares;
}
SA_HD uint32_t sa_share_of(uint32_t num_tiles, uint32_t num_shares, uint32_t tile) {
    const double before_next = (double)(tile + 1) * num_shares - 1; /* below 2^53, so the quotient is cut off where it should be */
    return (uint32_t)(before_next / num_tiles);
}

/* Shares worth cutting num_tiles of num_streams streams into: none shorter than a step, one a worker, two where each then has two steps;
 * but no fewer than streams, up to `most`, since what follows a stream's last tile costs more than a step. Equal streams end with a share.
 */
SA_HD uint32_t sa_balanced_shares(uint32_t num_tiles, uint32_t num_streams, uint32_t step, uint32_t workers, uint32_t most) {
    const uint32_t steps = num_tiles / step;
    uint32_t shares = steps <= workers ? steps : (uint32_t)sa_clamp(steps / 2, workers, sa_min(2 * (int64_t)workers, most));
    shares = (uint32_t)sa_max(shares, sa_min(num_streams, most));
    if (num_streams <= shares) return shares / num_streams * num_streams;
    const uint32_t streams_a_share = (num_streams - 1) / shares + 1;
    return (num_streams - 1) / streams_a_share + 1;
}

#endif
