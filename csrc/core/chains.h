/* SPDX-License-Identifier: Apache-2.0
 *
 * How the general backward of sm_90 cuts a sequence into items, and in which order blocks take them. Host and device.
 *
 * An item is a key block of a kv head, and the row tiles of a chain that see some of it. A chain is a range of row tiles of a kv head: its
 * items add to the sums of the same dQ, one after another, key blocks ascending. Chains are worked on `together`, side by side, so that an
 * item rarely waits for the item before it in its chain.
 *
 * dK and dV of a block are summed over the tiles of a round, then over rounds, later rows first. Rounds depend on the sequence, the heads
 * and the mask alone, so a sequence has the same bits in every batch. Where items or slots are few, a chain is a round; else it is all
 * rounds, and the item adds them.
 *
 * Under a window, in a sequence longer than two spans, a chain is all rows of a kv head, and its slots follow its rows, unless it is short
 * or blocks are so few that rounds are items (sa_window_round). Key blocks with positional sink tokens are seen by all rows, so they alone
 * have rounds there, an item each, earlier rows first:
 *
 *     round 0, round 1 | block 1 | round 2 | block 2 | block 3 | round 3 | ...
 *
 * A round comes `lead` tiles before the first block that sees one of its tiles, so that its sums are there when that block needs them.
 */
#ifndef SA_CHAINS_H
#define SA_CHAINS_H

#include "rounds.h"

typedef struct sa_chains {
    int32_t blocks;              /* key blocks of a head */
    int32_t blind, tiles;        /* row tiles before the first row that sees a key; all row tiles of a head */
    int32_t rounds, round_tiles; /* the last round may be shorter */
    bool is_local;               /* under a window: a chain's slots follow its rows */
    bool is_long;                /* rounds because slots are few: heads one after another */
    bool split;                  /* a chain is a round, not all of them; .. */
    bool by_head;                /* .. those of a head side by side, not those of a round */
    int32_t heads;               /* of all copies */
    int32_t count, together;     /* chains of all heads; worked on side by side */
    int32_t unseen;              /* blocks before the first that a row sees, where these are items beside the chains' */
    int32_t waves, parts;        /* the most blocks of a chain; the most rounds of a block */
    int32_t uses;                /* slot uses of a chain: its tiles, and in a shorter round idle ones */
    int32_t sinks, lead;         /* under a window: blocks with sink tokens, which alone have rounds, and how early they come, in tiles */
} sa_chains;

/* The largest divisor of count up to most, which is at least 1. */
SA_HD int32_t sa_largest_divisor(int32_t count, int32_t most) {
    while (count % most) most--;
    return most;
}

