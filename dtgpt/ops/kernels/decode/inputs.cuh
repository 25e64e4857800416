// The inputs of a product in shared memory, [ROWS][SIZE]: after LayerNorm or RMSNorm, of the sum with a branch perhaps,
// merged from attention's splits, or as they are.
// WARPS / ROWS warps share a row; a thread has up to MOST chunks of 16 bytes. Of a single row each warp has the segments
// that it will multiply, so that it need not wait for the others.

#pragma once

#include "product.cuh"

constexpr int AT_ONCE = 8;  // splits of attention whose loads are under way together

// x plus the branch, to which the bias is added before if there is one, of 8 columns.
__device__ inline uint4 add_branch(const uint4& x, const float (&branch)[8], const uint4& bias, bool biased) {
    const auto pair = [&](uint32_t x, uint32_t bias, int i) {
        const float2 old = Pairs<T>::widen(x), more = Pairs<T>::widen(bias);
        return Pairs<T>::narrow(__fadd_rn(old.x, biased ? __fadd_rn(branch[i], more.x) : branch[i]),
                                __fadd_rn(old.y, biased ? __fadd_rn(branch[i + 1], more.y) : branch[i + 1]));
    };
    return make_uint4(pair(x.x, bias.x, 0), pair(x.y, bias.y, 2), pair(x.z, bias.z, 4), pair(x.w, bias.w, 6));
}

template <int ROWS, int PROLOGUE, int SIZE, int COLUMNS>
struct Inputs : Place<ROWS, SIZE, COLUMNS> {
    using Base = Place<ROWS, SIZE, COLUMNS>;
    using Base::p;
    using Base::thread;
    using Base::warp;
    using Base::lane;
    using Base::sums;
    using Base::inputs;
    using Base::SETS;

    static constexpr bool OWN = ROWS == 1;
    static constexpr int ROW_WARPS = WARPS / ROWS, SHARERS = ROW_WARPS * WARP, CHUNKS = SIZE / 8;
    static constexpr int MOST = OWN ? (SETS + 1) / 2 : (CHUNKS + SHARERS - 1) / SHARERS;
    __device__ int row() const { return warp / ROW_WARPS; }
    __device__ int share() const { return thread % SHARERS; }
    __device__ int place(int i) const {
        constexpr int HALF = WARP / 2;  // lanes of a segment
        return OWN ? (warp + WARPS * (2 * i + lane / HALF)) * HALF + lane % HALF : share() + i * SHARERS;
    }
    __device__ bool has(int i) const { return place(i) < CHUNKS && row() < p.rows; }
    __device__ void keep(int i, uint4 chunk) const { reinterpret_cast<uint4*>(inputs(row()))[place(i)] = chunk; }
    __device__ static void join_writers() {
        if constexpr (OWN) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }

    struct Chunks {
        uint4 at[MOST];
    };

