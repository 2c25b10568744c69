// Runs the blocks of a launch one after the other, each thread of a block as a fiber.
#include "ptx.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <utility>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
namespace {

enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
enum Order { FORWARD, REVERSE, RANDOM };
constexpr long STACK = 1024 * 1024;  // kernels are compiled without optimisation
constexpr long GRAIN = 2;  // bytes per cell of the race detector

struct Copy {
  char* to;
  const char* from;  // null: zeros
  long bytes;
};

struct Fiber {
  State state;
  int line;  // of the barrier that it waits at
  unsigned warp_epoch;
  jmp_buf context;
  std::vector<std::vector<Copy>> copies;  // committed groups, then the open one
};

constexpr unsigned SEVERAL = ~0u;  // in place of a thread: several have read the cell

struct SharedArray {
  Memory memory = {nullptr, nullptr, 0, nullptr};
  std::vector<char> storage;
  std::vector<Cell> cells;

  void allocate(const char* name, long bytes) {
    storage.resize(bytes + 256);
    cells.assign(bytes / GRAIN + 1, Cell{});
    memory = {name, (char*)(((uintptr_t)storage.data() + 127) / 128 * 128), bytes, cells.data()};
    poison();
  }
  void poison() {
    if (memory.base) std::memset(memory.base, 0xff, memory.bytes);
  }
};

std::vector<Fiber> fibers;
char* stacks;  // memory is committed page by page when touched
std::vector<void*> operands;
SharedArray dynamic, static_arrays[64];
jmp_buf scheduler;
ucontext_t start_context;
unsigned current, block_epoch;
void (*kernel)(const Memory*);
const Memory* arguments;
char message[512];

void yield(State state) {
  fibers[current].state = state;
  if (_setjmp(fibers[current].context) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    kernel(arguments);
    yield(DONE);
  }
}

void resume(unsigned thread) {
  current = thread;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y,
               thread / (blockDim.x * blockDim.y)};
  fibers[thread].state = READY;
  if (_setjmp(scheduler) == 0) _longjmp(fibers[thread].context, 1);
}

void create_fibers(unsigned count) {
  fibers.resize(count);
  static long mapped = 0;
  if (mapped < count * STACK) {
    if (mapped) munmap(stacks, mapped);
    mapped = count * STACK;
    stacks = (char*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  for (unsigned i = 0; i < count; i++) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + i * STACK;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    current = i;
    // Run the new fiber just far enough to have a context that _longjmp can resume.
    makecontext(&context, +[] {
      if (_setjmp(fibers[current].context) == 0) setcontext(&start_context);
      fiber_main();
    }, 0);
    swapcontext(&start_context, &context);
  }
}

bool racing(const Access& earlier, unsigned thread) {
  if (earlier.thread == 0 || earlier.block_epoch != block_epoch || earlier.thread == thread + 1)
    return false;
  bool same_warp = earlier.thread != SEVERAL && (earlier.thread - 1) / 32 == thread / 32;
  return !same_warp || earlier.warp_epoch == fibers[thread].warp_epoch;
}

/// Releases barriers that everybody has reached; false if nothing can go on.
bool release(unsigned count) {
  bool moved = false;
  for (unsigned first = 0; first < count; first += 32) {
    unsigned last = first + 32 < count ? first + 32 : count, waiting = 0, done = 0;
    for (unsigned i = first; i < last; i++) {
      waiting += fibers[i].state == AT_WARP_BARRIER;
      done += fibers[i].state == DONE;
    }
    if (waiting == 0) continue;
    if (waiting + done < last - first) continue;
    for (unsigned i = first; i < last; i++) {
      if (fibers[i].state == AT_WARP_BARRIER) fibers[i].state = READY;
      fibers[i].warp_epoch++;
    }
    moved = true;
  }
  if (moved) return true;
  for (unsigned i = 0; i < count; i++) {
    if (fibers[i].state == AT_BLOCK_BARRIER && fibers[i].line == fibers[0].line) continue;
    if (fibers[i].state == DONE && fibers[0].state == DONE) continue;
    std::snprintf(message, sizeof message,
                  "barrier divergence in block (%u, %u, %u): thread 0 is %s %d, thread %u is %s %d",
                  blockIdx.x, blockIdx.y, blockIdx.z,
                  fibers[0].state == DONE ? "done, line" : "at a barrier in line", fibers[0].line,
                  i, fibers[i].state == DONE ? "done, line" : "at a barrier in line",
                  fibers[i].line);
    return false;
  }
  block_epoch++;
  for (unsigned i = 0; i < count; i++) fibers[i].state = READY;
  return true;
}

bool all_done(unsigned count) {
  for (unsigned i = 0; i < count; i++)
    if (fibers[i].state != DONE) return false;
  return true;
}

void run_block(unsigned count, Order order, unsigned& seed, std::vector<unsigned>& turn) {
  block_epoch++;
  dynamic.poison();
  for (auto& array : static_arrays) array.poison();
  for (unsigned i = 0; i < count; i++) {
    fibers[i].state = READY;
    fibers[i].line = 0;
    fibers[i].copies.assign(1, {});
  }
  for (;;) {
    if (order == RANDOM)
      for (unsigned i = count - 1; i > 0; i--) {
        seed = seed * 1664525u + 1013904223u;
        std::swap(turn[i], turn[(seed >> 8) % (i + 1)]);
      }
    for (unsigned i = 0; i < count; i++) {
      if (fibers[turn[i]].state == READY) resume(turn[i]);
      if (message[0]) return;
    }
    if (all_done(count) || !release(count)) return;
  }
}

}  // namespace

