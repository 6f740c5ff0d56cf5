/* SPDX-License-Identifier: Apache-2.0
 *
 * A row tile's way through its key tiles: what the forward and decode share.
 */
#ifndef SA_CPU_FWD_H
#define SA_CPU_FWD_H

#include "cpu/cpu_tile.h"

enum { SA_BLOCK_ROWS = 64 }; /* the rows whose scores are computed at a time */

/* Rows on their way through their keys. A row tile is one block or more, which share what is done to K and V before a product. */
typedef struct sa_row_block {
    sa_row_tile rows;
    sa_tile_mask mask;
    sa_cell *q_lanes;   /* [head_dim / pack][lanes] */
    float *out;         /* [head_dim][lanes], to be divided by sum */
    float *pivot, *sum; /* [lanes] */
} sa_row_block;

/* One worker's memory for a row tile. */
typedef struct sa_attend {
    const sa_cpu_ops *ops;
    int64_t tile_k;
    sa_row_block *blocks;
    sa_operand queries, keys, values;
    float *scores; /* [tile_k][lanes] */
    float *alpha;  /* [lanes] */
    void **out_rows;
} sa_attend;

/* One sa_attend a worker of the plan. */
sa_attend *sa_take_workers(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_plan *plan);

/* (pivot, sum, out) of the rows over part `part` of `num_parts` of their key tiles. with_sink starts from the sink, else from nothing. */
void sa_attend_rows(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows, int64_t part, int64_t num_parts, bool with_sink);

/* Writes out and lse of a row tile of `num_rows`. */
void sa_attend_store(sa_attend *attend, const sa_stream *stream, int64_t num_rows);

#endif
