/* SPDX-License-Identifier: Apache-2.0
 *
 * core/chains.h: items of random sequences, walked through in the order in which blocks take them.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/workspace.h"
#include "sample.h"

enum { kKeys = 128, kWorkers = 132 };

static const sinkattn_device device = {.backend = SINKATTN_CUDA, .arch = 90, .workers = kWorkers};

typedef struct sequence {
    sa_band band;
    int32_t tokens;
    sa_chain_room room;
    sa_chains chains;
} sequence;

static sa_chains chains_of(const sa_band *band, sa_position_t tokens, sa_position_t keys, const sa_chain_room *room) {
    return sa_chains_of(band, tokens, keys, room, sa_rounds_of(band, tokens, keys, room));
}

static sequence pick_sequence(void) {
    sequence s;
    const int64_t k_len = pick(0, one_in(3) ? 400 : 3000), q_len = one_in(2) ? k_len : pick(0, one_in(4) ? 4000 : 1200);
    sinkattn_mask mask = {.has_right = one_in(2), .right = one_in(4) ? pick(1, 100) : 0};
    const bool has_window = mask.has_right && one_in(2);
    if (has_window) mask.has_left = true, mask.left = pick(0, one_in(2) ? 300 : 2000);
    if (one_in(2)) mask.num_sink_tokens = pick(1, one_in(2) ? 20 : SA_SINK_BLOCKS * kKeys);
    s.band = sa_band_of(&mask, q_len, k_len);
    s.tokens = one_in(3) ? 9 : 1 << pick(0, 4);
    s.room.num_heads = (int32_t)pick(1, 9);
    s.room.copies = one_in(2) ? 1 : (int32_t)pick(1, 4);
    s.room.most_tiles = one_in(2) ? 1152 : 150, s.room.long_tiles = (int32_t)pick(1, 2) * s.room.most_tiles;
    s.room.round_tiles = s.room.most_tiles == 150 ? 80 : 608;
    s.room.sums = one_in(2) ? 1 : 2;
    s.room.num_slots = 2 * s.room.most_tiles + (one_in(2) ? 0 : (int32_t)pick(0, 4000));
    s.room.near_slots = (int32_t)pick(0, s.room.num_slots);
    s.room.span = (int32_t)sa_ceil_div(kKeys + mask.left + mask.right, s.tokens) + 1;
    s.room.is_local = has_window;
    s.room.blocks = (int32_t)pick(0, SA_MANY_BLOCKS);
    if (s.room.is_local) {
        s.room.most_tiles = s.room.span + SA_SINK_ROUND + (one_in(2) ? 0 : (int32_t)pick(0, 1000));
        s.room.num_slots = s.room.most_tiles + (one_in(2) ? 0 : (int32_t)pick(0, 1000));
    }
    if (has_window && one_in(2)) { /* single heads, whose chains are side by side */
        mask.num_sink_tokens = 0, mask.left = pick(400, 700), s.tokens = kKeys;
        s.band = sa_band_of(&mask, pick(9000, 12000), 12000);
        s.room.span = (int32_t)sa_ceil_div(kKeys + mask.left + mask.right, kKeys) + 1, s.room.num_heads = (int32_t)pick(6, 9);
        s.room.most_tiles = s.room.num_slots = SA_H200_SMS + (int32_t)pick(0, 200);
    } else if (has_window && one_in(2)) { /* few blocks, which have rounds */
        mask.num_sink_tokens = 0;
        s.band = sa_band_of(&mask, q_len, k_len);
        s.room.num_heads = (int32_t)pick(1, 2);
        s.room.most_tiles = 4000;
        s.room.num_slots = one_in(2) ? 4000 : (int32_t)sa_ceil_div(q_len, s.tokens) + SA_SINK_ROUND + (int32_t)pick(0, 1000);
    }
    s.chains = chains_of(&s.band, s.tokens, kKeys, &s.room);
    return s;
}

/* A sequence of the problem. */
static sequence sequence_of(const sinkattn_problem *p, const sinkattn_plan *plan, const sa_chain_room *room, int64_t q_len, int64_t k_len) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    sequence s = {.band = sa_band_of(&p->mask, q_len, k_len), .room = *room};
    s.tokens = (int32_t)(info->tile_q / sa_bwd_sm90_slice_heads(p, info->tile_q));
    s.chains = chains_of(&s.band, s.tokens, (sa_position_t)info->tile_k, room);
    return s;
}

static sa_chain_item item_of(const sequence *s, int32_t n) { return sa_chain_item_of(&s->chains, &s->band, s->tokens, kKeys, n); }

