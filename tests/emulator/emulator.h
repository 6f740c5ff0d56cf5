// SPDX-License-Identifier: Apache-2.0
//
// CUDA's threads on one thread of the CPU. Each is a fiber that runs until it must wait; then the scheduler picks a runnable fiber at
// random. Asynchronous operations take effect at a random moment between the instruction that begins them and the wait that ends them. A
// deadlock ends the program and prints where each thread waits. The order depends only on what ran before, so a failure repeats.
// docs/kernels/emulator.md says what this finds, and what it cannot see.
#pragma once

#include <stdint.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace emulated {

struct Index {
    unsigned x, y, z;
};

} // namespace emulated

// Of the current thread.
extern emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

struct Thread;
using Waiters = std::vector<Thread *>;
using Task = std::function<void()>;

// Operations that a thread began and has not waited for, in order. A group ends with a commit.
struct Queue {
    struct Entry {
        int group;
        Task task;
    };
    std::deque<Entry> entries;
    int group = 0; // that is open
    bool listed = false;
};

// A barrier of threads: bar.sync, or a cluster's.
struct Barrier {
    unsigned count = 0, threads = 0, phase = 0;
    bool any[2] = {}; // whether the predicate was true in any thread: of this phase, and of the one before
    Waiters waiters;
};

// Products of a warpgroup, which take effect once all four warps have issued them.
using Operands = std::array<uint64_t, 4>; // that the warps must agree on
struct Warpgroup {
    struct Product {
        int group;
        Operands operands;
        int issued = 0;
        Task rows[4]; // of each warp
    };
    std::deque<Product> products;
    unsigned done = 0;
    Waiters waiters;
    bool listed = false;
};

// Lanes that must execute one instruction together.
struct Meeting {
    const char *instruction;
    uint32_t mask, arrived;
    void *arguments[32];
    Waiters waiters;
};

struct Warp {
    unsigned index;
    Warpgroup *warpgroup;
    uint64_t priority;
    unsigned issued = 0; // products
    int group = 0;
    Waiters runnable;
    std::vector<Meeting> meetings; // of disjoint masks
    // Lanes that ask whether a phase has ended, and are answered together once no lane of the warp can run: as lanes side by side are.
    struct Question {
        Thread *thread;
        uint64_t *mbarrier;
        uint32_t parity;
    };
    std::vector<Question> questions;
};

struct Thread {
    void *stack_pointer;
    Warp *warp;
    struct Block *block;
    Index index;
    unsigned lane;
    const char *waits_at = nullptr;
    const uint64_t *mbarrier = nullptr; // that it waits for
    unsigned cluster_phase = 0;         // in which it arrived last
    Queue copies, stores, writes;       // writes: of stores that have read shared memory
};

// The device: its multiprocessors, each with one block, and the shared memory that a block may have.
constexpr int kMultiprocessors = 16, kMostSharedBytes = 227 * 1024;

// A block's shared memory: what is dynamic and, behind it, what is static.
constexpr unsigned kFirstByte = 4096, kStaticByte = 256 * 1024, kBlockBytes = 320 * 1024;

struct Block;
using Cluster = std::vector<std::unique_ptr<Block>>;

struct Block {
    Index index;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    Barrier barriers[16];
    unsigned alive;
    unsigned in_flight = 0; // copies to its shared memory
    unsigned char *shared;
    unsigned dynamic_bytes, static_bytes = 0;
    std::map<const void *, void *> statics;
    Cluster *cluster;
    Barrier *cluster_barrier;
};

extern Thread *current;

uint64_t random();

// Stops the program and says why and where each thread waits.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Runs a grid to its end, in clusters of `cluster` blocks.
void launch(Index grid, unsigned threads, unsigned shared_bytes, unsigned cluster, const Task &kernel);

void wait_in(Waiters &waiters, const char *place);
void wake(Waiters &waiters);
// A thread that polls calls this, so that other threads can run.
void yield(const char *place);

// Begins a copy to the block's shared memory.
void begin(Block &to, Task copy);
// Begins an operation behind those in the queue.
void begin(Queue &queue, Task task);
// Begins a store: read() reads shared memory and returns the write.
void begin_store(std::function<Task()> read);
// Ends all but the last `pending` groups.
void end(Queue &queue, int pending);
void end_stores();
// The warp's rows of a product.
void begin_product(const Operands &operands, Task rows);
void end_products(int pending);

// Arrives at a barrier of `threads` threads, waits there if `waits`, and returns whether the predicate was true in any of them.
bool arrive(Barrier &barrier, unsigned threads, bool waits, bool predicate);

// mbarriers
void barrier_init(uint64_t *barrier, uint32_t arrivals);
void barrier_arrive(uint64_t *barrier, uint32_t expected_bytes);
void barrier_complete(uint64_t *barrier, uint32_t bytes);
bool barrier_is_over(const uint64_t *barrier, uint32_t parity);
void barrier_wait(uint64_t *barrier, uint32_t parity);

unsigned alive_in(const Cluster &cluster); // threads that have not exited

// Shared memory: an address has the block's rank in its cluster above its low 24 bits.
void *dynamic_shared();
void *static_shared(const void *key, unsigned bytes); // key: of the variable
uint32_t shared_address(const void *p);
unsigned char *shared_at(uint32_t address, unsigned bytes, unsigned alignment);
Block &block_at(uint32_t address);

Meeting &find_meeting(const char *instruction, uint32_t mask);

// The last lane of the mask to arrive calls op(arguments), with the argument of each lane.
template <class Argument, class Op> void by_warp(const char *instruction, uint32_t mask, Argument &argument, const Op &op) {
    Meeting &meeting = find_meeting(instruction, mask);
    meeting.arguments[current->lane] = &argument;
    meeting.arrived |= 1u << current->lane;
    if (meeting.arrived != mask) return wait_in(meeting.waiters, instruction);
    Argument *arguments[32];
    for (int lane = 0; lane < 32; lane++) arguments[lane] = static_cast<Argument *>(meeting.arguments[lane]);
    meeting.arrived = 0;
    op(arguments);
    wake(meeting.waiters);
}

// The x of lane `source`, where there is such a lane.
template <class T> T shuffle(const char *instruction, uint32_t mask, T x, int source) {
    struct Exchange {
        T from, to;
        int source;
    } exchange = {x, x, source};
    by_warp(instruction, mask, exchange, [=](Exchange *const(&lanes)[32]) {
        for (int lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1)) continue;
            const int from = lanes[lane]->source;
            if (from < 0 || from > 31) continue;
            if (!(mask >> from & 1)) fail("%s of lanes %x reads lane %d", instruction, mask, from);
            lanes[lane]->to = lanes[from]->from;
        }
    });
    return exchange.to;
}

// The lanes' x, combined two at a time.
template <class T, class Combine> T reduce(const char *instruction, uint32_t mask, T x, const Combine &combine) {
    by_warp(instruction, mask, x, [&](auto &lanes) {
        const int first = __builtin_ctz(mask);
        T all = *lanes[first];
        for (int lane = first + 1; lane < 32; lane++)
            if (mask >> lane & 1) all = combine(all, *lanes[lane]);
        for (int lane = 0; lane < 32; lane++)
            if (mask >> lane & 1) *lanes[lane] = all;
    });
    return x;
}

} // namespace emulated
