// Products of rows sorted by expert with the expert's matrix as it is stored, bf16 or MXFP4: y = x W^T, or with TRANSPOSED
// y = x W, summed over one or two matrices with an x each. With GATED of two matrices gate = x W1^T and up = x W3^T in one
// block, which also gives h, the activation. Above a matrix may lie one of rank r, whose other factor z is given:
// y = x W^T + z L^T, or y = x W + z L.
//
// A block computes WIDE outputs of at most MAX_ROWS rows of one expert, transposed (`columns.cuh`). One thread fills stages
// by TMA, far ahead and across the end of a tile; two warpgroups multiply. Two blocks with the same rows are a cluster: each
// fetches half of the rows for both. Codes are unpacked in registers, as the left operand: what the products read from
// shared memory are the rows alone. A sum has one order, whatever the number of rows.

#include "barriers.cuh"
#include "columns.cuh"

constexpr int WIDE = 256, DEPTH = 64, BOX = MAX_ROWS / 2, CHUNK = 32;
constexpr int GROUP = 128, UNITS = WIDE / 64, OWN = UNITS / 2, STAGED = 64 + 8;
// A slot holds [256 outputs][64 deep] or [64 deep][256 outputs] of bf16, or WIDE x WIDE codes, which last SLOT_STEPS steps.
constexpr int SLOT_BYTES = WIDE * DEPTH * 2, SLOT_STEPS = IS_PACKED ? WIDE / DEPTH : 1;
constexpr int SLOTS = IS_PACKED ? 3 : 4, STAGES = IS_PACKED ? 5 : 4;
constexpr int SCALERS = IS_PACKED ? 64 : 0; // threads that copy scales
constexpr int GROUPS = WIDE / 32;           // of codes that share a scale, beside each other in a slot

