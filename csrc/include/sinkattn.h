/* SPDX-License-Identifier: Apache-2.0
 *
 * sinkattn: attention with learned sinks. The public C API.
 *
 * Use: fill a sinkattn_problem (sizes only), let sinkattn_make_plan choose a kernel and say how much workspace it needs, fill the
 * argument struct of the operation, run it. The library allocates nothing, keeps nothing between calls, never prints, never exits.
 * Every struct is a POD meant for designated initialisers: a field left out is zero, and zero means off, absent or default.
 *
 * Rows are queries, [.., num_q_heads, head_dim]; keys and values have num_kv_heads heads, query head h reads
 * kv head h / (num_q_heads / num_kv_heads). Values, and with them out, may be narrower than keys: head_dim_v columns.
 * All sizes and strides count elements and are int64, but for head_dim_v; sizes in bytes end in _bytes.
 */
#ifndef SINKATTN_H
#define SINKATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SINKATTN_VERSION "0.1.0"

/* Of every function below; the shared library exports no other name. */
#ifdef __GNUC__
#define SINKATTN_API __attribute__((visibility("default")))
#else
#define SINKATTN_API
#endif

typedef enum sinkattn_code {
    SINKATTN_OK = 0,
    SINKATTN_INVALID = 1,     /* an argument breaks a rule of this interface */
    SINKATTN_UNSUPPORTED = 2, /* a legal request that no compiled kernel serves */
    SINKATTN_DEVICE = 3       /* the device or its driver failed */
} sinkattn_code;

typedef struct sinkattn_status {
    sinkattn_code code;
    char message[508]; /* one sentence: the argument, the value got, the rule; empty when code is SINKATTN_OK */
} sinkattn_status;

typedef enum sinkattn_dtype {
    SINKATTN_NO_DTYPE = 0,
    SINKATTN_BF16 = 1,
    SINKATTN_FP16 = 2,
    SINKATTN_FP32 = 3,
    SINKATTN_FP64 = 4
} sinkattn_dtype;

typedef enum sinkattn_op { SINKATTN_FWD = 0, SINKATTN_BWD = 1, SINKATTN_DECODE = 2 } sinkattn_op;

/* Row i stands at position p = i + (k_len - q_len) and sees key j when
 *     (!has_right || j <= p + right)  and  (!has_left || j >= p - left || j < num_sink_tokens).
 * {0} sees everything, {.has_right = true} is causal, {.has_left = true, .left = 127, .has_right = true} a causal window of 128. */
typedef struct sinkattn_mask {
    bool has_left, has_right;
    int64_t left, right; /* both count from the row itself, which is inside */
    int64_t num_sink_tokens;
} sinkattn_mask;

typedef struct sinkattn_problem {
    sinkattn_op op;
    sinkattn_dtype dtype;       /* of q, k, v, out and their gradients */
    sinkattn_dtype s_aux_dtype; /* of s_aux and its gradient; SINKATTN_NO_DTYPE: no sink */
    bool packed;                /* sequences lie end to end, bounded by cu_seqlens; decode: their rows do, keys lie in the cache */
    int64_t batch;              /* sequences */
    int64_t num_q_heads, num_kv_heads, head_dim; /* head_dim: of q and k; a multiple of 8 up to 256, of a decode up to 576 */
    int64_t q_len, k_len;         /* rows of q and k a sequence; packed: rows of the whole tensor; decode: k_len is the cache's capacity */
    int64_t page_size, num_pages; /* decode from a paged cache; page_size 0: the cache is contiguous */
    double softmax_scale;         /* 0: head_dim ** -0.5 */
    sinkattn_mask mask;
    int64_t num_splits; /* decode: parts a sequence's keys are cut into; 0: the planner's choice; -N: N, merged by a kernel of their own;
                           packed: 0 or 1 */
    bool invariant;     /* decode: the bits of the prefill row, whatever the batch */
    bool extras;        /* decode: it is given host pages, or nvfp4 */
    int32_t head_dim_v; /* columns of v, out and their gradients, at most head_dim and 512; 0: head_dim */
} sinkattn_problem;

typedef enum sinkattn_backend { SINKATTN_CPU = 0, SINKATTN_CUDA = 1 } sinkattn_backend;

typedef enum sinkattn_cpu_level {
    SINKATTN_CPU_ORACLE = 0, /* double precision, three loops; serves fp64 */
    SINKATTN_CPU_SCALAR = 1,
    SINKATTN_CPU_AVX2 = 2,
    SINKATTN_CPU_AVX512 = 3,
    SINKATTN_CPU_AVX512_BF16 = 4,
    SINKATTN_CPU_AMX_BF16 = 5,
    SINKATTN_CPU_NEON = 2, /* aarch64 has levels of its own from 2 on */
    SINKATTN_CPU_NEON_BF16 = 3
} sinkattn_cpu_level;

