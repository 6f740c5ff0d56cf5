/* SPDX-License-Identifier: Apache-2.0
 *
 * Row tiles and key tiles: which rows and keys a step works on, where they lie, what each lane sees. Shared by forward, backward
 * and decode, so that a row meets its keys in the same tiles, in the same order, whichever of them computes it.
 */
#ifndef SA_CPU_TILE_H
#define SA_CPU_TILE_H

#include "cpu/cpu.h"

/* Workspace handed out in order, each piece on a cache line; with base NULL it only counts. */
typedef struct sa_scratch {
    char *base;
    int64_t used;
} sa_scratch;

static inline void *sa_take(sa_scratch *scratch, int64_t bytes) {
    void *piece = scratch->base ? scratch->base + scratch->used : NULL;
    scratch->used += sa_ceil_div(bytes, 64) * 64;
    return piece;
}

static inline sa_scratch sa_scratch_of(const sinkattn_context *context) {
    char *base = context->workspace;
    sa_scratch scratch = {base ? base + (64 - (uintptr_t)base % 64) % 64 : NULL, 0};
    return scratch;
}

/* Lengths of a call, copied before they are validated: then they are one thing throughout, whatever another thread writes. */
static inline const int32_t *sa_take_lengths(sa_scratch *scratch, const int32_t *lengths, int64_t count) {
    int32_t *copy = sa_take(scratch, count * (int64_t)sizeof *copy);
    for (int64_t i = 0; copy && i < count; i++) copy[i] = SA_READ_ONCE(lengths[i]);
    return copy;
}

static inline void sa_take_cu_seqlens(sa_scratch *scratch, sinkattn_fwd_args *args) {
    if (!args->problem.packed) return;
    args->cu_seqlens_q = sa_take_lengths(scratch, args->cu_seqlens_q, args->problem.batch + 1);
    if (args->problem.op != SINKATTN_DECODE) args->cu_seqlens_k = sa_take_lengths(scratch, args->cu_seqlens_k, args->problem.batch + 1);
}

static inline void sa_take_cache_seqlens(sa_scratch *scratch, sinkattn_decode_args *args) {
    const bool given = !scratch->base || args->cache_seqlens;
    if (given) args->cache_seqlens = sa_take_lengths(scratch, args->cache_seqlens, args->fwd.problem.batch);
}

/* One sequence and kv head. */
typedef struct sa_stream {
    const sinkattn_fwd_args *args;
    const sinkattn_decode_args *cache; /* NULL outside decode */
    int64_t b;                         /* the sequence's number, and its row of the cache or block_table */
    sa_sequence sequence;
    sa_band band;
    int64_t kv_head, first_head, group;
} sa_stream;

static inline sa_stream sa_stream_of(const sinkattn_fwd_args *args, const sinkattn_decode_args *cache, int64_t b, int64_t kv_head) {
    const sinkattn_problem *problem = &args->problem;
    sa_stream stream;
    stream.args = args;
    stream.cache = cache;
    stream.b = b;
    stream.sequence = cache ? sa_cached_sequence(cache, b) : sa_sequence_at(args, b);
    stream.band = sa_band_of(&problem->mask, stream.sequence.q_len, stream.sequence.k_len);
    stream.kv_head = kv_head;
    stream.group = problem->num_q_heads / problem->num_kv_heads;
    stream.first_head = kv_head * stream.group;
    return stream;
}

static inline int64_t sa_num_rows(const sa_stream *stream) { return stream->sequence.q_len * stream->group; }

static inline char *sa_element(const sinkattn_tensor *tensor, sinkattn_dtype dtype, int64_t offset) {
    return (char *)tensor->data + offset * sa_dtype_bytes(dtype);
}

/* Where row r of a stream lies. Rows are many and a division is long, so a loop goes from one to the next. */
typedef struct sa_row {
    int64_t token, head;
} sa_row;

static inline sa_row sa_row_at(const sa_stream *stream, int64_t r) {
    const sa_row row = {r / stream->group, stream->first_head + r % stream->group};
    return row;
}

static inline sa_row sa_row_after(const sa_stream *stream, sa_row row) {
    const bool last = row.head + 1 == stream->first_head + stream->group;
    const sa_row after = {row.token + last, last ? stream->first_head : row.head + 1};
    return after;
}