struct Shared {
    u16 slots[SLOTS][UNITS][TILE]; // GATED: two tiles of each matrix
    u16 rows[STAGES][MAX_ROWS * DEPTH];
    u16 staged[2][CHUNK][STAGED];
    u8 scales[IS_PACKED ? SLOTS : 1][IS_PACKED ? WIDE : 1][GROUPS];
    u64 slot_full[SLOTS], slot_empty[SLOTS], rows_full[STAGES], rows_empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves what the kernel takes");

struct Turns {
    TurnOf<SLOTS> slot;
    TurnOf<STAGES> rows;
};

// What one tile and block of outputs are.
struct Work {
    int expert, first, count, start, boxes;
};

struct Sizes { // of matrices [E][outer][inner]
    int outer, inner, number, rank, num_tiles;
    __device__ __forceinline__ int width() const { return TRANSPOSED ? inner : outer * number; }
    __device__ __forceinline__ int pairs() const { return (width() / WIDE + 1) / 2; } // of blocks; of an odd one the second is idle
    __device__ __forceinline__ int per_matrix() const { return (TRANSPOSED ? outer : inner) / DEPTH; }
    __device__ __forceinline__ int steps() const { return per_matrix() * (TRANSPOSED ? number : 1); }
    __device__ __forceinline__ int low_steps() const { return rank / DEPTH * (TRANSPOSED || GATED ? number : 1); }
};

// A step of the sum: of which matrix, where in it, and whether it is of the matrix above.
struct Step {
    bool is_low;
    int matrix, tile, part; // the tile of 64 along the depth; which step of its slot it is
    __device__ __forceinline__ Step(int step, const Sizes &sizes) {
        is_low = step >= sizes.steps();
        const int length = is_low ? sizes.rank / DEPTH : sizes.per_matrix();
        if (is_low) step -= sizes.steps();
        matrix = step / length, tile = step % length, part = is_low ? 0 : step % SLOT_STEPS;
    }
};

// By matrix; without a matrix above, its maps are any.
struct Maps {
    const TensorMap &w_0, &w_1, &x_0, &x_1, &factor_0, &factor_1, &z_0, &z_1;
};

// Calls `todo` with all of a cluster's tiles in turn; blocks of a cluster are neighbours among the outputs.
template <class Todo>
__device__ __forceinline__ void for_each(const int *tiles, const Sizes &sizes, u32 rank, Todo todo) {
    const int pairs = sizes.pairs();
    for (int id = blockIdx.x / 2; id < sizes.num_tiles * pairs; id += gridDim.x / 2) {
        const int *tile = tiles + id / pairs * 3;
        if (!tile[2]) return; // the rest have no rows
        todo(Work{tile[0], tile[1], tile[2], (id % pairs * 2 + int(rank)) * WIDE, (tile[2] + BOX - 1) / BOX});
    }
}

// One thread's.
__device__ __forceinline__ void fill(Shared &s, Turns &turns, const Work &work, const Sizes &sizes, u32 rank, const Maps &maps) {
#pragma unroll 1 // it has few registers
    for (int i = 0; i < sizes.steps() + sizes.low_steps(); ++i) {
        const Step step(i, sizes);
        if (!step.part) {
            const int slot = turns.slot.stage();
            u16 *to = s.slots[slot][0];
            u64 *full = &s.slot_full[slot];
            wait(&s.slot_empty[slot], turns.slot.parity() ^ 1);
            expect_bytes(full, GATED && step.is_low ? SLOT_BYTES / 2 : SLOT_BYTES);
            const TensorMap &w = step.matrix ? (step.is_low ? maps.factor_1 : maps.w_1) : (step.is_low ? maps.factor_0 : maps.w_0);
            if (TRANSPOSED) {
                const int top = work.expert * (step.is_low ? sizes.rank : sizes.outer) + step.tile * DEPTH;
                load_box(to, w, top, IS_PACKED && !step.is_low ? work.start / WIDE : work.start / 64, full);
            } else {
                const int top = work.expert * sizes.outer + (GATED ? work.start / 2 : work.start);
                const int tile = step.is_low ? step.tile : step.tile / SLOT_STEPS;
                load_box(to, w, top, tile, full);
                if (GATED && !step.is_low) load_box(to + OWN * TILE, maps.w_1, top, tile, full); // the same outputs of both
            }
            ++turns.slot.n;
        }
        const int stage = turns.rows.stage();
        wait(&s.rows_empty[stage], turns.rows.parity() ^ 1);
        expect_bytes(&s.rows_full[stage], work.boxes * BOX * DEPTH * 2);
        if (int(rank) < work.boxes) {
            const TensorMap &x = step.matrix ? (step.is_low ? maps.z_1 : maps.x_1) : (step.is_low ? maps.z_0 : maps.x_0);
            load_box_to_both(s.rows[stage] + rank * BOX * DEPTH, x, work.first + rank * BOX, step.tile, &s.rows_full[stage]);
        }
        ++turns.rows.n;
    }
}

#if IS_PACKED
__device__ __forceinline__ void copy_8(u8 *to, const u8 *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from));
}

// The scales of a slot's codes: [WIDE rows of the matrix][GROUPS]. SCALERS threads'.
__device__ __forceinline__ void fill_scales(
    Shared &s, Turns &turns, const Work &work, const Sizes &sizes, const u8 *scales_0, const u8 *scales_1, int thread) {
#pragma unroll 1
    for (int i = 0; i < sizes.steps() + sizes.low_steps(); ++i) {
        const Step step(i, sizes);
        if (step.part) continue;
        const int slot = turns.slot.stage(), stride = sizes.inner / 32;
        wait(&s.slot_empty[slot], turns.slot.parity() ^ 1);
        if (!step.is_low && work.start < sizes.width())
#pragma unroll
            for (int part = 0; part < WIDE / SCALERS; ++part) {
                const int row = part * SCALERS + thread;
                const bool is_second = GATED ? row >= WIDE / 2 : step.matrix;
                const int outer = TRANSPOSED ? step.tile * DEPTH + row : GATED ? work.start / 2 + row % (WIDE / 2) : work.start + row;
                const int column = (TRANSPOSED ? work.start : step.tile * DEPTH) / 32;
                const u8 *from = (is_second ? scales_1 : scales_0) + ((long long)work.expert * sizes.outer + outer) * stride + column;
                copy_8(s.scales[slot][row], from);
            }
        arrive_after_copies(&s.slot_full[slot]);
        ++turns.slot.n;
    }
}

