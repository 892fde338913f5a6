// What lies between two attention calls, for one row, as one kernel:
//     residual += o(attn_out); act = SwiGLU(gate_up(norm(residual))); residual += down(act); qkv = qkv(norm(residual)).
//
// Each SM runs one program, which computes some rows of every product. One warp copies the program's weights of all four
// products into a ring in shared memory, as fast as the other warps take them: weights depend on nothing, so the copies
// go on while programs wait for each other between two products. Reference: `Middle.forward` (model/segments.py).
//
// A result says itself that it is there: until then its place has bits that no result has. A counter of programs alone
// would need fences, and a fence waits for all copies under way. So the counter only tells when to look.
//
// Compiled with HIDDEN, ATTN, INNER and QKV (sizes of the vectors, multiples of 256), NUM_WARPS, NUM_STAGES, STAGE_BYTES,
// MAX_ROWS (rows of a product that a program has), IS_FP8.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if IS_FP8
typedef unsigned char Weight;
#else
typedef u16 Weight;
#endif

constexpr int NUM_THREADS = NUM_WARPS * 32;  // that compute
constexpr int FEATURES = 256;  // of a row that a warp multiplies at a time
constexpr int MAX_POLLS = 1 << 22;  // a few seconds
constexpr u16 NONE = 0xffff;  // no result yet: a NaN that no conversion to bfloat16 gives
constexpr int NUM_EXCHANGED = HIDDEN + INNER + HIDDEN;  // results of three products that all programs read

struct Params {
    u16* exchanged;  // [2, NUM_EXCHANGED], at first all NONE. A launch fills one half and empties the other.
    u32 *launches, *arrivals;  // counters: of launches that have ended, and of programs that ended one of three products
    const Weight *o, *gate_up, *down, *qkv;  // [rows, features]
    const float *o_scales, *gate_up_scales, *down_scales, *qkv_scales;  // [rows], of FP8
    const u16 *mlp_norm, *qkv_norm;  // [HIDDEN]
    const u16* attn_out;  // [ATTN]
    u16 *residual, *qkv_out;  // [HIDDEN], which is added to; [QKV]
    float eps;
};

struct Shared {
    u64 full[NUM_STAGES], empty[NUM_STAGES];
    float of_warps[2][NUM_WARPS];
    float sums[MAX_ROWS][NUM_WARPS + 1];  // the odd width spares conflicts of banks
};

// ---- instructions

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred is_done;\n"
        "wait: mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n"
        "@!is_done bra wait; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const void* from, u32 num_bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(num_bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory"); }