#define CHECK_ITEM(ok, s, n) \
    CHECK(ok, "%s: item %d, %d tokens a tile, %d heads, q_len %" PRId64 ", k_len %" PRId64 ", rounds %d, together %d", #ok, (int)(n), \
            (int)(s)->tokens, (int)(s)->room.num_heads, (int64_t)(s)->band.q_len, (int64_t)(s)->band.k_len, (int)(s)->chains.rounds, \
            (int)(s)->chains.together)

/* Key blocks that see some of a row tile, below `block`. */
static int32_t blocks_before(const sequence *s, int32_t tile, int32_t block) {
    int32_t count = 0;
    const sa_range rows = {tile * s->tokens, sa_first((tile + 1) * s->tokens, s->band.q_len)};
    sa_position_t sink_end;
    const sa_range keys = sa_rows_band(&s->band, rows, &sink_end);
    for (int32_t b = 0; b < block; b++)
        count += b * kKeys < sink_end || (keys.begin < keys.end && (b + 1) * kKeys > keys.begin && b * kKeys < keys.end);
    return count;
}

/* Each row tile meets the key blocks that it sees in ascending order, takes one slot use, and no use waits for an item behind its own. */
static void test_chains_meet_all_tiles_in_order(void) {
    for (int i = 0; i < 400; i++) {
        const sequence s = pick_sequence();
        const int32_t heads = s.chains.heads, tiles = s.chains.tiles, uses = s.chains.count * s.chains.uses, num_slots = s.room.num_slots;
        int32_t *met = calloc((size_t)heads * (size_t)tiles + 1, sizeof *met),
                *use_of = calloc((size_t)heads * (size_t)tiles + 1, sizeof *use_of), *first = calloc((size_t)uses + 1, sizeof *first),
                *last = calloc((size_t)uses + 1, sizeof *last);
        for (int32_t n = 0; n < sa_num_chain_items(&s.chains); n++) {
            const sa_chain_item item = item_of(&s, n);
            CHECK_ITEM(item.exists || item.tiles.begin == item.tiles.end, &s, n);
            int32_t use = item.use;
            for (int32_t t = item.tiles.end - 1; t >= item.tiles.begin; t--, use += item.step) {
                int32_t *of_tile = &use_of[item.head * tiles + t];
                if (!CHECK_ITEM(use >= 0 && use < uses, &s, n)) continue;
                if (!*of_tile) *of_tile = use + 1;
                CHECK_ITEM(*of_tile == use + 1, &s, n);
                CHECK_ITEM(met[item.head * tiles + t]++ == blocks_before(&s, t, item.block), &s, n);
                if (!first[use]) first[use] = n + 1;
                last[use] = n + 1;
            }
            use = item.idle_use;
            for (int32_t x = 0; x < item.idle && item.exists; x++, use += item.step)
                if (CHECK_ITEM(use >= 0 && use < uses && !first[use], &s, n)) first[use] = last[use] = n + 1;
        }
        for (int32_t use = 0; use < uses; use++)
            CHECK_ITEM(first[use] && (use < num_slots || last[use - num_slots] < first[use] + !s.chains.is_local), &s, first[use] - 1);
        for (int32_t t = s.chains.blind; t < tiles * (s.chains.blocks > 0); t++)
            for (int32_t head = 0; head < heads; head++) CHECK_ITEM(met[head * tiles + t] == blocks_before(&s, t, s.chains.blocks), &s, -1);
        free(met);
        free(use_of);
        free(first);
        free(last);
    }
}

/* The rounds of a block are added one after another by items that come in this order; then dK and dV are written once, of each head after
 * the head before, as slices add to one another. Heads of a long sequence share places, so a head's first round comes after that too. */
static void test_rounds_of_a_block_are_added_in_order(void) {
    for (int i = 0; i < 400; i++) {
        const sequence s = pick_sequence();
        const int32_t all = s.chains.heads * s.chains.blocks;
        int32_t *added = calloc((size_t)all + 1, sizeof *added), *written = calloc((size_t)all + 1, sizeof *written);
        for (int32_t n = 0; n < sa_num_chain_items(&s.chains); n++) {
            const sa_chain_item item = item_of(&s, n);
            if (!item.exists || !item.num_parts) continue;
            const int32_t block = item.head * s.chains.blocks + item.block;
            int32_t part = item.part, begin = item.tiles.end;
            while (begin > item.tiles.begin) {
                const int32_t end = begin;
                begin = sa_round_begin(s.chains.blind, item.round_tiles, end);
                if (begin < item.tiles.begin) begin = item.tiles.begin;
                CHECK_ITEM(added[block]++ == part++, &s, n);
                if (s.chains.is_long && item.head) CHECK_ITEM(written[block - s.chains.blocks], &s, n);
                if (s.chains.split) CHECK_ITEM(begin == item.tiles.begin, &s, n);
            }
            if (part != item.num_parts && item.tiles.begin < item.tiles.end) continue;
            written[block]++;
            CHECK_ITEM(item.head == 0 || written[block - s.chains.blocks], &s, n);
        }
        for (int32_t block = 0; block < all; block++) CHECK_ITEM(written[block] == 1, &s, block);
        free(added);
        free(written);
    }
}

