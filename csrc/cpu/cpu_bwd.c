/* SPDX-License-Identifier: Apache-2.0
 *
 * The tiled backward: every score is computed once, no atomics, nothing of size q_len x k_len.
 *
 * docs/kernels/cpu.md has the passes. Every key adds its row tiles in ascending order, and every row tile its key tiles; pass 2 sums the
 * group's heads before it rounds. Segments depend on a sequence's lengths and mask alone: how many workers there are leaves no trace in
 * the bits.
 *
 * ds_aux = -sum_i p_sink_i (sum_j P_ij dP_ij - g_i): the inner sum comes from the gradient step in fp32.
 */
#include "cpu/cpu_tile.h"

enum { MAX_SEGMENTS = 4, MIN_SEGMENT = 1024 }; /* segments of a sequence; tokens of one */
enum { ROW_TILES = 4 };                        /* that meet a key tile while it is ready */

typedef struct bwd_slot {
    sa_range tokens;
    int64_t sink_end; /* keys [0, sink_end) and [band.begin, band.end) have a row each */
    sa_range band;
    int64_t first_row; /* of kv head 0; the other heads' slots follow */
} bwd_slot;

/* A row tile on its way through its keys. */
typedef struct bwd_rows {
    sa_row_tile tile;
    sa_tile_mask mask;
    sa_operand q, dout;
    sa_cell *q_lanes, *dout_lanes; /* [head_dim / pack][lanes], [head_dim_v / pack][lanes] */
    float *dq;                     /* [head_dim][lanes] */
    float *lse, *bias, *sink_sum;
} bwd_rows;

typedef struct bwd_worker {
    bwd_rows rows[ROW_TILES];
    sa_operand out; /* rows of a row tile */
    sa_operand k, k_columns, v;
    float *scores, *dp; /* [tile_k][lanes] */
    sa_cell *p_rows, *ds_rows, *ds_keys;
    float *delta, *factor;
    void **dq_rows;
} bwd_worker;

typedef struct bwd_job {
    const sa_cpu_ops *ops;
    const sinkattn_bwd_args *args;
    int64_t tile_q, tile_k;
    int64_t padded_k, padded_v; /* head_dim and head_dim_v in whole lanes */
    bwd_worker *workers;
    bwd_slot *slots; /* [batch][MAX_SEGMENTS] */
    float *dk, *dv;  /* [slot rows][padded_k], [slot rows][padded_v] */
    float *terms;    /* as lse; NULL without ds_aux */
} bwd_job;

static int64_t num_segments(int64_t q_len) { return sa_clamp(sa_ceil_div(q_len, MIN_SEGMENT), 1, MAX_SEGMENTS); }

/* Slot rows of all segments and kv heads, from sizes alone: what plan_slots will at most use. */
static int64_t max_slot_rows(const sinkattn_problem *problem, int64_t tile_k) {
    const int64_t sequences = problem->packed ? 1 : problem->batch;
    const int64_t segments = problem->packed ? sa_min(MAX_SEGMENTS * problem->batch, problem->batch + problem->q_len / MIN_SEGMENT)
                                             : num_segments(problem->q_len);
    const int64_t most = sa_min(MAX_SEGMENTS, segments) * problem->k_len;
    const sa_band band = sa_band_of(&problem->mask, problem->q_len, problem->k_len);
    const int64_t windowed = problem->q_len + segments * (sa_rows_reach(&band, 0) + 2 * tile_k);
    return sequences * problem->num_kv_heads * sa_min(most, windowed);
}

