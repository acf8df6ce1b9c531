// kda_gradient_kernel of gradient.py for bf16, 128 key and value channels and a bounded gate. A block has one chunk, one
// head and 64 key channels; a warp 16 rows of 32 of them, both as rows of products and, a pair of channels and 8 rows a
// lane, for sums along the rows. So a row's decays are where its products are.
//
// Pairs count for the gate twice, as a row's and as a column's, and most of both cancel in the sum to the chunk's end: the
// gate's part is taken from the rounded factors that the products had, so that what cancels is equal.

#include "tiles.cuh"

constexpr int CHANNELS = 64, OWN = 32, V = 128, STRIPS = 4, STRIP = 16;
constexpr int TILE = CHANNELS + 8, VALUES = V + 8; // bf16 of a row

struct Shared { // of THREADS threads, SHARED_BYTES long
    union {
        struct {
            u16 u[C][VALUES], dv[C][VALUES], d_o[C][VALUES], S[CHANNELS][VALUES], dS[CHANNELS][VALUES];
        };
        struct {
            float x[STRIPS][STRIP][TILE]; // G' - ref, then the gradient of G
            u16 k[C][TILE], q[C][TILE], f[C][TILE];
            union {
                struct {
                    u16 k_left[C][TILE], q_left[C][TILE], k_right[C][TILE];
                    u16 k_border[R][TILE];                // of the first half, to the border
                    u16 q_from[R][TILE], k_from[R][TILE]; // of the second, from it
                };
                struct {
                    float dq[C][TILE], dk[C][TILE]; // of the unit rows
                };
            };
        };
    };
    u16 dP[C][TILE], dM[C][TILE];
    float total[STRIPS][CHANNELS];     // of the log decay, by 16 rows
    float d_total[STRIPS][CHANNELS];   // of G's gradient
    float at_end[STRIPS][CHANNELS];    // what G at the chunk's end gets from the rows
    float bias[STRIPS][CHANNELS];
    float both[CHANNELS];              // sum_v S dS
    float q_along[C], k_along[C], k_norm[C], q_norm[C];
    float a_log[THREADS / 32];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host reserves what the kernel takes");

__device__ __forceinline__ void unpack(float (&x)[8], uint4 packed) {
    const u32 parts[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low(parts[i]);
        x[2 * i + 1] = high(parts[i]);
    }
}

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
    float x[8], y[8], sum = 0.f;
    unpack(x, a);
    unpack(y, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
    return sum;
}

__device__ __forceinline__ void fetch_to_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ float sum_of_16_lanes(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    return x + __shfl_xor_sync(0xffffffffu, x, 8);
}

__device__ __forceinline__ float sum_of_rows(float x) { // over the 8 lanes that hold a column of a product
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// A operand, 16 x 16: of rows as they lie, or of a matrix that lies transposed.
template <int STRIDE> __device__ __forceinline__ void load_rows(u32 (&a)[4], const u16 *p, int lane) {
    load_matrices(a, p + (lane % 16) * STRIDE + (lane / 16) * 8);
}
__device__ __forceinline__ void load_columns(u32 (&a)[4], const u16 *p, int lane) {
    load_matrices_transposed(a, p + (lane % 8 + (lane / 16) * 8) * TILE + ((lane / 8) % 2) * 8);
}
// B operand of two tiles of 8 columns, depth 16: b[0], b[1] and b[2], b[3].
__device__ __forceinline__ void load_right_of_rows(u32 (&b)[4], const u16 *p, int lane) { // p [columns][depth]
    load_matrices(b, p + (lane % 8 + (lane / 16) * 8) * VALUES + ((lane / 8) % 2) * 8);
}
__device__ __forceinline__ void load_right(u32 (&b)[4], const u16 *p, int lane) { // p [depth][columns]
    load_matrices_transposed(b, p + (lane % 8 + ((lane / 8) % 2) * 8) * TILE + (lane / 16) * 8);
}

__device__ __forceinline__ void multiply_two(float (&c0)[4], float (&c1)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    multiply(c0, a, b[0], b[1]);
    multiply(c1, a, b[2], b[3]);
}

__device__ __forceinline__ float2 unpack2(const u16 *p) {
    const u32 pair = *reinterpret_cast<const u32 *>(p);
    return make_float2(low(pair), high(pair));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) kda_gradient(
    const u16 *q_ptr, const u16 *k_ptr, const u16 *v_ptr, const u16 *f_ptr, const void *b_ptr, const float *a_log_ptr,
    const float *dt_bias_ptr, const int *starts_ptr, const int *lengths_ptr, const u16 *o_ptr, const u16 *do_ptr,
    const u16 *u_ptr, const u16 *dv_ptr, const u16 *states_ptr, const u16 *d_states_ptr, const float *norms_ptr,
    u16 *dq_ptr, u16 *dk_ptr, u16 *df_ptr, void *db_ptr, float *dt_bias_parts_ptr, float *a_log_parts_ptr, float scale,
    float lower_bound, int H) {
    extern __shared__ __align__(16) char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    constexpr int BLOCKS = K / CHANNELS;
    const int block = blockIdx.x % BLOCKS, h = (blockIdx.x / BLOCKS) % H, chunk = blockIdx.x / (BLOCKS * H);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % STRIPS, half = warp / 2;
    const int side = thread / 32 / STRIPS; // of the channels; warps of the first take dP, of the second dM
    const long long start = starts_ptr[chunk], of_head = (long long)chunk * H + h;
    const int length = lengths_ptr[chunk];
    const u16 *S_ptr = states_ptr + (of_head * K + block * CHANNELS) * V, *dS_ptr = d_states_ptr + (of_head * K + block * CHANNELS) * V;

    const int column = thread % 16 * 8;
    uint4 o[C / 16], v[C / 16];
#pragma unroll
    for (int i = 0; i < C / 16; ++i) {
        const int row = thread / 16 + 16 * i;
        const long long at = ((start + row) * H + h) * V + column;
        const bool is_in = row < length;
        copy_async(&s.u[row][column], u_ptr + (is_in ? at : 0), is_in);
        copy_async(&s.dv[row][column], dv_ptr + (is_in ? at : 0), is_in);
        copy_async(&s.d_o[row][column], do_ptr + (is_in ? at : 0), is_in);
        copy_async(&s.S[row][column], S_ptr + row * V + column, true);
        copy_async(&s.dS[row][column], dS_ptr + row * V + column, true);
        o[i] = is_in ? *reinterpret_cast<const uint4 *>(o_ptr + at) : make_uint4(0, 0, 0, 0);
        v[i] = is_in ? *reinterpret_cast<const uint4 *>(v_ptr + at) : make_uint4(0, 0, 0, 0);
    }
    const int lane_channel = OWN * side + 2 * (lane % 16), is_lower = lane / 16, first_row = 8 * is_lower; // of the strip
    const long long step = (long long)H * K, key = ((start + STRIP * warp) * H + h) * K + block * CHANNELS;
    const int rows_in = length - STRIP * warp;
    const float a = ex2(a_log_ptr[h] * LOG2E), bound = lower_bound * LOG2E;
    const float2 dt_bias = *reinterpret_cast<const float2 *>(dt_bias_ptr + h * K + block * CHANNELS + lane_channel);
    if (thread < 2 * C) (thread < C ? s.k_norm : s.q_norm)[thread % C] = norms_ptr[of_head * 2 * C + thread];
    const int key_row = thread / 8, key_column = thread % 8 * 8; // of k, q and f: 32 rows at a time
#pragma unroll
    for (int i = 0; i < C / 32; ++i) // they come later, when there is room for them: now to the L2 alone
        if (key_row + 32 * i < length && key_column == 0) {
            const long long at = ((start + key_row + 32 * i) * H + h) * K + block * CHANNELS;
            fetch_to_l2(f_ptr + at);
            fetch_to_l2(k_ptr + at);
            fetch_to_l2(q_ptr + at);
        }
    wait_for_copies();
#pragma unroll
    for (int i = 0; i < C / 16; ++i) { // what this thread copied itself
        const int row = thread / 16 + 16 * i;
        const uint4 u = *reinterpret_cast<const uint4 *>(&s.u[row][column]), dv = *reinterpret_cast<const uint4 *>(&s.dv[row][column]);
        const uint4 d_o = *reinterpret_cast<const uint4 *>(&s.d_o[row][column]);
        const uint4 S = *reinterpret_cast<const uint4 *>(&s.S[row][column]), dS = *reinterpret_cast<const uint4 *>(&s.dS[row][column]);
        const float q_along = sum_of_16_lanes(dot(d_o, o[i])), v_along = sum_of_16_lanes(dot(dv, v[i]));
        const float u_along = sum_of_16_lanes(dot(dv, u)), both = sum_of_16_lanes(dot(S, dS));
        if (thread % 16 == 0) {
            const bool is_in = row < length;
            const float b = is_in ? load_b(b_ptr, (start + row) * H + h) : 0.f;
            const float beta = reciprocal(1.f + ex2(-b * LOG2E)), over = u_along / fmaxf(beta, 1e-30f);
            s.q_along[row] = q_along;
            s.k_along[row] = 2.f * over - v_along;
            s.both[row] = both;
            if (is_in && block == 0) store_b(db_ptr, (start + row) * H + h, (1.f - beta) * over);
        }
    }
    __syncthreads();
    {
        float d_pairs[8][4] = {};
        const u16 *rows = side ? &s.dv[STRIP * warp][0] : &s.d_o[STRIP * warp][0];
#pragma unroll
        for (int depth = 0; depth < V; depth += 16) {
            u32 a[4], b[4];
            load_rows<VALUES>(a, rows + depth, lane);
#pragma unroll
            for (int n = 0; n < 8; n += 2)
                if (n / 2 <= warp) {
                    load_right_of_rows(b, &s.u[8 * n][depth], lane);
                    multiply_two(d_pairs[n], d_pairs[n + 1], a, b);
                }
        }
        const int g = lane / 4, t = 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int i = STRIP * warp + g + 8 * part, j = 8 * n + t;
                const float x = d_pairs[n][2 * part], y = d_pairs[n][2 * part + 1];
                if (side)
                    *reinterpret_cast<u32 *>(&s.dM[i][j]) = pack(i > j ? -x : 0.f, i > j + 1 ? -y : 0.f);
                else
                    *reinterpret_cast<u32 *>(&s.dP[i][j]) = pack(i >= j ? x : 0.f, i > j ? y : 0.f);
            }
    }

    // What comes from the states.
    float dq_state[4][4] = {}, dk_state[4][4] = {}, d_to_end[4][4] = {};
#pragma unroll
    for (int depth = 0; depth < V; depth += 16) {
        u32 d_o[4], dv[4], u[4], b[4];
        load_rows<VALUES>(d_o, &s.d_o[STRIP * warp][depth], lane);
        load_rows<VALUES>(dv, &s.dv[STRIP * warp][depth], lane);
        load_rows<VALUES>(u, &s.u[STRIP * warp][depth], lane);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            load_right_of_rows(b, &s.S[OWN * side + 8 * n][depth], lane);
            multiply_two(dq_state[n], dq_state[n + 1], d_o, b);
            multiply_two(dk_state[n], dk_state[n + 1], dv, b);
            load_right_of_rows(b, &s.dS[OWN * side + 8 * n][depth], lane);
            multiply_two(d_to_end[n], d_to_end[n + 1], u, b);
        }
    }
    __syncthreads(); // all of that was read: the factors take its place
#pragma unroll
    for (int i = 0; i < C / 32; ++i) {
        const int row = key_row + 32 * i;
        const bool is_in = row < length;
        const long long at = is_in ? ((start + row) * H + h) * K + block * CHANNELS + key_column : 0;
        copy_async(&s.f[row][key_column], f_ptr + at, is_in);
        copy_async(&s.k[row][key_column], k_ptr + at, is_in);
        copy_async(&s.q[row][key_column], q_ptr + at, is_in);
    }
    wait_for_copies();
    __syncthreads();
    {
        float p0[8], p1[8];
        float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const u32 f = *reinterpret_cast<const u32 *>(&s.f[STRIP * warp + first_row + r][lane_channel]);
            const float g0 = bound * reciprocal(1.f + ex2(-a * LOG2E * (low(f) + dt_bias.x)));
            const float g1 = bound * reciprocal(1.f + ex2(-a * LOG2E * (high(f) + dt_bias.y)));
            sum0 += first_row + r < rows_in ? g0 : 0.f;
            sum1 += first_row + r < rows_in ? g1 : 0.f;
            p0[r] = sum0;
            p1[r] = sum1;
        }
        const float upper0 = __shfl_sync(0xffffffffu, sum0, lane % 16), upper1 = __shfl_sync(0xffffffffu, sum1, lane % 16);
        const float lower0 = __shfl_sync(0xffffffffu, sum0, 16 + lane % 16);
        const float lower1 = __shfl_sync(0xffffffffu, sum1, 16 + lane % 16);
        sum0 = upper0 + lower0;
        sum1 = upper1 + lower1;
        if (is_lower) *reinterpret_cast<float2 *>(&s.total[warp][lane_channel]) = make_float2(sum0, sum1);
        __syncthreads();
        const float2 next = *reinterpret_cast<float2 *>(&s.total[half * 2 + 1][lane_channel]);   // from ref to the half's end
        const float2 to_ref = *reinterpret_cast<float2 *>(&s.total[half * 2][lane_channel]);     // from its start to ref
        const float over0 = ex2(half ? to_ref.x : next.x), over1 = ex2(half ? to_ref.y : next.y);
        const float away0 = (warp % 2 ? 0.f : sum0) - (is_lower ? upper0 : 0.f);
        const float away1 = (warp % 2 ? 0.f : sum1) - (is_lower ? upper1 : 0.f);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const int row = STRIP * warp + first_row + r, in_half = row - half * R;
            const float x0 = p0[r] - away0, x1 = p1[r] - away1;
            const float left0 = ex2(x0), left1 = ex2(x1), right0 = ex2(-x0), right1 = ex2(-x1);
            const float k_norm = s.k_norm[row], q_norm = s.q_norm[row] * scale;
            const u32 k = *reinterpret_cast<const u32 *>(&s.k[row][lane_channel]);
            const u32 q = *reinterpret_cast<const u32 *>(&s.q[row][lane_channel]);
            const float k0 = low(k) * k_norm, k1 = high(k) * k_norm, q0 = low(q) * q_norm, q1 = high(q) * q_norm;
            *reinterpret_cast<float2 *>(&s.x[warp][first_row + r][lane_channel]) = make_float2(x0, x1);
            *reinterpret_cast<u32 *>(&s.k_left[row][lane_channel]) = pack(k0 * left0, k1 * left1);
            *reinterpret_cast<u32 *>(&s.q_left[row][lane_channel]) = pack(q0 * left0, q1 * left1);
            *reinterpret_cast<u32 *>(&s.k_right[row][lane_channel]) = pack(k0 * right0, k1 * right1);
            if (half) {
                *reinterpret_cast<u32 *>(&s.q_from[in_half][lane_channel]) = pack(q0 * left0 * over0, q1 * left1 * over1);
                *reinterpret_cast<u32 *>(&s.k_from[in_half][lane_channel]) = pack(k0 * left0 * over0, k1 * left1 * over1);
            } else {
                *reinterpret_cast<u32 *>(&s.k_border[in_half][lane_channel]) = pack(k0 * right0 * over0, k1 * right1 * over1);
            }
        }
    }
    __syncthreads();

    // Pairs' part, 16 channels at a time, joined with the states' part.
    const int g = lane / 4, t = 2 * (lane % 4), first_own = half * R;
    float dq_unit[4][4], dk_unit[4][4];
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const int c = OWN * side + 8 * n;
        float dq_own[2][4] = {}, dk_own[2][4] = {}, dk_column[2][4] = {}, over_q[2][4] = {}, over_k[2][4] = {};
        u32 A[4], B[4];
