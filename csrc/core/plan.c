/* SPDX-License-Identifier: Apache-2.0
 *
 * Which kernel, how many work items, how much workspace: decided from sizes and device facts alone.
 *
 * Decode in numbers: a (sequence, kv head, query tile) is one item unless its keys are split. B* = ceil(workers / kv_heads) is the
 * batch at which unsplit items fill the machine; below it, P = workers / (batch * kv_heads) parts do, as long as there are key tiles.
 * Each part more is a partial more to add up: P* is where that takes as long as it saves. A CUDA kernel finds the lengths itself and cuts
 * by them, so that the plan of a captured graph holds for every length.
 */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core.h"
#include "layout.h"
#include "mask.h"
#include "numerics.h"
#include "split.h"

#define SA_MAX_WORKERS 65536
#define SA_UNSPLIT_TILES 16  /* CUDA decode: so few key tiles, a window's, are one block's work */
#define SA_BLOCKS_A_WORKER 2 /* CUDA decode, balanced: one merges while the other loads; twice as many where there are as many streams */

/* A decode by the forward's kernel, which never splits keys. */
static bool is_forward(const sa_variant *row) { return row->info.op == SINKATTN_DECODE && row->workspace_bytes == sa_cuda_fwd_workspace; }

static bool may_split(const sinkattn_problem *p, const sa_variant *row) {
    return p->op == SINKATTN_DECODE && !p->packed && !is_forward(row);
}

/* Why the row cannot take the problem, NULL when it can. */
static const char *refusal(const sa_variant *row, const sinkattn_problem *p) {
    const sinkattn_variant_info *info = &row->info;
    if (info->op != p->op) return "it is another op";
    if (!(info->dtypes & SA_BIT(p->dtype))) return "it has other dtypes";
    if (p->head_dim > info->max_head_dim) return "head_dim is above its largest";
    if (info->backend == SINKATTN_CUDA && (p->q_len >= SA_SHORT_LEN || p->k_len >= SA_SHORT_LEN || p->num_q_heads > INT32_MAX))
        return "2^29 rows or keys, or 2^31 heads, and more";
    if (info->backend == SINKATTN_CUDA && p->q_len > INT32_MAX / (p->num_q_heads / p->num_kv_heads)) return "2^31 rows of a group and more";
    return row->refusal(p, info);
}

/* sm_90a code, which wgmma and TMA need, runs on 9.0 alone; older CUDA rows carry code that newer devices translate. */
bool sa_runs_on(const sinkattn_variant_info *info, const sinkattn_device *device) {
    const bool exact = info->backend == SINKATTN_CUDA && info->arch >= 90;
    return info->backend == device->backend && (exact ? info->arch == device->arch : info->arch <= device->arch);
}

/* 99 KiB a block; other devices have 163 KiB and more. */
static bool has_small_blocks(const sinkattn_device *device) {
    const int32_t arch = device->arch;
    return device->backend == SINKATTN_CUDA && (arch == 86 || arch == 89 || arch / 10 == 12);
}

bool sa_finds_room(const sa_variant *row, const sinkattn_problem *problem, const sinkattn_device *device) {
    const bool smaller = problem->head_dim <= 128 && !sa_has_narrow_values(problem); /* then a smaller kernel runs */
    return !row->roomy || smaller || !has_small_blocks(device);
}

/* Query tiles over all sequences and kv heads; the heads of a group share a tile, so a tile's rows are (token, head) pairs. Packed
 * lengths are not known here: each sequence may end in a partial tile. */
int64_t sa_num_query_tiles(const sinkattn_problem *p, const sinkattn_variant_info *info) {
    if (!info->tile_q) return p->num_kv_heads * p->batch;
    const int64_t rows = sa_kv_head_rows(p);
    if (!p->packed) return p->num_kv_heads * p->batch * sa_ceil_div(rows, info->tile_q);
    return p->batch ? p->num_kv_heads * (rows / info->tile_q + p->batch) : 0;
}

/* The index of the last row that serves, -1 for a miss. */
static int32_t best_variant(const sinkattn_problem *p, const sinkattn_device *device) {
    int32_t i = 0;
    while (sa_variant_at(i)) i++;
    while (i-- > 0) {
        const sa_variant *row = sa_variant_at(i);
        if (sa_runs_on(&row->info, device) && sa_finds_room(row, p, device) && !refusal(row, p)) return i;
    }
    return -1;
}

