// Products of 2 to 64 rows with weights in bfloat16 or FP8 on Hopper. Their time is that of reading the weights.
//
// A program has all features that an SM must have. Weights are the tall operand. One thread copies tiles of
// 128 bytes of in_features into a ring in shared memory: the first tiles of weights before the kernel before has ended,
// rows after it. One warpgroup multiplies. Reference: `skinny_linear`.
//
// Compiled with KIND, GROUPS (8 features each, and for GATED 8 of gate and 8 of up: of a program, or of a cluster if
// KIND is SPLIT), SHARED_BYTES, IS_FP8, HAS_DELTAS: of the rows' adapters, whose ranks are as more in_features. Another
// warpgroup of the same programs computes x A^T, and counts what is complete.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define PLAIN 0
#define GATED 1  // silu(gate) * up
#define SPLIT 2  // the programs of a cluster have the same features, and each a part of in_features

struct alignas(64) Map { char bytes[128]; };  // CUtensorMap

struct Params {
    Map weights, last_group, rows;  // boxes of so many groups as all programs have, of the one that some have more, of x
    const float* squares;  // of the norm before [64, num_squares]; null: none
    const u16 *residual, *gain;  // [n, out_features] and, of the norm after, [out_features]; null: none
    u16 *out, *weighted;
    float* squares_after;
    const float *row_scales, *weight_scales;  // of codes: [n], and of the weights' rows
    u32 num_rows, num_groups, in_features, out_stride, residual_stride, num_squares, num_squares_after;
    float eps;
#if HAS_DELTAS
    Map b[4], hidden;  // boxes of GROUPS of B [features of a projection, ranks], and of x A^T [projections, 64, ranks]
    const int *ranks, *row_slots;  // [slots, num_projections], [n]
    int* counter;  // of tiles of A, 16 ranks of a slot each, of which x A^T is complete
    const u16 *a, *x;  // [tiles, 16, in_features], [n, in_features]
    float* parts;  // sums over parts of in_features [tiles, num_parts, 64, 16]
    int* num_parts_done;  // by tile; zeros
    u16* shrunk;  // what `hidden` is of
    u32 num_projections, group_size, num_tiles, first_features[4], x_stride, shrunk_stride, num_parts, part_columns;
#endif
};

constexpr int TILE = IS_FP8 ? 128 : 64, STEPS = 4;  // in_features of a stage, 128 bytes; steps of the tensor cores
constexpr int GROUP_ROWS = KIND == GATED ? 16 : 8, GROUP_BYTES = GROUP_ROWS * 128;
constexpr int FEATURES = GROUPS * 8, NUM_TILES = (GROUPS * GROUP_ROWS + 63) / 64;
constexpr int CLUSTER = KIND == SPLIT ? 2 : 1;  // programs
constexpr int MAX_STAGES = 16;
constexpr int NUM_THREADS = 128;  // that multiply, besides a warp that copies and one for the norm before
constexpr int NUM_SHRINKING = HAS_DELTAS ? 128 : 0;  // threads that compute x A^T
constexpr int MAX_POLLS = 1 << 22;  // a few seconds
constexpr u64 LEAVES_FIRST = 0x12F0000000000000ull, LEAVES_LAST = 0x14F0000000000000ull;  // order of leaving L2

struct Deltas {  // stages of 64 ranks, after those of in_features
    int count, first_projection, num_blocks;
};

struct Shared {
    u64 full[MAX_STAGES], empty[MAX_STAGES];
    float factors[64];  // of the norm before, or scales of rows
    float squares[KIND == SPLIT ? GROUPS : 1][64];  // of the norm after
    u64 known;  // when the deltas are
    Deltas deltas;
#if HAS_DELTAS
    int own_rows[64], is_last;  // of a tile of A
    float sums[4][16][16];  // of x A^T, by warp, row and rank
#endif
};

