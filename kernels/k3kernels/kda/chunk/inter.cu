// kda_inter_kernel and kda_inter_backward_kernel of inter.py for bf16 and 128 channels. A block has one sequence and head;
// a warpgroup 64 value columns, and walks all chunks with their state transposed, [64 values, 128 channels], in its
// registers, a warp 16 values. The results of one product are the left operand of the next, so nothing but the chunks' own
// tiles goes through shared memory, two chunks of which are on their way at a time.

#include "tiles.cuh"
#include "warpgroup.cuh"

constexpr int V = 128, OWN = 16, GROUP = 4 * OWN, GROUPS = V / GROUP;
constexpr int STAGED = GROUP + 8;

struct Stage {
    u16 q_decayed[2 * TILE], k_decayed[2 * TILE], k_to_end[2 * TILE]; // [64 rows][2 x 64 channels]
    u16 P[TILE], A[TILE];
    u16 values[2 * TILE]; // v, or the gradient of o
    float decay[256];     // 128 of them; the next tile starts at a multiple of 1 KiB
};

struct Shared { // of THREADS threads, SHARED_BYTES long
    Stage stages[2];
    u16 staged[GROUPS][C][STAGED]; // results, to be written a row of 128 bytes at a time
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host reserves what the kernel takes");

struct Tiles {
    const u16 *q_decayed, *k_decayed, *k_to_end, *P, *A, *values;
    const float *decay;
};

// A warp's values of 16 tokens, as two tiles of a result [16 values][8 tokens].
__device__ __forceinline__ void load_values(u32 (&x)[4], const u16 *values, int token, int value, int lane) {
    const int row = token + lane % 8 + lane / 16 * 8, column = value + lane / 8 % 2 * 8;
    load_matrices_transposed(x, values + swizzled(row, column));
}
// The other way: two tiles of a result [16 values][8 rows] to rows of values.
__device__ __forceinline__ void store_values(u16 *p, const u32 (&x)[4], int lane) {
    store_transposed(p + (lane % 8 + lane / 16 * 8) * STAGED + lane / 8 % 2 * 8, x);
}

// Two tiles of a result as 16 columns of a left operand.
__device__ __forceinline__ void as_left(u32 (&a)[4], const float (&x)[4], const float (&y)[4]) {
    a[0] = pack(x[0], x[1]);
    a[1] = pack(x[2], x[3]);
    a[2] = pack(y[0], y[1]);
    a[3] = pack(y[2], y[3]);
}
template <int N> __device__ __forceinline__ void as_left(u32 (&a)[N][4], const float (&x)[2 * N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) as_left(a[i], x[2 * i], x[2 * i + 1]);
}

template <bool HAS_Q, bool HAS_P>
__device__ __forceinline__ void fetch(
    Stage &s, const Tiles &from, long long of_head, long long token, long long end, int H, int h) {
    for (int i = threadIdx.x; i < C * K / 8; i += THREADS) {
        const int row = i / (K / 8), column = i % (K / 8) * 8, to = swizzled(row, column);
        const long long at = (of_head * C + row) * K + column;
        copy_async(&s.k_decayed[to], from.k_decayed + at, true);
        copy_async(&s.k_to_end[to], from.k_to_end + at, true);
        if (HAS_Q) copy_async(&s.q_decayed[to], from.q_decayed + at, true);
        const bool is_in = token + row < end;
        copy_async(&s.values[to], from.values + (is_in ? ((token + row) * H + h) * V + column : 0), is_in);
    }
    for (int i = threadIdx.x; i < C * C / 8; i += THREADS) {
        const int row = i / (C / 8), column = i % (C / 8) * 8, to = swizzled(row, column);
        const long long at = (of_head * C + row) * C + column;
        copy_async(&s.A[to], from.A + at, true);
        if (HAS_P) copy_async(&s.P[to], from.P + at, true);
    }
    for (int i = threadIdx.x; i < K / 4; i += THREADS)
        copy_async(
            reinterpret_cast<u16 *>(&s.decay[4 * i]), reinterpret_cast<const u16 *>(from.decay + of_head * K + 4 * i), true);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// All that was fetched is there for all, and nobody reads the other stage any more.
__device__ __forceinline__ void meet() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    show_to_products();
    __syncthreads();
}

// What a warpgroup staged, [rows][64 values], to rows of a tensor whose rows are `stride` apart.
__device__ __forceinline__ void write_out(u16 *to, long long stride, const u16 (*staged)[STAGED], int rows) {
    meet_group();
    const int thread = threadIdx.x % 128, piece = thread % 8 * 8;
#pragma unroll
    for (int row = thread / 8; row < C; row += 16)
        if (row < rows)
            *reinterpret_cast<uint4 *>(to + row * stride + piece) = *reinterpret_cast<const uint4 *>(&staged[row][piece]);
    meet_group();
}
// Values of 64 tokens, as left operands.
__device__ __forceinline__ void write_tokens(
    u16 *to, long long stride, const u32 (&x)[4][4], u16 (*staged)[STAGED], int rows, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_values(&staged[16 * i][threadIdx.x / 32 % 4 * OWN], x[i], lane);
    write_out(to, stride, staged, rows);
}

typedef float State[K / 8][4];   // 16 values and 8 channels a tile
typedef u32 Narrow[K / 16][4];   // rounded, 16 channels a left operand
typedef float Result[C / 8][4];  // 16 values and 8 tokens a tile
typedef u32 Operand[C / 16][4];

__device__ __forceinline__ void load_state(State &S, const float *from, int warp, int lane) {
    const int g = OWN * warp + lane / 4, t = 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < K / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[n][e] = from ? from[(8 * n + t + e % 2) * V + g + e / 2 * 8] : 0.f;
}

__device__ __forceinline__ void write_state(float *to, const State &S, int warp, int lane) {
    const int g = OWN * warp + lane / 4, t = 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < K / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[(8 * n + t + e % 2) * V + g + e / 2 * 8] = S[n][e];
}

// [channels][values], half of the channels at a time.
__device__ __forceinline__ void write_narrow(u16 *to, const Narrow &S, u16 (*staged)[STAGED], int lane) {
#pragma unroll
    for (int first = 0; first < K; first += C) {
#pragma unroll
        for (int i = 0; i < C / 16; ++i)
            store_values(&staged[16 * i][threadIdx.x / 32 % 4 * OWN], S[first / 16 + i], lane);
        write_out(to + first * V, V, staged, C);
    }
}

__device__ __forceinline__ void decay_state(State &S, const float *decay, int lane) {
#pragma unroll
    for (int n = 0; n < K / 8; ++n) {
        const float2 d = *reinterpret_cast<const float2 *>(decay + 8 * n + 2 * (lane % 4));
        S[n][0] *= d.x;
        S[n][1] *= d.y;
        S[n][2] *= d.x;
        S[n][3] *= d.y;
    }
}

// out [values][64 tokens] += S^T rows^T of rows [token][channel].
__device__ __forceinline__ void read_state(Result &out, const Narrow &S, u64 rows) {
#pragma unroll
    for (int s = 0; s < K / 16; ++s) multiply_group<0, 0>(out, S[s], columns_16(rows, s));
}

template <bool KEEPS>
__device__ __forceinline__ void walk(
    Shared &s, const Tiles &tiles, const float *initial_ptr, const int *edges_ptr, const int *tokens_ptr, u16 *o_ptr,
    float *final_ptr, u16 *states_ptr, u16 *u_ptr, const int *emit_ptr, float *emitted_ptr, int H) {
    const int n = blockIdx.x / H, h = blockIdx.x % H, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = edges_ptr[n], last = edges_ptr[n + 1];
    const long long start = tokens_ptr[n], end = tokens_ptr[n + 1];
    const long long whole = ((long long)n * H + h) * K * V;
    State S;
    load_state(S, initial_ptr ? initial_ptr + whole : nullptr, warp, lane);
    if (first < last) fetch<!KEEPS, !KEEPS>(s.stages[0], tiles, (long long)first * H + h, start, end, H, h);
    for (int chunk = first; chunk < last; ++chunk) {
        meet();
        const long long of_head = (long long)chunk * H + h, token = start + (long long)(chunk - first) * C;
        if (chunk + 1 < last)
            fetch<!KEEPS, !KEEPS>(s.stages[(chunk + 1 - first) % 2], tiles, of_head + H, token + C, end, H, h);
        const Stage &now = s.stages[(chunk - first) % 2];
        u16(*staged)[STAGED] = s.staged[warp / 4];
        const int rows = end - token < C ? int(end - token) : C;
        const long long out_at = (token * H + h) * V + GROUP * (warp / 4), stride = (long long)H * V;

        Narrow narrow;
        as_left<K / 16>(narrow, S);
        Result read = {}, o = {};
        begin_products();
        read_state(read, narrow, describe(now.k_decayed));
        end_products();
        if (KEEPS) {
            write_narrow(states_ptr + of_head * K * V + GROUP * (warp / 4), narrow, staged, lane);
            wait_for_products<0>();
        } else {
            read_state(o, narrow, describe(now.q_decayed));
            end_products();
            wait_for_products<1>();
        }
        Operand x, u;
#pragma unroll
        for (int i = 0; i < C / 16; ++i) { // v - k_decayed S
            u32 v[4];
            load_values(v, now.values, 16 * i, OWN * warp, lane);
            const float(&lo)[4] = read[2 * i], (&hi)[4] = read[2 * i + 1];
            x[i][0] = pack(low(v[0]) - lo[0], high(v[0]) - lo[1]);
            x[i][1] = pack(low(v[1]) - lo[2], high(v[1]) - lo[3]);
            x[i][2] = pack(low(v[2]) - hi[0], high(v[2]) - hi[1]);
            x[i][3] = pack(low(v[3]) - hi[2], high(v[3]) - hi[3]);
        }
        Result sum = {};
        const u64 A = describe(now.A), P = describe(now.P), k_to_end = describe(now.k_to_end);
        begin_products();
#pragma unroll
        for (int j = 0; j < C / 16; ++j) multiply_group<0, 0>(sum, x[j], A + j * COLUMNS_16);
        end_products();
        decay_state(S, now.decay, lane);
        wait_for_products<0>();
        as_left<C / 16>(u, sum);
        begin_products();
        if (!KEEPS) {
#pragma unroll
            for (int j = 0; j < C / 16; ++j) multiply_group<0, 0>(o, u[j], P + j * COLUMNS_16);
            end_products();
        }
#pragma unroll
        for (int i = 0; i < C / 16; ++i) multiply_group<0, 1>(S, u[i], k_to_end + i * ROWS_16);
        end_products();
        if (KEEPS) {
            write_tokens(u_ptr + out_at, stride, u, staged, rows, lane);
        } else {
            wait_for_products<1>();
            Operand rounded;
            as_left<C / 16>(rounded, o);
            write_tokens(o_ptr + out_at, stride, rounded, staged, rows, lane);
        }
        wait_for_products<0>();
        if (!KEEPS && emit_ptr) {
            const long long slot = emit_ptr[chunk];
            if (slot >= 0) write_state(emitted_ptr + (slot * H + h) * K * V, S, warp, lane);
        }
    }
    write_state(final_ptr + whole, S, warp, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda_inter(
    const u16 *v_ptr, const u16 *q_decayed_ptr, const u16 *k_decayed_ptr, const u16 *k_to_end_ptr, const u16 *P_ptr,
    const u16 *A_ptr, const float *decay_ptr, const float *initial_ptr, const int *edges_ptr, const int *tokens_ptr,
    u16 *o_ptr, float *final_ptr, u16 *states_ptr, u16 *u_ptr, const int *emit_ptr, float *emitted_ptr, int H) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Tiles tiles = {q_decayed_ptr, k_decayed_ptr, k_to_end_ptr, P_ptr, A_ptr, v_ptr, decay_ptr};
    walk<KEEPS_STATES>(
        s, tiles, initial_ptr, edges_ptr, tokens_ptr, o_ptr, final_ptr, states_ptr, u_ptr, emit_ptr, emitted_ptr, H);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) kda_inter_backward(
    const u16 *do_ptr, const u16 *q_decayed_ptr, const u16 *k_decayed_ptr, const u16 *k_to_end_ptr, const u16 *P_ptr,
    const u16 *A_ptr, const float *decay_ptr, const float *d_final_ptr, const int *edges_ptr, const int *tokens_ptr,
    u16 *dv_ptr, u16 *d_states_ptr, float *d_initial_ptr, int H) {
    extern __shared__ __align__(1024) char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Tiles tiles = {q_decayed_ptr, k_decayed_ptr, k_to_end_ptr, P_ptr, A_ptr, do_ptr, decay_ptr};
    const int n = blockIdx.x / H, h = blockIdx.x % H, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = edges_ptr[n], last = edges_ptr[n + 1];
    const long long start = tokens_ptr[n], end = tokens_ptr[n + 1];
    const long long whole = ((long long)n * H + h) * K * V;
    State dS;
    load_state(dS, d_final_ptr ? d_final_ptr + whole : nullptr, warp, lane);
    const long long last_token = start + (long long)(last - 1 - first) * C;
    if (first < last) fetch<true, true>(s.stages[0], tiles, (long long)(last - 1) * H + h, last_token, end, H, h);
    for (int chunk = last - 1; chunk >= first; --chunk) {
        meet();
        const long long of_head = (long long)chunk * H + h, token = start + (long long)(chunk - first) * C;
        if (chunk > first) fetch<true, true>(s.stages[(last - chunk) % 2], tiles, of_head - H, token - C, end, H, h);
        const Stage &now = s.stages[(last - 1 - chunk) % 2];
        u16(*staged)[STAGED] = s.staged[warp / 4];
        const int rows = end - token < C ? int(end - token) : C;
        const u64 d_o = describe(now.values + warp / 4 * TILE), P = describe(now.P), A = describe(now.A);
        const u64 q_decayed = describe(now.q_decayed), k_decayed = describe(now.k_decayed);

        Narrow narrow;
        as_left<K / 16>(narrow, dS);
        Result sum = {}, dv = {};
        begin_products(); // P^T do + k_to_end dS
        read_state(sum, narrow, describe(now.k_to_end));
#pragma unroll
        for (int i = 0; i < C / 16; ++i) multiply_group(sum, d_o + i * ROWS_16, P + i * ROWS_16);
        end_products();
        write_narrow(d_states_ptr + of_head * K * V + GROUP * (warp / 4), narrow, staged, lane);
        decay_state(dS, now.decay, lane);
        wait_for_products<0>();
        Operand du, rounded;
        as_left<C / 16>(du, sum);
        begin_products(); // A^T du
#pragma unroll
        for (int i = 0; i < C / 16; ++i) multiply_group<0, 1>(dv, du[i], A + i * ROWS_16);
        end_products();
#pragma unroll
        for (int i = 0; i < C / 16; ++i) multiply_group(dS, d_o + i * ROWS_16, q_decayed + i * ROWS_16);
        end_products();
        wait_for_products<1>();
        as_left<C / 16>(rounded, dv);
        begin_products();
#pragma unroll
        for (int i = 0; i < C / 16; ++i) multiply_group<1, 1>(dS, rounded[i], k_decayed + i * ROWS_16);
        end_products();
        write_tokens(dv_ptr + (token * H + h) * V + GROUP * (warp / 4), (long long)H * V, rounded, staged, rows, lane);
        wait_for_products<0>();
    }
    write_state(d_initial_ptr + whole, dS, warp, lane);
}
