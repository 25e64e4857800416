// Numbers that tensor-parallel ranks send each other through memory that every rank can write to.
//
// A word is an fp32 number, or other 32 bits, and a flag, written as 8 bytes at once: a rank that reads the flag has
// the number, without a fence and without another signal (NCCL calls this protocol LL). Flags count the exchanges of
// the ranks, which all make the same ones in the same order.
//
// A rank has two areas, for exchanges of odd and of even flags. No rank can overwrite what another one still reads: it
// sends the words of exchange f + 2 when it has those of f + 1 from every rank, and each rank sent these when it had
// read all of f. So every rank must send to every rank in each exchange.

#pragma once

#include <cstdint>

constexpr int MOST_RANKS = 8;

struct Exchange {
    uint64_t* areas[MOST_RANKS];  // of each rank: [2, ranks, capacity] words
    uint32_t* state;              // of this rank: exchanges that are complete, CTAs that have ended
    int capacity, rank, ranks;

    // The flag of exchange `index` after those that are complete. Flags wrap: a word that has not been written for
    // exactly 2^32 exchanges would be taken for a new one.
    __device__ uint32_t flag(int index) const {
        uint32_t complete;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(complete) : "l"(state));
        return complete + index + 1;
    }

    // Where rank `source` puts its words on rank `target`.
    __device__ uint64_t* place(int target, int source, uint32_t flag) const {
        return areas[target] + static_cast<size_t>(flag % 2 * ranks + source) * capacity;
    }
};

__device__ inline uint64_t word_of(uint32_t bits, uint32_t flag) { return static_cast<uint64_t>(flag) << 32 | bits; }
__device__ inline bool has_flag(uint64_t word, uint32_t flag) { return static_cast<uint32_t>(word >> 32) == flag; }
__device__ inline uint32_t bits_of(uint64_t word) { return static_cast<uint32_t>(word); }
__device__ inline float number_of(uint64_t word) { return __uint_as_float(bits_of(word)); }

__device__ inline void send(uint64_t* to, uint64_t word) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ inline uint64_t look(const uint64_t* at) {
    uint64_t word;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}

__device__ inline ulonglong2 look_at_two(const uint64_t* at) {
    ulonglong2 words;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(at) : "memory");
    return words;
}

// How long a kernel looks for words: a rank that ended never sends them. Then this rank fails, too, instead of keeping
// its GPU busy for ever.
struct Patience {
    static constexpr uint64_t NANOSECONDS = 600ull * 1000 * 1000 * 1000;  // ranks may compile for minutes
    uint64_t first = 0;
    uint32_t looks = 0;

    __device__ void spend() {
        if (++looks % 4096) return;
        uint64_t now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (first == 0) first = now;
        if (now - first > NANOSECONDS) __trap();
    }
};

__device__ inline uint32_t receive(const uint64_t* at, uint32_t flag) {
    Patience patience;
    uint64_t word;
    while (!has_flag(word = look(at), flag)) patience.spend();
    return bits_of(word);
}

// The sums over ranks, in their order, of 8 numbers whose words begin at `first`, a multiple of 2, of each rank's.
template <int RANKS>
__device__ inline void receive_sums(float (&sums)[8], const Exchange& e, size_t first, uint32_t flag) {
    constexpr int AT_ONCE = RANKS < 4 ? RANKS : 4;  // ranks whose loads are under way together
#pragma unroll 1
    for (int base = 0; base < RANKS; base += AT_ONCE) {
        ulonglong2 words[AT_ONCE][4];
        Patience patience;
        bool complete = false;
        while (!complete) {
            complete = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const uint64_t* const from = e.place(e.rank, min(base + i, RANKS - 1), flag) + first;
#pragma unroll
                for (int j = 0; j < 4; ++j) words[i][j] = look_at_two(from + 2 * j);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) complete &= has_flag(words[i][j].x, flag) && has_flag(words[i][j].y, flag);
            }
            if (!complete) patience.spend();
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (base + i >= RANKS) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = number_of(words[i][j].x), high = number_of(words[i][j].y);
                sums[2 * j] = base + i == 0 ? low : __fadd_rn(sums[2 * j], low);
                sums[2 * j + 1] = base + i == 0 ? high : __fadd_rn(sums[2 * j + 1], high);
            }
        }
    }
}