// ---- instructions

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred is_done;\n"
        "wait: mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
        "@!is_done bra wait; }" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ u32 in_program(u32 address, u32 rank) {  // of this cluster
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void sync_threads() { asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory"); }

__device__ __forceinline__ void copy_weights(u32 to, const Map* map, int column, int group, u32 barrier) {
    if (KIND == GATED)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier),
            "l"(LEAVES_FIRST) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(group * 8), "r"(barrier),
            "l"(LEAVES_FIRST) : "memory");
}
__device__ __forceinline__ void copy_rows(u32 to, const Map* map, int column, u32 barrier, int first_row = 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(first_row), "r"(barrier), "l"(LEAVES_LAST)
        : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address) {  // rows of 128 bytes, swizzled, 8 of them in 1024 bytes
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// sums [64 features, N rows] += 32 bytes of weights' columns times those of rows
#if IS_FP8
#define TYPES "k32.f32.e4m3.e4m3"
#define ORDER
#else
#define TYPES "k16.f32.bf16.bf16"
#define ORDER ", 0, 0"
#endif
#define SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define MULTIPLY(n, list, w, x, p, ...)                                                                         \
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " p ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" n TYPES " {" list "}, " w ", " x ", adds, 1, 1" ORDER "; }" \
                 : __VA_ARGS__ : "l"(weights), "l"(rows), "r"((int)adds))
#define LIST_4 "%0,%1,%2,%3"
#define LIST_8 LIST_4 ",%4,%5,%6,%7"
#define LIST_12 LIST_8 ",%8,%9,%10,%11"
#define LIST_16 LIST_12 ",%12,%13,%14,%15"
#define LIST_24 LIST_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define LIST_32 LIST_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
template <int N> __device__ __forceinline__ void multiply(float (&sums)[N / 2], u64 weights, u64 rows, bool adds) {
    if constexpr (N == 8)
        MULTIPLY("8", LIST_4, "%4", "%5", "%6", SUMS(0));
    else if constexpr (N == 16)
        MULTIPLY("16", LIST_8, "%8", "%9", "%10", SUMS(0), SUMS(4));
    else if constexpr (N == 24)
        MULTIPLY("24", LIST_12, "%12", "%13", "%14", SUMS(0), SUMS(4), SUMS(8));
    else if constexpr (N == 32)
        MULTIPLY("32", LIST_16, "%16", "%17", "%18", SUMS(0), SUMS(4), SUMS(8), SUMS(12));
    else if constexpr (N == 48)
        MULTIPLY("48", LIST_24, "%24", "%25", "%26", SUMS(0), SUMS(4), SUMS(8), SUMS(12), SUMS(16), SUMS(20));
    else
        MULTIPLY("64", LIST_32, "%32", "%33", "%34", SUMS(0), SUMS(4), SUMS(8), SUMS(12), SUMS(16), SUMS(20), SUMS(24), SUMS(28));
}