/* A row of a tensor shaped as q. */
static inline char *sa_query_row(const sa_stream *stream, const sinkattn_tensor *tensor, sa_row row) {
    const sa_sequence *at = &stream->sequence;
    const int64_t offset = sa_offset(tensor, at->batch, at->q_begin + row.token, row.head);
    return sa_element(tensor, stream->args->problem.dtype, offset);
}

/* Key j of a tensor shaped as k; -1 where its page is unmapped. */
static inline int64_t sa_key_offset(const sa_stream *stream, const sinkattn_tensor *tensor, int64_t j) {
    const sa_sequence *at = &stream->sequence;
    return stream->cache ? sa_cache_offset(stream->cache, tensor, stream->b, j, stream->kv_head)
                         : sa_offset(tensor, at->batch, at->k_begin + j, stream->kv_head);
}

static inline int64_t sa_stat_index(const sa_stream *stream, sa_row row) {
    return sa_row_index(&stream->args->problem, &stream->sequence, row.head, row.token);
}

/* Rows [begin, begin + n) of a stream, in `lanes` lanes, and the key tiles that they meet. */
typedef struct sa_row_tile {
    int64_t begin, n, lanes;
    int64_t key_step, k_len;
    sa_range tokens;
    sa_key_tiles tiles;
} sa_row_tile;

static inline sa_row_tile sa_row_tile_of(const sa_stream *stream, int64_t begin, int64_t end, const sa_cpu_ops *ops, int64_t tile_k) {
    sa_row_tile rows;
    rows.begin = begin;
    rows.n = end - begin;
    rows.lanes = sa_ceil_div(rows.n, SA_LANES_STEP) * SA_LANES_STEP;
    rows.key_step = ops->key_step;
    rows.k_len = stream->band.k_len;
    rows.tokens.begin = begin / stream->group;
    rows.tokens.end = (end - 1) / stream->group + 1;
    rows.tiles = sa_key_tiles_of(&stream->band, rows.tokens, tile_k);
    return rows;
}

/* The keys of tile t in whole steps, so that the keys which are added together are the same for every row. */
static inline sa_range sa_tile_keys(const sa_row_tile *rows, int32_t t) {
    sa_range keys = sa_key_tile(&rows->tiles, t);
    keys.begin -= keys.begin % rows->key_step;
    keys.end = sa_min(sa_ceil_div(keys.end, rows->key_step) * rows->key_step, rows->k_len);
    return keys;
}

static inline bool sa_has_tile(const sa_row_tile *rows, int32_t t) {
    return t < rows->tiles.sink_end || (t >= rows->tiles.begin && t < rows->tiles.end);
}

#define SA_FOR_EACH_TILE(t, rows) \
    for (int32_t t = sa_key_tile_from(&(rows)->tiles, 0); t < (rows)->tiles.end; t = sa_key_tile_from(&(rows)->tiles, t + 1))

/* What each lane of a row tile sees, for the whole sequence and for one key tile. */
typedef struct sa_tile_mask {
    int64_t *sink_end, *begin, *end;                  /* [tile_q] */
    int32_t *tile_sink_end, *tile_begin, *tile_count; /* [tile_q] */
} sa_tile_mask;

static inline sa_tile_mask sa_take_mask(sa_scratch *scratch, int64_t tile_q) {
    sa_tile_mask mask;
    mask.sink_end = sa_take(scratch, tile_q * (int64_t)sizeof *mask.sink_end);
    mask.begin = sa_take(scratch, tile_q * (int64_t)sizeof *mask.begin);
    mask.end = sa_take(scratch, tile_q * (int64_t)sizeof *mask.end);
    mask.tile_sink_end = sa_take(scratch, tile_q * (int64_t)sizeof *mask.tile_sink_end);
    mask.tile_begin = sa_take(scratch, tile_q * (int64_t)sizeof *mask.tile_begin);
    mask.tile_count = sa_take(scratch, tile_q * (int64_t)sizeof *mask.tile_count);
    return mask;
}

