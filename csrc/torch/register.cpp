// SPDX-License-Identifier: Apache-2.0
//
// The operators' schemas. The names matter: other trainers' checkpointing policies find the forward by "flash_attn", the backward by
// "bwd", and read window_size_left. So do the positions: what follows the tensors that every call has is optional, and keeps its place.
// The _raw forms return the LSE over the keys alone as well.

#include <torch/library.h>

TORCH_LIBRARY(sinkattn, m) {
    m.def("flash_attn_fwd(Tensor q, Tensor k, Tensor v, Tensor? s_aux=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
          "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, SymInt window_size_left=-1, "
          "SymInt window_size_right=-1, SymInt num_sink_tokens=0) -> (Tensor out, Tensor lse)");
    m.def("flash_attn_fwd_raw(Tensor q, Tensor k, Tensor v, Tensor? s_aux=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
          "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, SymInt window_size_left=-1, "
          "SymInt window_size_right=-1, SymInt num_sink_tokens=0) -> (Tensor out, Tensor lse, Tensor lse_raw)");
    m.def("flash_attn_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? s_aux=None, "
          "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
          "float? softmax_scale=None, SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt num_sink_tokens=0) "
          "-> (Tensor dq, Tensor dk, Tensor dv, Tensor ds_aux)");
    m.def("flash_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? s_aux=None, Tensor? cache_seqlens=None, "
          "Tensor? block_table=None, float? softmax_scale=None, SymInt window_size_left=-1, SymInt num_sink_tokens=0, "
          "SymInt num_splits=0, bool invariant=False, "
          "*, Tensor? k_cache_host=None, Tensor? v_cache_host=None) -> (Tensor out, Tensor lse)");
    m.def("flash_decode_raw(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? s_aux=None, Tensor? cache_seqlens=None, "
          "Tensor? block_table=None, float? softmax_scale=None, SymInt window_size_left=-1, SymInt num_sink_tokens=0, "
          "SymInt num_splits=0, bool invariant=False, "
          "*, Tensor? k_cache_host=None, Tensor? v_cache_host=None) -> (Tensor out, Tensor lse, Tensor lse_raw)");
    m.def("flash_decode_nvfp4(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? s_aux=None, Tensor? cache_seqlens=None, "
          "Tensor? block_table=None, float? softmax_scale=None, SymInt window_size_left=-1, SymInt num_sink_tokens=0, "
          "SymInt num_splits=0, bool invariant=False, "
          "float global_scale=1.0, *, Tensor? k_cache_host=None, Tensor? v_cache_host=None) "
          "-> (Tensor out, Tensor lse, Tensor values, Tensor scales)");
    m.def("flash_decode_out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? s_aux, Tensor? cache_seqlens, Tensor? block_table, "
          "float? softmax_scale, SymInt window_size_left, SymInt num_sink_tokens, SymInt num_splits, bool invariant, "
          "Tensor(a!) out, Tensor(b!) lse, Tensor(c!) scratch, *, Tensor? k_cache_host=None, Tensor? v_cache_host=None) -> ()");
    m.def("flash_decode_varlen(Tensor q, Tensor k, Tensor v, Tensor? s_aux, Tensor cu_seqlens_q, Tensor seqused_k, "
          "Tensor? block_table=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, "
          "SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt num_sink_tokens=0) -> (Tensor out, Tensor lse)");
    m.def("flash_decode_varlen_raw(Tensor q, Tensor k, Tensor v, Tensor? s_aux, Tensor cu_seqlens_q, Tensor seqused_k, "
          "Tensor? block_table=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, "
          "SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt num_sink_tokens=0) "
          "-> (Tensor out, Tensor lse, Tensor lse_raw)");
    m.def("append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor? v, Tensor cache_seqlens, Tensor? block_table=None) "
          "-> Tensor cache_seqlens_after");
    m.def("append_kv_slots(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor? v, Tensor slot_mapping) -> ()");
    m.def("merge_attn_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)");
    m.def("apply_sink(Tensor out, Tensor lse, Tensor s_aux) -> (Tensor out, Tensor lse)");
}
