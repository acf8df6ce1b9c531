// Products of rows sorted by expert with the expert's matrix, which may be MXFP4: y = x W^T, or with TRANSPOSED y = x W.
// Two matrices may be stacked along W's rows, and above each may lie one of rank r, whose other factor z is given:
// y = x W^T + z L^T, or y = x W + z L.
//
// A block computes WIDE outputs of at most MAX_ROWS rows of one expert, transposed: the matrix is the left operand, 64
// outputs an instruction, and the rows are its columns, so that their number is rounded to 16 or 32 and not to 64. Two
// warpgroups fill tiles 64 deep, and unpack codes on the way; two multiply. A sum has one order, whatever the number of rows.

#include "warpgroup.cuh"

constexpr int WIDE = 256, DEPTH = 64, STAGES = 4, CHUNK = 32, STAGED = 128 + 8; // MAX_ROWS is 160
constexpr int PASS = 32, PASSES = MAX_ROWS / PASS; // rows whose pieces the filling threads copy at a time
constexpr int GROUP = 128, FILLERS = 2 * GROUP, UNITS = WIDE / 64, OWN = UNITS / 2; // units of a filling warpgroup

struct Shared {
    u16 weights[STAGES][UNITS][TILE]; // [64 outputs][64 deep], or TRANSPOSED [64 deep][64 outputs]
    u16 rows[STAGES][MAX_ROWS * DEPTH];
    u16 staged[2][CHUNK][STAGED];
    u64 full[STAGES], empty[STAGES];
    int sources[MAX_ROWS]; // of the tile being filled: its rows' numbers in x
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves what the kernel takes");

struct Stack { // matrices of E experts [E][outer][inner] one above the other along `outer`, each with factors of rank `rank`
    const void *matrices[2];
    const u8 *scales[2];
    const u16 *factors[2]; // [E][outer][rank], or TRANSPOSED [E][rank][inner]
    int outer, inner, number, rank;
};

// What is multiplied, x and z by matrix of the stack, which forward share their x: of x [.][inner], TRANSPOSED [.][outer],
// `tokens` names a place's row (none: they are sorted); z [P][rank].
struct Rows {
    const u16 *x[2], *z[2];
    const int *tokens;
};

template <class T> __device__ __forceinline__ T of(T const (&both)[2], int which) { return which ? both[1] : both[0]; }

__device__ __forceinline__ void make_barrier(u64 *b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
__device__ __forceinline__ void arrive(u64 *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void arrive_after_copies(u64 *b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void wait(u64 *b, u32 parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(b)), "r"(parity) : "memory");
}

// Where a block stands among its stages: the fill number `n` of a stage and whose turn it is.
struct Turn {
    u32 n = 0;
    __device__ __forceinline__ int stage() const { return n % STAGES; }
    __device__ __forceinline__ u32 parity() const { return n / STAGES & 1; }
};

// Eight codes to bf16: sign, exponent and mantissa bits where they belong, times 2^126 the value of a code; `factor` has
// that and the group's scale.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ uint4 unpack(u32 codes, u32 factor) {
    const u32 second = codes >> 4; // nibbles
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 both = __byte_perm(codes, second, 0x0400 + 0x0101 * i) & 0x000f000fu; // a code in each half
        out[i] = times(both * (1 << 12 | 1 << 6) & 0x81c081c0u, factor);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}
__device__ __forceinline__ u32 twice(u32 bits) { return bits | bits << 16; }
__device__ __forceinline__ u32 factor_of(u32 scale) { return twice(min(scale, 128u) + 126u << 7); }
// What remains of a scale of 4 and more; 255 is NaN.
__device__ __forceinline__ u32 rest_of(u32 scale) { return scale == 255 ? twice(0x7fffu) : twice(scale - 128u + 127u << 7); }

#if IS_PACKED
struct Codes { // a thread's part of a tile: of each unit of its warpgroup 32 values of one row
    uint4 codes[OWN];
    u32 scales[OWN];
};
#endif

// One block of outputs and one tile of rows, as the filling warpgroup sees it.
struct Filler {
    const Stack &stack;
    const Rows &rows;
    int expert, first, count, padded, start; // the rows, to how many they are rounded, and the first output
    int *sources;
    int thread, row, half, unit; // of codes, the first of OWN units

