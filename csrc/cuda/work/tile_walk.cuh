// SPDX-License-Identifier: Apache-2.0
//
// Walks over tiles. Roles of a kernel that walk the same bounds meet the same tiles in the same order, one stage of a ring each:
//
//     for (KeyTileWalk tile(tiles); tile.exists(); tile.advance(), ring.n++) ...
//
// KeyTileWalk: the key tiles that a tile of rows sees, ascending, the sink prefix before the window. RowTileWalk: the row tiles that see a
// tile of keys, descending.
//
// Bounds come from core/split.h. A walk keeps their address and reads them at each step: they may lie in shared memory, where they cost no
// registers, but must stay there until the walk has ended.
#pragma once

#include "core/split.h"

namespace sa {

struct KeyTileWalk {
    const sa_key_tiles *tiles;
    int32_t t;

    // From the first tile at or after `from`.
    __device__ __forceinline__ explicit KeyTileWalk(const sa_key_tiles &of, int32_t from = 0)
        : tiles(&of), t(sa_key_tile_from(&of, from)) {}

    __device__ __forceinline__ bool exists() const { return t < tiles->end; }
    __device__ __forceinline__ bool is_full() const { return sa_key_tile_is_full(tiles, t); } // needs no mask
    __device__ __forceinline__ KeyTileWalk next() const { return KeyTileWalk(*tiles, t + 1); }
    __device__ __forceinline__ void advance() { t = next().t; }
};

struct RowTileWalk {
    const sa_row_tiles *tiles;
    int32_t t;

    __device__ __forceinline__ explicit RowTileWalk(const sa_row_tiles &of) : tiles(&of), t(of.end - 1) {}

    __device__ __forceinline__ bool exists() const { return t >= tiles->begin; }
    __device__ __forceinline__ bool is_last() const { return t == tiles->begin; }
    __device__ __forceinline__ void advance() { t--; }
};

} // namespace sa
