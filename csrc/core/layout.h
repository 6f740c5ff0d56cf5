/* SPDX-License-Identifier: Apache-2.0
 *
 * From (sequence, row, head) to element offsets, in int64, for dense, packed and paged tensors. Lengths that come from memory are
 * clamped here, so that whatever they hold no offset leaves the caller's tensors. Host and device.
 */
#ifndef SA_LAYOUT_H
#define SA_LAYOUT_H

#include "numerics.h"

/* A length or page as it is now. On the host another thread may write it meanwhile: one load, so that what is checked is what is used. */
#ifdef __CUDACC__
#define SA_READ_ONCE(length) (length)
#else
#define SA_READ_ONCE(length) __atomic_load_n(&(length), __ATOMIC_RELAXED)
#endif

/* The most tiles of `size` that packed sequences of `total` rows or keys need. Those of sequence b begin at (rows or keys before it) / size
 * + b: room for each sequence, found without a prefix sum. */
SA_HD int64_t sa_packed_tiles(int64_t total, int64_t size, int64_t sequences) { return total / size + sequences; }

/* Where one sequence lies. Dense: row_begin 0 and batch selects; packed: batch 0 and row_begin selects. */
typedef struct sa_sequence {
    int64_t batch;
    int64_t q_begin, q_len;
    int64_t k_begin, k_len;
} sa_sequence;

/* Where packed sequence b begins. The first one at row 0, whatever is there: then each row is some sequence's, or past the last. */
SA_HD int64_t sa_packed_begin(const int32_t *cu_seqlens, int64_t b, int64_t total) { return b > 0 ? sa_clamp(cu_seqlens[b], 0, total) : 0; }

SA_HD sa_range sa_packed_rows(const int32_t *cu_seqlens, int64_t b, int64_t total) {
    sa_range rows;
    rows.begin = sa_packed_begin(cu_seqlens, b, total);
    rows.end = sa_clamp(cu_seqlens[b + 1], rows.begin, total);
    return rows;
}

SA_HD sa_sequence sa_sequence_at(const sinkattn_fwd_args *args, int64_t b) {
    const sinkattn_problem *problem = &args->problem;
    sa_sequence sequence = {b, 0, problem->q_len, 0, problem->k_len};
    if (problem->packed) {
        const sa_range q = sa_packed_rows(args->cu_seqlens_q, b, problem->q_len);
        const sa_range k = sa_packed_rows(args->cu_seqlens_k, b, problem->k_len);
        sequence.batch = 0;
        sequence.q_begin = q.begin;
        sequence.q_len = q.end - q.begin;
        sequence.k_begin = k.begin;
        sequence.k_len = k.end - k.begin;
    }
    return sequence;
}

SA_HD int64_t sa_offset(const sinkattn_tensor *tensor, int64_t batch, int64_t row, int64_t head) {
    return batch * tensor->batch_stride + row * tensor->row_stride + head * tensor->head_stride;
}

/* Row statistics (lse, dlse): [batch, num_q_heads, q_len], packed [num_q_heads, total_q]. */
SA_HD int64_t sa_row_index(const sinkattn_problem *problem, const sa_sequence *sequence, int64_t head, int64_t i) {
    return (sequence->batch * problem->num_q_heads + head) * problem->q_len + sequence->q_begin + i;
}

SA_HD int64_t sa_cache_len(const sinkattn_decode_args *args, int64_t b) {
    const int64_t capacity = args->fwd.problem.k_len;
    return args->cache_seqlens ? sa_clamp(args->cache_seqlens[b], 0, capacity) : capacity;
}

/* Where sequence b of a decode lies: its rows in q, packed or not, and how many keys of the cache it has. */
SA_HD sa_sequence sa_cached_sequence(const sinkattn_decode_args *args, int64_t b) {
    const sinkattn_problem *problem = &args->fwd.problem;
    sa_sequence sequence = {b, 0, problem->q_len, 0, sa_cache_len(args, b)};
    if (problem->packed) {
        const sa_range rows = sa_packed_rows(args->fwd.cu_seqlens_q, b, problem->q_len);
        sequence.batch = 0;
        sequence.q_begin = rows.begin;
        sequence.q_len = rows.end - rows.begin;
    }
    return sequence;
}

/* Slots of sequence b that new keys go to, as many as there is room for: lengths are int32. */
SA_HD sa_range sa_new_slots(const sinkattn_append_args *args, int64_t b) {
    const sinkattn_problem *problem = &args->cache.fwd.problem;
    const int64_t room = sa_min(problem->k_len, INT32_MAX);
    sa_range slots;
    slots.begin = (sa_position_t)sa_clamp(SA_READ_ONCE(args->cache.cache_seqlens[b]), 0, room);
    slots.end = (sa_position_t)sa_min(slots.begin + problem->q_len, room);
    return slots;
}

/* Of a paged cache, numbered through; where one lies, of those there are. */
SA_HD int64_t sa_num_slots(const sinkattn_problem *problem) { return problem->num_pages * problem->page_size; }

SA_HD int64_t sa_slot_offset(const sinkattn_problem *problem, const sinkattn_tensor *cache, int64_t slot, int64_t head) {
    const int64_t page = slot / problem->page_size;
    return sa_offset(cache, page, slot - page * problem->page_size, head);
}

/* Pages of both tiers have one numbering, and offsets of both count from the cache: those of the host's pages by so many elements more.
 * Addresses are multiples of 16 bytes, so that an offset is never -1. */
SA_HD int64_t sa_tier_gap(const sinkattn_tensor *cache, const sinkattn_tensor *host, int64_t num_pages, int64_t element_bytes) {
    return ((int64_t)(intptr_t)host->data - (int64_t)(intptr_t)cache->data) / element_bytes - num_pages * cache->batch_stride;
}

SA_HD int64_t sa_num_pages(const sinkattn_decode_args *args) { return args->fwd.problem.num_pages + args->host.num_pages; }

/* Offset of a cached key of sequence b, -1 where its page is unmapped. cache: args' k or v. */
SA_HD int64_t sa_cache_offset(const sinkattn_decode_args *args, const sinkattn_tensor *cache, int64_t b, int64_t key, int64_t head) {
    if (!args->block_table) return sa_offset(cache, b, key, head);
    const sinkattn_problem *problem = &args->fwd.problem;
    const int64_t page = SA_READ_ONCE(args->block_table[b * args->block_table_stride + key / problem->page_size]);
    if (page < 0 || page >= sa_num_pages(args)) return -1;
    const int64_t offset = sa_offset(cache, page, key % problem->page_size, head);
    if (page < problem->num_pages) return offset;
    const sinkattn_tensor *host = cache == &args->fwd.k ? &args->host.k : &args->host.v;
    return offset + sa_tier_gap(cache, host, problem->num_pages, sa_dtype_bytes(problem->dtype));
}

#endif
