/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows in and out: tensors' rows as cells of a product's operands, and sums back into rows. A part of cpu_rows.h, which includes it once
 * for each instruction set, behind its vectors.
 */

/* A row's cells [0, head_dim / SA_PACK), in vectors; head_dim is a multiple of 8, so the last vector may be part of one. */
SA_INLINE void sa_row_cells(const void *row, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells) {
    int64_t x = 0;
#if SA_PACK == 2
    (void)dtype;
    const sa_cell *from = row;
    for (; x + SA_VL <= head_dim / 2; x += SA_VL) *(sa_vu *)(cells + x) = sa_load_vu(from + x);
    for (; x < head_dim / 2; x += 4) memcpy(cells + x, from + x, 4 * sizeof *cells);
#else
    for (; x + SA_VL <= head_dim; x += SA_VL) sa_store_vf((float *)cells + x, sa_load_values(row, dtype, x));
    for (; x < head_dim; x++) {
        const float value = (float)sa_load(row, dtype, x);
        memcpy(cells + x, &value, sizeof value);
    }
#endif
}

/* sa_transpose_block: to[j * to_row + i] = from[i][j] for i < height, j < width, and zeros up to i = SA_TURN. */
#if SA_VL == 16
enum { SA_TURN = 16 };

/* to[j][i] = from[i][j] of 16 x 16 cells, in registers: pairs, fours, eights and sixteens of rows change places. */
SA_INLINE void sa_transpose_registers(__m512i *rows) {
    __m512i t[16];
    SA_UNROLL
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    SA_UNROLL
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    SA_UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    SA_UNROLL
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

SA_INLINE void sa_transpose_block(const sa_cell *const *from, int64_t height, int64_t width, sa_cell *to, int64_t to_row) {
    const __mmask16 in_row = (__mmask16)((1u << width) - 1u);
    __m512i rows[SA_TURN];
#pragma GCC unroll 16
    for (int64_t i = 0; i < SA_TURN; i++) rows[i] = i < height ? _mm512_maskz_loadu_epi32(in_row, from[i]) : _mm512_setzero_si512();
    sa_transpose_registers(rows);
#pragma GCC unroll 16
    for (int64_t j = 0; j < SA_TURN; j++)
        if (j < width) _mm512_storeu_si512(to + j * to_row, rows[j]);
}
#else
enum { SA_TURN = 4 }; /* which divides every height and width */

typedef uint32_t sa_quad __attribute__((vector_size(16), aligned(4), may_alias));

SA_INLINE void sa_transpose_block(const sa_cell *const *from, int64_t height, int64_t width, sa_cell *to, int64_t to_row) {
    (void)height;
    (void)width;
    const sa_quad a = *(const sa_quad *)from[0], b = *(const sa_quad *)from[1], c = *(const sa_quad *)from[2],
                  d = *(const sa_quad *)from[3];
    const sa_quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const sa_quad ba = __builtin_shufflevector(a, b, 2, 6, 3, 7), dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(sa_quad *)to = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    *(sa_quad *)(to + to_row) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    *(sa_quad *)(to + 2 * to_row) = __builtin_shufflevector(ba, dc, 0, 1, 4, 5);
    *(sa_quad *)(to + 3 * to_row) = __builtin_shufflevector(ba, dc, 2, 3, 6, 7);
}
#endif

static void sa_rows_to_lanes_run(
        const void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells, int64_t lanes) {
    const int64_t num_cells = head_dim / SA_PACK; /* a multiple of 4 */
    const bool native = SA_PACK == 2 || dtype == SINKATTN_FP32;
    sa_cell values[SA_TURN][SA_MAX_HEAD_DIM];
    for (int64_t lane = 0; lane < lanes; lane += SA_TURN) {
        const sa_cell *from[SA_TURN];
        for (int64_t i = 0; i < SA_TURN; i++) {
            from[i] = values[i];
            if (lane + i >= n)
                memset(values[i], 0, (size_t)num_cells * sizeof **values);
            else if (native)
                from[i] = rows[lane + i];
            else
                sa_row_cells(rows[lane + i], dtype, head_dim, values[i]);
            if (lane + i + SA_LANES_STEP < n) /* rows of heads lie apart, where no hardware prefetcher follows */
                for (int64_t x = 0; x < num_cells; x += 16) __builtin_prefetch((const sa_cell *)rows[lane + i + SA_LANES_STEP] + x);
        }
        for (int64_t x = 0; x < num_cells; x += SA_TURN) {
            const int64_t width = sa_min(SA_TURN, num_cells - x);
            sa_transpose_block(from, SA_TURN, width, cells + x * lanes + lane, lanes);
            for (int64_t i = 0; i < SA_TURN; i++) from[i] += width;
        }
    }
}

static void sa_rows_to_cells_run(
        const void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells, int64_t row_cells) {
    const int64_t num_cells = head_dim / SA_PACK;
    for (int64_t i = 0; i < n; i++, cells += row_cells) {
        sa_row_cells(rows[i], dtype, head_dim, cells);
        memset(cells + num_cells, 0, (size_t)(row_cells - num_cells) * sizeof *cells);
    }
}

static void sa_rows_to_pairs_run(
        const void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells, int64_t row_cells) {
#if SA_PACK == 1
    sa_rows_to_cells_run(rows, n, dtype, head_dim, cells, row_cells);
#else
    (void)dtype;
    for (int64_t i = 0; i < n; i += 2, cells += row_cells) {
        const uint16_t *first = rows[i], *second = i + 1 < n ? rows[i + 1] : NULL;
        int64_t x = 0;
        if (second)
            for (; x + SA_VL <= head_dim; x += SA_VL)
                *(sa_vu *)(cells + x) = __builtin_convertvector(*(const sa_vh *)(first + x), sa_vu) |
                                        (__builtin_convertvector(*(const sa_vh *)(second + x), sa_vu) << 16);
        for (; x < head_dim; x++) cells[x] = (sa_cell)first[x] | (second ? (sa_cell)second[x] << 16 : 0);
        memset(cells + head_dim, 0, (size_t)(row_cells - head_dim) * sizeof *cells);
    }
#endif
}

SA_INLINE void sa_store_values(const float *values, float factor, void *row, sinkattn_dtype dtype, int64_t head_dim, const bool stream) {
    (void)stream;
    int64_t x = 0;
    for (; x + SA_VL <= head_dim; x += SA_VL) {
        const sa_vf y = sa_load_vf(values + x) * factor;
        if (dtype == SINKATTN_FP32) sa_store_vf((float *)row + x, y);
#if SA_PACK == 2 && SA_VL == 16
        else if (stream)
            _mm256_stream_si256((__m256i *)((uint16_t *)row + x), (__m256i)SA_NARROW_BF16(y));
#endif
        else
            *(sa_vh *)((uint16_t *)row + x) = dtype == SINKATTN_BF16 ? SA_NARROW_BF16(y) : sa_narrow_fp16(y);
    }
    for (; x < head_dim; x++) sa_store(row, dtype, x, values[x] * factor);
}

static void sa_store_row_run(const float *values, float factor, void *row, sinkattn_dtype dtype, int64_t head_dim) {
    sa_store_values(values, factor, row, dtype, head_dim, false);
}

/* Many rows of whole lines are written past the caches, which saves reading those lines; few, as in decode, are soon read again. */
static bool sa_worth_streaming(void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim) {
    enum { LINE = 64, MANY = 64 };
    if (SA_PACK != 2 || SA_VL != 16 || n < MANY || head_dim * sa_dtype_bytes(dtype) % LINE) return false;
    uintptr_t ends = 0;
    for (int64_t i = 0; i < n; i++) ends |= (uintptr_t)rows[i];
    return ends % LINE == 0;
}

static void sa_lanes_to_rows_run(
        const float *values, int64_t lanes, const float *factor, void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim) {
    enum { ROW = SA_MAX_HEAD_DIM_V + SA_TURN }; /* head_dim need not be a multiple of SA_TURN */
    float block[SA_TURN][ROW];
    const int64_t line = 64 / sa_dtype_bytes(dtype);
    const bool stream = sa_worth_streaming(rows, n, dtype, head_dim);
    for (int64_t lane = 0; lane < n; lane += SA_TURN) {
        for (int64_t i = lane + SA_TURN; !stream && i < sa_min(lane + SA_TURN + SA_TURN, n); i++)
            for (int64_t x = 0; x < head_dim; x += line) __builtin_prefetch((const char *)rows[i] + x * sa_dtype_bytes(dtype), 1);
        for (int64_t x = 0; x < head_dim; x += SA_TURN) {
            const sa_cell *from[SA_TURN];
            for (int64_t i = 0; i < SA_TURN; i++) from[i] = (const sa_cell *)values + (x + i) * lanes + lane;
            sa_transpose_block(from, sa_min(SA_TURN, head_dim - x), SA_TURN, (sa_cell *)&block[0][x], ROW);
        }
        for (int64_t i = 0; i < sa_min(SA_TURN, n - lane); i++)
            sa_store_values(block[i], factor[lane + i], rows[lane + i], dtype, head_dim, stream);
    }
#if SA_VL == 16
    if (stream) _mm_sfence(); /* before another thread is told */
#endif
}
