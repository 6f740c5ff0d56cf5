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

typedef struct sa_key_tiles {
    int64_t tile_k;
    int64_t sink_end; /* keys [0, sink_end) and [band.begin, band.end) are seen by some row */
    sa_range band;
} sa_key_tiles;

SA_HD sa_key_tiles sa_key_tiles_of(const sa_band *band, sa_range rows, int64_t tile_k) {
    sa_key_tiles tiles;
    tiles.tile_k = tile_k;
    tiles.band = sa_rows_band(band, rows, &tiles.sink_end);
    return tiles;
}

/* The first tile at or after t that has a key to look at; sa_key_tile_exists says whether there is one. */
SA_HD int64_t sa_key_tile_from(const sa_key_tiles *tiles, int64_t t) {
    return t * tiles->tile_k < tiles->sink_end ? t : sa_max(t, tiles->band.begin / tiles->tile_k);
}

SA_HD bool sa_key_tile_exists(const sa_key_tiles *tiles, int64_t t) {
    return t * tiles->tile_k < sa_max(tiles->sink_end, tiles->band.begin < tiles->band.end ? tiles->band.end : 0);
}

/* From the first to the last key of tile t that some row sees. */
SA_HD sa_range sa_key_tile(const sa_key_tiles *tiles, int64_t t) {
    const int64_t begin = t * tiles->tile_k, end = begin + tiles->tile_k;
    sa_range keys;
    keys.begin = begin < tiles->sink_end ? begin : sa_max(begin, tiles->band.begin);
    keys.end = sa_min(end, tiles->band.begin < end && tiles->band.begin < tiles->band.end ? tiles->band.end : tiles->sink_end);
    return keys;
}

/* Part `part` of `num_parts` over num_tiles tiles: contiguous, ascending, sizes differing by at most one, larger parts first. */
SA_HD sa_range sa_split_part(int64_t num_tiles, int64_t num_parts, int64_t part) {
    const int64_t size = num_tiles / num_parts, longer = num_tiles % num_parts;
    sa_range tiles;
    tiles.begin = part * size + sa_min(part, longer);
    tiles.end = tiles.begin + size + (part < longer);
    return tiles;
}

#endif
