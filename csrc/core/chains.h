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

#include "split.h"

/* A sequence has rounds where its key blocks, of all kv heads, do not share out evenly: as many as sa_rounds_of finds. Under a window, in
 * a sequence longer than two spans without sink tokens: sa_window_round.
 *
 * And where slots are what lacks: without a window, above room.long_tiles, rounds have at most room.round_tiles; more than SA_SET_ROUNDS
 * are first rounded up to a multiple of it.
 */
enum {
    SA_H200_SMS = 132, /* multiprocessors, for which rounds and decode kernels are chosen */
    SA_FEW_BLOCKS = 256,
    SA_MANY_BLOCKS = 512,
    SA_EVEN_BLOCKS = 1056, /* eight items a multiprocessor */
    SA_LEAST_ROUND = 3,    /* tiles, and one more for each 64 KiB of dK and dV of a block, of which it has at least one */
    SA_HALF_ROUND = 160,
    SA_MOST_ROUNDS = 2048,  /* of all blocks, where these are few */
    SA_MOST_OF_BLOCK = 32,  /* of a block of 64 KiB of dK and dV */
    SA_ITEM_ENDS = 4,       /* what an item takes beside its tiles, in tiles */
    SA_PARTS_BLOCKS = 32,   /* fewer blocks of all kv heads may leave dQ apart, .. */
    SA_MEETING_TILES = 160, /* .. and up to so many tiles of all kv heads whose items, all at work at once, begin together */
    SA_WINDOW_ROUND = 8,    /* least tiles of a round under a window, before rounds are made even; fewer where items are few */
    SA_WINDOW_ENDS = 7,     /* what an item of such rounds takes beside its tiles, in tiles */
    SA_WINDOW_SPANS = 8,    /* longer sequences, in spans, have their heads one after another */
    SA_APART_ROUNDS = 3,
    SA_APART_PLACES = 2048, /* at most, for dK and dV left apart */
    SA_SIDE_CHAINS = 66,    /* of all rounds, side by side at most: two items of each at work, and what they read and add to in the L2 */
    SA_SIDE_SPAN = 5,       /* under a window: chains are side by side from this span on */
    SA_SET_ROUNDS = 4,
    SA_SPLIT_ROUND = 48, /* above SA_FEW_BLOCKS: least tiles of a round that is an item */
    SA_SINK_BLOCKS = 4,  /* under a window: at most so many blocks with sink tokens have rounds */
    SA_SINK_ROUND = 16,  /* tiles of such a round */
    SA_SINK_LEAD = 32    /* tiles by which it comes early */
};

/* What a launch has. */
typedef struct sa_chain_room {
    int32_t num_heads;  /* kv heads */
    int32_t copies;     /* sequences of the same lengths, whose chains are those of one sequence with so many times the heads */
    int32_t most_tiles; /* of a span; of a window's heads side by side */
    int32_t long_tiles; /* without a window, sequences above it have rounds of at most round_tiles */
    int32_t round_tiles;
    int32_t sums;       /* 64 KiB of dK and dV of a block */
    int32_t num_slots;  /* accumulator slots */
    int32_t near_slots; /* that chains of all rounds take side by side */
    bool is_local;      /* under a window, whose items' tiles fit the slots */
    int32_t span;       /* under a window: the most tiles that see a block without sink tokens */
    int32_t blocks;     /* key blocks that all sequences and kv heads may have, at most SA_MANY_BLOCKS; fewer, where they fill no machine */
} sa_chain_room;

typedef struct sa_chains {
    int32_t blocks;              /* key blocks of a head */
    int32_t blind, tiles;        /* row tiles before the first row that sees a key; all row tiles of a head */
    int32_t rounds, round_tiles; /* the last round may be shorter */
    bool is_local;               /* under a window: a chain's slots follow its rows */
    bool is_long;                /* rounds because slots are few: heads one after another */
    bool split;                  /* a chain is a round, not all of them */
    int32_t heads;               /* of all copies */
    int32_t count, together;     /* chains of all heads; worked on side by side */
    int32_t unseen;              /* blocks before the first that a row sees, where these are items beside the chains' */
    int32_t waves, parts;        /* the most blocks of a chain; the most rounds of a block */
    int32_t uses;                /* slot uses of a chain: its tiles, and in a shorter round idle ones */
    int32_t sinks, lead;         /* under a window: blocks with sink tokens, which alone have rounds, and how early they come, in tiles */
} sa_chains;

