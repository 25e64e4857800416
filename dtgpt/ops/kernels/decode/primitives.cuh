// PTX instructions of the decode kernels, each behind a short function, and the two element types.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

constexpr int WARP = 32;

// ---- Element types: pairs of 16-bit numbers in one register

template <typename T>
struct Pairs;

#define DTGPT_MULTIPLY(TYPE)                                                                                      \
    static __device__ void multiply(float (&c)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {          \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, "   \
            "{%7, %8}, {%0, %1, %2, %3};"                                                                         \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
            : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));                                                        \
    }                                                                                                             \
    static __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {            \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "    \
            "{%8, %9}, {%0, %1, %2, %3};"                                                                         \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                      \
    }

template <>
struct Pairs<__nv_bfloat16> {
    static constexpr uint32_t ONES = 0x3f803f80u;
    static __device__ float2 widen(uint32_t pair) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
    static __device__ uint32_t narrow(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
    static __device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
    static __device__ __nv_bfloat16 narrow(float value) { return __float2bfloat16_rn(value); }
    DTGPT_MULTIPLY("bf16")  // c += a b; without a1 and a3, a has 8 rows instead of 16
};

template <>
struct Pairs<__half> {
    static constexpr uint32_t ONES = 0x3c003c00u;
    static __device__ float2 widen(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }
    static __device__ uint32_t narrow(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
    static __device__ float widen(__half value) { return __half2float(value); }
    static __device__ __half narrow(float value) { return __float2half_rn(value); }
    DTGPT_MULTIPLY("f16")
};

#undef DTGPT_MULTIPLY

// Four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void load_transposed_matrices(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / sqrt(x), by two Newton steps in fp64.
__device__ inline float reciprocal_root(double x) {
    double y = rsqrtf(static_cast<float>(x));
    y *= fma(-0.5 * x * y, y, 1.5);
    return static_cast<float>(y * fma(-0.5 * x * y, y, 1.5));
}

// ---- Dependent launch

// Wait until the kernel before this one is complete, and with it all before that one.
__device__ inline void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Let the next kernel start when all CTAs of this one have come here.
__device__ inline void launch_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Copies from global to shared memory

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Weights are read once a step: they must not push the activations out of L2.
__device__ inline uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ inline void copy_16(uint32_t target, const void* source, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "l"(policy)
                 : "memory");
}

__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of copies but the newest PENDING.
template <int PENDING>
__device__ inline void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
