// The sizes for which the kernels are built, and their launch.

#pragma once

#include "primitives.cuh"

// Of the model: H, F, the columns of the projections to queries, keys and values and of the heads' outputs, D, heads of
// keys and values, positions of a slot.
constexpr int HIDDEN = DTGPT_HIDDEN, INNER = DTGPT_INNER, PACKED = DTGPT_PACKED, WIDTH = DTGPT_WIDTH;
constexpr int HEAD = DTGPT_HEAD, KV_HEADS = DTGPT_KV_HEADS, LENGTH = DTGPT_LENGTH;
using T = DTGPT_TYPE;

// Of the kind of its blocks: RMSNorm or LayerNorm, SwiGLU or GELU, what positions are, whether products have biases.
enum Positions { LEARNED, ROTARY, ROTARY_OF_NORMED };  // the latter: after an RMSNorm of each head of q and k
enum Biases { NO_BIAS, SOME_BIASES, ALL_BIASES };
constexpr bool RMS = DTGPT_RMS, GATED = DTGPT_GATED;
constexpr int POSITIONS = DTGPT_ROTARY, BIASES = DTGPT_BIASES;
constexpr int UNIT = GATED ? 2 : 1;  // rows of a weight that stay together: a gate and what it multiplies

// Of the plan: tensor-parallel ranks. F, heads and columns are those of one rank.
constexpr int RANKS = DTGPT_RANKS;

// Of the GPU: multiprocessors, and the shared memory that every CTA asks for at least: so much that two fit on a
// multiprocessor and three do not. Then each kernel has one CTA on each multiprocessor, and the next kernel, too.
constexpr int CTAS = DTGPT_CTAS, ROOM = DTGPT_ROOM;
constexpr int WARPS = 8, THREADS = WARPS * WARP;

// Launches a kernel, which may start before the one before it has ended if it is `dependent`. Null, or why nothing was
// launched.
template <typename P>
static const char* launch_dependent(void (*kernel)(const P), int ctas, int bytes, P arguments, bool dependent,
                                    cudaStream_t stream) {
    const void* const function = reinterpret_cast<const void*>(kernel);
    bytes = bytes < ROOM ? ROOM : bytes;
    cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = dependent;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    void* pointers[] = {&arguments};
    error = cudaLaunchKernelExC(&config, function, pointers);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
