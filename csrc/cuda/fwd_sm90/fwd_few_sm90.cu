// SPDX-License-Identifier: Apache-2.0
//
// The general forward on sm_90 for few rows of a dense batch: tiles of 64 for one math warpgroup, so that more blocks share
// them: kernel.cuh.

#include "cuda/fwd_sm90/cached.cuh"
#include "cuda/fwd_sm90/kernel.cuh"
#include "cuda/fwd_sm90/math.cuh"
#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/fwd_sm90/smem.cuh"
#include "cuda/fwd_sm90/softmax.cuh"
#include "cuda/fwd_sm90/threads.cuh"

namespace sa::fwd_sm90 {

SA_FWD_SM90_LAUNCHER(d64_few_rows, 64, 64, 6, 4, 2)
SA_FWD_SM90_LAUNCHER(d128_few_rows, 128, 128, 4, 2, 2)
static_assert(sa_fwd_cuda_sm90_d64_few_rows_tile_k == sa_fwd_cuda_sm90_d64_tile_k, "one order of sums");
static_assert(sa_fwd_cuda_sm90_d128_few_rows_tile_k == sa_fwd_cuda_sm90_d128_tile_k, "one order of sums");

} // namespace sa::fwd_sm90
