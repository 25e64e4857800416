// Octets: eight neighbouring elements of a row, in 16 bits one access of 16 bytes, that a thread holds as raw words.

#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int OCTET = 8;
constexpr unsigned ALL = 0xff;  // the bits of an octet

template <typename T>
struct alignas(16) Octet {
    unsigned word[OCTET * sizeof(T) / 4];
};

template <typename To, typename From>
__device__ To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

template <typename T>
struct Pair;  // of 16-bit elements: the lower half of a word is the first
template <>
struct Pair<__half> {
    using Type = __half2;
    static __device__ float2 widen(unsigned word) { return __half22float2(same_bits<Type>(word)); }
    static __device__ Type narrow(float a, float b) { return __floats2half2_rn(a, b); }
};
template <>
struct Pair<__nv_bfloat16> {
    using Type = __nv_bfloat162;
    static __device__ float2 widen(unsigned word) {  // __bfloat1622float2 is compiled to more instructions
        return make_float2(same_bits<float>(word << 16), same_bits<float>(word & 0xffff0000));
    }
    static __device__ Type narrow(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

template <typename T>
__device__ void widen(const Octet<T>& octet, float (&values)[OCTET]) {
#pragma unroll
    for (int i = 0; i < OCTET / 2; ++i) {
        const float2 pair = Pair<T>::widen(octet.word[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

template <>
__device__ void widen(const Octet<float>& octet, float (&values)[OCTET]) {
#pragma unroll
    for (int i = 0; i < OCTET; ++i) values[i] = same_bits<float>(octet.word[i]);
}

template <typename T>
__device__ Octet<T> narrow(const float (&values)[OCTET]) {
    Octet<T> octet;
#pragma unroll
    for (int i = 0; i < OCTET / 2; ++i) {
        octet.word[i] = same_bits<unsigned>(Pair<T>::narrow(values[2 * i], values[2 * i + 1]));
    }
    return octet;
}

template <>
__device__ Octet<float> narrow<float>(const float (&values)[OCTET]) {
    return same_bits<Octet<float>>(values);
}

// The larger of `largest` and of an octet's elements, by pairs where the hardware compares pairs.
template <typename T>
__device__ float larger(float largest, const Octet<T>& octet) {
    using Type = typename Pair<T>::Type;
    Type pair = same_bits<Type>(octet.word[0]);
#pragma unroll
    for (int i = 1; i < OCTET / 2; ++i) pair = __hmax2(pair, same_bits<Type>(octet.word[i]));
    const float2 values = Pair<T>::widen(same_bits<unsigned>(pair));
    return fmaxf(largest, fmaxf(values.x, values.y));
}

template <>
__device__ float larger(float largest, const Octet<float>& octet) {
#pragma unroll
    for (const unsigned& word : octet.word) largest = fmaxf(largest, same_bits<float>(word));
    return largest;
}

// Puts `value` where a bit is 0. Octets are rarely touched: most are shown and kept as a whole.
template <typename T>
__device__ void replace(Octet<T>& octet, unsigned bits, float value) {
    if (bits == ALL) return;
    float values[OCTET];
    widen(octet, values);
#pragma unroll
    for (int i = 0; i < OCTET; ++i) values[i] = bits >> i & 1 ? values[i] : value;
    octet = narrow<T>(values);
}

// Makes the compiler widen the octets again where they are used next, instead of holding the floats until then.
template <typename T, int OCTETS>
__device__ void forget_floats(Octet<T> (&octets)[OCTETS]) {
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
#pragma unroll
        for (unsigned& word : octets[j].word) asm volatile("" : "+r"(word));
    }
}
