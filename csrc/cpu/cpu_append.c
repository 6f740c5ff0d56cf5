/* SPDX-License-Identifier: Apache-2.0
 *
 * New keys and values, copied row by row behind those in use, or to slots. Lengths, pages and slots are all checked before anything is
 * written. They are read again for each sequence and row: a length that has changed since is clamped, and a row whose page is unmapped by
 * then, or whose slot lies outside, is left out.
 */
#include <string.h>

#include "core/core.h"
#include "core/layout.h"
#include "core/numerics.h"

static void copy_head(const sinkattn_problem *problem, int64_t head_dim, const sinkattn_tensor *to, int64_t to_offset,
        const sinkattn_tensor *from, int64_t from_offset) {
    const int64_t bytes = sa_dtype_bytes(problem->dtype);
    memcpy((char *)to->data + to_offset * bytes, (const char *)from->data + from_offset * bytes, (size_t)(head_dim * bytes));
}

static void copy_row(const sinkattn_append_args *args, int64_t head_dim, const sinkattn_tensor *from, const sinkattn_tensor *cache,
        int64_t b, int64_t i, int64_t slot) {
    const sinkattn_problem *problem = &args->cache.fwd.problem;
    for (int64_t head = 0; head < problem->num_kv_heads; head++) {
        const int64_t to = sa_cache_offset(&args->cache, cache, b, slot, head);
        if (to == -1) continue;
        copy_head(problem, head_dim, cache, to, from, sa_offset(from, b, i, head));
    }
}

static void copy_to_slots(const sinkattn_append_args *args) {
    const sinkattn_fwd_args *cache = &args->cache.fwd;
    const sinkattn_problem *problem = &cache->problem;
    const int64_t head_dim_v = sa_head_dim_v(problem);
    for (int64_t i = 0; i < problem->q_len; i++) {
        const int64_t slot = SA_READ_ONCE(args->slot_mapping[i]);
        if (slot < 0 || slot >= sa_num_slots(problem)) continue;
        for (int64_t head = 0; head < problem->num_kv_heads; head++) {
            const int64_t to_k = sa_slot_offset(problem, &cache->k, slot, head), to_v = sa_slot_offset(problem, &cache->v, slot, head);
            copy_head(problem, problem->head_dim, &cache->k, to_k, &args->k, sa_offset(&args->k, 0, i, head));
            if (args->v.data) copy_head(problem, head_dim_v, &cache->v, to_v, &args->v, sa_offset(&args->v, 0, i, head));
        }
    }
}

sinkattn_status sa_append_cpu(const sinkattn_append_args *args) {
    if (args->cache.fwd.problem.packed) {
        SA_TRY(sa_validate_slots(args));
        copy_to_slots(args);
        return sa_ok();
    }
    SA_TRY(sa_validate_room(args));
    const sinkattn_problem *problem = &args->cache.fwd.problem;
    for (int64_t b = 0; b < problem->batch; b++) {
        const sa_range slots = sa_new_slots(args, b);
        for (int64_t slot = slots.begin; slot < slots.end; slot++) {
            copy_row(args, problem->head_dim, &args->k, &args->cache.fwd.k, b, slot - slots.begin, slot);
            if (args->v.data) copy_row(args, sa_head_dim_v(problem), &args->v, &args->cache.fwd.v, b, slot - slots.begin, slot);
        }
        args->cache_seqlens[b] = (int32_t)slots.end;
    }
    return sa_ok();
}
