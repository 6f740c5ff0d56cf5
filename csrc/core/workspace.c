/* SPDX-License-Identifier: Apache-2.0 */
#include "workspace.h"

#include "core.h"
#include "layout.h"

static int64_t take(int64_t *at, int64_t bytes) {
    const int64_t from = *at;
    *at = sa_ceil_div(from + bytes, SA_WORKSPACE_ALIGNMENT) * SA_WORKSPACE_ALIGNMENT;
    return from;
}

static int64_t group_of(const sinkattn_problem *p) { return p->num_q_heads / p->num_kv_heads; }

static int64_t sink_blocks(const sinkattn_problem *p, int64_t keys) { return sa_ceil_div(sa_min(p->mask.num_sink_tokens, 1 << 30), keys); }

/* A row of O, pivot and sum in fp32, padded. */
static int64_t row_bytes(const sinkattn_variant_info *info) { return (info->max_head_dim + 8) * 4; }

int64_t sa_num_chunks(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    const bool cuts = info->arch == 90 && info->max_head_dim <= SA_CHUNKS_HEAD_DIM && sa_sees_from_first(&p->mask);
    return cuts ? sa_max(1, sa_ceil_div(p->k_len, sa_chunk_keys(info->tile_k))) : 1;
}

#define SA_CHAIN_BLOCKS 1024 /* of all streams, at least, where their chunks are more */

int64_t sa_chain_blocks(int64_t streams, int64_t chunks) { return sa_min(chunks, sa_ceil_div(SA_CHAIN_BLOCKS, sa_max(1, streams))); }

int64_t sa_chain_slots(int64_t streams, int64_t chunks) {
    if (chunks == 1) return 0;
    return sa_chain_blocks(streams, chunks) == 1 ? 2 : chunks;
}

int64_t sa_fwd_kept_bytes(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    return sa_num_chunks(p, info) > 1 ? plan->workers * info->tile_q * row_bytes(info) : 0;
}

int64_t sa_cuda_fwd_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const int64_t kept = sa_fwd_kept_bytes(p, plan);
    return (sa_counts_items(p) ? SA_COUNTER_BYTES : 0) + (kept ? kept + 15 : 0);
}

int64_t sa_decode_num_slots(const sinkattn_problem *p, const sinkattn_plan *plan) {
    if (plan->num_splits == 1) return 0;
    return sa_is_balanced(p, plan) ? 2 * plan->num_items : plan->num_items;
}

int64_t sa_decode_rows_a_slot(const sinkattn_problem *p, const sinkattn_plan *plan) {
    return sa_min(sinkattn_variant(plan->variant)->tile_q, sa_kv_head_rows(p));
}

int64_t sa_cuda_decode_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const int64_t slots = sa_decode_num_slots(p, plan);
    return slots ? 16 + slots * sa_decode_rows_a_slot(p, plan) * row_bytes(sinkattn_variant(plan->variant)) : 0;
}

/* A decode in a forward's order of sums has one part a row. */
int64_t sa_cuda_decode_order_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    (void)p;
    (void)plan;
    return 0;
}

/* The same cut into chunks, with slots of 8 rows. */
int64_t sa_cuda_decode_chain_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    const int64_t slots = plan->num_items * sa_chain_slots(plan->num_items, sa_num_chunks(p, info));
    return slots ? slots * info->tile_q * row_bytes(info) + 15 : 0;
}

int64_t sa_bwd_sm80_num_stats(const sinkattn_problem *p) { return (p->packed ? 1 : p->batch) * p->num_q_heads * p->q_len; }

int64_t sa_cuda_bwd_sm80_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    (void)plan;
    return sa_bwd_sm80_num_stats(p) * (SA_BWD_SM80_STATS_BYTES + (p->s_aux_dtype ? 4 : 0)) + SA_BWD_SM80_STATS_BYTES - 1;
}

/* A tile of dQ reuses the slot of the tile num_slots uses earlier, which earlier items must have finished. So a sequence of more than
 * SA_SLOTS_BYTES of tiles a kv head is cut into rounds of SA_ROUND_BYTES at most, later tiles first, over which dK and dV are summed; under
 * a window it is not. */
