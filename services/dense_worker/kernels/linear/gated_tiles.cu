// silu(x G^T) * (x U^T) of many rows in bfloat16 on Hopper: gate and up never reach memory.
//
// A program computes tiles of 128 rows and TILE_FEATURES features, one after another: for each of these features it
// multiplies a row of gate and one of up, so that a thread has both sums. One thread copies 64 in_features at a time through
// a ring in shared memory, also for the next tile while the two warpgroups that multiply, 64 rows each, compute the
// activation. The two programs of a cluster have the same features of other rows: each copies one half of the weights to
// both. Reference: `MlpActivation.apply` of the product.
//
// Compiled with TILE_FEATURES, NUM_STAGES.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map { char bytes[128]; };  // CUtensorMap

struct Params {
    Map rows, weights, out;
    int num_rows, in_features, out_features;
};

constexpr int TILE_ROWS = 128, NUM_SUMS = TILE_FEATURES;  // sums: of a thread, for 64 rows a warpgroup
constexpr int WIDTH = 64;  // in_features of a stage, 128 bytes
constexpr int ROW_BYTES = TILE_ROWS * 128, WEIGHT_BYTES = 2 * TILE_FEATURES * 128, STAGE_BYTES = ROW_BYTES + WEIGHT_BYTES;
constexpr int STAGED_BYTES = 64 * 128;  // of a warpgroup: 64 rows and features
constexpr int MOST_PAIRS = 16;  // of tiles of rows that follow one another with the same features
constexpr int NUM_GROUPS = 2, NUM_MULTIPLYING = NUM_GROUPS * 128, NUM_THREADS = NUM_MULTIPLYING + 32;

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
__device__ __forceinline__ u32 in_program(u32 address, u32 rank) {  // of this cluster
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void arrive_at(u32 barrier_in_cluster) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_in_cluster) : "memory");
}
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void copy_tile(u32 to, const Map* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_tile_to_both(u32 to, const Map* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3) : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address) {  // rows of 128 bytes, swizzled, 8 of them in 1024 bytes
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define HUNDRED TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9)
#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define MULTIPLY(n, list, x, w, p, ...)                                                                        \
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " p ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" list "}, " x ", " w ", adds, 1, 1, 0, 0; }" \
                 : __VA_ARGS__ : "l"(rows), "l"(weights), "r"((int)adds))
// sums [64 rows, features of gate, then of up] += 32 bytes of rows' columns times those of weights
__device__ __forceinline__ void multiply(float (&sums)[NUM_SUMS], u64 rows, u64 weights, bool adds) {
#if TILE_FEATURES == 128
    MULTIPLY("256", HUNDRED TEN(10) TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127", "%128", "%129", "%130", SIXTEEN(0),
             SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112));
#else
    static_assert(TILE_FEATURES == 112, "sizes");
    MULTIPLY("224", HUNDRED TEN(10) "%110,%111", "%112", "%113", "%114", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48),
             SIXTEEN(64), SIXTEEN(80), SIXTEEN(96));
#endif
}

// ---- bfloat16
__device__ __forceinline__ u32 pack(float lower, float upper) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}
__device__ __forceinline__ float lower_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float silu(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + power));
    return x * inverse;
}
__device__ __forceinline__ u32 swiglu(float gate_0, float gate_1, float up_0, float up_1) {  // rounded as separate kernels do
    const u32 gate = pack(gate_0, gate_1), up = pack(up_0, up_1);
    const u32 activated = pack(silu(lower_of(gate)), silu(upper_of(gate)));
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(activated), "r"(up));
    return product;
}

struct Ring {
    u32 begin, full, empty;
    int stage = 0, parity = 0;

    __device__ __forceinline__ u32 rows() const { return begin + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 weights() const { return rows() + ROW_BYTES; }
    __device__ __forceinline__ void advance() {
        if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
    }
};

// The tiles of a program. A pair is what a cluster computes at once.
struct Tiles {
    int pair, num_pairs, num_row_pairs, num_feature_tiles, rank;