// bfloat16: the lower number of a pair, the upper one, and rounding to it.
__device__ __forceinline__ float lower(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u16 to_bfloat16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float rounded(float value) { return lower(to_bfloat16(value)); }

// What other programs write is read past the first-level cache.
__device__ __forceinline__ uint4 load_8(const u16* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ float load_1(const u16* from) {
    u16 bits;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
    return lower(bits);
}
__device__ __forceinline__ void store_1(u16* to, u16 bits) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
}

__device__ __forceinline__ u32 has_none(u32 pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
__device__ __forceinline__ bool is_there(uint4 v) {
    return !(has_none(v.x) | has_none(v.y) | has_none(v.z) | has_none(v.w));
}

// ---- eight weights times eight features

#if IS_FP8

typedef uint2 Weights;
struct Features { u32 pairs[4]; };  // codes / 16, as float16

__device__ __forceinline__ Weights load_weights(u32 from) {
    Weights v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

// Two products of each half of a pair are summed in float16, as in `triton_word_products`.
__device__ __forceinline__ float product_of_4(u32 word, u32 x0, u32 x1) {
    float first, second;
    asm("{ .reg .b16 h0, h1, b0, b1; .reg .b32 a, v;\n"
        "mov.b32 {b0, b1}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 v, b0; mul.rn.f16x2 a, v, %3;\n"
        "cvt.rn.f16x2.e4m3x2 v, b1; fma.rn.f16x2 a, v, %4, a;\n"
        "mov.b32 {h0, h1}, a; cvt.f32.f16 %0, h0; cvt.f32.f16 %1, h1; }"
        : "=f"(first), "=f"(second) : "r"(word), "r"(x0), "r"(x1));
    return first + second;
}

__device__ __forceinline__ float product(Weights w, const Features& x) {
    return product_of_4(w.x, x.pairs[0], x.pairs[1]) + product_of_4(w.y, x.pairs[2], x.pairs[3]);
}

#else

typedef uint4 Weights;
struct Features { float values[8]; };

__device__ __forceinline__ Weights load_weights(u32 from) {
    Weights v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ float product(Weights w, const Features& x) {
    float even = lower(w.x) * x.values[0], odd = upper(w.x) * x.values[1];
    even = fmaf(lower(w.y), x.values[2], even), odd = fmaf(upper(w.y), x.values[3], odd);
    even = fmaf(lower(w.z), x.values[4], even), odd = fmaf(upper(w.z), x.values[5], odd);
    even = fmaf(lower(w.w), x.values[6], even), odd = fmaf(upper(w.w), x.values[7], odd);
    return even + odd;
}

#endif

// ---- the ring

struct Turn {
    u32 stage = 0, parity = 0;  // of the round through the ring
    __device__ __forceinline__ void advance() {
        if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
    }
};

// ---- the warp that copies

struct Rows {
    int first, count;  // of a product, that this program computes
    __device__ __forceinline__ explicit Rows(int of) {
        first = (long long)of * blockIdx.x / gridDim.x;
        count = (long long)of * (blockIdx.x + 1) / gridDim.x - first;
    }
};

__device__ constexpr int next_power_of_2(int n) { return n <= 1 ? 1 : 2 * next_power_of_2((n + 1) / 2); }

constexpr int MAX_STAGE_ROWS = 16;  // whose sums a warp's 32 threads share out

template <int IN> constexpr int FITTING_ROWS = STAGE_BYTES / (IN * (int)sizeof(Weight));
template <int IN> constexpr int ROWS_OF_STAGE = FITTING_ROWS<IN> < MAX_STAGE_ROWS ? FITTING_ROWS<IN> : MAX_STAGE_ROWS;

struct Copies {
    u32 ring, full, empty;
    Turn turn;

    template <int IN> __device__ void rows(const Weight* first_row, int count) {
        wait_barrier(empty + turn.stage * 8, turn.parity ^ 1);
        copy(ring + turn.stage * STAGE_BYTES, first_row, count * IN * sizeof(Weight), full + turn.stage * 8);
        turn.advance();
    }
    template <int IN> __device__ void all(const Weight* matrix, Rows rows_of_program) {
        constexpr int ROWS = ROWS_OF_STAGE<IN>;
        for (int row = 0; row < rows_of_program.count; row += ROWS)
            rows<IN>(matrix + (long long)(rows_of_program.first + row) * IN, min(ROWS, rows_of_program.count - row));
    }
    template <int IN> __device__ void both(const Weight* gate, const Weight* up, Rows rows_of_program) {
        constexpr int ROWS = ROWS_OF_STAGE<IN>;
        for (int row = 0; row < rows_of_program.count; row += ROWS) {
            long long offset = (long long)(rows_of_program.first + row) * IN;
            int count = min(ROWS, rows_of_program.count - row);
            rows<IN>(gate + offset, count);
            rows<IN>(up + offset, count);
        }
    }
};

// ---- the warps that compute

template <int IN> struct Row {
    static constexpr int NUM = IN / FEATURES, PER_WARP = (NUM + NUM_WARPS - 1) / NUM_WARPS;
    static_assert(IN % FEATURES == 0, "a warp multiplies so many features at a time");
    float values[PER_WARP * 8];  // of this thread: zeros beyond the row
};

template <int IN> struct Prepared {
    Features features[Row<IN>::PER_WARP];
    float scale;  // of FP8
};

struct Warps {
    Shared* shared;
    u32 ring, full, empty;
    Turn turn;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 *arrivals, num_awaited;  // arrivals before the next of this program

    template <int IN> __device__ __forceinline__ Row<IN> load(const u16* from) { return load<IN>(from, false); }

    // Waits for results of all programs. Behind it all of them have begun, and have read what came before.
    template <int IN> __device__ __forceinline__ Row<IN> await(const u16* from) {
        sync_warps();
        num_awaited += gridDim.x;
        if (!threadIdx.x) {
            u32 value, num_polls = 0;
            asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
            do {
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(arrivals) : "memory");
                if (++num_polls > MAX_POLLS) __trap();
            } while ((int)(value - num_awaited) < 0);
        }
        sync_warps();
        Row<IN> row = load<IN>(from, true);
        sync_warps();
        return row;
    }

    __device__ __forceinline__ uint4 await(uint4 v, const u16* from) {
        for (u32 num_polls = 0; !is_there(v); v = load_8(from))
            if (++num_polls > MAX_POLLS) __trap();
        return v;
    }

    template <int IN> __device__ __forceinline__ Row<IN> load(const u16* from, bool awaits) {
        constexpr int PER_WARP = Row<IN>::PER_WARP;
        uint4 v[PER_WARP];
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            int part = i * NUM_WARPS + warp;
            v[i] = part < Row<IN>::NUM ? load_8(from + part * FEATURES + lane * 8) : make_uint4(0, 0, 0, 0);
        }
        Row<IN> row;
#pragma unroll
        for (int i = 0; i < PER_WARP; i++) {
            if (awaits) v[i] = await(v[i], from + (i * NUM_WARPS + warp) * FEATURES + lane * 8);
            float* x = row.values + i * 8;
            x[0] = lower(v[i].x), x[1] = upper(v[i].x), x[2] = lower(v[i].y), x[3] = upper(v[i].y);
            x[4] = lower(v[i].z), x[5] = upper(v[i].z), x[6] = lower(v[i].w), x[7] = upper(v[i].w);
        }
        return row;
    }

    // RMSNorm, rounded as `triton_norm.normalize` does.
    template <int IN> __device__ __forceinline__ void normalize(Row<IN>& row, const Row<IN>& gain, float eps) {
        float sum = 0;
#pragma unroll
        for (float x : row.values) sum += x * x;
#pragma unroll
        for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (!lane) shared->of_warps[0][warp] = sum;
        sync_warps();
        sum = 0;
#pragma unroll
        for (float each : shared->of_warps[0]) sum += each;
        float inverse = rsqrtf(sum / IN + eps);
#pragma unroll
        for (int i = 0; i < Row<IN>::PER_WARP * 8; i++)
            row.values[i] = rounded(rounded(row.values[i] * inverse) * gain.values[i]);
    }

    template <int IN> __device__ __forceinline__ Prepared<IN> prepare(const Row<IN>& row) {
        Prepared<IN> prepared;
#if IS_FP8
        float greatest = 0;
#pragma unroll
        for (float x : row.values) greatest = fmaxf(greatest, fabsf(x));
#pragma unroll
        for (int other = 16; other; other /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, other));
        if (!lane) shared->of_warps[1][warp] = greatest;
        sync_warps();
        greatest = 1e-12f;
#pragma unroll
        for (float each : shared->of_warps[1]) greatest = fmaxf(greatest, each);
        float scale = __fdiv_rn(greatest, 448.0f), factor = __fdiv_rn(1.0f, scale);
        prepared.scale = scale * 16;
#pragma unroll
        for (int i = 0; i < Row<IN>::PER_WARP * 4; i++)
            asm("{ .reg .b16 codes; .reg .b32 v, sixteenth; mov.b32 sixteenth, 0x2c002c00;\n"
                "cvt.rn.satfinite.e4m3x2.f32 codes, %2, %1; cvt.rn.f16x2.e4m3x2 v, codes;\n"
                "mul.rn.f16x2 %0, v, sixteenth; }"
                : "=r"(prepared.features[i / 4].pairs[i % 4])
                : "f"(row.values[2 * i] * factor), "f"(row.values[2 * i + 1] * factor));
#else
#pragma unroll
        for (int i = 0; i < Row<IN>::PER_WARP * 8; i++) prepared.features[i / 8].values[i % 8] = row.values[i];
#endif
        return prepared;
    }

    // Multiplies the rows of the next stage, and puts each sum of this warp's features to `first_sum` and later.
    template <int IN> __device__ __forceinline__ void take(const Prepared<IN>& x, int count, int first_sum) {
        constexpr int ROWS = ROWS_OF_STAGE<IN>, PER_WARP = Row<IN>::PER_WARP;
        wait_barrier(full + turn.stage * 8, turn.parity);
        u32 from = ring + turn.stage * STAGE_BYTES + lane * 8 * sizeof(Weight);
        Weights w[ROWS][PER_WARP];
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                int part = i * NUM_WARPS + warp;
                bool is_part = Row<IN>::NUM % NUM_WARPS == 0 || part < Row<IN>::NUM;
                w[row][i] = is_part ? load_weights(from + (row * IN + part * FEATURES) * sizeof(Weight)) : Weights();
            }
        __syncwarp();
        if (!lane) arrive(empty + turn.stage * 8);  // before the products, so that the next copy begins early
        turn.advance();
        constexpr int PADDED = next_power_of_2(ROWS);
        float sums[PADDED] = {};
#pragma unroll
        for (int row = 0; row < ROWS; row++)
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) sums[row] += product(w[row][i], x.features[i]);
        // Threads exchange halves of the rows until each has the sum of one: fewer exchanges than of all rows each time.
        int row = 0, other = 16;
#pragma unroll
        for (int num = PADDED / 2; num; num /= 2, other /= 2) {
            bool is_upper = lane & other;
            row = row * 2 + is_upper;
#pragma unroll
            for (int i = 0; i < num; i++) {
                float given = is_upper ? sums[i] : sums[i + num], kept = is_upper ? sums[i + num] : sums[i];
                sums[i] = kept + __shfl_xor_sync(~0u, given, other);
            }
        }
        bool is_first = lane % (other * 2) == 0;  // of those that sum the row
#pragma unroll
        for (; other; other /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], other);
        if (is_first && row < min(ROWS, count)) shared->sums[first_sum + row][warp] = sums[0];
    }

    template <int IN> __device__ __forceinline__ void multiply(const Prepared<IN>& x, int count) {
        constexpr int ROWS = ROWS_OF_STAGE<IN>;
        for (int row = 0; row < count; row += ROWS) take<IN>(x, count - row, row);
        sync_warps();
    }

    // The rows' sums of gate come first, then those of up.
    template <int IN> __device__ __forceinline__ void multiply_both(const Prepared<IN>& x, int count) {
        constexpr int ROWS = ROWS_OF_STAGE<IN>;
        for (int row = 0; row < count; row += ROWS) {
            take<IN>(x, count - row, row);
            take<IN>(x, count - row, count + row);
        }
        sync_warps();
    }

    // A row's product, rounded. `scale`: of the row of weights.
    template <int IN> __device__ __forceinline__ float sum(const Prepared<IN>& x, int row, float scale) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < NUM_WARPS; i++) sum += shared->sums[row][i];
