/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for AVX2 with FMA: 6 x 2 sums of 8 floats in 16 registers. */
#if defined(__x86_64__)
#define SA_OPS sa_ops_avx2
#define SA_VL 8
#define SA_PANEL 2
#include "cpu/cpu_rows.h"
#else
typedef int sa_no_avx2;
#endif