// Codes to bf16: sign, exponent and mantissa bits where they belong, times 2^126 the value of a code; `factor` has that and
// the scale. What remains of a scale of 4 and more is a second factor; a scale of 255 is NaN.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 factor_of(u32 scale) { return min(scale, 128u) + 126u << 7; }
__device__ __forceinline__ u32 rest_of(u32 scale) { return scale == 255 ? 0x7fffu : max(scale, 128u) - 128u + 127u << 7; }
__device__ __forceinline__ u32 both(u32 low, u32 high) { return low | high << 16; }
struct Factors {
    u32 first, rest;
    bool has_rest; // the same for all lanes
    __device__ __forceinline__ u32 value(u32 codes) const { // a code in each half
        u32 x = times(codes * (1 << 12 | 1 << 6) & 0x81c081c0u, first);
        if (has_rest) x = times(x, rest);
        return x;
    }
};
__device__ __forceinline__ Factors factors_of(u32 low, u32 high) {
    const bool has_rest = __any_sync(~0u, low > 128 || high > 128);
    return {both(factor_of(low), factor_of(high)), both(rest_of(low), rest_of(high)), has_rest};
}

// A thread's codes of one step for both units of its warpgroup. The left operand of 16 columns k is, with row = lane / 4 and
// k = 2 (lane % 4): (row, k), (row + 8, k), (row, k + 8), (row + 8, k + 8), two neighbours along k each.
#if TRANSPOSED
// Neighbours along the outputs share a byte; so the outputs are taken in another order: what is row + 8 j of unit b of
// warp w is output 32 w + 4 row + 2 b + j, and a thread has all four of a row of the matrix in two bytes.
struct Codes {
    const u8 *codes, (*scales)[GROUPS];
    int k, piece, byte;
    __device__ __forceinline__ void load(const u16 *slot, const u8 (*scales_of)[GROUPS], int part, int group, int warp, int lane) {
        codes = reinterpret_cast<const u8 *>(slot), scales = scales_of;
        k = part * DEPTH + lane % 4 * 2, piece = group * 4 + warp, byte = lane / 4 * 2;
    }
    __device__ __forceinline__ void unpack(int i, u32 (&a)[OWN][4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = k + i * 16 + half * 8; // and the one below
            u32 two[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                two[j] = *reinterpret_cast<const u16 *>(codes + (row + j) * 128 + (piece ^ (row + j) % 8) * 16 + byte);
            const u32 pair = both(two[0], two[1]); // each [unit][j]
            const Factors factors = factors_of(scales[row][piece], scales[row + 1][piece]);
#pragma unroll
            for (int b = 0; b < OWN; ++b)
#pragma unroll
                for (int j = 0; j < 2; ++j) a[b][half * 2 + j] = factors.value(pair >> (8 * b + 4 * j) & 0x000f000fu);
        }
    }
};
#else
struct Codes {
    u32 bytes[OWN][2][2]; // [unit][row, row + 8][half of the step]: two bytes of each 16 columns, at k and at k + 8
    u32 scales[OWN][2];   // of the step's two groups
    __device__ __forceinline__ void load(const u16 *slot, const u8 (*scales_of)[GROUPS], int part, int group, int warp, int lane) {
        const u8 *codes = reinterpret_cast<const u8 *>(slot);
        const u32 mine = lane % 4 | (lane % 4 + 4) << 4;
#pragma unroll
        for (int b = 0; b < OWN; ++b)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int unit = GATED ? b * OWN + group : group * OWN + b, row = unit * 64 + warp * 16 + j * 8 + lane / 4;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 all = *reinterpret_cast<const uint4 *>(codes + row * 128 + (part * 2 + half ^ row % 8) * 16);
                    bytes[b][j][half] = __byte_perm(__byte_perm(all.x, all.y, mine), __byte_perm(all.z, all.w, mine), 0x5410);
                }
                scales[b][j] = *reinterpret_cast<const u16 *>(scales_of[row] + part * 2);
            }
    }
    __device__ __forceinline__ void unpack(int i, u32 (&a)[OWN][4]) const {
#pragma unroll
        for (int b = 0; b < OWN; ++b)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 scale = scales[b][j] >> i / 2 * 8 & 0xff;
                const Factors factors = factors_of(scale, scale);
                const u32 two = bytes[b][j][i / 2] >> i % 2 * 16, second = two >> 4; // nibbles
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    a[b][half * 2 + j] = factors.value(__byte_perm(two, second, 0x0400 + 0x0101 * half) & 0x000f000fu);
            }
    }
};
#endif

