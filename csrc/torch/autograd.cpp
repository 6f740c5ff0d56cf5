// SPDX-License-Identifier: Apache-2.0
//
// Derivatives. The forward saves q, k, v, out, lse, lse_raw where it is an output, s_aux and the offsets of packed rows, and the backward
// recomputes the scores. A sink that needs no gradient is left out of the backward altogether: lse carries it already.

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace sinkattn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Maybe = std::optional<at::Tensor>;
using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeInt = std::optional<c10::SymInt>;
using MaybeScale = std::optional<double>;
using Mask = std::tuple<c10::SymInt, c10::SymInt, c10::SymInt>;
using Options = std::tuple<MaybeInt, MaybeInt, MaybeScale>;

bool requires_grad(const at::Tensor &tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(
            !tensor._fw_grad(/*level=*/0).defined(), "sinkattn: forward-mode differentiation is not supported; use reverse mode");
    return tensor.requires_grad();
}

bool requires_grad(const Maybe &tensor) { return tensor && requires_grad(*tensor); }

template <class Other> bool requires_grad(const Other &) { return false; }

// Every argument is looked at, so that no forward-mode tangent is dropped.
template <class... Args> bool wants_grad(const Args &...args) {
    return (static_cast<int>(requires_grad(args)) + ...) != 0 && c10::GradMode::is_enabled();
}

// torch's transforms take no autograd function of C++. sinkattn/calls.py knows this sentence, and calls one of Python.
void refuse_transforms() {
    const auto &transforms = at::functorch::functorchTLSAccessor();
    if (!transforms) return;
    try {
        transforms->checkSupportsCppAutogradFunction();
    } catch (const c10::Error &) {
        C10_THROW_ERROR(NotImplementedError,
                "sinkattn: a torch.func transform meets an operator; call flash_attn_func or flash_attn_varlen_func under it");
    }
}

template <class Signature> c10::TypedOperatorHandle<Signature> find(const char *name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The Autograd kernel of a Function: straight to the kernels below when nothing is to be differentiated.
template <class Function, class Signature = typename Function::Signature> struct Differentiable;

template <class Function, class Result, class... Args> struct Differentiable<Function, Result(Args...)> {
    static Result below(const Args &...args) {
        static const auto op = find<Result(Args...)>(Function::name);
        const at::AutoDispatchBelowADInplaceOrView guard;
        return op.call(args...);
    }

    static Result kernel(Args... args) {
        if (!wants_grad(args...)) return below(args...);
        refuse_transforms();
        const variable_list results = Function::apply(args...);
        if constexpr (std::is_same_v<Result, Tensors2>)
            return {results[0], results[1]};
        else if constexpr (std::is_same_v<Result, Tensors3>)
            return {results[0], results[1], results[2]};
        else
            return {results[0], results[1], results[2], results[3]};
    }
};

Maybe if_defined(const at::Tensor &tensor) { return tensor.defined() ? Maybe(tensor) : std::nullopt; }

struct FlashAttnBwd : torch::autograd::Function<FlashAttnBwd> {
    static constexpr bool is_traceable = true;
    static constexpr const char *name = "sinkattn::flash_attn_bwd";
    using Signature = Tensors4(const at::Tensor &, const Maybe &, const at::Tensor &, const at::Tensor &, const at::Tensor &,
            const at::Tensor &, const at::Tensor &, const Maybe &, const Maybe &, const Maybe &, MaybeInt, MaybeInt, MaybeScale,
            c10::SymInt, c10::SymInt, c10::SymInt);

    template <class... Args> static variable_list forward(AutogradContext * /*ctx*/, const Args &...args) {
        auto [dq, dk, dv, ds_aux] = Differentiable<FlashAttnBwd>::below(args...);
        return {dq, dk, dv, ds_aux};
    }

    static variable_list backward(AutogradContext * /*ctx*/, const variable_list & /*grads*/) {
        TORCH_CHECK_NOT_IMPLEMENTED(
                false, "sinkattn: double backward is not supported; drop create_graph=True, or differentiate sinkattn.reference");
    }
};

// Result: Tensors2, out and lse; Tensors3, lse_raw too.
template <class Result> struct FlashAttnFwd : torch::autograd::Function<FlashAttnFwd<Result>> {
    static constexpr bool is_traceable = true, has_raw = std::is_same_v<Result, Tensors3>;
    static constexpr const char *name = has_raw ? "sinkattn::flash_attn_fwd_raw" : "sinkattn::flash_attn_fwd";
    using Signature = Result(const at::Tensor &, const at::Tensor &, const at::Tensor &, const Maybe &, const Maybe &, const Maybe &,
            MaybeInt, MaybeInt, MaybeScale, c10::SymInt, c10::SymInt, c10::SymInt);

    static variable_list forward(AutogradContext *ctx, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Maybe &s_aux,
            const Maybe &cu_seqlens_q, const Maybe &cu_seqlens_k, const MaybeInt &max_seqlen_q, const MaybeInt &max_seqlen_k,
            MaybeScale softmax_scale, const c10::SymInt &window_size_left, const c10::SymInt &window_size_right,
            const c10::SymInt &num_sink_tokens) {
        const bool s_aux_learns = requires_grad(s_aux);
        const Result result = Differentiable<FlashAttnFwd>::below(q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                softmax_scale, window_size_left, window_size_right, num_sink_tokens);
        variable_list results = {std::get<0>(result), std::get<1>(result)};
        if constexpr (has_raw) results.push_back(std::get<2>(result));
        ctx->set_materialize_grads(false);
        variable_list saved = {
                q, k, v, s_aux_learns ? *s_aux : at::Tensor(), cu_seqlens_q.value_or(at::Tensor()), cu_seqlens_k.value_or(at::Tensor())};
        saved.insert(saved.end(), results.begin(), results.end());
        ctx->save_for_backward(saved);
        ctx->saved_data["options"] = Options(max_seqlen_q, max_seqlen_k, softmax_scale);
        ctx->saved_data["mask"] = Mask(window_size_left, window_size_right, num_sink_tokens);
        return results;
    }

    static Tensors4 gradients(AutogradContext *ctx, const variable_list &saved, const at::Tensor &dout, const at::Tensor &dlse,
            const at::Tensor &lse, const at::Tensor &s_aux) {
        static const auto bwd = find<FlashAttnBwd::Signature>(FlashAttnBwd::name);
        const at::Tensor &out = saved[6];
        const auto [max_seqlen_q, max_seqlen_k, softmax_scale] = ctx->saved_data["options"].template to<Options>();
        const auto [window_size_left, window_size_right, num_sink_tokens] = ctx->saved_data["mask"].template to<Mask>();
        return bwd.call(dout.defined() ? dout : at::zeros_like(out), if_defined(dlse), saved[0], saved[1], saved[2], out, lse,
                if_defined(s_aux), if_defined(saved[4]), if_defined(saved[5]), max_seqlen_q, max_seqlen_k, softmax_scale, window_size_left,
                window_size_right, num_sink_tokens);
    }

    static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
        variable_list result(12);
        const bool used = grads[0].defined() || grads[1].defined(), raw_used = has_raw && grads.back().defined();
        if (!used && !raw_used) return result;
        const variable_list saved = ctx->get_saved_variables();
        if (used) {
            const at::Tensor &s_aux = saved[3];
            auto [dq, dk, dv, ds_aux] = gradients(ctx, saved, grads[0], grads[1], saved[7], s_aux);
            result[0] = std::move(dq);
            result[1] = std::move(dk);
            result[2] = std::move(dv);
            if (s_aux.defined()) result[3] = std::move(ds_aux);
        }
        // The raw LSE does not know the sink: its part is that of an attention without one, exact however small the keys' weight.
        if (raw_used) {
            auto [dq, dk, dv, none] = gradients(ctx, saved, {}, grads.back(), saved.back(), {});
            result[0] = used ? result[0].add(dq) : std::move(dq);
            result[1] = used ? result[1].add(dk) : std::move(dk);
            if (!used) result[2] = std::move(dv);
        }
        return result;
    }
};