static bwd_rows take_rows(sa_scratch *scratch, const sinkattn_problem *problem, int64_t tile_q) {
    const int64_t cell = (int64_t)sizeof(sa_cell), head_dim = problem->head_dim, head_dim_v = sa_head_dim_v(problem);
    bwd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.mask = sa_take_mask(scratch, tile_q);
    rows.q = sa_take_operand(scratch, problem->dtype, head_dim, tile_q);
    rows.dout = sa_take_operand(scratch, problem->dtype, head_dim_v, tile_q);
    rows.q_lanes = sa_take(scratch, head_dim * tile_q * cell);
    rows.dout_lanes = sa_take(scratch, head_dim_v * tile_q * cell);
    rows.dq = sa_take(scratch, head_dim * tile_q * cell);
    rows.lse = sa_take(scratch, tile_q * cell);
    rows.bias = sa_take(scratch, tile_q * cell);
    rows.sink_sum = sa_take(scratch, tile_q * cell);
    return rows;
}

static bwd_job take_job(
        sa_scratch *scratch, const sa_cpu_ops *ops, int64_t pack, const sinkattn_problem *problem, const sinkattn_plan *plan) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    const int64_t cell = (int64_t)sizeof(sa_cell), tile_q = info->tile_q, tile = info->tile_q * info->tile_k;
    const sinkattn_dtype dtype = problem->dtype;
    const int64_t head_dim = problem->head_dim, head_dim_v = sa_head_dim_v(problem);
    bwd_job job = {ops, NULL, info->tile_q, info->tile_k, sa_padded(head_dim), sa_padded(head_dim_v), NULL, NULL, NULL, NULL, NULL};
    job.workers = sa_take(scratch, plan->workers * (int64_t)sizeof *job.workers);
    for (int32_t w = 0; w < plan->workers; w++) {
        bwd_worker worker;
        for (int i = 0; i < ROW_TILES; i++) worker.rows[i] = take_rows(scratch, problem, tile_q);
        worker.out = sa_take_operand(scratch, dtype, head_dim_v, tile_q);
        worker.k = sa_take_operand(scratch, dtype, head_dim, info->tile_k);
        worker.k_columns = sa_take_operand(scratch, dtype, head_dim, info->tile_k);
        worker.v = sa_take_operand(scratch, dtype, head_dim_v, info->tile_k);
        worker.scores = sa_take(scratch, tile * cell);
        worker.dp = sa_take(scratch, tile * cell);
        worker.p_rows = pack == 1 ? (sa_cell *)worker.scores : sa_take(scratch, tile * cell);
        worker.ds_rows = pack == 1 ? (sa_cell *)worker.dp : sa_take(scratch, tile * cell);
        worker.ds_keys = pack == 1 ? (sa_cell *)worker.dp : sa_take(scratch, tile * cell);
        worker.delta = sa_take(scratch, tile_q * cell);
        worker.factor = sa_take(scratch, tile_q * cell);
        worker.dq_rows = sa_take(scratch, tile_q * (int64_t)sizeof *worker.dq_rows);
        if (job.workers) job.workers[w] = worker;
    }
    job.slots = sa_take(scratch, problem->batch * MAX_SEGMENTS * (int64_t)sizeof *job.slots);
    const int64_t most_rows = max_slot_rows(problem, info->tile_k);
    job.dk = sa_take(scratch, most_rows * job.padded_k * cell);
    job.dv = sa_take(scratch, most_rows * job.padded_v * cell);
    job.terms = sa_take(
            scratch, problem->s_aux_dtype ? (problem->packed ? 1 : problem->batch) * problem->num_q_heads * problem->q_len * cell : 0);
    return job;
}

int64_t sa_cpu_bwd_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    sa_scratch scratch = {NULL, 0};
    sinkattn_fwd_args args = {.problem = *problem};
    sa_take_cu_seqlens(&scratch, &args);
    take_job(&scratch, NULL, 2, problem, plan);
    return scratch.used + 64;
}

