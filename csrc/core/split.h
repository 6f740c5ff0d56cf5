/* SPDX-License-Identifier: Apache-2.0
 *
 * Key tiles cut into work parts, for the planner and for the decode kernels. Host and device.
 */
#ifndef SA_SPLIT_H
#define SA_SPLIT_H

#include "mask.h"

/* Part `part` of `num_parts` over num_tiles tiles: contiguous, ascending, sizes differing by at most one, larger parts first. */
SA_HD sa_range sa_split_part(int64_t num_tiles, int64_t num_parts, int64_t part) {
    const int64_t size = num_tiles / num_parts, longer = num_tiles % num_parts;
    sa_range tiles;
    tiles.begin = part * size + sa_min(part, longer);
    tiles.end = tiles.begin + size + (part < longer);
    return tiles;
}

#endif
