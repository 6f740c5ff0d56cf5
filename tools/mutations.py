# SPDX-License-Identifier: Apache-2.0
"""The bugs that tools/mutation_check.py plants, each with the test that must fail."""

from __future__ import annotations

from typing import NamedTuple

FWD, BWD, DECODE = (f"csrc/cpu/cpu_{op}.c" for op in ("fwd", "bwd", "decode"))
HF, VERL = "sinkattn/hf.py", "sinkattn/verl_patch.py"
ROWS, MASK, NUMERICS, LAYOUT = "csrc/cpu/cpu_rows.h", "csrc/core/mask.h", "csrc/core/numerics.h", "csrc/core/layout.h"
EDGES, INVARIANCE, HOSTILE = (
    "tests/test_edges.py::test_",
    "tests/test_invariance.py::test_",
    "tests/test_hostile.py::test_",
)
ORDER = "tests/test_order.py::test_"
C_SUITE = "test_c "  # then a part of a test's name; faster, since no extension is built
PLAN, TILE = "csrc/core/plan.c", "csrc/cpu/cpu_tile.h"


class Mutation(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    test: str

    @property
    def of_c_suite(self) -> bool:
        return self.test.startswith(C_SUITE)


MUTATIONS = [
    Mutation("sink dropped", FWD, "sa_s_aux(args, row.head));", "-(double)INFINITY);", EDGES + "sink_is_not_dropped"),
    Mutation(
        "sums of chunks added at pivots of their own",
        ROWS,
        "to->sum[lane] * joint.kept + next->sum[lane] * joint.added;",
        "to->sum[lane] + next->sum[lane];",
        ORDER + "the_order",
    ),
    Mutation(
        "sink scaled",
        FWD,
        "sa_s_aux(args, row.head));",
        "sa_s_aux(args, row.head) * sa_softmax_scale(&args->problem));",
        EDGES + "sink_is_not_scaled",
    ),
    Mutation(
        "pivot over keys alone",
        NUMERICS,
        "top = pivot > s ? pivot : s,",
        "top = pivot,",
        EDGES + "sink_far_above_the_scores_keeps_lse_finite",
    ),
    Mutation(
        "sink of -inf weighs 1 in an empty row",
        NUMERICS,
        "if (x == -(double)INFINITY) return 0.0;",
        "if (x != pivot && x == -(double)INFINITY) return 0.0;",
        EDGES + "sink_of_minus_inf_is_no_sink_bit_for_bit",
    ),
    Mutation(
        "ds_aux negated",
        BWD,
        "((dlse ? dlse[at] : 0.0f) - rows->sink_sum[lane]);",
        "(rows->sink_sum[lane] - (dlse ? dlse[at] : 0.0f));",
        EDGES + "ds_aux_has_the_sign_of_a_central_difference",
    ),
    Mutation(
        "ds_aux from the rounded out",
        BWD,
        "- rows->sink_sum[lane]);",
        "- worker->delta[lane]);",
        EDGES + "ds_aux_is_not_taken_from_rounded_out",
    ),
    Mutation(
        "dLSE dropped",
        BWD,
        "(dlse ? dlse[at] : 0.0f) - worker->delta[lane];",
        "0.0f - worker->delta[lane];",
        EDGES + "gradient_of_the_lse_reaches_q_k_and_the_sink",
    ),
    Mutation(
        "dQ not scaled",
        BWD,
        "worker->factor[lane] = (float)sa_softmax_scale(problem);",
        "worker->factor[lane] = 1.0f;",
        "tests/test_bwd.py::test_case",
    ),
    Mutation(
        "one segment's dK and dV lost",
        BWD,
        "for (int64_t s = 0; s < MAX_SEGMENTS; s++) {\n        const int64_t row",
        "for (int64_t s = 0; s < MAX_SEGMENTS - 1; s++) {\n        const int64_t row",
        "tests/test_bwd.py::test_long_sequences_are_summed_in_segments",
    ),
    Mutation(
        "dirty scratch",
        BWD,
        "memset(job->dk + first * job->padded_k, 0,",
        "memset(job->dk + first * job->padded_k, 0, 0 *",
        EDGES + "dirty_memory_has_no_effect",
    ),
    Mutation(
        "window one key short",
        MASK,
        "keys.begin = sa_within(p - band->left, 0,",
        "keys.begin = sa_within(p - band->left + 1, 0,",
        EDGES + "hugging_face_window_counts_the_row",
    ),
    Mutation(
        "right side one key long",
        MASK,
        "keys.end = sa_within(p + band->right + 1,",
        "keys.end = sa_within(p + band->right + 2,",
        EDGES + "key_sets_are_exact",
    ),
    Mutation(
        "sink tokens hidden",
        MASK,
        "{ return sa_first(band->num_sink, sa_row_band(band, i).begin); }",
        "{ return sa_first(band->num_sink, sa_row_band(band, i).begin) * 0; }",
        EDGES + "key_sets_are_exact",
    ),
    Mutation(
        "causal aligned at the first row",
        MASK,
        "band.shift = k_len - q_len;",
        "band.shift = 0;",
        EDGES + "causal_is_aligned_at_the_last_row_and_key",
    ),
    Mutation(
        "partial tile taken for visible",
        MASK,
        "keys.end <= first.end && (keys.begin",
        "keys.end <= last.end && (keys.begin",
        EDGES + "lengths_around_every_tile_size",
    ),
    Mutation(
        "kv heads in another order",
        "csrc/cpu/cpu_tile.h",
        "stream.first_head = kv_head * stream.group;",
        "stream.first_head = (problem->num_kv_heads - 1 - kv_head) * stream.group;",
        EDGES + "query_heads_of_a_kv_head_are_neighbours",
    ),
    Mutation(
        "division by an empty sum",
        NUMERICS,
        "end.factor = total == 0.0 ? 0.0 : kept / total;",
        "end.factor = kept / total;",
        EDGES + "row_without_keys_and_without_sink_has_lse_minus_inf",
    ),
    Mutation(
        "packed tail left unwritten",
        FWD,
        "if (!problem->packed) return;",
        "if (problem->packed) return;",
        EDGES + "packed_tail_is_written",
    ),
    Mutation(
        "0 * NaN",
        FWD,
        "problem->dtype, n, !sa_all_visible(&stream->band, rows->tokens, keys));",
        "problem->dtype, n, false);",
        EDGES + "dead_cache_rows_do_not_leak",
    ),
    Mutation(
        "int32 offsets",
        LAYOUT,
        "return batch * tensor->batch_stride + row",
        "return (int32_t)(batch * tensor->batch_stride) + row",
        EDGES + "offsets_beyond_2_31_elements",
    ),
    Mutation(
        "pages not checked",
        "csrc/core/validate_lengths.c",
        "if (page < 0 || page >= sa_num_pages(args))",
        "if (page < page)",
        EDGES + "page_out_of_range_is_not_page_zero",
    ),
    Mutation(
        "decreasing offsets accepted",
        "csrc/core/validate_lengths.c",
        "if (cu_seqlens[b + 1] < cu_seqlens[b])",
        "if (b < 0)",
        HOSTILE + "hostile_integers_are_named",
    ),
    Mutation(
        "chunks joined in another order",
        FWD,
        "sa_partial_at(partials, first + i);\n        attend",
        "sa_partial_at(partials, first + count - i);\n        attend",
        ORDER + "one_bit_pattern",
    ),
    Mutation(
        "pairs of keys begun anywhere",
        "csrc/cpu/cpu_tile.h",
        "keys.begin -= keys.begin % rows->key_step;",
        "keys.begin -= keys.begin % 1;",
        INVARIANCE + "row_alone",
    ),
    Mutation(
        "exp off by 1e-4",
        ROWS,
        "y = y * f + 0x1.55548ep-3f;",
        "y = y * f + 0x1.57548ep-3f;",
        "tests/test_fwd.py::test_case",
    ),
    Mutation(
        "bf16 truncated",
        ROWS,
        "rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16,",
        "rounded = bits >> 16,",
        "tests/test_fwd.py::test_case",
    ),
    Mutation(
        "strides ignored",
        "csrc/torch/convert.cpp",
        "rows.row_stride = is_step(tensor, heads - 1) ?",
        "rows.row_stride = false ?",
        EDGES + "every_stride_gives_the_same_bits",
    ),
    Mutation(
        "causal ignored",
        "sinkattn/ops.py",
        'return left, 0 if _flag(causal, "causal") else right',
        "return left, right",
        EDGES + "row_without_keys_gives_zero_and_the_sink",
    ),
    Mutation(
        "sink of the LSE counted twice",
        "sinkattn/ops.py",
        "out, *_, lse = call(fwd,",
        "out, lse, *_ = call(fwd,",
        "tests/test_fwd.py::test_return_lse_raw_is_without_the_sink",
    ),
    Mutation(
        "another rank's sinks",
        VERL,
        "s_aux.chunk(size)[ulysses.get_ulysses_sequence_parallel_rank()]",
        "s_aux.chunk(size)[size - 1 - ulysses.get_ulysses_sequence_parallel_rank()]",
        "tests/test_verl_patch.py::test_a_rank_takes_its_slice_of_the_sinks",
    ),
    Mutation(
        "the first rank's sinks",
        VERL,
        "s_aux.chunk(size)[ulysses.get_ulysses_sequence_parallel_rank()]",
        "s_aux.chunk(size)[0]",
        "tests/test_verl_patch.py::test_a_rank_takes_its_slice_of_the_sinks",
    ),
    Mutation(
        "gathered positions kept past a change",
        VERL,
        "state = (hf.version(position_ids),",
        "state = (0,",
        "tests/test_verl_patch.py::test_positions_are_gathered_again_once_they_change",
    ),
    Mutation(
        "window of the mask ignored",
        HF,
        "causal, window = decode_mask(cast(Tensor, mask))",
        "causal, _ = decode_mask(cast(Tensor, mask))",
        "tests/test_hf_masks.py::test_window_of_the_mask_alone",
    ),
    Mutation(
        "masks not judged in a graph",
        "sinkattn/hf_masks.py",
        "    if not known:",
        "    if not known and not torch.compiler.is_compiling():",
        "tests/test_hf_masks.py::test_unknown_masks_raise",
    ),
    Mutation(
        "other positions taken for those that were read",
        HF,
        "kept[0] == state and kept[1] is beside",
        "kept[0] == state",
        "tests/test_hf_sequences.py::test_a_mask_and_other_positions",
    ),
    Mutation(
        "positions kept past a change",
        HF,
        "(version(made), version(position_ids), q_len",
        "(version(made), 0, q_len",
        "tests/test_hf_sequences.py::test_a_mask_and_other_positions",
    ),
    Mutation(
        "mask kept past a change",
        HF,
        "(version(made), version(position_ids), q_len",
        "(0, version(position_ids), q_len",
        "tests/test_hf_sequences.py::test_a_mask_and_other_positions",
    ),
    Mutation(
        "restarts beside padding ignored",
        "sinkattn/hf_sequences.py",
        "restarts & tokens[:, 1:] & tokens[:, :-1]",
        "restarts & False",
        "tests/test_hf_sequences.py::test_packed_positions_beside_padding",
    ),
    Mutation(
        "padding of cross-attention taken for its own",
        HF,
        "if not causal and kv_len != q_len and",
        "if False and",
        "tests/test_hf_masks.py::test_masks_of_wrong_shapes_are_refused",
    ),
    Mutation(
        "short masks accepted",
        HF,
        "not q_len <= kv_len <= k_len",
        "not kv_len <= k_len",
        "tests/test_hf_masks.py::test_masks_of_wrong_shapes_are_refused",
    ),
    Mutation(
        "indexers accepted",
        HF,
        'getattr(config, "index_topk", None) is not None',
        'getattr(config, "index_topk", None) is config',
        "tests/test_hf_masks.py::test_masks_beside_the_mask_function_are_refused",
    ),
    Mutation(
        "most keys of a StreamingCache one long",
        "sinkattn/cache.py",
        "return self.num_sink_tokens + self.window",
        "return self.num_sink_tokens + self.window + 1",
        "tests/test_cache.py::test_max_cache_shape_is_what_a_step_sees",
    ),
    Mutation(
        "ring sums ds_aux in the sinks' dtype",
        "sinkattn/distributed/ring.py",
        "wide_s_aux = s_aux.to(dq.dtype) if",
        "wide_s_aux = s_aux if",
        "tests/test_distributed.py::test_the_ring_rounds_the_gradient_of_narrow_sinks_once",
    ),
    Mutation(
        "right side dropped",
        "sinkattn/ops.py",
        'return left, 0 if _flag(causal, "causal") else right',
        'return left, 0 if _flag(causal, "causal") else -1',
        "tests/test_refusals.py::test_causal_makes_the_right_side_0",
    ),
    Mutation(
        "LSE before out",
        "sinkattn/ops.py",
        "return (out, lse) if return_lse else out",
        "return (lse, out) if return_lse else out",
        "tests/test_refusals.py::test_what_return_lse_returns",
    ),
    Mutation(
        "LSE saved without its version",
        "csrc/torch/autograd.cpp",
        "saved.insert(saved.end(), results.begin(), results.end());",
        "for (const at::Tensor &x : results) saved.push_back(x.variable_data());",
        "tests/test_ops.py::test_what_is_changed_before_the_backward_is_noticed",
    ),
    Mutation(
        "strides of indices ignored",
        "csrc/torch/convert.cpp",
        "return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();",
        "return tensor;",
        "tests/test_ops.py::test_lengths_and_tables_have_any_strides",
    ),
    Mutation(
        "rows of a table taken for dense",
        "csrc/torch/append.cpp",
        "args.cache.block_table_stride = table.stride(0);",
        "args.cache.block_table_stride = table.size(1);",
        "tests/test_ops.py::test_lengths_and_tables_have_any_strides",
    ),
    Mutation(
        "rows of a decode's table taken for dense",
        "csrc/torch/ops.cpp",
        "args.block_table_stride = in.block_table.stride(0);",
        "args.block_table_stride = in.block_table.size(1);",
        "tests/test_ops.py::test_lengths_and_tables_have_any_strides",
    ),
    Mutation(
        "overlap within a cache allowed",
        "csrc/torch/append.cpp",
        "if (step <= last) return false;",
        "if (step < 0) return false;",
        "tests/test_append.py::test_no_layout_that_overlaps_is_written",
    ),
    Mutation(
        "sink tokens not clamped to the keys",
        MASK,
        "(sa_position_t)sa_min(mask->num_sink_tokens, k_len);",
        "(sa_position_t)mask->num_sink_tokens;",
        C_SUITE + "sink_tokens_beyond_the_keys",
    ),
    Mutation("sm_90a code for newer GPUs", PLAN, "info->arch >= 90;", "info->arch > 90;", C_SUITE + "rows_and_devices"),
    Mutation(
        "local window one key longer",
        "csrc/core/refusals.c",
        "<= 2 * info->tile_k + 1 ?",
        "<= 2 * info->tile_k + 2 ?",
        C_SUITE + "the_local_windows_edge",
    ),
    Mutation(
        "2^24 partials",
        PLAN,
        "partials < most",
        "partials <= most",
        C_SUITE + "partials_that_fit",
    ),
    Mutation(
        "denormal scale accepted",
        "csrc/core/validate.c",
        "(size >= (double)FLT_MIN && size",
        "(size > 0.0 && size",
        C_SUITE + "malformed_calls",
    ),
    Mutation(
        "lengths used that were not validated",
        TILE,
        "    return copy;\n",
        "    return copy ? lengths : NULL;\n",
        C_SUITE + "changing_cu_seqlens",
    ),
    Mutation(
        "unmapped page taken for an offset",
        "csrc/cpu/cpu_append.c",
        "if (to == -1) continue;",
        "",
        C_SUITE + "changing_append",
    ),
    Mutation(
        "slots looked at once",
        "csrc/cpu/cpu_append.c",
        "if (slot < 0 || slot >= sa_num_slots(problem)) continue;",
        "if (slot < 0) continue;",
        C_SUITE + "changing_slots",
    ),
    Mutation(
        "packed rows read another sequence's pages",
        TILE,
        "sa_cache_offset(stream->cache, tensor, stream->b, j, stream->kv_head)",
        "sa_cache_offset(stream->cache, tensor, at->batch, j, stream->kv_head)",
        C_SUITE + "packed_over_pages_is_dense",
    ),
    Mutation(
        "lanes past the last row reach dk",
        TILE,
        "(!lanes_meet || rows->n == rows->lanes)",
        "(!lanes_meet || true)",
        C_SUITE + "key_without_weight",
    ),
    Mutation(
        "out may be q",
        "csrc/core/validate_layout.c",
        "(a->written || b->written) && overlap",
        "(a->written && b->written) && overlap",
        C_SUITE + "malformed_calls",
    ),
]
