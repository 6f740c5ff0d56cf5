// SPDX-License-Identifier: Apache-2.0

#include "convert.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

C10_DIAGNOSTIC_PUSH_AND_IGNORED_IF_DEFINED("-Winterference-size") // of the included file
#include <ATen/core/CachingHostAllocator.h>
C10_DIAGNOSTIC_POP()

#include <cstdlib>
#include <dlfcn.h>

namespace sinkattn {

void raise_on(const sinkattn_status &status) {
    TORCH_CHECK_VALUE(status.code != SINKATTN_INVALID, "sinkattn: ", status.message);
    TORCH_CHECK_NOT_IMPLEMENTED(status.code != SINKATTN_UNSUPPORTED, "sinkattn: ", status.message);
    TORCH_CHECK(status.code == SINKATTN_OK, "sinkattn: ", status.message);
}

sinkattn_dtype dtype_of(const at::Tensor &tensor, const char *name) {
    switch (tensor.scalar_type()) {
    case at::kBFloat16: return SINKATTN_BF16;
    case at::kHalf: return SINKATTN_FP16;
    case at::kFloat: return SINKATTN_FP32;
    case at::kDouble: return SINKATTN_FP64;
    default:
        TORCH_CHECK_VALUE(false, "sinkattn: ", name, " is ", tensor.scalar_type(), "; bfloat16, float16, float32 and float64 are served");
    }
}

sinkattn_dtype s_aux_dtype_of(const at::Tensor &s_aux, const at::Tensor &q) {
    const at::ScalarType dtype = s_aux.scalar_type();
    const bool wide = q.scalar_type() == at::kDouble;
    TORCH_CHECK_VALUE(dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat || (wide && dtype == at::kDouble),
            "sinkattn: s_aux is ", dtype, "; it must be BFloat16, Half", wide ? ", Float or Double" : " or Float", " when q is ",
            q.scalar_type(), ": s_aux.float()");
    return dtype_of(s_aux, "s_aux");
}

at::ScalarType lse_dtype(const at::Tensor &q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

sinkattn_mask mask_of(int64_t window_size_left, int64_t window_size_right, int64_t num_sink_tokens) {
    const bool has_left = window_size_left != -1;
    const bool has_right = window_size_right != -1;
    return {has_left, has_right, has_left ? window_size_left : 0, has_right ? window_size_right : 0, num_sink_tokens};
}

void check_device(const at::Tensor &tensor, const char *name, const at::Tensor &q, const char *q_name) {
    TORCH_CHECK_VALUE(tensor.device() == q.device(), "sinkattn: ", name, " is on ", tensor.device(), ", ", q_name, " is on ", q.device());
}

static void check_rank(const at::Tensor &tensor, const char *name, const at::Tensor &q, bool packed, const char *q_name = "q") {
    TORCH_CHECK_VALUE(tensor.defined(), "sinkattn: ", name, " is None, it must be a tensor");
    TORCH_CHECK_VALUE(tensor.dim() == (packed ? 3 : 4), "sinkattn: ", name, " has ", tensor.dim(), " dimensions, it must be ",
            packed ? "[total, num_heads, head_dim], as cu_seqlens were given" : "[batch, len, num_heads, head_dim]");
    check_device(tensor, name, q, q_name);
}

bool check_ranks(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &cu_seqlens_q, const Maybe &cu_seqlens_k) {
    TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(), "sinkattn: cu_seqlens_q and cu_seqlens_k go together, only ",
            cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k", " was given");
    const bool packed = cu_seqlens_q.has_value();
    check_rank(q, "q", q, packed);
    check_rank(k, "k", q, packed);
    check_rank(v, "v", q, packed);
    return packed;
}

void check_cache_ranks(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache) {
    check_rank(q, "q", q, false);
    check_rank(k_cache, "k_cache", q, false);
    check_rank(v_cache, "v_cache", q, false);
}

void check_varlen_ranks(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v) {
    check_rank(q, "q", q, true);
    check_rank(k, "k", q, false);
    check_rank(v, "v", q, false);
}

void check_append_ranks(const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v) {
    check_rank(k_cache, "k_cache", k_cache, false, "k_cache");
    check_rank(v_cache, "v_cache", k_cache, false, "k_cache");
    check_rank(k, "k", k_cache, false, "k_cache");
    if (v) check_rank(*v, "v", k_cache, false, "k_cache");
}

void check_slot_ranks(
        const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &slot_mapping) {
    check_rank(k_cache, "k_cache", k_cache, false, "k_cache");
    check_rank(v_cache, "v_cache", k_cache, false, "k_cache");
    for (const auto &[rows, name] : {std::pair(&k, "k"), std::pair(v ? &*v : &k, "v")}) {
        TORCH_CHECK_VALUE(rows->dim() == 3, "sinkattn: ", name, " has ", rows->dim(),
                " dimensions, it must be [total, num_kv_heads, head_dim], a row for each slot");
        check_device(*rows, name, k_cache, "k_cache");
    }
    TORCH_CHECK_VALUE(slot_mapping.dim() == 1, "sinkattn: slot_mapping has ", slot_mapping.dim(), " dimensions, it must be [total]");
    check_device(slot_mapping, "slot_mapping", k_cache, "k_cache");
}

void check_like(const at::Tensor &tensor, const char *name, const at::Tensor &q, at::ScalarType dtype, const char *q_name) {
    check_device(tensor, name, q, q_name);
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, "sinkattn: ", name, " is ", tensor.scalar_type(), ", it must be ", dtype,
            dtype == at::kInt ? " (torch.int32)" : "");
}

void check_shape(const at::Tensor &tensor, const char *name, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(tensor.sizes() == shape, "sinkattn: ", name, " has shape ", tensor.sizes(), ", it must be ", shape);
}

void check_pair(const at::Tensor &a, const char *a_name, const at::Tensor &b, const char *b_name) {
    TORCH_CHECK_VALUE(a.sizes() == b.sizes(), "sinkattn: ", a_name, " has shape ", a.sizes(), ", ", b_name, " has shape ", b.sizes(),
            "; both must have one shape");
}

void check_widths(const at::Tensor &k, const char *k_name, const at::Tensor &v, const char *v_name, sinkattn_problem *problem) {
    const int64_t head_dim = k.size(-1), head_dim_v = v.size(-1);
    TORCH_CHECK_VALUE(k.sizes().slice(0, k.dim() - 1) == v.sizes().slice(0, v.dim() - 1), "sinkattn: ", k_name, " has shape ", k.sizes(),
            ", ", v_name, " has shape ", v.sizes(), "; both must have one shape, but that ", v_name, " may have a smaller head_dim");
    TORCH_CHECK_VALUE(head_dim_v == head_dim || (head_dim_v >= 8 && head_dim_v < head_dim), "sinkattn: ", v_name, " has head_dim ",
            head_dim_v, ", ", k_name, " has ", head_dim, "; ", v_name, "'s must be a multiple of 8 from 8 to ", k_name, "'s");
    problem->head_dim = head_dim;
    problem->head_dim_v = head_dim_v == head_dim ? 0 : static_cast<int32_t>(head_dim_v);
}

at::Tensor indices(const at::Tensor &tensor, const char *name, at::IntArrayRef shape, const at::Tensor &q, const char *q_name) {
    check_like(tensor, name, q, at::kInt, q_name);
    check_shape(tensor, name, shape);
    return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

at::Tensor block_table_of(const at::Tensor &tensor, int64_t batch, const at::Tensor &q, const char *q_name) {
    TORCH_CHECK_VALUE(tensor.dim() == 2, "sinkattn: block_table has ", tensor.dim(), " dimensions, it must be [batch, max_pages]");
    return indices(tensor, "block_table", {batch, tensor.size(1)}, q, q_name);
}

static c10::Stream current_stream(const at::Tensor &q) { return c10::impl::VirtualGuardImpl(q.device().type()).getStream(q.device()); }

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
void *stream_of(const at::Tensor &q) { return current_stream(q).native_handle(); }
#else
// torch 2.10's stream does not say its handle; a function of its CUDA library does, which is loaded where there is a CUDA tensor.
void *stream_of(const at::Tensor &q) {
    using get_current_stream = int32_t (*)(int32_t, void **);
    static const auto get = reinterpret_cast<get_current_stream>(
            dlsym(dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream"));
    void *stream = nullptr;
    TORCH_CHECK(get && get(current_stream(q).device_index(), &stream) == 0, "sinkattn: torch ", TORCH_VERSION, " tells no CUDA stream");
    return stream;
}
#endif

void keep_until_read(const at::Tensor &host, const at::Tensor &q) {
    if (q.is_cpu() || !host.is_cpu()) return;
    void *data = const_cast<void *>(host.const_data_ptr());
    at::getHostAllocator(q.device().type())->record_event(data, host.storage().data_ptr().get_context(), current_stream(q));
}

void check_if_asked(const at::Tensor &q) {
    const char *check = std::getenv("SINKATTN_CHECK");
    if (check && *check == '1') raise_on(sinkattn_check_errors(q.get_device()));
}

// Whether a dimension's stride is ever taken; where it is not, it may be anything and says nothing.
static bool is_step(const at::Tensor &tensor, int64_t dim) { return tensor.size(dim) > 1 && tensor.numel() > 0; }

bool has_usable_rows(const at::Tensor &tensor) {
    const int64_t last = tensor.dim() - 1;
    if (is_step(tensor, last) && tensor.stride(last) != 1) return false;
    if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0) return false;
    for (int64_t dim = 0; dim < last; ++dim)
        if (is_step(tensor, dim) && tensor.stride(dim) * tensor.element_size() % 16 != 0) return false;
    return true;
}

at::Tensor readable(const at::Tensor &tensor) { return has_usable_rows(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous); }

static sinkattn_tensor rows_at(const at::Tensor &tensor, void *data) {
    const int64_t heads = tensor.dim() - 2;
    sinkattn_tensor rows{};
    rows.data = data;
    rows.head_stride = is_step(tensor, heads) ? tensor.stride(heads) : tensor.size(heads + 1);
    rows.row_stride = is_step(tensor, heads - 1) ? tensor.stride(heads - 1) : tensor.size(heads) * rows.head_stride;
    if (heads == 2) rows.batch_stride = is_step(tensor, 0) ? tensor.stride(0) : tensor.size(1) * rows.row_stride;
    return rows;
}

sinkattn_tensor rows_of(const at::Tensor &tensor) { return rows_at(tensor, const_cast<void *>(tensor.const_data_ptr())); }

sinkattn_tensor written_rows_of(const at::Tensor &tensor) { return rows_at(tensor, tensor.mutable_data_ptr()); }

} // namespace sinkattn
