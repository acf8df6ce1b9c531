// Products whose result is kept transposed: the left operand is a matrix, 64 outputs an instruction, and the rows that it
// multiplies are the columns, so that their number is rounded to 16 or 32 and not to 64.

#pragma once

#include "warpgroup.cuh"

// d [64 outputs][N rows] += a b, 16 deep: a [outputs][depth] or with A_BY_DEPTH [depth][outputs], or in registers; b
// [rows][depth].
#define F4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define F16(d, i) F4(d[i]), F4(d[i + 1]), F4(d[i + 2]), F4(d[i + 3])
#define P0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define P1 P0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P2 P1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define P3 P2 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define P4 P3 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define P5 P4 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define P6 P5 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PRODUCT(N, LIST, A, B, T, C, D, ...)                                                                           \
    template <int A_BY_DEPTH> __device__ __forceinline__ void product(float(&d)[N / 8][4], u64 a, u64 b) {               \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, " A ", " B ", 1, 1, 1, " T ", 0;" \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "n"(A_BY_DEPTH));                                                               \
    }                                                                                                                  \
    __device__ __forceinline__ void product(float(&d)[N / 8][4], const u32(&a)[4], u64 b) {                              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, {" A ", " B ", " T ", " C "}, " D  \
                     ", 1, 1, 1, 0;"                                                                                   \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }
PRODUCT(32, P0, "%16", "%17", "%18", "%19", "%20", F16(d, 0))
PRODUCT(64, P1, "%32", "%33", "%34", "%35", "%36", F16(d, 0), F16(d, 4))
PRODUCT(96, P2, "%48", "%49", "%50", "%51", "%52", F16(d, 0), F16(d, 4), F16(d, 8))
PRODUCT(128, P3, "%64", "%65", "%66", "%67", "%68", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12))
PRODUCT(144, P4, "%72", "%73", "%74", "%75", "%76", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12), F4(d[16]), F4(d[17]))
PRODUCT(160, P5, "%80", "%81", "%82", "%83", "%84", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12), F16(d, 16))
PRODUCT(176, P6, "%88", "%89", "%90", "%91", "%92", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12), F16(d, 16), F4(d[20]), F4(d[21]))
#undef PRODUCT
#undef F4
#undef F16
#undef P0
#undef P1
#undef P2
#undef P3
#undef P4
#undef P5
#undef P6

// The N of `product` for a number of rows.
__device__ __forceinline__ int padded_rows(int count) { return count > 128 ? (count + 15) / 16 * 16 : (count + 31) / 32 * 32; }