#define SA_MOST_BYTES (INT64_C(36) << 20) /* of a window's span, and of its heads side by side */
#define SA_ROUND_BYTES (INT64_C(18) << 20)
#define SA_SLOTS_BYTES (INT64_C(256) << 20)
#define SA_NEAR_BYTES (INT64_C(64) << 20) /* about what the L2 holds; chains side by side take it, .. */
#define SA_NEAR_BLOCKS 288                /* .. or what the rows of so many key blocks take, two items a multiprocessor, if that is more */
#define SA_BESIDE_BYTES (INT64_C(32) << 20) /* of packed sequences side by side: dQ of all is added to in each wave */
#define SA_LOCAL_BYTES (INT64_C(192) << 20)
#define SA_FULL_BLOCKS 2048                      /* so many key blocks of long chains fill the machine with one round at a time */
#define SA_PARTS_BYTES (INT64_C(72) << 20)       /* parts of dQ in use (reserved: twice this), where blocks are few or meet, .. */
#define SA_LONG_PARTS_BYTES (INT64_C(256) << 20) /* the same for so few row tiles of all kv heads that turns at their dQ .. */
#define SA_PARTS_TILES 64                        /* .. take longer than all else */
#define SA_SLICE_GAIN 8                          /* slices must fill over 1/8 of a tile's rows more */

static int64_t tile_bytes_of(const sinkattn_variant_info *info) { return info->tile_q * info->max_head_dim * 4; }

int64_t sa_bwd_sm90_slices(const sinkattn_problem *p, int64_t tile_q) {
    const int64_t group = group_of(p), slices = sa_ceil_div(group, SA_SLICE_HEADS);
    if (p->num_kv_heads > 1 && group % SA_SLICE_HEADS) return 1;
    if (group > SA_MOST_HEADS) return slices;
    const int64_t whole = tile_q / group * group, cut = tile_q * group / (slices * SA_SLICE_HEADS);
    return cut - whole > tile_q / SA_SLICE_GAIN ? slices : 1;
}

int64_t sa_bwd_sm90_slice_heads(const sinkattn_problem *p, int64_t tile_q) {
    return sa_bwd_sm90_slices(p, tile_q) > 1 ? SA_SLICE_HEADS : group_of(p);
}

/* tiles, blocks: row tiles of all heads, key blocks of one head, of all sequences. */
static sa_chain_room room_of(const sinkattn_problem *p, const sinkattn_plan *plan, const sa_band *band, int64_t tokens, int64_t heads,
        int64_t tiles, int64_t blocks) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    const int64_t tile_bytes = tile_bytes_of(info), most_tiles = SA_MOST_BYTES / tile_bytes, near_tiles = SA_NEAR_BYTES / tile_bytes,
                  most_slots = SA_SLOTS_BYTES / tile_bytes;
    /* Of the mask alone, as the order of sums depends on it. */
    const int64_t window = sa_window_keys(&p->mask), span = sa_ceil_div(sa_min(window, 1 << 30) + info->tile_k - 1, tokens) + 1,
                  sinks = sink_blocks(p, info->tile_k);
    sa_chain_room room;
    room.num_heads = (int32_t)heads;
    room.copies = 1;
    room.sums = (int32_t)sa_ceil_div(2 * info->tile_k * info->max_head_dim * 4, 1 << 16);
    room.most_tiles = (int32_t)most_tiles;
    room.long_tiles = (int32_t)most_slots;
    room.round_tiles = (int32_t)(SA_ROUND_BYTES / tile_bytes);
    room.is_local = span + (sinks ? SA_SINK_ROUND : 1) <= most_tiles && sinks <= SA_SINK_BLOCKS;
    room.span = (int32_t)span;
    const bool is_even = !p->packed && blocks * heads < SA_EVEN_BLOCKS && p->q_len && p->k_len && sa_is_even(band, info->tile_k);
    /* Up to SA_EVEN_BLOCKS even blocks are not taken to fill the machine: their rounds are items. */
    room.blocks = (int32_t)sa_min(blocks * heads, is_even ? SA_MANY_BLOCKS - 1 : SA_MANY_BLOCKS);
    room.near_slots = (int32_t)sa_min(sa_max(near_tiles, SA_NEAR_BLOCKS * info->tile_k / tokens), most_slots);
    room.beside_slots = (int32_t)(SA_BESIDE_BYTES / tile_bytes);
    const int64_t chain = sa_min(sa_ceil_div(p->q_len, tokens), most_slots);
    int64_t slots = sa_fill_blocks(room.blocks) ? sa_max(sa_max(room.near_slots, 2 * most_tiles), chain) : most_slots;
    if (room.is_local) {
        /* All multiprocessors begin at once, and a tile is in use from the first block that meets it to the last. */
        const int64_t in_use = plan->workers * sa_ceil_div(info->tile_k, tokens) + 2 * span;
        slots = sa_max(p->packed ? near_tiles : most_tiles, sa_min(in_use, SA_LOCAL_BYTES / tile_bytes));
    }
    /* Rounds of one length take up more tiles than there are, fewer than there are rounds, or tiles of one. */
    int64_t more = 0;
    while (p->packed && more < SA_MOST_OF_BLOCK && more * more < chain) more++;
    room.num_slots = (int32_t)sa_min(tiles + more * heads, slots);
    return room;
}