/* Gives every segment its tokens and its slot. */
static void plan_slots(const bwd_job *job) {
    const sinkattn_fwd_args *args = &job->args->fwd;
    const sinkattn_problem *problem = &args->problem;
    const int64_t step = job->ops->key_step;
    int64_t row = 0;
    for (int64_t b = 0; b < problem->batch; b++) {
        const sa_stream stream = sa_stream_of(args, NULL, b, 0);
        const int64_t segments = num_segments(stream.sequence.q_len);
        for (int64_t s = 0; s < MAX_SEGMENTS; s++) {
            bwd_slot *slot = &job->slots[b * MAX_SEGMENTS + s];
            *slot = (bwd_slot){.first_row = row}; /* NOLINT(clang-analyzer-core.NullDereference): a run has its workspace */
            if (s >= segments) continue;
            slot->tokens = sa_split_part(stream.sequence.q_len, segments, s);
            if (slot->tokens.begin == slot->tokens.end) continue;
            slot->band = sa_rows_band(&stream.band, slot->tokens, &slot->sink_end);
            slot->sink_end = sa_ceil_div(slot->sink_end, step) * step; /* as sa_tile_keys, here and below */
            slot->band.begin -= slot->band.begin % step;
            slot->band.end = sa_min(sa_ceil_div(slot->band.end, step) * step, stream.sequence.k_len);
            if (slot->sink_end && (slot->sink_end - 1) / job->tile_k >= slot->band.begin / job->tile_k)
                slot->sink_end = slot->band.begin = 0; /* prefix and band share a key tile, whose keys must lie in a row */
            row += problem->num_kv_heads * (slot->sink_end + slot->band.end - slot->band.begin);
        }
    }
}

static int64_t slot_rows(const bwd_slot *slot) { return slot->sink_end + slot->band.end - slot->band.begin; }

/* Slot row of a key, -1 where the segment does not see it. */
static int64_t slot_row(const bwd_slot *slot, int64_t kv_head, int64_t key) {
    const int64_t first = slot->first_row + kv_head * slot_rows(slot);
    if (key < slot->sink_end) return first + key;
    if (key < slot->band.begin || key >= slot->band.end) return -1;
    return first + slot->sink_end + key - slot->band.begin;
}

static void load_lanes(const bwd_job *job, sa_operand *operand, const sa_stream *stream, const sinkattn_tensor *tensor,
        const sa_row_tile *tile, sa_cell *lanes) {
    sa_operand_queries(operand, stream, tensor, tile);
    job->ops->rows_to_lanes(operand->rows, tile->n, stream->args->problem.dtype, operand->head_dim, lanes, tile->lanes);
}

/* [lanes / pack][head_dim in whole lanes], neighbours along the rows, rows past n zero: the right side of dK and dV. */
static void load_pairs(const bwd_job *job, sa_operand *operand, sinkattn_dtype dtype, const sa_row_tile *tile) {
    const sa_cpu_ops *ops = job->ops;
    const int64_t padded = sa_padded(operand->head_dim);
    sa_operand_clean(operand, ops, dtype, tile->n, true);
    ops->rows_to_pairs(operand->clean, tile->n, dtype, operand->head_dim, operand->cells, padded);
    const int64_t done = sa_ceil_div(tile->n, ops->pack), all = tile->lanes / ops->pack;
    memset(operand->cells + done * padded, 0, (size_t)((all - done) * padded) * sizeof *operand->cells);
}

static void load_row_tile(const bwd_job *job, bwd_worker *worker, const sa_stream *stream, bwd_rows *rows) {
    const sinkattn_bwd_args *args = job->args;
    const sinkattn_problem *problem = &args->fwd.problem;
    const sa_row_tile *tile = &rows->tile;
    sa_mask_rows(&rows->mask, stream, tile);
    load_lanes(job, &rows->q, stream, &args->fwd.q, tile, rows->q_lanes);
    load_lanes(job, &rows->dout, stream, &args->dout, tile, rows->dout_lanes);
    sa_cell *out_lanes = (sa_cell *)rows->dq;
    load_lanes(job, &worker->out, stream, &args->fwd.out, tile, out_lanes);
    job->ops->lane_dot(rows->dout_lanes, out_lanes, worker->out.head_dim / job->ops->pack, tile->lanes, worker->delta);
    load_pairs(job, &rows->q, problem->dtype, tile);
    load_pairs(job, &rows->dout, problem->dtype, tile);
    const float *lse = args->fwd.lse, *dlse = args->dlse;
    sa_row row = sa_row_at(stream, tile->begin);
    for (int64_t lane = 0; lane < tile->lanes; lane++, row = sa_row_after(stream, row)) {
        const int64_t at = lane < tile->n ? sa_stat_index(stream, row) : -1;
        rows->lse[lane] = at < 0 ? INFINITY : lse[at];
        rows->bias[lane] = at < 0 ? 0.0f : (dlse ? dlse[at] : 0.0f) - worker->delta[lane];
        rows->sink_sum[lane] = 0.0f;
    }
    memset(rows->dq, 0, (size_t)(problem->head_dim * tile->lanes) * sizeof *rows->dq);
}