typedef struct arch_name {
    char text[32];
} arch_name;

static arch_name name_arch(sinkattn_backend backend, int32_t arch) {
    arch_name name;
    if (backend == SINKATTN_CPU)
        snprintf(name.text, sizeof name.text, "cpu level %s", sa_cpu_level_name(arch));
    else
        snprintf(name.text, sizeof name.text, "sm_%" PRId32, arch);
    return name;
}

static sinkattn_status miss(const sinkattn_problem *p, const sinkattn_device *device) {
    if (device->backend == SINKATTN_CUDA && p->head_dim > 512)
        return sa_status(SINKATTN_UNSUPPORTED,
                "head_dim is %" PRId64 "; on CUDA it must be at most 512, or on 9.0 the rows of one q_len and not invariant, in pages of "
                "a multiple of 16 keys; or the decode run on a CPU, or in plain torch by sinkattn.reference",
                p->head_dim);
    if (device->backend == SINKATTN_CUDA && sa_has_packed_rows(p) && p->head_dim > 256)
        return sa_status(SINKATTN_UNSUPPORTED,
                "packed rows over a cache have head_dim %" PRId64 "; on CUDA it must be at most 256, or sequences of one q_len be "
                "decoded with flash_attn_with_kvcache",
                p->head_dim);
    sinkattn_problem plain = *p;
    plain.extras = false;
    if (p->extras && best_variant(&plain, device) >= 0)
        return sa_status(SINKATTN_UNSUPPORTED,
                "invariant is true with host pages or nvfp4, and head_dim is %" PRId64
                "; on CUDA that takes 9.0, head_dim of at most 128 and "
                "values as wide: quantise out afterwards, or keep all pages on the device",
                p->head_dim);
    sinkattn_problem wide = *p;
    wide.head_dim_v = 0;
    if (sa_has_narrow_values(p) && best_variant(&wide, device) >= 0)
        return sa_status(SINKATTN_UNSUPPORTED,
                "head_dim_v is %" PRId32 " with head_dim %" PRId64 "; no %s kernel on %s takes values narrower than keys: give v %" PRId64
                " columns, zeros behind its own, and cut out",
                p->head_dim_v, p->head_dim, sa_op_name(p->op), name_arch(device->backend, device->arch).text, p->head_dim);
    const sinkattn_device roomy = {.backend = SINKATTN_CUDA, .arch = 80};
    if (has_small_blocks(device) && best_variant(p, &roomy) >= 0)
        return sa_status(SINKATTN_UNSUPPORTED,
                "head_dim is %" PRId64 "; for a %s on %s it must be at most 128, as a block has 99 KiB of shared memory there: take "
                "a device of 8.0 or 9.0, or the model's eager attention",
                p->head_dim, sa_op_name(p->op), name_arch(device->backend, device->arch).text);
    char kernels[400] = "";
    size_t used = 0;
    const sa_variant *row;
    for (int32_t i = 0; (row = sa_variant_at(i)); i++) {
        if (row->info.op != p->op || row->info.backend != device->backend || used >= sizeof kernels) continue;
        used += (size_t)snprintf(kernels + used, sizeof kernels - used, "%s%s (", used ? ", " : "", row->info.name);
        for (sinkattn_dtype d = SINKATTN_BF16; d <= SINKATTN_FP64; d++)
            if ((row->info.dtypes & SA_BIT(d)) && used < sizeof kernels)
                used += (size_t)snprintf(kernels + used, sizeof kernels - used, "%s ", sa_dtype_name(d));
        if (used < sizeof kernels)
            used += (size_t)snprintf(kernels + used, sizeof kernels - used, "head_dim <= %" PRId64 ")", row->info.max_head_dim);
    }
    return sa_status(SINKATTN_UNSUPPORTED, "no %s kernel serves %s, head_dim %" PRId64 "%s on %s; there are %s", sa_op_name(p->op),
            sa_dtype_name(p->dtype), p->head_dim,
            p->invariant ? ", invariant (give num_splits: then a row's bits do not depend on the batch)" : "",
            name_arch(device->backend, device->arch).text, kernels);
}