/* Key blocks that may see a tile of so many tokens. */
static int64_t most_parts(const sinkattn_problem *p, const sinkattn_variant_info *info, int64_t tokens) {
    const int64_t reach = sa_min(sa_window_keys(&p->mask), 1 << 30) + tokens - 1, blocks = sa_ceil_div(p->k_len, info->tile_k);
    return sa_min(blocks, sink_blocks(p, info->tile_k) + sa_ceil_div(reach, info->tile_k) + 1);
}

/* Parts of dQ that a tile may have, if key blocks leave theirs apart; else 0. Where all items are at work at once, and those of a chain
 * begin with the same tiles, each would wait for those before it. */
static int64_t parts_of(const sinkattn_problem *p, const sinkattn_plan *plan, const sa_bwd_sm90_layout *of, const sa_band *band,
        const sa_chains *dense, int64_t tokens) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    const bool may_meet = (!p->packed || p->batch == 1) && of->tiles <= SA_MEETING_TILES * 3 / 2,
               meets = may_meet && (dense->rounds > 1 || sa_is_even(band, info->tile_k)) &&
                       p->batch * of->heads * sa_count_items(band, tokens, info->tile_k, dense->rounds, dense->round_tiles) <=
                               plan->workers,
               may_have_parts = of->room.blocks < SA_PARTS_BLOCKS || meets;
    const int64_t parts = most_parts(p, info, tokens),
                  bytes = of->tiles <= SA_PARTS_TILES ? SA_LONG_PARTS_BYTES
                          : may_have_parts            ? SA_PARTS_BYTES
                                                      : 0,
                  limit = bytes / tile_bytes_of(info), mean = sa_mean_blocks(band, info->tile_k) + 6 * sink_blocks(p, info->tile_k);
    return of->tiles <= 6 * limit / sa_max(mean, 1) && of->tiles <= 2 * limit / sa_max(parts, 1) ? parts : 0;
}

