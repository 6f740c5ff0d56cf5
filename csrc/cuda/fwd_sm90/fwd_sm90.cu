// SPDX-License-Identifier: Apache-2.0
//
// The general forward on sm_90 for head_dim up to 128: kernel.cuh.

#include "cuda/fwd_sm90/cached.cuh"
#include "cuda/fwd_sm90/kernel.cuh"
#include "cuda/fwd_sm90/math.cuh"
#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/fwd_sm90/smem.cuh"
#include "cuda/fwd_sm90/softmax.cuh"
#include "cuda/fwd_sm90/threads.cuh"

namespace sa::fwd_sm90 {

SA_FWD_SM90_LAUNCHERS(d64, 64, 64, 4, 4, 2)
SA_FWD_SM90_LAUNCHERS(d96, 96, 96, 3, 2, 2)
SA_FWD_SM90_LAUNCHERS(d128, 128, 128, 3, 2, 2)
static_assert(sa_fwd_cuda_sm90_d96_tile_k == sa_fwd_cuda_sm90_d128_tile_k, "decode_chain and fwd_wide_window have one order for both");

} // namespace sa::fwd_sm90
