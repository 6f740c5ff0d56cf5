/* SPDX-License-Identifier: Apache-2.0
 *
 * The tiled forward: docs/kernels/cpu.md. An item is some neighbouring row tiles of one kv head; it holds their Q^T and O^T in its
 * worker's memory and lets the key tiles pass, each made ready once and met by every row tile.
 */
#include "cpu/cpu_fwd.h"

static sa_row_state take_state(sa_scratch *scratch, const sinkattn_problem *problem, int64_t tile_q) {
    const sa_partials own = sa_take_partials(scratch, 2, tile_q, sa_head_dim_v(problem));
    sa_row_state state;
    memset(&state, 0, sizeof state);
    state.mask = sa_take_mask(scratch, tile_q);
    state.q_lanes = sa_take(scratch, problem->head_dim * tile_q * (int64_t)sizeof *state.q_lanes);
    state.chunk = sa_partial_at(&own, 0);
    state.total = sa_partial_at(&own, 1);
    return state;
}

/* Under a narrow window a row tile sees few keys, and products of long steps take them best all at once: a single key tile, which is also
 * the only chunk, has no end, and a row tile computes the part of it that it sees. The mask decides this for all rows of a problem, so a
 * row's bits stay its own. */
enum { AT_ONCE = 256 };

static bool sees_few_keys(const sinkattn_problem *problem, const sinkattn_variant_info *info) {
    const int64_t slack = info->tile_q + 32; /* as many tokens, and whole steps of keys: sa_tile_keys */
    return info->arch == SINKATTN_CPU_AMX_BF16 && problem->mask.num_sink_tokens == 0 && sa_window_keys(&problem->mask) <= AT_ONCE - slack;
}

static sa_attend take_attend(
        sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_variant_info *info, int64_t num_tiles) {
    const bool few_keys = sees_few_keys(problem, info);
    const int64_t group = problem->num_q_heads / problem->num_kv_heads, most_tokens = sa_ceil_div(num_tiles * info->tile_q, group) + 1;
    const int64_t row_tile_keys = few_keys ? AT_ONCE : info->tile_k, item_keys = few_keys ? AT_ONCE + most_tokens : info->tile_k;
    const int64_t tile_q = info->tile_q, float_bytes = (int64_t)sizeof(float);
    sa_attend attend;
    attend.ops = ops;
    attend.tile_q = tile_q;
    attend.tile_k = few_keys ? (int64_t)1 << 30 : info->tile_k;
    attend.chunk_tiles = few_keys ? 1 : SA_CPU_CHUNK / info->tile_k;
    attend.states = sa_take(scratch, num_tiles * (int64_t)sizeof *attend.states);
    for (int64_t i = 0; i < num_tiles; i++) {
        const sa_row_state state = take_state(scratch, problem, tile_q);
        if (attend.states) attend.states[i] = state;
    }
    attend.queries = sa_take_operand(scratch, problem->dtype, problem->head_dim, tile_q);
    attend.keys = sa_take_operand(scratch, problem->dtype, problem->head_dim, item_keys);
    attend.values = sa_take_operand(scratch, problem->dtype, sa_head_dim_v(problem), item_keys);
    attend.scores = sa_take(scratch, row_tile_keys * tile_q * float_bytes);
    attend.alpha = sa_take(scratch, tile_q * float_bytes);
    attend.out_rows = sa_take(scratch, tile_q * (int64_t)sizeof *attend.out_rows);
    return attend;
}

sa_attend *sa_take_workers(
        sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_plan *plan, int64_t num_tiles) {
    sa_attend *workers = sa_take(scratch, plan->workers * (int64_t)sizeof *workers);
    for (int32_t w = 0; w < plan->workers; w++) {
        const sa_attend attend = take_attend(scratch, ops, problem, sinkattn_variant(plan->variant), num_tiles);
        if (workers) workers[w] = attend;
    }
    return workers;
}