/* What dK and dV are summed over depends on the sequence alone: not on whether items are whole blocks, nor on slots. */
static void test_rounds_do_not_depend_on_the_batch(void) {
    for (int i = 0; i < 400; i++) {
        const sequence s = pick_sequence();
        sa_chain_room other = s.room;
        other.blocks = (int32_t)pick(0, SA_MANY_BLOCKS);
        other.num_slots += (int32_t)pick(0, 1000);
        other.near_slots = (int32_t)pick(0, other.num_slots);
        other.copies = (int32_t)pick(1, 5);
        const sa_chains chains = chains_of(&s.band, s.tokens, kKeys, &other);
        CHECK_ITEM(
                chains.rounds == s.chains.rounds && chains.round_tiles == s.chains.round_tiles && chains.blind == s.chains.blind, &s, -1);
    }
}

/* Every item has a place of its own among those of its head. */
static void test_items_of_a_head_have_numbers(void) {
    for (int i = 0; i < 400; i++) {
        const sequence s = pick_sequence();
        const int32_t all = (int32_t)sa_num_chain_items(&s.chains), each = all / s.chains.heads;
        char *taken = calloc((size_t)all + 1, 1);
        for (int32_t n = 0; n < all; n++) {
            const sa_chain_item item = item_of(&s, n);
            if (CHECK_ITEM(item.head >= 0 && item.head < s.chains.heads && item.nth >= 0 && item.nth < each, &s, n))
                CHECK_ITEM(!taken[item.head * each + item.nth]++, &s, n);
        }
        if (s.chains.is_local) CHECK_ITEM(each <= s.chains.blocks + s.chains.sinks * (s.chains.tiles / SA_SINK_ROUND), &s, each);
        free(taken);
    }
}

/* Under a window, an item with sink tokens is a round, which comes before the rows that need it, and not long before. */
static void test_blocks_with_sink_tokens_have_rounds(void) {
    const sinkattn_mask mask = {.has_left = true, .has_right = true, .left = 127, .num_sink_tokens = 4};
    const sequence s = {.band = sa_band_of(&mask, 16384, 16384),
            .tokens = 16,
            .room = {.num_heads = 8, .copies = 1, .num_slots = 1152, .is_local = true, .blocks = SA_MANY_BLOCKS, .span = 17}};
    const sa_chains chains = chains_of(&s.band, s.tokens, kKeys, &s.room);
    CHECK(chains.rounds == 64 && chains.together == 8 && chains.lead == SA_SINK_LEAD, "%d rounds, %d together", (int)chains.rounds,
            (int)chains.together);
    int32_t seen_to = 16; /* of block 0 alone */
    for (int32_t n = 0; n < sa_num_chain_items(&chains); n++) {
        const sa_chain_item item = sa_chain_item_of(&chains, &s.band, s.tokens, kKeys, n);
        CHECK(item.exists && item.tiles.end - item.tiles.begin <= 17, "item %d has tiles %d to %d", (int)n, (int)item.tiles.begin,
                (int)item.tiles.end);
        if (item.block > 0)
            seen_to = item.tiles.end;
        else
            CHECK(item.tiles.begin < seen_to + 8 + SA_SINK_LEAD, "item %d begins at tile %d after %d", (int)n, (int)item.tiles.begin,
                    (int)seen_to);
    }
}

/* 4096 tokens of 8 kv heads of 8 fill an H200 with whole blocks, and 8192 of one kv head of 16 do not. Of 8 heads of 12288, for three of
 * which there is room, two are side by side, of 7 three. */
