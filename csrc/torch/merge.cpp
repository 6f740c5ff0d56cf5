// SPDX-License-Identifier: Apache-2.0
//
// Merging partials over disjoint keys, in ATen, so that autograd and compilers see through it. With x = lse_a - lse_b the first of two
// partials weighs exp(-softplus(-x)), and lse = max + softplus(-|x|): neither form meets inf - inf once equal infinities are set apart,
// forward or backward, and the weight's derivative keeps its precision where the weight rounds to 1, as w (1 - w) does not.

#include <ATen/core/Tensor.h>
#include <ATen/ops/softplus.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

namespace sinkattn {
namespace {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;

void check_partial(const at::Tensor &out, const at::Tensor &lse) {
    const int64_t rank = out.dim();
    TORCH_CHECK_VALUE(rank == 3 || rank == 4, "sinkattn: out has ", rank,
            " dimensions, it must be [batch, len, heads, head_dim] or [total, heads, head_dim]");
    TORCH_CHECK_VALUE(lse.dim() == rank - 1 && lse.sym_size(-1) == out.sym_size(-3) && lse.sym_size(-2) == out.sym_size(-2) &&
                              (rank == 3 || lse.sym_size(0) == out.sym_size(0)),
            "sinkattn: lse of shape ", lse.sym_sizes(), " does not belong to out of shape ", out.sym_sizes(),
            "; it must be [batch, heads, len] or [heads, total]");
    TORCH_CHECK_VALUE(lse.scalar_type() == at::kFloat || lse.scalar_type() == at::kDouble, "sinkattn: lse is ", lse.scalar_type(),
            ", it must be float32 or float64");
}

at::Tensor difference(const at::Tensor &lse_a, const at::Tensor &lse_b) {
    return lse_a.sub(lse_b).masked_fill(lse_a.isinf().logical_and(lse_a.eq(lse_b)), 0);
}

// log(1 + exp(x)). Above the threshold it is x, to the last bit of fp64.
at::Tensor log1p_exp(const at::Tensor &x) { return at::softplus(x, /*beta=*/1, /*threshold=*/40); }

// Of partial a. One without keys weighs 0, whatever its lse's or dout's bits in rows that nobody owns.
at::Tensor weight_of(const at::Tensor &lse_a, const at::Tensor &a_over_b) {
    return log1p_exp(a_over_b.neg()).neg().exp().masked_fill(lse_a.eq(-std::numeric_limits<double>::infinity()), 0);
}

at::Tensor merged_lse(const at::Tensor &lse_a, const at::Tensor &lse_b, const at::Tensor &a_over_b) {
    return lse_a.maximum(lse_b).add(log1p_exp(a_over_b.abs().neg()));
}

// [.., heads, len] as a factor of [.., len, heads, head_dim]
at::Tensor as_factor(const at::Tensor &weight) { return weight.transpose(-1, -2).unsqueeze(-1); }

Tensors2 merge_attn_states(const at::Tensor &out_a, const at::Tensor &lse_a, const at::Tensor &out_b, const at::Tensor &lse_b) {
    check_partial(out_a, lse_a);
    check_partial(out_b, lse_b);
    TORCH_CHECK_VALUE(
            out_a.sym_sizes() == out_b.sym_sizes(), "sinkattn: out_a has shape ", out_a.sym_sizes(), ", out_b ", out_b.sym_sizes());
    TORCH_CHECK_VALUE(out_a.scalar_type() == out_b.scalar_type() && lse_a.scalar_type() == lse_b.scalar_type(),
            "sinkattn: the partials differ in dtype, ", out_a.scalar_type(), " with ", lse_a.scalar_type(), " and ", out_b.scalar_type(),
            " with ", lse_b.scalar_type());
    const at::Tensor a_over_b = difference(lse_a, lse_b);
    const at::Tensor out = out_a.mul(as_factor(weight_of(lse_a, a_over_b))).add(out_b.mul(as_factor(weight_of(lse_b, a_over_b.neg()))));
    return {out.to(out_a.scalar_type()), merged_lse(lse_a, lse_b, a_over_b)};
}

// The sink is the partial (out 0, lse s_aux).
Tensors2 apply_sink(const at::Tensor &out, const at::Tensor &lse, const at::Tensor &s_aux) {
    check_partial(out, lse);
    TORCH_CHECK_VALUE(s_aux.dim() == 1 && s_aux.sym_size(0) == out.sym_size(-2), "sinkattn: s_aux has shape ", s_aux.sym_sizes(),
            ", it must be [num_q_heads], [", out.sym_size(-2), "]");
    const at::ScalarType dtype = s_aux.scalar_type();
    TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
                              (dtype == at::kDouble && lse.scalar_type() == at::kDouble),
            "sinkattn: s_aux is ", dtype, ", it must be float32, bfloat16 or float16, or float64 beside a float64 lse");
    const at::Tensor sink_lse = s_aux.to(lse.scalar_type()).unsqueeze(-1).expand_as(lse);
    const at::Tensor keys_over_sink = difference(lse, sink_lse);
    return {out.mul(as_factor(weight_of(lse, keys_over_sink))).to(out.scalar_type()), merged_lse(lse, sink_lse, keys_over_sink)};
}

} // namespace

TORCH_LIBRARY_IMPL(sinkattn, CompositeImplicitAutograd, m) {
    m.impl("merge_attn_states", merge_attn_states);
    m.impl("apply_sink", apply_sink);
}

} // namespace sinkattn