#if TRANSPOSED
// The same outputs of a bf16 slot [64 deep][256 outputs], which is the matrix above.
__device__ __forceinline__ void load_low(const u16 *slot, int i, int group, int warp, int lane, u32 (&a)[OWN][4]) {
    const int column = group * 128 + warp * 32 + lane / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int k = i * 16 + half * 8 + lane % 4 * 2;
        u32 two[2][2]; // of k and of k + 1: four outputs
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u16 *from = slot + column / 64 * TILE + (k + j) * 64 + (column / 8 % 8 ^ (k + j) % 8) * 8 + column % 8;
            const uint2 four = *reinterpret_cast<const uint2 *>(from);
            two[j][0] = four.x, two[j][1] = four.y;
        }
#pragma unroll
        for (int b = 0; b < OWN; ++b)
#pragma unroll
            for (int j = 0; j < 2; ++j) a[b][half * 2 + j] = __byte_perm(two[0][b], two[1][b], j ? 0x7632 : 0x5410);
    }
}
#endif
#endif

// 64 outputs of `count` rows; y points at the first row's first of them.
template <int N>
__device__ __forceinline__ void write(u16 (*staged)[STAGED], const float (&d)[N / 8][4], u16 *y, int stride, int count) {
    const int thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int chunk = 0; chunk < N; chunk += CHUNK) {
#pragma unroll
        for (int i = chunk / 8; i < chunk / 8 + CHUNK / 8 && i < N / 8; i += 2) {
            const float(&l)[4] = d[i], (&r)[4] = d[i + 1];
            const u32 four[4] = {pack(l[0], l[1]), pack(l[2], l[3]), pack(r[0], r[1]), pack(r[2], r[3])};
            store_transposed(&staged[i * 8 - chunk + lane % 8 + lane / 16 * 8][16 * warp + lane / 8 % 2 * 8], four);
        }
        meet_group();
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) {
            const int row = i * 16 + thread / 8, piece = thread % 8 * 8;
            if (chunk + row < count)
                *reinterpret_cast<uint4 *>(y + (long long)(chunk + row) * stride + piece) =
                    *reinterpret_cast<const uint4 *>(&staged[row][piece]);
        }
        meet_group();
    }
}

