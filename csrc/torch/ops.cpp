// SPDX-License-Identifier: Apache-2.0
//
// The operators on real tensors: arguments to C structs, a plan, a workspace, a run. Nothing here knows which device it serves, so
// one set of functions is registered for CPU and CUDA.

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"

#ifndef _OPENMP
#error "compile with -fopenmp: at::parallel_for is serial without it"
#endif

namespace sinkattn {
namespace {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeInt = std::optional<int64_t>;
using MaybeScale = std::optional<double>;

void run_on_torch_threads(void * /*self*/, int32_t workers, void (*task)(void *, int32_t), void *arg) {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) task(arg, static_cast<int32_t>(worker));
    });
}

// Inputs as C reads them: copies, where they were needed, live as long as this.
struct Inputs {
    at::Tensor q, k, v, s_aux, lengths_q, lengths_k, block_table;
    sinkattn_fwd_args args{};
};

// What few decodes have.
struct DecodeExtras {
    const Maybe &k_cache_host, &v_cache_host;
    sinkattn_nvfp4 nvfp4;
};

// What every operation has. Packed and dense tensors differ in front of [.., row, head, head_dim] only.
Inputs common_inputs(sinkattn_op op, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux,
        MaybeScale softmax_scale, const sinkattn_mask &mask) {
    Inputs in;
    sinkattn_problem &problem = in.args.problem;
    problem.op = op;
    problem.dtype = dtype_of(q, "q");
    const bool decodes = op == SINKATTN_DECODE && q.dim() == 4; // packed rows call their cache k and v
    const char *k_name = decodes ? "k_cache" : "k";
    const char *v_name = decodes ? "v_cache" : "v";
    check_like(k, k_name, q, q.scalar_type());
    check_like(v, v_name, q, q.scalar_type());
    TORCH_CHECK_VALUE(k.size(-1) == q.size(-1), "sinkattn: ", k_name, " has head_dim ", k.size(-1), ", q has ", q.size(-1));
    check_widths(k, k_name, v, v_name, &problem);
    problem.q_len = q.size(-3);
    problem.k_len = k.size(-3);
    problem.num_q_heads = q.size(-2);
    problem.num_kv_heads = k.size(-2);
    problem.mask = mask;
    TORCH_CHECK_VALUE(softmax_scale != 0.0, "sinkattn: softmax_scale is 0; leave it out for head_dim ** -0.5");
    problem.softmax_scale = softmax_scale.value_or(0.0);
    if (s_aux) {
        check_device(*s_aux, "s_aux", q);
        check_shape(*s_aux, "s_aux", {problem.num_q_heads});
        problem.s_aux_dtype = s_aux_dtype_of(*s_aux, q);
        in.s_aux = s_aux->contiguous();
        in.args.s_aux = in.s_aux.const_data_ptr();
    }
    in.q = readable(q);
    in.k = readable(k);
    in.v = readable(v);
    in.args.q = rows_of(in.q);
    in.args.k = rows_of(in.k);
    in.args.v = rows_of(in.v);
    return in;
}

void take_packed_rows(Inputs &in, const at::Tensor &q, const at::Tensor &cu_seqlens_q) {
    sinkattn_problem &problem = in.args.problem;
    TORCH_CHECK_VALUE(cu_seqlens_q.numel() > 0, "sinkattn: cu_seqlens_q is empty, it must hold batch + 1 offsets");
    problem.packed = true;
    problem.batch = cu_seqlens_q.numel() - 1;
    in.lengths_q = indices(cu_seqlens_q, "cu_seqlens_q", {problem.batch + 1}, q);
    in.args.cu_seqlens_q = in.lengths_q.const_data_ptr<int32_t>();
}

// Hints that no kernel reads: the callers of other packages pass them.
void check_hints(MaybeInt max_seqlen_q, MaybeInt max_seqlen_k) {
    TORCH_CHECK_VALUE(max_seqlen_q.value_or(0) >= 0, "sinkattn: max_seqlen_q is ", *max_seqlen_q, "; it must be at least 0");
    TORCH_CHECK_VALUE(max_seqlen_k.value_or(0) >= 0, "sinkattn: max_seqlen_k is ", *max_seqlen_k, "; it must be at least 0");
}

