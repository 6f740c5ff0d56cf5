// SPDX-License-Identifier: Apache-2.0
//
// The scheduler and what threads wait for. x86-64 alone: fibers are switched by its registers.

#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <string>

emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

Thread *current;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr long kIdlePolls = 10000, kFutilePolls = 4000000; // in a row, while nothing else goes on

// Blocks of a cluster, their memory and their threads' stacks, which serve one cluster after another.
struct Residence {
    Cluster blocks;
    Barrier barrier;
    std::vector<unsigned char *> shared;
    std::vector<char *> stacks;
};

std::vector<Residence> residences;
void *launcher; // stack pointer of the thread that launches
const Task *kernel;
std::vector<Warp *> active; // with threads that need not wait
// Operations in flight are copies to a block, which have no order, entries of queues, and products of warpgroups.
struct Copy {
    Block *to;
    Task task;
};
std::vector<Copy> copies;
std::vector<Queue *> queues;
std::vector<Warpgroup *> multiplying;
std::map<const uint64_t *, Waiters> at_mbarriers;
Warp *favourite; // the warp that ran last
// How a launch chooses. Of 256: how often the same warp runs again, how often an operation is done between two threads.
unsigned stickiness, eagerness;
bool has_priorities; // the warp that may run with the highest one does, so that some lag far behind
long polls;
uint64_t state = 1;

extern "C" void emulated_switch(void **from, void *to);
asm(R"(
.globl emulated_switch
emulated_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

template <class T> void remove(std::vector<T> &from, size_t i) {
    from[i] = std::move(from.back());
    from.pop_back();
}

template <class T> size_t among(const std::vector<T> &items) { return random() % items.size(); }

bool is_issued(const Warpgroup &warpgroup) { return !warpgroup.products.empty() && warpgroup.products.front().issued == 4; }

void run(const Task &task) {
    Thread *self = current;
    current = nullptr;
    task();
    current = self;
    polls = 0;
}

void do_product(Warpgroup &warpgroup) {
    const auto product = std::move(warpgroup.products.front());
    warpgroup.products.pop_front();
    warpgroup.done++;
    for (const Task &rows : product.rows) run(rows);
    wake(warpgroup.waiters);
}

void do_first(Queue &queue) {
    const Task task = std::move(queue.entries.front().task);
    queue.entries.pop_front();
    run(task);
}

// One operation in flight; false if there is none.
bool do_something() {
    while (size_t all = copies.size() + queues.size() + multiplying.size()) {
        size_t i = random() % all;
        if (i < copies.size()) {
            const Copy copy = std::move(copies[i]);
            remove(copies, i);
            copy.to->in_flight--;
            return run(copy.task), true;
        }
        i -= copies.size();
        if (i < queues.size()) {
            Queue &queue = *queues[i];
            if (!queue.entries.empty()) return do_first(queue), true;
            queue.listed = false;
            remove(queues, i);
            continue;
        }
        i -= queues.size();
        Warpgroup &warpgroup = *multiplying[i];
        if (is_issued(warpgroup)) return do_product(warpgroup), true;
        warpgroup.listed = false;
        remove(multiplying, i);
    }
    return false;
}

void make_runnable(Thread *thread) {
    if (thread->warp->runnable.empty()) active.push_back(thread->warp);
    thread->warp->runnable.push_back(thread);
}

// The stack pointer of what runs next: a thread or, where none can run, the launcher.
void *choose_next() {
    while (random() % 256 < eagerness && do_something()) {
    }
    while (active.empty())
        if (!do_something()) return current = nullptr, launcher;
    const bool again = favourite && !favourite->runnable.empty() && random() % 256 < stickiness;
    if (!again) favourite = active[among(active)];
    if (has_priorities) {
        if (random() % 256 == 0) favourite->priority = random();
        favourite = *std::max_element(active.begin(), active.end(), [](Warp *a, Warp *b) { return a->priority < b->priority; });
    }
    Waiters &runnable = favourite->runnable;
    const size_t i = among(runnable);
    current = runnable[i];
    remove(runnable, i);
    if (runnable.empty()) remove(active, std::find(active.begin(), active.end(), favourite) - active.begin());
    threadIdx = current->index;
    blockIdx = current->block->index;
    return current->stack_pointer;
}

// Answers the lanes' questions, once no lane of the warp can run.
void answer(Warp &warp) {
    if (!warp.runnable.empty()) return;
    for (const Warp::Question &question : warp.questions)
        if (barrier_is_over(question.mbarrier, question.parity))
            make_runnable(question.thread);
        else
            at_mbarriers[question.mbarrier].push_back(question.thread);
    warp.questions.clear();
}

// The current thread stays at this place while others run.
void pass_on(const char *place) {
    Thread *self = current;
    self->waits_at = place;
    answer(*self->warp);
    void *next = choose_next();
    if (current != self) emulated_switch(&self->stack_pointer, next);
    self->waits_at = nullptr;
}

void end_phase(Barrier &barrier) {
    barrier.phase++;
    barrier.count = 0;
    barrier.any[barrier.phase % 2] = false;
    wake(barrier.waiters);
}

// The barrier is one of `threads` threads from now on, since others have exited.
void expect(Barrier &barrier, unsigned threads) {
    barrier.threads = threads;
    if (barrier.count && barrier.count == threads) end_phase(barrier);
}

void check_at_exit(const Block &block) {
    if (block.in_flight) fail("block %u exits before copies to it are done", block.index.x);
    for (const Thread &thread : block.threads)
        if (!thread.copies.entries.empty() || !thread.stores.entries.empty())
            fail("block %u exits before its copies are done", block.index.x);
    for (const Warpgroup &warpgroup : block.warpgroups)
        if (!warpgroup.products.empty()) fail("block %u exits before its products are done", block.index.x);
    for (const Barrier &barrier : block.barriers)
        if (barrier.count) fail("block %u exits while %u threads have arrived at a barrier", block.index.x, barrier.count);
}

// A thread's life. Barriers of all threads do not wait for those that have exited.
void run_thread() {
    (*kernel)();
    Block &block = *current->block;
    for (const Meeting &meeting : current->warp->meetings)
        if (meeting.arrived && meeting.mask >> current->lane & 1) fail("a lane exits while others wait for it at %s", meeting.instruction);
    polls = 0;
    if (!--block.alive) check_at_exit(block);
    const unsigned alive = alive_in(*block.cluster);
    expect(block.barriers[0], block.alive);
    expect(*block.cluster_barrier, alive);
    answer(*current->warp);
    void *unused, *next = launcher;
    if (alive)
        next = choose_next();
    else
        current = nullptr; // the launcher begins another cluster
    emulated_switch(&unused, next);
}

void *new_stack() {
    void *stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE)) abort(); // a page that no stack may reach
    return stack;
}

