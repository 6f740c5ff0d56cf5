/* SPDX-License-Identifier: Apache-2.0
 *
 * How the general backward of sm_90 cuts a sequence into items, and in which order blocks take them. Host and device.
 *
 * An item is a key block of a kv head, and the row tiles of a chain that see some of it. A chain is a range of row tiles of a kv head: its
 * items add to the sums of the same dQ, one after another, key blocks ascending. Chains are worked on `together`, side by side, so that an
 * item rarely waits for the item before it in its chain.
 *
 * dK and dV of a block are summed over the tiles of a round, then over rounds, later rows first. Rounds depend on the sequence, the heads
 * and the mask alone, so a sequence has the same bits in every batch. Where items are few, a chain is a round; where they are many, it is
 * all rounds, and the item itself adds them.
 */
#ifndef SA_CHAINS_H
#define SA_CHAINS_H

#include "split.h"

enum {
    SA_FEW_BLOCKS = 256,   /* of all kv heads: a sequence of fewer has rounds, */
    SA_ROUND_BLOCKS = 512, /* so many that blocks times rounds are about this, */
    SA_LEAST_ROUND = 32,   /* but none shorter than this */
    SA_MANY_BLOCKS = 512   /* of all sequences and kv heads: items are whole blocks */
};

/* What a launch has. */
typedef struct sa_chain_room {
    int32_t num_heads;  /* kv heads */
    int32_t most_tiles; /* longer sequences have rounds of at most round_tiles, since their tiles do not fit the slots */
    int32_t round_tiles;
    int32_t num_slots; /* accumulator slots */
    bool is_local;     /* under a window, whose items' tiles fit the slots */
    bool merges;       /* items are many: a chain is all rounds */
} sa_chain_room;

typedef struct sa_chains {
    int32_t blocks;              /* key blocks of a head */
    int32_t blind, tiles;        /* row tiles before the first row that sees a key; all row tiles of a head */
    int32_t rounds, round_tiles; /* the last round may be shorter */
    bool is_long;                /* rounds because of slots: heads one after another */
    bool split;                  /* a chain is a round, not all of them */
    int32_t count, together;     /* chains of all heads; worked on side by side */
    int32_t uses;                /* slot uses of a chain: its tiles, and in a shorter round idle ones */
} sa_chains;

/* tokens: of a row tile; keys: of a block. */
SA_HD sa_chains sa_chains_of(const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room) {
    sa_chains c;
    const sa_position_t first = sa_first_seeing_row(band);
    c.blocks = sa_tile_from(band->k_len, keys);
    c.tiles = sa_tile_from(band->q_len, tokens);
    c.blind = first < band->q_len ? sa_tile_of(first, tokens) : c.tiles;
    const int32_t seeing = c.tiles - c.blind;
    const int64_t all_blocks = (int64_t)c.blocks * room->num_heads;
    c.is_long = !room->is_local && c.tiles > room->most_tiles;
    c.rounds = 1;
    if (c.is_long)
        c.rounds = sa_tile_from(seeing, room->round_tiles);
    else if (!room->is_local && all_blocks > 0 && all_blocks < SA_FEW_BLOCKS)
        c.rounds = (int32_t)sa_min(sa_ceil_div(SA_ROUND_BLOCKS, all_blocks), seeing / SA_LEAST_ROUND);
    c.rounds = (int32_t)sa_last(c.rounds, 1);
    c.round_tiles = (int32_t)sa_last(sa_tile_from(seeing, c.rounds), 1);
    c.rounds = (int32_t)sa_last(sa_tile_from(seeing, c.round_tiles), 1);
    c.split = c.rounds > 1 && (c.is_long || !room->merges);
    c.count = (int32_t)((int64_t)room->num_heads * (c.split ? c.rounds : 1));
    c.uses = c.split ? c.round_tiles : seeing;
    c.together = 1;
    if (!room->is_local && !c.is_long && c.uses) {
        const int32_t most = (int32_t)sa_within(room->num_slots / c.uses, 1, c.count);
        c.together = sa_tile_from(c.count, sa_tile_from(c.count, most));
    }
    return c;
}