/* Whether so many key blocks, of all kv heads, fill the machine as they are: SA_FEW_BLOCKS are nearly two for each of 132
 * multiprocessors, and a few more would be three for some. */
SA_HD bool sa_fill_blocks(int32_t blocks) { return blocks == SA_FEW_BLOCKS || blocks >= SA_MANY_BLOCKS; }

/* Key blocks that hold some of a range of keys. */
SA_HD sa_range sa_blocks_of(sa_range seen, sa_position_t keys) {
    return (sa_range){sa_tile_of(seen.begin, keys), sa_tile_from(seen.end, keys)};
}

/* The first row that sees a key and the last row see the same key blocks, sink tokens not counted. */
SA_HD bool sa_is_even(const sa_band *band, sa_position_t keys) {
    const sa_range from = sa_blocks_of(sa_row_band(band, sa_first_seeing_row(band)), keys),
                   to = sa_blocks_of(sa_row_band(band, band->q_len - 1), keys);
    return from.begin == to.begin && from.end == to.end;
}

/* Items of `rounds` rounds of `each` tiles, in one head: key blocks that their rows see. */
SA_HD int32_t sa_count_items(const sa_band *band, sa_position_t tokens, sa_position_t keys, int32_t rounds, int32_t each) {
    const sa_position_t first = sa_tile_of(sa_first_seeing_row(band), tokens);
    int32_t items = 0;
    for (int32_t round = 0; round < rounds; round++) {
        const sa_position_t begin = sa_last((first + (sa_position_t)round * each) * tokens, sa_first_seeing_row(band)),
                            end = sa_first((first + (sa_position_t)(round + 1) * each) * tokens, band->q_len);
        if (begin < end) items += sa_tile_from(sa_row_band(band, end - 1).end, keys) - sa_tile_of(sa_row_band(band, begin).begin, keys);
    }
    return items;
}

/* Key blocks that a row sees in the mean, times 6, by Simpson's rule. */
SA_HD sa_position_t sa_mean_blocks(const sa_band *band, sa_position_t keys) {
    const sa_position_t row = sa_first_seeing_row(band);
    const sa_range first = sa_row_band(band, row), middle = sa_row_band(band, row + (band->q_len - row) / 2),
                   last = sa_row_band(band, band->q_len - 1), from = sa_blocks_of(first, keys), to = sa_blocks_of(last, keys);
    const sa_position_t lengths = first.end - first.begin + 4 * (middle.end - middle.begin) + last.end - last.begin;
    if (from.begin == to.begin && from.end == to.end) return 6 * (to.end - to.begin);
    return sa_tile_from(lengths, keys) + 3 * (to.end > from.end) + 3 * (to.begin > from.begin);
}

/* Rounds of a sequence whose slots suffice, of fewer than SA_FEW_BLOCKS key blocks in all heads: of the numbers tried, the one whose items
 * are expected to take the least time. Time is counted in tiles, and an item takes SA_ITEM_ENDS beside its own. The longest items are
 * taken first. Short ones are of blocks of which some rows see nothing, so that they begin or end within a round. The longest of
 *
 *     the mean of all multiprocessors, and, if some take two items and there are short ones, half of a short one and a quarter of a round
 *     all waves of whole items
 *     the waves before the last, and the two items of the multiprocessor that is the first to take another
 *
 * and then
 *
 *     one for each block that follows another in a chain, two if all items are whole; none where dQ is left apart
 *     one for handing on dK and dV, and three quarters a round if by turns
 *     two for each 64 KiB of dK and dV that a multiprocessor hands on, past the second
 */
