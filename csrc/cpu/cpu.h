/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the CPU backend share.
 *
 * Everything is one matrix product, C[m][lane] = sum_k A[m][k] * B[k][lane], and elementwise work on its result: docs/kernels/cpu.md.
 * A cell is the 4 bytes that a lane multiplies at a time: one fp32, or (pack 2) two bf16 neighbours along the reduction.
 * Rows of one kv head are numbered r = i * group + (h - first head of the group), so a tile may mix tokens and heads freely.
 */
#ifndef SA_CPU_H
#define SA_CPU_H

#include "core/core.h"
#include "core/layout.h"
#include "core/numerics.h"
#include "core/split.h"
#include "cpu/parallel.h"

enum { SA_LANES_STEP = 16, SA_MAX_LANES = 64 }; /* lane counts are multiples of one AVX-512 vector; tile_q is at most 64 */

typedef uint32_t sa_cell;

/* How a product joins C: C = AB, C + AB, or C * beta[lane] + AB. */
typedef enum sa_join { SA_SET, SA_ADD, SA_RESCALE } sa_join;

typedef struct sa_product {
    int64_t m, lanes, k; /* k counts cells */
    const sa_cell *a;    /* A[i][x] at a[i * a_row + x * a_col] */
    int64_t a_row, a_col;
    const sa_cell *b; /* [k][b_row], first `lanes` of each row used */
    int64_t b_row;
    const sa_cell *b_low; /* as b; NULL: none. C takes A (B + B_low), a cell of B and then the same of B_low at a time */
    float *c;             /* [m][c_row] */
    int64_t c_row;
    sa_join join;
    const float *beta; /* [lanes] */
} sa_product;

/* What each lane sees of a key tile, as key numbers from the tile's first: [0, sink_end) and [begin, begin + count). */
typedef struct sa_lane_mask {
    const int32_t *sink_end, *begin, *count; /* [lanes]; begin NULL: everything */
    bool has_sink;
} sa_lane_mask;

/* One tile of the forward, in place: scores [keys][row_stride] become P. Where cells are two bf16, so is a number
 * a little below each weight, and what it leaves: two keys' rows of scores become a row of cells of the former and a row of the latter. */
typedef struct sa_softmax_tile {
    float *scores;
    int64_t row_stride, lanes, keys;
    sa_lane_mask mask;
    float scale;                /* in units of log(2), as the pivots */
    float *pivot, *sum, *alpha; /* [lanes]; alpha, a power of two, is what the accumulated output must be multiplied by */
} sa_softmax_tile;

/* What some keys, a chunk or all of a row's, come to. */
typedef struct sa_partial {
    float *pivot, *sum; /* [lanes]; pivots are integers, in units of log(2), or -inf */
    float *out;         /* [head_dim_v][lanes], to be divided by sum */
} sa_partial;

/* One tile of the backward: P and dS from S and dP, both [keys][row_stride]. */
typedef struct sa_gradient_tile {
    float *scores, *dp;
    int64_t row_stride, lanes, keys;
    sa_lane_mask mask;
    float scale;
    const float *lse, *bias;   /* [lanes]; bias is g - delta */
    float *sink_sum;           /* [lanes] sum of P dP, NULL when no ds_aux is wanted */
    sa_cell *p_rows, *ds_rows; /* [keys][row_stride / pack]: neighbours are rows */
    sa_cell *ds_keys;          /* [keys / pack][row_stride]: neighbours are keys; pack 1: the same as ds_rows */
} sa_gradient_tile;

