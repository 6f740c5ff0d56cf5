// SPDX-License-Identifier: Apache-2.0
//
// The operator that writes new keys and values into a cache, on CPU and CUDA.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "convert.h"

namespace sinkattn {
namespace {

// Of new rows [batch, new, ..], or packed [total, ..], whose pages slots are of.
sinkattn_problem problem_of(const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const at::Tensor &table) {
    sinkattn_problem problem{};
    check_widths(k_cache, "k_cache", v_cache, "v_cache", &problem);
    problem.op = SINKATTN_DECODE;
    problem.dtype = dtype_of(k_cache, "k_cache");
    problem.packed = k.dim() == 3;
    problem.batch = problem.packed ? 1 : k.size(0);
    problem.q_len = k.size(-3);
    problem.num_q_heads = problem.num_kv_heads = k_cache.size(2);
    problem.k_len = k_cache.size(1);
    if (table.defined() || problem.packed) {
        problem.num_pages = k_cache.size(0);
        problem.page_size = k_cache.size(1);
    }
    if (table.defined()) problem.k_len *= table.size(1);
    return problem;
}

void run(const sinkattn_append_args &args, const at::Tensor &k_cache) {
    const c10::DeviceGuard guard(k_cache.device());
    sinkattn_context context{};
    if (!k_cache.is_cpu()) context.stream = stream_of(k_cache);
    raise_on(sinkattn_append(&args, k_cache.is_cpu() ? SINKATTN_CPU : SINKATTN_CUDA, &context));
    if (!k_cache.is_cpu()) check_if_asked(k_cache);
}

// Addresses of the first byte and of the one behind the last.
std::pair<uintptr_t, uintptr_t> extent(const at::Tensor &tensor) {
    if (tensor.numel() == 0) return {0, 0};
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return {begin, begin + static_cast<uintptr_t>((last + 1) * tensor.element_size())};
}

bool may_overlap(const at::Tensor &a, const at::Tensor &b) {
    const auto [a_begin, a_end] = extent(a);
    const auto [b_begin, b_end] = extent(b);
    return a_begin < b_end && b_begin < a_end;
}

using Axis = std::pair<int64_t, int64_t>; // bytes a step, size
using Axes = c10::SmallVector<Axis, 5>;

Axes axes_of(const at::Tensor &tensor) {
    Axes axes;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
        if (tensor.size(dim) > 1) axes.emplace_back(tensor.stride(dim) * tensor.element_size(), tensor.size(dim));
    return axes;
}

// Elements lie apart when a step of each axis is longer than all that the shorter ones span. Some layouts that overlap nowhere fail this;
// none that overlaps passes.
bool are_apart(Axes axes, int64_t element_size) {
    std::sort(axes.begin(), axes.end());
    int64_t last = element_size - 1;
    for (const auto &[step, size] : axes) {
        if (step <= last) return false;
        last += (size - 1) * step;
    }
    return true;
}

// Keys beside values in one tensor: two views with the same steps, which are one view with an axis of two more. Narrower values: their
// rows have the steps of the keys' rows, and both together lie apart, as one row where they touch.
bool are_interleaved(const at::Tensor &k_cache, const at::Tensor &v_cache) {
    const bool k_first = extent(k_cache).first < extent(v_cache).first;
    const at::Tensor &first = k_first ? k_cache : v_cache, &second = k_first ? v_cache : k_cache;
    const int64_t element = k_cache.element_size(), first_row = first.size(-1) * element, second_row = second.size(-1) * element;
    const auto gap = static_cast<int64_t>(extent(second).first - extent(first).first);
    Axes axes = axes_of(first);
    if (axes == axes_of(second)) {
        axes.emplace_back(gap, 2);
        return are_apart(std::move(axes), element);
    }
    Axes rows = axes_of(first.select(-1, 0));
    if (first.stride(-1) != 1 || second.stride(-1) != 1 || rows != axes_of(second.select(-1, 0))) return false;
    if (gap >= first_row && are_apart(rows, gap + second_row)) return true;
    rows.emplace_back(gap, 2);
    return are_apart(std::move(rows), std::max(first_row, second_row));
}

// Values that are columns of the keys, as of one latent, are written with them.
bool are_columns(const at::Tensor &v_cache, const at::Tensor &k_cache) {
    if (v_cache.numel() == 0) return true;
    const auto gap = static_cast<int64_t>(extent(v_cache).first - extent(k_cache).first);
    const int64_t room = (k_cache.size(-1) - v_cache.size(-1)) * k_cache.element_size();
    return v_cache.stride(-1) == 1 && k_cache.stride(-1) == 1 && gap >= 0 && gap <= room &&
           axes_of(v_cache.select(-1, 0)) == axes_of(k_cache.select(-1, 0));
}

void check_overlap(const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v) {
    for (const auto &[cache, name] : {std::pair(&k_cache, "k_cache"), std::pair(&v_cache, "v_cache")})
        TORCH_CHECK_VALUE(cache->numel() == 0 || are_apart(axes_of(*cache), cache->element_size()), "sinkattn: ", name, " has strides ",
                cache->strides(), "; it is written, so its rows must not overlap");
    TORCH_CHECK_VALUE(v || are_columns(v_cache, k_cache),
            "sinkattn: v is None, and v_cache is not a slice of k_cache's columns; give the new values, or k_cache[..., :n] as v_cache");
    TORCH_CHECK_VALUE(!v || !may_overlap(k_cache, v_cache) || are_interleaved(k_cache, v_cache),
            "sinkattn: k_cache and v_cache overlap; both are written, so each needs memory of its own, or v_cache is a slice of k_cache's "
            "columns and v None");
    for (const auto &[rows, name] : {std::pair(&k, "k"), std::pair(v ? &*v : &k, "v")})
        for (const auto &[cache, cache_name] : {std::pair(&k_cache, "k_cache"), std::pair(&v_cache, "v_cache")})
            TORCH_CHECK_VALUE(!may_overlap(*rows, *cache), "sinkattn: ", name, " lies within ", cache_name,
                    ", which is written while it is read; give a clone of it");
}

void check_rows(const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v) {
    dtype_of(k_cache, "k_cache");
    check_like(v_cache, "v_cache", k_cache, k_cache.scalar_type(), "k_cache");
    sinkattn_problem widths{};
    check_widths(k_cache, "k_cache", v_cache, "v_cache", &widths);
    if (v) check_widths(k, "k", *v, "v", &widths);
    for (const auto &[tensor, name, cache, cache_name] :
            {std::tuple(&k, "k", &k_cache, "k_cache"), std::tuple(v ? &*v : nullptr, "v", &v_cache, "v_cache")}) {
        if (!tensor) continue;
        check_like(*tensor, name, k_cache, k_cache.scalar_type(), "k_cache");
        TORCH_CHECK_VALUE(tensor->size(-1) == cache->size(-1), "sinkattn: ", name, " has head_dim ", tensor->size(-1), ", ", cache_name,
                " has ", cache->size(-1));
        std::vector<int64_t> shape = k.sizes().vec();
        std::copy(cache->sizes().end() - 2, cache->sizes().end(), shape.end() - 2);
        check_shape(*tensor, name, shape);
    }
    check_overlap(k_cache, v_cache, k, v);
}

// Runs on the cache; one whose rows C does not take is copied there and back.
void run_on(sinkattn_append_args &args, at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v) {
    const at::Tensor read_k = readable(k), read_v = v ? readable(*v) : at::Tensor();
    at::Tensor written_k = readable(k_cache), written_v = v ? readable(v_cache) : at::Tensor();
    args.cache.fwd.k = written_rows_of(written_k);
    args.k = rows_of(read_k);
    if (v) {
        args.cache.fwd.v = written_rows_of(written_v);
        args.v = rows_of(read_v);
    }
    run(args, k_cache);
    if (!written_k.is_same(k_cache)) k_cache.copy_(written_k);
    if (v && !written_v.is_same(v_cache)) v_cache.copy_(written_v);
}

at::Tensor append_kv(at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &cache_seqlens,
        const Maybe &block_table) {
    check_append_ranks(k_cache, v_cache, k, v);
    check_rows(k_cache, v_cache, k, v);
    TORCH_CHECK_VALUE(block_table || k_cache.size(0) == k.size(0), "sinkattn: k_cache has batch ", k_cache.size(0), ", k has ", k.size(0));
    const at::Tensor before = indices(cache_seqlens, "cache_seqlens", {k.size(0)}, k_cache, "k_cache");
    const at::Tensor table = block_table ? block_table_of(*block_table, k.size(0), k_cache, "k_cache") : at::Tensor();
    at::Tensor after = at::empty(before.sizes(), before.options());

    sinkattn_append_args args{};
    args.cache.fwd.problem = problem_of(k_cache, v_cache, k, table);
    args.cache.cache_seqlens = before.const_data_ptr<int32_t>();
    if (table.defined()) {
        args.cache.block_table = table.const_data_ptr<int32_t>();
        args.cache.block_table_stride = table.stride(0);
    }
    args.cache_seqlens = after.mutable_data_ptr<int32_t>();
    run_on(args, k_cache, v_cache, k, v);
    return after;
}

// Engines pad k and v, and have a slot for each row that counts.
void append_kv_slots(at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &slot_mapping) {
    check_slot_ranks(k_cache, v_cache, k, v, slot_mapping);
    check_rows(k_cache, v_cache, k, v);
    TORCH_CHECK_VALUE(slot_mapping.scalar_type() == at::kLong || slot_mapping.scalar_type() == at::kInt, "sinkattn: slot_mapping is ",
            slot_mapping.scalar_type(), ", it must be Long or Int (torch.int64, torch.int32)");
    TORCH_CHECK_VALUE(slot_mapping.size(0) <= k.size(0), "sinkattn: slot_mapping has ", slot_mapping.size(0), " slots, k has ", k.size(0),
            " rows; there must be a row for each slot");
    if (k_cache.numel() == 0 && slot_mapping.size(0) == 0) return;
    const at::Tensor slots = slot_mapping.to(at::kLong).contiguous();
    const at::Tensor rows_k = k.narrow(0, 0, slots.size(0));
    const Maybe rows_v = v ? Maybe(v->narrow(0, 0, slots.size(0))) : Maybe();
    sinkattn_append_args args{};
    args.cache.fwd.problem = problem_of(k_cache, v_cache, rows_k, {});
    args.slot_mapping = slots.const_data_ptr<int64_t>();
    run_on(args, k_cache, v_cache, rows_k, rows_v);
}

} // namespace

TORCH_LIBRARY_IMPL(sinkattn, CPU, m) {
    m.impl("append_kv", append_kv);
    m.impl("append_kv_slots", append_kv_slots);
}

TORCH_LIBRARY_IMPL(sinkattn, CUDA, m) {
    m.impl("append_kv", append_kv);
    m.impl("append_kv_slots", append_kv_slots);
}

} // namespace sinkattn
