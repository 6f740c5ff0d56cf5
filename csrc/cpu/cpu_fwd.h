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
    sa_cell *q_lanes;   /* [head_dim / pack][lanes] */
    float *out;         /* [head_dim][lanes], to be divided by sum; unwritten while fresh */
    float *pivot, *sum; /* [lanes] */
    bool fresh;         /* has met no keys */
} sa_row_state;

/* One worker's memory: for neighbouring row tiles, which share what is done to K and V before a product. */
typedef struct sa_attend {
    const sa_cpu_ops *ops;
    int64_t tile_q, tile_k;
    sa_row_state *states; /* a row tile each */
    sa_operand queries, keys, values;
    float *scores; /* [keys of a tile][lanes] */
    float *alpha;  /* [lanes] */
    void **out_rows;
} sa_attend;

/* One sa_attend a worker of the plan, for up to num_tiles row tiles. */
sa_attend *sa_take_workers(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_plan *plan,
                           int64_t num_tiles);

/* (pivot, sum, out) of the rows over part `part` of `num_parts` of their key tiles, without the sink. */
void sa_attend_rows(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows, int64_t part, int64_t num_parts);

/* out and lse of every row, packed or not, without splitting keys: the forward's, of which cache is NULL, and a decode's. */
void sa_attend_all(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_fwd_args *args, const sinkattn_decode_args *cache,
                   const sinkattn_plan *plan, const sinkattn_context *context);

/* Bytes that sa_attend_all takes. */
void sa_count_all(sa_scratch *scratch, const sinkattn_problem *problem, const sinkattn_plan *plan);

/* Writes out and lse of the rows. */
void sa_attend_store(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows);

#endif