#pragma unroll
        for (int other = 0; other < 2; ++other) { // the strips of this half
            const int strip = 2 * half + other;
            if (strip <= warp) {
                load_right(B, &s.k_right[STRIP * strip][c], lane);
                load_rows<TILE>(A, &s.dP[STRIP * warp][STRIP * strip], lane);
                multiply_two(dq_own[0], dq_own[1], A, B);
                load_rows<TILE>(A, &s.dM[STRIP * warp][STRIP * strip], lane);
                multiply_two(dk_own[0], dk_own[1], A, B);
            }
            if (strip >= warp) {
                load_right(B, &s.q_left[STRIP * strip][c], lane);
                load_columns(A, &s.dP[STRIP * strip][STRIP * warp], lane);
                multiply_two(dk_column[0], dk_column[1], A, B);
                load_right(B, &s.k_left[STRIP * strip][c], lane);
                load_columns(A, &s.dM[STRIP * strip][STRIP * warp], lane);
                multiply_two(dk_column[0], dk_column[1], A, B);
            }
            if (half) { // earlier keys, across the border
                load_right(B, &s.k_border[STRIP * other][c], lane);
                load_rows<TILE>(A, &s.dP[STRIP * warp][STRIP * other], lane);
                multiply_two(over_q[0], over_q[1], A, B);
                load_rows<TILE>(A, &s.dM[STRIP * warp][STRIP * other], lane);
                multiply_two(over_k[0], over_k[1], A, B);
            } else { // later rows
                load_right(B, &s.q_from[STRIP * other][c], lane);
                load_columns(A, &s.dP[R + STRIP * other][STRIP * warp], lane);
                multiply_two(over_k[0], over_k[1], A, B);
                load_right(B, &s.k_from[STRIP * other][c], lane);
                load_columns(A, &s.dM[R + STRIP * other][STRIP * warp], lane);
                multiply_two(over_k[0], over_k[1], A, B);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int column = c + 8 * m + t;
            const float2 total0 = *reinterpret_cast<float2 *>(&s.total[0][column]), total1 = *reinterpret_cast<float2 *>(&s.total[1][column]);
            const float2 total2 = *reinterpret_cast<float2 *>(&s.total[2][column]), total3 = *reinterpret_cast<float2 *>(&s.total[3][column]);
            float end_sum[2] = {};
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int r = g + 8 * part, row = STRIP * warp + r, in_half = row - first_own;
                const float2 x = *reinterpret_cast<float2 *>(&s.x[warp][r][column]);
                const float2 k_left = unpack2(&s.k_left[row][column]), q_left = unpack2(&s.q_left[row][column]);
                const float2 k_right = unpack2(&s.k_right[row][column]);
                const float2 q_from = half ? unpack2(&s.q_from[in_half][column]) : q_left;
                const float2 k_from = half ? unpack2(&s.k_from[in_half][column]) : k_left;
                const float2 k_border = half ? k_right : unpack2(&s.k_border[in_half][column]);
                float dG[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float own = e ? x.y : x.x, left = ex2(own), right = ex2(-own);
                    const float t0 = e ? total0.y : total0.x, t1 = e ? total1.y : total1.x;
                    const float t2 = e ? total2.y : total2.x, t3 = e ? total3.y : total3.x;
                    const int at4 = 2 * part + e;
                    const float q_own = dq_own[m][at4], k_own = dk_own[m][at4], k_col = dk_column[m][at4];
                    const float q_over = over_q[m][at4], k_over = over_k[m][at4];
                    const float q_state = dq_state[n + m][at4], k_state = -dk_state[n + m][at4], ends = d_to_end[n + m][at4];
                    const float kl = e ? k_left.y : k_left.x, ql = e ? q_left.y : q_left.x, kr = e ? k_right.y : k_right.x;
                    const float qf = e ? q_from.y : q_from.x, kf = e ? k_from.y : k_from.x, kb = e ? k_border.y : k_border.x;
                    float dq_row, dk_row, dk_col, to_end, gate, ended;
                    if (half) {
                        const float from = ex2(t2), before = ex2(t0 + t1), after = ex2(t3);
                        dq_row = left * (q_own + from * (q_over + before * q_state));
                        dk_row = left * (k_own + from * (k_over + before * k_state));
                        dk_col = right * k_col;
                        to_end = after * ends;
                        gate = ql * q_own + kl * k_own - kr * k_col + qf * (q_over + before * q_state) + kf * (k_over + before * k_state);
                        ended = kr * to_end;
                        to_end *= right;
                    } else {
                        const float from = ex2(t0), over = ex2(t1), after = ex2(t2 + t3);
                        dq_row = left * (q_own + from * q_state);
                        dk_row = left * (k_own + from * k_state);
                        dk_col = right * (k_col + over * k_over);
                        ended = kb * after * ends;
                        to_end = right * over * after * ends;
                        gate = ql * (q_own + from * q_state) + kl * (k_own + from * k_state) - kr * k_col - kb * k_over;
                    }
                    end_sum[e] += ended;
                    dG[e] = gate - ended;
                    dq_unit[n + m][at4] = scale * dq_row;
                    dk_unit[n + m][at4] = dk_row + dk_col + to_end;
                }
                *reinterpret_cast<float2 *>(&s.x[warp][r][column]) = make_float2(dG[0], dG[1]);
            }
            end_sum[0] = sum_of_rows(end_sum[0]);
            end_sum[1] = sum_of_rows(end_sum[1]);
            if (g == 0) *reinterpret_cast<float2 *>(&s.at_end[warp][column]) = make_float2(end_sum[0], end_sum[1]);
        }
    }
    __syncthreads(); // the factors were read
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int row = STRIP * warp + g + 8 * part, column = OWN * side + 8 * n + t;
            *reinterpret_cast<float2 *>(&s.dq[row][column]) = make_float2(dq_unit[n][2 * part], dq_unit[n][2 * part + 1]);
            *reinterpret_cast<float2 *>(&s.dk[row][column]) = make_float2(dk_unit[n][2 * part], dk_unit[n][2 * part + 1]);
        }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int row = STRIP * warp + first_row + r;
        if (row < length) {
            const long long at = key + (first_row + r) * step + lane_channel;
            const u32 k = *reinterpret_cast<const u32 *>(&s.k[row][lane_channel]);
            const u32 q = *reinterpret_cast<const u32 *>(&s.q[row][lane_channel]);
            const float2 dq = *reinterpret_cast<float2 *>(&s.dq[row][lane_channel]), dk = *reinterpret_cast<float2 *>(&s.dk[row][lane_channel]);
            const float k_norm = s.k_norm[row], q_norm = s.q_norm[row];
            const float along_k = s.k_along[row] * k_norm, along_q = s.q_along[row] * q_norm;
            *reinterpret_cast<u32 *>(dq_ptr + at) = pack(q_norm * (dq.x - low(q) * along_q), q_norm * (dq.y - high(q) * along_q));
            *reinterpret_cast<u32 *>(dk_ptr + at) = pack(k_norm * (dk.x - low(k) * along_k), k_norm * (dk.y - high(k) * along_k));
        }
    }

    // The gate: sums from each row to the chunk's end.
    float2 dG[8];
    float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        dG[r] = *reinterpret_cast<float2 *>(&s.x[warp][first_row + r][lane_channel]);
        sum0 += dG[r].x;
        sum1 += dG[r].y;
    }
    const float other0 = __shfl_xor_sync(0xffffffffu, sum0, 16), other1 = __shfl_xor_sync(0xffffffffu, sum1, 16);
    if (is_lower) *reinterpret_cast<float2 *>(&s.d_total[warp][lane_channel]) = make_float2(sum0 + other0, sum1 + other1);
    __syncthreads();
    float dg0 = is_lower ? 0.f : other0, dg1 = is_lower ? 0.f : other1, decay0 = 0.f, decay1 = 0.f;
