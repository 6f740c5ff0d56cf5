/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for NEON with bf16: a cell is two bf16, dot products of cells are one instruction (BFDOT), and the product is made of
 *
 *     C[2][2] += A[2][2 cells] . B[2 cells][2]
 *
 * (BFMMLA). Its A is two rows' neighbouring cells, its B two lanes' cells of two rows of B, which zipping those rows gives. A block of
 * 8 x 8 keeps 16 registers of C and takes 4 of B and one of A at a time.
 */
#if defined(__aarch64__)
#include <arm_neon.h>

#define SA_OPS sa_ops_neon_bf16
#define SA_VL 4
#define SA_BF16_CELLS
#define SA_PRODUCT sa_quad_product
#define SA_ENTER NULL
#define SA_LEAVE NULL
#define SA_ROWS_TO_COLUMNS NULL
#define SA_KEY_STEP 4

#include "cpu/cpu.h"

enum { SA_QUAD_ROWS = 8, SA_QUAD_LANES = 8 };

/* Cells x and x + 1, zero past the last, of rows i and i + 1; a last row without a neighbour is taken twice. */
static inline __attribute__((always_inline)) bfloat16x8_t sa_quad_left(const sa_product *g, int64_t i, int64_t x, const bool packed) {
    const sa_cell *first = g->a + i * g->a_row + x * g->a_col, *second = i + 1 < g->m ? first + g->a_row : first;
    if (packed) return vreinterpretq_bf16_u32(vcombine_u32(vld1_u32(first), vld1_u32(second)));
    const bool two = x + 1 < g->k;
    const uint32x4_t cells = {first[0], two ? first[g->a_col] : 0, second[0], two ? second[g->a_col] : 0};
    return vreinterpretq_bf16_u32(cells);
}

static inline __attribute__((always_inline)) void sa_quad_join(const sa_product *g, int64_t i, int64_t lane, float32x4_t sum) {
    float *c = g->c + i * g->c_row + lane;
    if (g->join == SA_ADD) sum = vaddq_f32(vld1q_f32(c), sum);
    if (g->join == SA_RESCALE) sum = vfmaq_f32(sum, vld1q_f32(c), vld1q_f32(g->beta + lane));
    vst1q_f32(c, sum);
}

/* C += A . B over two cells of A, of the lanes that a block has. */
static inline __attribute__((always_inline)) void sa_quad_step(
        float32x4_t sum[][SA_QUAD_LANES / 2], const sa_product *g, const sa_cell *b, int64_t i, int64_t x, const int pairs) {
    const bool two = x + 1 < g->k, packed = two && g->a_col == 1;
    bfloat16x8_t right[SA_QUAD_LANES / 2];
    for (int half = 0; half < 2; half++, b += 4) {
        const uint32x4_t above = vld1q_u32(b), below = two ? vld1q_u32(b + g->b_row) : vdupq_n_u32(0);
        right[2 * half] = vreinterpretq_bf16_u32(vzip1q_u32(above, below));
        right[2 * half + 1] = vreinterpretq_bf16_u32(vzip2q_u32(above, below));
    }
    for (int r = 0; r < pairs; r++) {
        const bfloat16x8_t left = packed ? sa_quad_left(g, i + 2 * r, x, true) : sa_quad_left(g, i + 2 * r, x, false);
        for (int l = 0; l < SA_QUAD_LANES / 2; l++) sum[r][l] = vbfmmlaq_f32(sum[r][l], left, right[l]);
    }
}

/* Rows i to i + 2 * pairs of C, of which the last may lie past the end. */
static inline __attribute__((always_inline)) void sa_quad_block(const sa_product *g, int64_t i, int64_t lane, const int pairs) {
    float32x4_t sum[SA_QUAD_ROWS / 2][SA_QUAD_LANES / 2];
    for (int r = 0; r < pairs; r++)
        for (int l = 0; l < SA_QUAD_LANES / 2; l++) sum[r][l] = vdupq_n_f32(0.0f);
    for (int64_t x = 0; x < g->k; x += 2) {
        sa_quad_step(sum, g, g->b + x * g->b_row + lane, i, x, pairs);
        if (g->b_low) sa_quad_step(sum, g, g->b_low + x * g->b_row + lane, i, x, pairs);
    }
    for (int r = 0; r < pairs; r++)
        for (int l = 0; l < SA_QUAD_LANES / 2; l += 2) {
            const float32x4_t one = sum[r][l], next = sum[r][l + 1];
            sa_quad_join(g, i + 2 * r, lane + 2 * l, vcombine_f32(vget_low_f32(one), vget_low_f32(next)));
            if (i + 2 * r + 1 < g->m) sa_quad_join(g, i + 2 * r + 1, lane + 2 * l, vcombine_f32(vget_high_f32(one), vget_high_f32(next)));
        }
}

static void sa_quad_product(const sa_product *g) {
    for (int64_t lane = 0; lane < g->lanes; lane += SA_QUAD_LANES) {
        int64_t i = 0;
        for (; i + SA_QUAD_ROWS <= g->m; i += SA_QUAD_ROWS) sa_quad_block(g, i, lane, SA_QUAD_ROWS / 2);
        for (; i < g->m; i += 2) sa_quad_block(g, i, lane, 1);
    }
}

#include "cpu/cpu_rows.h"
#else
typedef int sa_no_neon_bf16;
#endif