/* One row tile and the keys of a key tile that it sees, from key `first` of the operands. */
static void attend_state(sa_attend *attend, sa_row_state *state, const sa_stream *stream, sa_range keys, int64_t first) {
    const sa_cpu_ops *ops = attend->ops;
    const sinkattn_problem *problem = &stream->args->problem;
    const int64_t n = keys.end - keys.begin, lanes = state->rows.lanes;
    const sa_operand *k = &attend->keys, *v = &attend->values;
    const sa_product qk = {.m = n,
            .lanes = lanes,
            .k = problem->head_dim / ops->pack,
            .a = k->read + first * k->read_row,
            .a_row = k->read_row,
            .a_col = k->read_col,
            .b = state->q_lanes,
            .b_row = lanes,
            .c = attend->scores,
            .c_row = lanes,
            .join = SA_SET};
    ops->product(&qk);

    const sa_softmax_tile tile = {.scores = attend->scores,
            .row_stride = lanes,
            .lanes = lanes,
            .keys = n,
            .mask = sa_mask_keys(&state->mask, stream, &state->rows, keys, false),
            .scale = (float)(sa_softmax_scale(problem) * SA_LOG2_E),
            .pivot = state->chunk.pivot,
            .sum = state->chunk.sum,
            .alpha = attend->alpha};
    ops->softmax(&tile);

    const sa_cell *weights = (const sa_cell *)attend->scores;
    const sa_product pv = {.m = v->head_dim,
            .lanes = lanes,
            .k = sa_ceil_div(n, ops->pack),
            .a = v->read + first / ops->pack * v->read_col,
            .a_row = v->read_row,
            .a_col = v->read_col,
            .b = weights,
            .b_row = lanes * ops->pack,
            .b_low = ops->pack == 2 ? weights + lanes : NULL,
            .c = state->chunk.out,
            .c_row = lanes,
            .join = state->fresh ? SA_SET : SA_RESCALE,
            .beta = attend->alpha};
    ops->product(&pv);
    state->fresh = false;
    if (v->hidden) sa_add_hidden(v, first, ops, stream, &state->rows, keys, weights, ops->pack, state->chunk.out);
}

static void attend_tile(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows, int32_t t) {
    const sa_cpu_ops *ops = attend->ops;
    const sinkattn_fwd_args *args = stream->args;
    const sinkattn_problem *problem = &args->problem;
    const sa_range keys = sa_tile_keys(rows, t);
    const int64_t n = keys.end - keys.begin;
    sa_operand_keys(&attend->keys, stream, &args->k, keys);
    sa_operand_keys(&attend->values, stream, &args->v, keys);
    for (int64_t i = 0; i < n; i++) { /* tiles are read across rows, where no hardware prefetcher follows */
        sa_prefetch_row(&attend->values, problem->dtype, i);
        sa_prefetch_row(&attend->keys, problem->dtype, i);
    }
    sa_operand_cells(&attend->keys, ops, problem->dtype, n, args->k.row_stride);
    sa_operand_clean(&attend->values, ops, problem->dtype, n, !sa_all_visible(&stream->band, rows->tokens, keys));
    sa_operand_columns(&attend->values, ops, problem->dtype, n, args->v.row_stride);
    for (int64_t i = 0; i * attend->tile_q < rows->n; i++) {
        sa_row_state *state = &attend->states[i];
        if (!sa_has_tile(&state->rows, t)) continue;
        const sa_range seen = sa_tile_keys(&state->rows, t);
        attend_state(attend, state, stream, seen, seen.begin - keys.begin);
    }
}

static void begin_state(sa_attend *attend, sa_row_state *state, const sa_stream *stream) {
    const sinkattn_fwd_args *args = stream->args;
    const sinkattn_problem *problem = &args->problem;
    const sa_row_tile *rows = &state->rows;
    sa_mask_rows(&state->mask, stream, rows);
    sa_operand_queries(&attend->queries, stream, &args->q, rows);
    attend->ops->rows_to_lanes(attend->queries.rows, rows->n, problem->dtype, problem->head_dim, state->q_lanes, rows->lanes);
    state->first = true;
}

static void begin_chunk(sa_row_state *state) {
    for (int64_t lane = 0; lane < state->rows.lanes; lane++) {
        state->chunk.pivot[lane] = -INFINITY; /* NOLINT(clang-analyzer-core.NullDereference): a run has its workspace */
        state->chunk.sum[lane] = 0.0f;
    }
    state->fresh = true;
}

/* The first chunk joins nothing, so it is the total. */
static void end_chunk(const sa_attend *attend, sa_row_state *state, int64_t head_dim) {
    if (state->fresh) return;
    if (state->first) {
        const sa_partial empty = state->total;
        state->total = state->chunk;
        state->chunk = empty;
    } else {
        attend->ops->join(&state->total, &state->chunk, state->rows.lanes, head_dim);
    }
    state->first = false;
}

/* Rows that meet no keys. */
static void clear_total(sa_row_state *state, int64_t head_dim) {
    for (int64_t lane = 0; lane < state->rows.lanes; lane++) {
        state->total.pivot[lane] = -INFINITY;
        state->total.sum[lane] = 0.0f;
    }
    memset(state->total.out, 0, (size_t)(head_dim * state->rows.lanes) * sizeof *state->total.out);
}

