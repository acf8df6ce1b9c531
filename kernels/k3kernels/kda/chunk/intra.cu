// kda_intra_kernel of intra.py for bf16, 128 key channels and a bounded gate, with layouts that Triton cannot name.
//
// A thread owns two channels of one half of the chunk (32 rows), so that the running sum of the decay, its values at the
// border and all exponents stay in its registers; rows are normalised by a transposing butterfly over the warp. Tiles of
// factors go through shared memory once, for the products; until then the raw keys and queries wait there. The triangular
// inverse is solved by substitution, one column a thread, in blocks of 16 rows, and put together by products in tf32.
//
// With G' the sum of log2 decays from a half's start, ref its row 15, end its row 31:
//   left = x 2^(G' - ref), right = k 2^(ref - G'): at most 2^(5 log2(e) 16), finite in bf16
//   x 2^G' = left 2^ref and k 2^(end - G') = right 2^(end - ref), multiplied in an order in which nothing vanishes early

#include "tiles.cuh"

constexpr int TILE = K + 8;   // bf16 of a tile's row: 16 bytes further each row, so that ldmatrix meets no bank twice
constexpr int WIDE = C + 4;   // floats of a row of M and A
constexpr int NARROW = C + 8; // bf16 of a row of P

struct Shared { // of THREADS threads, SHARED_BYTES long
    union {
        u16 k_left[C][TILE];
        float M[C][WIDE];
    };
    union {
        u16 q_left[C][TILE];
        struct {
            u16 P[C][NARROW];
            float T[R][R + 4];
        };
    };
    union {
        u16 k_right[C][TILE];
        float A[C][WIDE];
    };
    u16 k_cross[R][TILE];
    float ref[2][K], end[2][K];
    float squares[2][C][2]; // of k and q, by the two warps that hold a row
    float norm[2][C], beta[C];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host reserves what the kernel takes");

// Lane l gets the sum over the warp of what the lanes hold as x[l].
template <int WIDTH = 16>
__device__ __forceinline__ float transposing_sum(float (&x)[32], int lane) {
    const bool is_upper = lane & WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        const float sent = is_upper ? x[i] : x[i + WIDTH];
        const float kept = is_upper ? x[i + WIDTH] : x[i];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, WIDTH);
    }
    if constexpr (WIDTH > 1) return transposing_sum<WIDTH / 2>(x, lane);
    return x[0];
}

struct Rows {
    float of[R];
};

// Of a pair of channels, row by row.
__device__ __forceinline__ Rows squares(const u16 *pair) {
    Rows x;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const u32 both = *reinterpret_cast<const u32 *>(pair + r * TILE);
        x.of[r] = low(both) * low(both) + high(both) * high(both);
    }
    return x;
}
__device__ __forceinline__ float transposing_sum(Rows x, int lane) { return transposing_sum(x.of, lane); }