SA_HD int32_t sa_rounds_of_few(
        const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room, int32_t blocks, int32_t tiles) {
    const sa_range from = sa_blocks_of(sa_row_band(band, sa_first_seeing_row(band)), keys),
                   to = sa_blocks_of(sa_row_band(band, band->q_len - 1), keys);
    const int32_t heads = room->num_heads, partial = heads * (int32_t)(to.end - from.end + to.begin - from.begin),
                  of_head = (int32_t)(to.end - from.begin), short_tiles = sa_tile_from(keys, tokens), unit = 6 * SA_H200_SMS,
                  seen = heads * (int32_t)sa_mean_blocks(band, keys);
    const bool is_apart = blocks < SA_PARTS_BLOCKS && (int64_t)tiles * seen <= INT64_C(6) * 2 * room->most_tiles;
    int32_t best = 1;
    int64_t least = INT64_MAX; /* a tile's time is `unit`, as items and blocks are counted in sixths, and over all multiprocessors */
    for (int32_t rounds = 1; rounds == 1 || (rounds * blocks <= SA_MOST_ROUNDS && rounds * room->sums <= SA_MOST_OF_BLOCK);
            rounds += 1 + rounds / 8) {
        const int32_t each = sa_tile_from(tiles, rounds), chain = (int32_t)sa_first(of_head, SA_H200_SMS / heads / rounds);
        int32_t items = rounds * seen + 3 * partial; /* times 6 */
        if (rounds > 1 && each < SA_LEAST_ROUND + room->sums) break;
        if (partial && items > unit - unit / 8 && items < unit + unit / 8)
            items = 6 * heads * sa_count_items(band, tokens, keys, rounds, each);
        const bool meets = (int64_t)heads * tiles <= SA_MEETING_TILES && items <= unit && (rounds > 1 || !partial);
        const int32_t follow = is_apart || meets ? 0 : chain;
        const int32_t whole = (int32_t)sa_last(items / 6 - partial, 0), waves = whole / SA_H200_SMS, ahead = (waves + 1) * SA_H200_SMS;
        int64_t time = (int64_t)tiles * seen + (int64_t)SA_ITEM_ENDS * items;
        if (partial && items > unit) time += (int64_t)unit * (sa_first(each, short_tiles) / 2 + SA_ITEM_ENDS + (rounds > 1 ? each / 4 : 0));
        time = sa_max(time, (int64_t)unit * sa_tile_from(sa_last(whole, 1), SA_H200_SMS) * (each + SA_ITEM_ENDS));
        if (partial && items / 6 > ahead) {
            const int32_t second = each - (int32_t)((int64_t)each * sa_first(ahead - whole, partial) / partial);
            time = sa_max(time, unit * ((int64_t)waves * (each + SA_ITEM_ENDS) + INT64_C(2) * (second + SA_ITEM_ENDS)));
        }
        time += (int64_t)unit * follow * (partial ? 1 : 2);
        if (rounds > 1)
            time += unit + (rounds < SA_APART_ROUNDS ? rounds * unit * 3 / 4 : 0) + 2 * sa_last(items * room->sums - 2 * unit, 0);
        if (rounds > 1 && time + time / 32 >= least) continue; /* more rounds cost in batches */
        least = time;
        best = rounds;
    }
    return best;
}

/* Row tiles that see a key. */
SA_HD int32_t sa_seeing_tiles(const sa_band *band, sa_position_t tokens) {
    const sa_position_t first = sa_first_seeing_row(band);
    return first < band->q_len ? sa_tile_from(band->q_len, tokens) - sa_tile_of(first, tokens) : 0;
}

/* Key blocks before the first that a row sees, under a window without sink tokens. */
SA_HD int32_t sa_unseen_blocks(const sa_band *band, sa_position_t keys, const sa_chain_room *room) {
    const sa_position_t first = sa_first_seeing_row(band);
    return room->is_local && !band->num_sink && first < band->q_len ? sa_tile_of(sa_row_band(band, first).begin, keys) : 0;
}