static int64_t begin_rows(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows) {
    int64_t count = 0;
    for (int64_t done = 0; done < rows->n; done += attend->tile_q, count++) {
        const int64_t begin = rows->begin + done, end = rows->begin + sa_min(done + attend->tile_q, rows->n);
        sa_row_state *state = &attend->states[count];
        state->rows = sa_row_tile_of(stream, begin, end, attend->ops, attend->tile_k);
        begin_state(attend, state, stream);
    }
    return count;
}

/* The first tile at or after t that does not lie in t's chunk. */
static int32_t next_chunk(const sa_attend *attend, const sa_row_tile *rows, int32_t t) {
    const int64_t end = (t / attend->chunk_tiles + 1) * attend->chunk_tiles;
    return end < rows->tiles.end ? sa_key_tile_from(&rows->tiles, (int32_t)end) : rows->tiles.end;
}

#define SA_FOR_EACH_CHUNK(t, attend, rows) \
    for (int32_t t = sa_key_tile_from(&(rows)->tiles, 0); t < (rows)->tiles.end; t = next_chunk(attend, rows, t))

/* The tiles of one chunk, from its first on. */
static void attend_chunk(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows, int32_t t) {
    const int32_t end = next_chunk(attend, rows, t);
    for (; t < end; t = sa_key_tile_from(&rows->tiles, t + 1)) attend_tile(attend, stream, rows, t);
}

int64_t sa_count_chunks(const sa_attend *attend, const sa_row_tile *rows) {
    int64_t count = 0;
    SA_FOR_EACH_CHUNK(t, attend, rows) count++;
    return count;
}

void sa_attend_rows(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows) {
    const int64_t count = begin_rows(attend, stream, rows), head_dim = sa_head_dim_v(&stream->args->problem);
    SA_FOR_EACH_CHUNK(t, attend, rows) {
        for (int64_t i = 0; i < count; i++) begin_chunk(&attend->states[i]);
        attend_chunk(attend, stream, rows, t);
        for (int64_t i = 0; i < count; i++) end_chunk(attend, &attend->states[i], head_dim);
    }
    for (int64_t i = 0; i < count; i++)
        if (attend->states[i].first) clear_total(&attend->states[i], head_dim);
}

void sa_attend_chunks(
        sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows, sa_range chunks, const sa_partials *partials, int64_t first) {
    sa_row_state *state = attend->states;
    const sa_partial own = state->chunk;
    int64_t i = 0;
    begin_rows(attend, stream, rows);
    SA_FOR_EACH_CHUNK(t, attend, rows) {
        if (i >= chunks.begin && i < chunks.end) {
            state->chunk = sa_partial_at(partials, first + i);
            begin_chunk(state);
            attend_chunk(attend, stream, rows, t);
        }
        i++;
    }
    state->chunk = own;
}

void sa_attend_join(sa_attend *attend, const sa_row_tile *rows, const sa_partials *partials, int64_t first) {
    const int64_t head_dim = partials->head_dim, count = sa_count_chunks(attend, rows);
    sa_row_state *state = attend->states;
    state->rows = *rows;
    if (count == 0)
        clear_total(state, head_dim);
    else
        state->total = sa_partial_at(partials, first);
    for (int64_t i = 1; i < count; i++) {
        const sa_partial next = sa_partial_at(partials, first + i);
        attend->ops->join(&state->total, &next, rows->lanes, head_dim);
    }
}

/* Ends the rows, where the sink joins them, and stores them. */
static void store_state(sa_attend *attend, sa_row_state *state, const sa_stream *stream) {
    const sinkattn_fwd_args *args = stream->args;
    const sa_row_tile *rows = &state->rows;
    float *lse = args->lse, *lse_raw = args->lse_raw;
    sa_row row = sa_row_at(stream, rows->begin);
    for (int64_t lane = 0; lane < rows->n; lane++, row = sa_row_after(stream, row)) {
        const sa_row_end end = sa_end_row(state->total.pivot[lane] / SA_LOG2_E, state->total.sum[lane], sa_s_aux(args, row.head));
        lse[sa_stat_index(stream, row)] = (float)end.lse;
        if (lse_raw) lse_raw[sa_stat_index(stream, row)] = (float)end.lse_raw;
        attend->alpha[lane] = (float)end.factor;
        attend->out_rows[lane] = sa_query_row(stream, &args->out, row);
    }
    attend->ops->lanes_to_rows(
            state->total.out, rows->lanes, attend->alpha, attend->out_rows, rows->n, args->problem.dtype, sa_head_dim_v(&args->problem));
}