// bfloat16
__device__ __forceinline__ float wide(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float rounded(float value) { return wide(narrow(value)); }
union Eight {
    uint4 all;
    u16 each[8];
};

// ---- the ring

template <int N> struct Ring {
    static constexpr int WEIGHT_BYTES = GROUPS * GROUP_BYTES, ROW_BYTES = N * 128, STAGE_BYTES = WEIGHT_BYTES + ROW_BYTES;
    // Of SPLIT, behind the ring: sums of all programs of the cluster, [CLUSTER, FEATURES, PITCH], of the rows of this one.
    static constexpr int OWN_ROWS = KIND == SPLIT ? N / CLUSTER : N, PITCH = OWN_ROWS + 2;
    static constexpr int SUM_BYTES = KIND == SPLIT ? CLUSTER * FEATURES * PITCH * 4 : 0;
    // The last tile may have more than the program's features. What is read for these is not used, but must be there.
    static constexpr int SPARE_BYTES = NUM_TILES * 64 * 128 > STAGE_BYTES ? NUM_TILES * 64 * 128 - STAGE_BYTES : 0;
    static constexpr int FITTING = (SHARED_BYTES - SUM_BYTES - SPARE_BYTES - (int)sizeof(Shared)) / STAGE_BYTES;
    static constexpr int NUM_STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
    static_assert(NUM_STAGES >= 2 && OWN_ROWS % 2 == 0, "sizes");

    u32 begin, full, empty;
    int stage = 0, parity = 0;

    __device__ __forceinline__ u32 weights() const { return begin + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 rows() const { return weights() + WEIGHT_BYTES; }
    __device__ __forceinline__ void advance() {
        if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
    }
};

// What a program computes.
struct Part {
    u32 rank;
    int index, count, first_group, num_groups, first_column, num_stages;  // stages: of in_features

    __device__ __forceinline__ explicit Part(const Params& p) {
        rank = blockIdx.x % CLUSTER;
        index = blockIdx.x, count = gridDim.x, num_stages = (p.in_features + TILE - 1) / TILE, first_column = 0;
        if (KIND == SPLIT) {
            index /= CLUSTER, count /= CLUSTER, num_stages = (num_stages + CLUSTER - 1) / CLUSTER;
            first_column = rank * num_stages * TILE;
        }
        first_group = p.num_groups * index / count;
        num_groups = p.num_groups * (index + 1) / count - first_group;
    }
};

template <int N> __device__ __forceinline__ void copy_weights_of(const Params& p, const Part& part, const Ring<N>& ring, int i) {
    const bool is_even = p.num_groups % part.count == 0;  // all programs have GROUPS
    const int num_together = is_even ? GROUPS : GROUPS - 1, column = part.first_column + i * TILE;
    const u32 full = ring.full + ring.stage * 8;
    expect(full, part.num_groups * GROUP_BYTES + Ring<N>::ROW_BYTES);
    copy_weights(ring.weights(), &p.weights, column, part.first_group, full);
    if (part.num_groups > num_together)
        copy_weights(ring.weights() + num_together * GROUP_BYTES, &p.last_group, column, part.first_group + num_together, full);
}

// ---- deltas: what is copied after the last in_features

#if HAS_DELTAS
// For programs of the same kernel, which all find room at once.
__device__ __forceinline__ void await(const int* counter, int count) {
    int value, num_polls = 0;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        if (++num_polls > MAX_POLLS) __trap();
    } while (value < count);
}

// For all threads of a warp. A program has all ranks of its features' projections, of a cluster each a part of them.
__device__ __forceinline__ Deltas deltas_of(const Params& p, const Part& part) {
    int most = 0;  // ranks of a row
    for (u32 row = threadIdx.x % 32; row < p.num_rows; row += 32) {
        const int slot = p.row_slots[row];
        for (u32 i = 0; slot >= 0 && i < p.num_projections; i++) most = max(most, p.ranks[slot * p.num_projections + i]);
    }
    Deltas deltas{};
    deltas.num_blocks = (__reduce_max_sync(~0u, most) / 16 * p.group_size + TILE - 1) / TILE;
    deltas.count = deltas.num_blocks;
    if (KIND == SPLIT) deltas.count = (deltas.num_blocks + CLUSTER - 1 - part.rank) / CLUSTER;
    if (KIND == GATED) deltas.count *= 2;
    if (KIND == PLAIN) {
        u32 last = 0;
        for (u32 i = 1; i < p.num_projections; i++) {
            deltas.first_projection += p.first_features[i] <= part.first_group * 8;
            last += p.first_features[i] < (part.first_group + part.num_groups) * 8;
        }
        deltas.count *= last + 1 - deltas.first_projection;
    }
    return deltas;
}

// B is zeros beyond a projection's features, so that sums of others stay.
template <int N>
__device__ __forceinline__ void copy_delta(const Params& p, const Part& part, const Ring<N>& ring, const Deltas& deltas, int i) {
    const u32 full = ring.full + ring.stage * 8;
    const int index = KIND == SPLIT ? i * CLUSTER + part.rank : i;
    const int projection = deltas.first_projection + index / deltas.num_blocks, column = index % deltas.num_blocks * TILE;
    expect(full, Ring<N>::STAGE_BYTES);
    if (KIND == GATED)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
            ::"r"(ring.weights()), "l"(&p.b[projection]), "r"(column), "r"(0), "r"(-projection), "r"(part.first_group), "r"(full)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            ::"r"(ring.weights()), "l"(&p.b[projection]), "r"(column),
            "r"(part.first_group * 8 - (int)p.first_features[projection]), "r"(full) : "memory");
    await(p.counter, p.num_tiles);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    copy_rows(ring.rows(), &p.hidden, column, full, projection * 64);
}
#endif

