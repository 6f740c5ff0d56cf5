/* SPDX-License-Identifier: Apache-2.0
 *
 * New keys and values, copied row by row behind those in use. Lengths and pages are all checked before anything is written. They are read
 * again for each sequence and row: one that has changed since is clamped, and a row whose page is unmapped by then is left out.
 */
#include <string.h>

#include "core/core.h"
#include "core/layout.h"
#include "core/numerics.h"

static void copy_row(const sinkattn_append_args *args, const sinkattn_tensor *from, const sinkattn_tensor *cache, int64_t b, int64_t i,
                     int64_t slot) {
    const sinkattn_problem *problem = &args->cache.fwd.problem;
    const int64_t bytes = sa_dtype_bytes(problem->dtype);
    for (int64_t head = 0; head < problem->num_kv_heads; head++) {
        const int64_t to = sa_cache_offset(&args->cache, cache, b, slot, head);
        if (to == -1) continue;
        memcpy((char *)cache->data + to * bytes, (const char *)from->data + sa_offset(from, b, i, head) * bytes,
               (size_t)(problem->head_dim * bytes));
    }
}

sinkattn_status sa_append_cpu(const sinkattn_append_args *args) {
    const sinkattn_status status = sa_validate_room(args);
    if (status.code != SINKATTN_OK) return status;
    for (int64_t b = 0; b < args->cache.fwd.problem.batch; b++) {
        const sa_range slots = sa_new_slots(args, b);
        for (int64_t slot = slots.begin; slot < slots.end; slot++) {
            copy_row(args, &args->k, &args->cache.fwd.k, b, slot - slots.begin, slot);
            copy_row(args, &args->v, &args->cache.fwd.v, b, slot - slots.begin, slot);
        }
        args->cache_seqlens[b] = (int32_t)slots.end;
    }
    return sa_ok();
}