static void test_few_blocks_have_rounds(void) {
    const sinkattn_mask causal = {.has_right = true};
    sa_chain_room room = {
            .num_heads = 8, .copies = 1, .most_tiles = 1152, .round_tiles = 608, .sums = 1, .num_slots = 8192, .near_slots = 2304};
    room.long_tiles = 4096;
    sa_band band = sa_band_of(&causal, 4096, 4096);
    CHECK(chains_of(&band, 16, kKeys, &room).rounds == 1, "4096 tokens, 64:8");
    const sinkattn_mask all = {0};
    const struct {
        const sinkattn_mask *mask;
        int32_t heads, length, rounds;
    } cases[] = {{&causal, 8, 128, 2}, {&causal, 8, 256, 4}, {&causal, 8, 512, 5}, {&causal, 8, 768, 4}, {&causal, 8, 900, 3},
            {&causal, 8, 1024, 5}, {&causal, 8, 2000, 4}, {&causal, 1, 64, 1}, {&causal, 1, 128, 2}, {&causal, 1, 512, 8},
            {&causal, 1, 1024, 16}, {&causal, 1, 2048, 13}, {&causal, 1, 3000, 19}, {&all, 8, 512, 4}, {&all, 8, 1024, 4},
            {&all, 8, 2048, 2}, {&all, 8, 4096, 1}, {&all, 8, 4224, 3}, {&all, 8, 8192, 3}, {&all, 8, 16896, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        room.num_heads = cases[i].heads;
        band = sa_band_of(cases[i].mask, cases[i].length, cases[i].length);
        const int32_t rounds = chains_of(&band, 16, kKeys, &room).rounds;
        CHECK(rounds == cases[i].rounds, "case %zu: %d rounds", i, (int)rounds);
    }
    room.num_heads = 8;
    band = sa_band_of(&causal, 6144, 6144);
    CHECK(chains_of(&band, 16, kKeys, &room).rounds == 2, "6144 tokens, 64:8");
    band = sa_band_of(&causal, 12288, 12288);
    CHECK(chains_of(&band, 16, kKeys, &room).together == 2, "12288 tokens, 64:8");
    room.num_heads = 7;
    CHECK(chains_of(&band, 16, kKeys, &room).together == 3, "12288 tokens, 56:7");
    room.num_heads = 1;
    band = sa_band_of(&causal, 8192, 8192);
    sa_chains chains = chains_of(&band, 8, kKeys, &room);
    CHECK(chains.rounds == 12 && chains.split && chains.count == 12, "8192 tokens, 16:1: %d rounds", (int)chains.rounds);
    room.blocks = SA_MANY_BLOCKS;
    chains = chains_of(&band, 8, kKeys, &room);
    CHECK(chains.rounds == 12 && !chains.split && chains.count == 1, "the same in a large batch: %d rounds", (int)chains.rounds);
    room.num_heads = 4;
    room.blocks = 4 * 72;
    band = sa_band_of(&causal, 9216, 9216);
    chains = chains_of(&band, 8, kKeys, &room);
    CHECK(chains.rounds == 3 && chains.split, "9216 tokens, 64:4: %d rounds", (int)chains.rounds);
    room.near_slots = 4096;
    band = sa_band_of(&causal, 16384, 16384);
    chains = chains_of(&band, 9, kKeys, &room);
    CHECK(chains.rounds == 1 && chains.together == 2, "16384 tokens, 28:4: %d rounds, %d together", (int)chains.rounds,
            (int)chains.together);
    for (int32_t beyond = 0; beyond < 2; beyond++) {
        band = sa_band_of(&causal, 4096 * 9 + beyond, 4096 * 9 + beyond);
        CHECK(chains_of(&band, 9, kKeys, &room).is_long == beyond, "%d tokens, 28:4", (int)band.q_len);
    }
    band = sa_band_of(&causal, 65536, 65536);
    chains = chains_of(&band, 9, kKeys, &room);
    CHECK(chains.rounds == 12 && chains.together == 3, "65536 tokens, 28:4: %d rounds, %d together", (int)chains.rounds,
            (int)chains.together);
}

/* Under a window of 512: rounds of 10 tiles for 4096 tokens of one kv head of 8, of 6 for 2048; none where blocks are about as many as
 * multiprocessors, or twice as many. A round's waves are the few blocks that see it. */
static void test_few_blocks_of_a_window_have_rounds(void) {
    const sinkattn_mask window = {.has_left = true, .has_right = true, .left = 511};
    sa_chain_room room = {.copies = 1, .most_tiles = 1152, .round_tiles = 576, .sums = 1, .num_slots = 1152, .is_local = true};
    const struct {
        int32_t length, heads, tokens, rounds, waves;
    } cases[] = {{4096, 1, 16, 26, 7}, {4096, 2, 16, 13, 8}, {8192, 1, 16, 26, 8}, {2048, 8, 16, 1, 16}, {4096, 8, 16, 1, 32},
            {4096, 1, 128, 8, 11}, {2048, 1, 16, 22, 6}, {3000, 8, 16, 4, 12}, {5000, 8, 16, 4, 16}, {5000, 4, 8, 13, 9}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sa_band band = sa_band_of(&window, cases[i].length, cases[i].length);
        room.num_heads = cases[i].heads, room.span = (512 + kKeys - 1 + cases[i].tokens - 1) / cases[i].tokens + 1, room.blocks = 0;
        sa_chains chains = chains_of(&band, cases[i].tokens, kKeys, &room);
        CHECK(chains.rounds == cases[i].rounds && chains.waves == cases[i].waves && chains.split == (chains.rounds > 1),
                "%d tokens: %d rounds, %d waves", (int)cases[i].length, (int)chains.rounds, (int)chains.waves);
        band = sa_band_of(&window, cases[i].length, cases[i].length + 700);
        chains = chains_of(&band, cases[i].tokens, kKeys, &room);
        CHECK(chains.split ? chains.unseen == 1 && chains.waves < chains.blocks : chains.waves == chains.blocks,
                "%d tokens behind 700: %d waves", (int)cases[i].length, (int)chains.waves);
        room.blocks = SA_FEW_BLOCKS;
        chains = chains_of(&band, cases[i].tokens, kKeys, &room);
        CHECK(!chains.split && chains.waves == chains.blocks, "the same in a large batch: %d waves", (int)chains.waves);
    }
}

/* Where the last kernel looks for what items leave apart: each has a place of its own, and the rounds that see a block are all there. */
static void test_items_are_found_by_block_and_round(void) {
    for (int i = 0; i < 400; i++) {
        const sequence s = pick_sequence();
        const sa_chains *c = &s.chains;
        if (!c->split) continue;
        char *taken = calloc((size_t)sa_num_places(c) + 1, 1);
        int32_t *missing = calloc((size_t)c->heads * (size_t)c->blocks, sizeof *missing);
        for (int32_t n = 0; n < sa_num_chain_items(c); n++) {
            const sa_chain_item item = item_of(&s, n);
            if (!item.exists || !item.num_parts) continue;
            const sa_range keys = {item.block * kKeys, sa_first((item.block + 1) * kKeys, s.band.k_len)};
            const sa_range rounds = sa_rounds_seeing(c, sa_keys_rows(&s.band, keys), s.tokens, c->round_tiles);
            const bool is_seen = rounds.begin < rounds.end;
            CHECK_ITEM(is_seen ? item.round >= rounds.begin && item.round < rounds.end : item.round == c->rounds - 1, &s, n);
            CHECK_ITEM(item.num_parts == (is_seen ? rounds.end - rounds.begin : 1), &s, n);
            CHECK_ITEM(item.part == (is_seen ? rounds.end - 1 - item.round : 0), &s, n);
            const int32_t place = sa_place_of(c, item.head, item.num_parts - 1 - item.part, item.block);
            if (CHECK_ITEM(place >= 0 && place < sa_num_places(c), &s, n)) CHECK_ITEM(!taken[place]++, &s, n);
            int32_t *of_block = &missing[item.head * c->blocks + item.block];
            if (!*of_block) *of_block = item.num_parts;
            if (!--*of_block) *of_block = -1;
        }
        for (int32_t x = 0; x < c->heads * c->blocks; x++) CHECK_ITEM(missing[x] == -1, &s, x);
        free(taken);
        free(missing);
    }
}

/* 127 row tiles are 3 rounds of 43, side by side for all heads. Without a mask 8192 tokens have three rounds, each an item. Of 256 chains
 * of all rounds 64 are side by side, of whose rows some stay in the L2. Under a window of 1024 the chains of 5872 tokens lie side by side;
 * at 16384 tokens chains of single heads do, and chains of groups of 3 do not. Key blocks of short launches leave dQ apart. */
static void test_rounds_have_room(void) {
    sinkattn_problem problem = {.op = SINKATTN_BWD, .dtype = SINKATTN_BF16, .batch = 1, .head_dim = 64, .mask = {.has_right = true}};
    problem.num_q_heads = 64, problem.num_kv_heads = 8, problem.q_len = problem.k_len = 2032;
    sinkattn_plan plan;
    CHECK(sinkattn_make_plan(&problem, &device, &plan).code == SINKATTN_OK, "%s", problem_text(&problem));
    sa_bwd_sm90_layout layout = sa_bwd_sm90_layout_of(&problem, &plan);
    sa_chains chains = sequence_of(&problem, &plan, &layout.room, problem.q_len, problem.k_len).chains;
    CHECK(chains.rounds == 3 && chains.together == 24, "%d of %d chains side by side", (int)chains.together, (int)chains.count);
    problem.mask.has_right = false, problem.q_len = problem.k_len = 8192;
    layout = sa_bwd_sm90_layout_of(&problem, &plan);
    chains = sequence_of(&problem, &plan, &layout.room, problem.q_len, problem.k_len).chains;
    CHECK(chains.rounds == 3 && chains.split, "8192 tokens, no mask: %d rounds", (int)chains.rounds);
    problem.mask.has_right = true, problem.batch = problem.num_q_heads = problem.num_kv_heads = 16, problem.q_len = problem.k_len = 1024;
    layout = sa_bwd_sm90_layout_of(&problem, &plan);
    chains = sequence_of(&problem, &plan, &layout.room, problem.q_len, problem.k_len).chains;
    CHECK(chains.count == 256 && chains.together == 64, "%d of %d chains side by side", (int)chains.together, (int)chains.count);
    problem.mask.has_left = true, problem.mask.left = 1023, problem.batch = 1, problem.num_q_heads = 24;
    for (int32_t i = 0; i < 4; i++) {
        problem.num_kv_heads = i % 2 ? 24 : 8, problem.q_len = problem.k_len = i < 2 ? 5872 : 16384;
        layout = sa_bwd_sm90_layout_of(&problem, &plan);
        chains = sequence_of(&problem, &plan, &layout.room, problem.q_len, problem.k_len).chains;
        CHECK(chains.is_local == (i >= 2) && chains.together == (i == 2 ? 1 : problem.num_kv_heads), "%d heads: %d side by side",
                (int)problem.num_kv_heads, (int)chains.together);
    }
    const struct { /* few tiles; few blocks; few items, which begin together as rounds, or where all rows see all keys */
        int32_t num_q_heads, num_kv_heads, q_len, k_len, parts;
        bool sees_all;
    } few[] = {{8, 1, 128, 65536, 512, 0}, {8, 1, 1040, 8192, 0, 0}, {8, 1, 2304, 2304, 18, 0}, {8, 1, 3000, 3000, 0, 0},
            {16, 4, 1239, 1239, 10, 0}, {40, 8, 867, 867, 0, 0}, {12, 12, 1280, 1280, 10, 1}, {12, 12, 1280, 1280, 0, 0}};
    for (size_t i = 0; i < sizeof few / sizeof *few; i++) {
        problem.mask = (sinkattn_mask){.has_right = !few[i].sees_all}, problem.num_q_heads = few[i].num_q_heads;
        problem.num_kv_heads = few[i].num_kv_heads, problem.q_len = few[i].q_len, problem.k_len = few[i].k_len;
        CHECK(sa_bwd_sm90_layout_of(&problem, &plan).parts == few[i].parts, "dQ apart, case %zu", i);
    }
    problem.mask = (sinkattn_mask){.has_left = true, .left = 255}, problem.num_q_heads = 8, problem.num_kv_heads = 1;
    problem.q_len = 1024, problem.k_len = 131072;
    CHECK(!sa_bwd_sm90_layout_of(&problem, &plan).parts, "few rows that see few of many keys");
    problem.mask = (sinkattn_mask){.has_right = true};
    problem.head_dim = 128, problem.q_len = problem.k_len = 600;
    CHECK(sinkattn_make_plan(&problem, &device, &plan).code == SINKATTN_OK, "%s", problem_text(&problem));
    CHECK(sa_bwd_sm90_layout_of(&problem, &plan).rounds == 16, "600 tokens, 8:1 of 128");
}

/* Chains that are side by side have their slots at once, or wait for each other without an end. */
static void check_slots(const sinkattn_problem *p, const sa_chains *c, const sa_chain_room *room) {
    CHECK(c->is_local || (int64_t)c->together * c->uses <= room->num_slots, "%s: %d chains of %d uses, %d slots", problem_text(p),
            (int)c->together, (int)c->uses, (int)room->num_slots);
}

static bool has_chains(const sinkattn_problem *p, sinkattn_plan *plan) {
    return p->q_len && p->k_len && sinkattn_make_plan(p, &device, plan).code == SINKATTN_OK &&
           strstr(sinkattn_variant(plan->variant)->name, "_sm90_d");
}

static void check_slots_of_dense(sinkattn_problem p, int64_t q_len, int64_t k_len) {
    sinkattn_plan plan;
    p.packed = false, p.q_len = q_len, p.k_len = k_len;
    if (!has_chains(&p, &plan)) return;
    const sa_bwd_sm90_layout layout = sa_bwd_sm90_layout_of(&p, &plan);
    const sa_chains c = sequence_of(&p, &plan, &layout.room, q_len, k_len).chains;
    CHECK(c.split || c.rounds == 1 || c.sinks || layout.own_carries, "%s: %d rounds without carries", problem_text(&p), (int)c.rounds);
    check_slots(&p, &c, &layout.room);
}

/* What the sequences of a packed batch need is what the workspace has room for. */
static void check_room(const sinkattn_problem *p, const int64_t *q_lens, const int64_t *k_lens) {
    sinkattn_plan plan;
    if (!has_chains(p, &plan)) return;
    const sinkattn_variant_info *info = sinkattn_variant(plan.variant);
    const sa_bwd_sm90_layout layout = sa_bwd_sm90_layout_of(p, &plan);
    int64_t tiles = 0, items = 0, carries = 0, blocks = 0, places = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const sequence s = sequence_of(p, &plan, &layout.room, q_lens[b], k_lens[b]);
        const sa_chains *c = &s.chains;
        tiles += sa_ceil_div(q_lens[b], s.tokens) * layout.heads;
        items += sa_may_be_beside(c, &layout.room) ? (int64_t)c->count * sa_waves_beside(c) : sa_num_chain_items(c);
        carries += (int64_t)sa_num_carries(c) * (c->is_long ? 1 : c->heads);
        blocks += c->blocks;
        if (sa_is_apart(c) && layout.room.blocks < SA_FEW_BLOCKS) places += sa_num_places(c);
        check_slots(p, c, &layout.room);
        CHECK(c->split || c->rounds == 1 || c->sinks || layout.own_carries, "%s: %d rounds", problem_text(p), (int)c->rounds);
        for (int32_t t = c->blind; layout.parts && info->tile_k == kKeys && t < c->tiles; t++)
            CHECK(blocks_before(&s, t, c->blocks) <= layout.parts, "%s: tile %d of %d parts", problem_text(p), (int)t, (int)layout.parts);
    }
    if (sa_bwd_sm90_slices(p, info->tile_q) > 1) carries += blocks * p->num_kv_heads;
    CHECK(places <= layout.places || layout.places == 2048, "%s: places %d of %d", problem_text(p), (int)places, (int)layout.places);
    CHECK(tiles <= layout.tiles && items <= layout.items * layout.heads && carries <= layout.carries,
            "%s: tiles %d of %d, items %d of %d, carries %d of %d", problem_text(p), (int)tiles, (int)layout.tiles, (int)items,
            (int)(layout.items * layout.heads), (int)carries, (int)layout.carries);
}