#if HAS_DELTAS
__device__ __forceinline__ void sync_shrinking() { asm volatile("bar.sync 3, %0;" ::"n"(NUM_SHRINKING) : "memory"); }
// sums [16 ranks, 8 rows] += 16 columns of A times those of x
__device__ __forceinline__ void multiply_16(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 x0, u32 x1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x0), "r"(x1));
}

// x A^T of 16 ranks of a slot over one part of in_features, for the slot's rows. Whoever ends a tile's last part adds up all,
// and sets zeros for other rows.
__device__ __forceinline__ void shrink(const Params& p, Shared* shared) {
    constexpr int COLUMNS = 32, UNROLLED = 4;  // of a warp's turn: 8 of a thread; turns whose loads are in flight together
    const int thread = threadIdx.x - (NUM_THREADS + 64), warp = thread / 32, lane = thread % 32;
    const int tile = blockIdx.x % p.num_tiles, part = blockIdx.x / p.num_tiles;
    const int num_slots = p.group_size / 16, per_projection = p.num_tiles / p.num_projections;
    const int projection = tile / per_projection, slot = tile % num_slots;
    const bool has_ranks = tile % per_projection / num_slots * 16 < p.ranks[slot * p.num_projections + projection];
    const auto is_own = [&](u32 row) { return has_ranks && row < p.num_rows && p.row_slots[row] == slot; };
    const u32 lower = __ballot_sync(~0u, is_own(lane)), upper = __ballot_sync(~0u, is_own(lane + 32));
    const u64 own = (u64)upper << 32 | lower;
    const int num_own = __popcll(own);
    if (part >= p.num_parts || (num_own == 0 && part > 0)) return;
    const u32 begin = part * p.part_columns, end = min(begin + p.part_columns, p.in_features);
    const u16* a = p.a + (u64)tile * 16 * p.in_features;
    for (u32 i = thread; num_own > 0 && i < 16 * p.part_columns / 64; i += NUM_SHRINKING)
        if (const u32 column = begin + i / 16 * 64; column < end)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(a + (u64)(i % 16) * p.in_features + column) : "memory");
    if (thread < 64 && own >> thread & 1) shared->own_rows[__popcll(own & ((1ull << thread) - 1))] = thread;
    sync_shrinking();
    asm volatile("griddepcontrol.wait;" ::: "memory");

    a += (u64)(lane / 4) * p.in_features;
    float* sums_of_tile = p.parts + (u64)tile * p.num_parts * 64 * 16;
    for (int first = 0; first < num_own; first += 16) {
        float sums[2][4] = {};
        const u16* x[2];
        bool is_row[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int place = first + i * 8 + lane / 4;
            is_row[i] = place < num_own;
            x[i] = p.x + (u64)(is_row[i] ? shared->own_rows[place] : 0) * p.x_stride;
        }
        for (u32 turn = begin + warp * COLUMNS; turn < end; turn += 4 * COLUMNS * UNROLLED) {
            uint4 of_a[UNROLLED][2], of_x[UNROLLED][2];  // 8 columns of a thread are in the places of 4 times 2
#pragma unroll
            for (int i = 0; i < UNROLLED; i++) {
                const u32 column = turn + i * 4 * COLUMNS + lane % 4 * 8;
                const uint4 zeros{};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    of_a[i][half] = column < end ? *(const uint4*)(a + (u64)half * 8 * p.in_features + column) : zeros;
                    of_x[i][half] = column < end && is_row[half] ? *(const uint4*)(x[half] + column) : zeros;
                }
            }
#pragma unroll
            for (int i = 0; i < UNROLLED; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint4 &low = of_a[i][0], &high = of_a[i][1], &row = of_x[i][half];
                    multiply_16(sums[half], low.x, high.x, low.y, high.y, row.x, row.y);
                    multiply_16(sums[half], low.z, high.z, low.w, high.w, row.z, row.w);
                }
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            shared->sums[warp][i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 % 2 * 8] = sums[i / 4][i % 4];
        sync_shrinking();
        const int place = thread / 8, rank = thread % 8 * 2;
        float2 sum{};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 each = *(const float2*)&shared->sums[i][place][rank];
            sum.x += each.x, sum.y += each.y;
        }
        if (first + place < num_own)
            *(float2*)(sums_of_tile + (part * 64 + shared->own_rows[first + place]) * 16 + rank) = sum;
        sync_shrinking();
    }
    if (thread == 0) {
        int num_done = p.num_parts - 1;
        if (num_own > 0)
            asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(num_done) : "l"(p.num_parts_done + tile) : "memory");
        shared->is_last = num_done == p.num_parts - 1;
    }
    sync_shrinking();
    if (!shared->is_last) return;
    const int row = thread / 2, rank = thread % 2 * 8;
    float4 sums[2] = {};
    if (own >> row & 1)
