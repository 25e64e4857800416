// Attention over a cache, one query position a sequence, for a few sequences: the splits of cached_kernels.py, bit for
// bit. A CTA has 128 positions of a head of k and v. It copies the older ones while the kernel before it still runs.

#pragma once

#include "sizes.cuh"

constexpr int SPLIT = 128;
constexpr int SPLITS = (LENGTH + SPLIT - 1) / SPLIT;
constexpr int QUERIES = PACKED / HEAD / KV_HEADS - 2;  // query heads of a head of k and v
static_assert(QUERIES <= 8, "a tensor-core step has 8 rows");

struct Attention {
    const T* q;         // [rows, PACKED]: for each kv head its query heads, and room for k and v
    const T* keys;      // [slots, KV_HEADS, LENGTH, HEAD]
    const T* values;
    float* partial;     // [rows, heads, SPLITS, HEAD]
    float2* state;      // [rows, heads, SPLITS]: the maximum and the sum of each split
    const int64_t* slots;      // [rows]
    const int64_t* positions;  // [rows]
    int rows;
    float scale;        // log2(e) / sqrt(HEAD)
};

struct Split {
    const Attention& p;
    char* const shared;
    const int thread, warp, lane, split, head, row;

    static constexpr int TILES = SPLIT / 8 / WARPS;  // tiles of 8 positions of a warp
    static constexpr int CHUNKS = HEAD / 8, COLUMN_TILES = (CHUNKS + WARPS - 1) / WARPS;
    static constexpr int STRIDE = (HEAD + 8) * 2, P_STRIDE = (SPLIT + 8) * 2;  // bytes: 16 more against bank conflicts
    static constexpr int KEYS = 0, VALUES = KEYS + SPLIT * STRIDE, QUERY = VALUES + SPLIT * STRIDE;
    static constexpr int PROBABILITIES = QUERY + 8 * STRIDE, MAXIMA = PROBABILITIES + 8 * P_STRIDE;
    static constexpr int BYTES = MAXIMA + 8 * WARPS * 4;

    __device__ uint32_t at(int offset) const { return shared_address(shared) + offset; }

    // The first chunk of this split's positions in the cache.
    __device__ const uint4* cached(const T* cache, size_t slot) const {
        return reinterpret_cast<const uint4*>(cache) +
               ((slot * KV_HEADS + head) * LENGTH + static_cast<size_t>(split) * SPLIT) * CHUNKS;
    }

    __device__ uint4* chunk(int offset, int i) const {
        return reinterpret_cast<uint4*>(shared + offset + i / CHUNKS * STRIDE) + i % CHUNKS;
    }

    // Copies positions 0 to `older` - 1 of a split, and writes zeros behind them: values that memory holds there, NaN
    // perhaps, would not vanish when they are multiplied by 0.
    __device__ void copy_older(const uint4* keys, const uint4* values, int older) const {
        const uint64_t policy = evict_first_policy();
#pragma unroll
        for (int i = thread; i < SPLIT * CHUNKS; i += THREADS) {
            if (i / CHUNKS < older) {
                copy_16(shared_address(chunk(KEYS, i)), keys + i, policy);
                copy_16(shared_address(chunk(VALUES, i)), values + i, policy);
            } else {
                *chunk(VALUES, i) = uint4{};
            }
        }
    }

    // The newest position, if it is `older` of the split.
    __device__ void load_newest(const uint4* keys, const uint4* values, int older) const {
        if (thread < CHUNKS && older < SPLIT) *chunk(KEYS, older * CHUNKS + thread) = __ldcg(keys + older * CHUNKS + thread);
        const int second = thread - 2 * WARP;
        if (second >= 0 && second < CHUNKS && older < SPLIT) {
            *chunk(VALUES, older * CHUNKS + second) = __ldcg(values + older * CHUNKS + second);
        }
    }

    __device__ void load_queries() const {
        const int i = thread - 4 * WARP;
        if (i < 0 || i >= QUERIES * CHUNKS) return;
        const uint4* const q = reinterpret_cast<const uint4*>(p.q) + (row * (PACKED / HEAD) + head * (QUERIES + 2)) * CHUNKS;
        *chunk(QUERY, i) = __ldcg(q + i);
    }

