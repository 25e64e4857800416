// The C interface of the softmax kernels, which Python calls: nothing of PyTorch is compiled in, so a build takes
// seconds and serves every version of PyTorch.

#include "softmax_kernels.cuh"

using Kernel = void (*)(Problem);

template <typename T, bool DROPOUT>
Kernel choose(bool gradient, bool aligned, int octets) {
    if (!aligned) return gradient ? backward<T, MOST_OCTETS, DROPOUT, false> : forward<T, MOST_OCTETS, DROPOUT, false>;
    switch (octets) {
        case 1: return gradient ? backward<T, 1, DROPOUT, true> : forward<T, 1, DROPOUT, true>;
        case 2: return gradient ? backward<T, 2, DROPOUT, true> : forward<T, 2, DROPOUT, true>;
        default: return gradient ? backward<T, MOST_OCTETS, DROPOUT, true> : forward<T, MOST_OCTETS, DROPOUT, true>;
    }
}

template <typename T>
Kernel choose(const Problem& p, bool gradient, int octets) {
    return p.key == nullptr ? choose<T, false>(gradient, p.aligned, octets)
                            : choose<T, true>(gradient, p.aligned, octets);
}

// Null, or why nothing was launched.
extern "C" const char* launch_softmax(const Problem* p, int gradient, cudaStream_t stream) {
    const int count = (p->columns + OCTET - 1) / OCTET;
    int octets = p->aligned ? 1 : MOST_OCTETS;
    while (count > (octets < p->most_octets ? WARP : MOST_THREADS) * octets) octets *= 2;
    if (octets > MOST_OCTETS) return "a row is longer than 16384 columns";
    const unsigned width = (count + WARP * octets - 1) / (WARP * octets) * WARP;
    const unsigned height = width == WARP ? p->threads / WARP : 1;
    const Kernel kernel = p->type == 0   ? choose<float>(*p, gradient, octets)
                          : p->type == 1 ? choose<__half>(*p, gradient, octets)
                                         : choose<__nv_bfloat16>(*p, gradient, octets);
    void* arguments[] = {const_cast<Problem*>(p)};
    const dim3 grid((p->rows + height - 1) / height), block(width, height);
    const void* const function = reinterpret_cast<const void*>(kernel);
    const cudaError_t error = cudaLaunchKernel(function, grid, block, arguments, 0, stream);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Python compares these with its own structs when it loads the library.
extern "C" size_t sizeof_Problem() { return sizeof(Problem); }