#pragma unroll 8
        for (u32 i = 0; i < p.num_parts; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 each = __ldcg((const float4*)(sums_of_tile + (i * 64 + row) * 16 + rank) + half);
                sums[half].x += each.x, sums[half].y += each.y, sums[half].z += each.z, sums[half].w += each.w;
            }
    Eight shrunk;
#pragma unroll
    for (int i = 0; i < 8; i++) shrunk.each[i] = narrow((&sums[i / 4].x)[i % 4]);
    *(uint4*)(p.shrunk + (u64)(projection * 64 + row) * p.shrunk_stride + tile % per_projection * 16 + rank) = shrunk.all;
    asm volatile("fence.proxy.async.global;" ::: "memory");
    sync_shrinking();
    if (thread == 0) {
        p.num_parts_done[tile] = 0;
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.counter) : "memory");
    }
}
#endif

// ---- the warps that multiply. A thread has features lane / 4 and lane / 4 + 8 of its warp's 16 in each tile, and of each
// 8 rows two.

template <int N>
__device__ __forceinline__ void sum_products(const Part& part, Shared* shared, Ring<N> ring, float (&sums)[NUM_TILES][N / 2]) {
    const int lane = threadIdx.x % 32;
    int last_stage = 0, num_stages = part.num_stages;
#pragma unroll 1
    for (int i = 0; i < num_stages; i++) {
        wait_barrier(ring.full + ring.stage * 8, ring.parity);
        const u64 weights = descriptor(ring.weights()), rows = descriptor(ring.rows());
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < STEPS; step++)  // of 32 bytes; a tile of weights has 8 KB
#pragma unroll
            for (int tile = 0; tile < NUM_TILES; tile++)
                multiply<N>(sums[tile], weights + tile * 512 + step * 2, rows + step * 2, i > 0 || step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the products of the stage before have ended
        if (i > 0 && lane == 0) arrive(ring.empty + last_stage * 8);
        last_stage = ring.stage;
        ring.advance();
        if (HAS_DELTAS && i == part.num_stages - 1) {
            wait_barrier(shared_address(&shared->known), 0);
            num_stages += shared->deltas.count;
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (auto& of_tile : sums)
#pragma unroll
        for (float& sum : of_tile) asm volatile("" : "+f"(sum)::"memory");
}

// Of codes: scales of the two sums of a row that lie in one thread, of gate and up or of two features.
struct Scales {
    float of[IS_FP8 ? NUM_TILES : 1][2];

    __device__ __forceinline__ void read(const Params& p, const Part& part) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_features = p.num_groups * 8;
#pragma unroll
        for (int tile = 0; IS_FP8 && tile < NUM_TILES; tile++) {
            const u32 feature = part.first_group * 8 + (KIND == GATED ? (tile * 4 + warp) * 8 : tile * 64 + warp * 16) + lane / 4;
            const u32 other = KIND == GATED ? num_features + feature : feature + 8;
            of[tile][0] = feature < num_features ? p.weight_scales[feature] : 0;
            of[tile][1] = other < num_features * (KIND == GATED ? 2 : 1) ? p.weight_scales[other] : 0;
        }
    }
};

template <int N>
__device__ __forceinline__ void write(
    const Params& p, const Part& part, const float (&sums)[NUM_TILES][N / 2], const Scales& scales, const float* factors,
    u16* staged) {
    constexpr int PITCH = (FEATURES + 23) / 32 * 32 + 8;  // threads of a warp write to different banks
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < NUM_TILES * N / 4; i++) {
        const int tile = i / (N / 4), of_tile = i % (N / 4), row = of_tile / 2 * 8 + lane % 4 * 2 + of_tile % 2;
        const float* sum = sums[tile] + of_tile / 2 * 4 + of_tile % 2;
        const float factor = IS_FP8 || p.squares != nullptr ? factors[row] : 1;
        const float lower = (IS_FP8 ? sum[0] * scales.of[tile][0] : sum[0]) * factor;
        const float upper = (IS_FP8 ? sum[2] * scales.of[tile][1] : sum[2]) * factor;
        if (KIND == GATED) {
            const int feature = (tile * 4 + warp) * 8 + lane / 4;
            const float gate = rounded(lower), activated = rounded(__fdividef(gate, 1 + __expf(-gate)));
            if (feature < FEATURES) staged[row * PITCH + feature] = narrow(activated * rounded(upper));
        } else {
            const int feature = tile * 64 + warp * 16 + lane / 4;
            if (feature < FEATURES) staged[row * PITCH + feature] = narrow(lower);
            if (feature + 8 < FEATURES) staged[row * PITCH + feature + 8] = narrow(upper);
        }
    }
    sync_threads();
    for (int i = threadIdx.x; i < p.num_rows * GROUPS; i += NUM_THREADS) {
        const int row = i / GROUPS, group = i % GROUPS;
        u16* to = p.out + (u64)row * p.out_stride + (part.first_group + group) * 8;
        if (group < part.num_groups) *(uint4*)to = *(const uint4*)(staged + row * PITCH + group * 8);
    }
}

