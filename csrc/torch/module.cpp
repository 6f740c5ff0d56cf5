// SPDX-License-Identifier: Apache-2.0
//
// sinkattn._C: the planner, the variant table and build facts. Importing it registers the operators.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/headeronly/version.h>

#include <optional>
#include <string>

#include "convert.h"
#include "sinkattn.h"

namespace py = pybind11;

namespace {

struct Name {
    const char *name;
    int value;
};

constexpr Name kOps[] = {{"fwd", SINKATTN_FWD}, {"bwd", SINKATTN_BWD}, {"decode", SINKATTN_DECODE}};
constexpr Name kDtypes[] = {{"bf16", SINKATTN_BF16}, {"fp16", SINKATTN_FP16}, {"fp32", SINKATTN_FP32}, {"fp64", SINKATTN_FP64}};
constexpr Name kBackends[] = {{"cpu", SINKATTN_CPU}, {"cuda", SINKATTN_CUDA}};

template <size_t N> int value_of(const Name (&names)[N], const std::string &name, const char *argument) {
    std::string allowed;
    for (const Name &entry : names) {
        if (name == entry.name) return entry.value;
        allowed += allowed.empty() ? entry.name : std::string(", ") + entry.name;
    }
    throw py::value_error("sinkattn: " + std::string(argument) + " is '" + name + "'; known are " + allowed);
}

template <size_t N> const char *name_of(const Name (&names)[N], int value) {
    for (const Name &entry : names)
        if (entry.value == value) return entry.name;
    throw py::value_error("sinkattn: no name for the value " + std::to_string(value));
}

void raise_on(const sinkattn_status &status) {
    if (status.code == SINKATTN_OK) return;
    PyObject *kind = status.code == SINKATTN_INVALID       ? PyExc_ValueError
                     : status.code == SINKATTN_UNSUPPORTED ? PyExc_NotImplementedError
                                                           : PyExc_RuntimeError;
    PyErr_SetString(kind, (std::string("sinkattn: ") + status.message).c_str());
    throw py::error_already_set();
}

py::dict device_dict(const sinkattn_device &device) {
    py::dict result;
    result["backend"] = name_of(kBackends, device.backend);
    result["arch"] = device.arch;
    result["workers"] = device.workers;
    result["name"] = device.name;
    return result;
}

sinkattn_device device_from(const py::dict &facts) {
    sinkattn_device device{};
    device.backend = static_cast<sinkattn_backend>(value_of(kBackends, py::cast<std::string>(facts["backend"]), "backend"));
    device.arch = py::cast<int32_t>(facts["arch"]);
    device.workers = py::cast<int32_t>(facts["workers"]);
    return device;
}

py::dict query_cpu(int32_t workers) {
    sinkattn_device device{};
    raise_on(sinkattn_query_cpu(workers, &device));
    return device_dict(device);
}

py::dict query_cuda(int32_t ordinal) {
    sinkattn_device device{};
    raise_on(sinkattn_query_cuda(ordinal, &device));
    return device_dict(device);
}

py::dict variant_dict(const sinkattn_variant_info &info) {
    py::list dtypes;
    for (const Name &dtype : kDtypes)
        if (info.dtypes >> dtype.value & 1u) dtypes.append(dtype.name);
    py::dict result;
    result["name"] = info.name;
    result["op"] = name_of(kOps, info.op);
    result["backend"] = name_of(kBackends, info.backend);
    result["arch"] = info.arch;
    result["dtypes"] = dtypes;
    result["max_head_dim"] = info.max_head_dim;
    result["tile_q"] = info.tile_q;
    result["tile_k"] = info.tile_k;
    return result;
}

py::list variants() {
    py::list result;
    for (int32_t i = 0; const sinkattn_variant_info *info = sinkattn_variant(i); ++i) result.append(variant_dict(*info));
    return result;
}

py::dict plan(const std::string &op, const py::dict &device, const std::string &dtype, int64_t batch, int64_t num_q_heads,
              int64_t num_kv_heads, int64_t head_dim, int64_t q_len, int64_t k_len, const std::optional<std::string> &s_aux_dtype,
              bool packed, int64_t page_size, int64_t num_pages, int64_t window_size_left, int64_t window_size_right,
              int64_t num_sink_tokens, int64_t num_splits, bool invariant) {
    sinkattn_problem problem{};
    problem.op = static_cast<sinkattn_op>(value_of(kOps, op, "op"));
    problem.dtype = static_cast<sinkattn_dtype>(value_of(kDtypes, dtype, "dtype"));
    if (s_aux_dtype) problem.s_aux_dtype = static_cast<sinkattn_dtype>(value_of(kDtypes, *s_aux_dtype, "s_aux_dtype"));
    problem.packed = packed;
    problem.batch = batch;
    problem.num_q_heads = num_q_heads;
    problem.num_kv_heads = num_kv_heads;
    problem.head_dim = head_dim;
    problem.q_len = q_len;
    problem.k_len = k_len;
    problem.page_size = page_size;
    problem.num_pages = num_pages;
    problem.mask = sinkattn::mask_of(window_size_left, window_size_right, num_sink_tokens);
    problem.num_splits = num_splits;
    problem.invariant = invariant;

    const sinkattn_device facts = device_from(device);
    sinkattn_plan chosen{};
    raise_on(sinkattn_make_plan(&problem, &facts, &chosen));
    py::dict result;
    const sinkattn_variant_info &info = *sinkattn_variant(chosen.variant);
    result["variant"] = info.name;
    result["tile_q"] = info.tile_q;
    result["tile_k"] = info.tile_k;
    result["workers"] = chosen.workers;
    result["num_splits"] = chosen.num_splits;
    result["num_items"] = chosen.num_items;
    result["workspace_bytes"] = chosen.workspace_bytes;
    result["reason"] = chosen.reason;
    return result;
}

int64_t visible_pairs(int64_t q_len, int64_t k_len, int64_t window_size_left, int64_t window_size_right, int64_t num_sink_tokens) {
    const sinkattn_mask mask = sinkattn::mask_of(window_size_left, window_size_right, num_sink_tokens);
    const int64_t pairs = sinkattn_visible_pairs(&mask, q_len, k_len);
    if (pairs < 0)
        throw py::value_error("sinkattn: q_len is " + std::to_string(q_len) + ", k_len " + std::to_string(k_len) + ", window_size (" +
                              std::to_string(window_size_left) + ", " + std::to_string(window_size_right) + "), num_sink_tokens " +
                              std::to_string(num_sink_tokens) +
                              "; lengths must be from 0 to 2^31 - 1, sides at least -1, num_sink_tokens at least 0");
    return pairs;
}

} // namespace

