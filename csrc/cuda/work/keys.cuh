// SPDX-License-Identifier: Apache-2.0
//
// Where a forward finds its keys: in its own tensors, or in a cache, paged or contiguous, whose lengths and pages are read on the device.
// A kernel has one of the two as a template argument.
#pragma once

#include "cuda/work/items.cuh"

namespace sa {

// The keys of one sequence in a cache: its row of the block table, or its number, which is its only page.
struct CacheRow {
    const int32_t *pages; // NULL: contiguous
    int32_t number;
};

// The cache under rows. Of a sequence in it, k_begin is its number: the cache has no first key.
struct CacheKeys {
    static constexpr bool kCached = true, kByThreads = false;
    const int32_t *lengths, *block_table; // NULL: the capacity each; contiguous
    int64_t block_table_stride;
    int32_t page_size, num_pages; // a contiguous cache has one page a sequence
    int32_t box;                  // of keys: divides a page, and a tile
    sa_divisor by_page_size;

    // For tiles of tile_k keys, each at a multiple of it.
    CacheKeys(const sinkattn_decode_args &args, int32_t tile_k)
        : lengths(args.cache_seqlens), block_table(args.block_table), block_table_stride(args.block_table_stride), box(tile_k) {
        const sinkattn_problem &problem = args.fwd.problem;
        while (problem.page_size % box || tile_k % box) box--; // 0 % box is 0: a contiguous cache has boxes of a tile
        page_size = static_cast<int32_t>(sa_clamp(problem.page_size ? problem.page_size : problem.k_len, 1, SA_SHORT_LEN));
        num_pages = static_cast<int32_t>(sa_min(problem.page_size ? problem.num_pages : problem.batch, INT32_MAX));
        by_page_size = sa_divisor_of(static_cast<uint32_t>(page_size));
    }

    __device__ __forceinline__ sa_sequence sequence(const sinkattn_fwd_args &args, int64_t b) const {
        const int64_t used = lengths ? sa_clamp(lengths[b], 0, args.problem.k_len) : args.problem.k_len;
        if (!args.problem.packed) return {b, 0, args.problem.q_len, b, used};
        const sa_range rows = sa_packed_rows(args.cu_seqlens_q, b, args.problem.q_len);
        return {0, rows.begin, rows.end - rows.begin, b, used};
    }

    __device__ __forceinline__ CacheRow row(const sa_sequence &sequence) const {
        return {block_table ? block_table + sequence.k_begin * block_table_stride : nullptr, static_cast<int32_t>(sequence.k_begin)};
    }

    __device__ __forceinline__ int32_t page_index(int32_t key) const {
        return static_cast<int32_t>(sa_divide(static_cast<uint32_t>(key), by_page_size));
    }

    __device__ __forceinline__ bool has_page(int32_t page) const { return static_cast<uint32_t>(page) < static_cast<uint32_t>(num_pages); }

    // The page of a key below the sequence's length, as the table has it.
    __device__ __forceinline__ int32_t page_of(const CacheRow &row, int32_t key) const {
        return row.pages ? row.pages[page_index(key)] : row.number;
    }

    // Where it lies in its page.
    __device__ __forceinline__ int32_t slot(int32_t key) const { return key - page_index(key) * page_size; }

    // Of a key in an existing page; head 0.
    __device__ __forceinline__ int64_t offset(const sinkattn_tensor &tensor, int32_t page, int32_t key) const {
        return page * tensor.batch_stride + static_cast<int64_t>(slot(key)) * tensor.row_stride;
    }
};

// The same, of small pages, whose keys threads copy.
struct ThreadKeys : CacheKeys {
    static constexpr bool kByThreads = true;

    // Keys or values: rows of `columns` elements; from a page, a row, a head to the next one, in units of 8 elements.
    struct Pool {
        const void *data;
        uint32_t page, row, head;
        int32_t columns;

        Pool(const sinkattn_tensor &tensor, int64_t width)
            : data(tensor.data), page(static_cast<uint32_t>(tensor.batch_stride / 8)), row(static_cast<uint32_t>(tensor.row_stride / 8)),
              head(static_cast<uint32_t>(tensor.head_stride / 8)), columns(static_cast<int32_t>(width)) {}
    };

    Pool k, v;

    ThreadKeys(const CacheKeys &keys, const sinkattn_fwd_args &args)
        : CacheKeys(keys), k(args.k, args.problem.head_dim), v(args.v, sa_head_dim_v(&args.problem)) {}

    // Whether a key's place in its head, in those units, is below 2^32 - 1.
    static bool serves(const CacheKeys &keys, const sinkattn_fwd_args &args) {
        constexpr int64_t kMost = INT64_C(1) << 34; // elements, 2^31 units: from the first page to the last, and within a page
        if (!keys.block_table || keys.num_pages < 1) return false;
        for (const sinkattn_tensor *tensor : {&args.k, &args.v})
            if (tensor->batch_stride > kMost / keys.num_pages || tensor->row_stride > kMost / keys.page_size || tensor->head_stride > kMost)
                return false;
        return true;
    }
};

// Whether some row sees a key of [begin, end), which lies in one tile.
__device__ __forceinline__ bool sees_some(const sa_key_tiles &tiles, int32_t begin, int32_t end) {
    const bool in_band = tiles.band.begin < tiles.band.end && begin < tiles.band.end && end > tiles.band.begin;
    return begin < tiles.sink_keys || in_band;
}

// Offset of a key of a sequence, -1 where its page does not exist.
__device__ __forceinline__ int64_t offset_of(
        const TensorKeys &, const sa_sequence &sequence, const sinkattn_tensor &tensor, int32_t key, int64_t kv_head) {
    return sa_offset(&tensor, sequence.batch, sequence.k_begin + key, kv_head);
}

__device__ __forceinline__ int64_t offset_of(
        const CacheKeys &cache, const sa_sequence &sequence, const sinkattn_tensor &tensor, int32_t key, int64_t kv_head) {
    const int32_t page = cache.page_of(cache.row(sequence), key);
    return cache.has_page(page) ? cache.offset(tensor, page, key) + kv_head * tensor.head_stride : -1;
}

// By one block: reports what clamping changes.
__device__ __forceinline__ void check_lengths(const sinkattn_fwd_args &args, const TensorKeys &, unsigned *error_word) {
    check_lengths(args, error_word);
}

__device__ __forceinline__ void check_lengths(const sinkattn_fwd_args &args, const CacheKeys &cache, unsigned *error_word) {
    const sinkattn_problem &problem = args.problem;
    if (problem.packed) check_cu_seqlens(args.cu_seqlens_q, problem.batch, problem.q_len, error_word);
    bool bad = false;
    for (int64_t b = threadIdx.x; cache.lengths && b < problem.batch; b += blockDim.x)
        bad |= cache.lengths[b] < 0 || cache.lengths[b] > problem.k_len;
    if (bad) atomicOr(error_word, kBadCacheSeqlens);
}

} // namespace sa