// Each program of the cluster gets all sums of its rows.
template <int N>
__device__ __forceinline__ void send_sums(const Part& part, const float (&sums)[NUM_TILES][N / 2], u32 received) {
    constexpr int OWN_ROWS = Ring<N>::OWN_ROWS, PITCH = Ring<N>::PITCH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int row = j * 8 + lane % 4 * 2;
        const u32 to = in_program(received, row / OWN_ROWS) + (part.rank * FEATURES * PITCH + row % OWN_ROWS) * 4;
#pragma unroll
        for (int i = 0; i < NUM_TILES * 2; i++) {
            const int feature = i / 2 * 64 + warp * 16 + i % 2 * 8 + lane / 4;
            const float* sum = sums[i / 2] + j * 4 + i % 2 * 2;
            if (feature < FEATURES)
                asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to + feature * PITCH * 4), "f"(sum[0]),
                             "f"(sum[1]) : "memory");
        }
    }
}

// How `add_and_write` shares out groups: several threads have groups of one row.
template <int N> struct Share {
    static constexpr int OWN_ROWS = Ring<N>::OWN_ROWS, FITTING = NUM_THREADS / OWN_ROWS;
    static constexpr int NUM_PARTS = FITTING < GROUPS ? FITTING : GROUPS, MOST = (GROUPS + NUM_PARTS - 1) / NUM_PARTS;
    const int own_row = threadIdx.x % OWN_ROWS, part = threadIdx.x / OWN_ROWS;  // no part from NUM_PARTS on
    Eight residual[MOST]{}, gain[MOST]{};
    float4 scales[IS_FP8 ? MOST : 1][2]{};

    // Reads what does not depend on the sums.
    __device__ __forceinline__ void read(const Params& p, const Part& of) {
        const u32 row = of.rank * OWN_ROWS + own_row;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            const int group = part + i * NUM_PARTS, first = (of.first_group + group) * 8;
            if (part >= NUM_PARTS || group >= of.num_groups) continue;
            if (p.residual != nullptr && row < p.num_rows)
                residual[i].all = *(const uint4*)(p.residual + (u64)row * p.residual_stride + first);
            if (p.gain != nullptr) gain[i].all = *(const uint4*)(p.gain + first);
            if (IS_FP8)
                for (int half = 0; half < 2; half++) scales[i][half] = *(const float4*)(p.weight_scales + first + half * 4);
        }
    }
};