/* Tiles of so many keys that the rows of one sequence can touch, however many of its keys are in use. */
static int64_t most_tiles(const sinkattn_problem *p, int64_t tile_k) {
    if (!tile_k || p->q_len == 0) return 1;
    const sa_band band = sa_band_of(&p->mask, p->q_len, p->k_len);
    int64_t sink_end;
    const sa_range keys = sa_rows_band(&band, (sa_range){0, p->q_len}, &sink_end);
    const int64_t touched = sa_ceil_div(keys.end - keys.begin, tile_k) + 1 + sa_ceil_div(sink_end, tile_k);
    return sa_max(1, sa_min(touched, sa_ceil_div(p->k_len, tile_k)));
}

int64_t sa_most_chunks(const sinkattn_problem *p) { return most_tiles(p, SA_CPU_CHUNK); }

/* What a decode's parts are made of: chunks on a CPU, key tiles on a GPU. */
static int64_t most_parts(const sinkattn_problem *p, const sa_variant *row) {
    const sinkattn_variant_info *info = &row->info;
    if (!may_split(p, row) || (info->backend == SINKATTN_CUDA && p->invariant)) return 1;
    return info->backend == SINKATTN_CPU && info->tile_k ? sa_most_chunks(p) : most_tiles(p, info->tile_k);
}

/* Each part of each row, on a CPU each chunk, leaves head_dim_v + 2 floats behind: 2^31 of them fill a terabyte, and no machine. A CPU need
 * not cut, and does not where they would fill gigabytes. */
static bool partials_fit(const sinkattn_problem *p, sinkattn_backend backend, int64_t splits) {
    const bool cpu = backend == SINKATTN_CPU;
    const int64_t each = cpu ? sa_most_chunks(p) : splits, most = INT64_C(1) << (cpu ? 24 : 31);
    int64_t partials;
    return splits == 1 || (!__builtin_mul_overflow(p->batch * p->num_q_heads * p->q_len, each, &partials) && partials < most);
}

/* A CPU takes one part too many rather than leave a worker idle: its order of sums does not depend on the parts. On a GPU this is the most
 * that the kernel may cut. */
static int64_t choose_splits(const sinkattn_problem *p, const sinkattn_device *device, int64_t items, int64_t tiles) {
    const bool cpu = device->backend == SINKATTN_CPU;
    if (items == 0 || (cpu ? !partials_fit(p, SINKATTN_CPU, tiles) : p->invariant)) return 1;
    if (p->num_splits > 0) return sa_min(p->num_splits, tiles);
    if (p->num_splits < 0) return sa_min(-sa_max(p->num_splits, -INT64_MAX), tiles);
    if (cpu) return sa_clamp(sa_ceil_div(device->workers, items), 1, tiles);
    return tiles <= SA_UNSPLIT_TILES ? 1 : sa_min(tiles, (int64_t)SA_BLOCKS_A_WORKER * device->workers);
}

bool sa_is_balanced(const sinkattn_problem *p, const sinkattn_plan *plan) {
    const bool cuda = sa_variant_at(plan->variant)->info.backend == SINKATTN_CUDA;
    return cuda && p->op == SINKATTN_DECODE && p->num_splits == 0 && plan->num_splits > 1;
}

static int64_t num_items(const sinkattn_problem *p, const sinkattn_variant_info *info, const sinkattn_plan *plan) {
    const int64_t blocks = (int64_t)SA_BLOCKS_A_WORKER * plan->workers, streams = sa_num_query_tiles(p, info);
    if (!sa_is_balanced(p, plan)) return streams * plan->num_splits;
    return streams > blocks ? 2 * blocks : blocks;
}

/* A backward on sm_90 has items of keys too, and chunks with long caches have more of those than of rows. */
static int64_t most_busy(const sinkattn_problem *p, const sa_variant *row, const sinkattn_plan *plan) {
    const sinkattn_variant_info *info = &row->info;
    if ((p->op == SINKATTN_FWD || is_forward(row)) && info->arch == 90) { /* tiles of whole tokens; of rows past the last sequence too */
        const int64_t tokens = info->tile_q / (p->num_q_heads / p->num_kv_heads);
        return p->num_kv_heads * (p->packed ? sa_packed_tiles(p->q_len, tokens, p->batch + 1) : p->batch * sa_ceil_div(p->q_len, tokens));
    }
    if (p->op != SINKATTN_BWD || info->backend != SINKATTN_CUDA) return plan->num_items;
    if (row->workspace_bytes == sa_cuda_bwd_sm90_workspace)
        return sa_min(plan->num_items, SA_MAX_WORKERS) * sa_min(sa_max(1, sa_ceil_div(p->k_len, info->tile_k)), SA_MAX_WORKERS);
    return sa_max(plan->num_items, p->num_kv_heads * (p->packed ? 1 : p->batch) * sa_ceil_div(p->k_len, info->tile_k));
}