static inline void sa_mask_rows(const sa_tile_mask *mask, const sa_stream *stream, const sa_row_tile *rows) {
    int64_t lane = 0;
    for (int64_t i = rows->tokens.begin; i < rows->tokens.end; i++) {
        const sa_range keys = sa_row_band(&stream->band, i);
        const int64_t sink_end = sa_row_sink_end(&stream->band, i);
        const int64_t next = sa_min((i + 1) * stream->group - rows->begin, rows->n);
        for (; lane < next; lane++) {
            mask->begin[lane] = keys.begin;
            mask->end[lane] = keys.end;
            mask->sink_end[lane] = sink_end;
        }
    }
    for (; lane < rows->lanes; lane++) mask->begin[lane] = mask->end[lane] = mask->sink_end[lane] = 0;
}

/* lanes_meet: sums run over the lanes, so those past the last row must see nothing: a key's NaN or infinity would make theirs NaN. */
static inline sa_lane_mask sa_mask_keys(
        const sa_tile_mask *mask, const sa_stream *stream, const sa_row_tile *rows, sa_range keys, bool lanes_meet) {
    sa_lane_mask seen = {NULL, NULL, NULL, false};
    if (sa_all_visible(&stream->band, rows->tokens, keys) && (!lanes_meet || rows->n == rows->lanes)) return seen;
    const int64_t n = keys.end - keys.begin;
    for (int64_t lane = 0; lane < rows->lanes; lane++) {
        const int64_t begin = sa_clamp(mask->begin[lane] - keys.begin, 0, n);
        mask->tile_begin[lane] = (int32_t)begin;
        mask->tile_count[lane] = (int32_t)(sa_clamp(mask->end[lane] - keys.begin, begin, n) - begin);
        mask->tile_sink_end[lane] = (int32_t)sa_clamp(mask->sink_end[lane] - keys.begin, 0, n);
    }
    seen.sink_end = mask->tile_sink_end;
    seen.begin = mask->tile_begin;
    seen.count = mask->tile_count;
    seen.has_sink = keys.begin < stream->band.num_sink;
    return seen;
}

/* Rows as the products take them. Where a masked element would multiply a NaN or infinity, 0 * NaN must not reach lanes that do not
 * see it: such elements are zeroed in a copy, and the lanes that do see them get their term from sa_add_hidden. */
typedef struct sa_operand {
    int64_t head_dim;    /* of the tensor: of values it may be less than of keys */
    const void **rows;   /* [capacity] as given */
    const void **clean;  /* [capacity] with the copies in place of rows that have something to hide */
    char *copies;        /* [capacity][head_dim] of the tensors' dtype */
    sa_cell *cells;      /* [capacity][head_dim rounded up to lanes] */
    const sa_cell *read; /* where the last sa_operand_* left its result, a_row and a_col of a product */
    int64_t read_row, read_col;
    bool hidden;
} sa_operand;

static inline int64_t sa_padded(int64_t head_dim) { return sa_ceil_div(head_dim, SA_LANES_STEP) * SA_LANES_STEP; }

static inline sa_operand sa_take_operand(sa_scratch *scratch, sinkattn_dtype dtype, int64_t head_dim, int64_t capacity) {
    sa_operand operand;
    memset(&operand, 0, sizeof operand);
    operand.head_dim = head_dim;
    operand.rows = sa_take(scratch, capacity * (int64_t)sizeof *operand.rows);
    operand.clean = sa_take(scratch, capacity * (int64_t)sizeof *operand.clean);
    operand.copies = sa_take(scratch, capacity * head_dim * sa_dtype_bytes(dtype));
    operand.cells = sa_take(scratch, capacity * sa_padded(head_dim) * (int64_t)sizeof *operand.cells);
    return operand;
}

/* Keys of a page lie at one distance. An unmapped page among a tile's keys is one that no row sees, or one that was taken away after the
 * run had made sure of it. */
