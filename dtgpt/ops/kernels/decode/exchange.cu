// What tensor-parallel ranks have in parts, whole on every rank: a sum, rows of a table that is cut by rows, columns.
// Every rank sends its part to all others; each puts the parts together in the order of the ranks.

#include "exchange.cuh"

enum Kind { SUM, LOOK_UP, GATHER };

struct Collective {
    Exchange exchange;
    const uint32_t* in;   // SUM: fp32 [groups, words]. LOOK_UP: [count, width]. GATHER: [rows, columns of this rank]
    const int64_t* ids;   // LOOK_UP: [rows]
    uint32_t* out;        // SUM: fp32 [words]. LOOK_UP: [rows, width]. GATHER: [rows, whole]
    int64_t first, count; // LOOK_UP: the ids of this rank's rows, and how many
    int groups, words;    // words: SUM, LOOK_UP: of `out`
    int width;            // words of a row; GATHER: columns of every rank but the last, which may have fewer
    int rows, whole;
};

constexpr int THREADS = 256, CTAS_OF_MULTIPROCESSOR = 4;

template <Kind KIND>
__device__ uint32_t own_bits(const Collective& c, int i) {
    if constexpr (KIND == SUM) {
        float total = __uint_as_float(c.in[i]);
        for (int group = 1; group < c.groups; ++group) {
            total = __fadd_rn(total, __uint_as_float(c.in[static_cast<size_t>(group) * c.words + i]));
        }
        return __float_as_uint(total);
    } else if constexpr (KIND == LOOK_UP) {
        const int64_t row = c.ids[i / c.width] - c.first;
        return row >= 0 && row < c.count ? c.in[row * c.width + i % c.width] : 0;
    } else {
        return c.in[i];
    }
}

template <Kind KIND>
__device__ uint32_t bits_from(const Collective& c, int rank, int i, uint32_t flag) {
    const Exchange& e = c.exchange;
    return rank == e.rank ? own_bits<KIND>(c, i) : receive(e.place(e.rank, rank, flag) + i, flag);
}

template <Kind KIND>
__global__ void __launch_bounds__(THREADS) exchange_parts(const __grid_constant__ Collective c) {
    const Exchange& e = c.exchange;
    const uint32_t flag = e.flag(0);
    const int start = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    const auto columns_of = [&](int rank) { return min(c.width, c.whole - rank * c.width); };
    const int own = KIND == GATHER ? c.rows * columns_of(e.rank) : c.words;
    for (int i = start; i < own; i += step) {
        const uint64_t word = word_of(own_bits<KIND>(c, i), flag);
        for (int rank = 0; rank < e.ranks; ++rank) {
            if (rank != e.rank) send(e.place(rank, e.rank, flag) + i, word);
        }
    }
    if constexpr (KIND == GATHER) {
        for (int rank = 0; rank < e.ranks; ++rank) {
            const int columns = columns_of(rank);
            for (int i = start; i < c.rows * columns; i += step) {
                c.out[static_cast<size_t>(i / columns) * c.whole + rank * c.width + i % columns] =
                    bits_from<KIND>(c, rank, i, flag);
            }
        }
    } else {
        for (int i = start; i < own; i += step) {
            uint32_t made = bits_from<KIND>(c, 0, i, flag);
            for (int rank = 1; rank < e.ranks; ++rank) {
                const uint32_t more = bits_from<KIND>(c, rank, i, flag);
                if constexpr (KIND == SUM) {
                    made = __float_as_uint(__fadd_rn(__uint_as_float(made), __uint_as_float(more)));
                }
                if constexpr (KIND == LOOK_UP) made |= more;  // one rank alone has the row
            }
            c.out[i] = made;
        }
    }
    __syncthreads();  // all of this CTA have read the flag
    if (threadIdx.x == 0 && atomicAdd(e.state + 1, 1) == gridDim.x - 1) e.state[1] = 0, e.state[0] = flag;
}

template <Kind KIND>
static const char* launch(const Collective* c, int words, cudaStream_t stream) {
    int device, multiprocessors;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    const int needed = (words + THREADS - 1) / THREADS, most = multiprocessors * CTAS_OF_MULTIPROCESSOR;
    exchange_parts<KIND><<<needed < most ? needed : most, THREADS, 0, stream>>>(*c);
    error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Each returns null, or why nothing was launched.
extern "C" const char* launch_sum(const Collective* c, cudaStream_t stream) { return launch<SUM>(c, c->words, stream); }

extern "C" const char* launch_look_up(const Collective* c, cudaStream_t stream) {
    return launch<LOOK_UP>(c, c->words, stream);
}

extern "C" const char* launch_gather(const Collective* c, cudaStream_t stream) {
    return launch<GATHER>(c, c->rows * c->width, stream);
}

// Python compares these with its own structs when it loads the library.
extern "C" size_t sizeof_Exchange() { return sizeof(Exchange); }
extern "C" size_t sizeof_Collective() { return sizeof(Collective); }