/* gradient[key][dim] += weight[key][row] * element[row][dim] for the elements hidden in `operand`, in the keys that the row sees. */
static void add_hidden_rows(const bwd_job *job, const sa_operand *operand, const sa_stream *stream, const sa_row_tile *tile, sa_range keys,
        const sa_cell *weights, float *gradient) {
    const sinkattn_problem *problem = &stream->args->problem;
    const bool halves = job->ops->pack == 2;
    const int64_t padded = sa_padded(operand->head_dim);
    for (int64_t r = 0; r < tile->n; r++) {
        if (operand->clean[r] == operand->rows[r]) continue;
        for (int64_t x = 0; x < operand->head_dim; x++) {
            const float element = (float)sa_load(operand->rows[r], problem->dtype, x);
            if (isfinite(element)) continue;
            for (int64_t key = 0; key < keys.end - keys.begin; key++) {
                if (!sa_visible(&stream->band, (tile->begin + r) / stream->group, keys.begin + key)) continue;
                const double weight = sa_load(weights, halves ? SINKATTN_BF16 : SINKATTN_FP32, key * tile->lanes + r);
                gradient[key * padded + x] += (float)weight * element;
            }
        }
    }
}

/* K, V and K^T of some keys. `masked`: some row does not see some key. */
static void load_keys(const bwd_job *job, bwd_worker *worker, const sa_stream *stream, sa_range keys, bool masked) {
    const sa_cpu_ops *ops = job->ops;
    const sinkattn_fwd_args *args = &job->args->fwd;
    const sinkattn_dtype dtype = args->problem.dtype;
    const int64_t n = keys.end - keys.begin;
    sa_operand_keys(&worker->k, stream, &args->k, keys);
    sa_operand_cells(&worker->k, ops, dtype, n, args->k.row_stride);
    sa_operand_keys(&worker->v, stream, &args->v, keys);
    sa_operand_cells(&worker->v, ops, dtype, n, args->v.row_stride);
    sa_operand_keys(&worker->k_columns, stream, &args->k, keys);
    sa_operand_clean(&worker->k_columns, ops, dtype, n, masked);
    sa_operand_columns(&worker->k_columns, ops, dtype, n, args->k.row_stride);
}

/* S^T or dP^T, [keys][lanes], of n keys from row `first` of the operand. */
static void score_tile(const bwd_job *job, const sa_operand *keys, int64_t first, int64_t n, const sa_cell *b, int64_t lanes, float *c) {
    const sa_product product = {.m = n,
            .lanes = lanes,
            .k = keys->head_dim / job->ops->pack,
            .a = keys->read + first * keys->read_row,
            .a_row = keys->read_row,
            .a_col = 1,
            .b = b,
            .b_row = lanes,
            .c = c,
            .c_row = lanes};
    job->ops->product(&product);
}

