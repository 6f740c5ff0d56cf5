# SPDX-License-Identifier: Apache-2.0
"""The bugs that tools/mutation_check.py plants, each with the test that must fail."""

from __future__ import annotations

from typing import NamedTuple

FWD, BWD = "csrc/cpu/cpu_fwd.c", "csrc/cpu/cpu_bwd.c"
HF, VERL, OPS = "sinkattn/hf.py", "sinkattn/verl_patch.py", "sinkattn/ops.py"
ROWS, MASK, NUMERICS, LAYOUT = "csrc/cpu/cpu_rows.h", "csrc/core/mask.h", "csrc/core/numerics.h", "csrc/core/layout.h"
PLAN, TILE, CONVERT = "csrc/core/plan.c", "csrc/cpu/cpu_tile.h", "csrc/torch/convert.cpp"
C_SUITE = "test_c "  # then a part of a test's name; faster, since no extension is built


class Mutation(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    test: str

    @property
    def of_c_suite(self) -> bool:
        return self.test.startswith(C_SUITE)


def _planted(name: str, path: str, old: str, new: str, test: str) -> Mutation:
    """test: one of the C suite, or "file name" for tests/test_file.py::test_name."""
    file, _, function = test.partition(" ")
    return Mutation(name, path, old, new, test if file == "test_c" else f"tests/test_{file}.py::test_{function}")


MUTATIONS = [_planted(*row) for row in (
    ("sink dropped", FWD, "sa_s_aux(args, row.head));", "-(double)INFINITY);", "edges sink_is_not_dropped"),
    ("sums of chunks added at pivots of their own", ROWS, "to->sum[lane] * joint.kept + next->sum[lane] * joint.added;",
     "to->sum[lane] + next->sum[lane];", "order the_order"),
    ("sink scaled", FWD, "sa_s_aux(args, row.head));", "sa_s_aux(args, row.head) * sa_softmax_scale(&args->problem));",
     "edges sink_is_not_scaled"),
    ("pivot over keys alone", NUMERICS, "top = pivot > s ? pivot : s,", "top = pivot,",
     "edges sink_far_above_the_scores_keeps_lse_finite"),
    ("sink of -inf weighs 1 in an empty row", NUMERICS, "if (x == -(double)INFINITY) return 0.0;",
     "if (x != pivot && x == -(double)INFINITY) return 0.0;", "edges sink_of_minus_inf_is_no_sink_bit_for_bit"),
    ("ds_aux negated", BWD, "((dlse ? dlse[at] : 0.0f) - rows->sink_sum[lane]);",
     "(rows->sink_sum[lane] - (dlse ? dlse[at] : 0.0f));", "edges ds_aux_has_the_sign_of_a_central_difference"),
    ("ds_aux from the rounded out", BWD, "- rows->sink_sum[lane]);", "- worker->delta[lane]);",
     "edges ds_aux_is_not_taken_from_rounded_out"),
    ("dLSE dropped", BWD, "(dlse ? dlse[at] : 0.0f) - worker->delta[lane];", "0.0f - worker->delta[lane];",
     "edges gradient_of_the_lse_reaches_q_k_and_the_sink"),
    ("dQ not scaled", BWD, "worker->factor[lane] = (float)sa_softmax_scale(problem);", "worker->factor[lane] = 1.0f;",
     "bwd case"),
    ("one segment's dK and dV lost", BWD, "for (int64_t s = 0; s < MAX_SEGMENTS; s++) {\n        const int64_t row",
     "for (int64_t s = 0; s < MAX_SEGMENTS - 1; s++) {\n        const int64_t row",
     "bwd long_sequences_are_summed_in_segments"),
    ("dirty scratch", BWD, "memset(job->dk + first * job->padded_k, 0,",
     "memset(job->dk + first * job->padded_k, 0, 0 *", "edges dirty_memory_has_no_effect"),
    ("window one key short", MASK, "keys.begin = sa_within(p - band->left, 0,",
     "keys.begin = sa_within(p - band->left + 1, 0,", "edges hugging_face_window_counts_the_row"),
    ("right side one key long", MASK, "keys.end = sa_within(p + band->right + 1,",
     "keys.end = sa_within(p + band->right + 2,", "edges key_sets_are_exact"),
    ("sink tokens hidden", MASK, "{ return sa_first(band->num_sink, sa_row_band(band, i).begin); }",
     "{ return sa_first(band->num_sink, sa_row_band(band, i).begin) * 0; }", "edges key_sets_are_exact"),
    ("causal aligned at the first row", MASK, "band.shift = k_len - q_len;", "band.shift = 0;",
     "edges causal_is_aligned_at_the_last_row_and_key"),
    ("partial tile taken for visible", MASK, "keys.end <= first.end && (keys.begin",
     "keys.end <= last.end && (keys.begin", "edges lengths_around_every_tile_size"),
    ("kv heads in another order", TILE, "stream.first_head = kv_head * stream.group;",
     "stream.first_head = (problem->num_kv_heads - 1 - kv_head) * stream.group;",
     "edges query_heads_of_a_kv_head_are_neighbours"),
    ("division by an empty sum", NUMERICS, "end.factor = total == 0.0 ? 0.0 : kept / total;",
     "end.factor = kept / total;", "edges row_without_keys_and_without_sink_has_lse_minus_inf"),
    ("packed tail left unwritten", FWD, "if (!problem->packed) return;", "if (problem->packed) return;",
     "edges packed_tail_is_written"),
    ("0 * NaN", FWD, "problem->dtype, n, !sa_all_visible(&stream->band, rows->tokens, keys));",
     "problem->dtype, n, false);", "edges dead_cache_rows_do_not_leak"),
    ("int32 offsets", LAYOUT, "return batch * tensor->batch_stride + row",
     "return (int32_t)(batch * tensor->batch_stride) + row", "edges offsets_beyond_2_31_elements"),
    ("pages not checked", "csrc/core/validate_lengths.c", "if (page < 0 || page >= sa_num_pages(args))",
     "if (page < page)", "edges page_out_of_range_is_not_page_zero"),
    ("decreasing offsets accepted", "csrc/core/validate_lengths.c", "if (cu_seqlens[b + 1] < cu_seqlens[b])",
     "if (b < 0)", "hostile hostile_integers_are_named"),
    ("chunks joined in another order", FWD, "sa_partial_at(partials, first + i);\n        attend",
     "sa_partial_at(partials, first + count - i);\n        attend", "order one_bit_pattern"),
    ("pairs of keys begun anywhere", TILE, "keys.begin -= keys.begin % rows->key_step;",
     "keys.begin -= keys.begin % 1;", "invariance row_alone"),
    ("exp off by 1e-4", ROWS, "y = y * f + 0x1.55548ep-3f;", "y = y * f + 0x1.57548ep-3f;", "fwd case"),
    ("bf16 truncated", ROWS, "rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16,", "rounded = bits >> 16,",
     "fwd case"),
    ("strides ignored", CONVERT, "rows.row_stride = is_step(tensor, heads - 1) ?", "rows.row_stride = false ?",
     "edges every_stride_gives_the_same_bits"),
    ("causal ignored", OPS, 'return left, 0 if _flag(causal, "causal") else right', "return left, right",
     "edges row_without_keys_gives_zero_and_the_sink"),
    ("sink of the LSE counted twice", OPS, "out, *_, lse = call(fwd,", "out, lse, *_ = call(fwd,",
     "raw_lse out_and_raw_lse_have_one_bit_pattern"),
    ("another rank's sinks", VERL, "s_aux.chunk(size)[ulysses.get_ulysses_sequence_parallel_rank()]",
     "s_aux.chunk(size)[size - 1 - ulysses.get_ulysses_sequence_parallel_rank()]",
     "verl_patch a_rank_takes_its_slice_of_the_sinks"),
    ("the first rank's sinks", VERL, "s_aux.chunk(size)[ulysses.get_ulysses_sequence_parallel_rank()]",
     "s_aux.chunk(size)[0]", "verl_patch a_rank_takes_its_slice_of_the_sinks"),
    ("gathered positions kept past a change", VERL, "state = (hf.version(position_ids),", "state = (0,",
     "verl_patch positions_are_gathered_again_once_they_change"),
    ("window of the mask ignored", HF, "causal, window = decode_mask(cast(Tensor, mask))",
     "causal, _ = decode_mask(cast(Tensor, mask))", "hf_masks window_of_the_mask_alone"),
    ("masks not judged in a graph", "sinkattn/hf_masks.py", "    if not known:",
     "    if not known and not torch.compiler.is_compiling():", "hf_masks unknown_masks_raise"),
    ("other positions taken for those that were read", HF, "kept[0] == state and kept[1] is beside", "kept[0] == state",
     "hf_sequences a_mask_and_other_positions"),
    ("positions kept past a change", HF, "(version(made), version(position_ids), q_len", "(version(made), 0, q_len",
     "hf_sequences a_mask_and_other_positions"),
    ("mask kept past a change", HF, "(version(made), version(position_ids), q_len", "(0, version(position_ids), q_len",
     "hf_sequences a_mask_and_other_positions"),
    ("restarts beside padding ignored", "sinkattn/hf_sequences.py", "restarts & tokens[:, 1:] & tokens[:, :-1]",
     "restarts & False", "hf_sequences packed_positions_beside_padding"),
    ("padding of cross-attention taken for its own", HF, "if not causal and kv_len != q_len and", "if False and",
     "hf_masks masks_of_wrong_shapes_are_refused"),
    ("short masks accepted", HF, "not q_len <= kv_len <= k_len", "not kv_len <= k_len",
     "hf_masks masks_of_wrong_shapes_are_refused"),
    ("indexers accepted", HF, 'getattr(config, "index_topk", None) is not None',
     'getattr(config, "index_topk", None) is config', "hf_masks masks_beside_the_mask_function_are_refused"),
    ("most keys of a StreamingCache one long", "sinkattn/cache.py", "return self.num_sink_tokens + self.window",
     "return self.num_sink_tokens + self.window + 1", "cache max_cache_shape_is_what_a_step_sees"),
    ("ring sums ds_aux in the sinks' dtype", "sinkattn/distributed/ring.py", "wide_s_aux = s_aux.to(dq.dtype) if",
     "wide_s_aux = s_aux if", "distributed the_ring_rounds_the_gradient_of_narrow_sinks_once"),
    ("right side dropped", OPS, 'return left, 0 if _flag(causal, "causal") else right',
     'return left, 0 if _flag(causal, "causal") else -1', "refusals causal_makes_the_right_side_0"),
    ("LSE before out", OPS, "return (out, lse) if return_lse else out", "return (lse, out) if return_lse else out",
     "refusals what_return_lse_returns"),
    ("LSE saved without its version", "csrc/torch/autograd.cpp",
     "saved.insert(saved.end(), results.begin(), results.end());",
     "for (const at::Tensor &x : results) saved.push_back(x.variable_data());",
     "ops what_is_changed_before_the_backward_is_noticed"),
    ("strides of indices ignored", CONVERT,
     "return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();", "return tensor;",
     "ops lengths_and_tables_have_any_strides"),
    ("rows of a table taken for dense", "csrc/torch/append.cpp", "args.cache.block_table_stride = table.stride(0);",
     "args.cache.block_table_stride = table.size(1);", "ops lengths_and_tables_have_any_strides"),
    ("rows of a decode's table taken for dense", "csrc/torch/ops.cpp",
     "args.block_table_stride = in.block_table.stride(0);", "args.block_table_stride = in.block_table.size(1);",
     "ops lengths_and_tables_have_any_strides"),
    ("overlap within a cache allowed", "csrc/torch/append.cpp", "if (step <= last) return false;",
     "if (step < 0) return false;", "append no_layout_that_overlaps_is_written"),
    ("sink tokens not clamped to the keys", MASK, "(sa_position_t)sa_min(mask->num_sink_tokens, k_len);",
     "(sa_position_t)mask->num_sink_tokens;", "test_c sink_tokens_beyond_the_keys"),
    ("sm_90a code for newer GPUs", PLAN, "info->arch >= 90;", "info->arch > 90;", "test_c rows_and_devices"),
    ("local window one key longer", "csrc/core/refusals.c", "<= 2 * info->tile_k + 1 ?", "<= 2 * info->tile_k + 2 ?",
     "test_c the_local_windows_edge"),
    ("the wrong block has two tiles", "csrc/core/refusals.c", "{2 * blocks - items,", "{2 * blocks - 1 - items,",
     "test_c the_small_tiles_edge"),
    ("no block for rows past the last sequence", PLAN, "p->batch + 1) : p->batch * sa", "p->batch) : p->batch * sa",
     "test_c workers_of_packed_rows"),
    ("two kv heads leave dK in one place", "csrc/core/chains.h", "(before + block - first) * c->heads + head;",
     "(before + block - first) * c->heads + head / 2;", "test_c items_are_found_by_block_and_round"),
    ("a round's last block has another's place", "csrc/core/chains.h",
     "places += (int32_t)(blocks.end - blocks.begin);", "places += (int32_t)(blocks.end - blocks.begin) - 1;",
     "test_c items_are_found_by_block_and_round"),
    ("places of one head for all", "csrc/core/workspace.c", "sa_min(most_places, of_head * heads);",
     "sa_min(most_places, of_head);", "test_c packed_batches_have_room"),
    ("2^24 partials", PLAN, "partials < most", "partials <= most", "test_c partials_that_fit"),
    ("denormal scale accepted", "csrc/core/validate.c", "(size >= (double)FLT_MIN && size", "(size > 0.0 && size",
     "test_c malformed_calls"),
    ("lengths used that were not validated", TILE, "    return copy;\n", "    return copy ? lengths : NULL;\n",
     "test_c changing_cu_seqlens"),
    ("unmapped page taken for an offset", "csrc/cpu/cpu_append.c", "if (to == -1) continue;", "",
     "test_c changing_append"),
    ("slots looked at once", "csrc/cpu/cpu_append.c", "if (slot < 0 || slot >= sa_num_slots(problem)) continue;",
     "if (slot < 0) continue;", "test_c changing_slots"),
    ("packed rows read another sequence's pages", TILE,
     "sa_cache_offset(stream->cache, tensor, stream->b, j, stream->kv_head)",
     "sa_cache_offset(stream->cache, tensor, at->batch, j, stream->kv_head)", "test_c packed_over_pages_is_dense"),
    ("lanes past the last row reach dk", TILE, "(!lanes_meet || rows->n == rows->lanes)", "(!lanes_meet || true)",
     "test_c key_without_weight"),
    ("out may be q", "csrc/core/validate_layout.c", "(a->written || b->written) && overlap",
     "(a->written && b->written) && overlap", "test_c malformed_calls"),
)]  # fmt: skip