Inputs prefill_inputs(sinkattn_op op, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux,
        const Maybe &cu_seqlens_q, const Maybe &cu_seqlens_k, MaybeInt max_seqlen_q, MaybeInt max_seqlen_k, MaybeScale softmax_scale,
        const sinkattn_mask &mask) {
    const bool packed = check_ranks(q, k, v, cu_seqlens_q, cu_seqlens_k);
    Inputs in = common_inputs(op, q, k, v, s_aux, softmax_scale, mask);
    sinkattn_problem &problem = in.args.problem;
    if (packed) {
        take_packed_rows(in, q, *cu_seqlens_q);
        check_pair(*cu_seqlens_q, "cu_seqlens_q", *cu_seqlens_k, "cu_seqlens_k");
        in.lengths_k = indices(*cu_seqlens_k, "cu_seqlens_k", {problem.batch + 1}, q);
        in.args.cu_seqlens_k = in.lengths_k.const_data_ptr<int32_t>();
        check_hints(max_seqlen_q, max_seqlen_k);
    } else {
        TORCH_CHECK_VALUE(k.size(0) == q.size(0), "sinkattn: k has batch ", k.size(0), ", q has ", q.size(0));
        problem.batch = q.size(0);
    }
    return in;
}

// As q, with the values' columns.
std::vector<int64_t> out_shape(const at::Tensor &q, const at::Tensor &v) {
    std::vector<int64_t> shape = q.sizes().vec();
    shape.back() = v.size(-1);
    return shape;
}

// [batch, num_q_heads, q_len], packed [num_q_heads, total_q]
std::vector<int64_t> lse_shape(const sinkattn_problem &problem) {
    if (problem.packed) return {problem.num_q_heads, problem.q_len};
    return {problem.batch, problem.num_q_heads, problem.q_len};
}

template <class Args> using Run = sinkattn_status (*)(const Args *, const sinkattn_plan *, const sinkattn_context *);

// A second thread costs more than it brings where there is next to nothing to do. The plan is the one that sinkattn.plan gives all the
// same.
bool is_small(const sinkattn_problem &p) {
    const double products = static_cast<double>(p.batch) * static_cast<double>(p.q_len) * static_cast<double>(p.k_len) *
                            static_cast<double>(p.num_q_heads) * static_cast<double>(p.head_dim);
    return products < 65536.0;
}

// Facts of a device change with SINKATTN_CUDA_ARCH alone; asking the driver takes longer than planning.
sinkattn_device cuda_device(int32_t ordinal) {
    static std::mutex mutex;
    static std::map<std::pair<int32_t, std::string>, sinkattn_device> known;
    const std::lock_guard<std::mutex> lock(mutex);
    const char *arch = std::getenv("SINKATTN_CUDA_ARCH");
    const std::pair<int32_t, std::string> asked{ordinal, arch ? arch : ""};
    const auto found = known.find(asked);
    if (found != known.end()) return found->second;
    sinkattn_device device{};
    raise_on(sinkattn_query_cuda(ordinal, &device));
    return known[asked] = device;
}

// scratch: the caller's workspace, for captured graphs; absent: allocated here, and gone afterwards.
template <class Args>
void launch(Run<Args> run, const Args &args, const sinkattn_problem &problem, const at::Tensor &q, const Maybe &scratch = {}) {
    const c10::DeviceGuard guard(q.device());
    sinkattn_device device{};
    if (q.is_cpu())
        raise_on(sinkattn_query_cpu(at::get_num_threads(), &device));
    else
        device = cuda_device(q.get_device());
    sinkattn_plan plan{};
    raise_on(sinkattn_make_plan(&problem, &device, &plan));
    if (scratch) {
        check_like(*scratch, "scratch", q, at::kByte);
        TORCH_CHECK_VALUE(scratch->is_contiguous() && scratch->numel() >= plan.workspace_bytes, "sinkattn: scratch has ", scratch->numel(),
                " bytes, this call needs ", plan.workspace_bytes,
                " contiguous ones; sinkattn.plan(\"decode\", ...)[\"workspace_bytes\"] says so beforehand");
    }
    at::Tensor workspace;
    if (scratch)
        workspace = *scratch;
    else if (plan.workspace_bytes > 0)
        workspace = at::empty({plan.workspace_bytes}, q.options().dtype(at::kByte));
    sinkattn_context context{};
    if (workspace.defined()) {
        context.workspace = workspace.mutable_data_ptr();
        context.workspace_bytes = workspace.numel();
    }
    if (!q.is_cpu())
        context.stream = stream_of(q);
    else if (!is_small(problem))
        context.executor.run = run_on_torch_threads;
    raise_on(run(&args, &plan, &context));
    if (!q.is_cpu()) check_if_asked(q);
}