/* Key blocks of all heads that rows see, at most SA_EVEN_BLOCKS. */
SA_HD int32_t sa_seen_blocks(const sa_band *band, sa_position_t keys, const sa_chain_room *room) {
    const int64_t of_head = sa_tile_from(band->k_len, keys) - sa_unseen_blocks(band, keys, room);
    return (int32_t)sa_min(of_head * room->num_heads, SA_EVEN_BLOCKS);
}

/* Rounds of a sequence whose slots suffice. Above SA_FEW_BLOCKS two share out what blocks alone do not; three, where all are as long. */
SA_HD int32_t sa_rounds_of(const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room) {
    const int32_t blocks = sa_seen_blocks(band, keys, room), tiles = sa_seeing_tiles(band, tokens);
    if (!tiles || !blocks || blocks == SA_FEW_BLOCKS) return 1;
    if (blocks < SA_FEW_BLOCKS) return sa_rounds_of_few(band, tokens, keys, room, blocks, tiles);
    if (sa_is_even(band, keys)) return blocks < SA_EVEN_BLOCKS && tiles >= 3 * SA_SPLIT_ROUND ? 3 : 1;
    return blocks >= SA_MANY_BLOCKS || tiles < 2 * SA_HALF_ROUND ? 1 : tiles < 4 * SA_HALF_ROUND ? 2 : 3;
}

/* Tiles of a round under a window, of `blocks` key blocks in all heads that `seeing` row tiles see: those that each of SA_H200_SMS
 * multiprocessors gets, or half as many, where such rounds are expected to take less time than whole blocks. For whole blocks `seeing`, if
 * heads are side by side, or 0, if one comes after another. Time is counted in tiles, over all multiprocessors: all tiles, SA_WINDOW_ENDS
 * an item and a quarter of the longest item, but no less than the waves of whole blocks, or the longest item. `ramp` blocks are seen by the
 * last rows, by half a span in the mean, and fill the last wave; a tile sees so many. */
SA_HD int32_t sa_window_round(const sa_chain_room *room, int32_t blocks, int32_t seeing, sa_position_t tokens, sa_position_t keys) {
    const int64_t span = room->span, sms = SA_H200_SMS, ramp = room->num_heads * (span * tokens / keys),
                  tiles = sa_min(blocks * span - ramp * span / 2, ramp * seeing), waves = sa_ceil_div(sa_last(blocks - ramp / 2, 1), sms);
    /* The shortest rounds whose items the multiprocessors take all at once. */
    const int64_t short_round = sa_ceil_div(blocks * (span - 1), sa_last(sms - blocks, 1)),
                  shortest = sa_within(short_round, SA_LEAST_ROUND + room->sums, SA_WINDOW_ROUND);
    int32_t best = seeing <= sa_min(SA_WINDOW_SPANS * span, room->most_tiles) ? seeing : 0;
    int64_t least = sa_max(waves * sms * (span + SA_WINDOW_ENDS - 2), tiles + (int64_t)SA_WINDOW_ENDS * blocks + sms * span / 4);
    for (int32_t part = 1; part <= 2 && blocks < SA_MANY_BLOCKS; part++) {
        const int64_t each = sa_within(sa_ceil_div(blocks * span, part * sms), shortest, room->round_tiles);
        const int32_t round = sa_tile_from(seeing, sa_tile_from(seeing, (sa_position_t)each));
        const int64_t items = blocks + blocks * (span - 1) / round, longest = sa_min(round, span),
                      time = sa_max(sms * (longest + SA_WINDOW_ENDS - 2), tiles + SA_WINDOW_ENDS * items + sms * longest / 4);
        if (round == seeing || time >= least) continue;
        least = time;
        best = round;
    }
    return best;
}

/* The largest divisor of count up to most, which is at least 1. */
SA_HD int32_t sa_largest_divisor(int32_t count, int32_t most) {
    while (count % most) most--;
    return most;
}

/* tokens: of a row tile; keys: of a block; rounds: sa_rounds_of, which takes a GPU's thread microseconds. */
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
    item->head = c->split ? chain / c->rounds : chain;
    item->round = c->split ? c->rounds - 1 - (chain - item->head * c->rounds) : 0;
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