#if IS_FP8
        sum = sum * x.scale * scale;
#endif
        return rounded(sum);
    }
};

__device__ __forceinline__ float scale_of(const float* scales, bool is_row, int row) {
    return IS_FP8 && is_row ? scales[row] : 0;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS + 32, 1) row_stroke(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char memory[];
    Shared* shared = (Shared*)(memory + NUM_STAGES * STAGE_BYTES);
    const u32 ring = shared_address(memory), full = shared_address(shared->full), empty = shared_address(shared->empty);
    if (!threadIdx.x) {
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            init_barrier(full + stage * 8, 1);
            init_barrier(empty + stage * 8, NUM_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    const Rows hidden(HIDDEN), inner(INNER), qkv(QKV);
    if (threadIdx.x >= NUM_THREADS) {
        if (threadIdx.x > NUM_THREADS) return;
        Copies copies{ring, full, empty};
        copies.all<ATTN>(p.o, hidden);
        copies.both<HIDDEN>(p.gate_up, p.gate_up + (long long)INNER * HIDDEN, inner);
        copies.all<INNER>(p.down, hidden);
        copies.all<HIDDEN>(p.qkv, qkv);
        return;
    }

    Warps warps{shared, ring, full, empty};
    const int row = threadIdx.x;  // of the program's rows, of which this thread completes the product
    const bool is_hidden = row < hidden.count, is_inner = row < inner.count, is_qkv = row < qkv.count;
    const float o_scale = scale_of(p.o_scales, is_hidden, hidden.first + row);
    const float gate_scale = scale_of(p.gate_up_scales, is_inner, inner.first + row);
    const float up_scale = scale_of(p.gate_up_scales, is_inner, INNER + inner.first + row);
    const float down_scale = scale_of(p.down_scales, is_hidden, hidden.first + row);
    const float qkv_scale = scale_of(p.qkv_scales, is_qkv, qkv.first + row);
    asm volatile("griddepcontrol.wait;" ::: "memory");

    u32 num_launches;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(num_launches) : "l"(p.launches) : "memory");
    warps.arrivals = p.arrivals, warps.num_awaited = num_launches * 3 * gridDim.x;
    const u32 half = num_launches % 2;
    u16 *summed = p.exchanged + half * NUM_EXCHANGED, *act = summed + HIDDEN, *summed_again = act + INNER;
    {
        // The next launch fills the other half, which the launch before this one has left full.
        u16* other = p.exchanged + (half ^ 1) * NUM_EXCHANGED;
        if (is_hidden) {
            store_1(other + hidden.first + row, NONE);
            store_1(other + HIDDEN + INNER + hidden.first + row, NONE);
        }
        if (is_inner) store_1(other + HIDDEN + inner.first + row, NONE);
    }

    float residual = is_hidden ? load_1(p.residual + hidden.first + row) : 0;
    {
        auto x = warps.prepare(warps.load<ATTN>(p.attn_out));
        warps.multiply(x, hidden.count);
        if (is_hidden) {
            residual = rounded(warps.sum(x, row, o_scale) + residual);
            store_1(summed + hidden.first + row, to_bfloat16(residual));
        }
    }
    {
        auto gain = warps.load<HIDDEN>(p.mlp_norm);
        auto values = warps.await<HIDDEN>(summed);
        // Now all programs run. Those of the next kernel, which wait for this one, can no longer take their places.
        if (!threadIdx.x) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        warps.normalize(values, gain, p.eps);
        auto x = warps.prepare(values);
        warps.multiply_both(x, inner.count);
        if (is_inner) {
            float gate = warps.sum(x, row, gate_scale), up = warps.sum(x, inner.count + row, up_scale);
            store_1(act + inner.first + row, to_bfloat16(rounded(gate / (1 + __expf(-gate))) * up));
        }
    }
    {
        auto x = warps.prepare(warps.await<INNER>(act));
        warps.multiply(x, hidden.count);
        if (is_hidden) {
            residual = rounded(warps.sum(x, row, down_scale) + residual);
            store_1(summed_again + hidden.first + row, to_bfloat16(residual));
            p.residual[hidden.first + row] = to_bfloat16(residual);
        }
    }
    {
        auto gain = warps.load<HIDDEN>(p.qkv_norm);
        auto values = warps.await<HIDDEN>(summed_again);
        if (!blockIdx.x && !threadIdx.x) *p.launches = num_launches + 1;  // all programs have read it
        warps.normalize(values, gain, p.eps);
        auto x = warps.prepare(values);
        warps.multiply(x, qkv.count);
        if (is_qkv) p.qkv_out[qkv.first + row] = to_bfloat16(warps.sum(x, row, qkv_scale));
    }
}
