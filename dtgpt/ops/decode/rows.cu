// The products of a transformer block for one token each of at most 4 sequences, with what comes before and after them:
// LayerNorm or the merge of attention's splits before; the cache, GELU or the residual after. Built for one model: its
// sizes are constants.
//
// Each CTA has a contiguous range of the weight's rows, and there is one for each multiprocessor. It copies them to
// shared memory while the kernel before it still runs (programmatic dependent launch), since weights do not depend on it.
// Two kernels fit on a multiprocessor at once.
//
// The arithmetic is that of kernels.py, bit for bit: chains of tensor-core steps over segments of 128 columns, summed in
// groups of four in ascending order. It does not depend on the number of rows, warps or CTAs.

#include "attention.cuh"

constexpr int TILE = 8;                 // rows of a weight that a tensor-core step takes
constexpr int SEGMENT = 128;            // columns of a chain
constexpr int GROUP = 4;                // segments of a group
constexpr int STRIDE = SEGMENT * 2 + 16;  // bytes of a row of a segment: 16 more, so that 8 rows lie in different banks
constexpr int PARTS = SEGMENT / 32;     // of a segment: 32 columns are one load of four matrices
constexpr int AT_ONCE = 8;              // splits of attention whose loads are under way together
// Copies of a warp, 512 bytes each, that are under way: more would delay what the kernel before this one loads.
constexpr int COPIES = 4;

enum Prologue { NORM, MERGE, PLAIN };
enum Epilogue { CACHE, ACTIVATION, RESIDUAL };

struct Product {
    const T* weight;            // [columns, size]
    const T* bias;              // [columns]
    const T* x;                 // NORM, PLAIN: [rows, size]
    const T* norm_weight;       // NORM: [size]
    const T* norm_bias;
    const float* partial;       // MERGE: [rows, heads, SPLITS, HEAD]
    const float2* state;        // MERGE: [rows, heads, SPLITS], the maximum and the sum of each split
    const T* residual;          // RESIDUAL: [rows, columns]
    T* out;                     // [rows, columns]; CACHE: queries alone are written there
    T* keys;                    // CACHE: [slots, KV_HEADS, LENGTH, HEAD]
    T* values;
    const int64_t* slots;       // [rows]
    const int64_t* positions;   // [rows]
    int rows, dependent;        // dependent: whether it may start before the kernel before it has ended
    float eps;
};

template <int ROWS, int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
struct Kernel {
    const Product& p;
    char* const shared;
    const int thread, warp, lane;
    const int first, count;  // this CTA's rows of the weight

    static constexpr int MOST_ROWS = (COLUMNS + CTAS - 1) / CTAS, TILES = (MOST_ROWS + TILE - 1) / TILE;
    static constexpr int SEGMENTS = SIZE / SEGMENT, SETS = (SEGMENTS + WARPS - 1) / WARPS;
    static_assert(SIZE % SEGMENT == 0 && TILES * SETS <= 4, "the weights of a warp fit into its registers");
    __device__ bool exists(int set) const { return (set + 1) * WARPS <= SEGMENTS || warp + WARPS * set < SEGMENTS; }

    // Shared memory: sums of the norm | partial sums | inputs | weights, [warp][set][row]
    static constexpr int PARTIALS = WARPS * 16, INPUTS = PARTIALS + SEGMENTS * ROWS * TILES * TILE * 4;
    static constexpr int INPUT_STRIDE = SIZE * 2 + 16, WEIGHTS = INPUTS + ROWS * INPUT_STRIDE;
    static constexpr int BYTES = WEIGHTS + WARPS * SETS * MOST_ROWS * STRIDE;
    __device__ double2* sums() const { return reinterpret_cast<double2*>(shared); }
    __device__ float* partials(int segment, int row) const {
        return reinterpret_cast<float*>(shared + PARTIALS) + (segment * ROWS + row) * TILES * TILE;
    }
    __device__ char* inputs(int row) const { return shared + INPUTS + row * INPUT_STRIDE; }
    __device__ uint32_t weights(int set) const {
        return shared_address(shared) + WEIGHTS + (warp * SETS + set) * MOST_ROWS * STRIDE;
    }

    // ---- Weights: a warp copies the segments that it will multiply, two rows at once.