/* gradient += weights^T . operand's rows. */
static void add_product(const bwd_job *job, const sa_operand *operand, const sa_stream *stream, const sa_row_tile *tile, sa_range keys,
        const sa_cell *weights, float *gradient) {
    const int64_t cells = tile->lanes / job->ops->pack, padded = sa_padded(operand->head_dim);
    const sa_product product = {.m = keys.end - keys.begin,
            .lanes = padded,
            .k = cells,
            .a = weights,
            .a_row = cells,
            .a_col = 1,
            .b = operand->cells,
            .b_row = padded,
            .c = gradient,
            .c_row = padded,
            .join = SA_ADD};
    job->ops->product(&product);
    if (operand->hidden) add_hidden_rows(job, operand, stream, tile, keys, weights, gradient);
}

/* dV += P^T . dO, dK += dS^T . Q, into the slot's rows of the keys. */
static void add_key_gradients(
        const bwd_job *job, bwd_worker *worker, const sa_stream *stream, const bwd_rows *rows, const bwd_slot *slot, sa_range keys) {
    const int64_t row = slot_row(slot, stream->kv_head, keys.begin);
    add_product(job, &rows->dout, stream, &rows->tile, keys, worker->p_rows, job->dv + row * job->padded_v);
    add_product(job, &rows->q, stream, &rows->tile, keys, worker->ds_rows, job->dk + row * job->padded_k);
}

/* dQ^T += K^T . dS^T, K's keys from row `first` of the operand. */
static void add_query_gradients(
        const bwd_job *job, const bwd_worker *worker, const sa_stream *stream, const bwd_rows *rows, sa_range keys, int64_t first) {
    const sa_cpu_ops *ops = job->ops;
    const sa_operand *k = &worker->k_columns;
    const sa_product product = {.m = k->head_dim,
            .lanes = rows->tile.lanes,
            .k = sa_ceil_div(keys.end - keys.begin, ops->pack),
            .a = k->read + first / ops->pack * k->read_col,
            .a_row = k->read_row,
            .a_col = k->read_col,
            .b = worker->ds_keys,
            .b_row = rows->tile.lanes,
            .c = rows->dq,
            .c_row = rows->tile.lanes,
            .join = SA_ADD};
    ops->product(&product);
    if (k->hidden) sa_add_hidden(k, first, ops, stream, &rows->tile, keys, worker->ds_keys, 1, rows->dq);
}

/* One row tile and the keys of a key tile that it sees, from row `first` of the operands. */
static void key_tile(const bwd_job *job, bwd_worker *worker, const sa_stream *stream, const bwd_rows *rows, const bwd_slot *slot,
        sa_range keys, int64_t first) {
    const sa_row_tile *tile = &rows->tile;
    score_tile(job, &worker->k, first, keys.end - keys.begin, rows->q_lanes, tile->lanes, worker->scores);
    score_tile(job, &worker->v, first, keys.end - keys.begin, rows->dout_lanes, tile->lanes, worker->dp);
    const sa_gradient_tile gradient = {.scores = worker->scores,
            .dp = worker->dp,
            .row_stride = tile->lanes,
            .lanes = tile->lanes,
            .keys = keys.end - keys.begin,
            .mask = sa_mask_keys(&rows->mask, stream, tile, keys, true),
            .scale = (float)sa_softmax_scale(&job->args->fwd.problem),
            .lse = rows->lse,
            .bias = rows->bias,
            .sink_sum = job->terms ? rows->sink_sum : NULL,
            .p_rows = worker->p_rows,
            .ds_rows = worker->ds_rows,
            .ds_keys = worker->ds_keys};
    job->ops->gradient(&gradient);
    add_key_gradients(job, worker, stream, rows, slot, keys);
    add_query_gradients(job, worker, stream, rows, keys, first);
}