// Result: out and lse, and lse_raw where there are three; in.args will point to them.
template <class Result> Result empty_results(Inputs &in, const at::Tensor &q, const at::Tensor &v) {
    Result result;
    std::get<0>(result) = at::empty(out_shape(q, v), q.options());
    std::get<1>(result) = at::empty(lse_shape(in.args.problem), q.options().dtype(lse_dtype(q)));
    in.args.out = written_rows_of(std::get<0>(result));
    in.args.lse = std::get<1>(result).mutable_data_ptr();
    if constexpr (std::tuple_size_v<Result> == 3) {
        std::get<2>(result) = at::empty_like(std::get<1>(result));
        in.args.lse_raw = std::get<2>(result).mutable_data_ptr();
    }
    return result;
}

// kOutputs: 2, out and lse; 3, lse_raw too.
template <int kOutputs, class Result = std::conditional_t<kOutputs == 3, Tensors3, Tensors2>>
Result flash_attn_fwd(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux, const Maybe &cu_seqlens_q,
        const Maybe &cu_seqlens_k, MaybeInt max_seqlen_q, MaybeInt max_seqlen_k, MaybeScale softmax_scale, int64_t window_size_left,
        int64_t window_size_right, int64_t num_sink_tokens) {
    Inputs in = prefill_inputs(SINKATTN_FWD, q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            mask_of(window_size_left, window_size_right, num_sink_tokens));
    Result result = empty_results<Result>(in, q, v);
    launch(sinkattn_fwd, in.args, in.args.problem, q);
    return result;
}

Tensors4 flash_attn_bwd(const at::Tensor &dout, const Maybe &dlse, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
        const at::Tensor &out, const at::Tensor &lse, const Maybe &s_aux, const Maybe &cu_seqlens_q, const Maybe &cu_seqlens_k,
        MaybeInt max_seqlen_q, MaybeInt max_seqlen_k, MaybeScale softmax_scale, int64_t window_size_left, int64_t window_size_right,
        int64_t num_sink_tokens) {
    Inputs in = prefill_inputs(SINKATTN_BWD, q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            mask_of(window_size_left, window_size_right, num_sink_tokens));
    const auto rows_like_out = [&](const at::Tensor &tensor, const char *name) {
        check_like(tensor, name, q, q.scalar_type());
        check_shape(tensor, name, out_shape(q, v));
        return readable(tensor);
    };
    const auto stats = [&](const at::Tensor &tensor, const char *name) {
        check_like(tensor, name, q, lse_dtype(q));
        check_shape(tensor, name, lse_shape(in.args.problem));
        return tensor.contiguous();
    };
    const at::Tensor read_out = rows_like_out(out, "out");
    const at::Tensor read_dout = rows_like_out(dout, "dout");
    const at::Tensor read_lse = stats(lse, "lse");
    const at::Tensor read_dlse = dlse ? stats(*dlse, "dlse") : at::Tensor();
    in.args.out = rows_of(read_out);
    in.args.lse = const_cast<void *>(read_lse.const_data_ptr());

    at::Tensor dq = at::empty(q.sizes(), q.options());
    at::Tensor dk = at::empty(k.sizes(), k.options());
    at::Tensor dv = at::empty(v.sizes(), v.options());
    at::Tensor ds_aux = s_aux ? at::empty(s_aux->sizes(), s_aux->options()) : at::empty({0}, q.options().dtype(at::kFloat));

    sinkattn_bwd_args args{};
    args.fwd = in.args;
    args.dout = rows_of(read_dout);
    args.dlse = dlse ? read_dlse.const_data_ptr() : nullptr;
    args.dq = written_rows_of(dq);
    args.dk = written_rows_of(dk);
    args.dv = written_rows_of(dv);
    args.ds_aux = s_aux ? ds_aux.mutable_data_ptr() : nullptr;
    launch(sinkattn_bwd, args, in.args.problem, q);
    return {std::move(dq), std::move(dk), std::move(dv), std::move(ds_aux)};
}