static void test_packed_batches_have_room(void) {
    sinkattn_problem p = {.op = SINKATTN_BWD, .dtype = SINKATTN_BF16, .packed = true};
    const struct {
        int32_t head_dim, heads, kv_heads, batch, q_len, k_len, window; /* no mask if it is negative */
    } tight[] = {{128, 32, 1, 1, 2400, 131072, 0}, {128, 112, 4, 1, 2400, 32768, 0}, {128, 80, 8, 3, 2299, 2944, 0},
            {128, 32, 1, 1, 772, 4096, 256}, {128, 23, 23, 1, 836, 836, 93}, {64, 21, 3, 1, 40000, 32640, -1},
            {64, 24, 3, 1, 45000, 32640, -1}, {64, 64, 8, 1, 16000, 32768, -1}, {64, 64, 8, 1, 32768, 32768, 0},
            {64, 8, 1, 3, 18433, 32897, 0}, {96, 152, 1, 1, 12282, 1586, -1}, {128, 8, 1, 1, 66000, 66000, 9000},
            {128, 8, 1, 1, 64000, 64000, 9000}};
    for (size_t i = 0; i < sizeof tight / sizeof *tight; i++) {
        const int64_t q = tight[i].q_len, k = tight[i].k_len;
        p.head_dim = tight[i].head_dim, p.num_q_heads = tight[i].heads, p.num_kv_heads = tight[i].kv_heads, p.batch = tight[i].batch;
        p.mask.has_right = tight[i].window >= 0;
        p.mask.has_left = tight[i].window > 0, p.mask.left = sa_max(tight[i].window - 1, 0);
        p.q_len = p.batch * q, p.k_len = p.batch * k;
        check_room(&p, (int64_t[]){q, q, q}, (int64_t[]){k, k, k});
        check_slots_of_dense(p, q, k);
    }
    for (int i = 0; i < 2000; i++) {
        const int64_t most = one_in(3) ? 6000 : one_in(2) ? 2000 : 900, most_keys = one_in(3) ? 40000 : most;
        int64_t q_lens[40], k_lens[40];
        const bool is_even = one_in(3);
        p.batch = pick(1, one_in(3) ? 3 : 40), p.head_dim = 1 << pick(6, 8), p.q_len = p.k_len = 0;
        p.num_kv_heads = pick(1, one_in(2) ? 4 : 24), p.num_q_heads = p.num_kv_heads * pick(1, 64);
        p.mask = (sinkattn_mask){.has_right = one_in(2), .num_sink_tokens = one_in(3) ? pick(1, 1000) : 0};
        if (one_in(2)) p.mask.has_left = true, p.mask.left = pick(0, one_in(2) ? 3000 : 200), p.mask.right = one_in(3) ? pick(0, 99) : 0;
        for (int64_t b = 0; b < p.batch; b++) {
            q_lens[b] = is_even && b ? q_lens[0] : one_in(3) ? pick(0, 200) : pick(0, most);
            k_lens[b] = is_even || one_in(2) ? q_lens[b] : pick(0, most_keys);
            p.q_len += q_lens[b], p.k_len += k_lens[b];
        }
        check_room(&p, q_lens, k_lens);
        check_slots_of_dense(p, q_lens[0], k_lens[0]);
    }
}

