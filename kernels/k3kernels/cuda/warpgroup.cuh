// Hopper's products of a warpgroup: four warps give 64 rows, right operands come from shared memory.
//
// A tile there is [64 rows][64 columns] of bf16, 8 KiB from a multiple of 1 KiB, whose eight 16-byte pieces of a row are
// exchanged by the row's number (swizzled over 128 bytes), so that rows and columns are both read without conflicts.

#pragma once

#include "mma.cuh"

constexpr int TILE = 64 * 64;

// Of a tile or of several side by side: 16 bytes of row `row` that start at column `column`.
__device__ __forceinline__ int swizzled(int row, int column) {
    return column / 64 * TILE + row * 64 + ((column / 8 % 8) ^ (row % 8)) * 8;
}

// A tile's address, in steps of 16 bytes; from one group of 8 rows to the next 1 KiB, from one tile to the next 8 KiB.
__device__ __forceinline__ u64 describe(const u16 *tile) {
    return u64(shared_address(tile) >> 4 & 0x3fff) | u64(2 * TILE >> 4) << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}
// 16 columns further, where the product's depth lies along a row, and 16 rows further, where it lies along a column.
constexpr u64 COLUMNS_16 = 32 >> 4, ROWS_16 = 2048 >> 4;
// Sixteen columns `s` of one tile or of the next.
__device__ __forceinline__ u64 columns_16(u64 tile, int s) { return tile + s / 4 * (2 * TILE >> 4) + s % 4 * COLUMNS_16; }

// Products read registers and tiles later: before the first of them, and after the last.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// What threads wrote to shared memory is there for products of all.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int N> __device__ __forceinline__ void clear(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][e] = 0.f;
}

// The warpgroup's own barrier.
__device__ __forceinline__ void meet_group() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

// Four tiles of a product's result, 8 x 8 each, to rows of shared memory: a lane gives the address of one.
__device__ __forceinline__ void store_transposed(u16 *p, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(p)), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// The same as they are.
__device__ __forceinline__ void store_matrices(u16 *p, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(p)), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// d [64][8 tiles] += a b (or -= with NEGATES): a 16 columns in registers. b 16 deep: a tile [column][depth], or with
// B_BY_DEPTH [depth][column]. Without registers a is a tile [depth][row], and b [depth][column].
#define F4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
template <int NEGATES, int B_BY_DEPTH>
__device__ __forceinline__ void multiply_group(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, 1, %37, 1, %38;"
                 : F4(d[0]), F4(d[1]), F4(d[2]), F4(d[3]), F4(d[4]), F4(d[5]), F4(d[6]), F4(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(NEGATES ? -1 : 1), "n"(B_BY_DEPTH));
}
__device__ __forceinline__ void multiply_group(float (&d)[8][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 1, 1;"
                 : F4(d[0]), F4(d[1]), F4(d[2]), F4(d[3]), F4(d[4]), F4(d[5]), F4(d[6]), F4(d[7])
                 : "l"(a), "l"(b));
}
template <int NEGATES, int B_BY_DEPTH>
__device__ __forceinline__ void multiply_group(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, 1, %69, 1, %70;"
                 : F4(d[0]), F4(d[1]), F4(d[2]), F4(d[3]), F4(d[4]), F4(d[5]), F4(d[6]), F4(d[7]),
                   F4(d[8]), F4(d[9]), F4(d[10]), F4(d[11]), F4(d[12]), F4(d[13]), F4(d[14]), F4(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(NEGATES ? -1 : 1), "n"(B_BY_DEPTH));
}
__device__ __forceinline__ void multiply_group(float (&d)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 1, 1;"
                 : F4(d[0]), F4(d[1]), F4(d[2]), F4(d[3]), F4(d[4]), F4(d[5]), F4(d[6]), F4(d[7]),
                   F4(d[8]), F4(d[9]), F4(d[10]), F4(d[11]), F4(d[12]), F4(d[13]), F4(d[14]), F4(d[15])
                 : "l"(a), "l"(b));
}
#undef F4