#if GATED
__device__ __forceinline__ float rounded(float x) { return low(pack(x, 0.f)); }
__device__ __forceinline__ float tanh_of(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sigmoid_of(float x) {
    float y;
    asm("{\n.reg .f32 a;\nmul.ftz.f32 a, %1, 0fBFB8AA3B;\nex2.approx.ftz.f32 a, a;\nadd.ftz.f32 a, a, 0f3F800000;\n"
        "rcp.approx.ftz.f32 %0, a;\n}" : "=f"(y) : "f"(x));
    return y;
}
// SiTU with both betas, to 2^-10: beta tanh(gate / beta) sigmoid(gate) linear_beta tanh(up / linear_beta).
struct Activation {
    float inverse_beta, inverse_linear_beta, product;
    __device__ __forceinline__ Activation(float beta, float linear_beta)
        : inverse_beta(1 / beta), inverse_linear_beta(1 / linear_beta), product(beta * linear_beta) {}
    __device__ __forceinline__ float operator()(float gate, float up) const {
        return product * tanh_of(gate * inverse_beta) * (sigmoid_of(gate) * tanh_of(up * inverse_linear_beta));
    }
};
#endif

struct Results {
    u16 *y, *gate, *up; // without gate and up these are not kept
    float beta, linear_beta;
};

template <int N>
__device__ __forceinline__ void multiply_tile(Shared &s, Turns &turns, const Work &work, const Sizes &sizes, const Results &to) {
    float sums[OWN][N / 8][4];
    clear(sums[0]), clear(sums[1]);
    const int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32;
    [[maybe_unused]] const int warp = threadIdx.x % GROUP / 32;
    int held = -1; // the slot that the last step's products read
    // Once the products of the step before are done.
    const auto release = [&] {
        if (lane < 2) arrive_at(&s.rows_empty[(turns.rows.n - 1) % STAGES], lane);
        if (held >= 0 && lane == 0) arrive(&s.slot_empty[held]);
        held = -1;
    };
    for (int n = 0; n < sizes.steps() + sizes.low_steps(); ++n, ++turns.rows.n) {
        const Step step(n, sizes);
        const int slot = turns.slot.stage(), stage = turns.rows.stage();
        if (!step.part) wait(&s.slot_full[slot], turns.slot.parity());
        wait(&s.rows_full[stage], turns.rows.parity());
        const u64 rows = describe(s.rows[stage]);
        const bool is_last = step.is_low || step.part == SLOT_STEPS - 1;
#if IS_PACKED
        if (TRANSPOSED || !step.is_low) {
            Codes codes;
            if (!step.is_low) codes.load(s.slots[slot][0], s.scales[slot], step.part, group, warp, lane);
            u32 a[OWN][4];
#pragma unroll
            for (int k = 0; k < DEPTH / 16; ++k) {
#if TRANSPOSED
                if (step.is_low)
                    load_low(s.slots[slot][0], k, group, warp, lane, a);
                else
#endif
                    codes.unpack(k, a);
                begin_products();
#pragma unroll
                for (int b = 0; b < OWN; ++b) product(sums[b], a[b], rows + k * COLUMNS_16);
                end_products();
                wait_for_products<0>(); // its registers are written next; the other warpgroup multiplies meanwhile
                if (k == 0 && n) release();
            }
            if (is_last) {
                __syncwarp();
                if (lane == 0) arrive(&s.slot_empty[slot]); // all is in registers
            }
        } else
#endif
        {
            const u64 weights = describe(s.slots[slot][GATED ? group : OWN * group]);
            const auto along = [](int k) { return k * (TRANSPOSED ? ROWS_16 : COLUMNS_16); };
#if GATED
            const auto add_low = [&](float(&d)[N / 8][4]) {
                begin_products();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; ++k) product<TRANSPOSED>(d, weights + along(k), rows + k * COLUMNS_16);
            };
            if (step.is_low && step.matrix) {
                add_low(sums[1]);
            } else if (step.is_low) {
                add_low(sums[0]);
            } else
#endif
            {
                begin_products();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; ++k)
#pragma unroll
                    for (int b = 0; b < OWN; ++b)
                        product<TRANSPOSED>(sums[b], weights + b * ((GATED ? OWN : 1) * 2 * TILE >> 4) + along(k), rows + k * COLUMNS_16);
            }
            end_products();
            wait_for_products<1>();
            if (n) release();
            held = slot;
        }
        if (is_last) ++turns.slot.n;
    }
    wait_for_products<0>();
    release();
    if (!GATED && work.start >= sizes.width()) return;
    u16(*staged)[STAGED] = s.staged[group];
