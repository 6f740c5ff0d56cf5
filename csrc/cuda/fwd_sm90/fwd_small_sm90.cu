// SPDX-License-Identifier: Apache-2.0
//
// The general forward on sm_90 where tiles of 192 rows would leave multiprocessors idle: of 64 and 128, with the same bits: kernel.cuh.

#include "cuda/fwd_sm90/cached.cuh"
#include "cuda/fwd_sm90/kernel.cuh"
#include "cuda/fwd_sm90/math.cuh"
#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/fwd_sm90/smem.cuh"
#include "cuda/fwd_sm90/softmax.cuh"
#include "cuda/fwd_sm90/threads.cuh"

namespace sa::fwd_sm90 {

SA_FWD_SM90_LAUNCHERS(d64_tile64, 64, 64, 6, 4, 2)
SA_FWD_SM90_LAUNCHERS(d64_tile128, 64, 64, 4, 4, 2)
SA_FWD_SM90_LAUNCHERS(d128_tile64, 128, 128, 4, 2, 2)
SA_FWD_SM90_LAUNCHERS(d128_tile128, 128, 128, 3, 2, 2)

} // namespace sa::fwd_sm90
