// As much of CUDA as the kernels use, on the host: every thread of a block is a fiber that runs until it meets the
// others of its warp or of its block. Blocks run one after the other. Include it before a kernel's header.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

namespace on_host {

struct Index {
  uint32_t x;
};

constexpr int kWarpSize = 32;
constexpr size_t kStack = 128 << 10;

// A meeting of a fixed number of threads, again and again.
struct Meeting {
  int expected;
  int arrived = 0;
  int round = 0;
};

struct Fiber {
  jmp_buf where;
  std::vector<char> stack;
  bool done = true;
};

struct Warp {
  Meeting meeting{kWarpSize};
  unsigned char values[kWarpSize][8];
};

struct Block {
  std::function<void()> body;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting meeting{0};
  jmp_buf scheduler;
};

inline Block block;

}  // namespace on_host

inline on_host::Index threadIdx;
inline on_host::Index blockIdx;
inline on_host::Index gridDim;

namespace on_host {

inline void pause() {
  const uint32_t me = threadIdx.x;
  if (_setjmp(block.fibers[me].where) == 0) {
    _longjmp(block.scheduler, 1);
  }
}

inline void meet(Meeting& meeting) {
  const int round = meeting.round;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.round;
  }
  while (meeting.round == round) {
    pause();
  }
}

inline void fiber_main() {
  pause();  // until the block begins
  block.body();
  block.fibers[threadIdx.x].done = true;
  _longjmp(block.scheduler, 1);
}

inline void start(uint32_t thread) {
  Fiber& fiber = block.fibers[thread];
  fiber.stack.resize(kStack);
  fiber.done = false;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.data();
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  threadIdx.x = thread;
  if (_setjmp(block.scheduler) == 0) {
    setcontext(&context);
  }
}

// Runs a kernel, `body`, with so many blocks and threads. Aborts where the threads wait for one another for ever.
inline void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& body) {
  block.body = body;
  block.fibers.resize(threads);
  gridDim.x = blocks;
  for (volatile uint32_t index = 0; index < blocks; ++index) {
    blockIdx.x = index;
    block.warps.assign(threads / kWarpSize, Warp{});
    block.meeting = Meeting{static_cast<int>(threads)};
    for (uint32_t thread = 0; thread < threads; ++thread) {
      start(thread);
    }
    volatile int turns = 0;
    for (volatile bool running = true; running;) {
      running = false;
      if (++turns > 1000000) {
        std::abort();
      }
      for (volatile uint32_t thread = 0; thread < threads; ++thread) {
        if (!block.fibers[thread].done) {
          running = true;
          threadIdx.x = thread;
          if (_setjmp(block.scheduler) == 0) {
            _longjmp(block.fibers[thread].where, 1);
          }
        }
      }
    }
  }
}

inline Warp& warp() { return block.warps[threadIdx.x / kWarpSize]; }

// Every lane of the warp gives a value, and all see all of them until they meet again.
template <class T>
inline void give(T value) {
  static_assert(sizeof(T) <= 8, "a lane gives 8 bytes at most");
  std::memcpy(warp().values[threadIdx.x % kWarpSize], &value, sizeof value);
  meet(warp().meeting);
}

template <class T>
inline T given_by(uint32_t lane) {
  T value;
  std::memcpy(&value, warp().values[lane], sizeof value);
  return value;
}

}  // namespace on_host

inline void __syncthreads() { on_host::meet(on_host::block.meeting); }

template <class T>
inline T __shfl_xor_sync(uint32_t /*mask*/, T value, int distance) {
  on_host::give(value);
  const T got = on_host::given_by<T>(threadIdx.x % on_host::kWarpSize ^ static_cast<uint32_t>(distance));
  on_host::meet(on_host::warp().meeting);
  return got;
}

inline bool __any_sync(uint32_t /*mask*/, bool value) {
  on_host::give(value);
  bool any = false;
  for (int lane = 0; lane < on_host::kWarpSize; ++lane) {
    any |= on_host::given_by<bool>(lane);
  }
  on_host::meet(on_host::warp().meeting);
  return any;
}

template <class T>
inline T atomicMin(T* at, T value) {
  const T before = *at;
  *at = value < before ? value : before;
  return before;
}