typedef struct sa_chain_item {
    int32_t head, block, round; /* round: of a split chain, else 0 */
    sa_row_tiles tiles;         /* not the full ones; where there are none, begin and end are 0 */
    int32_t part, num_parts;    /* the first round of the block that the item adds, counted from the later rows, and how many there are */
    int32_t use, step;          /* slot use of the item's last tile, and what is added to it from a tile to the one before */
    int32_t idle_use, idle;     /* uses that no tile has, from the first of them in steps; the item passes them on */
    bool exists;
} sa_chain_item;

/* The number of items, also those that do not exist. */
SA_HD int32_t sa_num_chain_items(const sa_chains *c) { return c->count * c->blocks; }

/* Item n in the order in which they are taken. Chains end together: a chain of earlier rows, whose rows see fewer blocks, begins later. */
SA_HD sa_chain_item sa_chain_item_of(const sa_chains *c, const sa_band *band, sa_position_t tokens, sa_position_t keys,
                                     const sa_chain_room *room, int32_t n) {
    sa_chain_item item;
    const int32_t set = n / (c->together * c->blocks), in_set = n - set * c->together * c->blocks, first_chain = set * c->together,
                  together = (int32_t)sa_first(c->together, c->count - first_chain), wave = in_set / together,
                  nth = in_set - wave * together, chain = first_chain + nth;
    item.head = c->split ? chain / c->rounds : chain;
    item.round = c->split ? c->rounds - 1 - (chain - item.head * c->rounds) : 0;
    const int32_t begin = c->blind + item.round * c->round_tiles,
                  end = c->split ? (int32_t)sa_first(begin + c->round_tiles, c->tiles) : c->tiles;
    int32_t blocks = c->blocks;
    if (end < c->tiles) blocks = sa_tile_from(sa_row_band(band, end * tokens - 1).end, keys);
    item.exists = wave >= c->blocks - blocks;
    item.block = item.exists ? wave - (c->blocks - blocks) : blocks + wave;
    const sa_range of_block = {item.block * keys, sa_first((item.block + 1) * keys, band->k_len)}, rows = sa_keys_rows(band, of_block);
    item.tiles.begin = item.tiles.end = item.part = item.num_parts = 0;
    item.use = item.idle_use = item.idle = 0;
    item.step = room->is_local ? -1 : together;
    const int32_t first_use = first_chain * c->uses + nth;
    if (rows.begin < rows.end) {
        const int32_t first = sa_tile_of(rows.begin, tokens), past = sa_tile_from(rows.end, tokens),
                      last_round = (past - 1 - c->blind) / c->round_tiles;
        item.num_parts = last_round - (first - c->blind) / c->round_tiles + 1;
        item.tiles.begin = (int32_t)sa_last(first, begin);
        item.tiles.end = (int32_t)sa_first(past, end);
        if (c->split) item.part = last_round - item.round;
    }
    if (item.tiles.begin < item.tiles.end)
        item.use = room->is_local ? first_use + item.tiles.end - 1 - c->blind : first_use + (end - item.tiles.end) * together;
    else
        item.tiles.begin = item.tiles.end = 0;
    if (item.block == 0 && item.exists) {
        item.idle = c->uses - (end - begin);
        item.idle_use = first_use + (end - begin) * together;
    }
    if (item.tiles.begin < item.tiles.end) return item;
    /* Without tiles: dK and dV of a block that no row sees are zero, and one item writes them. */
    const bool writes = !item.num_parts && (!c->split || item.round == c->rounds - 1);
    item.num_parts = writes;
    item.part = 0;
    item.exists = item.exists && (writes || item.idle);
    return item;
}

/* Where the round of tiles before `end` begins. */
SA_HD int32_t sa_round_begin(int32_t blind, int32_t round_tiles, int32_t end) {
    return blind + (end - 1 - blind) / round_tiles * round_tiles;
}

#endif