__device__ __forceinline__ u32 tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// c [16, 8] += a [16, depth] b [depth, 8], of rows in shared memory, in tf32.
template <int DEPTH, int STRIDE_A, int STRIDE_B>
__device__ __forceinline__ void multiply_wide(float (&c)[4], const float *a, const float *b, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 8) {
        const u32 a0 = tf32(a[g * STRIDE_A + k + t]), a1 = tf32(a[(g + 8) * STRIDE_A + k + t]);
        const u32 a2 = tf32(a[g * STRIDE_A + k + t + 4]), a3 = tf32(a[(g + 8) * STRIDE_A + k + t + 4]);
        const u32 b0 = tf32(b[(k + t) * STRIDE_B + g]), b1 = tf32(b[(k + t + 4) * STRIDE_B + g]);
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

template <int STRIDE>
__device__ __forceinline__ void put_wide(float *out, const float (&c)[4], float factor, int lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
    out[g * STRIDE + t] = factor * c[0];
    out[g * STRIDE + t + 1] = factor * c[1];
    out[(g + 8) * STRIDE + t] = factor * c[2];
    out[(g + 8) * STRIDE + t + 1] = factor * c[3];
}

// Of k and q rows (a strip of 16) with the 16 rows of `right`: two tiles of 8 columns each.
__device__ __forceinline__ void multiply_tiles(
    float (&M0)[4], float (&M1)[4], float (&P0)[4], float (&P1)[4], const u32 (&k)[4], const u32 (&q)[4],
    const u16 *right, int lane) {
    u32 b[4];
    load_matrices(b, right + (lane % 8 + (lane / 16) * 8) * TILE + ((lane / 8) % 2) * 8);
    multiply(M0, k, b[0], b[1]);
    multiply(M1, k, b[2], b[3]);
    multiply(P0, q, b[0], b[1]);
    multiply(P1, q, b[2], b[3]);
}

// A tile of 8 columns: M with beta below the diagonal, P on it too.
__device__ __forceinline__ void put_pairs(Shared &s, const float (&M)[4], const float (&P)[4], int row, int column, int lane) {
    const int g = lane / 4, t = 2 * (lane % 4), j = column + t;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const int i = row + g + 8 * part;
        const float beta = s.beta[i];
        s.M[i][j] = i > j ? beta * M[2 * part] : 0.f;
        s.M[i][j + 1] = i > j + 1 ? beta * M[2 * part + 1] : 0.f;
        *reinterpret_cast<u32 *>(&s.P[i][j]) = pack(i >= j ? P[2 * part] : 0.f, i > j ? P[2 * part + 1] : 0.f);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) kda_intra(
    const u16 *q_ptr, const u16 *k_ptr, const u16 *f_ptr, const void *b_ptr, const float *a_log_ptr,
    const float *dt_bias_ptr, const int *starts_ptr, const int *lengths_ptr, u16 *q_decayed_ptr, u16 *k_decayed_ptr,
    u16 *k_to_end_ptr, u16 *P_ptr, u16 *A_ptr, float *decay_ptr,
    float *norms_ptr, float scale, float lower_bound, int H) {
    extern __shared__ __align__(16) char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int chunk = blockIdx.x / H, h = blockIdx.x % H;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int half = warp / 2, channel = 2 * ((warp % 2) * 32 + lane);
    const long long start = starts_ptr[chunk];
    const int length = lengths_ptr[chunk], rows_in = length - half * R; // may be negative, or above R
    const long long step = (long long)H * K, first = ((start + half * R) * H + h) * K + channel;
    const long long tile = ((long long)chunk * H + h) * C;

#pragma unroll
    for (int i = 0; i < C * K / 8 / THREADS; ++i) { // raw, where their factors will be
        const int row = thread / (K / 8) + i * (8 * THREADS / K), column = thread % (K / 8) * 8;
        const bool is_in = row < length;
        const long long at = is_in ? ((start + row) * H + h) * K + column : 0;
        copy_async(&s.k_left[row][column], k_ptr + at, is_in);
        copy_async(&s.q_left[row][column], q_ptr + at, is_in);
    }
    u32 f[R];
#pragma unroll
    for (int r = 0; r < R; ++r) f[r] = r < rows_in ? *reinterpret_cast<const u32 *>(f_ptr + first + r * step) : 0;
    if (thread < C) {
        const float b = thread < length ? load_b(b_ptr, (start + thread) * H + h) : 0.f;
        s.beta[thread] = thread < length ? reciprocal(1.f + ex2(-b * LOG2E)) : 0.f;
    }
    float G0[R], G1[R];
    {
        const float a = -LOG2E * ex2(a_log_ptr[h] * LOG2E), bound = lower_bound * LOG2E;
        const float2 dt_bias = *reinterpret_cast<const float2 *>(dt_bias_ptr + h * K + channel);
        float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const float g0 = bound * reciprocal(1.f + ex2(a * (low(f[r]) + dt_bias.x)));
            const float g1 = bound * reciprocal(1.f + ex2(a * (high(f[r]) + dt_bias.y)));
            sum0 += r < rows_in ? g0 : 0.f;
            sum1 += r < rows_in ? g1 : 0.f;
            G0[r] = sum0;
            G1[r] = sum1;
        }
    }
    *reinterpret_cast<float2 *>(&s.ref[half][channel]) = make_float2(G0[15], G1[15]);
    *reinterpret_cast<float2 *>(&s.end[half][channel]) = make_float2(G0[31], G1[31]);
    wait_for_copies();
    __syncthreads();
    s.squares[0][half * R + lane][warp % 2] = transposing_sum(squares(&s.k_left[half * R][channel]), lane);
    s.squares[1][half * R + lane][warp % 2] = transposing_sum(squares(&s.q_left[half * R][channel]), lane);
    __syncthreads();
    {
        const int which = thread / C, row = thread % C;
        const float sum = s.squares[which][row][0] + s.squares[which][row][1] + 1e-6f;
        const float norm = rsqrtf(sum);
        norms_ptr[tile * 2 + thread] = norm;
        s.norm[which][row] = norm * (which ? scale : 1.f);
    }
    __syncthreads();

    {
        const float2 end1 = *reinterpret_cast<float2 *>(&s.end[0][channel]);
        const float2 end2 = *reinterpret_cast<float2 *>(&s.end[1][channel]);
        const float2 ref2 = *reinterpret_cast<float2 *>(&s.ref[1][channel]);
        const float ref_0 = G0[15], ref_1 = G1[15];
        const float from_ref0 = ex2(ref_0), from_ref1 = ex2(ref_1);
        const float to_end0 = ex2(G0[31] - ref_0), to_end1 = ex2(G1[31] - ref_1);
        const float before0 = half ? ex2(end1.x) : 1.f, before1 = half ? ex2(end1.y) : 1.f;
        const float after0 = half ? 1.f : ex2(end2.x), after1 = half ? 1.f : ex2(end2.y);
        const float cross0 = ex2(ref2.x), cross1 = ex2(ref2.y);
        if (half == 0)
            *reinterpret_cast<float2 *>(decay_ptr + ((long long)chunk * H + h) * K + channel) =
                make_float2(ex2(end1.x + end2.x), ex2(end1.y + end2.y));
        const long long out = (tile + half * R) * K + channel;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const int row = half * R + r;
            const float k_norm = s.norm[0][row], q_norm = s.norm[1][row];
            const u32 k = *reinterpret_cast<u32 *>(&s.k_left[row][channel]);
            const u32 q = *reinterpret_cast<u32 *>(&s.q_left[row][channel]);
            const float left0 = ex2(G0[r] - ref_0), left1 = ex2(G1[r] - ref_1);
            const float right0 = ex2(ref_0 - G0[r]), right1 = ex2(ref_1 - G1[r]);
            const float k0 = low(k) * k_norm, k1 = high(k) * k_norm;
            const float k_left0 = k0 * left0, k_left1 = k1 * left1;
            const float q_left0 = low(q) * q_norm * left0, q_left1 = high(q) * q_norm * left1;
            const float k_right0 = k0 * right0, k_right1 = k1 * right1;
            const float end0 = k_right0 * to_end0, end1_ = k_right1 * to_end1;
            *reinterpret_cast<u32 *>(&s.k_left[row][channel]) = pack(k_left0, k_left1);
            *reinterpret_cast<u32 *>(&s.q_left[row][channel]) = pack(q_left0, q_left1);
            *reinterpret_cast<u32 *>(&s.k_right[row][channel]) = pack(k_right0, k_right1);
            if (half == 0) *reinterpret_cast<u32 *>(&s.k_cross[r][channel]) = pack(end0 * cross0, end1_ * cross1);
            *reinterpret_cast<u32 *>(q_decayed_ptr + out + r * K) =
                pack(q_left0 * from_ref0 * before0, q_left1 * from_ref1 * before1);
            *reinterpret_cast<u32 *>(k_decayed_ptr + out + r * K) =
                pack(k_left0 * from_ref0 * before0, k_left1 * from_ref1 * before1);
            *reinterpret_cast<u32 *>(k_to_end_ptr + out + r * K) = pack(end0 * after0, end1_ * after1);
        }
    }
    __syncthreads();

    // A warp has the 16 rows from 16 warp on: their pairs with the other half, and with their own up to the diagonal.
    {
        float own_M[4][4] = {}, own_P[4][4] = {}, cross_M[4][4] = {}, cross_P[4][4] = {};
        const bool is_second = warp % 2;
        const int strip = (16 * warp + lane % 16) * TILE + (lane / 16) * 8;
#pragma unroll
        for (int c = 0; c < K; c += 16) {
            u32 a[4], b[4];
            load_matrices(a, &s.k_left[0][0] + strip + c);
            load_matrices(b, &s.q_left[0][0] + strip + c);
            multiply_tiles(own_M[0], own_M[1], own_P[0], own_P[1], a, b, &s.k_right[half * R][c], lane);
            if (is_second)
                multiply_tiles(own_M[2], own_M[3], own_P[2], own_P[3], a, b, &s.k_right[half * R + 16][c], lane);
            if (half) {
                multiply_tiles(cross_M[0], cross_M[1], cross_P[0], cross_P[1], a, b, &s.k_cross[0][c], lane);
                multiply_tiles(cross_M[2], cross_M[3], cross_P[2], cross_P[3], a, b, &s.k_cross[16][c], lane);
            }
        }
        __syncthreads(); // the tiles were read: M and P take their place
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            put_pairs(s, own_M[n], own_P[n], 16 * warp, half * R + 8 * n, lane);
            put_pairs(s, cross_M[n], cross_P[n], 16 * warp, (1 - half) * R + 8 * n, lane);
        }
    }
    __syncthreads();

    // (I + M)^-1: of blocks of 16 rows by substitution, a column a thread; the others clear what lies beside them.
    if (thread < C) {
        const int block = thread / 16 * 16, column = thread % 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            x[i] = i == column ? 1.f : 0.f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 m = *reinterpret_cast<const float4 *>(&s.M[block + i][block + j]);
                x[i] -= m.x * x[j];
                if (j + 1 < i) x[i] -= m.y * x[j + 1];
                if (j + 2 < i) x[i] -= m.z * x[j + 2];
                if (j + 3 < i) x[i] -= m.w * x[j + 3];
            }
            s.A[block + i][block + column] = x[i];
        }
    } else {
        const int row = thread - C;
#pragma unroll
        for (int j = 0; j < C; j += 4)
            if (j / 16 != row / 16) *reinterpret_cast<float4 *>(&s.A[row][j]) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    __syncthreads();
    { // halves: -D2 M21 D1, 8 columns a warp
        const int at = (warp / 2) * R, column = (warp % 2) * 8;
        float *T = &s.T[(warp / 2) * 16][column], x[4] = {}, y[4] = {};
        multiply_wide<16, WIDE, WIDE>(x, &s.M[at + 16][at], &s.A[at][at + column], lane);
        put_wide<R + 4>(T, x, -1.f, lane);
        __syncwarp();
        multiply_wide<16, WIDE, R + 4>(y, &s.A[at + 16][at + 16], T, lane);
        put_wide<WIDE>(&s.A[at + 16][at + column], y, 1.f, lane);
    }
    __syncthreads();
    { // the chunk: -A22 M21 A11, 16 rows and columns a warp
        const int row = (warp / 2) * 16, column = (warp % 2) * 16;
        float x0[4] = {}, x1[4] = {};
        multiply_wide<32, WIDE, WIDE>(x0, &s.M[R + row][0], &s.A[0][column], lane);
        multiply_wide<32, WIDE, WIDE>(x1, &s.M[R + row][0], &s.A[0][column + 8], lane);
        put_wide<R + 4>(&s.T[row][column], x0, -1.f, lane);
        put_wide<R + 4>(&s.T[row][column + 8], x1, -1.f, lane);
        __syncthreads();
        float y0[4] = {}, y1[4] = {};
        multiply_wide<32, WIDE, R + 4>(y0, &s.A[R + row][R], &s.T[0][column], lane);
        multiply_wide<32, WIDE, R + 4>(y1, &s.A[R + row][R], &s.T[0][column + 8], lane);
        put_wide<WIDE>(&s.A[R + row][column], y0, 1.f, lane);
        put_wide<WIDE>(&s.A[R + row][column + 8], y1, 1.f, lane);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = (thread + i * THREADS) / 8, column = (thread + i * THREADS) % 8 * 8;
        const float4 x = *reinterpret_cast<float4 *>(&s.A[row][column]), y = *reinterpret_cast<float4 *>(&s.A[row][column + 4]);
        const float4 u = *reinterpret_cast<float4 *>(&s.beta[column]), w = *reinterpret_cast<float4 *>(&s.beta[column + 4]);
        const uint4 A = make_uint4(
            pack(x.x * u.x, x.y * u.y), pack(x.z * u.z, x.w * u.w), pack(y.x * w.x, y.y * w.y), pack(y.z * w.z, y.w * w.w));
        *reinterpret_cast<uint4 *>(A_ptr + (tile + row) * C + column) = A;
        *reinterpret_cast<uint4 *>(P_ptr + (tile + row) * C + column) = *reinterpret_cast<uint4 *>(&s.P[row][column]);
    }
}