// The lengths and pages of a cache for problem.batch sequences.
sinkattn_decode_args cache_args(Inputs &in, const at::Tensor &q, const at::Tensor &k_cache, const Maybe &lengths, const char *lengths_name,
        const Maybe &block_table) {
    sinkattn_problem &problem = in.args.problem;
    sinkattn_decode_args args{};
    if (lengths) {
        in.lengths_k = indices(*lengths, lengths_name, {problem.batch}, q);
        args.cache_seqlens = in.lengths_k.const_data_ptr<int32_t>();
    }
    if (block_table) {
        in.block_table = block_table_of(*block_table, problem.batch, q);
        args.block_table = in.block_table.const_data_ptr<int32_t>();
        args.block_table_stride = in.block_table.stride(0);
        problem.num_pages = k_cache.size(0);
        problem.page_size = k_cache.size(1);
        problem.k_len = block_table->size(1) * k_cache.size(1);
    }
    return args;
}

// Rows of one call are causal among themselves, and stand at the end of the keys in use.
sinkattn_decode_args decode_args(Inputs &in, const at::Tensor &q, const at::Tensor &k_cache, const Maybe &cache_seqlens,
        const Maybe &block_table, int64_t num_splits, bool invariant) {
    sinkattn_problem &problem = in.args.problem;
    problem.batch = q.size(0);
    problem.num_splits = num_splits;
    problem.invariant = invariant;
    TORCH_CHECK_VALUE(
            block_table || k_cache.size(0) == problem.batch, "sinkattn: k_cache has batch ", k_cache.size(0), ", q has ", problem.batch);
    return cache_args(in, q, k_cache, cache_seqlens, "cache_seqlens", block_table);
}

// Pages beyond the cache's, in memory of the host that a GPU reads in place, so that nothing can be copied for it.
sinkattn_tensor host_pages(const at::Tensor &host, const char *name, const at::Tensor &cache) {
    TORCH_CHECK_VALUE(host.dim() == 4 && host.sizes().slice(1) == cache.sizes().slice(1), "sinkattn: ", name, " has shape ", host.sizes(),
            ", it must be that of the cache, ", cache.sizes(), ", but for the number of pages");
    TORCH_CHECK_VALUE(host.scalar_type() == cache.scalar_type(), "sinkattn: ", name, " is ", host.scalar_type(), ", it must be ",
            cache.scalar_type());
    TORCH_CHECK_VALUE(host.device() == cache.device() || (host.is_cpu() && (host.is_pinned() || host.numel() == 0)), "sinkattn: ", name,
            " is on ", host.device(), ", it must be pinned memory of the host (tensor.pin_memory()), or on ", cache.device());
    TORCH_CHECK_VALUE(
            has_usable_rows(host), "sinkattn: ", name, " must have contiguous, 16-byte aligned rows, its strides are ", host.strides());
    return rows_of(host);
}

sinkattn_tier host_tier(const DecodeExtras &extras, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &block_table) {
    sinkattn_tier host{};
    const auto &[k_host, v_host, nvfp4] = extras;
    TORCH_CHECK_VALUE(k_host.has_value() == v_host.has_value(), "sinkattn: k_cache_host and v_cache_host go together, only ",
            k_host ? "k_cache_host" : "v_cache_host", " was given");
    if (!k_host) return host;
    TORCH_CHECK_VALUE(block_table, "sinkattn: k_cache_host is given without block_table, which names its pages");
    host.k = host_pages(*k_host, "k_cache_host", k_cache);
    host.v = host_pages(*v_host, "v_cache_host", v_cache);
    TORCH_CHECK_VALUE(k_host->size(0) == v_host->size(0), "sinkattn: v_cache_host has ", v_host->size(0), " pages, k_cache_host has ",
            k_host->size(0));
    host.num_pages = k_host->size(0);
    return host;
}

// Of one page or none, a cache's strides say nothing of the next page, or of any row: then the host's do.
void take_strides(sinkattn_tensor &cache, const sinkattn_tensor &host, int64_t num_pages) {
    if (num_pages == 0) cache = {cache.data, host.batch_stride, host.row_stride, host.head_stride};
    if (num_pages == 1) cache.batch_stride = host.batch_stride;
}