static inline void sa_operand_keys(sa_operand *operand, const sa_stream *stream, const sinkattn_tensor *tensor, sa_range keys) {
    static const uint64_t zeros[SA_MAX_HEAD_DIM / 2]; /* in fp32 */
    const sinkattn_problem *problem = &stream->args->problem;
    const int64_t row_bytes = tensor->row_stride * sa_dtype_bytes(problem->dtype);
    const int64_t page_size = stream->cache && stream->cache->block_table ? problem->page_size : keys.end;
    for (int64_t j = keys.begin; j < keys.end;) {
        const int64_t offset = sa_key_offset(stream, tensor, j), end = sa_min(keys.end, (j / page_size + 1) * page_size);
        const char *row = offset == -1 ? (const char *)zeros : sa_element(tensor, problem->dtype, offset);
        for (; j < end; j++, row += offset == -1 ? 0 : row_bytes) operand->rows[j - keys.begin] = row;
    }
}

static inline void sa_operand_queries(
        sa_operand *operand, const sa_stream *stream, const sinkattn_tensor *tensor, const sa_row_tile *rows) {
    sa_row row = sa_row_at(stream, rows->begin);
    for (int64_t r = 0; r < rows->n; r++, row = sa_row_after(stream, row)) operand->rows[r] = sa_query_row(stream, tensor, row);
}

static inline void sa_prefetch_row(const sa_operand *operand, sinkattn_dtype dtype, int64_t i) {
    for (int64_t x = 0; x < operand->head_dim * sa_dtype_bytes(dtype); x += 64) __builtin_prefetch((const char *)operand->rows[i] + x);
}

/* Fills clean; with may_hide false it is the rows themselves. */
static inline void sa_operand_clean(sa_operand *operand, const sa_cpu_ops *ops, sinkattn_dtype dtype, int64_t n, bool may_hide) {
    const int64_t row_bytes = operand->head_dim * sa_dtype_bytes(dtype);
    operand->hidden = false;
    for (int64_t i = 0; i < n; i++) {
        operand->clean[i] = operand->rows[i];
        if (!may_hide || ops->all_finite(operand->rows[i], dtype, operand->head_dim)) continue;
        char *copy = operand->copies + i * row_bytes;
        memcpy(copy, operand->rows[i], (size_t)row_bytes);
        for (int64_t x = 0; x < operand->head_dim; x++)
            if (!isfinite(sa_load(copy, dtype, x))) sa_store(copy, dtype, x, 0.0);
        operand->clean[i] = copy;
        operand->hidden = true;
    }
}

/* Native rows at one distance are read in place. */
static inline bool sa_operand_in_place(
        sa_operand *operand, const sa_cpu_ops *ops, sinkattn_dtype dtype, const void *const *rows, int64_t n, int64_t row_stride) {
    if (ops->pack == 1 && dtype != SINKATTN_FP32) return false;
    const int64_t row_bytes = n > 1 ? row_stride * sa_dtype_bytes(dtype) : 0; /* one row's stride may be anything */
    for (int64_t i = 1; i < n; i++)
        if ((const char *)rows[i] != (const char *)rows[0] + i * row_bytes) return false;
    operand->read = (const sa_cell *)rows[0];
    operand->read_row = row_bytes / (int64_t)sizeof(sa_cell);
    return true;
}

/* A[key][head_dim / pack], neighbours along head_dim. */
static inline void sa_operand_cells(sa_operand *operand, const sa_cpu_ops *ops, sinkattn_dtype dtype, int64_t n, int64_t row_stride) {
    operand->read_col = 1;
    if (sa_operand_in_place(operand, ops, dtype, operand->rows, n, row_stride)) return;
    operand->read = operand->cells;
    operand->read_row = operand->head_dim / ops->pack;
    ops->rows_to_cells(operand->rows, n, dtype, operand->head_dim, operand->cells, operand->read_row);
}

/* A[head_dim][key / pack], neighbours along the keys, from clean. */
static inline void sa_operand_columns(sa_operand *operand, const sa_cpu_ops *ops, sinkattn_dtype dtype, int64_t n, int64_t row_stride) {
    if (ops->rows_to_columns) {
        operand->read = operand->cells;
        operand->read_row = sa_padded(sa_ceil_div(n, ops->pack));
        operand->read_col = 1;
        ops->rows_to_columns(operand->clean, n, operand->head_dim, operand->cells, operand->read_row);
        return;
    }
    if (ops->pack != 1 || !sa_operand_in_place(operand, ops, dtype, operand->clean, n, row_stride)) {
        operand->read = operand->cells;
        operand->read_row = operand->head_dim;
        ops->rows_to_pairs(operand->clean, n, dtype, operand->head_dim, operand->cells, operand->read_row);
    }
    operand->read_col = operand->read_row;
    operand->read_row = 1;
}