/* Appends to the reason; what would not fit whole is left out. */
__attribute__((format(printf, 2, 3))) static void say(sinkattn_plan *plan, const char *format, ...) {
    const size_t used = strlen(plan->reason), left = sizeof plan->reason - used;
    va_list values;
    va_start(values, format);
    const int written = vsnprintf(plan->reason + used, left, format, values);
    va_end(values);
    if (written < 0 || (size_t)written >= left) plan->reason[used] = 0;
}

/* The reduction-cost model of a CUDA decode: a block reads partials, (O, pivot, sum) in fp32 for the rows of a group, as fast as it reads K
 * and V. With r the bytes of a partial over those of a key tile, N parts of a row's t key tiles take t / N + r N tiles' time, least at
 * N = sqrt(t / r); parts that do not run at once gain nothing, which leaves P* = min(P, sqrt(t / r)). */
static void explain_parts(const sinkattn_problem *p, const sinkattn_variant_info *info, int64_t parts, int64_t tiles, sinkattn_plan *plan) {
    say(plan, ", P = %" PRId64, parts);
    if (info->backend != SINKATTN_CUDA || !info->tile_k) return;
    const int64_t rows = sa_min(info->tile_q, sa_kv_head_rows(p));
    const double r = (double)(rows * (sa_head_dim_v(p) + 8) * 4) / (double)(info->tile_k * (p->head_dim + sa_head_dim_v(p)) * 2);
    const int64_t least = r > 0.0 ? (int64_t)sqrt((double)tiles / r) : tiles;
    say(plan, ", P* = min(P, sqrt(%" PRId64 " / %.2f)) = %" PRId64, tiles, r, sa_max(1, sa_min(parts, least)));
}

static void explain(const sinkattn_problem *p, const sinkattn_device *device, int64_t tiles, sinkattn_plan *plan) {
    const sa_variant *row = sa_variant_at(plan->variant);
    say(plan, "%s is the best kernel for %s, head_dim %" PRId64, row->info.name, sa_dtype_name(p->dtype), p->head_dim);
    if (sa_has_narrow_values(p)) say(plan, ", head_dim_v %" PRId32, p->head_dim_v);
    say(plan, " on %s", name_arch(device->backend, device->arch).text);
    if (may_split(p, row)) {
        const bool balanced = sa_is_balanced(p, plan), cpu = device->backend == SINKATTN_CPU;
        const char *why = p->invariant && !cpu ? "invariant"
                          : p->num_splits > 0  ? "as asked"
                          : p->num_splits < 0  ? "as asked, merged by a pass of their own"
                          : balanced           ? "by the lengths found"
                                               : "to fill the workers";
        say(plan, "; %s%" PRId64 " of at most %" PRId64 " parts %s: B* = %" PRId64, balanced ? "up to " : "", plan->num_splits, tiles, why,
                sa_ceil_div(device->workers, p->num_kv_heads));
        explain_parts(p, &row->info, device->workers / sa_max(1, p->batch * p->num_kv_heads), tiles, plan);
    }
    const char *said = NULL;
    int32_t other = device->arch;
    for (int32_t i = plan->variant + 1; (row = sa_variant_at(i)); i++) {
        if (row->info.op != p->op || row->info.backend != device->backend) continue;
        const sinkattn_variant_info *info = &row->info;
        const char *why = sa_finds_room(row, p, device) ? refusal(row, p) : "a block takes more than 99 KiB of shared memory";
        if (said && why && strcmp(why, said) == 0 && info->tile_k == sa_variant_at(i - 1)->info.tile_k) continue;
        said = info->arch >= 90 && sa_runs_on(info, device) ? why : NULL;
        if (sa_runs_on(info, device))
            say(plan, "; not %s (%" PRId64 " x %" PRId64 "): %s", info->name, info->tile_q, info->tile_k, why);
        else if (info->arch != other)
            say(plan, "; not those for %s", name_arch(info->backend, other = info->arch).text);
    }
}

