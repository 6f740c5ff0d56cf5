/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for AVX-512 with bf16 dot products: a cell is two bf16, multiplied and added in one instruction. */
#if defined(__x86_64__)
#define SA_OPS sa_ops_avx512_bf16
#define SA_VL 16
#define SA_PANEL 4
#define SA_BF16_CELLS
#include "cpu/cpu_rows.h"
#else
typedef int sa_no_avx512_bf16;
#endif