void sa_attend_store(sa_attend *attend, const sa_stream *stream, const sa_row_tile *rows) {
    for (int64_t i = 0; i * attend->tile_q < rows->n; i++) store_state(attend, &attend->states[i], stream);
}

typedef struct fwd_job {
    const sinkattn_fwd_args *args;
    const sinkattn_decode_args *cache; /* NULL: k and v are plain tensors */
    sa_attend *workers;
    int64_t item_rows, num_items; /* num_items of each kv head */
} fwd_job;

/* Row tiles an item: the more, the less is spent on K and V, but each worker should find some items. Leaves no trace in the bits. */
static int64_t tiles_an_item(const sinkattn_plan *plan) {
    enum { MOST = 8, ITEMS_A_WORKER = 8 };
    return sa_clamp(plan->num_items / ((int64_t)ITEMS_A_WORKER * plan->workers), 1, MOST);
}

static void fwd_item(void *arg, int64_t item, int32_t worker) {
    const fwd_job *job = arg;
    const sinkattn_problem *problem = &job->args->problem;
    const int64_t group = problem->num_q_heads / problem->num_kv_heads;
    int64_t tile;
    const int64_t b = sa_find_tile(job->args, group, job->item_rows, job->num_items - 1 - item / problem->num_kv_heads, &tile);
    const sa_stream stream = sa_stream_of(job->args, job->cache, b, item % problem->num_kv_heads);
    const int64_t begin = tile * job->item_rows, end = sa_min(begin + job->item_rows, sa_num_rows(&stream));
    if (begin >= end) return;
    sa_attend *attend = &job->workers[worker];
    const sa_row_tile rows = sa_row_tile_of(&stream, begin, end, attend->ops, attend->tile_k);
    sa_enter(attend->ops);
    sa_attend_rows(attend, &stream, &rows);
    sa_leave(attend->ops);
    sa_attend_store(attend, &stream, &rows);
}

void sa_count_all(sa_scratch *scratch, const sinkattn_problem *problem, const sinkattn_plan *plan) {
    sa_take_workers(scratch, NULL, problem, plan, tiles_an_item(plan));
}

int64_t sa_cpu_fwd_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    sa_scratch scratch = {NULL, 0};
    sinkattn_fwd_args args = {.problem = *problem};
    sa_take_cu_seqlens(&scratch, &args);
    sa_count_all(&scratch, problem, plan);
    return scratch.used + 64;
}

static void fwd_tail(const sinkattn_fwd_args *args) {
    const sinkattn_problem *problem = &args->problem;
    if (!problem->packed) return;
    const sa_range tail = sa_packed_tail(args->cu_seqlens_q, problem->batch, problem->q_len);
    sa_zero_rows(&args->out, problem->dtype, tail, problem->num_q_heads, sa_head_dim_v(problem));
    for (int64_t head = 0; head < problem->num_q_heads; head++)
        for (int64_t row = tail.begin; row < tail.end; row++) {
            ((float *)args->lse)[head * problem->q_len + row] = -INFINITY;
            if (args->lse_raw) ((float *)args->lse_raw)[head * problem->q_len + row] = -INFINITY;
        }
}

void sa_attend_all(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_fwd_args *args, const sinkattn_decode_args *cache,
        const sinkattn_plan *plan, const sinkattn_context *context) {
    const sinkattn_problem *problem = &args->problem;
    const int64_t item_rows = tiles_an_item(plan) * sinkattn_variant(plan->variant)->tile_q;
    fwd_job job = {args, cache, sa_take_workers(scratch, ops, problem, plan, tiles_an_item(plan)), item_rows,
            sa_num_tiles(problem, problem->num_q_heads / problem->num_kv_heads, item_rows)};
    sa_parallel_for(context, plan->workers, job.num_items * problem->num_kv_heads, fwd_item, &job);
    fwd_tail(args);
}

static sinkattn_status fwd_run(const sa_cpu_ops *ops, const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    sinkattn_fwd_args args = *(const sinkattn_fwd_args *)arguments;
    sa_scratch scratch = sa_scratch_of(context);
    sa_take_cu_seqlens(&scratch, &args);
    SA_TRY(sa_validate_cu_seqlens(&args));
    sa_attend_all(&scratch, ops, &args, NULL, plan, context);
    return sa_ok();
}

SA_CPU_LAUNCHERS(fwd)
