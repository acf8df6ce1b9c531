// Barriers of a block or of a cluster of two, and copies by the tensor memory accelerator (TMA) that arrive at them.

#pragma once

#include "mma.cuh"

// As the driver encodes it; a parameter of the kernel that is `const __grid_constant__`.
struct __align__(64) TensorMap {
    u64 words[16];
};

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
// The one arrival that a stage filled by TMA waits for, besides its bytes.
__device__ __forceinline__ void expect_bytes(u64 *b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Where a block stands among its stages: the fill number `n` of a stage and whose turn it is.
template <int STAGES> struct TurnOf {
    u32 n = 0;
    __device__ __forceinline__ int stage() const { return n % STAGES; }
    __device__ __forceinline__ u32 parity() const { return n / STAGES & 1; }
};

// A box of the map's shape (see `tensor_map` in nvrtc.py), tiles of 128 bytes a row one after the other, from a row and a
// number of tile on: to this block, to both of a cluster, and back.
__device__ __forceinline__ void load_box(void *to, const TensorMap &map, int row, int tile, u64 *b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%5, %2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(row), "r"(tile), "r"(shared_address(b)), "r"(0)
                 : "memory");
}
__device__ __forceinline__ void load_box_to_both(void *to, const TensorMap &map, int row, int tile, u64 *b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%5, %2, %3}], [%4], %6;" ::"r"(shared_address(to)),
                 "l"(&map), "r"(row), "r"(tile), "r"(shared_address(b)), "r"(0), "h"(u16(3))
                 : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap &map, const u16 *from, int row, int tile) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%4, %2, %3}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(row), "r"(tile), "r"(0)
                 : "memory");
}
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// What this thread stored has been read from shared memory, or is written.
__device__ __forceinline__ void wait_until_stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same barrier of a block of this cluster.
__device__ __forceinline__ void arrive_at(u64 *b, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(b)),
                 "r"(rank)
                 : "memory");
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