static void store_row_tile(const bwd_job *job, bwd_worker *worker, const sa_stream *stream, const bwd_rows *rows) {
    const sinkattn_bwd_args *args = job->args;
    const sinkattn_problem *problem = &args->fwd.problem;
    const sa_row_tile *tile = &rows->tile;
    const float *dlse = args->dlse;
    sa_row row = sa_row_at(stream, tile->begin);
    for (int64_t lane = 0; lane < tile->n; lane++, row = sa_row_after(stream, row)) {
        const int64_t at = sa_stat_index(stream, row);
        worker->factor[lane] = (float)sa_softmax_scale(problem);
        worker->dq_rows[lane] = sa_query_row(stream, &args->dq, row);
        if (!job->terms) continue;
        const double p_sink = sa_exp_minus(sa_s_aux(&args->fwd, row.head), rows->lse[lane]);
        job->terms[at] = (float)p_sink * ((dlse ? dlse[at] : 0.0f) - rows->sink_sum[lane]);
    }
    job->ops->lanes_to_rows(rows->dq, tile->lanes, worker->factor, worker->dq_rows, tile->n, problem->dtype, problem->head_dim);
}

/* Rows [begin, end) of a stream, at most ROW_TILES tiles of them, and all keys that they see. */
static void attend_row_tiles(
        const bwd_job *job, bwd_worker *worker, const sa_stream *stream, const bwd_slot *slot, int64_t begin, int64_t end) {
    const sa_row_tile all = sa_row_tile_of(stream, begin, end, job->ops, job->tile_k);
    const int64_t count = sa_ceil_div(end - begin, job->tile_q);
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = begin + i * job->tile_q;
        worker->rows[i].tile = sa_row_tile_of(stream, first, sa_min(first + job->tile_q, end), job->ops, job->tile_k);
        load_row_tile(job, worker, stream, &worker->rows[i]);
    }
    SA_FOR_EACH_TILE(t, &all) {
        const sa_range keys = sa_tile_keys(&all, t);
        load_keys(job, worker, stream, keys, !sa_all_visible(&stream->band, all.tokens, keys));
        for (int64_t i = 0; i < count; i++) {
            const bwd_rows *rows = &worker->rows[i];
            if (!sa_has_tile(&rows->tile, t)) continue;
            const sa_range seen = sa_tile_keys(&rows->tile, t);
            key_tile(job, worker, stream, rows, slot, seen, seen.begin - keys.begin);
        }
    }
    for (int64_t i = 0; i < count; i++) store_row_tile(job, worker, stream, &worker->rows[i]);
}

static void segment_item(void *arg, int64_t item, int32_t w) {
    const bwd_job *job = arg;
    bwd_worker *worker = &job->workers[w];
    const sinkattn_problem *problem = &job->args->fwd.problem;
    const int64_t slot_index = problem->batch * MAX_SEGMENTS - 1 - item / problem->num_kv_heads;
    const bwd_slot *slot = &job->slots[slot_index];
    const sa_stream stream = sa_stream_of(&job->args->fwd, NULL, slot_index / MAX_SEGMENTS, item % problem->num_kv_heads);
    const int64_t first = slot->first_row + stream.kv_head * slot_rows(slot);
    const int64_t end = slot->tokens.end * stream.group, step = ROW_TILES * job->tile_q;
    memset(job->dk + first * job->padded_k, 0, (size_t)(slot_rows(slot) * job->padded_k) * sizeof *job->dk);
    memset(job->dv + first * job->padded_v, 0, (size_t)(slot_rows(slot) * job->padded_v) * sizeof *job->dv);
    sa_enter(job->ops);
    for (int64_t r = slot->tokens.begin * stream.group; r < end; r += step)
        attend_row_tiles(job, worker, &stream, slot, r, sa_min(r + step, end));
    sa_leave(job->ops);
}

/* Pass 2: dK and dV of one key of every kv head. */
static void store_key(const bwd_job *job, const sa_stream *stream, const bwd_slot *slots, int64_t key, const float *slot_sums,
        const sinkattn_tensor *tensor, int64_t head_dim, float factor) {
    const sinkattn_problem *problem = &job->args->fwd.problem;
    static const float none[256];
    float sum[256] = {0};
    const float *total = none;
    for (int64_t s = 0; s < MAX_SEGMENTS; s++) {
        const int64_t row = slot_row(&slots[s], stream->kv_head, key);
        if (row < 0) continue;
        const float *part = slot_sums + row * sa_padded(head_dim);
        for (int64_t x = 0; total != none && x < head_dim; x++) sum[x] = total[x] + part[x];
        total = total == none ? part : sum;
    }
    char *gradient = sa_element(tensor, problem->dtype, sa_key_offset(stream, tensor, key));
    job->ops->store_row(total, factor, gradient, problem->dtype, head_dim);
}