void decode(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux, const Maybe &cache_seqlens,
        const Maybe &block_table, MaybeScale softmax_scale, int64_t window_size_left, int64_t num_sink_tokens, int64_t num_splits,
        bool invariant, at::Tensor &out, at::Tensor &lse, const Maybe &scratch, const DecodeExtras &extras, void *lse_raw = nullptr) {
    Inputs in = common_inputs(SINKATTN_DECODE, q, k_cache, v_cache, s_aux, softmax_scale, mask_of(window_size_left, 0, num_sink_tokens));
    sinkattn_decode_args args = decode_args(in, q, k_cache, cache_seqlens, block_table, num_splits, invariant);
    in.args.problem.extras = extras.k_cache_host || extras.nvfp4.values;
    args.fwd = in.args;
    args.fwd.out = written_rows_of(out);
    args.fwd.lse = lse.mutable_data_ptr();
    args.fwd.lse_raw = lse_raw;
    args.host = host_tier(extras, in.k, in.v, block_table);
    if (args.host.num_pages) {
        take_strides(args.fwd.k, args.host.k, in.k.size(0));
        take_strides(args.fwd.v, args.host.v, in.v.size(0));
    }
    args.nvfp4 = extras.nvfp4;
    launch(sinkattn_decode, args, in.args.problem, q, scratch);
    for (const Maybe *host : {&extras.k_cache_host, &extras.v_cache_host})
        if (*host) keep_until_read(**host, q);
}

at::Tensor empty_lse(const at::Tensor &q) { return at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(lse_dtype(q))); }

Tensors2 flash_decode(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, MaybeScale softmax_scale, int64_t window_size_left, int64_t num_sink_tokens,
        int64_t num_splits, bool invariant, const Maybe &k_cache_host, const Maybe &v_cache_host) {
    check_cache_ranks(q, k_cache, v_cache);
    at::Tensor out = at::empty(out_shape(q, v_cache), q.options());
    at::Tensor lse = empty_lse(q);
    decode(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, window_size_left, num_sink_tokens, num_splits, invariant,
            out, lse, {}, {k_cache_host, v_cache_host, {}});
    return {std::move(out), std::move(lse)};
}

Tensors3 flash_decode_raw(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, MaybeScale softmax_scale, int64_t window_size_left, int64_t num_sink_tokens,
        int64_t num_splits, bool invariant, const Maybe &k_cache_host, const Maybe &v_cache_host) {
    check_cache_ranks(q, k_cache, v_cache);
    at::Tensor out = at::empty(out_shape(q, v_cache), q.options());
    at::Tensor lse = empty_lse(q), lse_raw = empty_lse(q);
    decode(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, window_size_left, num_sink_tokens, num_splits, invariant,
            out, lse, {}, {k_cache_host, v_cache_host, {}}, lse_raw.mutable_data_ptr());
    return {std::move(out), std::move(lse), std::move(lse_raw)};
}

Tensors4 flash_decode_nvfp4(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, MaybeScale softmax_scale, int64_t window_size_left, int64_t num_sink_tokens,
        int64_t num_splits, bool invariant, double global_scale, const Maybe &k_cache_host, const Maybe &v_cache_host) {
    check_cache_ranks(q, k_cache, v_cache);
    TORCH_CHECK_VALUE(global_scale != 0.0, "sinkattn: global_scale is 0; leave it out for 1");
    at::Tensor out = at::empty(out_shape(q, v_cache), q.options());
    at::Tensor lse = empty_lse(q);
    at::Tensor values = at::empty({q.size(0), q.size(1), q.size(2), out.size(3) / 2}, q.options().dtype(at::kByte));
    at::Tensor scales = at::empty({q.size(0), q.size(1), q.size(2), out.size(3) / 16}, q.options().dtype(at::kFloat8_e4m3fn));
    const sinkattn_nvfp4 nvfp4{
            static_cast<uint8_t *>(values.mutable_data_ptr()), static_cast<uint8_t *>(scales.mutable_data_ptr()), global_scale};
    decode(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, window_size_left, num_sink_tokens, num_splits, invariant,
            out, lse, {}, {k_cache_host, v_cache_host, nvfp4});
    return {std::move(out), std::move(lse), std::move(values), std::move(scales)};
}