template <int N>
__device__ __forceinline__ void add_and_write(
    const Params& p, const Part& part, const Share<N>& share, const float* received, Shared* shared) {
    constexpr int OWN_ROWS = Ring<N>::OWN_ROWS, PITCH = Ring<N>::PITCH;
    const int own_row = share.own_row;
    const u32 row = part.rank * OWN_ROWS + own_row;
#pragma unroll
    for (int i = 0; i < Share<N>::MOST; i++) {
        const int group = share.part + i * Share<N>::NUM_PARTS, first = (part.first_group + group) * 8;
        if (share.part >= Share<N>::NUM_PARTS || group >= part.num_groups) continue;
        Eight out, weighted;
        float squares = 0;
#pragma unroll
        for (int each = 0; each < 8; each++) {
            float sum = 0;
#pragma unroll
            for (int from = 0; from < CLUSTER; from++)
                sum += received[(from * FEATURES + group * 8 + each) * PITCH + own_row];
            if (IS_FP8) sum *= (&share.scales[i][0].x)[each] * shared->factors[row];
            const float y = rounded(rounded(sum) + wide(share.residual[i].each[each]));
            out.each[each] = narrow(y), weighted.each[each] = narrow(y * wide(share.gain[i].each[each]));
            squares += y * y;
        }
        shared->squares[group][own_row] = squares;
        if (row < p.num_rows) {
            *(uint4*)(p.out + (u64)row * p.out_stride + first) = out.all;
            if (p.gain != nullptr) *(uint4*)(p.weighted + (u64)row * p.num_groups * 8 + first) = weighted.all;
        }
    }
    if (p.gain == nullptr) return;
    sync_threads();
    if (threadIdx.x < OWN_ROWS) {  // the column of this cluster, and zeros in those that no cluster has
        float squares = 0;  // group by group, so that the order of additions does not depend on the number of rows
        for (int group = 0; group < part.num_groups; group++) squares += shared->squares[group][threadIdx.x];
        float* to = p.squares_after + (part.rank * OWN_ROWS + threadIdx.x) * p.num_squares_after;
        for (int column = part.index; column < p.num_squares_after; column += part.count)
            to[column] = column == part.index ? squares : 0;
    }
}