#pragma unroll
    for (int w = 0; w < STRIPS; ++w) {
        const float2 end = *reinterpret_cast<float2 *>(&s.at_end[w][lane_channel]);
        const float2 later = *reinterpret_cast<float2 *>(&s.d_total[w][lane_channel]);
        const float2 total = *reinterpret_cast<float2 *>(&s.total[w][lane_channel]);
        dg0 += end.x + (w > warp ? later.x : 0.f);
        dg1 += end.y + (w > warp ? later.y : 0.f);
        decay0 += total.x;
        decay1 += total.y;
    }
    dg0 += s.both[lane_channel] * ex2(decay0);
    dg1 += s.both[lane_channel + 1] * ex2(decay1);
    float bias0 = 0.f, bias1 = 0.f, a_log = 0.f;
#pragma unroll
    for (int r = 7; r >= 0; --r) {
        dg0 += dG[r].x;
        dg1 += dG[r].y;
        if (first_row + r < rows_in) {
            const long long at = key + (first_row + r) * step + lane_channel;
            const u32 f = *reinterpret_cast<const u32 *>(&s.f[STRIP * warp + first_row + r][lane_channel]);
            const float z0 = low(f) + dt_bias.x, z1 = high(f) + dt_bias.y;
            const float s0 = reciprocal(1.f + ex2(-a * LOG2E * z0)), s1 = reciprocal(1.f + ex2(-a * LOG2E * z1));
            const float dz0 = dg0 * lower_bound * a * s0 * (1.f - s0), dz1 = dg1 * lower_bound * a * s1 * (1.f - s1);
            *reinterpret_cast<u32 *>(df_ptr + at) = pack(dz0, dz1);
            bias0 += dz0;
            bias1 += dz1;
            a_log += dz0 * z0 + dz1 * z1;
        }
    }
    bias0 += __shfl_xor_sync(0xffffffffu, bias0, 16);
    bias1 += __shfl_xor_sync(0xffffffffu, bias1, 16);
    if (is_lower) *reinterpret_cast<float2 *>(&s.bias[warp][lane_channel]) = make_float2(bias0, bias1);
#pragma unroll
    for (int width = 16; width >= 1; width >>= 1) a_log += __shfl_xor_sync(0xffffffffu, a_log, width);
    if (lane == 0) s.a_log[thread / 32] = a_log;
    __syncthreads();
    if (thread < CHANNELS)
        dt_bias_parts_ptr[of_head * K + block * CHANNELS + thread] =
            s.bias[0][thread] + s.bias[1][thread] + s.bias[2][thread] + s.bias[3][thread];
    if (thread == 0) {
        float sum = 0.f;
        for (int w = 0; w < THREADS / 32; ++w) sum += s.a_log[w];
        a_log_parts_ptr[of_head * BLOCKS + block] = sum;
    }
}
