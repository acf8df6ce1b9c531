// What the kernels of KDA's chunks share.

#pragma once

#include "mma.cuh"

constexpr int C = 64, R = 32, K = 128;
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float load_b(const void *b, long long at) {
#ifdef B_IS_BF16
    return __uint_as_float(u32(static_cast<const u16 *>(b)[at]) << 16);
#else
    return static_cast<const float *>(b)[at];
#endif
}

__device__ __forceinline__ void store_b(void *b, long long at, float x) {
#ifdef B_IS_BF16
    static_cast<u16 *>(b)[at] = u16(pack(x, 0.f));
#else
    static_cast<float *>(b)[at] = x;
#endif
}