    // Zeros where there is nothing. A vector [SIZE] is constant; rows were written by other CTAs, and come from L2.
    __device__ Chunks load_vector(const T* source) const {
        Chunks made;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            made.at[i] = has(i) ? __ldg(reinterpret_cast<const uint4*>(source) + place(i)) : uint4{};
        }
        return made;
    }

    __device__ Chunks load_rows() const {
        Chunks made;
        const uint4* const source = reinterpret_cast<const uint4*>(p.x) + row() * CHUNKS;
#pragma unroll
        for (int i = 0; i < MOST; ++i) made.at[i] = has(i) ? __ldcg(source + place(i)) : uint4{};
        return made;
    }

    // x with the branch that all ranks have sent parts of. One CTA keeps it for later kernels.
    __device__ Chunks join(const Chunks& x, const Chunks& bias, uint32_t flag) const {
        Chunks made;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            made.at[i] = uint4{};
            if (!has(i)) continue;
            const size_t chunk = static_cast<size_t>(row()) * CHUNKS + place(i);
            float branch[8];
            receive_sums<RANKS>(branch, p.exchange, 8 * chunk, flag);
            made.at[i] = add_branch(x.at[i], branch, bias.at[i], is_there(p.branch_bias));
            if (blockIdx.x == 0) reinterpret_cast<uint4*>(p.stream)[chunk] = made.at[i];
        }
        return made;
    }

    __device__ void keep_rows(const Chunks& x) const {
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            if (has(i)) keep(i, x.at[i]);
        }
    }

    __device__ static void add_lanes(double& sum, double& squares) {
#pragma unroll
        for (int distance = WARP / 2; distance > 0; distance /= 2) {
            if constexpr (!RMS) sum += __shfl_xor_sync(~0u, sum, distance);
            squares += __shfl_xor_sync(~0u, squares, distance);
        }
    }

    __device__ static uint32_t normal(uint32_t pair, uint32_t weights, uint32_t biases, float mean, float scale) {
        const float2 x = Pairs<T>::widen(pair), weight = Pairs<T>::widen(weights), bias = Pairs<T>::widen(biases);
        if constexpr (RMS) {
            return Pairs<T>::narrow(__fmul_rn(__fmul_rn(x.x, scale), weight.x), __fmul_rn(__fmul_rn(x.y, scale), weight.y));
        }
        return Pairs<T>::narrow(__fmaf_rn(__fmul_rn(__fsub_rn(x.x, mean), scale), weight.x, bias.x),
                                __fmaf_rn(__fmul_rn(__fsub_rn(x.y, mean), scale), weight.y, bias.y));
    }

    // LayerNorm or RMSNorm, with sums in fp64: of 16-bit numbers they are exact for practical purposes.
    __device__ void keep_normal(const Chunks& x, const Chunks& weight, const Chunks& bias) const {
        double sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
#pragma unroll
            for (const uint32_t pair : {x.at[i].x, x.at[i].y, x.at[i].z, x.at[i].w}) {
                const float2 values = Pairs<T>::widen(pair);
                const double a = values.x, b = values.y;
                if constexpr (!RMS) sum += a + b;
                squares += fma(a, a, b * b);
            }
        }
        add_lanes(sum, squares);
        if constexpr (ROW_WARPS > 1) {
            if (lane == 0) sums()[warp] = make_double2(sum, squares);
            __syncthreads();
            double2 all[ROW_WARPS];
#pragma unroll
            for (int i = 0; i < ROW_WARPS; ++i) all[i] = sums()[row() * ROW_WARPS + i];
#pragma unroll
            for (int distance = ROW_WARPS / 2; distance > 0; distance /= 2) {
#pragma unroll
                for (int i = 0; i < distance; ++i) all[i].x += all[i + distance].x, all[i].y += all[i + distance].y;
            }
            sum = all[0].x, squares = all[0].y;
        }
        constexpr double RECIPROCAL = 1.0 / SIZE;
        const double exact_mean = RMS ? 0.0 : sum * RECIPROCAL;
        const double variance = fmax(squares * RECIPROCAL - exact_mean * exact_mean, 0.0);
        const float mean = static_cast<float>(exact_mean), scale = reciprocal_root(variance + p.eps);
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const uint4 v = x.at[i], w = weight.at[i], b = bias.at[i];
            if (has(i)) {
                keep(i, make_uint4(normal(v.x, w.x, b.x, mean, scale), normal(v.y, w.y, b.y, mean, scale),
                                   normal(v.z, w.z, b.z, mean, scale), normal(v.w, w.w, b.w, mean, scale)));
            }
        }
    }

    // The merge of attention's `used` splits: four columns of a head are an item, of which a thread takes AT_A_TIME
    // together. The threads of a head, an aligned part of a warp of at least AT_ONCE lanes, share the splits' states.
    static_assert(PROLOGUE != MERGE || HEAD >= 4 * AT_ONCE, "a head has AT_ONCE threads");
    static_assert(SHARERS * 4 == ROW_WARPS * SEGMENT, "a warp merges segments that it will multiply");
    static constexpr int ITEMS = SIZE / 4, AT_A_TIME = ITEMS > SHARERS ? 2 : 1;
    __device__ void keep_merged(int used) const {
        const unsigned group = 0xffu << (lane & 24);  // the AT_ONCE lanes that share states: others may have ended
#pragma unroll 1
        for (int start = share(); start < ITEMS; start += AT_A_TIME * SHARERS) {
            const float2* state[AT_A_TIME];
            const float4* partial[AT_A_TIME];
            float largest[AT_A_TIME], total[AT_A_TIME] = {};
            float4 made[AT_A_TIME] = {};
#pragma unroll
            for (int n = 0; n < AT_A_TIME; ++n) {
                const int i = start + n * SHARERS < ITEMS ? start + n * SHARERS : start;
                const size_t cell = (static_cast<size_t>(row()) * (SIZE / HEAD) + i / (HEAD / 4)) * SPLITS;
                state[n] = p.state + cell, largest[n] = -INFINITY;
                partial[n] = reinterpret_cast<const float4*>(p.partial + cell * HEAD) + i % (HEAD / 4);
                if constexpr (SPLITS > AT_ONCE) {
#pragma unroll 1
                    for (int j = used > AT_ONCE ? lane % AT_ONCE : used; j < used; j += AT_ONCE) {
                        largest[n] = fmaxf(largest[n], __ldcg(state[n] + j).x);
                    }
                }
            }
#pragma unroll 1
            for (int base = 0; base < SPLITS && (base == 0 || base < used); base += AT_ONCE) {
                const int mine = base + lane % AT_ONCE;
                float2 own[AT_A_TIME];
                float4 values[AT_A_TIME][AT_ONCE];
#pragma unroll
                for (int n = 0; n < AT_A_TIME; ++n) {
                    own[n] = mine < used ? __ldcg(state[n] + mine) : make_float2(-INFINITY, 0);
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j) {
                        values[n][j] = base + j < used ? __ldcg(partial[n] + (base + j) * (HEAD / 4)) : float4{};
                    }
                }
#pragma unroll
                for (int n = 0; n < AT_A_TIME; ++n) {
                    if (base == 0) {
                        largest[n] = fmaxf(largest[n], own[n].x);
#pragma unroll
                        for (int distance = AT_ONCE / 2; distance > 0; distance /= 2) {
                            largest[n] = fmaxf(largest[n], __shfl_xor_sync(group, largest[n], distance));
                        }
                    }
                    const float factor_of_own = exp2_approx(__fsub_rn(own[n].x, largest[n]));
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j) {  // a split that is not there adds 0
                        const float factor = __shfl_sync(group, factor_of_own, j, AT_ONCE);
                        total[n] = __fmaf_rn(factor, __shfl_sync(group, own[n].y, j, AT_ONCE), total[n]);
                        made[n].x = __fmaf_rn(factor, values[n][j].x, made[n].x);
                        made[n].y = __fmaf_rn(factor, values[n][j].y, made[n].y);
                        made[n].z = __fmaf_rn(factor, values[n][j].z, made[n].z);
                        made[n].w = __fmaf_rn(factor, values[n][j].w, made[n].w);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < AT_A_TIME; ++n) {
                const int i = start + n * SHARERS;
                if (i >= ITEMS) continue;
                reinterpret_cast<uint2*>(inputs(row()))[i] =
                    make_uint2(Pairs<T>::narrow(__fdiv_rn(made[n].x, total[n]), __fdiv_rn(made[n].y, total[n])),
                               Pairs<T>::narrow(__fdiv_rn(made[n].z, total[n]), __fdiv_rn(made[n].w, total[n])));
            }
        }
    }
};
