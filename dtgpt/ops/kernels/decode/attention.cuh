// Attention over a cache, one query position a sequence, for a few sequences: the splits of cached_kernels.py, bit for
// bit. A CTA has 128 positions of a head of k and v, or every SPREAD-th such split of a long slot. It copies the older
// ones while the kernel before it still runs. Where positions are rotary it normalises and rotates the heads of the new
// token when it reads them, and the CTA of the newest position writes its key and value to the cache.

#pragma once

#include "sizes.cuh"

constexpr int SPLIT = 128;
constexpr int SPLITS = (LENGTH + SPLIT - 1) / SPLIT;
constexpr int QUERIES = PACKED / HEAD / KV_HEADS - 2;  // query heads of a head of k and v
static_assert(QUERIES <= 8, "a tensor-core step has 8 rows");
// CTAs of a head of k and v: with more than one for each multiprocessor the kernels behind would be spread unevenly.
constexpr int SPREAD = KV_HEADS > CTAS ? 1 : (SPLITS < CTAS / KV_HEADS ? SPLITS : CTAS / KV_HEADS);

struct Attention {
    const T* q;         // [rows, PACKED]: for each kv head its query heads; where positions are rotary, its k and v
    T* keys;            // [slots, KV_HEADS, LENGTH, HEAD]
    T* values;
    float* partial;     // [rows, heads, SPLITS, HEAD]
    float2* state;      // [rows, heads, SPLITS]: the maximum and the sum of each split
    const int64_t* slots;      // [rows]
    const int64_t* positions;  // [rows]
    int rows;
    float scale;               // log2(e) / sqrt(HEAD)
    const float* table;        // [2, places, HEAD / 2]: cosine and sine of each angle
    const T* q_norm;           // [HEAD]
    const T* k_norm;
    int places;
    float eps;                 // of q_norm and k_norm
};

// What turns a thread's 8 columns of a head of q or k, loaded before these are there.
struct Turn {
    float cosine[8], sine[8];
    uint4 weight, of_others;  // of the norm, of these columns and of those with which they are rotated
    static constexpr int CHUNKS = HEAD / 8;

    __device__ Turn(const Attention& p, const T* norm, int position, int chunk) {
        if constexpr (POSITIONS == LEARNED) return;
        constexpr int HALF = HEAD / 2;
        const float* const cosines = p.table + static_cast<size_t>(position) * HALF + chunk * 8 % HALF;
        const float* const sines = cosines + static_cast<size_t>(p.places) * HALF;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            cosine[i] = __ldg(cosines + i), sine[i] = chunk < CHUNKS / 2 ? -__ldg(sines + i) : __ldg(sines + i);
        }
        if constexpr (POSITIONS == ROTARY_OF_NORMED) {
            weight = __ldg(reinterpret_cast<const uint4*>(norm) + chunk);
            of_others = __ldg(reinterpret_cast<const uint4*>(norm) + other(chunk));
        }
    }

    __device__ static int other(int chunk) { return (chunk + CHUNKS / 2) % CHUNKS; }

    // A chunk of a head; CHUNKS lanes, an aligned part of a warp, load the head together.
    __device__ uint4 load(const uint4* head, int chunk, float eps) const {
        const uint4 own = __ldcg(head + chunk), others = __ldcg(head + other(chunk));
        float scale = 1;
        if constexpr (POSITIONS == ROTARY_OF_NORMED) {
            double squares = 0;
            for (const uint32_t pair : {own.x, own.y, own.z, own.w}) {
                const float2 values = Pairs<T>::widen(pair);
                const double a = values.x, b = values.y;
                squares += fma(a, a, b * b);
            }
            const unsigned group = (HEAD == 128 ? 0xffffu : 0xffu) << (threadIdx.x % WARP & ~(CHUNKS - 1));
#pragma unroll
            for (int distance = CHUNKS / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(group, squares, distance);
            scale = reciprocal_root(squares * (1.0 / HEAD) + eps);
        }
        return make_uint4(pair(own.x, others.x, weight.x, of_others.x, scale, 0),
                          pair(own.y, others.y, weight.y, of_others.y, scale, 2),
                          pair(own.z, others.z, weight.z, of_others.z, scale, 4),
                          pair(own.w, others.w, weight.w, of_others.w, scale, 6));
    }

    __device__ uint32_t pair(uint32_t own, uint32_t others, uint32_t w, uint32_t of_others, float scale, int i) const {
        float2 x = Pairs<T>::widen(own), y = Pairs<T>::widen(others);
        if constexpr (POSITIONS == ROTARY_OF_NORMED) {
            const float2 a = Pairs<T>::widen(w), b = Pairs<T>::widen(of_others);
            x = make_float2(__fmul_rn(__fmul_rn(x.x, scale), a.x), __fmul_rn(__fmul_rn(x.y, scale), a.y));
            y = make_float2(__fmul_rn(__fmul_rn(y.x, scale), b.x), __fmul_rn(__fmul_rn(y.y, scale), b.y));
        }
        return Pairs<T>::narrow(__fmaf_rn(x.x, cosine[i], __fmul_rn(y.x, sine[i])),
                                __fmaf_rn(x.y, cosine[i + 1], __fmul_rn(y.y, sine[i + 1])));
    }
};