/* Walks through the items of a causal backward as 132 multiprocessors do, by cycles measured on an H200. Returns the share of tiles. */
static double busy_share(int64_t num_q_heads, int64_t num_kv_heads, int64_t length, int64_t window, int64_t batch) {
    enum { kTile = 3700, kTurn = 2200, kEnds = 16000 };
    sinkattn_problem p = {.op = SINKATTN_BWD, .dtype = SINKATTN_BF16, .batch = batch, .head_dim = 128, .mask = {.has_right = true}};
    p.num_q_heads = num_q_heads, p.num_kv_heads = num_kv_heads, p.q_len = p.k_len = length;
    if (window) p.mask.has_left = true, p.mask.left = window - 1;
    sinkattn_plan plan;
    CHECK(sinkattn_make_plan(&p, &device, &plan).code == SINKATTN_OK, "%s", problem_text(&p));
    const sa_chain_room room = sa_bwd_sm90_layout_of(&p, &plan).room;
    const sequence s = sequence_of(&p, &plan, &room, length, length);
    const int32_t tiles = s.chains.heads * s.chains.tiles;
    double *turn = calloc((size_t)tiles + (size_t)room.num_slots, sizeof *turn), *slot = turn + tiles, workers[kWorkers] = {0}, work = 0,
           end = 0;
    for (int32_t n = 0; n < sa_num_chain_items(&s.chains); n++) {
        const sa_chain_item item = item_of(&s, n);
        int32_t next = 0, use = item.use;
        for (int32_t i = 1; i < kWorkers; i++)
            if (workers[i] < workers[next]) next = i;
        double now = workers[next] + kEnds, added[2] = {0}; /* dQ of the last two tiles, for which there are buffers */
        for (int32_t t = item.tiles.end - 1; t >= item.tiles.begin; t--, use += item.step) {
            double *of_slot = &slot[use % room.num_slots], *at = &turn[item.head * s.chains.tiles + t];
            now = fmax(now + kTile, added[1]);
            added[1] = added[0];
            added[0] = *at = fmax(now, blocks_before(&s, t, item.block) ? *at : *of_slot) + kTurn;
            if ((t + 1) * s.tokens <= (item.block + 1) * kKeys) *of_slot = *at; /* no later key block sees it */
            work += kTile;
        }
        if (item.exists) end = fmax(end, workers[next] = fmax(now, added[0]));
    }
    free(turn);
    return work / kWorkers / end;
}