/* tokens: of a row tile; keys: of a block; rounds: sa_rounds_of. */
SA_HD sa_chains sa_chains_of(const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room, int32_t rounds) {
    sa_chains c;
    const int32_t seeing = sa_seeing_tiles(band, tokens), all_blocks = sa_seen_blocks(band, keys, room);
    c.blocks = sa_tile_from(band->k_len, keys);
    c.tiles = sa_tile_from(band->q_len, tokens);
    c.blind = c.tiles - seeing;
    const bool has_span = room->is_local && !band->num_sink && seeing > 0;
    const bool is_window = room->is_local && seeing > sa_min(INT64_C(2) * room->span, room->most_tiles),
               may_have_rounds = is_window && !band->num_sink && seeing > 2 * SA_LEAST_ROUND;
    const int32_t window_round = may_have_rounds ? sa_window_round(room, all_blocks, seeing, tokens, keys) : 0;
    c.sinks = is_window ? (int32_t)sa_first(sa_tile_from(band->num_sink, keys), c.blocks) : 0;
    c.lead = 0;
    c.rounds = 1;
    if (c.sinks)
        c.rounds = sa_tile_from(seeing, SA_SINK_ROUND);
    else if (window_round)
        c.rounds = sa_tile_from(seeing, window_round);
    else if (!is_window)
        c.rounds = rounds;
    c.is_long = !room->is_local && c.tiles > room->long_tiles;
    if (c.is_long) {
        c.rounds = (int32_t)sa_last(c.rounds, sa_tile_from(seeing, room->round_tiles));
        if (c.rounds > SA_SET_ROUNDS) c.rounds = sa_tile_from(c.rounds, SA_SET_ROUNDS) * SA_SET_ROUNDS;
    }
    c.rounds = (int32_t)sa_last(c.rounds, 1);
    c.round_tiles = c.sinks ? SA_SINK_ROUND : (int32_t)sa_last(sa_tile_from(seeing, c.rounds), 1);
    c.rounds = (int32_t)sa_last(sa_tile_from(seeing, c.round_tiles), 1);
    const bool merges = sa_fill_blocks(room->blocks) || (room->blocks > SA_FEW_BLOCKS && c.round_tiles < SA_SPLIT_ROUND);
    c.split = !c.sinks && c.rounds > 1 && (c.is_long || !merges);
    c.is_local = is_window && !c.split && window_round < seeing;
    c.by_head = c.is_long || room->is_local;
    c.heads = room->num_heads * room->copies;
    c.count = (int32_t)((int64_t)c.heads * (c.split ? c.rounds : 1));
    c.uses = c.split ? c.round_tiles : seeing;
    c.parts = c.rounds;
    c.unseen = 0;
    c.waves = c.blocks;
    if (has_span && c.split) {
        c.parts = (int32_t)sa_first(c.parts, (room->span - 2) / c.round_tiles + 2);
        c.unseen = sa_unseen_blocks(band, keys, room);
        c.waves = (int32_t)sa_first(c.blocks - c.unseen, (c.uses + room->span) * tokens / keys + 1);
    }
    c.together = 1;
    if (c.is_long && c.uses) {
        /* Of one head, whose items come before those of the next: dK and dV of both take the same places. */
        c.together = sa_largest_divisor(
                c.rounds, (int32_t)sa_within(sa_first(room->num_slots, INT64_C(2) * room->most_tiles) / c.uses, 1, c.rounds));
    } else if (c.uses) {
        const bool is_near = !c.split && !c.is_local;
        const int32_t side = is_near ? (int32_t)sa_first(c.count, SA_SIDE_CHAINS) : c.count,
                      slots = is_near ? (int32_t)sa_first(room->num_slots, room->near_slots) : room->num_slots;
        int32_t most = slots / c.uses;
        /* Under a window blocks of a chain seldom wait for each other, unless a tile has as many tokens as a block has keys and `span` is
         * large. Chains side by side take slots for the tiles of the blocks at work, and for two spans each. */
        if (c.is_local)
            most = tokens < keys || room->span < SA_SIDE_SPAN ? 1 : (int32_t)sa_last(most, (slots - SA_H200_SMS) / (2 * room->span));
        most = (int32_t)sa_within(most, 1, side);
        c.together = sa_tile_from(c.count, sa_tile_from(c.count, most));
        /* Sets of one size, of more than half of `most`: a smaller last one has too few items for the machine. */
        const int32_t even = c.split ? 0 : sa_largest_divisor(c.count, most);
        if (2 * even > most) c.together = even;
        /* Of many items a few rounds of all heads: those of a block rarely wait for each other's dK and dV, and dQ stays in the L2. */
        if (c.split && !c.by_head && (int64_t)c.count * sa_mean_blocks(band, keys) >= INT64_C(6) * SA_MANY_ITEMS * SA_H200_SMS) {
            const int32_t side_rounds = sa_tile_from(SA_SIDE_ROUNDS, c.heads);
            c.together =
                    (int32_t)sa_first(c.together, (sa_position_t)c.heads * sa_tile_from(c.rounds, sa_tile_from(c.rounds, side_rounds)));
        }
    }
    if (c.sinks) {
        /* A round needs slots whose last tiles no later block sees: those of `span` tiles before it and of `lead` are taken. Chains are as
         * many as leave each room for two spans more, lest items wait for slots. */
        const int32_t least = SA_SINK_ROUND + room->span, most = room->num_slots / (least + 2 * room->span + SA_SINK_LEAD);
        c.together = sa_largest_divisor(c.count, (int32_t)sa_within(most, 1, c.count));
        c.lead = (int32_t)sa_within(room->num_slots / c.together - least, 0, SA_SINK_LEAD);
    }
    return c;
}