sa_bwd_sm90_layout sa_bwd_sm90_layout_of(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    const int64_t slices = sa_bwd_sm90_slices(p, info->tile_q), heads = p->num_kv_heads * slices,
                  group = sa_bwd_sm90_slice_heads(p, info->tile_q), tokens = info->tile_q / group, tile_bytes = tile_bytes_of(info),
                  longest = sa_ceil_div(p->q_len, tokens);
    const sa_band band = sa_band_of(&p->mask, p->q_len, p->k_len);
    sa_bwd_sm90_layout to;
    to.heads = heads;
    to.entries = p->batch + p->packed;
    to.tiles = (p->packed ? sa_packed_tiles(p->q_len, tokens, p->batch + 1) : p->batch * longest) * heads;
    const int64_t blocks = p->packed ? sa_packed_tiles(p->k_len, info->tile_k, to.entries) : p->batch * sa_ceil_div(p->k_len, info->tile_k);
    to.blocks = blocks;
    to.room = room_of(p, plan, &band, tokens, heads, to.tiles, blocks);
    sa_chain_room *room = &to.room;
    /* Of packed sequences that have rounds because slots are few. */
    const int64_t long_blocks =
            room->is_local || longest <= room->long_tiles ? 0 : sa_packed_tiles(p->k_len, info->tile_k, longest / room->long_tiles + 1);
    /* A packed batch may be one sequence, or any number of them. */
    to.rounds = sa_rounds_of(&band, tokens, info->tile_k, room);
    const sa_chains dense = sa_chains_of(&band, tokens, info->tile_k, room, to.rounds);
    if (!p->packed && dense.split && !dense.is_long)
        room->num_slots = (int32_t)sa_min((room->is_local ? SA_NEAR_BYTES : SA_SLOTS_BYTES) / tile_bytes,
                sa_max(to.tiles, p->batch * dense.count * (int64_t)dense.uses));
    if (!p->packed && dense.is_long && blocks * heads >= SA_FULL_BLOCKS && dense.blocks >= SA_FEW_BLOCKS) room->num_slots = dense.uses;
    const int64_t sinks = room->is_local ? sink_blocks(p, info->tile_k) : 0, least_tiles = 2 * SA_LEAST_ROUND + 1;
    const bool may_have_rounds = p->packed ? longest >= least_tiles : !dense.sinks && !dense.is_long && dense.rounds > 1,
               may_split = may_have_rounds && (p->packed ? !sa_fill_blocks(room->blocks) : dense.split),
               may_merge = may_have_rounds && (p->packed ? room->blocks >= SA_FEW_BLOCKS : !dense.split);
    if (p->packed) {
        /* Key blocks, and their rounds where slots are few; for sequences of at least so many tiles SA_MOST_ROUNDS, SA_MOST_OF_BLOCK a
         * block. */
        const int64_t rounds = sa_ceil_div(longest, room->round_tiles) + SA_SET_ROUNDS - 1,
                      least = may_split ? least_tiles : room->long_tiles,
                      most_split = sa_min(p->batch, p->q_len / ((least - 1) * tokens + 1));
        const int64_t split = most_split * (sa_ceil_div(SA_MOST_ROUNDS, heads) + 1);
        to.items = blocks + long_blocks * (rounds - 1) + sinks * (to.tiles / heads / SA_SINK_ROUND);
        to.items += room->is_local ? split : sa_min(split, blocks * SA_MOST_OF_BLOCK);
        to.items += to.items / 4; /* waves of sequences side by side, rounded up */
        /* Under a window the waves of a round reach over its rows and a span. The spans of all rounds are within SA_MOST_ROUNDS; here are
         * the rows, of a last round past the end, and an item a round, of at least SA_LEAST_ROUND tiles. */
        if (room->is_local && may_split)
            to.items += 4 * sa_packed_tiles(p->q_len, info->tile_k, p->batch) + to.tiles / heads / SA_LEAST_ROUND;
    } else {
        to.items = p->batch * sa_num_chain_items(&dense) / heads;
    }
    const int64_t sums_bytes = 2 * info->tile_k * info->max_head_dim * 4;
    const bool may_be_apart = may_split && room->blocks < SA_FEW_BLOCKS;
    to.places = 0;
    if (may_be_apart && p->packed) {
        const bool has_span = room->is_local && !p->mask.num_sink_tokens;
        const int64_t most = longest / SA_LEAST_ROUND, rounds = has_span ? sa_min(most, room->span / SA_LEAST_ROUND) + 2 : most;
        to.places = sa_min(SA_APART_PLACES, (has_span ? blocks * rounds : sa_min(to.items, blocks * rounds)) * heads);
    } else if (may_be_apart && sa_is_apart(&dense)) {
        const int64_t places = sa_max(p->batch, 1) * sa_num_places(&dense);
        if (places <= SA_APART_PLACES) to.places = places;
    }
    to.carries = may_split && (p->packed || !to.places) ? blocks * heads : 0;
    to.carries += sinks * heads * sa_min(p->batch, to.tiles / heads / (SA_SINK_ROUND + 1));
    /* Long sequences' heads come one after another: a place a key block, in a dense batch for all sequences. */
    to.carries += p->packed ? long_blocks : dense.is_long ? dense.blocks : 0;
    if (slices > 1) to.carries += blocks * p->num_kv_heads;
    if (!p->packed) room->copies = (int32_t)sa_max(p->batch, 1);
    to.own_carries = may_merge ? plan->workers : 0;
    to.parts = parts_of(p, plan, &to, &band, &dense, tokens);
    int64_t at = 0;
    to.entries_at = take(&at, (to.entries + 1) * SA_BWD_SM90_ENTRY_BYTES);
    to.items_at = take(&at, to.items * heads * SA_BWD_SM90_ITEM_BYTES);
    to.turns_at = take(&at, (room->num_slots * INT64_C(2) + 1) * 8); /* of a slot in two parts, and the counter */
    to.carry_turns_at = take(&at, to.carries * 8);
    to.tile_sums_at = take(&at, to.parts ? to.tiles * SA_BWD_SM90_TILE_SUM_BYTES : 0);
    to.key_sums_at = take(&at, to.places ? blocks * p->num_kv_heads * SA_BWD_SM90_KEY_SUM_BYTES : 0);
    to.stats_at = take(&at, to.tiles * info->tile_q * (SA_BWD_SM90_STATS_BYTES + (p->s_aux_dtype ? SA_BWD_SM90_P_SINK_BYTES : 0)));
    to.slots_at = take(&at, (to.parts ? to.tiles * to.parts : room->num_slots) * tile_bytes);
    to.carries_at = take(&at, (to.carries + to.own_carries + to.places) * sums_bytes);
    to.row_terms_at = take(&at, p->s_aux_dtype ? group * to.tiles * 4 : 0);
    to.key_terms_at = take(&at, p->s_aux_dtype ? p->num_q_heads * to.items * 2 * 4 : 0); /* a math warpgroup's each */
    to.bytes = at + SA_WORKSPACE_ALIGNMENT - 1;
    return to;
}