struct Split {
    const Attention& p;
    char* const shared;
    const int thread, warp, lane, first, head, row;  // first: split

    static constexpr int TILES = SPLIT / 8 / WARPS;  // tiles of 8 positions of a warp
    static constexpr int CHUNKS = HEAD / 8, COLUMN_TILES = (CHUNKS + WARPS - 1) / WARPS;
    static constexpr int STRIDE = (HEAD + 8) * 2, P_STRIDE = (SPLIT + 8) * 2;  // bytes: 16 more against bank conflicts
    static constexpr int KEYS = 0, VALUES = KEYS + SPLIT * STRIDE, QUERY = VALUES + SPLIT * STRIDE;
    static constexpr int PROBABILITIES = QUERY + 8 * STRIDE, MAXIMA = PROBABILITIES + 8 * P_STRIDE;
    static constexpr int BYTES = MAXIMA + 8 * WARPS * 4;

    __device__ uint32_t at(int offset) const { return shared_address(shared) + offset; }

    // The first chunk of a split's positions in the cache.
    __device__ uint4* cached(T* cache, size_t slot, int split) const {
        return reinterpret_cast<uint4*>(cache) +
               ((slot * KV_HEADS + head) * LENGTH + static_cast<size_t>(split) * SPLIT) * CHUNKS;
    }

    __device__ uint4* chunk(int offset, int i) const {
        return reinterpret_cast<uint4*>(shared + offset + i / CHUNKS * STRIDE) + i % CHUNKS;
    }

    // Copies positions 0 to `older` - 1 of a split, and writes zeros behind the newest: values that memory holds there,
    // NaN perhaps, would not vanish when they are multiplied by 0.
    __device__ void copy_older(const uint4* keys, const uint4* values, int older) const {
        const uint64_t policy = evict_first_policy();
#pragma unroll
        for (int i = thread; i < SPLIT * CHUNKS; i += THREADS) {
            if (i / CHUNKS < older) {
                copy_16(shared_address(chunk(KEYS, i)), keys + i, policy);
                copy_16(shared_address(chunk(VALUES, i)), values + i, policy);
            } else if (i / CHUNKS > older) {
                *chunk(VALUES, i) = uint4{};
            }
        }
    }

    // The heads of the new token that share a head of k and v: those of q, then k, then v.
    __device__ const uint4* newest_heads() const {
        return reinterpret_cast<const uint4*>(p.q) + (row * (PACKED / HEAD) + head * (QUERIES + 2)) * CHUNKS;
    }