void begin_cluster(Residence &residence, unsigned first, unsigned cluster, unsigned threads, unsigned shared_bytes) {
    residence.barrier = {};
    for (unsigned rank = 0; rank < cluster; rank++) {
        if (residence.shared.size() == rank) residence.shared.push_back(static_cast<unsigned char *>(aligned_alloc(4096, kBlockBytes)));
        Block &block = *residence.blocks.emplace_back(std::make_unique<Block>());
        const unsigned n = first + rank;
        block.index = {n % gridDim.x, n / gridDim.x % gridDim.y, n / gridDim.x / gridDim.y};
        block.alive = threads;
        block.dynamic_bytes = shared_bytes;
        block.shared = residence.shared[rank];
        memset(block.shared, std::array{0x00, 0x55, 0x7f, 0xff}[random() % 4], kBlockBytes); // what earlier kernels left
        block.cluster = &residence.blocks;
        block.cluster_barrier = &residence.barrier;
        block.threads.resize(threads);
        block.warps.resize((threads + 31) / 32);
        block.warpgroups.resize((threads + 127) / 128);
        for (unsigned w = 0; w < block.warps.size(); w++) {
            block.warps[w].index = w;
            block.warps[w].warpgroup = &block.warpgroups[w / 4];
            block.warps[w].priority = random();
        }
        for (unsigned t = 0; t < threads; t++) {
            if (residence.stacks.size() == rank * threads + t) residence.stacks.push_back(static_cast<char *>(new_stack()));
            void **top = reinterpret_cast<void **>(residence.stacks[rank * threads + t] + kStackBytes) - 4;
            *top = reinterpret_cast<void *>(run_thread); // emulated_switch returns to it
            Thread &thread = block.threads[t];
            thread.stack_pointer = top - 6; // below it six registers
            thread.warp = &block.warps[t / 32];
            thread.block = &block;
            thread.index = {t, 0, 0};
            thread.lane = t % 32;
            make_runnable(&thread);
        }
    }
}