    __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, %0;" ::"n"(FILLERS) : "memory"); }
    __device__ __forceinline__ void begin(int expert_, int first_, int count_, int padded_, int start_) {
        expert = expert_, first = first_, count = count_, padded = padded_, start = start_;
        meet();
        for (int i = thread; i < padded; i += FILLERS) {
            const int place = first + (i < count ? i : 0);
            sources[i] = rows.tokens ? rows.tokens[place] : place;
        }
        meet();
    }
    __device__ __forceinline__ int packed_steps() const {
        return (TRANSPOSED ? stack.outer * stack.number : stack.inner) / DEPTH;
    }
    __device__ __forceinline__ int steps() const {
        return packed_steps() + stack.rank * (TRANSPOSED ? stack.number : 1) / DEPTH;
    }

    // Everything of a step that is copied as it is.
    __device__ __forceinline__ void copy(int step, u16 *to_rows, u16 (*to_weights)[TILE]) const {
        const int packed = packed_steps();
        const int column = thread % 8, lane_row = thread / 8;
        u16 *to = to_rows + lane_row * DEPTH + ((column ^ lane_row % 8) * 8);
        const bool is_low_rank = step >= packed;
        const int depth = (is_low_rank ? step - packed : step) * DEPTH; // of all matrices, or of all factors
        const int length = is_low_rank ? stack.rank : TRANSPOSED ? stack.outer : stack.inner;
        const int m = TRANSPOSED ? depth / length : start / stack.outer, within = depth % length + column * 8;
        const u16 *from_rows = (is_low_rank ? of(rows.z, m) : of(rows.x, m)) + within;
        int source[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; ++i) source[i] = is_low_rank ? first + i * PASS + lane_row : sources[i * PASS + lane_row];
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const bool is_in = i * PASS + lane_row < count;
            if (i * PASS < padded)
                copy_async(to + i * PASS * DEPTH, from_rows + (is_in ? (long long)source[i] * length : 0), is_in);
        }
        if (IS_PACKED && !is_low_rank) return;
        // bf16 tiles: a thread has a piece of every 32nd row.
        const u16 *from;
        long long row_stride, unit_stride;
        if (is_low_rank) {
            const u16 *factor = of(stack.factors, m);
            if (TRANSPOSED) {
                from = factor + ((long long)expert * stack.rank + depth % stack.rank) * stack.inner + start;
                row_stride = stack.inner, unit_stride = 64;
            } else {
                from = factor + ((long long)expert * stack.outer + start % stack.outer) * stack.rank + depth;
                row_stride = stack.rank, unit_stride = 64ll * stack.rank;
            }
        } else {
            const u16 *w = static_cast<const u16 *>(of(stack.matrices, m));
            const long long top = (long long)expert * stack.outer + (TRANSPOSED ? depth : start) % stack.outer;
            from = w + top * stack.inner + (TRANSPOSED ? start : depth);
            row_stride = stack.inner, unit_stride = TRANSPOSED ? 64 : 64ll * stack.inner;
        }
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
            for (int i = 0; i < 64 / PASS; ++i)
                copy_async(to_weights[unit] + (i * PASS + lane_row) * 64 + (column ^ lane_row % 8) * 8,
                    from + unit * unit_stride + (i * PASS + lane_row) * row_stride + column * 8, true);
    }

#if IS_PACKED
    __device__ __forceinline__ void load(int step, Codes &c) const {
        const int depth = step * DEPTH, m = (TRANSPOSED ? depth : start) / stack.outer;
        const long long top = (long long)expert * stack.outer + (TRANSPOSED ? depth : start + unit * 64) % stack.outer + row;
        const long long at = top * stack.inner + (TRANSPOSED ? start + unit * 64 : depth) + half * 32;
        const u8 *codes = static_cast<const u8 *>(of(stack.matrices, m)) + at / 2, *scales = of(stack.scales, m) + at / 32;
        const int next_unit = TRANSPOSED ? 64 : 64 * stack.inner;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(c.codes[i].x), "=r"(c.codes[i].y), "=r"(c.codes[i].z), "=r"(c.codes[i].w)
                         : "l"(codes + i * next_unit / 2));
            c.scales[i] = __ldg(scales + i * next_unit / 32);
        }
    }
    __device__ __forceinline__ void fill(const Codes &c, u16 (*to_weights)[TILE]) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u32 scale = c.scales[i], factor = factor_of(scale);
            const u32 codes[4] = {c.codes[i].x, c.codes[i].y, c.codes[i].z, c.codes[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint4 out = unpack(codes[j], factor);
                if (scale > 128) {
                    const u32 rest = rest_of(scale);
                    out = make_uint4(times(out.x, rest), times(out.y, rest), times(out.z, rest), times(out.w, rest));
                }
                *reinterpret_cast<uint4 *>(to_weights[unit + i] + row * 64 + ((half * 4 + j) ^ row % 8) * 8) = out;
            }
        }
    }