typedef struct sinkattn_device {
    sinkattn_backend backend;
    int32_t arch;    /* CPU: the highest sinkattn_cpu_level usable; CUDA: 10 * major + minor of the compute capability */
    int32_t workers; /* CPU: threads; CUDA: multiprocessors */
    char name[64];
} sinkattn_device;

/* What this machine's CPU can do. SINKATTN_CPU_LEVEL = oracle | scalar | avx2 | avx512 | avx512_bf16 | amx_bf16, on aarch64
 * oracle | scalar | neon | neon_bf16, in the environment lowers the level; a name that is unknown, or above what the CPU has, is an error.
 */
SINKATTN_API sinkattn_status sinkattn_query_cpu(int32_t workers, sinkattn_device *device);

/* A CUDA device by ordinal; SINKATTN_UNSUPPORTED when built without nvcc, SINKATTN_DEVICE when no driver or device answers.
 * SINKATTN_CUDA_ARCH in the environment, from 80 to the device's own, lowers the compute capability: 80 runs the sm_80 kernels. */
SINKATTN_API sinkattn_status sinkattn_query_cuda(int32_t ordinal, sinkattn_device *device);

/* One kernel. A plan may name one that is not compiled, which cannot be run. */
typedef struct sinkattn_variant_info {
    const char *name;
    sinkattn_op op;
    sinkattn_backend backend;
    int32_t arch;           /* the least sinkattn_device.arch that runs it */
    uint32_t dtypes;        /* bit 1 << sinkattn_dtype for each dtype served */
    int64_t max_head_dim;   /* head_dim is a multiple of 8 up to this */
    int64_t tile_q, tile_k; /* rows and keys a tile; 0: untiled */
    bool compiled;          /* into this library */
} sinkattn_variant_info;

/* The i-th kernel, NULL past the last. */
SINKATTN_API const sinkattn_variant_info *sinkattn_variant(int32_t i);

typedef struct sinkattn_plan {
    int32_t variant; /* index for sinkattn_variant */
    int32_t workers;
    int64_t num_splits;      /* decode: parts a sequence, where the reason says "up to": as its length asks for; 1 elsewhere */
    int64_t num_items;       /* work items of the first pass: (sequence, kv head, tile or part) */
    int64_t workspace_bytes; /* what the run needs in sinkattn_context.workspace */
    char reason[640];        /* why this variant and these splits, and why no better variant */
} sinkattn_plan;

/* Pure: depends on its arguments only, so it is testable for devices that are not there. */
SINKATTN_API sinkattn_status sinkattn_make_plan(const sinkattn_problem *problem, const sinkattn_device *device, sinkattn_plan *plan);

/* Element (b, row, head, x) lies at data[b * batch_stride + row * row_stride + head * head_stride + x]. batch_stride steps over
 * sequences, over pages in a paged cache, and is unused when packed. Rows are 16-byte aligned. */
typedef struct sinkattn_tensor {
    void *data;
    int64_t batch_stride, row_stride, head_stride;
} sinkattn_tensor;

typedef struct sinkattn_fwd_args {
    sinkattn_problem problem;
    sinkattn_tensor q, k, v; /* read */
    sinkattn_tensor out;     /* forward and decode write it, backward reads it */
    void *lse;               /* contiguous [batch, num_q_heads, q_len], packed [num_q_heads, total_q]; fp32, fp64 when dtype is; as out */
    void *lse_raw;           /* as lse, written by forward and decode: the LSE over the keys alone; NULL: not wanted */
    const void *s_aux;       /* [num_q_heads] logits in natural-log units, never scaled; NULL with s_aux_dtype 0 */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* packed: [batch + 1] row offsets, from 0, not decreasing; decode: no cu_seqlens_k */
} sinkattn_fwd_args;

typedef struct sinkattn_bwd_args {
    sinkattn_fwd_args fwd;
    sinkattn_tensor dout;       /* read */
    const void *dlse;           /* as lse; NULL: zero */
    sinkattn_tensor dq, dk, dv; /* written */
    void *ds_aux; /* [num_q_heads] of s_aux_dtype, written; NULL with s_aux NULL: s_aux is frozen or absent, nothing is spent on it */
} sinkattn_bwd_args;

/* A decode's out once more, in NVFP4: 16 columns share a scale, and a column is value * scale / global_scale. Both are contiguous. Not of
 * packed rows. */
typedef struct sinkattn_nvfp4 {
    uint8_t *values;     /* [batch, q_len, num_q_heads, head_dim_v / 2] e2m1, two a byte, the first in its low half; NULL: not wanted */
    uint8_t *scales;     /* [batch, q_len, num_q_heads, head_dim_v / 16] e4m3; head_dim_v is a multiple of 16 */
    double global_scale; /* 0: 1 */
} sinkattn_nvfp4;