/* Shapes in which multiprocessors waited for each other before, for up to nine tenths of the time. */
static void test_multiprocessors_are_busy(void) {
    const int shapes[][5] = {{32, 4, 9216, 0, 1}, {40, 8, 16384, 0, 1}, {16, 1, 8192, 0, 1}, {16, 1, 8192, 0, 8}, {36, 4, 16384, 4096, 1},
            {16, 1, 16384, 4096, 1}, {48, 4, 7000, 0, 6}, {64, 8, 12288, 0, 3}, {20, 5, 8192, 0, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const double share = busy_share(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], shapes[i][4]);
        CHECK(share > 0.83, "%d:%d heads, %d tokens: %.2f", shapes[i][0], shapes[i][1], shapes[i][2], share);
    }
}

const test chain_tests[] = {TEST(chains_meet_all_tiles_in_order), TEST(rounds_of_a_block_are_added_in_order),
        TEST(rounds_do_not_depend_on_the_batch), TEST(items_of_a_head_have_numbers), TEST(blocks_with_sink_tokens_have_rounds),
        TEST(few_blocks_have_rounds), TEST(few_blocks_of_a_window_have_rounds), TEST(items_are_found_by_block_and_round),
        TEST(rounds_have_room), TEST(packed_batches_have_room), TEST(multiprocessors_are_busy), {0}};