#endif

    // A thread arrives twice: when its copies have, and when it has unpacked its codes.
    __device__ __forceinline__ void run(Shared &s, Turn &turn) const {
        const int num = steps();
#if IS_PACKED
        const int packed = packed_steps();
        Codes now, next;
        load(0, now);
#endif
        for (int step = 0; step < num; ++step, ++turn.n) {
            const int stage = turn.stage();
            wait(&s.empty[stage], turn.parity() ^ 1);
            copy(step, s.rows[stage], s.weights[stage]);
            arrive_after_copies(&s.full[stage]);
#if IS_PACKED
            if (step + 1 < packed) load(step + 1, next);
            if (step < packed) fill(now, s.weights[stage]);
            now = next;
            show_to_products();
#endif
            arrive(&s.full[stage]);
        }
    }
};

// d [64 outputs][N rows] += a b: a [outputs][depth] or with A_BY_DEPTH [depth][outputs], b [rows][depth].
#define F4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define F16(d, i) F4(d[i]), F4(d[i + 1]), F4(d[i + 2]), F4(d[i + 3])
#define P0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define P1 P0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P2 P1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define P3 P2 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define P4 P3 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define P5 P4 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define PRODUCT(N, LIST, A, B, T, ...)                                                                                 \
    template <int A_BY_DEPTH> __device__ __forceinline__ void product(float(&d)[N / 8][4], u64 a, u64 b) {               \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, " A ", " B ", 1, 1, 1, " T ", 0;" \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "n"(A_BY_DEPTH));                                                               \
    }
PRODUCT(32, P0, "%16", "%17", "%18", F16(d, 0))
PRODUCT(64, P1, "%32", "%33", "%34", F16(d, 0), F16(d, 4))
PRODUCT(96, P2, "%48", "%49", "%50", F16(d, 0), F16(d, 4), F16(d, 8))
PRODUCT(128, P3, "%64", "%65", "%66", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12))
PRODUCT(144, P4, "%72", "%73", "%74", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12), F4(d[16]), F4(d[17]))
PRODUCT(160, P5, "%80", "%81", "%82", F16(d, 0), F16(d, 4), F16(d, 8), F16(d, 12), F16(d, 16))
#undef PRODUCT

__device__ __forceinline__ int padded_rows(int count) { return count > 128 ? (count + 15) / 16 * 16 : (count + 31) / 32 * 32; }

// A multiplying warpgroup's 128 outputs of N rows; y points at the first row's first of them.
template <int N>
__device__ __forceinline__ void multiply_tile(Shared &s, Turn &turn, int group, int steps, u16 *y, int stride, int count) {
    float sums[2][N / 8][4];
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int i = 0; i < N / 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[b][i][e] = 0.f;
    const int thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;
    for (int step = 0; step < steps; ++step) {
        const int stage = turn.stage();
        wait(&s.full[stage], turn.parity());
        show_to_products(); // what was copied
        const u64 rows = describe(s.rows[stage]), weights = describe(s.weights[stage][2 * group]);
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k)
#pragma unroll
            for (int b = 0; b < 2; ++b)
                product<TRANSPOSED>(sums[b], weights + b * (2 * TILE >> 4) + k * (TRANSPOSED ? ROWS_16 : COLUMNS_16),
                    rows + k * COLUMNS_16);
        end_products();
        wait_for_products<1>();
        if (step && lane == 0) arrive(&s.empty[(turn.n - 1) % STAGES]);
        ++turn.n;
    }
    wait_for_products<0>();
    if (lane == 0) arrive(&s.empty[(turn.n - 1) % STAGES]);
    u16(*staged)[STAGED] = s.staged[group];
