/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for AMX: those of AVX-512 with bf16 dot products, and the product in tiles: docs/kernels/cpu.md.
 *
 * A block of 2 x 2 tiles takes 4 loads for 4 multiplications of 16 cycles.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#define SA_OPS sa_ops_amx_bf16
#define SA_VL 16
#define SA_BF16_CELLS
#define SA_PRODUCT sa_tile_product
#define SA_ENTER sa_tile_enter
#define SA_LEAVE sa_tile_leave
#define SA_ROWS_TO_COLUMNS sa_rows_to_columns_run
#define SA_KEY_STEP 32

#include "cpu/cpu.h"

enum { SA_TILE = 16, SA_TWO_TILES = 32 }; /* rows of a tile, and cells of a row */

/* Some compilers do not know what the tile intrinsics read, and would leave it unwritten. */
static inline void sa_memory_is_read(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

/* What LDTILECFG reads. */
typedef struct sa_tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} sa_tile_config;

/* C is rows x 16, A rows x cells, B cells x 16. */
static void sa_configure_tiles(int64_t rows, int64_t cells) {
    _Alignas(64) sa_tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const bool is_a = i == 4 || i == 5, is_b = i >= 6;
        config.rows[i] = (uint8_t)(is_b ? cells : rows);
        config.row_bytes[i] = (uint16_t)(4 * (is_a ? cells : SA_TILE));
    }
    sa_memory_is_read(&config);
    _tile_loadconfig(&config);
}

/* Between products, tiles are full. */
static void sa_tile_enter(void) { sa_configure_tiles(SA_TILE, SA_TILE); }
static void sa_tile_leave(void) { _tile_release(); }