typedef struct sa_chain_item {
    int32_t head, block, round; /* head: counted over copies; round: of a split chain, or of a block with sink tokens, else 0 */
    int32_t nth;                /* number of the item in its head */
    int32_t round_tiles;        /* of the item's rounds, from the first row that sees a key */
    sa_row_tiles tiles;         /* not the full ones; where there are none, begin and end are 0 */
    int32_t part, num_parts;    /* the first round of the block that the item adds, in the order of sums, and how many there are */
    int32_t use, step;          /* slot use of the item's last tile, and what is added to it from a tile to the one before */
    int32_t idle_use, idle;     /* uses that no tile has, from the first of them in steps; the item passes them on */
    bool exists;
} sa_chain_item;

/* The number of items, also those that do not exist. */
SA_HD int64_t sa_num_chain_items(const sa_chains *c) {
    return (int64_t)c->count * (c->sinks * c->rounds + c->waves - c->sinks) + (int64_t)c->heads * c->unseen;
}

/* Packed sequences that follow each other may have their chains side by side: if their waves, rounded up, are as many, and if the slot uses
 * up to the end of each give the same number, which says that there are slots for all. A wave then takes a block of each chain, the longest
 * items first, and a sequence of fewer waves begins later. */
SA_HD int32_t sa_waves_beside(const sa_chains *c) {
    int32_t step = 1;
    while (8 * step <= c->waves) step *= 2;
    return sa_tile_from(c->waves, step) * step;
}
SA_HD int32_t sa_slots_beside(const sa_chain_room *room) { return (int32_t)sa_last(sa_first(room->num_slots, room->beside_slots), 2); }
SA_HD bool sa_may_be_beside(const sa_chains *c, const sa_chain_room *room) {
    return c->uses && !c->is_local && !c->is_long && !c->sinks && !c->unseen && c->together == c->count &&
           (int64_t)c->count * c->uses <= sa_slots_beside(room) / 2;
}
SA_HD int32_t sa_number_beside(const sa_chain_room *room, int64_t end) {
    const int32_t slots = sa_slots_beside(room);
    return end <= slots ? 0 : (int32_t)sa_min(1 + end / (slots / 2), INT32_MAX);
}

/* The item of a chain in a wave of all neighbours; -1 before the first. */
SA_HD int32_t sa_item_beside(const sa_chains *c, int32_t waves, int32_t wave, int32_t chain) {
    const int32_t own = wave - (waves - c->waves);
    return own < 0 ? -1 : own * c->count + chain;
}

/* Blocks of a head whose dK and dV items hand on. */
SA_HD int32_t sa_num_carries(const sa_chains *c) { return c->split ? c->blocks : c->rounds > 1 ? c->sinks : 0; }

/* How many rounds of a set come before block x. Blocks without sink tokens and rounds are counted over all sets. */
SA_HD int32_t sa_rounds_before(const sa_chains *c, const sa_band *band, sa_position_t tokens, sa_position_t keys, int32_t x) {
    const int32_t seeing = c->tiles - c->blind, sets = c->count / c->together, set = x / (c->blocks - c->sinks),
                  block = c->sinks + x - set * (c->blocks - c->sinks);
    const sa_range of_block = {block * keys, sa_first((block + 1) * keys, band->k_len)};
    const int32_t end = (int32_t)sa_last(sa_tile_from(sa_keys_rows(band, of_block).end, tokens) - c->blind, 0);
    if (!seeing) return sets * c->rounds;
    const int32_t before = set * seeing + end + c->lead, whole = before / seeing;
    return whole >= sets ? sets * c->rounds : whole * c->rounds + sa_tile_from(before - whole * seeing, c->round_tiles);
}

