// The weights of a CTA that are too many for registers, and their products with the inputs: each warp has a ring of pieces
// in shared memory, a tile of a segment each, and multiplies one while the next ones arrive. It keeps a few more in
// registers.

#pragma once

#include "product.cuh"

template <int ROWS, int SIZE, int COLUMNS>
struct Ring : Place<ROWS, SIZE, COLUMNS> {
    using Base = Place<ROWS, SIZE, COLUMNS>;
    using Base::p;
    using Base::shared;
    using Base::warp;
    using Base::lane;
    using Base::first;
    using Base::count;
    using Base::partials;
    using Base::inputs;
    using Base::TILES;
    using Base::TILE_ROWS;
    using Base::SEGMENTS;
    using Base::WEIGHTS;
    using Base::PIECE;
    using Base::PIECES;
    using Base::RING;
    using Base::EARLY;

    // A place in the pieces of a warp, which are [tile][segment] from `begin()` to `begin() + pieces()`.
    struct Cursor {
        int tile, segment;
        __device__ void advance() {
            if (++segment == SEGMENTS) segment = 0, ++tile;
        }
    };
    __device__ int begin() const { return TILES * SEGMENTS * warp / WARPS; }
    __device__ int pieces() const { return TILES * SEGMENTS * (warp + 1) / WARPS - begin(); }
    __device__ Cursor start() const { return {begin() / SEGMENTS, begin() % SEGMENTS}; }
    __device__ uint32_t slot(int index) const {
        return shared_address(shared) + WEIGHTS + (warp * RING + index % RING) * PIECE;
    }

    struct Fragments {
        uint32_t b[EARLY > 0 ? EARLY : 1][PARTS][4];
        Cursor next;  // the first piece that has not been copied
    };

    __device__ bool whole(int segment) const { return SIZE % SEGMENT == 0 || segment < SEGMENTS - 1; }

    // Copies piece `index` of this warp, if there is one, and closes a group: groups are counted.
    __device__ void copy_piece(int index, Cursor& at, uint32_t to) const {
        if (index < pieces() && (whole(at.segment) || lane % 16 < 8)) {
            const uint64_t policy = evict_first_policy();
            const int row = at.tile * TILE_ROWS + lane / 16;
            const T* const from = p.weight + static_cast<size_t>(first + row) * SIZE + at.segment * SEGMENT + lane % 16 * 8;
            to += lane / 16 * STRIDE + lane % 16 * 16;
#pragma unroll
            for (int i = 0; i < TILE_ROWS; i += 2) {
                if (row + i < count && (i + 1 < TILE_ROWS || lane < 16)) copy_16(to + i * STRIDE, from + i * SIZE, policy);
            }
        }
        at.advance();
        close_group();
    }

    __device__ void load_piece(uint32_t (&b)[PARTS][4], uint32_t from) const {
        const uint32_t at = from + min(lane % 8, TILE_ROWS - 1) * STRIDE + lane / 8 * 16;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) load_matrices(b[part], at + 64 * part);
    }

    __device__ void copy_weights() const {}

    __device__ Fragments load_weights() const {
        Fragments f;
        f.next = start();
#pragma unroll
        for (int index = 0; index < RING + EARLY; ++index) {
            if (index >= RING) {
                wait_for_groups<RING - 1>();
                __syncwarp();
                load_piece(f.b[index - RING], slot(index));
                __syncwarp();
            }
            copy_piece(index, f.next, slot(index));
            wait_for_groups<1>();
        }
        return f;
    }

    // Multiplies pieces whose chains alternate. Of those from `index` on, the first ones that exist are stored.
    template <int N>
    __device__ void multiply_pieces(const uint32_t (&b)[N][PARTS][4], Cursor& at, int index) const {
        const uint32_t x = shared_address(inputs(lane % 8 < p.rows ? lane % 8 : 0)) + lane / 8 * 16;
        Cursor each[N];
#pragma unroll
        for (int n = 0; n < N; ++n, at.advance()) each[n] = at;
        float c[N][4] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            uint32_t a[N][4];
#pragma unroll
            for (int n = 0; n < N; ++n) load_matrices(a[n], x + each[n].segment * (SEGMENT * 2) + 64 * part);
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (part < PARTS / 2 || whole(each[n].segment)) {
                        Pairs<T>::multiply(c[n], a[n][half], a[n][half + 1], b[n][part][half], b[n][part][half + 1]);
                    }
                }
            }
        }
        if (lane / 4 >= ROWS) return;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (index + n >= pieces()) continue;
            float* const to = partials(each[n].segment, lane / 4) + each[n].tile * TILE + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(c[n][0], c[n][1]);
        }
    }

    __device__ void multiply(Fragments& f) const {
        Cursor at = start();
        if constexpr (EARLY > 0) multiply_pieces<EARLY>(f.b, at, 0);
#pragma unroll 1
        for (int index = EARLY; index < PIECES; index += TOGETHER) {
            if (index >= pieces()) break;
            uint32_t b[TOGETHER][PARTS][4];
            wait_for_groups<RING - TOGETHER>();
            __syncwarp();
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) load_piece(b[n], slot(index + n));
            __syncwarp();
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) copy_piece(index + n + RING, f.next, slot(index + n));
            multiply_pieces<TOGETHER>(b, at, index);
        }
    }
};
