/* SPDX-License-Identifier: Apache-2.0
 *
 * How many rounds a sequence has in the general backward of sm_90 (chains.h), and what its launch has. Host and device.
 */
#ifndef SA_ROUNDS_H
#define SA_ROUNDS_H

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
    SA_SIDE_ROUNDS = 40,    /* chains of one round: about so many are side by side .. */
    SA_MANY_ITEMS = 6,      /* .. where a multiprocessor has so many items */
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
    int32_t sums;         /* 64 KiB of dK and dV of a block */
    int32_t num_slots;    /* accumulator slots */
    int32_t near_slots;   /* that chains of all rounds take side by side */
    int32_t beside_slots; /* that packed sequences side by side take */
    bool is_local;        /* under a window, whose items' tiles fit the slots */
    int32_t span;         /* under a window: the most tiles that see a block without sink tokens */
    int32_t blocks; /* key blocks that all sequences and kv heads may have, at most SA_MANY_BLOCKS; fewer, where they fill no machine */
} sa_chain_room;

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

/* The numbers of rounds that are tried for a sequence of fewer than SA_FEW_BLOCKS key blocks in all heads, whose slots suffice. */
SA_HD int32_t sa_next_rounds(int32_t rounds) { return rounds + 1 + rounds / 8; }
SA_HD bool sa_may_have_rounds(const sa_chain_room *room, int32_t blocks, int32_t tiles, int32_t rounds) {
    return rounds == 1 || (rounds * blocks <= SA_MOST_ROUNDS && rounds * room->sums <= SA_MOST_OF_BLOCK &&
                                  sa_tile_from(tiles, rounds) >= SA_LEAST_ROUND + room->sums);
}

/* The time that items of so many rounds are expected to take, over all multiprocessors, in sixths of a tile's. An item takes SA_ITEM_ENDS
 * tiles beside its own. The longest items are taken first. Short ones are of blocks of which some rows see nothing, so that they
 * begin or end within a round. The longest of
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
SA_HD int64_t sa_time_of_rounds(const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room, int32_t blocks,
        int32_t tiles, int32_t rounds) {
    const sa_range from = sa_blocks_of(sa_row_band(band, sa_first_seeing_row(band)), keys),
                   to = sa_blocks_of(sa_row_band(band, band->q_len - 1), keys);
    const int32_t heads = room->num_heads, partial = heads * (int32_t)(to.end - from.end + to.begin - from.begin),
                  of_head = (int32_t)(to.end - from.begin), short_tiles = sa_tile_from(keys, tokens), unit = 6 * SA_H200_SMS,
                  seen = heads * (int32_t)sa_mean_blocks(band, keys);
    const bool is_apart = blocks < SA_PARTS_BLOCKS && (int64_t)tiles * seen <= INT64_C(6) * 2 * room->most_tiles;
    const int32_t each = sa_tile_from(tiles, rounds), chain = (int32_t)sa_first(of_head, SA_H200_SMS / heads / rounds);
    int32_t items = rounds * seen + 3 * partial; /* times 6 */
    if (partial && items > unit - unit / 8 && items < unit + unit / 8) items = 6 * heads * sa_count_items(band, tokens, keys, rounds, each);
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
    if (rounds > 1) time += unit + (rounds < SA_APART_ROUNDS ? rounds * unit * 3 / 4 : 0) + 2 * sa_last(items * room->sums - 2 * unit, 0);
    return time;
}

/* The best number so far. More rounds must take less by 1/32: they cost in batches. */
typedef struct sa_best_rounds {
    int32_t rounds;
    int64_t time;
} sa_best_rounds;

SA_HD void sa_try_rounds(sa_best_rounds *best, int32_t rounds, int64_t time) {
    if (rounds == 1 || time + time / 32 < best->time) *best = (sa_best_rounds){rounds, time};
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

/* Rounds of a sequence whose slots suffice: with few blocks the best of those tried; above SA_FEW_BLOCKS two share out what blocks alone
 * do not, three, where all are as long. */
SA_HD bool sa_has_few_blocks(int32_t blocks, int32_t tiles) { return tiles && blocks && blocks < SA_FEW_BLOCKS; }

SA_HD int32_t sa_rounds_of_many(const sa_band *band, sa_position_t keys, int32_t blocks, int32_t tiles) {
    if (!tiles || !blocks || blocks == SA_FEW_BLOCKS) return 1;
    if (sa_is_even(band, keys)) return blocks < SA_EVEN_BLOCKS && tiles >= 3 * SA_SPLIT_ROUND ? 3 : 1;
    return blocks >= SA_MANY_BLOCKS || tiles < 2 * SA_HALF_ROUND ? 1 : tiles < 4 * SA_HALF_ROUND ? 2 : 3;
}

SA_HD int32_t sa_rounds_of(const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room) {
    const int32_t blocks = sa_seen_blocks(band, keys, room), tiles = sa_seeing_tiles(band, tokens);
    if (!sa_has_few_blocks(blocks, tiles)) return sa_rounds_of_many(band, keys, blocks, tiles);
    sa_best_rounds best = {1, INT64_MAX};
    for (int32_t rounds = 1; sa_may_have_rounds(room, blocks, tiles, rounds); rounds = sa_next_rounds(rounds))
        sa_try_rounds(&best, rounds, sa_time_of_rounds(band, tokens, keys, room, blocks, tiles, rounds));
    return best.rounds;
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

#endif