#pragma unroll
    for (int chunk = 0; chunk < N; chunk += CHUNK) {
#pragma unroll
        for (int i = chunk / 8; i < chunk / 8 + CHUNK / 8 && i < N / 8; i += 2)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const float(&l)[4] = sums[b][i], (&r)[4] = sums[b][i + 1];
                const u32 both[4] = {pack(l[0], l[1]), pack(l[2], l[3]), pack(r[0], r[1]), pack(r[2], r[3])};
                store_transposed(
                    &staged[i * 8 - chunk + lane % 8 + lane / 16 * 8][b * 64 + 16 * warp + lane / 8 % 2 * 8], both);
            }
        meet_group();
#pragma unroll
        for (int i = 0; i < CHUNK / 8; ++i) {
            const int row = i * 8 + thread / 16, piece = thread % 16 * 8;
            if (chunk + row < count)
                *reinterpret_cast<uint4 *>(y + (long long)(chunk + row) * stride + piece) =
                    *reinterpret_cast<const uint4 *>(&staged[row][piece]);
        }
        meet_group();
    }
}

// tiles [num_tiles][3]: expert, first row, number of rows; those without rows come last. y by matrix: [P][outer], or
// TRANSPOSED one of [P][inner].
extern "C" __global__ void __launch_bounds__(THREADS, 1) packed_product_kernel(const u16 *x_0, const u16 *x_1,
    const int *tokens, const void *matrix_0, const void *matrix_1, const u8 *scale_0, const u8 *scale_1, const u16 *z_0,
    const u16 *z_1, const u16 *factor_0, const u16 *factor_1, const int *tiles, u16 *y_0, u16 *y_1, int num_tiles,
    int outer, int inner, int number, int rank) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Stack stack{{matrix_0, matrix_1}, {scale_0, scale_1}, {factor_0, factor_1}, outer, inner, number, rank};
    const Rows rows{{x_0, x_1}, {z_0, z_1}, tokens};
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(&s.full[i], 2 * FILLERS);
            make_barrier(&s.empty[i], 8);
        }
    __syncthreads();
    const int width = TRANSPOSED ? inner : outer, blocks = (TRANSPOSED ? inner : outer * number) / WIDE;
    const int steps = ((TRANSPOSED ? outer * number : inner) + rank * (TRANSPOSED ? number : 1)) / DEPTH;
    Turn turn;
    if (threadIdx.x < FILLERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        Filler filler{stack, rows};
        filler.thread = threadIdx.x, filler.sources = s.sources;
        filler.row = threadIdx.x % GROUP / 2, filler.half = threadIdx.x % 2, filler.unit = threadIdx.x / GROUP * OWN;
        for (int id = blockIdx.x; id < num_tiles * blocks; id += gridDim.x) {
            const int *tile = tiles + id / blocks * 3;
            const int count = tile[2];
            if (!count) break;
            filler.begin(tile[0], tile[1], count, padded_rows(count), id % blocks * WIDE);
            filler.run(s, turn);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        const int group = threadIdx.x / GROUP - 2;
        for (int id = blockIdx.x; id < num_tiles * blocks; id += gridDim.x) {
            const int *tile = tiles + id / blocks * 3;
            const int count = tile[2], start = id % blocks * WIDE;
            if (!count) break;
            u16 *to = (start < width ? y_0 : y_1) + (long long)tile[1] * width + start % width + group * 128;
            switch (padded_rows(count)) {
            case 32: multiply_tile<32>(s, turn, group, steps, to, width, count); break;
            case 64: multiply_tile<64>(s, turn, group, steps, to, width, count); break;
            case 96: multiply_tile<96>(s, turn, group, steps, to, width, count); break;
            case 128: multiply_tile<128>(s, turn, group, steps, to, width, count); break;
            case 144: multiply_tile<144>(s, turn, group, steps, to, width, count); break;
            default: multiply_tile<160>(s, turn, group, steps, to, width, count);
            }
        }
    }
}
