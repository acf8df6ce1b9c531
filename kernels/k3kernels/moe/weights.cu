// The gradient of every expert's bf16 matrix: out_e [N][K] = the sum of y^T x over the expert's own rows, of rows sorted by
// expert; zeros where it has none. Of few rows the result is more bytes than products, so it leaves by TMA while the next
// tile is multiplied.
//
// A block computes tiles of HIGH outputs of y by WIDE of x, a run of them beside each other, so that the part of y of an
// expert with few rows is read once. One thread fills stages of 64 rows by TMA, far ahead; two warpgroups multiply. Where an
// expert's rows end inside 16, the rows behind are zeroed where they lie. A sum goes over the rows from first to last.

#include "barriers.cuh"
#include "warpgroup.cuh"

constexpr int HIGH = 256, WIDE = 128, DEPTH = 64, STAGES = 3, GROUP = 128, RUNS = 4;
constexpr int TALL = HIGH / 64, BROAD = WIDE / 64, OWN = TALL / 2; // tiles of 64 outputs of a stage, and of a warpgroup

struct Shared {
    u16 y[STAGES][TALL][TILE], x[STAGES][BROAD][TILE]; // [64 rows][64 outputs]
    u16 out[2][BROAD][OWN * TILE];                       // of a warpgroup: [128 of y][64 of x]
    u64 y_full[STAGES], y_empty[STAGES], x_full[STAGES], x_empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves what the kernel takes");

using Turn = TurnOf<STAGES>;

struct Work {
    int expert, first, count, high, begin, end; // the expert's rows, the first output of y, and those of x
    __device__ __forceinline__ int steps() const { return (count + DEPTH - 1) / DEPTH; }
    __device__ __forceinline__ bool keeps() const { return steps() <= STAGES; } // y stays where it is for all tiles
};

// Calls `todo` with the block's runs in turn.
template <class Todo> __device__ __forceinline__ void for_each(const int *edges, int num_experts, int N, int K, Todo todo) {
    const int per_expert = N / HIGH * RUNS, length = (K / WIDE + RUNS - 1) / RUNS * WIDE;
    for (int id = blockIdx.x; id < num_experts * per_expert; id += gridDim.x) {
        const int expert = id / per_expert, inside = id % per_expert, first = edges[expert], begin = inside % RUNS * length;
        todo(Work{expert, first, edges[expert + 1] - first, inside / RUNS * HIGH, begin, min(begin + length, K)});
    }
}

// One thread's.
__device__ __forceinline__ void fill(Shared &s, Turn &y_turn, Turn &x_turn, const Work &work, const TensorMap &y, const TensorMap &x) {
    for (int wide = work.begin; wide < work.end; wide += WIDE)
#pragma unroll 1
        for (int step = 0; step < work.steps(); ++step, ++x_turn.n) {
            const int row = work.first + step * DEPTH;
            if (wide == work.begin || !work.keeps()) {
                const int stage = y_turn.stage();
                wait(&s.y_empty[stage], y_turn.parity() ^ 1);
                expect_bytes(&s.y_full[stage], TALL * TILE * 2);
                load_box(s.y[stage][0], y, row, work.high / 64, &s.y_full[stage]);
                ++y_turn.n;
            }
            const int stage = x_turn.stage();
            wait(&s.x_empty[stage], x_turn.parity() ^ 1);
            expect_bytes(&s.x_full[stage], BROAD * TILE * 2);
            load_box(s.x[stage][0], x, row, wide / 64, &s.x_full[stage]);
        }
}

// Rows of `number` tiles that the next products of 16 take beyond the expert's own.
__device__ __forceinline__ void zero_rows(u16 (*tiles)[TILE], int number, int first, int end) {
    for (int i = threadIdx.x - GROUP; i < (end - first) * number * 8; i += 2 * GROUP)
        *reinterpret_cast<uint4 *>(tiles[i / 8 % number] + (first + i / 8 / number) * 64 + i % 8 * 8) = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void multiply_tile(Shared &s, Turn &y_turn, Turn &x_turn, const Work &work, int wide, const TensorMap &out, int N) {
    float sums[OWN][16][4];
    clear(sums[0]), clear(sums[1]);
    const int group = threadIdx.x / GROUP - 1, thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;
    const bool is_first = wide == work.begin || !work.keeps(), is_last = wide + WIDE >= work.end || !work.keeps();
    Turn turn = y_turn;
    for (int step = 0, left = work.count; step < work.steps(); ++step, left -= DEPTH, ++x_turn.n, ++turn.n) {
        const int y_stage = turn.stage(), stage = x_turn.stage(), depth = min((left + 15) / 16 * 16, DEPTH);
        wait(&s.y_full[y_stage], turn.parity());
        wait(&s.x_full[stage], x_turn.parity());
        if (left < depth) {
            if (is_first) zero_rows(s.y[y_stage], TALL, left, depth);
            zero_rows(s.x[stage], BROAD, left, depth);
            show_to_products();
            asm volatile("bar.sync 1, %0;" ::"n"(2 * GROUP) : "memory");
        }
        const u64 y = describe(s.y[y_stage][OWN * group]), x = describe(s.x[stage][0]);
        begin_products();
        for (int k = 0; k < depth / 16; ++k)
#pragma unroll
            for (int b = 0; b < OWN; ++b)
                multiply_group(sums[b], y + b * (2 * TILE >> 4) + k * ROWS_16, x + k * ROWS_16);
        end_products();
        wait_for_products<0>();
        if (lane == 0) {
            arrive(&s.x_empty[stage]);
            if (is_last) arrive(&s.y_empty[y_stage]);
        }
    }
    if (is_last) y_turn = turn;
    u16(*staged)[OWN * TILE] = s.out[group];
    if (thread == 0) wait_until_stores_have_read();
    meet_group();
#pragma unroll
    for (int b = 0; b < OWN; ++b)
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const float(&l)[4] = sums[b][i], (&r)[4] = sums[b][i + 1];
            const u32 both[4] = {pack(l[0], l[1]), pack(l[2], l[3]), pack(r[0], r[1]), pack(r[2], r[3])};
            const int column = (i + lane / 16) * 8;
            store_matrices(staged[column / 64] + b * TILE + swizzled(16 * warp + lane % 16, column % 64), both);
        }
    show_to_products(); // and to what stores
    meet_group();
    if (thread == 0) {
        store_box(out, staged[0], work.expert * N + work.high + group * OWN * 64, wide / 64);
        end_stores();
    }
}

// y [P][N], x [P][K]; edges [num_experts + 1].
extern "C" __global__ void __launch_bounds__(THREADS, 1) weights_gradient_kernel(const __grid_constant__ TensorMap y,
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, const int *edges, int num_experts, int N, int K) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(&s.y_full[i], 1), make_barrier(&s.x_full[i], 1);
            make_barrier(&s.y_empty[i], 8), make_barrier(&s.x_empty[i], 8);
        }
        show_barriers();
    }
    __syncthreads();
    Turn y_turn, x_turn;
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            for_each(edges, num_experts, N, K, [&](const Work &work) { fill(s, y_turn, x_turn, work, y, x); });
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        for_each(edges, num_experts, N, K, [&](const Work &work) {
            for (int wide = work.begin; wide < work.end; wide += WIDE)
                multiply_tile(s, y_turn, x_turn, work, wide, out, N);
        });
        if (threadIdx.x % GROUP == 0) wait_for_stores();
    }
}