/* The primitives of one instruction set. */
typedef struct sa_cpu_ops {
    int64_t pack;                        /* values of the reduction in a cell */
    int64_t key_step;                    /* keys that a product adds together: a tile of keys begins at a multiple */
    void (*enter)(void), (*leave)(void); /* before and after the products of an item, on its thread; NULL: nothing to do */
    void (*product)(const sa_product *product);
    void (*softmax)(const sa_softmax_tile *tile);
    /* sa_join_pivots in every lane; `to` becomes both */
    void (*join)(const sa_partial *to, const sa_partial *next, int64_t lanes, int64_t head_dim);
    void (*gradient)(const sa_gradient_tile *tile);
    /* rows[n] pointers to head_dim values -> cells [head_dim / pack][lanes], rows n.. zero */
    void (*rows_to_lanes)(const void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells, int64_t lanes);
    /* rows[n] -> [n][row_cells] with neighbours along head_dim, tail of each row zero */
    void (*rows_to_cells)(const void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells, int64_t row_cells);
    /* rows[n] -> [ceil(n / pack)][row_cells] with neighbours along the rows, tails zero */
    void (*rows_to_pairs)(const void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim, sa_cell *cells, int64_t row_cells);
    /* rows[n] -> [head_dim][row_cells] with neighbours along the rows, tails zero; NULL where a product reads pairs as well */
    void (*rows_to_columns)(const void *const *rows, int64_t n, int64_t head_dim, sa_cell *cells, int64_t row_cells);
    /* [head_dim][lanes] * factor[lane] -> rows[n] */
    void (*lanes_to_rows)(
            const float *values, int64_t lanes, const float *factor, void *const *rows, int64_t n, sinkattn_dtype dtype, int64_t head_dim);
    /* values[head_dim] * factor -> row */
    void (*store_row)(const float *values, float factor, void *row, sinkattn_dtype dtype, int64_t head_dim);
    /* out[lane] = sum over cells a[k][lane] * b[k][lane] */
    void (*lane_dot)(const sa_cell *a, const sa_cell *b, int64_t k, int64_t lanes, float *out);
    bool (*all_finite)(const void *row, sinkattn_dtype dtype, int64_t n);
} sa_cpu_ops;

static inline void sa_enter(const sa_cpu_ops *ops) {
    if (ops->enter) ops->enter();
}

static inline void sa_leave(const sa_cpu_ops *ops) {
    if (ops->leave) ops->leave();
}

extern const sa_cpu_ops sa_ops_scalar;
#if defined(__x86_64__)
extern const sa_cpu_ops sa_ops_avx2, sa_ops_avx512, sa_ops_avx512_bf16, sa_ops_amx_bf16;
#elif defined(__aarch64__)
extern const sa_cpu_ops sa_ops_neon, sa_ops_neon_bf16;
#endif

/* A decode's out in NVFP4, where that is asked for: what follows when out is written. */
void sa_pack_nvfp4(const sinkattn_decode_args *args, const sinkattn_plan *plan, const sinkattn_context *context);

/* Defines the launcher of each tiled instruction set for one op: sa_<op>_cpu_<arch>. */
#define SA_CPU_LAUNCHER(op, arch) \
    sinkattn_status sa_##op##_cpu_##arch(const void *args, const sinkattn_plan *plan, const sinkattn_context *context); \
    sinkattn_status sa_##op##_cpu_##arch(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) { \
        return op##_run(&sa_ops_##arch, args, plan, context); \
    }
#if defined(__x86_64__)
#define SA_CPU_LAUNCHERS(op) \
    SA_CPU_LAUNCHER(op, scalar) \
    SA_CPU_LAUNCHER(op, avx2) SA_CPU_LAUNCHER(op, avx512) SA_CPU_LAUNCHER(op, avx512_bf16) SA_CPU_LAUNCHER(op, amx_bf16)
#elif defined(__aarch64__)
#define SA_CPU_LAUNCHERS(op) SA_CPU_LAUNCHER(op, scalar) SA_CPU_LAUNCHER(op, neon) SA_CPU_LAUNCHER(op, neon_bf16)
#else
#define SA_CPU_LAUNCHERS(op) SA_CPU_LAUNCHER(op, scalar)
#endif

/* Bytes of workspace a plan needs: what its run takes, counted by the same code. */
int64_t sa_cpu_fwd_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cpu_bwd_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cpu_decode_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);
int64_t sa_cpu_oracle_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan);

#endif