/* More pages of a paged cache, in memory that the device reads where it lies: pinned host memory. block_table names them from
 * problem.num_pages on. */
typedef struct sinkattn_tier {
    sinkattn_tensor k, v; /* [num_pages, page_size, ..], strides as the cache's */
    int64_t num_pages;    /* 0: there is no second tier */
} sinkattn_tier;

/* Values may be columns of the keys, as of one latent: then fwd.v points into fwd.k and has its strides.
 *
 * The rows of a sequence stand at the end of its keys in use. Packed, each sequence may have any number of rows, chunks of a prefill beside
 * single ones, with the bits of a forward of that sequence; on CUDA without a second tier. */
typedef struct sinkattn_decode_args {
    sinkattn_fwd_args fwd;        /* k, v are the cache: [batch, k_len, ..] or, with block_table, [num_pages, page_size, ..] */
    const int32_t *cache_seqlens; /* [batch] keys in use; NULL: k_len each */
    const int32_t *block_table;   /* [batch, max_pages] page numbers, k_len == max_pages * page_size; NULL: contiguous */
    int64_t block_table_stride;
    sinkattn_tier host;
    sinkattn_nvfp4 nvfp4;
} sinkattn_decode_args;

/* New keys and values, for a cache that a decode reads: behind the keys in use of each sequence or, packed, wherever slot_mapping says. */
typedef struct sinkattn_append_args {
    sinkattn_decode_args cache; /* fwd.k and fwd.v are written, q_len rows a sequence, behind the cache_seqlens (not NULL) keys in use; of
                                   fwd the problem and these two are looked at */
    sinkattn_tensor k, v;       /* [batch, q_len, num_kv_heads, head_dim], v with head_dim_v, read; v and cache.fwd.v zero: keys alone,
                                   for values that are columns of them */
    int32_t *cache_seqlens;     /* [batch] keys in use afterwards, written; not where they are read from */
    const int64_t
            *slot_mapping; /* packed: [q_len], row i of k and v goes to row slot % page_size of page slot / page_size; negative: nowhere.
                              k and v are [q_len, ..], all other lengths and pages NULL; a contiguous cache is pages of its rows */
} sinkattn_append_args;

/* Calls task(arg, w) for every w in [0, workers), at once or one after another, and returns when all have returned. */
typedef struct sinkattn_executor {
    void (*run)(void *self, int32_t workers, void (*task)(void *arg, int32_t worker), void *arg);
    void *self;
} sinkattn_executor;

typedef struct sinkattn_context {
    void *workspace; /* plan.workspace_bytes, any alignment, any content */
    int64_t workspace_bytes;
    sinkattn_executor executor; /* CPU; .run NULL: on the calling thread */
    void *stream;               /* CUDA */
} sinkattn_context;

/* Each validates everything, then writes every element of its outputs. Same input, same bits, for any number of workers.
 *
 * No element that is written (out, lse, dq, dk, dv, ds_aux, NVFP4, the workspace; an append's cache and lengths) may be another argument's
 * element too, read or written. Rows of two tensors may alternate in one buffer. An overlap that is certain, of first elements or of
 * tensors without gaps, is refused; any other is the caller's to avoid.
 *
 * On the CPU lengths are used as they were when they were validated: another thread that writes cu_seqlens, cache_seqlens or block_table
 * meanwhile may change results, but nothing outside the caller's tensors is read or written. */
SINKATTN_API sinkattn_status sinkattn_fwd(const sinkattn_fwd_args *args, const sinkattn_plan *plan, const sinkattn_context *context);
SINKATTN_API sinkattn_status sinkattn_bwd(const sinkattn_bwd_args *args, const sinkattn_plan *plan, const sinkattn_context *context);
SINKATTN_API sinkattn_status sinkattn_decode(const sinkattn_decode_args *args, const sinkattn_plan *plan, const sinkattn_context *context);

/* Copies, without a plan or a workspace, where backend says that the tensors are. */
SINKATTN_API sinkattn_status sinkattn_append(const sinkattn_append_args *args, sinkattn_backend backend, const sinkattn_context *context);

/* CUDA kernels clamp lengths that they find in device memory and remember it; the CPU raises at the call. Waits for the device, then says
 * as SINKATTN_INVALID what was wrong since the last time, once. */
SINKATTN_API sinkattn_status sinkattn_check_errors(int32_t ordinal);

/* One line of build facts: version, compilers, backends. */
SINKATTN_API const char *sinkattn_build_info(void);

/* (query, key) pairs that a sequence of these lengths computes a score for: the work that FLOP counts are made of; -1 for negative
 * arguments and for lengths above 2^31 - 1. */
SINKATTN_API int64_t sinkattn_visible_pairs(const sinkattn_mask *mask, int64_t q_len, int64_t k_len);

#ifdef __cplusplus
}
#endif
#endif