/* Where an item stands: the number of its set of chains, of its chain in the set, and how many chains the set has. */
typedef struct sa_chain_place {
    int32_t set, nth, together;
    bool is_first; /* of its chain */
} sa_chain_place;

/* The row tiles of a round, or of all. */
SA_HD sa_range sa_tiles_of_round(const sa_chains *c, int32_t round, bool is_round) {
    sa_range tiles;
    tiles.begin = is_round ? c->blind + round * c->round_tiles : c->blind;
    tiles.end = is_round ? sa_first(tiles.begin + c->round_tiles, c->tiles) : c->tiles;
    return tiles;
}

/* Whether items leave dK and dV apart, if there is room. Items of fewer rounds rarely wait for a turn. */
SA_HD bool sa_is_apart(const sa_chains *c) { return c->split && !c->is_long && c->rounds >= SA_APART_ROUNDS; }

/* How many places items need that leave dK and dV apart, and the place of one; earlier: how many of its block's rounds come before its
 * rows. */
SA_HD int64_t sa_num_places(const sa_chains *c) { return (int64_t)c->parts * c->blocks * c->heads; }
SA_HD int32_t sa_place_of(const sa_chains *c, int32_t head, int32_t earlier, int32_t block) {
    return (earlier * c->blocks + block) * c->heads + head;
}

/* Places item n where a window has sink tokens. */
SA_HD sa_chain_place sa_place_beside_sinks(
        const sa_chains *c, const sa_band *band, sa_position_t tokens, sa_position_t keys, int32_t n, sa_chain_item *item) {
    const int32_t row = n / c->together, plain = c->blocks - c->sinks, all = c->count / c->together * plain;
    int32_t low = 0, high = all; /* the first block without sink tokens that is item n or comes after it */
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (middle + c->sinks * sa_rounds_before(c, band, tokens, keys, middle) < row)
            low = middle + 1;
        else
            high = middle;
    }
    const bool is_plain = low < all && low + c->sinks * sa_rounds_before(c, band, tokens, keys, low) == row;
    const int32_t x = is_plain ? low : row - low, each = is_plain ? plain : c->sinks * c->rounds, set = x / each, in_set = x - set * each;
    const sa_chain_place place = {set, n - row * c->together, c->together, false};
    item->head = set * c->together + place.nth;
    item->round = is_plain ? 0 : in_set / c->sinks;
    item->block = is_plain ? c->sinks + in_set : in_set - item->round * c->sinks;
    item->nth = is_plain ? c->sinks * c->rounds + in_set : in_set;
    item->exists = true;
    return place;
}

/* Places an item behind the chains': a block that no row sees. */
SA_HD sa_chain_place sa_place_unseen(const sa_chains *c, int32_t n, sa_chain_item *item) {
    const int32_t x = n - c->count * c->waves;
    item->head = x / c->unseen;
    item->block = x - item->head * c->unseen;
    item->round = c->rounds - 1;
    item->nth = c->rounds * c->waves + item->block;
    item->exists = true;
    return (sa_chain_place){0, 0, 1, false};
}

