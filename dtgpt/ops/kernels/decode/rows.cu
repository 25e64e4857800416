// The products of a transformer block for one token each of 1 to 4 sequences, with what comes before and after them:
// a norm or the merge of attention's splits before; the cache, GELU or SwiGLU, or the residual after. Built for one
// model: its sizes and the kind of its blocks are constants. Of several tensor-parallel ranks each sends its part of a
// branch to all, and the norm behind begins with their sum.
//
// Each CTA has a contiguous range of the weight's rows, and there is one for each multiprocessor. It copies them to
// shared memory while the kernel before it still runs (programmatic dependent launch), since weights do not depend on it.
// Two kernels fit on a multiprocessor at once.
//
// The arithmetic is that of kernels.py, bit for bit: chains of tensor-core steps over segments of 128 columns, summed in
// groups of four in ascending order. It does not depend on the number of rows, warps or CTAs.

#include "inputs.cuh"
#include "outputs.cuh"

template <int ROWS, int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
__device__ inline void run_product(const Place<ROWS, SIZE, COLUMNS>& place) {
    using Ins = Inputs<ROWS, PROLOGUE, SIZE, COLUMNS>;
    using Outs = Outputs<ROWS, EPILOGUE, SIZE, COLUMNS>;
    const Product& p = place.p;
    const Ins inputs{place};
    const Outs outputs{place};
    launch_successor();
    typename Ins::Chunks norm_weight, norm_bias, branch_bias, x;
    if constexpr (PROLOGUE == NORM || PROLOGUE == JOIN) {
        norm_weight = inputs.load_vector(p.norm_weight);
        if constexpr (!RMS) norm_bias = inputs.load_vector(p.norm_bias);
    }
    uint32_t flag;
    if constexpr (PROLOGUE == JOIN) {
        if (is_there(p.branch_bias)) branch_bias = inputs.load_vector(p.branch_bias);
        flag = p.exchange.flag(p.index);
    }
    const int row = inputs.row();
    const int used = PROLOGUE == MERGE && row < p.rows ? static_cast<int>(p.positions[row]) / SPLIT + 1 : 0;
    const int items = outputs.items();
    const typename Outs::Output own = outputs.output(place.thread < items ? place.thread : 0);
    outputs.copy_weights();
    wait_for_predecessor();
    if constexpr (PROLOGUE == MERGE) {
        inputs.keep_merged(used);
    } else {
        x = inputs.load_rows();
    }
    const unsigned short residual = outputs.residual_of(own);
    const typename Outs::Fragments weights = outputs.load_weights();
    if constexpr (PROLOGUE == JOIN) x = inputs.join(x, branch_bias, flag);
    if constexpr (PROLOGUE == NORM || PROLOGUE == JOIN) inputs.keep_normal(x, norm_weight, norm_bias);
    if constexpr (PROLOGUE == PLAIN) inputs.keep_rows(x);
    Ins::join_writers();
    outputs.multiply(weights);
    __syncthreads();
    if (place.thread < items) outputs.finish(own, residual);
    for (int item = place.thread + THREADS; item < items; item += THREADS) {
        const typename Outs::Output further = outputs.output(item);
        outputs.finish(further, outputs.residual_of(further));
    }
}

template <int ROWS, int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) multiply_rows(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, index = blockIdx.x;
    const int first = COLUMNS / UNIT * index / CTAS * UNIT, last = COLUMNS / UNIT * (index + 1) / CTAS * UNIT;
    run_product<ROWS, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(
        {p, shared, thread, thread / WARP, thread % WARP, first, last - first});
}

// The last sum of a call, by one CTA, which then counts the exchanges of the call as complete.
__global__ void __launch_bounds__(THREADS) join_rows(const __grid_constant__ Product p) {
    const uint32_t flag = p.exchange.flag(p.index);
    wait_for_predecessor();
    for (int chunk = threadIdx.x; chunk < p.rows * (HIDDEN / 8); chunk += THREADS) {
        float branch[8];
        receive_sums<RANKS>(branch, p.exchange, static_cast<size_t>(8) * chunk, flag);
        const uint4 x = __ldcg(reinterpret_cast<const uint4*>(p.x) + chunk);
        const bool biased = is_there(p.branch_bias);
        const uint4 bias = biased ? __ldg(reinterpret_cast<const uint4*>(p.branch_bias) + chunk % (HIDDEN / 8)) : uint4{};
        reinterpret_cast<uint4*>(p.stream)[chunk] = add_branch(x, branch, bias, biased);
    }
    __syncthreads();
    if (threadIdx.x == 0) *p.exchange.state = flag;
}

// ---- Host. Each function launches one product for up to 4 rows. It returns null, or why nothing was launched.

template <int ROWS, int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
static const char* launch(const Product& p, cudaStream_t stream) {
    constexpr int BYTES = Place<ROWS, SIZE, COLUMNS>::BYTES;
    return launch_dependent(multiply_rows<ROWS, PROLOGUE, EPILOGUE, SIZE, COLUMNS>, CTAS, BYTES, p, p.dependent, stream);
}

template <int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
static const char* launch(const Product* p, cudaStream_t stream) {
    if (p->rows == 1) return launch<1, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(*p, stream);
    if (p->rows == 2) return launch<2, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(*p, stream);
    if constexpr (Place<1, SIZE, COLUMNS>::KEPT) {  // the same for 4 rows, whose ring might have no room
        if (p->rows <= 4) return launch<4, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(*p, stream);
    }
    return "there are too many rows";
}

// After a norm, of the sum with a branch if there is one.
template <int EPILOGUE, int COLUMNS>
static const char* launch_normal(const Product* p, cudaStream_t stream) {
    if constexpr (RANKS > 1) {
        if (p->stream != nullptr) return launch<JOIN, EPILOGUE, HIDDEN, COLUMNS>(p, stream);
    }
    return launch<NORM, EPILOGUE, HIDDEN, COLUMNS>(p, stream);
}

constexpr int BRANCH = RANKS > 1 ? SEND : RESIDUAL;

extern "C" const char* launch_qkv(const Product* p, cudaStream_t stream) {
    return launch_normal<POSITIONS == LEARNED ? CACHE : PACK, PACKED>(p, stream);
}

extern "C" const char* launch_proj(const Product* p, cudaStream_t stream) {
    return launch<MERGE, BRANCH, WIDTH, HIDDEN>(p, stream);
}

extern "C" const char* launch_fc(const Product* p, cudaStream_t stream) {
    return launch_normal<ACTIVATION, UNIT * INNER>(p, stream);
}

extern "C" const char* launch_out(const Product* p, cudaStream_t stream) {
    return launch<PLAIN, BRANCH, INNER, HIDDEN>(p, stream);
}

extern "C" const char* launch_join(const Product* p, cudaStream_t stream) {
    return launch_dependent(join_rows, 1, 0, *p, true, stream);
}

// Python compares these with its own structs when it loads the library.
extern "C" size_t sizeof_Product() { return sizeof(Product); }
extern "C" size_t sizeof_Attention() { return sizeof(Attention); }
extern "C" size_t sizeof_Exchange() { return sizeof(Exchange); }