/* An element of cells [rows / pack][row], neighbours along the rows. */
static inline float sa_pair_value(const sa_cell *cells, int64_t pack, int64_t row_stride, int64_t row, int64_t column) {
    const sa_cell cell = cells[row / pack * row_stride + column];
    float value;
    if (pack == 2) return sa_bf16_to_float((uint16_t)(row & 1 ? cell >> 16 : cell));
    memcpy(&value, &cell, sizeof value);
    return value;
}

/* out[dim][lane] += weight[key][lane] * element[key][dim] for the elements that sa_operand_clean hid, in the lanes that see the key. The
 * operand holds the keys from its row `first` on. A weight has a cell, or two in neighbouring rows, as sa_softmax_tile leaves it. */
static inline void sa_add_hidden(const sa_operand *operand, int64_t first, const sa_cpu_ops *ops, const sa_stream *stream,
        const sa_row_tile *rows, sa_range keys, const sa_cell *weights, int64_t cells_a_weight, float *out) {
    const sinkattn_problem *problem = &stream->args->problem;
    const int64_t lanes = rows->lanes, row_cells = lanes * cells_a_weight;
    for (int64_t key = 0; key < keys.end - keys.begin; key++) {
        if (operand->clean[first + key] == operand->rows[first + key]) continue;
        for (int64_t x = 0; x < operand->head_dim; x++) {
            const float element = (float)sa_load(operand->rows[first + key], problem->dtype, x);
            if (isfinite(element)) continue;
            for (int64_t lane = 0; lane < rows->n; lane++) {
                if (!sa_visible(&stream->band, (rows->begin + lane) / stream->group, keys.begin + key)) continue;
                float weight = sa_pair_value(weights, ops->pack, row_cells, key, lane);
                if (cells_a_weight == 2) weight += sa_pair_value(weights + lanes, ops->pack, row_cells, key, lane);
                out[x * lanes + lane] += weight * element;
            }
        }
    }
}

/* Outputs of rows past cu_seqlens[-1]: fill rows of a [total, num_heads, head_dim] tensor with zero. */
static inline void sa_zero_rows(const sinkattn_tensor *tensor, sinkattn_dtype dtype, sa_range rows, int64_t num_heads, int64_t head_dim) {
    for (int64_t row = rows.begin; row < rows.end; row++)
        for (int64_t head = 0; head < num_heads; head++)
            memset(sa_element(tensor, dtype, sa_offset(tensor, 0, row, head)), 0, (size_t)(head_dim * sa_dtype_bytes(dtype)));
}

/* The packed rows that belong to no sequence. */
static inline sa_range sa_packed_tail(const int32_t *cu_seqlens, int64_t batch, int64_t total) {
    sa_range tail = {sa_clamp(cu_seqlens[batch], 0, total), total};
    return tail;
}

/* Where tile `item` of `tile_rows` rows falls: tiles of sequence b start at rows_before(b) / tile_rows + b, which leaves each enough. */
static inline int64_t sa_find_tile(const sinkattn_fwd_args *args, int64_t rows_per_token, int64_t tile_rows, int64_t item, int64_t *tile) {
    const sinkattn_problem *problem = &args->problem;
    if (!problem->packed) {
        const int64_t tiles = sa_ceil_div(problem->q_len * rows_per_token, tile_rows);
        *tile = item % tiles;
        return item / tiles;
    }
    int64_t low = 0, high = problem->batch; /* the last b whose first tile is at most item */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (args->cu_seqlens_q[middle] * rows_per_token / tile_rows + middle <= item)
            low = middle;
        else
            high = middle;
    }
    *tile = item - (args->cu_seqlens_q[low] * rows_per_token / tile_rows + low);
    return low;
}

static inline int64_t sa_num_tiles(const sinkattn_problem *problem, int64_t rows_per_token, int64_t tile_rows) {
    if (problem->packed) return problem->batch ? problem->q_len * rows_per_token / tile_rows + problem->batch : 0;
    return problem->batch * sa_ceil_div(problem->q_len * rows_per_token, tile_rows);
}

#endif