void end_cluster(Residence &residence) {
    for (const auto &block : residence.blocks)
        for (Thread &thread : block->threads) end(thread.writes, -1);
    std::erase_if(queues, [](Queue *queue) { return !(queue->listed = !queue->entries.empty()); });
    std::erase_if(multiplying, [](Warpgroup *warpgroup) { return !(warpgroup->listed = !warpgroup->products.empty()); });
    favourite = nullptr;
    residence.blocks.clear();
}

// A word of an mbarrier.
struct Word {
    uint64_t phase : 1, expected : 20, pending : 20;
    int64_t bytes : 23; // announced less arrived
};
static_assert(sizeof(Word) == sizeof(uint64_t));

void end_mbarrier_phase(uint64_t *barrier) {
    auto &word = *reinterpret_cast<Word *>(barrier);
    polls = 0;
    if (word.pending || word.bytes) return;
    word.phase ^= 1;
    word.pending = word.expected;
    const auto waiters = at_mbarriers.find(barrier);
    if (waiters == at_mbarriers.end()) return;
    wake(waiters->second);
    at_mbarriers.erase(waiters);
}

} // namespace

unsigned alive_in(const Cluster &cluster) {
    unsigned alive = 0;
    for (const auto &block : cluster) alive += block->alive;
    return alive;
}

// xorshift64
uint64_t random() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state >> 8;
}

void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("emulated device: ", stdout);
    vprintf(format, values);
    if (current) printf(" (block %u, thread %u)", current->block->index.x, current->index.x);
    puts("");
    std::map<std::string, int> places;
    for (const Residence &residence : residences)
        for (const auto &block : residence.blocks)
            for (const Thread &thread : block->threads) {
                if (!thread.waits_at) continue;
                std::string place =
                        "block " + std::to_string(block->index.x) + ", warp " + std::to_string(thread.warp->index) + ": " + thread.waits_at;
                if (thread.mbarrier)
                    place += " at " + std::to_string(reinterpret_cast<const unsigned char *>(thread.mbarrier) - block->shared - kFirstByte);
                places[place]++;
            }
    for (const auto &[place, count] : places) printf("  %s, %d threads\n", place.c_str(), count);
    fflush(stdout);
    abort();
}

void wait_in(Waiters &waiters, const char *place) {
    waiters.push_back(current);
    pass_on(place);
}

void wake(Waiters &waiters) {
    polls = 0;
    for (Thread *thread : waiters) make_runnable(thread);
    waiters.clear();
}

void yield(const char *place) {
    if (++polls > kIdlePolls) do_something(); // where operations happen late, while others can run
    if (polls > kFutilePolls) fail("nothing goes on but polls of %s", place);
    answer(*current->warp);
    make_runnable(current);
    pass_on(place);
}

void begin(Block &to, Task task) {
    to.in_flight++;
    copies.push_back({&to, std::move(task)});
}

void begin(Queue &queue, Task task) {
    queue.entries.push_back({queue.group, std::move(task)});
    if (!queue.listed) queues.push_back(&queue);
    queue.listed = true;
}

void begin_store(std::function<Task()> read) {
    begin(current->stores, [read = std::move(read), &writes = current->writes] { begin(writes, read()); });
}

void end(Queue &queue, int pending) {
    while (!queue.entries.empty() && queue.entries.front().group < queue.group - pending) do_first(queue);
}

void end_stores() {
    end(current->stores, 0);
    end(current->writes, -1);
}

void begin_product(const Operands &operands, Task rows) {
    Warp &warp = *current->warp;
    Warpgroup &warpgroup = *warp.warpgroup;
    const size_t at = warp.issued++ - warpgroup.done;
    if (warpgroup.products.size() == at) warpgroup.products.push_back({warp.group, operands, 0, {}});
    Warpgroup::Product &product = warpgroup.products[at];
    if (product.group != warp.group || product.operands != operands) fail("warps of a warpgroup issue different products");
    product.rows[warp.index % 4] = std::move(rows);
    if (++product.issued < 4) return;
    wake(warpgroup.waiters);
    if (!warpgroup.listed) multiplying.push_back(&warpgroup);
    warpgroup.listed = true;
}

