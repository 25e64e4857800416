// The outputs of a product: to the cache, through GELU or SwiGLU, onto the residual stream, or to all tensor-parallel
// ranks.

#pragma once

#include <type_traits>

#include "chains.cuh"
#include "ring.cuh"

template <int ROWS, int SIZE, int COLUMNS>
using Multiplication =
    std::conditional_t<Place<ROWS, SIZE, COLUMNS>::KEPT, Chains<ROWS, SIZE, COLUMNS>, Ring<ROWS, SIZE, COLUMNS>>;

template <int ROWS, int EPILOGUE, int SIZE, int COLUMNS>
struct Outputs : Multiplication<ROWS, SIZE, COLUMNS> {
    using Base = Multiplication<ROWS, SIZE, COLUMNS>;
    using Base::p;
    using Base::first;
    using Base::count;
    using Base::partials;
    using Base::SEGMENTS;

    __device__ float total(int row, int column) const {
        float total = 0;
#pragma unroll
        for (int base = 0; base < SEGMENTS; base += GROUP) {
            float group = partials(base, row)[column];
#pragma unroll
            for (int i = base + 1; i < base + GROUP && i < SEGMENTS; ++i) {
                group = __fadd_rn(group, partials(i, row)[column]);
            }
            total = base == 0 ? group : __fadd_rn(total, group);
        }
        return total;
    }

    // Columns of an output: of SwiGLU a gate and what it multiplies.
    static constexpr int WIDE = EPILOGUE == ACTIVATION ? UNIT : 1;
    __device__ int items() const { return p.rows * (count / WIDE); }

    // GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415), written as t / (1 + exp(-2 u)).
    __device__ static float gelu(float t) {
        constexpr float CUBIC = static_cast<float>(0.7978845608028654 * 0.044715), LINEAR = 0.7978845608028654f;
        const float u = __fmul_rn(t, __fmaf_rn(__fmul_rn(t, t), CUBIC, LINEAR));
        return __fdiv_rn(t, __fadd_rn(1.0f, exp2_approx(__fmul_rn(u, -2.8853900817779268f))));
    }

    // SiLU (Hendrycks and Gimpel 2016), written as t / (1 + exp(-t)).
    __device__ static float silu(float t) {
        return __fdiv_rn(t, __fadd_rn(1.0f, exp2_approx(__fmul_rn(t, -1.4426950408889634f))));
    }

    // An output of this thread, with what is loaded early.
    struct Output {
        int row, n;
        unsigned short bias;
        uint32_t flag;
        int64_t slot, position;
    };

    __device__ Output output(int item) const {
        Output o{};
        const int most = count / WIDE, own = COLUMNS / UNIT < CTAS ? max(most, 1) : most;  // of a small model perhaps none
        o.row = ROWS == 1 ? 0 : item / own, o.n = first / WIDE + item - o.row * own;
        if constexpr (EPILOGUE == SEND) {
            o.flag = p.exchange.flag(p.index);
            return o;
        }
        if (is_there(p.bias)) o.bias = __ldg(reinterpret_cast<const unsigned short*>(p.bias) + o.n);
        if constexpr (EPILOGUE == CACHE) o.slot = p.slots[o.row], o.position = p.positions[o.row];
        return o;
    }

    __device__ unsigned short residual_of(const Output& o) const {
        if constexpr (EPILOGUE != RESIDUAL) return 0;
        return __ldcg(reinterpret_cast<const unsigned short*>(p.residual) + o.row * COLUMNS + o.n);
    }

    __device__ T* target(const Output& o) const {
        if constexpr (EPILOGUE == CACHE) {  // the weight's rows are, for each kv head: its query heads, its key, its value
            constexpr int HEADS = PACKED / HEAD / KV_HEADS;
            const int head = o.n / HEAD, kv_head = head / HEADS, part = head % HEADS;
            const size_t line = (static_cast<size_t>(o.slot) * KV_HEADS + kv_head) * LENGTH + o.position;
            if (part >= HEADS - 2) return (part == HEADS - 2 ? p.keys : p.values) + line * HEAD + o.n % HEAD;
        }
        return p.out + o.row * (COLUMNS / WIDE) + o.n;
    }

    __device__ static float widen(unsigned short bits) { return Pairs<T>::widen(*reinterpret_cast<const T*>(&bits)); }

    __device__ void send_part(const Output& o) const {
        const uint64_t word = word_of(__float_as_uint(total(o.row, o.n - first)), o.flag);
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            send(p.exchange.place(rank, p.exchange.rank, o.flag) + o.row * COLUMNS + o.n, word);
        }
    }

    __device__ void finish(const Output& o, unsigned short residual) const {
        if constexpr (EPILOGUE == SEND) return send_part(o);
        float t = total(o.row, WIDE * o.n - first);
        if (is_there(p.bias)) t = __fadd_rn(t, widen(o.bias));
        if constexpr (EPILOGUE == ACTIVATION) t = GATED ? __fmul_rn(silu(t), total(o.row, WIDE * o.n + 1 - first)) : gelu(t);
        if constexpr (EPILOGUE == RESIDUAL) t = __fadd_rn(widen(residual), t);
        *target(o) = Pairs<T>::narrow(t);
    }
};