/* Places item n elsewhere. Chains end together: a chain of earlier rows, whose rows see fewer blocks, begins later. */
SA_HD sa_chain_place sa_place_in_set(
        const sa_chains *c, const sa_band *band, sa_position_t tokens, sa_position_t keys, int32_t n, sa_chain_item *item) {
    const int32_t set = n / (c->together * c->waves), in_set = n - set * c->together * c->waves, first = set * c->together,
                  together = (int32_t)sa_first(c->together, c->count - first), wave = in_set / together;
    sa_chain_place place = {set, in_set - wave * together, together, false};
    const int32_t chain = first + place.nth;
    item->head = !c->split ? chain : c->by_head ? chain / c->rounds : chain % c->heads;
    item->round = !c->split ? 0 : c->rounds - 1 - (c->by_head ? chain - item->head * c->rounds : chain / c->heads);
    const sa_position_t end = sa_tiles_of_round(c, item->round, c->split).end * tokens;
    const int32_t blocks = c->split && item->round < c->rounds - 1 ? sa_tile_from(sa_row_band(band, end - 1).end, keys) : c->blocks;
    const int32_t late = c->waves - blocks; /* waves before the chain's first block, or blocks that see nothing of it */
    item->exists = wave >= late;
    item->block = item->exists ? wave - late : blocks + wave;
    item->nth = item->round * c->waves + wave;
    place.is_first = wave == sa_last(late, 0);
    return place;
}

/* The rounds, of so many tiles, of rows that see a key; for none an empty range. */
SA_HD sa_range sa_rounds_seeing(const sa_chains *c, sa_range rows, sa_position_t tokens, int32_t round_tiles) {
    sa_range rounds = {0, 0};
    if (rows.begin >= rows.end) return rounds;
    rounds.begin = (sa_tile_of(rows.begin, tokens) - c->blind) / round_tiles;
    rounds.end = (sa_tile_from(rows.end, tokens) - 1 - c->blind) / round_tiles + 1;
    return rounds;
}

/* Item n in the order in which they are taken. */
SA_HD sa_chain_item sa_chain_item_of(const sa_chains *c, const sa_band *band, sa_position_t tokens, sa_position_t keys, int32_t n) {
    sa_chain_item item;
    const sa_chain_place place = c->sinks                   ? sa_place_beside_sinks(c, band, tokens, keys, n, &item)
                                 : n >= c->count * c->waves ? sa_place_unseen(c, n, &item)
                                                            : sa_place_in_set(c, band, tokens, keys, n, &item);
    const bool is_sink = item.block < c->sinks, is_round = c->split || is_sink;
    const sa_range of_block = {item.block * keys, sa_first((item.block + 1) * keys, band->k_len)}, rows = sa_keys_rows(band, of_block),
                   of_round = sa_tiles_of_round(c, item.round, is_round);
    const int32_t begin = (int32_t)of_round.begin, end = (int32_t)of_round.end, first_use = place.set * c->together * c->uses + place.nth;
    item.round_tiles = c->sinks && !is_sink ? (int32_t)sa_last(c->tiles, 1) : c->round_tiles;
    item.tiles.begin = item.tiles.end = item.part = item.num_parts = 0;
    item.use = item.idle_use = item.idle = 0;
    item.step = c->is_local ? -place.together : place.together;
    if (rows.begin < rows.end) {
        const sa_range rounds = sa_rounds_seeing(c, rows, tokens, item.round_tiles);
        item.num_parts = (int32_t)(rounds.end - rounds.begin);
        item.tiles.begin = (int32_t)sa_last(sa_tile_of(rows.begin, tokens), begin);
        item.tiles.end = (int32_t)sa_first(sa_tile_from(rows.end, tokens), end);
        if (is_round) item.part = (int32_t)(is_sink ? item.round - rounds.begin : rounds.end - 1 - item.round);
    }
    if (item.tiles.begin < item.tiles.end)
        item.use = first_use + (c->is_local ? item.tiles.end - 1 - c->blind : end - item.tiles.end) * place.together;
    else
        item.tiles.begin = item.tiles.end = 0;
    if (place.is_first) {
        item.idle = c->uses - (end - begin);
        item.idle_use = first_use + (end - begin) * place.together;
    }
    if (item.tiles.begin < item.tiles.end) return item;
    /* Without tiles: dK and dV of a block that no row sees are zero, and one item writes them. */
    const bool writes = !item.num_parts && (!is_round || item.round == c->rounds - 1);
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
