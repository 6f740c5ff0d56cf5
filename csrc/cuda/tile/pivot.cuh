// SPDX-License-Identifier: Apache-2.0
//
// When a row's pivot moves. Kernels that give a row the same bits share these numbers.
#pragma once

#include "cuda/ptx/sm80.cuh"

namespace sa {

// In log2 units: a pivot follows its row's maximum only where that exceeds it by more, so O is seldom rescaled.
constexpr float kLazy = 8.0f;

// On 9.0, where later key tiles are not searched for maxima, it may move only where a sum of weights exceeds this. P can still hold it.
template <class Element> constexpr float kLarge = 0x1p24f;
template <> constexpr float kLarge<Fp16> = 0x1p14f;

} // namespace sa
