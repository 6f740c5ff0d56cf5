// SPDX-License-Identifier: Apache-2.0
//
// The operators on fake tensors: shapes, dtypes and strides of what the kernels return. Outputs are contiguous, whatever the inputs'
// strides.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <initializer_list>
#include <utility>

#include "convert.h"

namespace sinkattn {
namespace {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeInt = std::optional<c10::SymInt>;

at::Tensor empty_contiguous(const at::Tensor &like) { return at::empty_symint(like.sym_sizes(), like.options()); }

// As q, with the values' columns.
at::Tensor empty_out(const at::Tensor &q, const at::Tensor &v) {
    c10::SymDimVector shape(q.sym_sizes().begin(), q.sym_sizes().end());
    shape.back() = v.sym_size(-1);
    return at::empty_symint(shape, q.options());
}

at::Tensor empty_lse(const at::Tensor &q) {
    const at::TensorOptions options = q.options().dtype(lse_dtype(q));
    if (q.dim() == 3) return at::empty_symint({q.sym_size(1), q.sym_size(0)}, options);
    return at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, options);
}

// A tensor on the meta device brings a call here, whatever device the others are on.
void check_devices(const at::Tensor &q, std::initializer_list<std::pair<const char *, const Maybe *>> tensors) {
    for (const auto &[name, tensor] : tensors)
        if (*tensor) check_device(**tensor, name, q);
}

void check_hosts(const at::Tensor &q, const Maybe &k_cache_host, const Maybe &v_cache_host) {
    for (const auto &[name, host] : {std::pair("k_cache_host", &k_cache_host), std::pair("v_cache_host", &v_cache_host)})
        if (*host && !(*host)->is_cpu()) check_device(**host, name, q);
}

Tensors2 flash_attn_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux, const Maybe &cu_seqlens_q,
        const Maybe &cu_seqlens_k, MaybeInt /*max_seqlen_q*/, MaybeInt /*max_seqlen_k*/, std::optional<double> /*softmax_scale*/,
        c10::SymInt /*window_size_left*/, c10::SymInt /*window_size_right*/, c10::SymInt /*num_sink_tokens*/) {
    check_ranks(q, k, v, cu_seqlens_q, cu_seqlens_k);
    check_devices(q, {{"s_aux", &s_aux}, {"cu_seqlens_q", &cu_seqlens_q}, {"cu_seqlens_k", &cu_seqlens_k}});
    return {empty_out(q, v), empty_lse(q)};
}

Tensors3 flash_attn_fwd_raw(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux, const Maybe &cu_seqlens_q,
        const Maybe &cu_seqlens_k, MaybeInt max_seqlen_q, MaybeInt max_seqlen_k, std::optional<double> softmax_scale,
        c10::SymInt window_size_left, c10::SymInt window_size_right, c10::SymInt num_sink_tokens) {
    auto [out, lse] = flash_attn_fwd(q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k),
            softmax_scale, std::move(window_size_left), std::move(window_size_right), std::move(num_sink_tokens));
    return {std::move(out), std::move(lse), empty_lse(q)};
}

Tensors4 flash_attn_bwd(const at::Tensor &dout, const Maybe &dlse, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
        const at::Tensor &out, const at::Tensor &lse, const Maybe &s_aux, const Maybe &cu_seqlens_q, const Maybe &cu_seqlens_k,
        MaybeInt /*max_seqlen_q*/, MaybeInt /*max_seqlen_k*/, std::optional<double> /*softmax_scale*/, c10::SymInt /*window_size_left*/,
        c10::SymInt /*window_size_right*/, c10::SymInt /*num_sink_tokens*/) {
    check_ranks(q, k, v, cu_seqlens_q, cu_seqlens_k);
    check_device(dout, "dout", q);
    check_device(out, "out", q);
    check_device(lse, "lse", q);
    check_devices(q, {{"dlse", &dlse}, {"s_aux", &s_aux}, {"cu_seqlens_q", &cu_seqlens_q}, {"cu_seqlens_k", &cu_seqlens_k}});
    at::Tensor ds_aux = s_aux ? empty_contiguous(*s_aux) : at::empty({0}, q.options().dtype(at::kFloat));
    return {empty_contiguous(q), empty_contiguous(k), empty_contiguous(v), std::move(ds_aux)};
}

Tensors2 flash_decode(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, std::optional<double> /*softmax_scale*/, c10::SymInt /*window_size_left*/,
        c10::SymInt /*num_sink_tokens*/, c10::SymInt /*num_splits*/, bool /*invariant*/, const Maybe &k_cache_host,
        const Maybe &v_cache_host) {
    check_cache_ranks(q, k_cache, v_cache);
    check_hosts(q, k_cache_host, v_cache_host);
    check_devices(q, {{"s_aux", &s_aux}, {"cache_seqlens", &cache_seqlens}, {"block_table", &block_table}});
    return {empty_out(q, v_cache), empty_lse(q)};
}