#if GATED
    const int stride = sizes.outer;
    const long long at = (long long)work.first * stride + work.start / 2 + group * 64;
    if (to.gate) {
        write<N>(staged, sums[0], to.gate + at, stride, work.count);
        write<N>(staged, sums[1], to.up + at, stride, work.count);
    }
    const Activation activation(to.beta, to.linear_beta);
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[0][i][e] = activation(rounded(sums[0][i][e]), rounded(sums[1][i][e]));
    write<N>(staged, sums[0], to.y + at, stride, work.count);
#elif IS_PACKED && TRANSPOSED
    const int column = work.start + group * OWN * 64 + warp * 32 + lane / 4 * 4;
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int row = i * 8 + lane % 4 * 2 + c;
            if (row < work.count)
                *reinterpret_cast<uint2 *>(to.y + (long long)(work.first + row) * sizes.inner + column) =
                    make_uint2(pack(sums[0][i][c], sums[0][i][2 + c]), pack(sums[1][i][c], sums[1][i][2 + c]));
        }
#else
    const int stride = TRANSPOSED ? sizes.inner : sizes.outer;
    const long long at = (long long)work.first * stride + work.start + group * OWN * 64;
#pragma unroll
    for (int b = 0; b < OWN; ++b) write<N>(staged, sums[b], to.y + at + b * 64, stride, work.count);
#endif
}

// tiles [num_tiles][3]: expert, first row, number of rows; those without rows come last. gridDim.x is even.
extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(THREADS, 1) products_kernel(const __grid_constant__ TensorMap w_0,
    const __grid_constant__ TensorMap w_1, const __grid_constant__ TensorMap x_0, const __grid_constant__ TensorMap x_1,
    const __grid_constant__ TensorMap factor_0, const __grid_constant__ TensorMap factor_1, const __grid_constant__ TensorMap z_0,
    const __grid_constant__ TensorMap z_1, const u8 *scales_0, const u8 *scales_1, const int *tiles, u16 *y, u16 *gate, u16 *up,
    int num_tiles, int outer, int inner, int number, int rank, float beta, float linear_beta) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{outer, inner, number, rank, num_tiles};
    const u32 place = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) make_barrier(&s.slot_full[i], 1 + SCALERS), make_barrier(&s.slot_empty[i], 8);
        for (int i = 0; i < STAGES; ++i) make_barrier(&s.rows_full[i], 1), make_barrier(&s.rows_empty[i], 2 * 8);
        show_barriers();
    }
    meet_cluster();
    Turns turns;
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(IS_PACKED ? 56 : 40));
        const Maps maps{w_0, w_1, x_0, x_1, factor_0, factor_1, z_0, z_1};
        if (threadIdx.x == 0) for_each(tiles, sizes, place, [&](const Work &work) { fill(s, turns, work, sizes, place, maps); });
#if IS_PACKED
        const int thread = threadIdx.x - 32; // of two other warps
        if (0 <= thread && thread < SCALERS)
            for_each(tiles, sizes, place,
                [&](const Work &work) { fill_scales(s, turns, work, sizes, scales_0, scales_1, thread); });
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(IS_PACKED ? 224 : 232));
        const Results to{y, gate, up, beta, linear_beta};
        for_each(tiles, sizes, place, [&](const Work &work) {
            switch (padded_rows(work.count)) {
            case 32: multiply_tile<32>(s, turns, work, sizes, to); break;
            case 64: multiply_tile<64>(s, turns, work, sizes, to); break;
            case 96: multiply_tile<96>(s, turns, work, sizes, to); break;
            case 128: multiply_tile<128>(s, turns, work, sizes, to); break;
            case 144: multiply_tile<144>(s, turns, work, sizes, to); break;
#if MAX_ROWS > 160
            case 160: multiply_tile<160>(s, turns, work, sizes, to); break;
#endif
            default: multiply_tile<MAX_ROWS>(s, turns, work, sizes, to);
            }
        });
    }
    meet_cluster(); // neither ends while the other may still write to it
}