    __device__ __forceinline__ explicit Tiles(const Params& p) {
        rank = blockIdx.x % 2, pair = blockIdx.x / 2;
        num_row_pairs = (p.num_rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
        num_feature_tiles = (p.out_features + TILE_FEATURES - 1) / TILE_FEATURES;
        num_pairs = num_row_pairs * num_feature_tiles;
    }
    __device__ __forceinline__ bool has_more() const { return pair < num_pairs; }
    __device__ __forceinline__ void advance() { pair += gridDim.x / 2; }
    __device__ __forceinline__ int2 rows_and_features() const {  // the first ones
        const int before = pair / (MOST_PAIRS * num_feature_tiles), in_group = pair % (MOST_PAIRS * num_feature_tiles);
        const int size = min(num_row_pairs - before * MOST_PAIRS, MOST_PAIRS);
        return make_int2(((before * MOST_PAIRS + in_group % size) * 2 + rank) * TILE_ROWS, in_group / size * TILE_FEATURES);
    }
};

__device__ __forceinline__ void copy_weights(const Params& p, const Ring& ring, int column, int feature, u32 rank) {
    const u32 full = ring.full + ring.stage * 8;
    expect(full, STAGE_BYTES);  // gate by one program, up by the other
    copy_tile_to_both(ring.weights() + rank * (WEIGHT_BYTES / 2), &p.weights, column, feature + rank * p.out_features, full);
}

__device__ __forceinline__ void copy_all(const Params& p, Tiles tiles, Ring ring) {  // one thread
    const int num_steps = (p.in_features + WIDTH - 1) / WIDTH;
    int num_ahead = min(NUM_STAGES, num_steps);  // steps whose weights need not wait for the kernel before
    Ring ahead = ring;
    const int2 first = tiles.rows_and_features();
    for (int i = 0; i < num_ahead; i++, ahead.advance()) copy_weights(p, ahead, i * WIDTH, first.y, tiles.rank);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (; tiles.has_more(); tiles.advance()) {
        const int2 begin = tiles.rows_and_features();
        for (int i = 0; i < num_steps; i++, ring.advance()) {
            if (num_ahead > 0) {
                num_ahead--;
            } else {
                wait_barrier(ring.empty + ring.stage * 8, ring.parity ^ 1);
                copy_weights(p, ring, i * WIDTH, begin.y, tiles.rank);
            }
            copy_tile(ring.rows(), &p.rows, i * WIDTH, begin.x, ring.full + ring.stage * 8);
        }
    }
}

// A warpgroup has 64 rows. Of each 8 features a thread has two, of rows lane / 4 and lane / 4 + 8 of its warp's 16.
__device__ __forceinline__ void sum_products(int num_steps, Ring& ring, float (&sums)[NUM_SUMS]) {
    const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const u32 empty_there = in_program(ring.empty, thread % 2);  // of either program, for a thread each
    int last_stage = 0;
#pragma unroll 1
    for (int i = 0; i < num_steps; i++) {
        wait_barrier(ring.full + ring.stage * 8, ring.parity);
        const u64 rows = descriptor(ring.rows() + group * (ROW_BYTES / NUM_GROUPS)), weights = descriptor(ring.weights());
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 4; step++) multiply(sums, rows + step * 2, weights + step * 2, i > 0 || step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the products of the stage before have ended
        if (i > 0 && thread < 2) arrive_at(empty_there + last_stage * 8);
        last_stage = ring.stage;
        ring.advance();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
    if (thread < 2) arrive_at(empty_there + last_stage * 8);
}

__device__ __forceinline__ void activate_and_store(
    const Params& p, const float (&sums)[NUM_SUMS], int row, int feature, u32 staged) {
    constexpr int NUM_PLACES = TILE_FEATURES / 8;
    const u32 group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const u32 staged_row = staged + (warp * 16 + lane % 16) * 128;
    row += group * 64;
    u32 results[NUM_PLACES][2];
#pragma unroll
    for (int place = 0; place < NUM_PLACES; place++) {
        const float *gate = sums + place * 4, *up = gate + NUM_SUMS / 2;
#pragma unroll
        for (int i = 0; i < 2; i++) results[place][i] = swiglu(gate[i * 2], gate[i * 2 + 1], up[i * 2], up[i * 2 + 1]);
        if (place != 7 && place != NUM_PLACES - 1) continue;
        const int first = place - 7;  // 64 features are stored at once; some of a tile that has fewer than twice as many, twice
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // what was staged before is on its way
#pragma unroll
        for (int i = 0; i < 4; i++) {  // 16 features
            const u32* of_place = results[first + i * 2];
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             staged_row + (((i * 2 + lane / 16) ^ lane % 8) * 16)),
                         "r"(of_place[0]), "r"(of_place[1]), "r"(of_place[2]), "r"(of_place[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        if (threadIdx.x % 128 == 0)
            asm volatile(
                "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                "cp.async.bulk.commit_group;" ::"l"(&p.out), "r"(feature + first * 8), "r"(row), "r"(staged) : "memory");
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1) gated_tiles(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const u32 begin = shared_address(memory), staged = begin + NUM_STAGES * STAGE_BYTES;
    const u32 full = staged + NUM_GROUPS * STAGED_BYTES, empty = full + NUM_STAGES * 8;
    Ring ring{begin, full, empty};
    if (threadIdx.x == NUM_MULTIPLYING) {
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            init_barrier(full + stage * 8, 1);
            init_barrier(empty + stage * 8, 2 * NUM_GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    sync_cluster();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    Tiles tiles(p);
    if (threadIdx.x >= NUM_MULTIPLYING) {
        if (threadIdx.x == NUM_MULTIPLYING && tiles.has_more()) copy_all(p, tiles, ring);
        __syncwarp();
    } else {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (; tiles.has_more(); tiles.advance()) {
            float sums[NUM_SUMS];
            const int2 first = tiles.rows_and_features();
            sum_products((p.in_features + WIDTH - 1) / WIDTH, ring, sums);
            activate_and_store(p, sums, first.x, first.y, staged + threadIdx.x / 128 * STAGED_BYTES);
        }
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    sync_cluster();  // the other program may still copy to this one, or arrive at its barriers
}