    __device__ void copy_weights() const {
        const uint64_t policy = evict_first_policy();
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
            const T* const from = p.weight + static_cast<size_t>(first) * SIZE + (warp + WARPS * set) * SEGMENT + lane % 16 * 8;
            const uint32_t to = weights(set) + lane % 16 * 16;
#pragma unroll
            for (int i = 0; i < TILES * TILE / 2; ++i) {
                const int row = 2 * i + lane / 16;
                if (row < count) copy_16(to + row * STRIDE, from + static_cast<size_t>(row) * SIZE, policy);
                if ((i + 1) % (COPIES / 2) == 0) close_group_and_wait<1>();
            }
        }
    }

    // ---- Inputs, [ROWS][SIZE]. WARPS / ROWS warps share a row; a thread has up to MOST chunks of 16 bytes.

    static constexpr int ROW_WARPS = WARPS / ROWS, SHARERS = ROW_WARPS * WARP, CHUNKS = SIZE / 8;
    static constexpr int MOST = (CHUNKS + SHARERS - 1) / SHARERS;
    __device__ int row() const { return warp / ROW_WARPS; }
    __device__ int share() const { return thread % SHARERS; }
    __device__ bool has(int i) const { return share() + i * SHARERS < CHUNKS && row() < p.rows; }
    __device__ void keep(int i, uint4 chunk) const {
        reinterpret_cast<uint4*>(inputs(row()))[share() + i * SHARERS] = chunk;
    }

    struct Chunks {
        uint4 at[MOST];
    };

    // Zeros where there is nothing. A vector [SIZE] is constant; rows were written by other CTAs, and come from L2.
    __device__ Chunks load_vector(const T* source) const {
        Chunks made;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            made.at[i] = has(i) ? __ldg(reinterpret_cast<const uint4*>(source) + share() + i * SHARERS) : uint4{};
        }
        return made;
    }

    __device__ Chunks load_rows() const {
        Chunks made;
        const uint4* const source = reinterpret_cast<const uint4*>(p.x) + row() * CHUNKS + share();
#pragma unroll
        for (int i = 0; i < MOST; ++i) made.at[i] = has(i) ? __ldcg(source + i * SHARERS) : uint4{};
        return made;
    }

    __device__ static void add_lanes(double& sum, double& squares, int lanes) {
#pragma unroll
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(~0u, sum, distance);
            squares += __shfl_xor_sync(~0u, squares, distance);
        }
    }

    // 1 / sqrt(x), by two Newton steps in fp64.
    __device__ static float reciprocal_root(double x) {
        double y = rsqrtf(static_cast<float>(x));
        y *= fma(-0.5 * x * y, y, 1.5);
        return static_cast<float>(y * fma(-0.5 * x * y, y, 1.5));
    }

    __device__ static uint32_t normal(uint32_t pair, uint32_t weights, uint32_t biases, float mean, float scale) {
        const float2 x = Pairs<T>::widen(pair), weight = Pairs<T>::widen(weights), bias = Pairs<T>::widen(biases);
        return Pairs<T>::narrow(__fmaf_rn(__fmul_rn(__fsub_rn(x.x, mean), scale), weight.x, bias.x),
                                __fmaf_rn(__fmul_rn(__fsub_rn(x.y, mean), scale), weight.y, bias.y));
    }

    // LayerNorm, with sums in fp64: of 16-bit numbers they are exact for practical purposes.
    __device__ void keep_normal(const Chunks& x, const Chunks& weight, const Chunks& bias) const {
        double sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
#pragma unroll
            for (const uint32_t pair : {x.at[i].x, x.at[i].y, x.at[i].z, x.at[i].w}) {
                const float2 values = Pairs<T>::widen(pair);
                const double a = values.x, b = values.y;
                sum += a + b;
                squares += fma(a, a, b * b);
            }
        }
        add_lanes(sum, squares, WARP);
        if constexpr (ROW_WARPS > 1) {
            if (lane == 0) sums()[warp] = make_double2(sum, squares);
            __syncthreads();
            const double2 of_warp = sums()[row() * ROW_WARPS + lane % ROW_WARPS];
            sum = of_warp.x, squares = of_warp.y;
            add_lanes(sum, squares, ROW_WARPS);
        }
        constexpr double RECIPROCAL = 1.0 / SIZE;
        const double exact_mean = sum * RECIPROCAL;
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

    // The merge of attention's `used` splits: four columns of a head a thread. The threads of a head, an aligned part of a
    // warp of at least AT_ONCE lanes, share the splits' states.
    static_assert(PROLOGUE != MERGE || HEAD >= 4 * AT_ONCE, "a head has AT_ONCE threads");
    __device__ void keep_merged(int used) const {
#pragma unroll 1
        for (int i = share(); i < SIZE / 4; i += SHARERS) {
            const size_t cell = (static_cast<size_t>(row()) * (SIZE / HEAD) + i / (HEAD / 4)) * SPLITS;
            const float2* const state = p.state + cell;
            const float4* const partial = reinterpret_cast<const float4*>(p.partial + cell * HEAD) + i % (HEAD / 4);
            float largest = -INFINITY, total = 0;
            float4 made{};
            if constexpr (SPLITS > AT_ONCE) {
#pragma unroll 1
                for (int j = lane % AT_ONCE; j < used; j += AT_ONCE) largest = fmaxf(largest, __ldcg(state + j).x);
            }
#pragma unroll 1
            for (int base = 0; base < SPLITS && (base == 0 || base < used); base += AT_ONCE) {
                const int mine = base + lane % AT_ONCE;
                const float2 own = mine < used ? __ldcg(state + mine) : make_float2(-INFINITY, 0);
                float4 values[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    values[j] = base + j < used ? __ldcg(partial + (base + j) * (HEAD / 4)) : float4{};
                }
                if (base == 0) {
                    largest = fmaxf(largest, own.x);
#pragma unroll
                    for (int distance = AT_ONCE / 2; distance > 0; distance /= 2) {
                        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
                    }
                }
                const float factor_of_own = exp2_approx(__fsub_rn(own.x, largest));
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {  // a split that is not there adds 0
                    const float factor = __shfl_sync(~0u, factor_of_own, j, AT_ONCE);
                    total = __fmaf_rn(factor, __shfl_sync(~0u, own.y, j, AT_ONCE), total);
                    made.x = __fmaf_rn(factor, values[j].x, made.x);
                    made.y = __fmaf_rn(factor, values[j].y, made.y);
                    made.z = __fmaf_rn(factor, values[j].z, made.z);
                    made.w = __fmaf_rn(factor, values[j].w, made.w);
                }
            }
            reinterpret_cast<uint2*>(inputs(row()))[i] =
                make_uint2(Pairs<T>::narrow(__fdiv_rn(made.x, total), __fdiv_rn(made.y, total)),
                           Pairs<T>::narrow(__fdiv_rn(made.z, total), __fdiv_rn(made.w, total)));
        }
    }

    // ---- The product. This warp's chains are segments `warp` + WARPS * set of each tile.

    struct Fragments {
        uint32_t b[SETS][TILES][PARTS][4];
    };

    __device__ Fragments load_weights() const {
        Fragments f;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int row = min(tile * TILE + lane % 8, count - 1);  // the results of others are not used
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    load_matrices(f.b[set][tile][part], weights(set) + row * STRIDE + lane / 8 * 16 + 64 * part);
                }
            }
        }
        return f;
    }

    __device__ void multiply(const Fragments& f) const {
        float c[SETS][TILES][4] = {};
        const uint32_t x = shared_address(inputs(lane % 8 < p.rows ? lane % 8 : 0)) + lane / 8 * 16;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            uint32_t a[SETS][4];
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                if (exists(set)) load_matrices(a[set], x + (warp + WARPS * set) * SEGMENT * 2 + 64 * part);
            }
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
#pragma unroll
                for (int set = 0; set < SETS; ++set) {
                    if (!exists(set)) continue;
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        const uint32_t(&b)[4] = f.b[set][tile][part];
                        Pairs<T>::multiply(c[set][tile], a[set][half], a[set][half + 1], b[half], b[half + 1]);
                    }
                }
            }
        }
        if (lane / 4 >= ROWS) return;
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (!exists(set)) continue;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float* const to = partials(warp + WARPS * set, lane / 4) + tile * TILE + lane % 4 * 2;
                *reinterpret_cast<float2*>(to) = make_float2(c[set][tile][0], c[set][tile][1]);
            }
        }
    }

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

    // ---- The epilogue

    // GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415), written as t / (1 + exp(-2 u)).
    __device__ static float gelu(float t) {
        constexpr float CUBIC = static_cast<float>(0.7978845608028654 * 0.044715), LINEAR = 0.7978845608028654f;
        const float u = __fmul_rn(t, __fmaf_rn(__fmul_rn(t, t), CUBIC, LINEAR));
        return __fdiv_rn(t, __fadd_rn(1.0f, exp2_approx(__fmul_rn(u, -2.8853900817779268f))));
    }

    // An output of this thread, with what is loaded early.
    struct Output {
        int row, n;
        unsigned short bias;
        int64_t slot, position;
    };

    __device__ Output output(int item) const {
        Output o{};
        o.row = ROWS == 1 ? 0 : item / count, o.n = first + item - o.row * count;
        o.bias = __ldg(reinterpret_cast<const unsigned short*>(p.bias) + o.n);
        if constexpr (EPILOGUE == CACHE) o.slot = p.slots[o.row], o.position = p.positions[o.row];
        return o;
    }

    __device__ unsigned short residual_of(const Output& o) const {
        if constexpr (EPILOGUE != RESIDUAL) return 0;
        return __ldcg(reinterpret_cast<const unsigned short*>(p.residual) + o.row * COLUMNS + o.n);
    }

    __device__ T* place(const Output& o) const {
        if constexpr (EPILOGUE == CACHE) {  // the weight's rows are, for each kv head: its query heads, its key, its value
            constexpr int HEADS = PACKED / HEAD / KV_HEADS;
            const int head = o.n / HEAD, kv_head = head / HEADS, part = head % HEADS;
            const size_t line = (static_cast<size_t>(o.slot) * KV_HEADS + kv_head) * LENGTH + o.position;
            if (part >= HEADS - 2) return (part == HEADS - 2 ? p.keys : p.values) + line * HEAD + o.n % HEAD;
        }
        return p.out + o.row * COLUMNS + o.n;
    }

    __device__ static float widen(unsigned short bits) { return Pairs<T>::widen(*reinterpret_cast<const T*>(&bits)); }

    __device__ void finish(const Output& o, unsigned short residual) const {
        float t = __fadd_rn(total(o.row, o.n - first), widen(o.bias));
        if constexpr (EPILOGUE == ACTIVATION) t = gelu(t);
        if constexpr (EPILOGUE == RESIDUAL) t = __fadd_rn(widen(residual), t);
        *place(o) = Pairs<T>::narrow(t);
    }

    __device__ void run() const {
        launch_successor();
        Chunks norm_weight, norm_bias, x;
        if constexpr (PROLOGUE == NORM) norm_weight = load_vector(p.norm_weight), norm_bias = load_vector(p.norm_bias);
        const int used = PROLOGUE == MERGE && row() < p.rows ? static_cast<int>(p.positions[row()]) / SEGMENT + 1 : 0;
        const int items = p.rows * count;
        const Output own = output(thread < items ? thread : 0);
        copy_weights();
        // A first merge of whatever memory holds brings its instructions to the multiprocessor: there is time for that.
        if constexpr (PROLOGUE == MERGE) {
#pragma unroll 1
            for (int pass = 0; pass < 2; ++pass) {
                if (pass == 1) wait_for_predecessor();
                keep_merged(used);
            }
        } else {
            wait_for_predecessor();
            x = load_rows();
        }
        const unsigned short residual = residual_of(own);
        wait_for_copies();
        __syncwarp();
        const Fragments weights = load_weights();
        if constexpr (PROLOGUE == NORM) keep_normal(x, norm_weight, norm_bias);
        if constexpr (PROLOGUE == PLAIN) {
#pragma unroll
            for (int i = 0; i < MOST; ++i) {
                if (has(i)) keep(i, x.at[i]);
            }
        }
        __syncthreads();
        multiply(weights);
        __syncthreads();
        if (thread < items) finish(own, residual);
        for (int item = thread + THREADS; item < items; item += THREADS) {
            const Output further = output(item);
            finish(further, residual_of(further));
        }
    }
};