int64_t sa_cuda_bwd_sm90_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) { return sa_bwd_sm90_layout_of(p, plan).bytes; }

/* Tiles of tile_k positions that hold rows. Those of sequence b begin at (rows before it) / tile_k + 2 b: room for the tiles that it begins
 * and ends in. */
sa_bwd_window_layout sa_bwd_window_layout_of(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const int64_t keys = sinkattn_variant(plan->variant)->tile_k, num_sink_tokens = p->mask.num_sink_tokens;
    sa_bwd_window_layout to;
    to.row_tiles = p->packed ? sa_packed_tiles(p->q_len, keys, 2 * p->batch) : p->batch * sa_packed_tiles(p->q_len, keys, 2);
    to.partials = num_sink_tokens * p->num_kv_heads * to.row_tiles * SA_BWD_WINDOW_PARTIAL;
    to.sums = p->s_aux_dtype ? p->num_q_heads * plan->workers * (num_sink_tokens ? SA_BWD_WINDOW_SINK_PARTS : SA_BWD_WINDOW_PARTS) : 0;
    to.alignment = num_sink_tokens ? 16 : 4;
    to.bytes = 4 * (to.partials + to.sums + plan->workers + 1) + to.alignment - 1;
    return to;
}

int64_t sa_cuda_bwd_sm90_window_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    return sa_bwd_window_layout_of(p, plan).bytes;
}

#define SA_STRETCH_TILES 32 /* of rows */

/* The statistics of each row and, as copies take a whole tile's, of one tile more. */
sa_bwd_wide_window_layout sa_bwd_wide_window_layout_of(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const int64_t tile_q = sinkattn_variant(plan->variant)->tile_q, num_sink_tokens = p->mask.num_sink_tokens,
                  rows = (p->packed ? 1 : p->batch) * p->num_q_heads * p->q_len;
    sa_bwd_wide_window_layout to;
    to.stretch_tokens = SA_STRETCH_TILES * sa_max(tile_q / group_of(p), 1); /* also where the kernel is not to run */
    to.stretch_keys = sa_min(sa_window_keys(&p->mask), 1 << 30) + 1;
    const int64_t windows = p->packed ? p->k_len / to.stretch_keys + 1 : p->batch,
                  stretches = p->packed ? p->q_len / to.stretch_tokens + windows : p->batch * sa_ceil_div(p->q_len, to.stretch_tokens);
    to.window_slots = 2 * stretches;
    to.slots = to.window_slots + windows;
    to.partials_at = (rows + tile_q) * SA_BWD_WIDE_WINDOW_STATS_BYTES;
    to.bytes = to.partials_at + to.slots * p->num_kv_heads * num_sink_tokens * SA_BWD_WIDE_WINDOW_PARTIAL * 4 +
               SA_BWD_WIDE_WINDOW_STATS_BYTES - 1;
    return to;
}

int64_t sa_cuda_bwd_sm90_wide_window_workspace(const sinkattn_problem *p, const sinkattn_plan *plan) {
    return sa_bwd_wide_window_layout_of(p, plan).bytes;
}