PYBIND11_MODULE(_C, m) {
    m.attr("version") = SINKATTN_VERSION;
    m.attr("torch_version") = TORCH_VERSION;
    m.def("build_info", sinkattn_build_info);
    m.def("query_cpu", query_cpu, py::arg("workers") = 1);
    m.def("query_cuda", query_cuda, py::arg("ordinal"));
    m.def("variants", variants);
    m.def("plan", plan, py::arg("op"), py::arg("device"), py::kw_only(), py::arg("dtype"), py::arg("batch"), py::arg("num_q_heads"),
          py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("q_len"), py::arg("k_len"), py::arg("s_aux_dtype") = py::none(),
          py::arg("packed") = false, py::arg("page_size") = 0, py::arg("num_pages") = 0, py::arg("window_size_left") = -1,
          py::arg("window_size_right") = -1, py::arg("num_sink_tokens") = 0, py::arg("num_splits") = 0, py::arg("invariant") = false);
    m.def("check_cuda_errors", [](int32_t ordinal) { raise_on(sinkattn_check_errors(ordinal)); }, py::arg("ordinal"));
    m.def("visible_pairs", visible_pairs, py::arg("q_len"), py::arg("k_len"), py::arg("window_size_left") = -1,
          py::arg("window_size_right") = -1, py::arg("num_sink_tokens") = 0);
}
