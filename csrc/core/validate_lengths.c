/* SPDX-License-Identifier: Apache-2.0
 *
 * Lengths and pages that lie in host memory, whole: the CPU backend reads them before it starts, and raises where a GPU kernel clamps.
 * Lengths are the run's own copy by then, pages are looked up again where they are used.
 */
#include <inttypes.h>

#include "core.h"
#include "layout.h"

static sinkattn_status check_cu_seqlens(const char *name, const int32_t *cu_seqlens, int64_t batch, int64_t total) {
    if (cu_seqlens[0] != 0) return sa_status(SINKATTN_INVALID, "%s[0] is %" PRId32 "; it must be 0", name, cu_seqlens[0]);
    for (int64_t b = 0; b < batch; b++)
        if (cu_seqlens[b + 1] < cu_seqlens[b])
            return sa_status(SINKATTN_INVALID, "%s[%" PRId64 "] is %" PRId32 "; it must be at least %" PRId32 ", the offset before it",
                    name, b + 1, cu_seqlens[b + 1], cu_seqlens[b]);
    if (cu_seqlens[batch] > total)
        return sa_status(SINKATTN_INVALID, "%s[%" PRId64 "] is %" PRId32 "; it must be at most %" PRId64 ", the rows of the packed tensor",
                name, batch, cu_seqlens[batch], total);
    return sa_ok();
}

sinkattn_status sa_validate_cu_seqlens(const sinkattn_fwd_args *args) {
    const sinkattn_problem *p = &args->problem;
    if (!p->packed) return sa_ok();
    SA_TRY(check_cu_seqlens("cu_seqlens_q", args->cu_seqlens_q, p->batch, p->q_len));
    if (p->op == SINKATTN_DECODE) return sa_ok();
    return check_cu_seqlens("cu_seqlens_k", args->cu_seqlens_k, p->batch, p->k_len);
}

static sinkattn_status check_pages_mapped(const sinkattn_decode_args *args, int64_t b, sa_range keys) {
    const sinkattn_problem *p = &args->fwd.problem;
    if (keys.begin >= keys.end) return sa_ok();
    for (int64_t i = keys.begin / p->page_size; i < sa_ceil_div(keys.end, p->page_size); i++) {
        const int32_t page = SA_READ_ONCE(args->block_table[b * args->block_table_stride + i]);
        if (page < 0 || page >= sa_num_pages(args))
            return sa_status(SINKATTN_INVALID, "block_table[%" PRId64 "][%" PRId64 "] is %" PRId32 "; it must be a page from 0 to %" PRId64,
                    b, i, page, sa_num_pages(args) - 1);
    }
    return sa_ok();
}

/* Pages that no row of the call can see may hold anything: caches leave the slots before a window unmapped. */
sinkattn_status sa_validate_cache(const sinkattn_decode_args *args) {
    const sinkattn_problem *p = &args->fwd.problem;
    SA_TRY(sa_validate_cu_seqlens(&args->fwd));
    for (int64_t b = 0; b < p->batch; b++) {
        const int32_t used = args->cache_seqlens ? args->cache_seqlens[b] : 0;
        if (used < 0 || used > p->k_len)
            return sa_status(SINKATTN_INVALID,
                    "cache_seqlens[%" PRId64 "]%s is %" PRId32 "; it must be from 0 to %" PRId64 ", the capacity", b,
                    p->packed ? " (seqused_k)" : "", used, p->k_len);
        const sa_sequence sequence = sa_cached_sequence(args, b);
        if (!args->block_table || sequence.q_len == 0) continue;
        const sa_band band = sa_band_of(&p->mask, sequence.q_len, sequence.k_len);
        sa_range prefix = {0, 0};
        const sa_range keys = sa_rows_band(&band, (sa_range){0, sequence.q_len}, &prefix.end);
        SA_TRY(check_pages_mapped(args, b, prefix));
        SA_TRY(check_pages_mapped(args, b, keys));
    }
    return sa_ok();
}

sinkattn_status sa_validate_slots(const sinkattn_append_args *args) {
    const sinkattn_problem *p = &args->cache.fwd.problem;
    for (int64_t i = 0; i < p->q_len; i++) {
        const int64_t slot = SA_READ_ONCE(args->slot_mapping[i]);
        if (slot >= sa_num_slots(p))
            return sa_status(SINKATTN_INVALID,
                    "slot_mapping[%" PRId64 "] is %" PRId64 "; it must be a slot of the cache, which has %" PRId64
                    ", or negative to skip the row",
                    i, slot, sa_num_slots(p));
    }
    return sa_ok();
}

sinkattn_status sa_validate_room(const sinkattn_append_args *args) {
    const sinkattn_problem *p = &args->cache.fwd.problem;
    for (int64_t b = 0; b < p->batch; b++) {
        const int32_t used = SA_READ_ONCE(args->cache.cache_seqlens[b]);
        const sa_range slots = sa_new_slots(args, b);
        if (slots.begin != used || slots.end - used != p->q_len)
            return sa_status(SINKATTN_INVALID,
                    "cache_seqlens[%" PRId64 "] is %" PRId32 "; it must be at least 0 and leave room for %" PRId64
                    " new keys in a cache that holds %" PRId64,
                    b, used, p->q_len, p->k_len);
        if (args->cache.block_table) SA_TRY(check_pages_mapped(&args->cache, b, slots));
    }
    return sa_ok();
}