const char *const kDecodeHasNoBackward = "sinkattn: flash_decode has no backward; use flash_attn_func where gradients are needed";

template <class Result> struct FlashDecode : torch::autograd::Function<FlashDecode<Result>> {
    static constexpr bool is_traceable = true;
    static constexpr const char *name = std::is_same_v<Result, Tensors3> ? "sinkattn::flash_decode_raw" : "sinkattn::flash_decode";
    using Signature = Result(const at::Tensor &, const at::Tensor &, const at::Tensor &, const Maybe &, const Maybe &, const Maybe &,
            MaybeScale, c10::SymInt, c10::SymInt, c10::SymInt, bool, const Maybe &, const Maybe &);

    template <class... Args> static variable_list forward(AutogradContext * /*ctx*/, const Args &...args) {
        const Result result = Differentiable<FlashDecode>::below(args...);
        return std::apply([](const auto &...each) { return variable_list{each...}; }, result);
    }

    static variable_list backward(AutogradContext * /*ctx*/, const variable_list & /*grads*/) {
        TORCH_CHECK_NOT_IMPLEMENTED(false, kDecodeHasNoBackward);
    }
};

struct FlashDecodeNvfp4 {
    static constexpr const char *name = "sinkattn::flash_decode_nvfp4";
    using Signature = Tensors4(const at::Tensor &, const at::Tensor &, const at::Tensor &, const Maybe &, const Maybe &, const Maybe &,
            MaybeScale, c10::SymInt, c10::SymInt, c10::SymInt, bool, double, const Maybe &, const Maybe &);

    template <class... Args> [[noreturn]] static variable_list apply(const Args &.../*args*/) {
        C10_THROW_ERROR(NotImplementedError, kDecodeHasNoBackward);
    }
};

