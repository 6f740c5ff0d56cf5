/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the core, and the backends above it, know of each other. The backends' entry points are declared from
 * variants.def, so that the core links against them without including them.
 */
#ifndef SA_CORE_H
#define SA_CORE_H

#include "sinkattn.h"

/* status.c */
sinkattn_status sa_ok(void);
sinkattn_status sa_status(sinkattn_code code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *sa_dtype_name(sinkattn_dtype dtype);
const char *sa_op_name(sinkattn_op op);

/* Returns what a call says, unless it is SINKATTN_OK. Variadic: template arguments have commas. */
#define SA_TRY(...) \
    do { \
        const sinkattn_status sa_tried = (__VA_ARGS__); \
        if (sa_tried.code != SINKATTN_OK) return sa_tried; \
    } while (0)

#define SA_MAX_LEN (INT64_C(1) << 36) /* of one sequence: tiles of its keys are numbered in int32 */

/* Columns of a decode's keys and values: as many as one latent of 576 has, whose first 512 are its values. */
enum { SA_MAX_HEAD_DIM = 576, SA_MAX_HEAD_DIM_V = 512 };

/* validate.c: null, dtype, shape, stride, alignment, overlap, range, in this order. */
sinkattn_status sa_validate_problem(const sinkattn_problem *problem);
sinkattn_status sa_validate_mask(const sinkattn_mask *mask);
sinkattn_status sa_validate_fwd(const sinkattn_fwd_args *args);
sinkattn_status sa_validate_bwd(const sinkattn_bwd_args *args);
sinkattn_status sa_validate_decode(const sinkattn_decode_args *args);
sinkattn_status sa_validate_append(const sinkattn_append_args *args);

/* validate_lengths.c: lengths in host memory, for the CPU backend, before it starts. */
sinkattn_status sa_validate_cu_seqlens(const sinkattn_fwd_args *args);
sinkattn_status sa_validate_cache(const sinkattn_decode_args *args);
sinkattn_status sa_validate_slots(const sinkattn_append_args *args);
sinkattn_status sa_validate_room(const sinkattn_append_args *args);

/* plan.c: that a plan was made for this problem, and runs on this machine. */
sinkattn_status sa_validate_plan(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* cpu_append.c, append.cu */
sinkattn_status sa_append_cpu(const sinkattn_append_args *args);
sinkattn_status sa_append_cuda(const sinkattn_append_args *args, const sinkattn_context *context);

/* cpu_dispatch.c: the highest sinkattn_cpu_level of this CPU, whatever the environment says; the name of one. */
int32_t sa_cpu_level(void);
const char *sa_cpu_level_name(int32_t level);

/* variants.c: a row of variants.def. args is the op's argument struct. */
typedef sinkattn_status (*sa_launcher)(const void *args, const sinkattn_plan *plan, const sinkattn_context *context);
typedef int64_t (*sa_workspace)(const sinkattn_problem *problem, const sinkattn_plan *plan);

typedef struct sa_variant {
    sinkattn_variant_info info;
    sa_launcher run; /* NULL where it is not compiled */
    sa_workspace workspace_bytes;
    const char *(*refusal)(const sinkattn_problem *problem, const sinkattn_variant_info *info);
    bool roomy; /* past head_dim 128, a block takes more shared memory than some devices have: SA_ROOMY_VARIANT */
} sa_variant;

/* workspace.c and the CPU's kernels: bytes. refusals.c: what rows of variants.def ask for beside dtype and head_dim; NULL, or the one
 * reason why a row does not serve. */
#define SA_VARIANT(op, backend, arch, needs, dtypes, max_head_dim, tile_q, tile_k, workspace, serves) \
    int64_t sa_##workspace##_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan); \
    const char *sa_refusal_##serves(const sinkattn_problem *problem, const sinkattn_variant_info *info);
#include "variants.def"

/* Packed rows over a cache: no decode of a few rows, but the forward's, whose keys are never split. */
static inline bool sa_has_packed_rows(const sinkattn_problem *p) { return p->op == SINKATTN_DECODE && p->packed; }

/* Whether a forward's sequences differ, and only the device knows by how much: then blocks take tiles of rows from a counter. */
static inline bool sa_counts_items(const sinkattn_problem *p) { return p->packed || p->op == SINKATTN_DECODE; }

/* Whether a row has code for the device; whether a block of a problem's finds the shared memory that it takes there. */
bool sa_runs_on(const sinkattn_variant_info *info, const sinkattn_device *device);
bool sa_finds_room(const sa_variant *row, const sinkattn_problem *problem, const sinkattn_device *device);

/* Tiles of a kernel's tile_q rows, of all kv heads: a decode's streams. */
int64_t sa_num_query_tiles(const sinkattn_problem *problem, const sinkattn_variant_info *info);

/* A CUDA decode whose parts the kernel cuts by the lengths it finds, rather than each sequence into plan.num_splits. */
bool sa_is_balanced(const sinkattn_problem *problem, const sinkattn_plan *plan);

/* Chunks of SA_CPU_CHUNK keys that the rows of one sequence can touch. */
int64_t sa_most_chunks(const sinkattn_problem *problem);

const sa_variant *sa_variant_at(int32_t i);

#define SA_BIT(dtype) (1u << (dtype))

#endif