static void keys_item(void *arg, int64_t item, int32_t worker) {
    const bwd_job *job = arg;
    (void)worker;
    const sinkattn_bwd_args *args = job->args;
    const sinkattn_problem *problem = &args->fwd.problem;
    const int64_t b = item / problem->num_kv_heads / MAX_SEGMENTS, quarter = item / problem->num_kv_heads % MAX_SEGMENTS;
    const sa_stream stream = sa_stream_of(&args->fwd, NULL, b, item % problem->num_kv_heads);
    const sa_range keys = sa_split_part(stream.sequence.k_len, MAX_SEGMENTS, quarter);
    const float scale = (float)sa_softmax_scale(problem);
    const bwd_slot *slots = &job->slots[b * MAX_SEGMENTS];
    for (int64_t key = keys.begin; key < keys.end; key++) {
        store_key(job, &stream, slots, key, job->dk, &args->dk, problem->head_dim, scale);
        store_key(job, &stream, slots, key, job->dv, &args->dv, sa_head_dim_v(problem), 1.0f);
    }
}

static void sink_item(void *arg, int64_t head, int32_t worker) {
    const bwd_job *job = arg;
    (void)worker;
    const sinkattn_fwd_args *args = &job->args->fwd;
    double sum = 0.0;
    for (int64_t b = 0; b < args->problem.batch; b++) {
        const sa_sequence sequence = sa_sequence_at(args, b);
        const float *terms = job->terms + sa_row_index(&args->problem, &sequence, head, 0);
        for (int64_t i = 0; i < sequence.q_len; i++) sum += terms[i];
    }
    sa_store(job->args->ds_aux, args->problem.s_aux_dtype, head, sum);
}

static void bwd_tail(const sinkattn_bwd_args *args) {
    const sinkattn_problem *problem = &args->fwd.problem;
    if (!problem->packed) return;
    const sa_range q = sa_packed_tail(args->fwd.cu_seqlens_q, problem->batch, problem->q_len);
    const sa_range k = sa_packed_tail(args->fwd.cu_seqlens_k, problem->batch, problem->k_len);
    sa_zero_rows(&args->dq, problem->dtype, q, problem->num_q_heads, problem->head_dim);
    sa_zero_rows(&args->dk, problem->dtype, k, problem->num_kv_heads, problem->head_dim);
    sa_zero_rows(&args->dv, problem->dtype, k, problem->num_kv_heads, sa_head_dim_v(problem));
}

static sinkattn_status bwd_run(const sa_cpu_ops *ops, const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    sinkattn_bwd_args args = *(const sinkattn_bwd_args *)arguments;
    const sinkattn_problem *problem = &args.fwd.problem;
    sa_scratch scratch = sa_scratch_of(context);
    sa_take_cu_seqlens(&scratch, &args.fwd);
    SA_TRY(sa_validate_cu_seqlens(&args.fwd));
    bwd_job job = take_job(&scratch, ops, ops->pack, problem, plan);
    job.args = &args;
    if (!args.ds_aux) job.terms = NULL;
    plan_slots(&job);
    const int64_t num_items = problem->batch * MAX_SEGMENTS * problem->num_kv_heads;
    sa_parallel_for(context, plan->workers, num_items, segment_item, &job);
    sa_parallel_for(context, plan->workers, num_items, keys_item, &job);
    if (job.terms) sa_parallel_for(context, plan->workers, problem->num_q_heads, sink_item, &job);
    bwd_tail(&args);
    return sa_ok();
}

SA_CPU_LAUNCHERS(bwd)
