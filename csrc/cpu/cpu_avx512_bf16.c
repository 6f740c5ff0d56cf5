/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for AVX-512 with bf16 dot products: a cell is two bf16, multiplied and added in one instruction. */
#if defined(__x86_64__)
#include <immintrin.h>

#define SA_OPS sa_ops_avx512_bf16
#define SA_VL 16
#define SA_PANEL 4
#define SA_CELL_MADD(sum, a, b) ((sa_vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define SA_NARROW_BF16(x) ((sa_vh)_mm512_cvtneps_pbh((__m512)(x)))
#include "cpu/cpu_rows.h"
#else
typedef int sa_no_avx512_bf16;
#endif
