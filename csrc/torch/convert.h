// SPDX-License-Identifier: Apache-2.0
//
// From torch's terms to the C API's. Rules that C can check are left to C; here is checked only what C cannot see: the rank, device,
// dtype and size of one tensor against another.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "sinkattn.h"

namespace sinkattn {

using Maybe = std::optional<at::Tensor>;

// INVALID raises ValueError, UNSUPPORTED NotImplementedError, DEVICE RuntimeError.
void raise_on(const sinkattn_status &status);

sinkattn_dtype dtype_of(const at::Tensor &tensor, const char *name);
sinkattn_dtype s_aux_dtype_of(const at::Tensor &s_aux, const at::Tensor &q);
at::ScalarType lse_dtype(const at::Tensor &q);
sinkattn_mask mask_of(int64_t window_size_left, int64_t window_size_right, int64_t num_sink_tokens);

// Ranks and devices of the three main tensors; sizes are not looked at, so that symbolic ones are served too. True when packed.
bool check_ranks(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &cu_seqlens_q, const Maybe &cu_seqlens_k);
void check_cache_ranks(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache);

// Rows of q packed, the cache not.
void check_varlen_ranks(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v);

void check_append_ranks(const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v);

// New rows [total, num_kv_heads, head_dim], each for a slot.
void check_slot_ranks(
        const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &slot_mapping);

void check_device(const at::Tensor &tensor, const char *name, const at::Tensor &q, const char *q_name = "q");
void check_like(const at::Tensor &tensor, const char *name, const at::Tensor &q, at::ScalarType dtype, const char *q_name = "q");
void check_shape(const at::Tensor &tensor, const char *name, at::IntArrayRef shape);
// Keys and values: one shape, but that values may be narrower. Sets the problem's widths.
void check_widths(const at::Tensor &k, const char *k_name, const at::Tensor &v, const char *v_name, sinkattn_problem *problem);
// Two of one shape, of which either may be the odd one, so both are named.
void check_pair(const at::Tensor &a, const char *a_name, const at::Tensor &b, const char *b_name);

// int32 lengths or a table of pages, their last dimension contiguous; a slice of a table is read where it is.
at::Tensor indices(const at::Tensor &tensor, const char *name, at::IntArrayRef shape, const at::Tensor &q, const char *q_name = "q");
at::Tensor block_table_of(const at::Tensor &tensor, int64_t batch, const at::Tensor &q, const char *q_name = "q");

// The stream that torch is on, for calls on CUDA; what SINKATTN_CHECK=1 asks for after them.
void *stream_of(const at::Tensor &q);
// Pinned memory of torch's that q's stream reads: dropped, it is nobody else's until what is on the stream now has run.
void keep_until_read(const at::Tensor &host, const at::Tensor &q);
void check_if_asked(const at::Tensor &q);

// [.., row, head, head_dim], with batch or pages in front unless packed, as C reads it. A tensor whose rows are not contiguous and
// 16-byte aligned is copied by `readable`; one that is to be written cannot be.
bool has_usable_rows(const at::Tensor &tensor);
at::Tensor readable(const at::Tensor &tensor);
sinkattn_tensor rows_of(const at::Tensor &tensor);
sinkattn_tensor written_rows_of(const at::Tensor &tensor);

} // namespace sinkattn