template <int N> __device__ __forceinline__ void run(const Params& p) {
    extern __shared__ __align__(1024) char memory[];
    Shared* shared = (Shared*)(memory + SHARED_BYTES - sizeof(Shared));
    const Part part(p);
    const u32 begin = shared_address(memory), full = shared_address(shared->full), empty = shared_address(shared->empty);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring<N> ring{begin, full, empty};
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x == NUM_THREADS) {
        for (int stage = 0; stage < Ring<N>::NUM_STAGES; stage++) {
            init_barrier(full + stage * 8, 1);
            init_barrier(empty + stage * 8, 4);
        }
        init_barrier(shared_address(&shared->known), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        Ring<N> ahead = ring;
        for (int i = 0; i < Ring<N>::NUM_STAGES && i < part.num_stages; i++, ahead.advance()) copy_weights_of(p, part, ahead, i);
    }
    if (threadIdx.x == NUM_THREADS + 32) asm volatile("prefetch.tensormap [%0];" ::"l"(&p.rows) : "memory");
    __syncthreads();
    if (KIND == SPLIT) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#if HAS_DELTAS
    if (warp == 5) {  // while others wait
        const Deltas deltas = deltas_of(p, part);
        if (lane == 0) {
            shared->deltas = deltas;
            arrive(shared_address(&shared->known));
        }
        __syncwarp();
    }
    if (warp >= 6) shrink(p, shared);
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");

    Share<KIND == SPLIT ? N : 64> share;  // of SPLIT
    if (warp == 4 && lane == 0) {
        for (int i = 0; i < part.num_stages; i++, ring.advance()) {
            if (i >= Ring<N>::NUM_STAGES) {
                wait_barrier(empty + ring.stage * 8, ring.parity ^ 1);
                copy_weights_of(p, part, ring, i);
            }
            copy_rows(ring.rows(), &p.rows, part.first_column + i * TILE, full + ring.stage * 8);
        }
#if HAS_DELTAS
        wait_barrier(shared_address(&shared->known), 0);
        const Deltas deltas = shared->deltas;
        for (int i = 0; i < deltas.count; i++, ring.advance()) {
            if (part.num_stages + i >= Ring<N>::NUM_STAGES) wait_barrier(empty + ring.stage * 8, ring.parity ^ 1);
            copy_delta(p, part, ring, deltas, i);
        }
#endif
    } else if (warp == 5) {
        if (IS_FP8)
            for (int row = lane; row < N; row += 32) shared->factors[row] = row < p.num_rows ? p.row_scales[row] : 0;
        else if (p.squares != nullptr)
            for (int first = 0; first < N; first += 16) {  // two threads sum the squares of a row
                const int row = first + lane / 2;
                const float4* from = (const float4*)(p.squares + row * p.num_squares) + lane % 2;
                float sum = 0;
#pragma unroll 8
                for (int i = 0; i < p.num_squares / 4; i += 2) sum += (from[i].x + from[i].y) + (from[i].z + from[i].w);
                sum += __shfl_xor_sync(~0u, sum, 1);
                shared->factors[row] = rsqrtf(sum / p.in_features + p.eps);
            }
        __syncwarp();
        asm volatile("bar.arrive 2, %0;" ::"n"(NUM_THREADS + 32) : "memory");
    } else if (warp < 4) {
        float sums[NUM_TILES][N / 2];
        Scales scales;
        if constexpr (KIND != SPLIT) scales.read(p, part);
        else share.read(p, part);
        sum_products<N>(part, shared, ring, sums);
        asm volatile("bar.sync 2, %0;" ::"n"(NUM_THREADS + 32) : "memory");  // factors are there, and the ring is free
        if constexpr (KIND == SPLIT) {
            await_cluster();  // its other program has begun
            send_sums<N>(part, sums, begin + Ring<N>::NUM_STAGES * Ring<N>::STAGE_BYTES);
        } else {
            write<N>(p, part, sums, scales, shared->factors, (u16*)memory);
        }
    }
    if constexpr (KIND == SPLIT) {
        __syncwarp();
        if (warp >= 4) await_cluster();
        arrive_in_cluster();
        await_cluster();
        if (warp < 4) add_and_write<N>(p, part, share, (const float*)(memory + Ring<N>::NUM_STAGES * Ring<N>::STAGE_BYTES), shared);
    }
}

#if KIND == SPLIT
#define CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERS
#endif
#define KERNEL(n)                                                                                           \
    extern "C" __global__ void CLUSTERS __launch_bounds__(NUM_THREADS + 64 + NUM_SHRINKING, 1)              \
        rows_product_##n(const __grid_constant__ Params p) { run<n>(p); }
KERNEL(8)
KERNEL(16)
KERNEL(24)
KERNEL(32)
KERNEL(48)
KERNEL(64)