void fault(const char* what, const Memory& memory, long offset, long bytes) {
  std::snprintf(message, sizeof message,
                "%s: %ld bytes at byte %ld of %s, which has %ld bytes "
                "(block (%u, %u, %u), thread (%u, %u, %u))",
                what, bytes, offset, memory.name, memory.bytes, blockIdx.x, blockIdx.y,
                blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  _longjmp(scheduler, 1);
}

void block_barrier(int line) {
  fibers[current].line = line;
  yield(AT_BLOCK_BARRIER);
}

void warp_barrier() { yield(AT_WARP_BARRIER); }

void note_shared(const Memory& memory, const char* at, long bytes, bool write) {
  long first = (at - memory.base) / GRAIN, last = (at - memory.base + bytes - 1) / GRAIN;
  Access now = {block_epoch, fibers[current].warp_epoch, current + 1};
  for (long i = first; i <= last; i++) {
    Cell& cell = memory.cells[i];
    if (racing(cell.write, current) || (write && racing(cell.read, current)))
      fault(write ? "race (write)" : "race (read)", memory, at - memory.base, bytes);
    if (write) {
      cell.write = now;
    } else {
      bool other = cell.read.block_epoch == block_epoch && cell.read.thread != 0 &&
                   cell.read.thread != current + 1;
      cell.read = now;
      if (other) cell.read.thread = SEVERAL;
    }
  }
}

Memory& dynamic_shared() { return dynamic.memory; }

Memory& static_shared(int index, const char* name, long bytes) {
  SharedArray& array = static_arrays[index];
  if (array.memory.base == nullptr) array.allocate(name, bytes);
  return array.memory;
}

void** exchange(void* operand) {
  operands[current] = operand;
  warp_barrier();
  return &operands[current / 32 * 32];
}

void copy_async(char* to, const char* from, long bytes) {
  fibers[current].copies.back().push_back({to, from, bytes});
}

void commit_copies() { fibers[current].copies.emplace_back(); }

void wait_copies(int groups_left) {
  auto& copies = fibers[current].copies;
  while ((int)copies.size() - 1 > groups_left) {
    for (const Copy& copy : copies.front()) {
      note_shared(dynamic.memory, copy.to, copy.bytes, true);
      if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
      else std::memset(copy.to, 0, copy.bytes);
    }
    copies.erase(copies.begin());
  }
}

}  // namespace emu

/// Runs one launch. Returns "" or what went wrong.
extern "C" const char* emu_launch(void (*body)(const emu::Memory*), const emu::Memory* args,
                                  const unsigned* grid, const unsigned* block, long shared_bytes,
                                  int order, unsigned seed) {
  using namespace emu;
  kernel = body;
  arguments = args;
  message[0] = 0;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  unsigned count = block[0] * block[1] * block[2];
  dynamic.allocate("dynamic shared memory", shared_bytes);
  for (auto& array : static_arrays) array = SharedArray();
  operands.assign((count + 31) / 32 * 32, nullptr);
  block_epoch = 0;
  create_fibers(count);
  std::vector<unsigned> turn(count);
  for (unsigned i = 0; i < count; i++) turn[i] = order == REVERSE ? count - 1 - i : i;
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_block(count, (Order)order, seed, turn);
        if (message[0]) return message;
      }
  return message;
}