    // s: of query lane / 4, positions 8 (TILES warp + i) + 2 (lane % 4) and the next one.
    __device__ void scores(int visible, float (&s)[TILES][2]) const {
        const int query = lane % 8 < QUERIES ? lane % 8 : 0;
        float c[TILES][4] = {};
#pragma unroll
        for (int j = 0; j < HEAD / 32; ++j) {
            uint32_t a[4], b[TILES][4];
            load_matrices(a, at(QUERY) + query * STRIDE + lane / 8 * 16 + 64 * j);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                load_matrices(b[i], at(KEYS) + (8 * (TILES * warp + i) + lane % 8) * STRIDE + lane / 8 * 16 + 64 * j);
            }
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
#pragma unroll
                for (int i = 0; i < TILES; ++i) Pairs<T>::multiply(c[i], a[half], a[half + 1], b[i][half], b[i][half + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int position = 8 * (TILES * warp + i) + lane % 4 * 2;
            s[i][0] = position < visible ? __fmul_rn(c[i][0], p.scale) : -INFINITY;
            s[i][1] = position + 1 < visible ? __fmul_rn(c[i][1], p.scale) : -INFINITY;
        }
    }

    // The maximum of query lane / 4 over the split.
    __device__ float maximum(const float (&s)[TILES][2]) const {
        float* const maxima = reinterpret_cast<float*>(shared + MAXIMA);
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < TILES; ++i) most = fmaxf(most, fmaxf(s[i][0], s[i][1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        if (lane % 4 == 0) maxima[lane / 4 * WARPS + warp] = most;
        __syncthreads();
        const float4* const all = reinterpret_cast<const float4*>(maxima + lane / 4 * WARPS);
        const float4 low = all[0], high = all[1];
        return fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
    }

    __device__ void store_probabilities(const float (&s)[TILES][2], float most) const {
        char* const to = shared + PROBABILITIES + lane / 4 * P_STRIDE + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            *reinterpret_cast<uint32_t*>(to + (TILES * warp + i) * 16) = Pairs<T>::narrow(
                exp2_approx(__fsub_rn(s[i][0], most)), exp2_approx(__fsub_rn(s[i][1], most)));
        }
    }

    // o[i]: probabilities times columns 8 (warp + WARPS i) to ... + 7 of the values; l: their sum.
    __device__ void weigh(float (&o)[COLUMN_TILES][4], float (&l)[4]) const {
        const uint32_t probabilities = at(PROBABILITIES) + lane % 8 * P_STRIDE + lane / 8 * 16;
#pragma unroll
        for (int j = 0; j < SPLIT / 32; ++j) {
            uint32_t a[4], b[COLUMN_TILES][4];
            load_matrices(a, probabilities + 64 * j);
#pragma unroll
            for (int i = 0; i < COLUMN_TILES; ++i) {
                if (warp + WARPS * i >= CHUNKS) continue;
                load_transposed_matrices(b[i], at(VALUES) + (32 * j + lane) * STRIDE + (warp + WARPS * i) * 16);
            }
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
#pragma unroll
                for (int i = 0; i < COLUMN_TILES; ++i) {
                    if (warp + WARPS * i >= CHUNKS) continue;
                    Pairs<T>::multiply(o[i], a[half], a[half + 1], b[i][half], b[i][half + 1]);
                }
                if (warp == 0) Pairs<T>::multiply(l, a[half], a[half + 1], Pairs<T>::ONES, Pairs<T>::ONES);
            }
        }
    }

    __device__ void store(const float (&o)[COLUMN_TILES][4], const float (&l)[4], float most) const {
        const int query = lane / 4;
        if (query >= QUERIES) return;
        const size_t cell = ((static_cast<size_t>(row) * KV_HEADS + head) * QUERIES + query) * SPLITS + split;
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; ++i) {
            if (warp + WARPS * i >= CHUNKS) continue;
            float* const to = p.partial + cell * HEAD + (warp + WARPS * i) * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(o[i][0], o[i][1]);
        }
        if (warp == 0 && lane % 4 == 0) p.state[cell] = make_float2(most, l[0]);
    }

    __device__ void run() const {
        launch_successor();
        const bool idle = row >= p.rows;  // keeps its place on the multiprocessor until it has waited
        const size_t slot = idle ? 0 : p.slots[row];
        // positions of this split before the newest
        const int older = idle ? -1 : static_cast<int>(p.positions[row]) - split * SPLIT;
        const uint4 *const keys = cached(p.keys, slot), *const values = cached(p.values, slot);
        if (older >= 0) copy_older(keys, values, min(older, SPLIT));
        wait_for_predecessor();
        if (older < 0) return;
        load_newest(keys, values, older);
        load_queries();
        wait_for_copies();
        __syncthreads();
        float s[TILES][2], o[COLUMN_TILES][4] = {}, l[4] = {};
        scores(min(older + 1, SPLIT), s);
        const float most = maximum(s);
        store_probabilities(s, most);
        __syncthreads();
        weigh(o, l);
        store(o, l, most);
    }
};

__global__ void __launch_bounds__(THREADS, 2) attend_split(const __grid_constant__ Attention p) {
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, index = blockIdx.x, others = index / SPLITS;
    Split{p, shared, thread, thread / WARP, thread % WARP, index % SPLITS, others % KV_HEADS, others / KV_HEADS}.run();
}

// Null, or why nothing was launched. As many CTAs as multiprocessors at least: else kernels after this one would have two
// CTAs on some.
extern "C" const char* launch_attention(const Attention* p, cudaStream_t stream) {
    const int ctas = SPLITS * KV_HEADS * p->rows;
    return launch_dependent(attend_split, ctas < CTAS ? CTAS : ctas, Split::BYTES, *p, true, stream);
}