static sinkattn_status check_device(const sinkattn_device *device) {
    if (device->backend != SINKATTN_CPU && device->backend != SINKATTN_CUDA)
        return sa_status(SINKATTN_INVALID, "device.backend is %d; it must be cpu (0) or cuda (1)", (int)device->backend);
    if (device->workers < 1 || device->workers > SA_MAX_WORKERS)
        return sa_status(SINKATTN_INVALID, "device.workers is %" PRId32 "; it must be from 1 to %d", device->workers, SA_MAX_WORKERS);
    return sa_ok();
}

sinkattn_status sinkattn_make_plan(const sinkattn_problem *problem, const sinkattn_device *device, sinkattn_plan *plan) {
    if (!device) return sa_status(SINKATTN_INVALID, "device is NULL; it must be given");
    if (!plan) return sa_status(SINKATTN_INVALID, "plan is NULL; it must be given");
    sinkattn_status status = sa_validate_problem(problem);
    if (status.code == SINKATTN_OK) status = check_device(device);
    if (status.code != SINKATTN_OK) return status;

    const int32_t variant = best_variant(problem, device);
    if (variant < 0) return miss(problem, device);
    const sa_variant *row = sa_variant_at(variant);
    const int64_t items = sa_num_query_tiles(problem, &row->info);
    const int64_t tiles = most_parts(problem, row);
    const int64_t splits = may_split(problem, row) ? choose_splits(problem, device, items, tiles) : 1;
    *plan = (sinkattn_plan){.variant = variant, .num_splits = splits, .workers = device->workers};
    if (!sa_is_balanced(problem, plan) && !partials_fit(problem, device->backend, splits))
        return sa_status(SINKATTN_INVALID, "num_splits is %" PRId64 "; it must leave less than 2^31 partial rows", splits);
    plan->num_items = num_items(problem, &row->info, plan);
    plan->workers = (int32_t)sa_clamp(most_busy(problem, row, plan), 1, device->workers);
    plan->workspace_bytes = row->workspace_bytes(problem, plan);
    explain(problem, device, tiles, plan);
    return sa_ok();
}

sinkattn_status sa_validate_plan(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    if (!plan) return sa_status(SINKATTN_INVALID, "plan is NULL; it must be given");
    const sa_variant *row = sa_variant_at(plan->variant);
    if (!row) return sa_status(SINKATTN_INVALID, "plan.variant is %" PRId32 "; it must name a kernel", plan->variant);
    const char *why = refusal(row, problem);
    if (why)
        return sa_status(SINKATTN_INVALID, "plan.variant is %s; it must serve %s of %s with head_dim %" PRId64 ", but %s", row->info.name,
                sa_op_name(problem->op), sa_dtype_name(problem->dtype), problem->head_dim, why);
    if (row->info.backend == SINKATTN_CPU && row->info.arch > sa_cpu_level())
        return sa_status(SINKATTN_UNSUPPORTED, "plan.variant is %s; this CPU must have level %s, it has %s", row->info.name,
                sa_cpu_level_name(row->info.arch), sa_cpu_level_name(sa_cpu_level()));
    if (plan->workers < 1 || plan->workers > SA_MAX_WORKERS)
        return sa_status(SINKATTN_INVALID, "plan.workers is %" PRId32 "; it must be from 1 to %d", plan->workers, SA_MAX_WORKERS);
    const int64_t most = most_parts(problem, row);
    const bool fits = sa_is_balanced(problem, plan) || partials_fit(problem, row->info.backend, plan->num_splits);
    if (plan->num_splits < 1 || plan->num_splits > most || !fits)
        return sa_status(SINKATTN_INVALID, "plan.num_splits is %" PRId64 "; it must be from 1 to %" PRId64, plan->num_splits, most);
    const int64_t items = num_items(problem, &row->info, plan);
    if (plan->num_items != items)
        return sa_status(SINKATTN_INVALID, "plan.num_items is %" PRId64 "; it must be %" PRId64 ", as planned for this problem",
                plan->num_items, items);
    return sa_ok();
}
