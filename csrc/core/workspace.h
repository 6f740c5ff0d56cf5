/* SPDX-License-Identifier: Apache-2.0
 *
 * How the CUDA kernels' workspaces are laid out: for their launchers, and for plans where no CUDA kernel is compiled. Positions count
 * from the workspace's first multiple of its alignment; `bytes` is enough at any address.
 */
#ifndef SA_WORKSPACE_H
#define SA_WORKSPACE_H

#include "chains.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the kernels put there; they assert their own sizes against these. */
enum {
    SA_WORKSPACE_ALIGNMENT = 128,
    SA_COUNTER_BYTES = 16,        /* a launch counter, however the workspace is aligned */
    SA_BWD_SM80_STATS_BYTES = 8,  /* of a row: lse and g - delta */
    SA_BWD_SM90_STATS_BYTES = 10, /* of a row: what is added to S and dP; */
    SA_BWD_SM90_P_SINK_BYTES = 4, /* with ds_aux */
    SA_BWD_SM90_ENTRY_BYTES = 160,
    SA_BWD_SM90_ITEM_BYTES = 128,
    SA_BWD_SM90_TILE_SUM_BYTES = 24,
    SA_BWD_SM90_KEY_SUM_BYTES = 40,
    SA_BWD_WINDOW_PARTS = 12,            /* of ds_aux, a block and head, */
    SA_BWD_WINDOW_SINK_PARTS = 16,       /* with positional sink tokens; */
    SA_BWD_WINDOW_PARTIAL = 128,         /* floats of one sink token: dK, then dV */
    SA_BWD_WIDE_WINDOW_STATS_BYTES = 16, /* of a row, and their alignment */
    SA_BWD_WIDE_WINDOW_PARTIAL = 256     /* floats of one sink token: dK, then dV */
};

/* The chunks into which a kernel cuts the keys of a sequence, 1 if it does not, and the bytes in which a forward keeps each thread's O,
 * pivots and sums between chunks. */
int64_t sa_num_chunks(const sinkattn_problem *problem, const sinkattn_variant_info *info);
int64_t sa_fwd_kept_bytes(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* Decode in such a forward's order: of a stream of so many chunks, the blocks, and the slots: one for each chunk; two, in turns, where
 * one block has all chunks; none for a single chunk. */
int64_t sa_chain_blocks(int64_t streams, int64_t chunks);
int64_t sa_chain_slots(int64_t streams, int64_t chunks);

/* Decode: a slot for each part; where the kernel cuts by lengths, two a block: see sa_share_of. A slot has so many rows. */
int64_t sa_decode_num_slots(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_decode_rows_a_slot(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* sm_80's backward: rows that have statistics. */
int64_t sa_bwd_sm80_num_stats(const sinkattn_problem *problem);

/* The general backward of sm_90 takes query heads of a kv head in slices where they are more than SA_MOST_HEADS, or where whole tokens
 * leave more rows of a tile empty. Slices are kv heads to all but the sums of dK and dV: items hand those from slice to slice. A slice
 * that is not whole is the last of all heads, past which copies read zeros. */
enum { SA_MOST_HEADS = 64, SA_SLICE_HEADS = 8 };
int64_t sa_bwd_sm90_slices(const sinkattn_problem *problem, int64_t tile_q); /* of a kv head; 1 where it is whole */
int64_t sa_bwd_sm90_slice_heads(const sinkattn_problem *problem, int64_t tile_q);

/* heads: slices of all kv heads. entries, tiles, items, carries, own_carries: how many there are, items those of a slice. blocks: key
 * blocks of a head. places: carries of items that leave dK and dV apart, behind the others. parts: of dQ that a tile may have, where key
 * blocks leave them apart, else 0. */
typedef struct sa_bwd_sm90_layout {
    int64_t heads, entries, tiles, blocks, items, carries, own_carries, places, parts;
    int64_t entries_at, items_at, turns_at, carry_turns_at, tile_sums_at, key_sums_at, stats_at, slots_at, carries_at, row_terms_at,
            key_terms_at, bytes;
    sa_chain_room room;
    int32_t rounds; /* of a dense batch's sequences: sa_rounds_of */
} sa_bwd_sm90_layout;

sa_bwd_sm90_layout sa_bwd_sm90_layout_of(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* The backward of windows: partials and sums in floats, one after the other, then a flag a block and a count. */
typedef struct sa_bwd_window_layout {
    int64_t row_tiles, partials, sums, alignment, bytes;
} sa_bwd_window_layout;

sa_bwd_window_layout sa_bwd_window_layout_of(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* The backward of wide windows: statistics, then partials of positional sink tokens, [num_kv_heads][slots]. A stretch is stretch_tokens
 * tokens of a sequence, with two slots, one a math warpgroup; from window_slots on each sequence has one for its window. Packed sequences
 * of fewer than stretch_keys keys need none: so keys before / stretch_keys is a sequence's window index, and that plus rows before /
 * stretch_tokens is the number of its first stretch. */
typedef struct sa_bwd_wide_window_layout {
    int64_t stretch_tokens, stretch_keys, window_slots, slots, partials_at, bytes;
} sa_bwd_wide_window_layout;

sa_bwd_wide_window_layout sa_bwd_wide_window_layout_of(const sinkattn_problem *problem, const sinkattn_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