// Result as in FlashAttnFwd.
template <class Result> struct FlashDecodeVarlen {
    static constexpr const char *name =
            std::is_same_v<Result, Tensors3> ? "sinkattn::flash_decode_varlen_raw" : "sinkattn::flash_decode_varlen";
    using Signature = Result(const at::Tensor &, const at::Tensor &, const at::Tensor &, const Maybe &, const at::Tensor &,
            const at::Tensor &, const Maybe &, MaybeInt, MaybeInt, MaybeScale, c10::SymInt, c10::SymInt, c10::SymInt);

    template <class... Args> [[noreturn]] static variable_list apply(const Args &.../*args*/) {
        C10_THROW_ERROR(NotImplementedError, "sinkattn: packed rows over a cache have no backward; call under torch.no_grad(), or give "
                                             "packed keys and cu_seqlens_k where gradients are needed");
    }
};

// torch refuses these too, but only when their versions are counted, which is after the write.
void check_writable(const at::Tensor &tensor, const char *name) {
    TORCH_CHECK(!tensor.is_inference(), "sinkattn: ", name,
            " was made under torch.inference_mode(); write to it there, or make it under torch.no_grad()");
}

// As torch's own out= functions, this one refuses at the call.
void flash_decode_out(const at::Tensor &q, const at::Tensor &k_cache, const at::Tensor &v_cache, const Maybe &s_aux,
        const Maybe &cache_seqlens, const Maybe &block_table, MaybeScale softmax_scale, c10::SymInt window_size_left,
        c10::SymInt num_sink_tokens, c10::SymInt num_splits, bool invariant, at::Tensor &out, at::Tensor &lse, at::Tensor &scratch,
        const Maybe &k_cache_host, const Maybe &v_cache_host) {
    TORCH_CHECK_NOT_IMPLEMENTED(!wants_grad(q, k_cache, v_cache, s_aux, out, lse, k_cache_host, v_cache_host), kDecodeHasNoBackward);
    check_writable(out, "out");
    check_writable(lse, "lse");
    check_writable(scratch, "scratch");
    static const auto op = find<decltype(flash_decode_out)>("sinkattn::flash_decode_out");
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        op.call(q, k_cache, v_cache, s_aux, cache_seqlens, block_table, softmax_scale, std::move(window_size_left),
                std::move(num_sink_tokens), std::move(num_splits), invariant, out, lse, scratch, k_cache_host, v_cache_host);
    }
    for (const at::Tensor *written : {&out, &lse, &scratch}) torch::autograd::impl::bump_version(*written);
}

void check_appends(const at::Tensor &k_cache, const at::Tensor &v_cache, const at::Tensor &k, const Maybe &v) {
    TORCH_CHECK_NOT_IMPLEMENTED(!wants_grad(k_cache, v_cache, k, v),
            "sinkattn: keys and values in a cache have no gradients; append under torch.no_grad(), or what is detached");
    check_writable(k_cache, "k_cache");
    check_writable(v_cache, "v_cache");
}

at::Tensor append_kv(at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &cache_seqlens,
        const Maybe &block_table) {
    check_appends(k_cache, v_cache, k, v);
    static const auto op = find<decltype(append_kv)>("sinkattn::append_kv");
    at::Tensor after;
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        after = op.call(k_cache, v_cache, k, v, cache_seqlens, block_table);
    }
    for (const at::Tensor *written : {&k_cache, &v_cache}) torch::autograd::impl::bump_version(*written);
    return after;
}

void append_kv_slots(at::Tensor &k_cache, at::Tensor &v_cache, const at::Tensor &k, const Maybe &v, const at::Tensor &slot_mapping) {
    check_appends(k_cache, v_cache, k, v);
    static const auto op = find<decltype(append_kv_slots)>("sinkattn::append_kv_slots");
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        op.call(k_cache, v_cache, k, v, slot_mapping);
    }
    for (const at::Tensor *written : {&k_cache, &v_cache}) torch::autograd::impl::bump_version(*written);
}

} // namespace

TORCH_LIBRARY_IMPL(sinkattn, Autograd, m) {
    m.impl("flash_attn_fwd", Differentiable<FlashAttnFwd<Tensors2>>::kernel);
    m.impl("flash_attn_fwd_raw", Differentiable<FlashAttnFwd<Tensors3>>::kernel);
    m.impl("flash_attn_bwd", Differentiable<FlashAttnBwd>::kernel);
    m.impl("flash_decode", Differentiable<FlashDecode<Tensors2>>::kernel);
    m.impl("flash_decode_raw", Differentiable<FlashDecode<Tensors3>>::kernel);
    m.impl("flash_decode_out", flash_decode_out);
    m.impl("flash_decode_nvfp4", Differentiable<FlashDecodeNvfp4>::kernel);
    m.impl("flash_decode_varlen", Differentiable<FlashDecodeVarlen<Tensors2>>::kernel);
    m.impl("flash_decode_varlen_raw", Differentiable<FlashDecodeVarlen<Tensors3>>::kernel);
    m.impl("append_kv", append_kv);
    m.impl("append_kv_slots", append_kv_slots);
}

} // namespace sinkattn