Tensors3 flash_decode_raw(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, std::optional<double> softmax_scale, c10::SymInt window_size_left,
        c10::SymInt num_sink_tokens, c10::SymInt num_splits, bool invariant, const Maybe &k_cache_host, const Maybe &v_cache_host) {
    auto [out, lse] = flash_decode(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, std::move(window_size_left),
            std::move(num_sink_tokens), std::move(num_splits), invariant, k_cache_host, v_cache_host);
    return {std::move(out), std::move(lse), empty_lse(q)};
}

Tensors4 flash_decode_nvfp4(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, std::optional<double> softmax_scale, c10::SymInt window_size_left,
        c10::SymInt num_sink_tokens, c10::SymInt num_splits, bool invariant, double /*global_scale*/, const Maybe &k_cache_host,
        const Maybe &v_cache_host) {
    auto [out, lse] = flash_decode(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, std::move(window_size_left),
            std::move(num_sink_tokens), std::move(num_splits), invariant, k_cache_host, v_cache_host);
    const auto columns = [&](int64_t a_row, at::ScalarType dtype) {
        return at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v_cache.sym_size(3) / a_row}, q.options().dtype(dtype));
    };
    return {std::move(out), std::move(lse), columns(2, at::kByte), columns(16, at::kFloat8_e4m3fn)};
}

void flash_decode_out(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, std::optional<double> /*softmax_scale*/, c10::SymInt /*window_size_left*/,
        c10::SymInt /*num_sink_tokens*/, c10::SymInt /*num_splits*/, bool /*invariant*/, at::Tensor &out, at::Tensor &lse,
        at::Tensor &scratch, const Maybe &k_cache_host, const Maybe &v_cache_host) {
    check_cache_ranks(q, k_cache, v_cache);
    check_hosts(q, k_cache_host, v_cache_host);
    check_devices(q, {{"s_aux", &s_aux}, {"cache_seqlens", &cache_seqlens}, {"block_table", &block_table}});
    check_device(out, "out", q);
    check_device(lse, "lse", q);
    check_device(scratch, "scratch", q);
}

Tensors2 flash_decode_varlen(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux,
        const at::Tensor &cu_seqlens_q, const at::Tensor &seqused_k, const Maybe &block_table, MaybeInt /*max_seqlen_q*/,
        MaybeInt /*max_seqlen_k*/, std::optional<double> /*softmax_scale*/, c10::SymInt /*window_size_left*/,
        c10::SymInt /*window_size_right*/, c10::SymInt /*num_sink_tokens*/) {
    check_varlen_ranks(q, k, v);
    check_device(cu_seqlens_q, "cu_seqlens_q", q);
    check_device(seqused_k, "seqused_k", q);
    check_devices(q, {{"s_aux", &s_aux}, {"block_table", &block_table}});
    return {empty_out(q, v), empty_lse(q)};
}

Tensors3 flash_decode_varlen_raw(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux,
        const at::Tensor &cu_seqlens_q, const at::Tensor &seqused_k, const Maybe &block_table, MaybeInt max_seqlen_q, MaybeInt max_seqlen_k,
        std::optional<double> softmax_scale, c10::SymInt window_size_left, c10::SymInt window_size_right, c10::SymInt num_sink_tokens) {
    auto [out, lse] = flash_decode_varlen(q, k, v, s_aux, cu_seqlens_q, seqused_k, block_table, std::move(max_seqlen_q),
            std::move(max_seqlen_k), softmax_scale, std::move(window_size_left), std::move(window_size_right), std::move(num_sink_tokens));
    return {std::move(out), std::move(lse), empty_lse(q)};
}

at::Tensor append_kv(at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &cache_seqlens,
        const Maybe &block_table) {
    check_append_ranks(k_cache, v_cache, k, v);
    check_device(cache_seqlens, "cache_seqlens", k_cache, "k_cache");
    if (block_table) check_device(*block_table, "block_table", k_cache, "k_cache");
    return empty_contiguous(cache_seqlens);
}

void append_kv_slots(at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &slot_mapping) {
    check_slot_ranks(k_cache, v_cache, k, v, slot_mapping);
}

} // namespace

TORCH_LIBRARY_IMPL(sinkattn, Meta, m) {
    m.impl("flash_attn_fwd", flash_attn_fwd);
    m.impl("flash_attn_fwd_raw", flash_attn_fwd_raw);
    m.impl("flash_attn_bwd", flash_attn_bwd);
    m.impl("flash_decode", flash_decode);
    m.impl("flash_decode_raw", flash_decode_raw);
    m.impl("flash_decode_out", flash_decode_out);
    m.impl("flash_decode_nvfp4", flash_decode_nvfp4);
    m.impl("flash_decode_varlen", flash_decode_varlen);
    m.impl("flash_decode_varlen_raw", flash_decode_varlen_raw);
    m.impl("append_kv", append_kv);
    m.impl("append_kv_slots", append_kv_slots);
}

} // namespace sinkattn
