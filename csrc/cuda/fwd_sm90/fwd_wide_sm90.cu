// SPDX-License-Identifier: Apache-2.0
//
// The general forward on sm_90 for head_dim from 136 to 256: kernel.cuh.

#include "cuda/fwd_sm90/cached.cuh"
#include "cuda/fwd_sm90/kernel.cuh"
#include "cuda/fwd_sm90/math.cuh"
#include "cuda/fwd_sm90/rows.cuh"
#include "cuda/fwd_sm90/smem.cuh"
#include "cuda/fwd_sm90/softmax.cuh"
#include "cuda/fwd_sm90/threads.cuh"

namespace sa::fwd_sm90 {

SA_FWD_SM90_LAUNCHERS(d256, 256, 256, 2, 2, 1)
SA_FWD_SM90_LAUNCHERS(d256_tile64, 256, 256, 2, 2, 1)
SA_FWD_SM90_LAUNCHERS(d192_v128, 192, 128, 3, 4, 1)
SA_FWD_SM90_LAUNCHERS(d192_v128_tile128, 192, 128, 3, 4, 1)
SA_FWD_SM90_LAUNCHERS(d192_v128_tile64, 192, 128, 4, 4, 1)

} // namespace sa::fwd_sm90