template <int ROWS, int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) multiply_rows(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, index = blockIdx.x;
    const int first = COLUMNS * index / CTAS, last = COLUMNS * (index + 1) / CTAS;
    Kernel<ROWS, PROLOGUE, EPILOGUE, SIZE, COLUMNS>{p, shared, thread, thread / WARP, thread % WARP, first, last - first}.run();
}

// ---- Host. Each function launches one product for up to 4 rows. It returns null, or why nothing was launched.

template <int ROWS, int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
static const char* launch(const Product& p, cudaStream_t stream) {
    constexpr int BYTES = Kernel<ROWS, PROLOGUE, EPILOGUE, SIZE, COLUMNS>::BYTES;
    return launch_dependent(multiply_rows<ROWS, PROLOGUE, EPILOGUE, SIZE, COLUMNS>, CTAS, BYTES, p, p.dependent, stream);
}

template <int PROLOGUE, int EPILOGUE, int SIZE, int COLUMNS>
static const char* launch(const Product* p, cudaStream_t stream) {
    if (p->rows == 1) return launch<1, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(*p, stream);
    if (p->rows == 2) return launch<2, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(*p, stream);
    if (p->rows <= 4) return launch<4, PROLOGUE, EPILOGUE, SIZE, COLUMNS>(*p, stream);
    return "there are more than 4 rows";
}

extern "C" const char* launch_qkv(const Product* p, cudaStream_t stream) {
    return launch<NORM, CACHE, HIDDEN, PACKED>(p, stream);
}

extern "C" const char* launch_proj(const Product* p, cudaStream_t stream) {
    return launch<MERGE, RESIDUAL, WIDTH, HIDDEN>(p, stream);
}

extern "C" const char* launch_fc(const Product* p, cudaStream_t stream) {
    return launch<NORM, ACTIVATION, HIDDEN, INNER>(p, stream);
}

extern "C" const char* launch_out(const Product* p, cudaStream_t stream) {
    return launch<PLAIN, RESIDUAL, INNER, HIDDEN>(p, stream);
}