    // The newest position, if it is `older` of the split: from the cache, or where positions are rotary, to it, too.
    __device__ void load_newest(const Turn& turn, uint4* keys, uint4* values, int older) const {
        const int second = thread - 2 * WARP, at = older * CHUNKS;
        if (thread < CHUNKS && older < SPLIT) {
            if constexpr (POSITIONS == LEARNED) {
                *chunk(KEYS, at + thread) = __ldcg(keys + at + thread);
            } else {
                *chunk(KEYS, at + thread) = keys[at + thread] = turn.load(newest_heads() + QUERIES * CHUNKS, thread, p.eps);
            }
        }
        if (second >= 0 && second < CHUNKS && older < SPLIT) {
            if constexpr (POSITIONS == LEARNED) {
                *chunk(VALUES, at + second) = __ldcg(values + at + second);
            } else {
                *chunk(VALUES, at + second) = values[at + second] =
                    __ldcg(newest_heads() + (QUERIES + 1) * CHUNKS + second);
            }
        }
    }

    __device__ void load_queries(const Turn& turn) const {
        const int i = thread - 4 * WARP;
        if (i < 0 || i >= QUERIES * CHUNKS) return;
        if constexpr (POSITIONS == LEARNED) {
            *chunk(QUERY, i) = __ldcg(newest_heads() + i);
        } else {
            *chunk(QUERY, i) = turn.load(newest_heads() + i / CHUNKS * CHUNKS, i % CHUNKS, p.eps);
        }
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

    __device__ void store(int split, const float (&o)[COLUMN_TILES][4], const float (&l)[4], float most) const {
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

    // A split whose keys and values are on their way. older: of its positions, those before the newest.
    __device__ void attend(int split, int older) const {
        wait_for_copies();
        __syncthreads();
        float s[TILES][2], o[COLUMN_TILES][4] = {}, l[4] = {};
        scores(min(older + 1, SPLIT), s);
        const float most = maximum(s);
        store_probabilities(s, most);
        __syncthreads();
        weigh(o, l);
        store(split, o, l, most);
    }

    __device__ void run() const {
        launch_successor();
        const bool idle = row >= p.rows;  // keeps its place on the multiprocessor until it has waited
        const size_t slot = idle ? 0 : p.slots[row];
        const int position = idle ? -1 : static_cast<int>(p.positions[row]);
        int older = idle ? -1 : position - first * SPLIT;
        uint4 *keys = cached(p.keys, slot, first), *values = cached(p.values, slot, first);
        if (older >= 0) copy_older(keys, values, min(older, SPLIT));
        const Turn turn(p, thread < 4 * WARP ? p.k_norm : p.q_norm, max(position, 0), thread % CHUNKS);
        wait_for_predecessor();
        if (older < 0) return;
        load_newest(turn, keys, values, older);
        load_queries(turn);
        attend(first, older);
        if constexpr (SPREAD < SPLITS) {
#pragma unroll 1
            for (int split = first + SPREAD; split * SPLIT <= position; split += SPREAD) {
                older = position - split * SPLIT, keys = cached(p.keys, slot, split), values = cached(p.values, slot, split);
                __syncthreads();  // the split before this one has been read
                copy_older(keys, values, min(older, SPLIT));
                load_newest(turn, keys, values, older);
                attend(split, older);
            }
        }
    }
};

__global__ void __launch_bounds__(THREADS, 2) attend_split(const __grid_constant__ Attention p) {
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, index = blockIdx.x, others = index / SPREAD;
    Split{p, shared, thread, thread / WARP, thread % WARP, index % SPREAD, others % KV_HEADS, others / KV_HEADS}.run();
}

// Null, or why nothing was launched. As many CTAs as multiprocessors at least: else kernels after this one would have two
// CTAs on some.
extern "C" const char* launch_attention(const Attention* p, cudaStream_t stream) {
    const int ctas = SPREAD * KV_HEADS * p->rows;
    return launch_dependent(attend_split, ctas < CTAS ? CTAS : ctas, Split::BYTES, *p, true, stream);
}