void end_products(int pending) {
    Warpgroup &warpgroup = *current->warp->warpgroup;
    const int end = current->warp->group - pending;
    while (!warpgroup.products.empty() && warpgroup.products.front().group < end)
        if (is_issued(warpgroup))
            do_product(warpgroup);
        else
            wait_in(warpgroup.waiters, "wgmma.wait_group");
}

bool arrive(Barrier &barrier, unsigned threads, bool waits, bool predicate) {
    if (!barrier.count) barrier.threads = threads;
    if (barrier.threads != threads || barrier.count == threads)
        fail("%u threads are at a barrier of %u, and one for %u comes", barrier.count, barrier.threads, threads);
    bool &any = barrier.any[barrier.phase % 2];
    any |= predicate;
    if (++barrier.count == threads)
        end_phase(barrier);
    else if (waits)
        wait_in(barrier.waiters, "a barrier");
    return any;
}

void barrier_init(uint64_t *barrier, uint32_t arrivals) {
    Word word = {};
    word.expected = word.pending = arrivals;
    memcpy(barrier, &word, sizeof word);
}

void barrier_arrive(uint64_t *barrier, uint32_t expected_bytes) {
    auto &word = *reinterpret_cast<Word *>(barrier);
    if (!word.pending) fail("an mbarrier gets more arrivals than it expects");
    word.bytes += expected_bytes;
    word.pending--;
    end_mbarrier_phase(barrier);
}

void barrier_complete(uint64_t *barrier, uint32_t bytes) {
    reinterpret_cast<Word *>(barrier)->bytes -= bytes;
    end_mbarrier_phase(barrier);
}

bool barrier_is_over(const uint64_t *barrier, uint32_t parity) { return reinterpret_cast<const Word *>(barrier)->phase != parity; }

void barrier_wait(uint64_t *barrier, uint32_t parity) {
    current->mbarrier = barrier;
    current->warp->questions.push_back({current, barrier, parity});
    pass_on("an mbarrier");
    current->mbarrier = nullptr;
}

Meeting &find_meeting(const char *instruction, uint32_t mask) {
    std::vector<Meeting> &meetings = current->warp->meetings;
    for (Meeting &meeting : meetings) {
        if (!meeting.arrived || !(meeting.mask & mask)) continue;
        if (meeting.instruction != instruction || meeting.mask != mask || !(mask >> current->lane & 1))
            fail("%s of lanes %x meets %s of lanes %x", instruction, mask, meeting.instruction, meeting.mask);
        return meeting;
    }
    if (!(mask >> current->lane & 1)) fail("%s of lanes %x is executed by lane %u", instruction, mask, current->lane);
    const auto free = std::find_if(meetings.begin(), meetings.end(), [](const Meeting &meeting) { return !meeting.arrived; });
    Meeting &meeting = free == meetings.end() ? meetings.emplace_back() : *free;
    meeting.instruction = instruction;
    meeting.mask = mask;
    return meeting;
}

void launch(Index size, unsigned threads, unsigned shared_bytes, unsigned cluster, const Task &body) {
    const unsigned blocks = size.x * size.y * size.z;
    if (!blocks || !threads || threads > 1024 || size.x % cluster || size.y > 65535 || size.z > 65535 || shared_bytes > kMostSharedBytes)
        fail("a launch of %u x %u x %u blocks of %u threads and %u bytes, in clusters of %u", size.x, size.y, size.z, threads, shared_bytes,
                cluster);
    gridDim = size;
    blockDim = {threads, 1, 1};
    kernel = &body;
    stickiness = std::array{0, 128, 230, 250}[random() % 4];
    eagerness = std::array{0, 5, 80, 256}[random() % 4];
    has_priorities = random() % 2;
    const unsigned clusters = blocks / cluster, resident = std::min(clusters, std::max(kMultiprocessors / cluster, 1u));
    residences.resize(std::max<size_t>(residences.size(), resident));
    unsigned begun = 0, ended = 0;
    while (begun < resident) begin_cluster(residences[begun], begun * cluster, cluster, threads, shared_bytes), begun++;
    while (ended < clusters) {
        polls = 0;
        const unsigned before = ended;
        emulated_switch(&launcher, choose_next());
        for (Residence &residence : residences) {
            if (residence.blocks.empty() || alive_in(residence.blocks)) continue;
            end_cluster(residence);
            ended++;
            if (begun < clusters) begin_cluster(residence, begun * cluster, cluster, threads, shared_bytes), begun++;
        }
        if (ended == before) fail("all threads wait");
    }
}

} // namespace emulated
