/* SPDX-License-Identifier: Apache-2.0
 *
 * A row tile's way through its key tiles: what the forward and decode share.
 */
#ifndef SA_CPU_FWD_H
#define SA_CPU_FWD_H

#include "cpu/cpu_tile.h"

/* A row tile on its way through its keys. */
typedef struct sa_row_state {
    sa_row_tile rows;
    sa_tile_mask mask;
    sa_cell *q_lanes;        /* [head_dim / pack][lanes] */
    sa_partial chunk, total; /* the chunk's keys so far, and all chunks before it */
    bool fresh, first;       /* has met no keys of the chunk; has left no chunk behind */
} sa_row_state;

/* One worker's memory: for neighbouring row tiles, which share what is done to K and V before a product. */
typedef struct sa_attend {
    const sa_cpu_ops *ops;
    int64_t tile_q, tile_k, chunk_tiles;
    sa_row_state *states; /* a row tile each */
    sa_operand queries, keys, values;
    float *scores; /* [keys of a tile][lanes] */
    float *alpha;  /* [lanes] */
    void **out_rows;
} sa_attend;

/* Partials of one size, one after another; base NULL: none. */
typedef struct sa_partials {
    float *base;
    int64_t lanes, head_dim; /* columns of out */
} sa_partials;

static inline sa_partials sa_take_partials(sa_scratch *scratch, int64_t count, int64_t lanes, int64_t head_dim) {
    const sa_partials partials = {sa_take(scratch, count * lanes * (head_dim + 2) * (int64_t)sizeof(float)), lanes, head_dim};
    return partials;
}

static inline sa_partial sa_partial_at(const sa_partials *partials, int64_t i) {
    float *at = partials->base ? partials->base + i * partials->lanes * (partials->head_dim + 2) : NULL;
    const sa_partial partial = {at, at ? at + partials->lanes : NULL, at ? at + 2 * partials->lanes : NULL};
    return partial;
}

/* One sa_attend a worker of the plan, for up to num_tiles row tiles. */
sa_attend *sa_take_workers(
        sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_plan *plan, int64_t num_tiles);

/* How many chunks the rows meet. */
int64_t sa_count_chunks(const sa_attend *attend, const sa_row_tile *rows);

/* The total of each state over all chunks, without the sink. */
void sa_attend_rows(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows);

/* Of one row tile, the i-th chunk that it meets to place first + i of the partials, for i in `chunks`. */
void sa_attend_chunks(
        sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows, sa_range chunks, const sa_partials *partials, int64_t first);

/* The total of one row tile from the partials of all its chunks, in the first of them. */
void sa_attend_join(sa_attend *attend, const sa_row_tile *rows, const sa_partials *partials, int64_t first);

/* out and lse of every row, packed or not, without splitting keys: the forward's, of which cache is NULL, and a decode's. */
void sa_attend_all(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_fwd_args *args, const sinkattn_decode_args *cache,
        const sinkattn_plan *plan, const sinkattn_context *context);

/* Bytes that sa_attend_all takes. */
void sa_count_all(sa_scratch *scratch, const sinkattn_problem *problem, const sinkattn_plan *plan);

/* Writes out and lse of the rows, from the totals. */
void sa_attend_store(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows);

#endif