// kOutputs as in flash_attn_fwd.
template <int kOutputs, class Result = std::conditional_t<kOutputs == 3, Tensors3, Tensors2>>
Result flash_decode_varlen(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux,
        const at::Tensor &cu_seqlens_q, const at::Tensor &seqused_k, const Maybe &block_table, MaybeInt max_seqlen_q, MaybeInt max_seqlen_k,
        MaybeScale softmax_scale, int64_t window_size_left, int64_t window_size_right, int64_t num_sink_tokens) {
    check_varlen_ranks(q, k, v);
    Inputs in =
            common_inputs(SINKATTN_DECODE, q, k, v, s_aux, softmax_scale, mask_of(window_size_left, window_size_right, num_sink_tokens));
    sinkattn_problem &problem = in.args.problem;
    take_packed_rows(in, q, cu_seqlens_q);
    TORCH_CHECK_VALUE(seqused_k.dim() == 1 && seqused_k.size(0) == problem.batch, "sinkattn: seqused_k has shape ", seqused_k.sizes(),
            ", cu_seqlens_q has shape ", cu_seqlens_q.sizes(), "; they must be [batch] and [batch + 1]");
    TORCH_CHECK_VALUE(block_table || k.size(0) == problem.batch, "sinkattn: k has batch ", k.size(0), ", cu_seqlens_q has ", problem.batch,
            "; with pages give a block_table");
    check_hints(max_seqlen_q, max_seqlen_k);
    sinkattn_decode_args args = cache_args(in, q, k, seqused_k, "seqused_k", block_table);
    Result result = empty_results<Result>(in, q, v);
    args.fwd = in.args;
    launch(sinkattn_decode, args, problem, q);
    return result;
}

using Named = std::pair<const at::Tensor *, const char *>;

Named named(const Maybe &tensor, const char *name) { return {tensor ? &*tensor : nullptr, name}; }

// Views of one storage, of which one is written; C refuses what overlaps otherwise, under its own names.
void check_overlap(const Named &written, const Named &other) {
    if (!other.first) return;
    const at::MemOverlapStatus status = at::get_overlap_status(*written.first, *other.first);
    TORCH_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, "sinkattn: ", other.second, " and ",
            written.second, " overlap; ", written.second, " is written, so it must have memory of its own");
}

void flash_decode_out(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, MaybeScale softmax_scale, int64_t window_size_left, int64_t num_sink_tokens,
        int64_t num_splits, bool invariant, at::Tensor &out, at::Tensor &lse, at::Tensor &scratch, const Maybe &k_cache_host,
        const Maybe &v_cache_host) {
    check_cache_ranks(q, k_cache, v_cache);
    check_like(out, "out", q, q.scalar_type());
    check_shape(out, "out", out_shape(q, v_cache));
    TORCH_CHECK_VALUE(has_usable_rows(out), "sinkattn: out must have contiguous, 16-byte aligned rows, its strides are ", out.strides());
    check_like(lse, "lse", q, lse_dtype(q));
    check_shape(lse, "lse", {q.size(0), q.size(2), q.size(1)});
    TORCH_CHECK_VALUE(lse.is_contiguous(), "sinkattn: lse must be contiguous, its strides are ", lse.strides());
    const std::array<Named, 11> all{{{&q, "q"}, {&k_cache, "k_cache"}, {&v_cache, "v_cache"}, named(s_aux, "s_aux"),
            named(cache_seqlens, "cache_seqlens"), named(block_table, "block_table"), named(k_cache_host, "k_cache_host"),
            named(v_cache_host, "v_cache_host"), {&out, "out"}, {&lse, "lse"}, {&scratch, "scratch"}}};
    for (size_t written = 8; written < all.size(); ++written)
        for (size_t other = 0; other < written; ++other) check_overlap(all[written], all[other]);
    decode(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, window_size_left, num_sink_tokens, num_splits, invariant,
            out, lse, scratch, {k_cache_host, v_cache_host, {}});
}

void register_kernels(torch::Library &m) {
    m.impl("flash_attn_fwd", flash_attn_fwd<2>);
    m.impl("flash_attn_fwd_raw", flash_attn_fwd<3>);
    m.impl("flash_attn_bwd", flash_attn_bwd);
    m.impl("flash_decode", flash_decode);
    m.impl("flash_decode_raw", flash_decode_raw);
    m.impl("flash_decode_out", flash_decode_out);
    m.impl("flash_decode_nvfp4", flash_decode_nvfp4);
    m.impl("flash_decode_varlen", flash_decode_varlen<2>);
    m.impl("flash_decode_varlen_raw", flash_decode_varlen<3>);
}

} // namespace

TORCH_LIBRARY_IMPL(sinkattn, CPU, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(sinkattn, CUDA, m) { register_kernels(m); }

} // namespace sinkattn