/* rows x columns tiles of C at (i, lane) from tiles of A and B whose cells are [x, end), `step` at a time. */
static inline __attribute__((always_inline)) void sa_tile_block(const sa_product *g, int64_t i, int64_t lane, int64_t x, int64_t end,
        int64_t step, bool set, const int rows, const int columns, const bool low) {
    const size_t a_row = (size_t)g->a_row * sizeof *g->a, b_row = (size_t)g->b_row * sizeof *g->b, c_row = (size_t)g->c_row * sizeof *g->c;
    float *c = g->c + i * g->c_row + lane, *c_below = c + SA_TILE * g->c_row;
    if (set) {
        _tile_zero(0);
        if (columns == 2) _tile_zero(1);
        if (rows == 2) _tile_zero(2);
        if (rows == 2 && columns == 2) _tile_zero(3);
    } else {
        _tile_loadd(0, c, c_row);
        if (columns == 2) _tile_loadd(1, c + SA_TILE, c_row);
        if (rows == 2) _tile_loadd(2, c_below, c_row);
        if (rows == 2 && columns == 2) _tile_loadd(3, c_below + SA_TILE, c_row);
    }
    for (; x < end; x += step) {
        const sa_cell *a = g->a + i * g->a_row + x, *b = g->b + x * g->b_row + lane;
        _tile_loadd(6, b, b_row);
        _tile_loadd(4, a, a_row);
        _tile_dpbf16ps(0, 4, 6);
        if (columns == 2) {
            _tile_loadd(7, b + SA_TILE, b_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (rows == 2) {
            _tile_loadd(5, a + SA_TILE * g->a_row, a_row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (rows == 2 && columns == 2) _tile_dpbf16ps(3, 5, 7);
        if (!low) continue;
        const sa_cell *b_low = g->b_low + x * g->b_row + lane;
        _tile_loadd(6, b_low, b_row);
        _tile_dpbf16ps(0, 4, 6);
        if (rows == 2) _tile_dpbf16ps(2, 5, 6);
        if (columns == 2) {
            _tile_loadd(7, b_low + SA_TILE, b_row);
            _tile_dpbf16ps(1, 4, 7);
            if (rows == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_row);
    if (columns == 2) _tile_stored(1, c + SA_TILE, c_row);
    if (rows == 2) _tile_stored(2, c_below, c_row);
    if (rows == 2 && columns == 2) _tile_stored(3, c_below + SA_TILE, c_row);
}

/* Rows [begin, end) of C, all of them full tiles or one that is not, over cells that are the same. */
static inline __attribute__((always_inline)) void sa_tile_part(
        const sa_product *g, sa_range rows, sa_range cells, bool set, const bool low) {
    const int64_t height = sa_min(SA_TILE, rows.end - rows.begin), step = sa_min(SA_TILE, cells.end - cells.begin);
    if (height < SA_TILE || step < SA_TILE) sa_configure_tiles(height, step);
    for (int64_t i = rows.begin; i < rows.end; i += SA_TWO_TILES) {
        const bool two = i + SA_TILE < rows.end;
        int64_t lane = 0;
        for (; lane + SA_TILE < g->lanes; lane += SA_TWO_TILES) {
            if (two)
                sa_tile_block(g, i, lane, cells.begin, cells.end, step, set, 2, 2, low);
            else
                sa_tile_block(g, i, lane, cells.begin, cells.end, step, set, 1, 2, low);
        }
        if (lane == g->lanes) continue;
        if (two)
            sa_tile_block(g, i, lane, cells.begin, cells.end, step, set, 2, 1, low);
        else
            sa_tile_block(g, i, lane, cells.begin, cells.end, step, set, 1, 1, low);
    }
}

static void sa_tile_rescale(const sa_product *g) {
    for (int64_t lane = 0; lane < g->lanes; lane += SA_TILE) {
        const __m512 beta = _mm512_loadu_ps(g->beta + lane);
        if (_mm512_cmp_ps_mask(beta, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) continue;
        float *c = g->c + lane;
        for (int64_t i = 0; i < g->m; i++, c += g->c_row) _mm512_storeu_ps(c, _mm512_mul_ps(_mm512_loadu_ps(c), beta));
    }
}

/* Full tiles, then what is left of the rows and of the reduction, which takes tiles of another shape. */
static void sa_tile_product(const sa_product *g) {
    const sa_range rows[2] = {{0, g->m / SA_TILE * SA_TILE}, {g->m / SA_TILE * SA_TILE, g->m}};
    const sa_range cells[2] = {{0, g->k / SA_TILE * SA_TILE}, {g->k / SA_TILE * SA_TILE, g->k}};
    if (g->join == SA_RESCALE) sa_tile_rescale(g);
    sa_memory_is_read(g->c);
    for (int r = 0; r < 2; r++) {
        bool set = g->join == SA_SET;
        for (int x = 0; x < 2; x++) {
            if (rows[r].begin == rows[r].end || cells[x].begin == cells[x].end) continue;
            if (g->b_low)
                sa_tile_part(g, rows[r], cells[x], set, true);
            else
                sa_tile_part(g, rows[r], cells[x], set, false);
            set = false;
        }
    }
    if (g->m % SA_TILE || g->k % SA_TILE) sa_tile_enter();
}

static void sa_rows_to_columns_run(const void *const *rows, int64_t n, int64_t head_dim, sa_cell *cells, int64_t row_cells);

#include "cpu/cpu_rows.h"

/* rows[n] -> [head_dim][row_cells], neighbours along the rows, as A of the product. */
static void sa_rows_to_columns_run(const void *const *rows, int64_t n, int64_t head_dim, sa_cell *cells, int64_t row_cells) {
    for (int64_t x = 0; x < head_dim; x += 16) {
        const int64_t width = sa_min(16, head_dim - x);
        const __mmask16 in_row = (__mmask16)((1u << width) - 1u);
        for (int64_t i = 0; i < n; i += 32) {
            __m512i tile[16];
#pragma GCC unroll 16
            for (int64_t j = 0; j < 16; j++) {
                const int64_t r = i + 2 * j;
                const __m256i first = r < n ? _mm256_maskz_loadu_epi16(in_row, (const uint16_t *)rows[r] + x) : _mm256_setzero_si256();
                const __m256i second =
                        r + 1 < n ? _mm256_maskz_loadu_epi16(in_row, (const uint16_t *)rows[r + 1] + x) : _mm256_setzero_si256();
                tile[j] = _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
            }
            sa_transpose_registers(tile);
#pragma GCC unroll 16
            for (int64_t j = 0; j < 16; j++)
                if (j < width) _mm512_storeu_si512(cells + (x + j) * row_cells + i / 2, tile[j]);
        }
    }
}
#else
typedef int sa_no_amx_bf16;
#endif
